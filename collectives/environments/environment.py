"""`LauncherEnvironment`: the base class of launcher environments."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import ClassVar

LOOPBACK = "127.0.0.1"


class LauncherEnvironment:
    """A process's rank and the address of rank 0, read from the variables of one launcher.

    A subclass names the variables or overrides the methods. Each list of names holds alternatives: the first one that
    is set counts.

    Attributes:
        name: name of the launcher in messages.
        rank_names: variables with the rank of this process, from 0.
        size_names: variables with the number of processes.
        local_rank_names: variables with the rank among the job's processes on this host.
        local_size_names: variables with the number of the job's processes on this host.
        node_rank_names: variables with the number of this host in the job.
        required_names: variables that are all set in a rank of this launcher; none: a rank or a size is set.
        host_names: variables whose first word is the address of rank 0.
        port_names: variables with a free port of rank 0.
        job_names: variables with an id of the job, from which a port of rank 0 is derived.
        is_alone_on_host: True if the launcher starts one process on each host.
    """

    name: ClassVar[str] = ""
    rank_names: ClassVar[tuple[str, ...]] = ()
    size_names: ClassVar[tuple[str, ...]] = ()
    local_rank_names: ClassVar[tuple[str, ...]] = ()
    local_size_names: ClassVar[tuple[str, ...]] = ()
    node_rank_names: ClassVar[tuple[str, ...]] = ()
    required_names: ClassVar[tuple[str, ...]] = ()
    host_names: ClassVar[tuple[str, ...]] = ()
    port_names: ClassVar[tuple[str, ...]] = ()
    job_names: ClassVar[tuple[str, ...]] = ()
    is_alone_on_host: ClassVar[bool] = False

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Return True if the launcher has started this process as a rank."""
        if cls.required_names:
            return all(name in variables for name in cls.required_names)
        return any(name in variables for name in (*cls.rank_names, *cls.size_names))

    def rank(self) -> int:
        """Return the rank of this process.

        Raises:
            ValueError: if the variable is not set or is not a number; so for all methods.
        """
        return self._required(self.rank_names, least=0)

    def size(self) -> int:
        """Return the number of processes."""
        return self._required(self.size_names, least=1)

    def local_rank(self) -> int | None:
        """Return the rank among the processes on this host; None if the launcher does not set it."""
        return 0 if self.is_alone_on_host else self._optional(self.local_rank_names, least=0)

    def local_size(self) -> int | None:
        """Return the number of processes on this host; None if the launcher does not set it."""
        return 1 if self.is_alone_on_host else self._optional(self.local_size_names, least=1)

    def node_rank(self) -> int | None:
        """Return the number of this host in the job; None if the launcher does not set it."""
        return self._optional(self.node_rank_names, least=0)

    def host(self) -> str | None:
        """Return the address of rank 0 if MASTER_ADDR does not name it; None if the launcher does not set it."""
        return next((word for name in self.host_names for word in self.variables.get(name, "").split()), None)

    def port(self) -> int | None:
        """Return a free port of rank 0 if MASTER_PORT does not name it; None if it cannot be derived."""
        if (port := self._optional(self.port_names, 1, 65535)) is not None:
            return port
        return port_from(next(filter(None, map(self.variables.get, self.job_names)), None))

    def is_on_one_host(self, size: int) -> bool:
        """Return True if all ``size`` processes are known to be on this host."""
        return self.local_size() == size

    def _required(self, names: tuple[str, ...], least: int) -> int:
        name = next((name for name in names if name in self.variables), None)
        if name is None:
            others = [f", but {other} is" for other in (*self.rank_names, *self.size_names) if other in self.variables]
            raise ValueError(
                f"{' or '.join(names)} is not set{''.join(others)}; expected a rank and a size, as launchers set them"
            )
        return number(self.variables, name, least)

    def _optional(self, names: tuple[str, ...], least: int, most: int | None = None) -> int | None:
        name = next((name for name in names if self.variables.get(name)), None)
        return None if name is None else number(self.variables, name, least, most)


def number(variables: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    """Return the whole number in the variable ``name``, which is set.

    Raises:
        ValueError: if the value is not a whole number from ``least`` to ``most``.
    """
    text = variables[name]
    limits = f"at least {least}" if most is None else f"{least} to {most}"
    digits = text.strip()
    if (
        not (digits.isascii() and digits.isdecimal())
        or int(digits) < least
        or (most is not None and int(digits) > most)
    ):
        raise ValueError(f"{name} is {text!r}; expected a whole number, {limits}")
    return int(digits)


def port_from(*job: str | None) -> int | None:
    """Return a port derived from a job's ids, below the range of ephemeral ports; None if an id is missing."""
    if not all(job):
        return None
    return (1 << 14) + zlib.crc32(" ".join(map(str, job)).encode()) % (1 << 14)
