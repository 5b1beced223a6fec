"""Lock of a checkpoint prefix: one process writes its files at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gangline.collectives.host_files import opener

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_guard = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}
"""Descriptor and number of users of each lock file that this process holds."""


@contextmanager
def writing(prefix: str | Path) -> Iterator[None]:
    """Hold the lock of a prefix in this context; contexts of one process may overlap.

    The file ``PREFIX.lock`` names its owner. It carries a record lock, which the kernel releases when the owner ends,
    however it ends; so the file of a dead process is no obstacle. On a file system without locks there is none.

    Raises:
        RuntimeError: if another process holds it; the message names that process.
        OSError: if the file cannot be written.
    """
    path = Path(f"{os.path.realpath(prefix)}.lock")
    with _guard:
        descriptor, users = _held.get(path, (None, 0))
        if descriptor is None:
            descriptor = _acquire(path, prefix)
        _held[path] = descriptor, users + 1
    try:
        yield
    finally:
        with _guard:
            descriptor, users = _held[path]
            if users > 1:
                _held[path] = descriptor, users - 1
            else:
                del _held[path]
                path.unlink(missing_ok=True)  # before the lock is released, or it could be another process's file
                os.close(descriptor)


def _acquire(path: Path, prefix: str | Path) -> int:
    """Create and lock the file; return its descriptor."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = opener(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise
            reason = f"checkpoint folder {path.parent} cannot be made or written: {error.strerror}"
            raise type(error)(error.errno, reason) from error
        try:
            _lock(descriptor, prefix)
            if _is_file(path, descriptor):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner has removed the file meanwhile


def _lock(descriptor: int, prefix: str | Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise RuntimeError(
                f"{owner} is writing checkpoints {prefix}-*; two runs would overwrite each other's: give this run a "
                "prefix of its own, or join the processes of one job by --kv-store allreduce or dist_sync"
            ) from error
        if error.errno not in _UNSUPPORTED:
            raise


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
