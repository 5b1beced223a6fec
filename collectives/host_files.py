"""Files in folders that other users may write."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from pathlib import Path

from gangline.collectives.liveness.process_state import kernel_identity


class ForeignFileError(OSError):
    """Another user may have placed this file under a name that is known beforehand."""


def opener(path: str | Path, flags: int) -> int:
    """Open a file for `open`; in a folder that other users may write, only a regular file.

    Another user could place a link there and have its target overwritten, or a pipe, whose opening blocks. In a folder
    with the sticky bit, such as /tmp, the file must belong to this user or to the owner of the folder.

    Raises:
        ForeignFileError: if the file is another one; the message names it.
    """
    folder = os.stat(os.path.dirname(path) or ".")
    if not folder.st_mode & 0o022 and folder.st_uid in (0, os.getuid()):
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    careful = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, careful, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _foreign(path, error.errno, "a symbolic link", "followed") from error
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise _foreign(path, error.errno, "a file that is not a regular one", "opened") from error
        raise
    status = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise _foreign(path, errno.ENXIO, "a file that is not a regular one", "opened")
        if folder.st_mode & stat.S_ISVTX and status.st_uid not in (os.getuid(), folder.st_uid):
            raise _foreign(path, errno.EACCES, f"a file of user {status.st_uid}", "opened")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _foreign(path: str | Path, number: int, kind: str, verb: str) -> ForeignFileError:
    text = f"{kind} in a folder that other users may write is not {verb}; remove it"
    return ForeignFileError(number, text, os.fspath(path))


def temporary_name(name: str) -> str:
    """Return a new name of a temporary file of this process beside the file of a name; see `is_abandoned`."""
    return f"{name}.{_kernel()}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def is_abandoned(temporary: str, name: str) -> bool:
    """Return whether `temporary_name` gave a name to a process that has ended.

    False for processes of other hosts and containers, which cannot be seen from here.
    """
    kernel, _, rest = temporary.removeprefix(f"{name}.").partition(".")
    process = rest.partition(".")[0]
    return kernel == _kernel() and process.isdecimal() and not Path("/proc", process).exists()


def _kernel() -> str:
    return hashlib.sha256(kernel_identity("pid").encode()).hexdigest()[:12]


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; see `opener`."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
