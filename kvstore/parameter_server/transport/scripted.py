"""Scripted faults at the messages of a parameter-server job: wrappers that exist only where GANGLINE_FAULT is set."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, cast

import zmq

from gangline.collectives.faults import Script
from gangline.kvstore.parameter_server.protocol import (
    Ack,
    Collective,
    CollectiveResult,
    Command,
    CommandResult,
    Define,
    Hello,
    Leave,
    Message,
    Pull,
    Push,
    Register,
    Values,
    ValuesRead,
    ViewAnswer,
    ViewChange,
    ViewQuery,
    ViewRequest,
)
from gangline.kvstore.parameter_server.transport.client_channel import Channel, Frames, open_channel
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.parameter_server.transport.poller import Poller, Source

_POINTS = {
    Register.kind: "join",
    Collective.kind: "meet",
    CollectiveResult.kind: "met",
    Leave.kind: "leave",
    ViewRequest.kind: "view",
    ViewQuery.kind: "view",
    ViewAnswer.kind: "view",
    ViewChange.kind: "view",
    Hello.kind: "hello",
    Define.kind: "define",
    Pull.kind: "pull",
    Ack.kind: "ack",
    Values.kind: "values",
    ValuesRead.kind: "done",
    Command.kind: "command",
    CommandResult.kind: "result",
}


def points_of(message: Message) -> list[str]:
    """Return the points of a message from or to the scheduler."""
    points = [_POINTS[message.kind]] if message.kind in _POINTS else []
    return [*points, "barrier"] if isinstance(message, Collective) and message.name.startswith("barrier") else points


def _points_of(frames: Frames, push: str) -> list[str]:
    """Return the points of a message from or to a server; ``push`` is the point of a `Push`."""
    kind = frames[0][2] if frames and len(frames[0]) > 2 else 0  # after the length of the list and the version
    return [push] if kind == Push.kind else [_POINTS[kind]] if kind in _POINTS else []


def open_scripted(
    address: str, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, poller: Poller, script: Script | None
) -> Channel:
    """Connect to a server as `client_channel.open_channel`; messages pass the script, unless there is none."""
    channel = open_channel(address, context, identity, poller)
    return channel if script is None else cast(Channel, ScriptedChannel(channel, script))


class ScriptedChannel:
    """Connection of a worker to a server whose messages pass a script."""

    def __init__(self, channel: Channel, script: Script) -> None:
        self._channel = channel
        self._script = script
        self._passed: deque[list[memoryview]] = deque()  # received messages

    def __getattr__(self, name: str) -> Any:
        """Return what passes no script from the connection itself."""
        return getattr(self._channel, name)

    def send(self, frames: Frames) -> None:  # noqa: D102
        act = partial(self._channel.send, frames)
        self._script.pass_on(_points_of(frames, "push-sent"), (self, "sent"), act, self._channel.cut)

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:  # noqa: D102
        if not events:
            self._script.release()
        for frames in self._channel.receive(events):
            act = partial(self._passed.append, frames)
            self._script.pass_on(_points_of(frames, "push-sent"), (self, "received"), act, self._channel.cut)
            while self._passed:
                yield self._passed.popleft()
        while self._passed:
            yield self._passed.popleft()

    def close(self) -> None:  # noqa: D102
        self._script.release()
        self._channel.close()


class ScriptedListener(Listener):
    """Sockets of a server whose messages pass a script."""

    script: Script | None = None
    """Set once the server knows its rank."""

    def __init__(self, host: str, event_fd: int) -> None:
        super().__init__(host, event_fd)
        self._passed: deque[tuple[bytes, list[memoryview]]] = deque()  # received messages

    def wait(self, timeout_ms: int, before_sleep: Callable[[], object] = lambda: None) -> bool:  # noqa: D102
        is_notified = super().wait(timeout_ms, before_sleep)
        if not self._events and self.script is not None:
            self.script.release()
        return is_notified

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:  # noqa: D102
        if self.script is None:
            yield from super().receive()
            return
        for identity, frames in super().receive():
            act = partial(self._passed.append, (identity, frames))
            points = _points_of(frames, "push-taken")
            self.script.pass_on(points, (identity, "received"), act, partial(self.cut, identity))
            while self._passed:
                yield self._passed.popleft()
        while self._passed:
            yield self._passed.popleft()

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview], *, in_place: bool = False) -> bool:  # noqa: D102
        act = partial(super().send, identity, frames, in_place=in_place)
        if self.script is None:
            return act()
        self.script.pass_on(_points_of(frames, "push-taken"), (identity, "sent"), act, partial(self.cut, identity))
        return True
