"""Cross-memory attach: read another process's memory by process_vm_readv(2), if the kernel allows it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_readers: set[int] = set()  # processes that may read this one's memory


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(process: int, address: int, target: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes at an address of another process to the address ``target`` of this one.

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
    content = ctypes.create_string_buffer(len(expected))
    try:
        read(process, address, ctypes.addressof(content), len(expected))
    except (OSError, AttributeError):  # AttributeError: a libc without the call
        return False
    return content.raw == expected


def allow_reads(processes: Iterable[int]) -> None:
    """Allow other processes of this user to read this process's memory where Yama's ptrace_scope 1 forbids it.

    Yama allows one process and all its descendants. The nearest common ancestor of all processes ever passed is chosen,
    usually the launcher: all programs that it started for this user may then read this process's memory, as they may on
    a system without Yama.
    """
    try:
        if _PTRACE_SCOPE.read_text().strip() != "1":  # 0: nothing is forbidden; 2 and 3: nothing can be allowed
            return
        _readers.update(processes)
        _readers.intersection_update([one for one in _readers if Path(f"/proc/{one}").exists()])
        ancestor = nearest_common_ancestor([os.getpid(), *_readers])
    except OSError:  # a kernel without Yama, or a process has died
        return
    if ancestor:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(ancestor))


def nearest_common_ancestor(processes: Iterable[int]) -> int:
    """Return the nearest common ancestor, maybe one of the processes, in this pid namespace; 0 if there is none.

    Raises:
        OSError: if a process is gone.
    """
    lines = [_line_of(process) for process in processes]
    return next((ancestor for ancestor in lines[0] if all(ancestor in line for line in lines)), 0)


def _line_of(process: int) -> list[int]:
    """Return a process, its parent, the parent's parent and so on."""
    line = []
    while process:
        line.append(process)
        process = int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return line
