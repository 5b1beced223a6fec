"""Unreadable files: which were passed over, told by the processes that read to the one that trains."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref

_log = logging.getLogger("gangline")


class Unreadable:
    """A list of (file, reason) that processes which decode add to, and that is complete in all of them.

    It lies in memory without a name, which goes with the process that made it; the others open it through that
    process. A line is written at once, to the end, so that lines of several writers do not mix.
    """

    def __init__(self, limit: int) -> None:
        """Begin an empty list that may hold ``limit`` files.

        Raises:
            ValueError, TypeError: the limit is no whole number from 0 on.
        """
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"skip_unreadable is {limit!r}; expected a number of files")
        if limit < 0:
            raise ValueError(f"skip_unreadable is {limit}; expected 0 or more")
        self.limit = limit
        self._reported = 0
        fd = os.memfd_create("gangline-unreadable", os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{fd}"
        weakref.finalize(self, _close, fd, os.getpid())

    def add(self, file: str, reason: str) -> None:
        """Note a file that cannot be read.

        Raises:
            ValueError: it is one too many; the message lists them all.
        """
        if all(file != known for known, _ in self.files()):
            line = json.dumps([file, reason]) + "\n"
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        found = self.files()
        if len(found) > self.limit:
            listed = "".join(f"\n  {name}: {why}" for name, why in found)
            raise ValueError(
                f"{len(found)} images cannot be read, more than the {self.limit} that skip_unreadable allows:{listed}"
            )

    def files(self) -> list[tuple[str, str]]:
        """The files with their reasons, each once, in the order in which they were met."""
        with open(self._path, encoding="utf-8") as lines:
            return list(dict(json.loads(line) for line in lines).items())

    def report(self) -> None:
        """Log a warning for each file that none was logged for yet."""
        if os.stat(self._path).st_size:
            found = self.files()
            for file, reason in found[self._reported :]:
                _log.warning("image %s cannot be read and is passed over: %s", file, reason)
            self._reported = len(found)


def _close(fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner keeps its own
        with contextlib.suppress(OSError):
            os.close(fd)
