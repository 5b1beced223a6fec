"""Membership: which ranks of a communicator are alive, and which call each rank waits in."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgpack
import zmq

from gangline.collectives.call_signature import CallSignature
from gangline.collectives.errors import (
    DeadNodeError,
    GanglineError,
    MismatchError,
    ProtocolError,
    StallError,
    name_ranks,
)
from gangline.collectives.limits import (
    MEMBERSHIP_LINGER_SECONDS,
    RECONNECT_SECONDS,
    STOPPED_CHECKS_PER_LIMIT,
)
from gangline.collectives.liveness.process_state import ending_error, state_of, this_process
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.zmq.peer_sockets import PeerSocket, PeerSockets

CLOSED = "closed its communicator"
"""Why a rank that closed regularly is gone: an error only for ranks that still need it. An error that ended it follows.
"""

PROPOSALS = 1 << 61
"""Announced numbers from here on belong to calls that a rank only proposes (devices/nccl_selection.py)."""

LOST = "was killed or left: connection lost"
_CLOSED_POLL_MS = 20

_ERRORS = {kind.__name__: kind for kind in (GanglineError, DeadNodeError, StallError, ProtocolError, MismatchError)}
_TEXT_LIMIT = 32_000  # characters of an error's text that are sent to other ranks
_MOST_REFUSALS = 1024
_LEAST_ANNOUNCEMENTS = 8
"""Ranks that one `Membership.announce_and_read` tells at most, in groups of up to 128."""
_READS_TO_ANNOUNCE = 16
"""Calls of it after which all ranks of a larger group are told: far fewer than there are in MISMATCH_REPORT_SECONDS."""
_MESSAGE_LIMIT = 1 << 18  # bytes; a character may take four


class Membership(ABC):
    """One rank's knowledge of all ranks, updated by `announce_and_read`."""

    label: str = ""
    """Name of the group within the job; "" for the group of all processes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.gone: dict[int, str] = {}
        """Rank -> why it counts as dead; its text begins with `CLOSED` if it closed regularly."""
        self.at: dict[int, tuple[int, int]] = {}
        """Rank -> (sequence, code) of the last call that it announced, this rank included. Ranks announce a call only
        if they have to wait in it."""
        self.refusals: dict[tuple[int, int], str] = {}
        """(rank, sequence) -> why another rank refused this call; the latest `_MOST_REFUSALS`."""
        self.failure: GanglineError | None = None
        """The first error that another rank reported, or the error that this rank aborted with."""

    @abstractmethod
    def announce_and_read(self, sequence: int, code: int, missing: Collection[int] | None = None) -> None:
        """Announce the call that this rank waits in, if it is new, and read the other ranks' messages. Never blocks.

        Args:
            sequence: number of the call on its communicator; 0 for a point-to-point message, which is not announced.
            code: `CallSignature.code`.
            missing: ranks that this rank waits for. They are told first, and further calls tell the others, a few each:
                if all ranks told all others at once, a call in which one of 128 ranks is late would cost 16,256
                messages. None: tell all ranks now.
        """

    @abstractmethod
    def fail(self, error: GanglineError) -> None:
        """Report an error to all reachable ranks. Never raises, never blocks."""

    @abstractmethod
    def refuse(self, sequence: int, reason: str) -> None:
        """Report to all reachable ranks that this rank does not make call ``sequence``. Never blocks."""

    def _add_refusal(self, rank: int, sequence: int, reason: str) -> None:
        self.refusals[rank, sequence] = reason
        if len(self.refusals) > _MOST_REFUSALS:
            del self.refusals[next(iter(self.refusals))]

    def names(self, ranks: Iterable[int]) -> list[str]:
        """Return the names of ranks in the job, such as "rank 3"."""
        return [f"rank {rank}" for rank in ranks]

    def process_here(self, rank: int) -> int | None:  # noqa: ARG002
        """Return the process id of a rank in another process of this host; None for other ranks."""
        return None

    def abort(self, error: GanglineError) -> None:
        """End this rank's waits with an error and report it to all ranks. Thread-safe; never blocks."""
        self.failure = self.failure or error
        self.fail(error)

    @abstractmethod
    def close(self) -> None:
        """Announce the end to all ranks and release all resources. Idempotent."""


