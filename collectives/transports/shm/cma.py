"""Reading another process's memory: process_vm_readv(2), where the kernel allows it (same user, no Yama in the way)."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(process: int, address: int, target: int, nbytes: int) -> None:
    """Copy bytes of another process to an address of this one.

    Args:
        process: its id.
        address: where they lie there.
        target: where they go here.
        nbytes: how many.

    Raises:
        OSError: the kernel refuses, the process is gone, or it has no such memory.
    """
    done = 0
    while done < nbytes:
        here = _Piece(target + done, nbytes - done)
        there = _Piece(address + done, nbytes - done)
        got = _libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading {nbytes} bytes of process {process}: {os.strerror(number)}")
        done += got


def may_read(process: int, address: int, expected: bytes) -> bool:
    """Whether this process can read the other's memory: found out by reading bytes that are known."""
    found = ctypes.create_string_buffer(len(expected))
    try:
        read(process, address, ctypes.addressof(found), len(expected))
    except (OSError, AttributeError):  # AttributeError: a libc without the call
        return False
    return found.raw == expected
