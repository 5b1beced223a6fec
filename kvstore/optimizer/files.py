"""Safetensors files with a JSON header and a checksum: written atomically, checked when read."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gangline.collectives.host_files import opener
from gangline.collectives.liveness.process_state import kernel_identity
from gangline.kvstore.errors import DiskFullError
from gangline.kvstore.group.serialization import bytes_of

HEADER, CHECKSUM = "gangline", "gangline_checksum"
"""Entries of a file's metadata."""
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names of dtypes in safetensors files."""


def write_aside(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file and flush it to disk; the caller then renames it to its final name.

    safetensors' `save_file` writes to a temporary file of its own first, which stays if this process is killed.
    Tensors that share memory are each written in full. The folder is created. The header, data that JSON can hold,
    becomes metadata.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    on_host = {name: tensors[name].detach().cpu().contiguous() for name in ordered}
    text = json.dumps(header)
    with open(path, "xb", opener=opener) as file:
        file.write(head(text, _checksum(text, on_host), layout(on_host, path)))
        for tensor in on_host.values():
            file.write(bytes_of(tensor).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def layout(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """Return the entry of each tensor in a file's head, with the data in this order; TypeError if one has no place."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"tensor {name!r} of {path} is of {tensor.dtype}, which safetensors does not have")
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return entries


def head(text: str, checksum: str, entries: Mapping[str, Any]) -> bytes:
    """Return what precedes the data: the header as JSON, its checksum and the entries."""
    packed = json.dumps({"__metadata__": {HEADER: text, CHECKSUM: checksum}, **entries}).encode()
    packed += b" " * (-len(packed) % 8)
    return len(packed).to_bytes(8, "little") + packed


def _checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the CRC-32 of the header and of names, dtypes, shapes and data of tensors, as 8 hexadecimal digits."""
    total = zlib.crc32(header.encode())
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(described(name, tensor.dtype, tensor.shape), total)
        total = zlib.crc32(bytes_of(tensor).numpy().data, total)
    return f"{total:08x}"


def described(name: str, dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """Return what precedes a tensor's data in the checksum of a file."""
    return f"{name} {dtype} {list(shape)}".encode()


def save(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write a safetensors file atomically: ``path`` has either the old or the new content. OSError on failure."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        if _is_abandoned(left.name, path.name):  # its writer was killed
            left.unlink(missing_ok=True)
    temporary = path.with_name(temporary_name(path.name))
    with removed_on_error(temporary, path, sum(tensor.nbytes for tensor in tensors.values())):
        write_aside(temporary, tensors, header)
        temporary.replace(path)
    flush_folder(path.parent)


def temporary_name(name: str) -> str:
    """Return a new name of a temporary file of this process beside the file of a name; see `save`."""
    return f"{name}.{_kernel()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def _is_abandoned(temporary: str, name: str) -> bool:
    """Return whether `temporary_name` gave a name to a process that has ended.

    False for processes of other hosts and containers, which cannot be seen from here.
    """
    kernel, _, rest = temporary.removeprefix(f"{name}.").partition(".")
    process = rest.partition(".")[0]
    return kernel == _kernel() and process.isdecimal() and not Path("/proc", process).exists()


def _kernel() -> str:
    return hashlib.sha256(kernel_identity("pid").encode()).hexdigest()[:12]


@contextmanager
def removed_on_error(temporary: Path, path: Path, nbytes: int) -> Iterator[None]:
    """Remove a temporary file if writing in this context fails; DiskFullError if there was no space."""
    try:
        yield
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError) or isinstance(error, DiskFullError):  # named already
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            if error.filename is not None:
                raise
            raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
        free = shutil.disk_usage(path.parent).free
        raise DiskFullError(
            f"{path} cannot be written: its data have {nbytes} bytes, and the disk has {free} bytes free "
            f"({os.strerror(error.errno)})"
        ) from error


def flush_folder(folder: Path) -> None:
    """Flush a folder to disk, so that files renamed in it survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not supported by the file system
            raise
    finally:
        os.close(descriptor)


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors (on the host) and the header of a file that gangline wrote.

    FileNotFoundError if there is no such file; ValueError if it is damaged, or gangline did not write it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    tensors, header = read(path)
    if header is None:
        raise ValueError(
            f"{path} was not written by gangline; expected a file of save_checkpoint or save_optimizer_states"
        )
    return tensors, header


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Read a safetensors file: tensors, and the header if gangline wrote it, else None. ValueError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        if HEADER not in metadata:
            return tensors, None
        if metadata.get(CHECKSUM) != _checksum(metadata[HEADER], tensors):
            raise ValueError("its checksum is wrong")
        header: dict[str, Any] = json.loads(metadata[HEADER])
    except Exception as error:  # any error of damaged bytes
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    return tensors, header
