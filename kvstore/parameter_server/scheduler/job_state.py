"""What a scheduler knows of its job: who takes part, who has come where, who rests. No sockets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gangline.collectives.errors import ProtocolError, name_ranks
from gangline.kvstore.parameter_server.protocol import Join, Meet, Met, Rested

_KEPT = 4
"""Exchanges that are over, kept for workers to whom the answer did not come."""

_OPEN = 64
"""Exchanges in which a worker may be at once."""


@dataclass(eq=False)
class Member:
    """A process that has joined, or wants to."""

    identity: bytes
    join: Join
    rank: int = -1
    heard: float = 0.0
    lost: float = 0.0
    """When its connection was lost; 0: it is there."""
    descriptor: int = -1
    gone: str | None = None
    """Why it is no longer there; "" where it said goodbye."""
    rests: bytes | None = None

    @property
    def name(self) -> str:
        """As errors name it."""
        return f"{self.join.role} {self.rank}"


@dataclass
class JobState:
    """What the scheduler knows."""

    workers: int
    servers: int
    members: dict[bytes, Member] = field(default_factory=dict)
    meetings: dict[int, dict[int, bytes]] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    """When the first one came to an exchange, until it is over or has been warned of."""
    met: dict[int, Met] = field(default_factory=dict)
    """The last exchanges that are over."""
    rested: Rested | None = None
    """How the last rest of all ended."""
    number: int = 0
    """The highest number of an exchange so far."""
    complete: bool = False

    def of(self, role: str) -> list[Member]:
        """Those of a role, by rank."""
        return sorted((m for m in self.members.values() if m.join.role == role), key=lambda member: member.rank)

    def expected(self, role: str) -> int:
        """How many there must be of a role."""
        return self.workers if role == "worker" else self.servers

    def refusal(self, join: Join) -> str:
        """Why a process cannot take part; "" if it can."""
        if join.role not in ("worker", "server"):
            return f"role is {join.role!r}; expected worker or server"
        count = self.expected(join.role)
        here = self.of(join.role)
        if len(here) >= count:
            return f"the job has its {count} {join.role}s already"
        if join.rank >= count:
            return f"{join.role} {join.rank} wants to join; ranks are 0 to {count - 1}"
        if join.rank >= 0 and any(member.join.rank == join.rank for member in here):
            return f"{join.role} {join.rank} takes part already; each needs a rank of its own (DMLC_WORKER_ID)"
        return ""

    def is_full(self) -> bool:
        """Whether nobody is missing."""
        return all(len(self.of(role)) == self.expected(role) for role in ("worker", "server"))

    def deal_ranks(self) -> bool:
        """Once all are here, give each its rank: what was asked for first, then in the order of arrival."""
        if self.complete or not self.is_full():
            return False
        if any(member.lost for member in self.members.values()):  # it may be dead, and have to be replaced
            return False
        for role in ("worker", "server"):
            here = [member for member in self.members.values() if member.join.role == role]
            free = sorted(set(range(len(here))) - {member.join.rank for member in here})
            for member in here:
                member.rank = member.join.rank if member.join.rank >= 0 else free.pop(0)
        self.complete = True
        return True

    def bring(self, rank: int, meet: Meet) -> Met | None:
        """Take in what a worker brings to an exchange; gives the answer where it is over already.

        Raises:
            ProtocolError: it is over for long, or the worker is in too many.
        """
        if meet.number in self.met:
            return self.met[meet.number]
        if meet.number not in self.meetings and meet.number <= max(self.met, default=0) - _KEPT:
            raise ProtocolError(f"worker {rank} comes to exchange {meet.number}, which is over")
        if meet.number not in self.meetings and sum(rank in came for came in self.meetings.values()) >= _OPEN:
            raise ProtocolError(f"worker {rank} comes to more than {_OPEN} exchanges at once")
        self.number = max(self.number, meet.number)
        if meet.number not in self.meetings:
            self.meetings[meet.number] = {}
            self.since[meet.number] = time.monotonic()
        self.meetings[meet.number][rank] = meet.data
        return None

    def finished(self) -> list[Met]:
        """Exchanges to which all have come by now."""
        active = self.active()
        done = [number for number, came in self.meetings.items() if came.keys() >= active]
        for number in done:
            came = self.meetings.pop(number)
            self.since.pop(number, None)
            self.met[number] = Met(number, [came.get(rank, b"") for rank in range(self.workers)])
        for number in sorted(self.met)[:-_KEPT]:
            del self.met[number]
        return [self.met[number] for number in done if number in self.met]

    def late(self, now: float, limit: float) -> list[str]:
        """Of each exchange that waits for longer than a limit, who has come and who has not; once."""
        words = []
        for number in [number for number, began in self.since.items() if now - began > limit]:
            del self.since[number]
            came = self.meetings[number].keys()
            words.append(f"exchange {number} waits for {name_ranks(self.active() - came)}; {name_ranks(came)} came")
        return words

    def active(self) -> set[int]:
        """Workers whom an exchange waits for."""
        return {member.rank for member in self.of("worker") if member.rests is None and member.gone is None}
