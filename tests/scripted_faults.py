"""Scripted faults of real processes: GANGLINE_FAULT="server 1 kill at close 7; worker 0.1 break at push-sent 3".

A script is a list of faults, separated by semicolons: process, action, "at", point, and the number of the event, from
1. A fault is for the first start of its process; "worker 1.2" is worker 1 after its second restart. Nothing depends on
time or chance. A point is a message that the process sends or receives, before it does so, but for these: "update" (a
shard has been updated, its round is not closed yet), "close" (a round is closed, nothing has been answered) and
"collective" (a rank begins a collective). Before the job begins a process has the rank that it asked for; a server,
which asks for none, takes the faults of all servers at join.

Actions: "kill" and "stop" by signal ("stop for 5 s" continues after that time); "break" loses the message and the
connection, in both directions; "repeat" sends or handles the message twice; "swap" exchanges it with the next one of
the connection, or sends it last if there is none.

`install` wraps methods of gangline in a process whose environment has a script. It runs on import, in processes that
tests fork; in those that programs start, by sitecustomize.py in the folder that `variables` adds to PYTHONPATH.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from zmq import MessageTracker

from gangline.collectives.engine.engine import Engine, GroupResources
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client import scheduler_client, server_client
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.scheduler import scheduler
from gangline.kvstore.parameter_server.scheduler.scheduler import Scheduler
from gangline.kvstore.parameter_server.server import server
from gangline.kvstore.parameter_server.server.rounds import ShardRounds
from gangline.kvstore.parameter_server.transport.client_channel import Channel, Frames, StreamChannel, open_channel
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.parameter_server.transport.poller import Source
from gangline.kvstore.restart_variables import incarnation

if TYPE_CHECKING:
    import pytest

VARIABLE = "GANGLINE_FAULT"
_log = logging.getLogger("gangline")

_COMMON = ("join", "leave")
_DATA = ("hello", "define", "pull", "ack", "values", "command", "result")
_CALLS = ("meet", "barrier", "met")
POINTS: Mapping[str, tuple[str, ...]] = {
    "worker": (*_COMMON, *_CALLS, *_DATA, "push-sent", "view"),
    "server": (*_COMMON, *_DATA, "push-taken", "update", "close", "view"),
    "scheduler": (*_COMMON, *_CALLS, "view"),
    "rank": ("collective",),
}
"""Points of each role. All but update, close and collective are messages sent or received by the process."""
_NOT_MESSAGES = ("update", "close", "collective")
ACTIONS = ("kill", "stop", "stop for N s", "break", "repeat", "swap")
_FORM = re.compile(
    r"(?P<role>[^\s.]+)(?:(?: (?P<rank>\d+))?(?:\.(?P<incarnation>\d+))?)? (?P<action>\S+)"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) s)?"
    r" at (?P<point>\S+) (?P<number>\d+)"
)


class Fault(NamedTuple):
    """One fault of a script."""

    role: str
    rank: int
    """0 for the scheduler."""
    action: str
    seconds: float | None
    """Seconds after which a stopped process continues; None: never."""
    point: str
    number: int
    """Number of the event, from 1."""
    text: str
    incarnation: int = 0
    """Number of earlier restarts of the process."""


def parse(text: str) -> list[Fault]:
    """Return the faults of a script.

    Raises:
        ValueError: if a part of the script is invalid; the message names the part, its position and what is allowed.
    """
    faults = []
    begin = 0
    for part in text.split(";"):
        at = begin + len(part) - len(part.lstrip())
        begin += len(part) + 1
        if words := " ".join(part.split()):
            faults.append(_parsed(words, f"{VARIABLE} has {words!r} at character {at}"))
    return faults


def _parsed(words: str, where: str) -> Fault:
    found = _FORM.fullmatch(words)
    if found is None:
        raise ValueError(f"{where}; expected such as 'server 1 kill at close 7' or 'scheduler stop for 5 s at meet 2'")
    role, action, point = found["role"], found["action"], found["point"]
    seconds = None if found["seconds"] is None else float(found["seconds"])
    if role not in POINTS:
        raise ValueError(f"{where} with role {role!r}; expected {_either(POINTS)}")
    if (found["rank"] is None) != (role == "scheduler"):
        raise ValueError(f"{where}; expected a number after worker, server or rank, and none after scheduler")
    if action not in [one.split()[0] for one in ACTIONS] or (seconds is not None and action != "stop"):
        raise ValueError(f"{where} with action {action!r}; expected {_either(ACTIONS)}")
    if point not in POINTS[role]:
        raise ValueError(f"{where} with point {point!r}; a {role} has the points {_either(POINTS[role])}")
    if point in _NOT_MESSAGES and action not in ("kill", "stop"):
        raise ValueError(f"{where}; {point} is no message, so only kill and stop are possible there")
    if int(found["number"]) < 1:
        raise ValueError(f"{where} with event 0; expected a number from 1")
    again = int(found["incarnation"] or 0)
    return Fault(role, int(found["rank"] or 0), action, seconds, point, int(found["number"]), words, again)


def _either(words: Collection[str]) -> str:
    return ", ".join(words)


def script_of(role: str, rank: int) -> Script:
    """Return the script of a process.

    Args:
        role: "worker", "server", "scheduler" or "rank".
        rank: -1 if it is not known yet: until it is, the faults of all ranks of the role count.

    Raises:
        ValueError: if the script is invalid.
    """
    return Script([fault for fault in parse(os.environ[VARIABLE]) if fault.incarnation == incarnation()], role, rank)


class Script:
    """Faults of one process, which counts its events.

    Args:
        faults: of all processes.
        role: of this process.
        rank: of this process; -1: not known yet. Assign it when it is.
    """

    def __init__(self, faults: Collection[Fault], role: str, rank: int) -> None:
        self.rank = rank
        self._faults = [fault for fault in faults if fault.role == role]
        self._counts: Counter[str] = Counter()
        self._held: dict[tuple[object, ...], Callable[[], object]] = {}  # messages to exchange with the next, by line

    def reach(self, point: str) -> Fault | None:
        """Count an event; kill or stop this process if the script says so, or return a fault of a message."""
        self._counts[point] += 1
        event = point, self._counts[point]
        found = None
        for fault in self._faults:
            if (fault.point, fault.number) == event and self.rank in (-1, fault.rank):
                _log.warning("%s: %s", VARIABLE, fault.text)
                if fault.action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.action == "stop":
                    _stop(fault.seconds)
                else:
                    found = fault
        return found

    def pass_on(
        self, points: Collection[str], line: tuple[object, ...], act: Callable[[], object], cut: Callable[[], object]
    ) -> None:
        """Send or handle a message, unless the script has a fault at one of its points.

        Args:
            points: points of the message.
            line: the channel or listener, then what names the connection and direction: a message changes places with
                the next one of the same line.
            act: sends or handles the message.
            cut: breaks the connection.
        """
        found = [fault.action for point in points if (fault := self.reach(point)) is not None]
        if "break" in found:
            self._held.pop(line, None)
            cut()
        elif "swap" in found and line not in self._held:
            self._held[line] = act
        else:
            act()
            if "repeat" in found:
                act()
            if (held := self._held.pop(line, None)) is not None:
                held()

    def release(self, owner: object) -> None:
        """Send or handle what a channel or listener holds, in its thread, because no other message follows."""
        for line in [line for line in list(self._held) if line[0] is owner]:
            self._held.pop(line)()


def _stop(seconds: float | None) -> None:
    """Stop this process; a helper continues it after some seconds, unless ``seconds`` is None."""
    own = os.getpid()
    if seconds is not None:
        code = f"import os, signal, time; time.sleep({seconds}); os.kill({own}, signal.SIGCONT)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # kill() would let this thread run on for a moment


def _shut_down(descriptor: int, port: int | None = None) -> None:
    """Break the TCP connection of a descriptor, if it is one and has this port (None: any), in both directions."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            ports = one.getpeername()[1], one.getsockname()[1]  # OSError: it only listens
            if port is None or port in ports:
                one.shutdown(socket.SHUT_RDWR)


