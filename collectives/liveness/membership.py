"""Who is there and what they are at: the ranks of a communicator watch each other, whatever carries their data."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import msgpack
import zmq

from gangline.collectives.call_signature import CallSignature
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, ProtocolError, StallError
from gangline.collectives.liveness.process_state import state_of, this_process
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.zmq.peer_sockets import PeerSocket, PeerSockets

CLOSED = "closed its communicator"
"""Why a rank is gone that said goodbye: an error only for those who still need it."""

LOST = "was killed or left: connection lost"

_ERRORS = {kind.__name__: kind for kind in (GanglineError, DeadNodeError, StallError, ProtocolError, MismatchError)}
_TEXT_LIMIT = 32_000  # characters of an error's text that are told to others
_MESSAGE_LIMIT = 1 << 18  # bytes; characters may take four each
_LINGER_MS = 500


class Membership(ABC):
    """What a rank knows of the others, brought up to date by `look`."""

    rank: int
    size: int
    gone: dict[int, str]
    """Rank -> why it counts as dead; `CLOSED` where it said goodbye."""
    at: dict[int, tuple[int, int]]
    """Rank -> (sequence, code) of the call that it last said it waits in, this rank included. Who never waits long
    says nothing."""
    failure: GanglineError | None
    """What has failed: the first that another rank told, or that this one aborted with."""

    @abstractmethod
    def look(self, sequence: int, code: int) -> None:
        """Say that this rank waits in a call, if that is new, and read what the others said. Never blocks.

        Args:
            sequence: the number of the call on its communicator; 0 for a message between two ranks, of which the others
                are told nothing.
            code: `CallSignature.code`.
        """

    @abstractmethod
    def fail(self, error: GanglineError) -> None:
        """Tell everybody, as far as that goes; never raises, never blocks."""

    def abort(self, error: GanglineError) -> None:
        """Have this rank's waits end by an error too, and tell everybody; from any thread, and never blocks."""
        self.failure = self.failure or error
        self.fail(error)

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to all and give everything back; again: nothing."""


class ProcessMembership(Membership):
    """Of ranks that are processes: a socket to each, with heartbeats by tcp that ZeroMQ's own thread sends and expects.

    A rank busy in Python is therefore never taken for dead. A killed one is seen at once on its own host, elsewhere
    after a second in which it did not come back; one behind a cut cable after ``limit``, and so is a stopped one, which
    by ipc the kernel tells.

    Args:
        exchange: used once.
        heartbeat: seconds between two signs of life; half of ``limit`` at most is used.
        limit: seconds without one after which a rank is dead.
        address: "ipc" or "tcp://HOST", see `PeerSockets`.

    Raises:
        RuntimeError, ValueError, StallError, ProtocolError: as `PeerSockets`.
    """

    def __init__(
        self, rank: int, size: int, exchange: BootstrapAllGather, *, heartbeat: float, limit: float, address: str
    ) -> None:
        self.rank = rank
        self.size = size
        self.gone: dict[int, str] = {}
        self.at: dict[int, tuple[int, int]] = {}
        self.failure: GanglineError | None = None
        self.junk = 0
        """Messages that were not what gangline sends, and were dropped."""
        self._lock = threading.RLock()
        self._closed = False
        self._limit = limit
        self._wait_policy = min(1.0, limit / 4)  # seconds in which a lost connection may come back
        self._wired = address != "ipc"
        options = {int(zmq.MAXMSGSIZE): _MESSAGE_LIMIT}
        if self._wired:  # ZeroMQ aborts the process if one falls due while a socket closes whose peer has closed
            options[int(zmq.HEARTBEAT_IVL)] = max(1, round(min(heartbeat, limit / 2) * 1000))
            options[int(zmq.HEARTBEAT_TIMEOUT)] = max(1, round(limit * 1000))
        self._stopped: dict[int, float] = {}  # since when a neighbour has been seen to be stopped
        self._states_due = 0.0
        card = msgpack.packb(this_process())
        self._pairs = PeerSockets(rank, size, exchange, address=address, options=options, card=card)
        self._processes = [_read_process(peer, card) for peer, card in enumerate(self._pairs.cards)]
        self._said: dict[int, tuple[int, int]] = {}
        self._told_failure = b""
        self._poller = zmq.Poller()
        for peer, line in self._pairs.lines.items():
            line.on_up = partial(self._say_again, peer)
            self._poller.register(line.monitor, zmq.POLLIN)
            self._poller.register(line.socket, zmq.POLLIN)

    def look(self, sequence: int, code: int) -> None:  # noqa: D102
        with self._lock:
            if self._closed:
                return
            if sequence:
                self.at[self.rank] = (sequence, code)
                self._say((sequence, code))
            if self._poller.poll(0):
                for peer, line in list(self._pairs.lines.items()):
                    line.look()
                    self._read(peer, line)
            for peer, line in list(self._pairs.lines.items()):
                if line.down_since is not None:
                    self._judge(peer, line.down_since)
            if not self._wired and time.monotonic() >= self._states_due:
                self._states_due = time.monotonic() + self._limit / 20
                for peer in list(self._pairs.lines):
                    self._judge_neighbour(peer)

    def fail(self, error: GanglineError) -> None:  # noqa: D102
        text = str(error).encode("utf-8", "replace").decode()[:_TEXT_LIMIT]
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
        self._told_failure = msgpack.packb(["failed", name, text])
        self._tell(self._told_failure)

    def close(self) -> None:  # noqa: D102
        with self._lock:
            if self._closed:
                return
            for peer, line in list(self._pairs.lines.items()):
                line.look()
                self._read(peer, line)
            self._tell(msgpack.packb(["closed"]))
            self._closed = True
            for line in self._pairs.lines.values():  # to those who are gone nothing goes out, however long one waits
                line.close(_LINGER_MS if line.down_since is None else 0)
            self._pairs.close(0)

    def _tell(self, packed: bytes) -> None:
        with self._lock:
            for line in self._pairs.lines.values() if not self._closed else ():
                line.send(packed)

    def _say(self, here: tuple[int, int]) -> None:
        packed = None
        for peer, line in self._pairs.lines.items():
            if self._said.get(peer) != here and line.down_since is None:
                packed = packed or msgpack.packb(["at", *here])
                if line.send(packed):
                    self._said[peer] = here

    def _say_again(self, peer: int) -> None:
        """By a new connection: what was said by the old one may not have arrived."""
        self._said.pop(peer, None)
        if self._told_failure:
            self._pairs.lines[peer].send(self._told_failure)

    def _read(self, peer: int, line: PeerSocket) -> None:
        while (packed := line.receive()) is not None:
            match _message(packed):
                case ["at", int(sequence), int(code)] if 0 <= sequence < 1 << 63 and _is_call(code):
                    self.at[peer] = (sequence, code)
                case ["failed", str(name), str(text)] if name in _ERRORS and len(text) <= _TEXT_LIMIT:
                    self.failure = self.failure or _ERRORS[name](text)
                case ["closed"]:
                    self._drop(peer, CLOSED)
                    return
                case _:
                    self.junk += 1

    def _judge(self, peer: int, down_since: float) -> None:
        state = state_of(self._processes[peer])
        if state == "":
            self._drop(peer, LOST)
        elif time.monotonic() - down_since >= self._wait_policy:
            silent = f"gave no sign of life for {self._limit:g} s"
            if state == "?":  # on another host, where a killed and a silent process look alike from here
                self._drop(peer, f"was killed, left, or {silent}")
            else:
                self._drop(peer, silent if self._wired or state in "Tt" else LOST)

    def _judge_neighbour(self, peer: int) -> None:
        if state_of(self._processes[peer]) not in ("T", "t"):
            self._stopped.pop(peer, None)
        elif time.monotonic() - self._stopped.setdefault(peer, time.monotonic()) >= self._limit:
            self._drop(peer, f"gave no sign of life for {self._limit:g} s")

    def _drop(self, peer: int, why: str) -> None:
        self.gone[peer] = why
        line = self._pairs.lines.pop(peer)
        self._poller.unregister(line.monitor)
        self._poller.unregister(line.socket)
        line.close(0)


class ThreadMembership(Membership):
    """Of ranks that are threads of this process, see `group`: none dies alone, but they close, fail and disagree."""

    def __init__(self, rank: int, group: list[ThreadMembership], lock: threading.Lock) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        self.at: dict[int, tuple[int, int]] = {}
        self.failure: GanglineError | None = None
        self._group = group
        self._lock = lock
        self._closed = False

    @classmethod
    def group(cls, size: int) -> list[ThreadMembership]:
        """The rosters of all ranks of a communicator, in rank order."""
        group: list[ThreadMembership] = []
        lock = threading.Lock()
        group.extend(cls(rank, group, lock) for rank in range(size))
        for membership in group:
            membership.size = size
        return group

    def look(self, sequence: int, code: int) -> None:  # noqa: D102
        here = (sequence, code)
        if sequence and self.at.get(self.rank) != here:
            with self._lock:
                for membership in self._group:
                    membership.at[self.rank] = here

    def fail(self, error: GanglineError) -> None:  # noqa: D102
        with self._lock:
            for membership in self._others():
                membership.failure = membership.failure or error

    def close(self) -> None:  # noqa: D102
        with self._lock:
            for membership in self._others() if not self._closed else ():
                membership.gone[self.rank] = CLOSED
            self._closed = True

    def _others(self) -> list[ThreadMembership]:
        return [membership for membership in self._group if membership is not self]


def _message(packed: bytes) -> Any:
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


def _read_process(rank: int, packed: bytes) -> list[str | int]:
    match _message(packed):
        case [str(place), int(pid), int(start)]:
            return [place, pid, start]
    raise ProtocolError(f"rank {rank} exchanged {packed[:80]!r}, which does not name its process")
