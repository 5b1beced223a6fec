"""Files of images: found and read in a folder, on a local path or behind any URL that fsspec knows."""

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
_SHORTEST_SECRET = 4  # letters; replacing shorter ones would only make a text unreadable


def is_url(root: str | Path) -> bool:
    """Whether fsspec is to open it, such as ``s3://bucket/train`` or ``zip://train::images.zip``."""
    return isinstance(root, str) and "://" in root


class Tree:
    """A folder with what lies under it: images, and its sub-folders."""

    def __init__(self, root: str | Path) -> None:
        """List a folder.

        Raises:
            FileNotFoundError: no such folder or bucket.
            ValueError: a URL that nothing here can open.
            RuntimeError: the store that a URL names does not let it be listed, such as for want of credentials.
        """
        self.root: str | Path = root if is_url(root) else Path(root)
        self.shown = without_secrets(str(root))
        """The root as messages name it."""
        names, folders = _listed_url(str(root), self.shown) if is_url(root) else _listed_path(Path(root))
        self.names = sorted((name for name in names if _is_image(name)), key=lambda name: name.split("/"))
        """Images, as paths relative to the root with slashes, in order."""
        inside = {name.split("/")[0] for name in names if "/" in name} | folders
        self.folders = sorted(name for name in inside if name[0] != ".")
        """Sub-folders directly under the root, in order."""

    def file(self, name: str) -> str | Path:
        """A path, or for a URL the URL as messages may name it."""
        return self.root / name if isinstance(self.root, Path) else f"{self.shown.rstrip('/')}/{name}"


def _is_image(name: str) -> bool:
    last = name.rpartition("/")[2]
    return not last.startswith(".") and os.path.splitext(last)[1].lower() in IMAGE_SUFFIXES


def _listed_path(root: Path) -> tuple[list[str], set[str]]:
    if not root.is_dir():
        raise FileNotFoundError(f"image folder {root} is not there")
    with os.scandir(root) as entries:
        top = sorted(entries, key=lambda entry: entry.name)
        folders = {entry.name for entry in top if entry.is_dir()}
        names = [entry.name for entry in top if entry.is_file()]
    for folder in sorted(folders):
        for place, _, files in os.walk(root / folder):
            prefix = os.path.relpath(place, root).replace(os.sep, "/")
            names += [f"{prefix}/{name}" for name in files]
    return names, folders


def _listed_url(url: str, shown: str) -> tuple[list[str], set[str]]:
    try:
        files, path = _opened(url)
        found: dict[str, Any] = files.find(path, withdirs=True, detail=True)
        is_there = bool(found) or files.isdir(path)
    except FileNotFoundError:
        is_there, found = False, {}
    except Exception as error:  # noqa: BLE001 - stores raise what they like; it is told, less what is secret in it
        raise _store_error(shown, without_secrets(str(error), url), error) from None
    if not is_there:
        raise FileNotFoundError(f"image folder {shown} is not there: no such bucket or folder, or nothing is in it")
    names, folders = [], set()
    for name, entry in found.items():
        inside = _relative(name, path)
        if entry["type"] == "file" and inside:
            names.append(inside)
        elif inside and "/" not in inside:
            folders.add(inside)
    return names, folders


def _relative(name: str, path: str) -> str:
    return name.strip("/").removeprefix(path.strip("/")).strip("/")


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, which fsspec keeps and opens once a process, and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    files, path = url_to_fs(url)
    return files, str(path)


def _store_error(shown: str, text: str, error: Exception) -> Exception:
    text = text or "no reason given"
    if isinstance(error, ImportError):
        return ValueError(f"image folder {shown} cannot be opened: {text} (s3:// needs `pip install gangline[s3]`)")
    if isinstance(error, ValueError):
        return ValueError(f"image folder {shown} cannot be opened: {text}")
    return RuntimeError(
        f"image folder {shown} cannot be listed: {type(error).__name__}: {text}; see that the credentials in the "
        "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE; AWS_ENDPOINT_URL) may read it"
    )


def read(root: str | Path, names: Sequence[str]) -> list[bytes | Path | Exception]:
    """What `PIL.Image.open` takes for each file: paths as they are, and the bytes behind URLs, fetched side by side.

    A file that is gone gives an error in its place.

    Raises:
        RuntimeError: the store did not give a file; the message has no secrets.
    """
    if isinstance(root, Path):
        return [root / name for name in names]
    shown = without_secrets(root).rstrip("/")
    try:
        files, path = _opened(root)
        paths = [f"{path.rstrip('/')}/{name}" if path.strip("/") else name for name in names]
        contents: dict[str, bytes | Exception] = files.cat(paths, on_error="return")
        # Some file systems answer by names of their own, in the order of the question.
        found = [contents[p] for p in paths] if all(p in contents for p in paths) else list(contents.values())
    except FileNotFoundError as error:
        return [error] * len(names)
    except Exception as error:  # noqa: BLE001 - as in the listing
        found = [error] * len(names)
    answers: list[bytes | Path | Exception] = []
    for name, answer in zip(names, found, strict=True):
        if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
            text = without_secrets(str(answer), root) or "no reason given"
            raise RuntimeError(f"image {shown}/{name} cannot be fetched: {type(answer).__name__}: {text}")
        answers.append(answer)
    return answers


def without_secrets(text: str, url: str = "") -> str:
    """The text without what is secret in it.

    That is users and passwords in URLs, those of ``url`` wherever they stand, signatures and tokens among the arguments
    of URLs, and what environment variables hold whose names speak of secrets, tokens, passwords or keys.
    """
    text = re.sub(r"://[^/@\s]*@", "://***@", text)
    text = re.sub(rf"(?i)\b({_URL_ARGUMENTS})=[^&\s]+", r"\1=***", text)
    secrets = [value for name, value in os.environ.items() if _SECRET_NAMES.search(name)]
    for user in re.findall(r"://([^/@\s]*)@", url):
        secrets += user.split(":", 1)
    for secret in sorted((s for s in secrets if len(s) >= _SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
    return text