# Messages of a parameter-server job

_POINT_OF = {
    protocol.Register.kind: "join",
    protocol.Collective.kind: "meet",
    protocol.CollectiveResult.kind: "met",
    protocol.Leave.kind: "leave",
    protocol.ViewRequest.kind: "view",
    protocol.ViewQuery.kind: "view",
    protocol.ViewAnswer.kind: "view",
    protocol.ViewChange.kind: "view",
    protocol.Hello.kind: "hello",
    protocol.Define.kind: "define",
    protocol.Pull.kind: "pull",
    protocol.Ack.kind: "ack",
    protocol.Values.kind: "values",
    protocol.Command.kind: "command",
    protocol.CommandResult.kind: "result",
}


def _points_of(frames: Frames, push: str) -> list[str]:
    """Return the points of a message; ``push`` is the point of a `Push`."""
    kind = frames[0][2] if frames and len(frames[0]) > 2 else 0  # after the length of the list and the version
    points = [push] if kind == protocol.Push.kind else [_POINT_OF[kind]] if kind in _POINT_OF else []
    call = protocol.unpack(frames[0]) if kind == protocol.Collective.kind else None
    return [*points, "barrier"] if isinstance(call, protocol.Collective) and call.name.startswith("barrier") else points


_current: Script | None = None
"""The script of this process, if it is one of a parameter-server job."""


