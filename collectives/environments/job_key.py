"""The key of a job: a secret shared by all its processes that authenticates their connections."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_NBYTES = 32
_NAME = "gangline-job-key"
DESCRIPTOR = "GANGLINE_JOB_KEY_FD"
"""Variable with the number of an inherited file descriptor that holds the key; it is removed when the key is read."""
FILE = "GANGLINE_JOB_KEY_FILE"
"""Variable with the path of a file that holds the key."""
HOW_TO = (
    f"create a key with `gangline key new`, copy it to every host and name its file in {FILE} (`gangline launch` makes "
    "a key for the processes that it starts)"
)


class JobKey:
    """Secret of 32 random bytes. Neither its text forms nor pickle contain them; only `hex` does."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _NBYTES:
            raise ValueError(f"a job key has {_NBYTES} bytes, not {len(secret)}")
        self._secret = secret

    @classmethod
    def new(cls) -> JobKey:
        """Return a random key."""
        return cls(secrets.token_bytes(_NBYTES))

    @classmethod
    def from_hex(cls, text: str, source: str = "the text") -> JobKey:
        """Return the key with these 64 hexadecimal digits; white space around them is ignored.

        Raises:
            ValueError: if the text is anything else; the message names its source, and does not contain it.
        """
        digits = text.strip()
        if len(digits) != 2 * _NBYTES or set(digits) - set("0123456789abcdefABCDEF"):
            raise ValueError(
                f"{source} does not hold a job key: expected {2 * _NBYTES} hexadecimal digits, as `gangline key new` "
                f"writes them; found {len(digits)} characters"
            )
        return cls(bytes.fromhex(digits))

    def hex(self) -> str:
        """Return the key as 64 hexadecimal digits, for a file or pipe that only its processes can read."""
        return self._secret.hex()

    def mac(self, label: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of a label and parts under this key, 32 bytes; labels separate uses."""
        code = hmac.new(self._secret, label.encode(), hashlib.sha256)
        for part in parts:  # with their lengths: moving a byte from one part to the next changes the code
            code.update(len(part).to_bytes(8, "big") + part)
        return code.digest()

    def job_id(self) -> str:
        """Return an identifier that is equal for all processes with this key and does not reveal the key."""
        return self.mac("gangline job id 1").hex()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.job_id())

    def __repr__(self) -> str:
        return "JobKey(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a job key cannot be pickled or copied; pass it by a descriptor (open_descriptor)")


class _Inherited:
    """The key of GANGLINE_JOB_KEY_FD, or the reason why it could not be read."""

    key: JobKey | None = None
    problem = ""
    lock = threading.Lock()


def job_key() -> JobKey | None:
    """Return this process's job key, from GANGLINE_JOB_KEY_FD or else GANGLINE_JOB_KEY_FILE; None if neither is set.

    The descriptor is read once and closed, and its variable is removed, so that child processes inherit neither.

    Raises:
        PermissionError: if the file belongs to another user, or others may read it.
        OSError: if the file cannot be read.
        ValueError: if the descriptor or the file does not hold a key.
    """
    take_descriptor()
    if _Inherited.problem:
        raise ValueError(_Inherited.problem)
    if _Inherited.key is not None:
        return _Inherited.key
    path = os.environ.get(FILE)
    return read_file(path) if path else None


def take_descriptor() -> None:
    """Read and close the inherited descriptor now, if any; `job_key` raises errors."""
    with _Inherited.lock:
        number = os.environ.pop(DESCRIPTOR, None)
        if number is None:
            return
        source = f"the descriptor {number!r} of {DESCRIPTOR}"
        try:
            descriptor = int(number)
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}"):
                raise OSError  # closed on the way here, and the number serves another file
            text = os.pread(descriptor, 4 * _NBYTES, 0).decode("ascii", "replace")
            os.close(descriptor)
            _Inherited.key, _Inherited.problem = JobKey.from_hex(text, source), ""
        except (OSError, ValueError):
            _Inherited.problem = (
                f"{source} does not hold a job key: a program between the launcher and this process has closed it (a "
                f"Python subprocess does, without pass_fds); {HOW_TO}"
            )


def open_descriptor(key: JobKey) -> int:
    """Return an inheritable descriptor of nameless memory that holds a key, for GANGLINE_JOB_KEY_FD of children.

    It is sealed, and every child may inherit the same one. The caller closes it once they are started.
    """
    descriptor = os.memfd_create(_NAME, os.MFD_ALLOW_SEALING)
    os.write(descriptor, key.hex().encode())
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextmanager
def inherited_key(key: JobKey | None) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Open the descriptor of a key while child processes are started; None: no key.

    Yields:
        Environment variable of the children, and ``pass_fds`` of subprocess.
    """
    if key is None:
        yield {}, []
        return
    descriptor = open_descriptor(key)
    try:
        yield {DESCRIPTOR: str(descriptor)}, [descriptor]
    finally:
        os.close(descriptor)


def write_file(key: JobKey, path: Path) -> None:
    """Write a key to a new file that only this user can read.

    Raises:
        FileExistsError: if the path exists.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(key.hex() + "\n")


def read_file(path: str, source: str = FILE) -> JobKey:
    """Return the key in a file; ``source`` names what the path comes from. Raises as `job_key`."""
    source = f"file {path!r} of {source}"
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115  closed below
    except OSError as error:
        raise type(error)(error.errno, f"{source} cannot be read: {error.strerror}") from None
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{source} is not a regular file; expected one that `gangline key new` wrote")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(
                f"{source} has mode {mode:04o} and belongs to user {status.st_uid}; a job key must belong to the user "
                f"of the process, {os.geteuid()}, and nobody else may read it: chmod 600 {path}"
            )
        return JobKey.from_hex(file.read(4 * _NBYTES).decode("ascii", "replace"), source)