class GroupMembership(Membership):
    """Membership of ranks in several processes, over connections that other groups may share; the last one ends them.

    Rank i of the group is process ``ranks[i]`` of the connections. The label is the same on all its ranks and used
    once; "" for the group of all processes.
    """

    def __init__(self, connections: PeerConnections, ranks: Sequence[int], label: str) -> None:
        super().__init__(ranks.index(connections.rank), len(ranks))
        self.connections = connections
        self.label = label
        self.numbers = {process: rank for rank, process in enumerate(ranks)}
        """Process -> its rank in this group."""
        self._announced: dict[int, tuple[int, int]] = {}  # process -> the last call announced to it
        self._messages_again: dict[str, list[Any]] = {}  # by kind, for new connections
        connections.add(self)

    @property
    def processes(self) -> list[int]:
        """Process id of each rank on its host."""
        return [self.connections.process_ids[process] for process in self.numbers]

    def names(self, ranks: Iterable[int]) -> list[str]:  # noqa: D102
        processes = list(self.numbers)
        return [f"rank {processes[rank]}" for rank in ranks]

    def process_here(self, rank: int) -> int | None:  # noqa: D102
        return self.connections.process_here(list(self.numbers)[rank])

    def subgroup(self, members: Sequence[int], number: int) -> GroupMembership:
        """Return the membership of some of the ranks, which uses the same connections and may outlive this one.

        Collective: all members must call it, and must exchange something before one of them uses the result. Rank i of
        it is this group's ``members[i]``; the number of the split is the same on all members and used once in this
        group.
        """
        processes = list(self.numbers)
        label = f"{self.label}/{number}.{min(members)}"
        return GroupMembership(self.connections, [processes[member] for member in members], label)

    def announce_and_read(self, sequence: int, code: int, missing: Collection[int] | None = None) -> None:  # noqa: D102
        with self.connections.lock:
            if self.label not in self.connections.groups:
                return
            if sequence:
                self.at[self.rank] = (sequence, code)
                self._announce((sequence, code), missing)
            self.connections.poll()

    def fail(self, error: GanglineError) -> None:  # noqa: D102
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
        self._tell("failed", name, _sendable(str(error)))

    def refuse(self, sequence: int, reason: str) -> None:  # noqa: D102
        self._tell("refused", sequence, _sendable(reason))

    def _tell(self, kind: str, *values: Any) -> None:
        self._messages_again[kind] = [kind, *values]
        with self.connections.lock:
            packed = self.packed([kind, *values])
            for connection in self.connections.of_group(self.label).values():
                with suppress(zmq.ZMQError):  # the message must still reach the other peers
                    connection.send(packed)

    def close(self) -> None:  # noqa: D102
        self.connections.remove(self)

    def packed(self, message: list[Any]) -> bytes:
        """Serialize a message of this group."""
        return bytes(msgpack.packb(["of", self.label, message] if self.label else message))

    def send_again(self, process: int, connection: PeerSocket) -> None:
        """Repeat messages on a new connection: they may be lost on the previous one."""
        self._announced.pop(process, None)
        for message in self._messages_again.values():
            connection.send(self.packed(message))

    def take(self, process: int, message: object) -> bool:
        """Process another rank's message other than "closed"; return whether it is valid."""
        match message:
            case ["at", int(sequence), int(code)] if 0 <= sequence < 1 << 63 and _is_call(code):
                self.at[self.numbers[process]] = (sequence, code)
            case ["failed", str(name), str(text)] if name in _ERRORS and len(text) <= _TEXT_LIMIT:
                self.failure = self.failure or _ERRORS[name](text)
            case ["refused", int(sequence), str(text)] if 0 < sequence < 1 << 63 and len(text) <= _TEXT_LIMIT:
                self._add_refusal(self.numbers[process], sequence, text)
            case _:
                return False
        return True

    def _announce(self, call: tuple[int, int], missing: Collection[int] | None) -> None:
        untold = [
            (process, connection)
            for process, connection in self.connections.of_group(self.label).items()
            if self._announced.get(process) != call and connection.down_since is None
        ]
        if missing is not None:
            most = max(_LEAST_ANNOUNCEMENTS, math.ceil(self.size / _READS_TO_ANNOUNCE))
            untold.sort(key=lambda one: self._urgency(self.numbers[one[0]], missing))
            untold = untold[:most]
        packed = self.packed(["at", *call]) if untold else b""
        for process, connection in untold:
            if connection.send(packed):
                self._announced[process] = call

    def _urgency(self, rank: int, missing: Collection[int]) -> tuple[bool, int]:
        """Return the order in which ranks are told: the missing ones, then those that follow this rank."""
        return rank not in missing, (rank - self.rank) % self.size