class ScriptedChannel:
    """Connection to a server or the scheduler whose messages pass a script."""

    def __init__(self, channel: Channel, script: Script) -> None:
        self._channel = channel
        self._script = script
        self._passed: deque[list[memoryview]] = deque()  # received messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, frames: Frames) -> None:
        act = partial(self._channel.send, frames)
        self._script.pass_on(_points_of(frames, "push-sent"), (self, "sent"), act, self._break)

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:
        if not events:
            self._script.release(self)
        for frames in self._channel.receive(events):
            act = partial(self._passed.append, frames)
            self._script.pass_on(_points_of(frames, "push-sent"), (self, "received"), act, self._break)
            while self._passed:
                yield self._passed.popleft()
        while self._passed:
            yield self._passed.popleft()

    def close(self) -> None:
        self._script.release(self)
        self._channel.close()

    def _break(self) -> None:
        if isinstance(self._channel, StreamChannel):
            self._channel.close()
            return
        for name in os.listdir("/proc/self/fd"):
            _shut_down(int(name), int(self._channel._port))  # type: ignore[attr-defined]


class ScriptedListener(Listener):
    """Sockets of a server or the scheduler whose messages pass the script of this process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._passed: deque[tuple[bytes, list[memoryview]]] = deque()  # received messages

    def wait(self, timeout_ms: int, before_sleep: Callable[[], object] = lambda: None) -> bool:
        is_notified = super().wait(timeout_ms, before_sleep)
        if not self._events and _current is not None:
            _current.release(self)
        return is_notified

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:
        assert _current is not None
        for identity, frames in super().receive():
            act = partial(self._passed.append, (identity, frames))
            cut = partial(self._break, identity)
            _current.pass_on(_points_of(frames, "push-taken"), (self, identity, "received"), act, cut)
            while self._passed:
                yield self._passed.popleft()
        while self._passed:
            yield self._passed.popleft()

    def send(
        self, identity: bytes, frames: Sequence[bytes | memoryview], transfers: list[MessageTracker] | None = None
    ) -> bool:
        assert _current is not None
        sent = [True]
        send = super().send

        def act() -> None:
            sent[0] = send(identity, frames, transfers)

        cut = partial(self._break, identity)
        _current.pass_on(_points_of(frames, "push-taken"), (self, identity, "sent"), act, cut)
        return sent[0]

    def _break(self, identity: bytes) -> None:
        """Break the connection of an admitted process, or of the last message's sender."""
        if identity in self._descriptors:
            self._close_stream(self._descriptors[identity])
        else:
            _shut_down(self._remote.get(identity, self._source))


