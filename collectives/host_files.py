"""Files in folders that other users may write."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def opener(path: str | Path, flags: int) -> int:
    """Open a file for `open`; in a folder that other users may write, do not follow a symbolic link.

    Another user could place a link under a name that is known beforehand, and have its target overwritten.

    Raises:
        OSError: if the file is such a link; the message names it.
    """
    folder = os.stat(os.path.dirname(path) or ".")
    if folder.st_mode & 0o022 or folder.st_uid not in (0, os.getuid()):
        flags |= os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        text = "a symbolic link in a folder that other users may write is not followed; remove it"
        raise OSError(errno.ELOOP, text, os.fspath(path)) from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; see `opener`."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