class ProcessMembership(GroupMembership):
    """Membership of all processes; opens the connections. Arguments and errors are those of `PeerConnections`."""

    def __init__(
        self, rank: int, size: int, all_gather: BootstrapAllGather, *, heartbeat: float, limit: float, address: str
    ) -> None:
        connections = PeerConnections(rank, size, all_gather, heartbeat=heartbeat, limit=limit, address=address)
        super().__init__(connections, range(size), "")


class PeerConnections:
    """A socket to each peer, for the messages of a communicator and of those split from it.

    With tcp, ZeroMQ's I/O thread sends and expects heartbeats, so a rank that is busy in Python never counts as dead.
    ipc needs no heartbeats: the kernel reports dead and stopped processes of this host. Time until a rank is gone:

    - killed, same host: at once, or after about 2 s if a forked child of it still runs
    - killed, another host: 1 s without reconnection
    - stopped, same host, with ipc: ``limit``
    - stopped, or network cut, with tcp: 2 x ``limit``. A cut that heals before ``limit`` loses nothing: TCP repeats
      lost packets at growing intervals, at the latest when a cut has lasted as long again.

    A connection ends when no group of its two processes is open on both sides.

    Args:
        all_gather: between the ranks; called once.
        heartbeat: seconds between two heartbeats; at most half of ``limit`` is used.
        limit: seconds of silence that are allowed; see above.
        address: "ipc" or "tcp://HOST", see `PeerSockets`.
    """

    def __init__(
        self, rank: int, size: int, all_gather: BootstrapAllGather, *, heartbeat: float, limit: float, address: str
    ) -> None:
        self.rank = rank
        self.lock = threading.RLock()
        self.groups: dict[str, GroupMembership] = {}
        """Open groups of this process, by label."""
        self.invalid_messages = 0
        """Number of malformed messages, which were dropped."""
        self._limit = limit
        self._reconnect_seconds = min(RECONNECT_SECONDS, limit / 4)
        self._has_heartbeats = address != "ipc"  # not by ipc: libzmq note 4 in transports/zmq/context.py
        self._silence = 2 * limit if self._has_heartbeats else limit
        options = {int(zmq.MAXMSGSIZE): _MESSAGE_LIMIT, int(zmq.SNDHWM): 0, int(zmq.RCVHWM): 0}  # libzmq note 4
        if self._has_heartbeats:
            options[int(zmq.HEARTBEAT_IVL)] = max(1, round(min(heartbeat, limit / 2) * 1000))
            options[int(zmq.HEARTBEAT_TIMEOUT)] = max(1, round(self._silence * 1000))
        self._halted_since: dict[int, float] = {}  # peer -> time at which its process was first found stopped or ended
        self.next_state_check = 0.0
        identity = msgpack.packb(this_process())
        self.peers = PeerSockets(
            rank, size, all_gather, address=address, options=options, payload=identity, check=_check_alive
        )
        self._processes = [_read_process(peer, packed) for peer, packed in enumerate(self.peers.payloads)]
        self._shared: dict[int, set[str]] = {}  # peer -> labels of the groups that are open on both sides
        self._told: set[int] = set()  # peers that were sent "closed", so that their socket must linger
        self._lost: dict[int, str] = {}
        self._poller = zmq.Poller()
        for peer, connection in self.peers.sockets.items():
            connection.on_up = partial(self._send_again, peer)
            self._poller.register(connection.monitor, zmq.POLLIN)
            self._poller.register(connection.socket, zmq.POLLIN)

    @property
    def process_ids(self) -> list[int]:
        """Process id of each rank on its host."""
        return [int(pid) for _, pid, _ in self._processes]

    def process_here(self, rank: int) -> int | None:
        """Return the process id of a rank on this host; None if it is on another host."""
        host, process, _ = self._processes[rank]
        return int(process) if host == this_process()[0] else None

    def add(self, group: GroupMembership) -> None:
        """Start to receive a group's messages."""
        with self.lock:
            self.groups[group.label] = group
            for peer, number in group.numbers.items():
                if peer in self.peers.sockets:
                    self._shared.setdefault(peer, set()).add(group.label)
                elif peer != self.rank:
                    group.gone[number] = self._lost.get(peer, CLOSED)

    def remove(self, group: GroupMembership) -> None:
        """Announce that this process closes a group, and close connections that no group needs. Idempotent."""
        with self.lock:
            if group.label not in self.groups:
                return
            self._read_all()
            told = self.of_group(group.label)
            error = ending_error()
            self._send_closed(told, group.packed(["closed", error] if error else ["closed"]))
            self._told.update(told)
            if self._has_heartbeats:
                self._wait_for_closed([peer for peer in told if len(self._shared[peer]) == 1])
            del self.groups[group.label]
            for peer in self.of_group(group.label):
                self._leave(peer, group.label)
            if not self.groups:
                self.peers.close(0)

    def of_group(self, label: str) -> dict[int, PeerSocket]:
        """Return the connections to the peers that have not left a group, by process; none if it is closed."""
        return {peer: one for peer, one in self.peers.sockets.items() if label in self._shared.get(peer, ())}

    def poll(self) -> None:
        """Read all messages of all groups and check the peers. Never blocks."""
        if self._poller.poll(0):
            self._read_all()
        for peer, connection in list(self.peers.sockets.items()):
            if connection.down_since is not None:
                self._check_disconnected(peer, connection.down_since)
        if time.monotonic() >= self.next_state_check:
            self.next_state_check = time.monotonic() + self._limit / STOPPED_CHECKS_PER_LIMIT
            for peer in list(self.peers.sockets):
                self._check_process(peer)

    def _send_closed(self, connections: Mapping[int, PeerSocket], packed: bytes) -> None:
        """Send to peers; with heartbeats, wait until the message has left, so that no socket lingers: libzmq note 4."""
        deadline = time.monotonic() + MEMBERSHIP_LINGER_SECONDS
        trackers = []
        for connection in connections.values():
            if self._has_heartbeats:
                connection.socket.copy_threshold = 0  # pyzmq tracks no message that it copies
            with suppress(zmq.ZMQError):  # not connected
                copies = not self._has_heartbeats
                trackers.append(connection.send_frame(packed, copy=copies, track=not copies))
        for tracker in filter(None, trackers):
            with suppress(zmq.NotDone):
                tracker.wait(max(0.0, deadline - time.monotonic()))

    def _wait_for_closed(self, peers: Sequence[int]) -> None:
        """Read the last messages of peers that close at the same time: libzmq note 4 in transports/zmq/context.py."""
        deadline = time.monotonic() + MEMBERSHIP_LINGER_SECONDS
        while any(peer in self.peers.sockets and self.peers.sockets[peer].down_since is None for peer in peers):
            if time.monotonic() >= deadline:
                return
            self._poller.poll(_CLOSED_POLL_MS)
            self._read_all()

    def _send_again(self, peer: int) -> None:
        for label in self._shared.get(peer, ()):
            self.groups[label].send_again(peer, self.peers.sockets[peer])

    def _read_all(self) -> None:
        for peer, connection in list(self.peers.sockets.items()):
            connection.poll_monitor()
            self._read(peer, connection)

    def _read(self, peer: int, connection: PeerSocket) -> None:
        while (packed := connection.receive()) is not None:
            message, label = _unpack(packed), ""
            match message:
                case ["of", str(label), message]:
                    pass
            if cause := _closed_by(message):
                self._close_of(peer, label, cause)
                if peer not in self.peers.sockets:
                    return
            elif label in self._shared.get(peer, ()):
                self.invalid_messages += not self.groups[label].take(peer, message)
            elif not label and "" in self.groups:
                self.invalid_messages += 1

    def _close_of(self, peer: int, label: str, cause: str) -> None:
        if label in self._shared.get(peer, ()):  # else this process has closed the group before
            group = self.groups[label]
            group.gone[group.numbers[peer]] = cause
            self._leave(peer, label)

    def _leave(self, peer: int, label: str) -> None:
        """Close the connection to a peer if no other group is open on both sides."""
        self._shared[peer].discard(label)
        if not self._shared[peer]:
            connection = self.peers.sockets[peer]
            lingers = peer in self._told and not self._has_heartbeats and connection.down_since is None
            self._end(peer, round(MEMBERSHIP_LINGER_SECONDS * 1000) if lingers else 0)

    def _check_disconnected(self, peer: int, down_since: float) -> None:
        state = state_of(self._processes[peer])
        if state == "":
            self._drop(peer, LOST)
        elif time.monotonic() - down_since >= self._reconnect_seconds:
            silent = f"gave no sign of life for {self._silence:g} s"
            if state == "?":  # from another host, a killed process and a silent one look alike
                self._drop(peer, f"was killed, left, or {silent}")
            else:
                self._drop(peer, silent if self._has_heartbeats or state in "Tt" else LOST)

    def _check_process(self, peer: int) -> None:
        """Drop a peer whose process has ended, or is stopped where no heartbeats detect it.

        A forked child of a killed process keeps its connections open.
        """
        state = state_of(self._processes[peer])
        if state == "":
            limit, why = self._reconnect_seconds, LOST  # time to read its last messages
        elif state in "Tt" and not self._has_heartbeats:
            limit, why = self._limit, f"gave no sign of life for {self._limit:g} s"
        else:
            self._halted_since.pop(peer, None)
            return
        if time.monotonic() - self._halted_since.setdefault(peer, time.monotonic()) >= limit:
            self._drop(peer, why)

    def _drop(self, peer: int, why: str) -> None:
        self._lost[peer] = why
        for label in self._shared[peer]:
            self.groups[label].gone[self.groups[label].numbers[peer]] = why
        self._shared[peer].clear()
        self._end(peer, 0)

    def _end(self, peer: int, linger_ms: int) -> None:
        connection = self.peers.sockets.pop(peer)
        self._poller.unregister(connection.monitor)
        self._poller.unregister(connection.socket)
        connection.close(linger_ms)


