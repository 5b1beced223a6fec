"""Cross-memory attach: read another process's memory by process_vm_readv(2), if the kernel allows it."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(process: int, address: int, target: int, nbytes: int) -> None:
    """Copy bytes from another process's memory to an address of this process.

    Args:
        process: process id.
        address: source address in that process.
        target: destination address in this process.
        nbytes: number of bytes.

    Raises:
        OSError: if the kernel refuses, the process is gone, or the memory does not exist.
    """
    done = 0
    while done < nbytes:
        local = _IoVec(target + done, nbytes - done)
        remote = _IoVec(address + done, nbytes - done)
        count = _libc.process_vm_readv(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading {nbytes} bytes of process {process}: {os.strerror(number)}")
        done += count


def may_read(process: int, address: int, expected: bytes) -> bool:
    """Return whether this process can read another's memory, by reading bytes of known content."""
    found = ctypes.create_string_buffer(len(expected))
    try:
        read(process, address, ctypes.addressof(found), len(expected))
    except (OSError, AttributeError):  # AttributeError: a libc without the call
        return False
    return found.raw == expected