# Where processes get their scripts


def variables(script: str) -> dict[str, str]:
    """Return the environment of a program whose processes have this script."""
    folder = str(Path(__file__).with_name("sitecustomize"))
    return {VARIABLE: script, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


def script_processes(patch: pytest.MonkeyPatch, script: str) -> None:
    """Set the script of the processes that a test starts."""
    for name, value in variables(script).items():
        patch.setenv(name, value)


def install() -> None:
    """Wrap what this process calls at the points, once, if its environment has a script."""
    if not os.environ.get(VARIABLE) or scheduler.Listener is ScriptedListener:
        return
    for module in (scheduler, server):
        module.Listener = ScriptedListener  # type: ignore[attr-defined, misc]
    for module in (scheduler_client, server_client):
        module.open_channel = _open_channel  # type: ignore[attr-defined]
    Scheduler.__init__ = _scheduler_opened(Scheduler.__init__)  # type: ignore[method-assign]
    SchedulerClient.__init__ = _client_opened(SchedulerClient.__init__)  # type: ignore[method-assign]
    ShardRounds._write = _written(ShardRounds._write)  # type: ignore[method-assign]
    ShardRounds._closed = _closed(ShardRounds._closed)  # type: ignore[method-assign]
    Engine.__init__ = _engine_opened(Engine.__init__)  # type: ignore[method-assign]
    for name in ("begin", "run_compiled"):
        setattr(Engine, name, _begun(getattr(Engine, name)))


def _open_channel(*arguments: Any) -> Any:
    assert _current is not None
    return ScriptedChannel(open_channel(*arguments), _current)


def _scheduler_opened(opened: Callable[..., None]) -> Callable[..., None]:
    def scripted(own: Scheduler, *arguments: Any, **options: Any) -> None:
        global _current
        _current = script_of("scheduler", 0)
        opened(own, *arguments, **options)

    return scripted


def _client_opened(opened: Callable[..., None]) -> Callable[..., None]:
    def scripted(own: SchedulerClient, role: str, *arguments: Any, rank: int = -1, **options: Any) -> None:
        global _current
        _current = script_of(role, rank)
        opened(own, role, *arguments, rank=rank, **options)
        _current.rank = own.rank

    return scripted


def _written(write: Callable[..., None]) -> Callable[..., None]:
    def scripted(own: ShardRounds, *arguments: Any) -> None:
        *before, update, note, end = arguments

        def updated() -> None:
            update()
            assert _current is not None
            _current.reach("update")

        write(own, *before, updated, note, end)

    return scripted


def _closed(close: Callable[..., None]) -> Callable[..., None]:
    def scripted(own: ShardRounds, *arguments: Any) -> None:
        close(own, *arguments)
        assert _current is not None
        _current.reach("close")

    return scripted


def _engine_opened(opened: Callable[..., None]) -> Callable[..., None]:
    def scripted(own: Engine, resources: GroupResources) -> None:
        opened(own, resources)
        own.hold()  # the compiled core begins no collective by itself
        _of_engines[own] = script_of("rank", resources.rank)

    return scripted


_of_engines: WeakKeyDictionary[Engine, Script] = WeakKeyDictionary()


def _begun(begin: Callable[..., Any]) -> Callable[..., Any]:
    def scripted(own: Engine, *arguments: Any) -> Any:
        _of_engines[own].reach("collective")
        return begin(own, *arguments)

    return scripted


install()
