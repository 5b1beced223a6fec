"""Files in folders that other users may write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; see `opener`."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