class ThreadMembership(Membership):
    """Membership of ranks in threads of this process: ranks cannot die alone, but close, fail and mismatch.

    `group` creates the members of all ranks.
    """

    def __init__(self, rank: int, size: int, group: list[ThreadMembership], lock: threading.RLock) -> None:
        super().__init__(rank, size)
        self._group = group
        self._lock = lock
        self._closed = False

    @classmethod
    def group(cls, size: int) -> list[ThreadMembership]:
        """Return the memberships of all ranks of a communicator, in rank order."""
        group: list[ThreadMembership] = []
        lock = threading.RLock()  # a finalizer in the thread that holds it may call `close`
        group.extend(cls(rank, size, group, lock) for rank in range(size))
        return group

    def announce_and_read(self, sequence: int, code: int, missing: Collection[int] | None = None) -> None:  # noqa: ARG002, D102
        call = (sequence, code)
        if sequence and self.at.get(self.rank) != call:
            with self._lock:
                for membership in self._group:
                    membership.at[self.rank] = call

    def fail(self, error: GanglineError) -> None:  # noqa: D102
        with self._lock:
            for membership in self._others():
                membership.failure = membership.failure or error

    def refuse(self, sequence: int, reason: str) -> None:  # noqa: D102
        with self._lock:
            for membership in self._others():
                membership._add_refusal(self.rank, sequence, reason)

    def close(self) -> None:  # noqa: D102
        with self._lock:
            for membership in self._others() if not self._closed else ():
                membership.gone[self.rank] = CLOSED
            self._closed = True

    def _others(self) -> list[ThreadMembership]:
        return [membership for membership in self._group if membership is not self]


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:_TEXT_LIMIT]


def has_closed(why: str | None) -> bool:
    """Return whether a rank that is gone for this reason has closed its communicator."""
    return why is not None and why.startswith(CLOSED)


def _closed_by(message: object) -> str:
    """Return why a rank is gone after this message; "" if it does not say that the rank closes."""
    match message:
        case ["closed"]:
            return CLOSED
        case ["closed", str(error)] if len(error) <= _TEXT_LIMIT:
            return f"{CLOSED} after {error}"
    return ""


def _unpack(packed: bytes) -> Any:
    try:
        return msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException):
        return None


def _is_call(code: int) -> bool:
    try:
        CallSignature.from_code(code)
    except ValueError:
        return False
    return True


def _check_alive(ranks: list[int], payloads: list[bytes]) -> None:
    dead = [rank for rank in ranks if not state_of(_read_process(rank, payloads[rank]))]
    if dead:
        raise DeadNodeError(f"{name_ranks(dead)} died while the ranks connected")


def _read_process(rank: int, packed: bytes) -> tuple[str, int, int]:
    match _unpack(packed):
        case [str(host), int(pid), int(start)]:
            return host, pid, start
    raise ProtocolError(f"rank {rank} sent {packed[:80]!r} in the bootstrap exchange; expected a process identity")
