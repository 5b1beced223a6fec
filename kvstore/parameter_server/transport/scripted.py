"""Scripted faults at the messages of a parameter-server job: wrappers that exist only where GANGLINE_FAULT is set."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, cast

import zmq

from gangline.collectives.faults import Script
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.transport.client_channel import Channel, Frames, open_channel
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.parameter_server.transport.poller import Poller, Source

_POINTS = {
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
    protocol.ValuesRead.kind: "done",
    protocol.Command.kind: "command",
    protocol.CommandResult.kind: "result",
}


def _points_of(frames: Frames, push: str) -> list[str]:
    """Return the points of a message; ``push`` is the point of a `Push`."""
    kind = frames[0][2] if frames and len(frames[0]) > 2 else 0  # after the length of the list and the version
    points = [push] if kind == protocol.Push.kind else [_POINTS[kind]] if kind in _POINTS else []
    call = protocol.unpack(frames[0]) if kind == protocol.Collective.kind else None
    return [*points, "barrier"] if isinstance(call, protocol.Collective) and call.name.startswith("barrier") else points


def open_scripted(
    address: str, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, poller: Poller, script: Script | None
) -> Channel:
    """Connect as `client_channel.open_channel`; messages pass the script, unless there is none."""
    channel = open_channel(address, context, identity, poller)
    return channel if script is None else cast(Channel, ScriptedChannel(channel, script))


class ScriptedChannel:
    """Connection to a server or the scheduler whose messages pass a script."""

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
    """Sockets of a server or the scheduler whose messages pass a script."""

    def __init__(
        self, host: str, event_fd: int | None = None, *, port: int | None = None, script: Script | None = None
    ) -> None:
        super().__init__(host, event_fd, port=port)
        self.script = script
        """None until a server knows its rank."""
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
        if self.script is None:
            return super().send(identity, frames, in_place=in_place)
        sent = [True]
        send = super().send

        def act() -> None:
            sent[0] = send(identity, frames, in_place=in_place)

        self.script.pass_on(_points_of(frames, "push-taken"), (identity, "sent"), act, partial(self.cut, identity))
        return sent[0]
