"""State of a job: members, collectives in progress and their results. No sockets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gangline.collectives.errors import ProtocolError, name_ranks
from gangline.kvstore.parameter_server.protocol import Collective, CollectiveResult, JoinResult, Register

_KEPT = 4
"""Number of results kept for workers that lost them with their connection."""

_MAX_OPEN = 64
"""Number of collectives that a worker may be in at once."""


@dataclass(eq=False)
class Member:
    """A process that has registered."""

    identity: bytes
    registration: Register
    rank: int = -1
    heard_at: float = 0.0
    disconnected_at: float = 0.0
    """`time.monotonic` seconds when its connection was lost; 0: connected."""
    descriptor: int = -1
    gone: str | None = None
    """Why it is gone; "" if it has left, None while it takes part."""
    join_data: bytes | None = None
    """Data of its `Join` while it is inside join()."""

    @property
    def name(self) -> str:
        """Role and rank, for errors."""
        return f"{self.registration.role} {self.rank}"


@dataclass
class JobState:
    """State of a job with a number of workers and servers."""

    workers: int
    servers: int
    members: dict[bytes, Member] = field(default_factory=dict)
    """Members by the identity of their socket."""
    collectives: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Data by rank, for each collective in progress, by its number."""
    since: dict[int, float] = field(default_factory=dict)
    """Time of the first worker's call of each collective, until it completes or a warning is logged."""
    results: dict[int, CollectiveResult] = field(default_factory=dict)
    """Last results, by number of the collective."""
    join_result: JoinResult | None = None
    """Result of the last join()."""
    number: int = 0
    """Highest number of a collective so far."""
    started: bool = False
    """True once ranks are assigned."""

    def of_role(self, role: str) -> list[Member]:
        """Return the members of a role, by rank."""
        members = (member for member in self.members.values() if member.registration.role == role)
        return sorted(members, key=lambda member: member.rank)

    def expected(self, role: str) -> int:
        """Return the number of members that a role must have."""
        return self.workers if role == "worker" else self.servers

    def rejection(self, registration: Register) -> str:
        """Return why a process cannot take part; "" if it can."""
        role, rank = registration.role, registration.rank
        if role not in ("worker", "server"):
            return f"role is {role!r}; expected worker or server"
        count = self.expected(role)
        members = self.of_role(role)
        if len(members) >= count:
            return f"the job has its {count} {role}s already"
        if rank >= count:
            return f"{role} {rank} cannot take part; ranks are 0 to {count - 1}"
        if rank >= 0 and any(member.registration.rank == rank for member in members):
            return f"{role} {rank} takes part already; each needs a rank of its own (DMLC_WORKER_ID)"
        return ""

    def is_full(self) -> bool:
        """Return whether all workers and servers have registered."""
        return all(len(self.of_role(role)) == self.expected(role) for role in ("worker", "server"))

    def assign_ranks(self) -> bool:
        """Assign ranks once all members are connected: requested ranks first, the others in order of registration."""
        if self.started or not self.is_full():
            return False
        if any(member.disconnected_at for member in self.members.values()):  # it may be dead and be replaced
            return False
        for role in ("worker", "server"):
            members = [member for member in self.members.values() if member.registration.role == role]
            free = sorted(set(range(len(members))) - {member.registration.rank for member in members})
            for member in members:
                member.rank = member.registration.rank if member.registration.rank >= 0 else free.pop(0)
        self.started = True
        return True

    def add(self, rank: int, message: Collective) -> CollectiveResult | None:
        """Add a worker's data to a collective; return the result if it has completed before.

        Raises:
            ProtocolError: if it completed too long ago, or the worker is in too many collectives.
        """
        number = message.number
        if number in self.results:
            return self.results[number]
        if number not in self.collectives:
            if number <= max(self.results, default=0) - _KEPT:
                raise ProtocolError(f"worker {rank} calls collective {number}, which is over")
            if sum(rank in present for present in self.collectives.values()) >= _MAX_OPEN:
                raise ProtocolError(f"worker {rank} calls more than {_MAX_OPEN} collectives at once")
            self.collectives[number] = {}
            self.since[number] = time.monotonic()
        self.number = max(self.number, number)
        self.collectives[number][rank] = message.data
        return None

    def complete(self) -> list[CollectiveResult]:
        """Complete the collectives that all active workers have called and return their results."""
        active = self.active()
        done = [number for number, present in self.collectives.items() if present.keys() >= active]
        for number in done:
            present = self.collectives.pop(number)
            self.since.pop(number, None)
            self.results[number] = CollectiveResult(number, [present.get(rank, b"") for rank in range(self.workers)])
        for number in sorted(self.results)[:-_KEPT]:
            del self.results[number]
        return [self.results[number] for number in done if number in self.results]

    def stall_warnings(self, now: float, limit: float) -> list[str]:
        """Return a warning for each collective that has waited for longer than a limit in seconds, once."""
        warnings = []
        for number in [number for number, began in self.since.items() if now - began > limit]:
            del self.since[number]
            present = self.collectives[number].keys()
            missing = name_ranks(self.active() - present)
            warnings.append(f"collective {number} waits for {missing}; present: {name_ranks(present)}")
        return warnings

    def active(self) -> set[int]:
        """Return the workers that collectives wait for."""
        return {member.rank for member in self.of_role("worker") if member.join_data is None and member.gone is None}
