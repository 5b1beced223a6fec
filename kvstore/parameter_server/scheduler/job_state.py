"""State of a job: members, collectives in progress and their results. No sockets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import Struct, convert

from gangline.collectives import hooks
from gangline.collectives.errors import ProtocolError, name_ranks
from gangline.collectives.liveness.status_socket import Wait
from gangline.kvstore.group.remote_errors import differing, refused, why_gone
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import ROUND, Message
from gangline.kvstore.parameter_server.scheduler.views import Views

_KEPT = 4  # number of results kept for workers that lost them with their connection

_RECORDED = 1024
"""Number of collectives of a round whose results are kept for restarted workers: the first and the last two rounds."""
_RECORDED_BYTES = 256 << 20
"""Bytes of results that are kept for them; without its results a restarted worker fails."""

_MAX_OPEN = 64  # number of collectives that a worker may be in at once

_ALIKE = 1.5
"""Servers are placed as equal ones unless one has this many times the free memory of another."""

_WAITING_SECONDS = 0.1
"""Servers are told of workers that have waited in a collective for longer than this."""


class MemberState(StrEnum):
    """State of a process, see the diagram in docs/protocol.md."""

    PRESENT = "takes part"
    AWAY = "away"
    """It has died, and a restarted process may take its place, or has."""
    LEFT = "has left"
    DEAD = "dead"


@dataclass(eq=False)
class Member:
    """A process that has registered."""

    identity: bytes
    registration: protocol.Register
    rank: int = -1
    state: MemberState = MemberState.PRESENT
    why: str = ""
    """Why it has died; "" if it has not."""
    error: str = ""
    """Error that ends it, by its `Leave`."""
    away_since: float = 0.0
    is_restarted: bool = False
    """True if it has taken the place of a member that died after the start, or has joined an elastic job."""
    first_number: int = 0
    """Collectives of smaller numbers, but from `ROUND` on, go on without it: it was restarted behind them."""
    join_data: bytes | None = None
    """Data of its `Join` while it is inside join()."""
    heard_at: float = 0.0
    disconnected_at: float = 0.0
    """`time.monotonic` seconds when its connection was lost; 0: connected."""

    @property
    def is_gone(self) -> bool:
        """True if the others do not wait for it any more."""
        return self.state in (MemberState.LEFT, MemberState.DEAD)

    @property
    def role(self) -> str:
        """Role: "worker" or "server"."""
        return self.registration.role

    @property
    def name(self) -> str:
        """Role and rank, for errors."""
        return f"{self.role} {self.rank}"


class Outcome(Struct, frozen=True, array_like=True):
    """Result of a collective, or the error of all workers."""

    name: str
    root: int
    data: list[bytes]
    error: str
    nbytes: int
    """Bytes of the data."""

    def message(self, number: int, rank: int) -> Message:
        """Return the message to a worker."""
        if self.error:
            return protocol.CollectiveFailed(number, self.error)
        return protocol.CollectiveResult(number, self.data if self.root in (-1, rank) else [])


@dataclass
class JobState:
    """State of a job with a number of workers and servers."""

    workers: int
    servers: int
    job: str = ""
    """GANGLINE_JOB_ID of the scheduler."""
    members: dict[bytes, Member] = field(default_factory=dict)
    """Members by the identity of their socket."""
    collectives: dict[int, dict[int, protocol.Collective]] = field(default_factory=dict)
    """Contributions by rank, for each collective in progress, by its number."""
    since: dict[int, float] = field(default_factory=dict)
    """Time of the first worker's call of each collective in progress."""
    warned: set[int] = field(default_factory=set)
    """Collectives in progress for which a stall warning was logged."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """Last outcomes, by number of the collective."""
    join_result: protocol.JoinResult | None = None
    """Result of the last join()."""
    last_joined: int | None = None
    """Worker that called join() last."""
    number: int = 0
    """Highest number of a collective so far."""
    started: bool = False
    """True once ranks are assigned."""
    restarts: int = 0
    """Number of members that may still die and be replaced."""
    allows_restarts: bool = False
    """True if there were any."""
    view: int = 1
    """Number of the membership; it rises with each member that comes after the start."""
    replaced: dict[bytes, Member] = field(default_factory=dict)
    """Members whose place another one has taken, by identity."""
    bounds: tuple[int, int] | None = None
    """Least and most workers of an elastic job; None: the workers are always the same."""
    guests: set[int] = field(default_factory=set)
    """Ranks that workers of other hosts got (`RankGranted`): the launcher replaces a dead one that the others need."""

    def __post_init__(self) -> None:
        self.allows_restarts, self.is_elastic = self.restarts > 0, self.bounds is not None
        self._keeps_records = self.allows_restarts or self.is_elastic
        self.views = Views(*(self.bounds or (self.workers, self.workers)), self.workers)

    def kept(self) -> tuple[object, ...]:
        """Return what a restarted scheduler needs beside the outcomes, but for the times when it heard members."""
        members = [tuple(vars(one).values())[:-2] for one in [*self.replaced.values(), *self.members.values()]]
        job = (self.workers, self.started, self.restarts, self.view, self.last_joined, self.join_result)
        return *job, sorted(self.guests), self.views.kept(), len(self.replaced), members

    def restore(self, kept: Any, outcomes: Mapping[int, Any], now: float) -> None:
        """Continue in a restarted scheduler: members connect again, and repeat what they wait for."""
        self.workers, self.started, restarts, self.view, self.last_joined, result, guests, *rest = kept
        (views, replaced, members), self.guests = rest, set(guests)
        self.restarts, self.allows_restarts, self._keeps_records = max(restarts - 1, 0), True, True
        self.join_result = convert(result, protocol.JoinResult | None)
        self.outcomes = {number: Outcome(*outcome) for number, outcome in outcomes.items()}
        self.number = max([self.join_result.number if self.join_result else 0, *outcomes])
        self.views.restore(*views)
        for index, (identity, registration, rank, state, *rest) in enumerate(members):
            member = Member(identity, convert(registration, protocol.Register), rank, MemberState(state), *rest)
            member.heard_at = now
            (self.replaced if index < replaced else self.members)[identity] = member

    def of_role(self, role: str) -> list[Member]:
        """Return the members of a role, by rank."""
        members = (member for member in self.members.values() if member.role == role)
        return sorted(members, key=lambda member: member.rank)

    def expected(self, role: str) -> int:
        """Return the number of members that a role must have."""
        return self.workers if role == "worker" else self.servers

    def rejection(self, registration: protocol.Register) -> str:
        """Return why a process cannot take part; "" if it can."""
        role, rank = registration.role, registration.rank
        if registration.job != self.job:
            return (
                f"the {role} belongs to job {registration.job!r} and the scheduler to job {self.job!r} "
                "(GANGLINE_JOB_ID): another job uses this address, so choose another DMLC_PS_ROOT_PORT"
            )
        if role not in ("worker", "server"):
            return f"role is {role!r}; expected worker or server"
        count = self.expected(role)
        members = self.of_role(role)
        predecessor = self.predecessor(registration)
        may_return = self.allows_restarts or (role == "worker" and rank in self.guests)
        if registration.incarnation and self.started and may_return and (predecessor or not self.is_elastic):
            if predecessor is None or not predecessor.is_gone:
                return "" if predecessor is not None else f"{role} {rank} is not one of this job's {count} {role}s"
            return f"{predecessor.name} cannot be started again: it {why_gone(predecessor.why, predecessor.error)}"
        if self.is_elastic and role == "worker" and (self.started or count <= rank < self.views.most):
            return self.rejection_of_new(rank)
        if len(members) >= count:
            shared = (
                "; a worker has one dist_* store, for all its keys: give the first one to what needs one, for "
                "example Trainer(..., kvstore=first.kvstore) with names of its own for the parameters"
            )
            return f"the job has its {count} {role}s already{shared if role == 'worker' else ''}"
        if rank >= count:
            return f"{role} {rank} cannot take part; ranks are 0 to {count - 1}"
        if rank >= 0 and any(member.registration.rank == rank for member in members):
            return f"{role} {rank} takes part already; each needs a rank of its own (DMLC_WORKER_ID)"
        return ""

    def rejection_of_new(self, rank: int = -1) -> str:
        """Return why an elastic job takes no new worker, or none of this rank; "" if it does."""
        members = self.of_role("worker")
        present = sum(not member.is_gone for member in members)
        known = {number for member in members for number in (member.rank, member.registration.rank)} - {-1}
        return self.views.rejection(rank, known, present)

    def is_guest(self, member: Member) -> bool:
        """Return whether a member is a worker of another host, which no launcher there starts again."""
        return member.role == "worker" and member.rank in self.guests

    def may_return(self, member: Member) -> bool:
        """Return whether the others wait for the restart of this member if it dies."""
        return self.views.has_part(member.rank) if self.is_guest(member) else self.restarts > 0

    def predecessor(self, registration: protocol.Register) -> Member | None:
        """Return the member whose place a restarted process takes."""
        former = (one for one in self.of_role(registration.role) if one.rank == registration.rank)
        return next((one for one in former if one.registration.incarnation < registration.incarnation), None)

    def enter(self, new: Member, old: Member | None) -> None:
        """Add a process that may register: before the start, in the place of ``old``, or with a new rank."""
        if old is not None:
            self.replaced[old.identity] = self.members.pop(old.identity)
            new.registration.memory = old.registration.memory  # keys stay where they were placed
            new.registration.is_memory_set = old.registration.is_memory_set
            if self.is_guest(old):
                self.guests.remove(old.rank)
        rank = new.registration.rank
        if self.started:
            new.rank, new.is_restarted = rank if rank >= 0 else self.workers, True
            self.view += 1
        if new.role == "worker":  # of an elastic job, in which a new one takes part once it asks to
            self.workers = max(self.workers, rank + 1, new.rank + 1)
        self.members[new.identity] = new

    def server_memory(self) -> list[int]:
        """Return the memory of each server, by which keys are placed; empty: as if all had the same.

        Servers of one host share its free memory. It is not used if it is alike: it changes from start to start.
        """
        servers = [member.registration for member in self.of_role("server")]
        free: dict[str | int, list[int]] = {}  # by host
        for one in servers:
            if not one.is_memory_set:
                free.setdefault(one.process[0], []).append(one.memory)
        shares = {host: min(of_host) // len(of_host) for host, of_host in free.items()}
        memory = [one.memory if one.is_memory_set else shares[one.process[0]] for one in servers]
        if not memory or not min(memory) or (free and max(memory) < _ALIKE * min(memory)):
            return []
        return memory

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
            members = [member for member in self.members.values() if member.role == role]
            free = sorted(set(range(len(members))) - {member.registration.rank for member in members})
            for member in members:
                member.rank = member.registration.rank if member.registration.rank >= 0 else free.pop(0)
        self.started, self.views.table = True, [(1, frozenset(range(self.workers)))]
        return True

    def add(self, rank: int, message: protocol.Collective) -> Message | None:
        """Add a worker's contribution to a collective; return the answer if the collective has ended before."""
        number, call = message.number, message.refusal or message.name
        outcome = self.outcomes.get(number)
        if outcome is not None:
            if outcome.error or (outcome.name, outcome.root) == (call, message.root):
                return outcome.message(number, rank)
            others = next(iter({0, 1} - {rank}))  # they have returned from the call that this worker had given up
            return protocol.CollectiveFailed(number, differing({rank: call, others: outcome.name}, self.workers))
        if number not in self.collectives:
            last = max((one for one in self.outcomes if (one < ROUND) == (number < ROUND)), default=0)
            if number <= last - (0 if self._keeps_records else _KEPT):
                text = f"rank {rank} called {call} as its collective {number}, which is over"
                return protocol.CollectiveFailed(number, text)
            if sum(rank in present for present in self.collectives.values()) >= _MAX_OPEN:
                raise ProtocolError(f"worker {rank} calls more than {_MAX_OPEN} collectives at once")
            self.collectives[number] = {}
            self.since[number] = time.monotonic()
        self.number = max(self.number, number)
        self.collectives[number][rank] = message
        return None

    def withdraw(self, rank: int, number: int) -> Message | None:
        """Remove a worker's contribution to a collective; return the answer, None if it is unknown."""
        if number in self.outcomes:
            return self.outcomes[number].message(number, rank)
        present = self.collectives.get(number, {})
        if present.pop(rank, None) is None:
            return None
        missing = sorted(self.active(number) - present.keys() - {rank})
        if not present:
            self._forget(number)
        return protocol.Withdrawn(number, missing)

    def complete(self) -> list[int]:
        """End the collectives that all active workers have called, or that fail; return their numbers."""
        ended = []
        for number, present in list(self.collectives.items()):
            first = next(iter(present.values()))
            error = self._error(present) or self._passed_by(number, present)
            if error or present.keys() >= self.active(number):
                data = [present[rank].data if rank in present else b"" for rank in range(self.workers)]
                data = [] if error else data
                self.outcomes[number] = Outcome(first.name, first.root, data, error, sum(map(len, data)))
                self._forget(number)
                ended.append(number)
        if ended:
            self._forget_outcomes()
        return [number for number in ended if number in self.outcomes]

    def _forget_outcomes(self) -> None:
        """Forget outcomes that no worker can ask for any more: connections break, and processes are restarted."""
        last = max(self.outcomes, default=0)
        newest = last // ROUND
        rounds = (0, newest - 1, newest) if self._keeps_records else ()  # a restarted worker repeats the step it kept
        nbytes = 0
        for number, outcome in sorted(self.outcomes.items()):
            nbytes += outcome.nbytes
            if number > last - (_MAX_OPEN if outcome.error else _KEPT):
                continue
            if number // ROUND not in rounds or number % ROUND > _RECORDED or nbytes > _RECORDED_BYTES:
                del self.outcomes[number]

    def _passed_by(self, number: int, present: Mapping[int, protocol.Collective]) -> str:
        """Return the error of a collective that a worker has not called and never will, as it is in a later round."""
        for later, others in self.collectives.items():
            if later // ROUND > number // ROUND:
                for rank in others.keys() & self.active(number) - present.keys():
                    calls = {one: message.name for one, message in present.items()}
                    return differing({**calls, rank: f"{others[rank].name}, after another push"}, self.workers)
        return ""

    def _error(self, present: Mapping[int, protocol.Collective]) -> str:
        """Return the error of a collective if a worker refuses its call or the calls differ; "" if not."""
        calls = {rank: one.refusal or one.name for rank, one in present.items()}
        for rank, one in present.items():
            if one.refusal:
                return refused(calls, rank, self.workers)
        if len({(one.name, one.root) for one in present.values()}) > 1:
            return differing(calls, self.workers)
        return ""

    def _forget(self, number: int) -> None:
        del self.collectives[number], self.since[number]
        self.warned.discard(number)

    def stall_warnings(self, now: float, limit: float) -> list[str]:
        """Return a warning for each collective that has waited for longer than a limit in seconds, once."""
        warnings = []
        for number, began in self.since.items():
            if now - began > limit and number not in self.warned:
                self.warned.add(number)
                present = self.collectives[number]
                name, missing = next(iter(present.values())).name, self.active(number) - present.keys()
                waits_for = f"{name_ranks(missing)}{hooks.places(workers=missing)}"
                warnings.append(f"{name} waits for {waits_for}; present: {name_ranks(present.keys())}")
        return warnings

    def waits(self, now: float) -> list[Wait]:
        """Return the collectives in progress, and for which workers they wait."""
        return [
            Wait(
                what=next(iter(present.values())).name,
                seconds=now - self.since[number],
                missing=[f"worker {rank}" for rank in sorted(self.active(number) - present.keys())],
                waiting=[f"worker {rank}" for rank in sorted(present)],
            )
            for number, present in list(self.collectives.items())
            if present
        ]

    def waiting(self, now: float) -> dict[int, tuple[str, int]]:
        """Return the workers that have waited in a collective for a while, with the call's name and number."""
        return {
            rank: (one.name, number)
            for number, began in self.since.items()
            if now - began > _WAITING_SECONDS
            for rank, one in self.collectives[number].items()
        }

    def active(self, number: int | None = None) -> set[int]:
        """Return the workers that collectives wait for: all, or the one of this number."""
        view = None if number is None else self.views.of_round(number // ROUND)
        return {
            member.rank
            for member in self.of_role("worker")
            if member.join_data is None
            and not member.is_gone
            and (view is None or member.rank in view)
            and (number is None or number < ROUND or number >= member.first_number)
        }
