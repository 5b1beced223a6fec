"""Safetensors files with a JSON header: written atomically, checked when read."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gangline.collectives.errors import DiskFullError

_HEADER = "gangline"


def write_aside(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file and flush it to disk; the caller then renames it to its final name.

    Args:
        path: temporary name of the file; its folder is created.
        tensors: tensors on any device; tensors that share memory are each written in full.
        header: data for the file's metadata that JSON can hold.

    Raises:
        OSError, SafetensorError: if the file cannot be written; see `removed_on_error`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    on_host = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    save_file(on_host, path, metadata={_HEADER: json.dumps(header)})
    path.chmod(stat.S_IMODE(mode))  # safetensors writes a file of mode 600, whatever the umask
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically: ``path`` holds the old content or the new.

    Raises:
        OSError: if it cannot be written; DiskFullError if it does not fit on the disk.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with removed_on_error(temporary, path, sum(tensor.nbytes for tensor in tensors.values())):
        write_aside(temporary, tensors, header)
        temporary.replace(path)
    flush_folder(path.parent)


@contextmanager
def removed_on_error(temporary: Path, path: Path, nbytes: int) -> Iterator[None]:
    """Remove a temporary file if the block that writes it fails.

    Args:
        temporary: temporary name of the file.
        path: final name, for the error.
        nbytes: number of bytes of its data.

    Raises:
        OSError: if it cannot be written; DiskFullError if there was no space for it.
    """
    try:
        yield
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        number = error.errno if isinstance(error, OSError) else _os_error(error)
        if number not in (errno.ENOSPC, errno.EDQUOT):
            if number is None or isinstance(error, OSError):
                raise
            raise OSError(number, f"{path} cannot be written: {os.strerror(number)}") from error
        free = shutil.disk_usage(path.parent).free
        raise DiskFullError(
            f"{path} cannot be written: its data have {nbytes} bytes, and the disk has {free} bytes free "
            f"({os.strerror(number)})"
        ) from error


def _os_error(error: BaseException) -> int | None:
    """Return the error number in a text of safetensors, which raises no OSError."""
    found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    return int(found[1]) if found else None


def flush_folder(folder: Path) -> None:
    """Flush a folder to disk, so that files renamed in it survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that cannot do it
            raise
    finally:
        os.close(descriptor)


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors (on the host) and the header of a file that gangline wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or gangline did not write it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    if _HEADER not in metadata:
        raise ValueError(
            f"{path} was not written by gangline; expected a file of save_checkpoint or save_optimizer_states"
        )
    return tensors, json.loads(metadata[_HEADER])
