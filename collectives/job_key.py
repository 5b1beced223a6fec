"""Key of a job: 32 secret bytes that all its processes hold."""

from __future__ import annotations

import os
import secrets


class JobKey:
    """Secret of one job; its text form is for pipes and files that only this user reads."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def new(cls) -> JobKey:
        """Return a random key."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_hex(cls, text: str) -> JobKey:
        """Return the key whose `hex` is ``text``."""
        return cls(bytes.fromhex(text))

    def hex(self) -> str:
        """Return the key as text."""
        return self._secret.hex()

    def __repr__(self) -> str:
        return "JobKey(...)"


def open_descriptor(key: JobKey) -> int:
    """Return an inheritable descriptor that holds the key, for GANGLINE_JOB_KEY_FD of children."""
    fd = os.memfd_create("gangline-job-key", 0)
    os.write(fd, key.hex().encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
