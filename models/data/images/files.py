"""Image files: listed and read from a local folder or from any URL that fsspec supports."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SECRET_NAMES = re.compile("SECRET|TOKEN|PASSWORD|ACCESS_KEY|API_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)
_URL_ARGUMENTS = "x-amz-signature|x-amz-credential|x-amz-security-token|signature|sig|token|password|secret"
_SHORTEST_SECRET = 4  # characters; replacing shorter strings would only garble the message


def is_url(root: str | Path) -> bool:
    """Return True for a URL for fsspec, such as ``s3://bucket/train`` or ``zip://train::images.zip``."""
    return isinstance(root, str) and "://" in root


class FolderListing:
    """Image files under a folder, and its direct sub-folders."""

    def __init__(self, root: str | Path) -> None:
        """List a folder; errors as of `Images`, without secrets."""
        self.root: str | Path = root if is_url(root) else Path(root)
        self.shown = without_secrets(str(root))
        """The root for messages, without secrets."""
        names, folders = _list_url(str(root), self.shown) if is_url(root) else _list_path(Path(root))
        self.names = sorted((name for name in names if _is_image(name)), key=lambda name: name.split("/"))
        """Sorted paths of the images, relative to the root, with slashes."""
        inside = {name.split("/")[0] for name in names if "/" in name} | folders
        self.folders = sorted(name for name in inside if name[0] != ".")
        """Sorted names of the sub-folders directly under the root."""

    def file(self, name: str) -> str | Path:
        """Return the path of a file, or its URL without secrets."""
        return self.root / name if isinstance(self.root, Path) else f"{self.shown.rstrip('/')}/{name}"


def _is_image(name: str) -> bool:
    last = name.rpartition("/")[2]
    return not last.startswith(".") and os.path.splitext(last)[1].lower() in IMAGE_SUFFIXES


def _list_path(root: Path) -> tuple[list[str], set[str]]:
    if not root.is_dir():
        raise FileNotFoundError(f"image folder {root} does not exist")
    with os.scandir(root) as entries:
        top = sorted(entries, key=lambda entry: entry.name)
        folders = {entry.name for entry in top if entry.is_dir()}
        names = [entry.name for entry in top if entry.is_file()]
    for folder in sorted(folders):
        for directory, _, files in os.walk(root / folder):
            prefix = os.path.relpath(directory, root).replace(os.sep, "/")
            names += [f"{prefix}/{name}" for name in files]
    return names, folders


def _list_url(url: str, shown: str) -> tuple[list[str], set[str]]:
    try:
        files, path = _open_store(url)
        found: dict[str, Any] = files.find(path, withdirs=True, detail=True)
        exists = bool(found) or files.isdir(path)
    except FileNotFoundError:
        exists, found = False, {}
    except Exception as error:  # noqa: BLE001  stores raise many types
        raise _store_error(shown, without_secrets(str(error), url), error) from None
    if not exists:
        raise FileNotFoundError(f"image folder {shown} does not exist: no such bucket or folder, or it is empty")
    names, folders = [], set()
    for name, entry in found.items():
        inside = name.strip("/").removeprefix(path.strip("/")).strip("/")
        if entry["type"] == "file" and inside:
            names.append(inside)
        elif inside and "/" not in inside:
            folders.add(inside)
    return names, folders


def _open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which fsspec caches per process, and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    files, path = url_to_fs(url)
    return files, str(path)


def _store_error(shown: str, text: str, error: Exception) -> Exception:
    text = text or "no reason given"
    if isinstance(error, ImportError):
        return ValueError(f"image folder {shown} cannot be opened: {text} (s3:// needs `pip install gangline[s3]`)")
    if isinstance(error, ValueError):
        return ValueError(f"image folder {shown} cannot be opened: {text}")
    hint = "check the address, and that the server lists the folder"
    if shown.startswith("s3"):
        hint = (
            "check that the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE; "
            "AWS_ENDPOINT_URL) permit reading"
        )
    return RuntimeError(f"image folder {shown} cannot be listed: {type(error).__name__}: {text}; {hint}")


def read(root: str | Path, names: Sequence[str]) -> list[bytes | Path | Exception]:
    """Return each file in a form for `PIL.Image.open`: a path, or the bytes behind a URL, fetched concurrently.

    A missing file is returned as a FileNotFoundError; other errors are a RuntimeError without secrets.
    """
    if isinstance(root, Path):
        return [root / name for name in names]
    shown = without_secrets(root).rstrip("/")
    try:
        files, path = _open_store(root)
        paths = [f"{path.rstrip('/')}/{name}" if path.strip("/") else name for name in names]
        contents: dict[str, bytes | Exception] = files.cat(paths, on_error="return")
        # Some file systems return other keys, in the order of the request.
        found: list[bytes | Path | Exception] = (
            [contents[p] for p in paths] if all(p in contents for p in paths) else list(contents.values())
        )
    except Exception as error:  # noqa: BLE001  stores raise many types
        found = [error] * len(names)
    for name, content in zip(names, found, strict=True):
        if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
            text = without_secrets(str(content), root) or "no reason given"
            raise RuntimeError(f"image {shown}/{name} cannot be fetched: {type(content).__name__}: {text}")
    return found


def without_secrets(text: str, url: str = "") -> str:
    """Return the text with secrets replaced by ``***``.

    Secrets are: users and passwords in URLs, and those of ``url`` anywhere in the text; signatures and tokens in URL
    arguments; the values of environment variables whose names contain SECRET, TOKEN, PASSWORD, ACCESS_KEY and the like.
    """
    text = re.sub(r"://[^/@\s]*@", "://***@", text)
    text = re.sub(rf"(?i)\b({_URL_ARGUMENTS})=[^&\s]+", r"\1=***", text)
    secrets = [value for name, value in os.environ.items() if _SECRET_NAMES.search(name)]
    for user in re.findall(r"://([^/@\s]*)@", url):
        secrets += user.split(":", 1)
    for secret in sorted((s for s in secrets if len(s) >= _SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
    return text
