"""Transport between threads of one process: a message is a reference to the sender's tensor."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from torch import Tensor

from gangline.collectives.limits import WAIT_CHECK_SECONDS
from gangline.collectives.transports.base import (
    PIECE,
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
    wait_until,
)


class ThreadGroup:
    """State shared by the threads of one communicator."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues = {(a, b): deque[_Message]() for a in range(size) for b in range(size)}
        self.updates = 0
        """Number of calls of `update`."""
        self._changed = threading.Condition()

    def update(self, change: Callable[[], None]) -> None:
        """Call ``change`` under the lock and notify all waiting threads."""
        with self._changed:
            change()
            self.updates += 1
            self._changed.notify_all()

    def wait_for_update(self, seen: int, seconds: float) -> None:
        """Block until there have been more than ``seen`` updates, or for so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.updates > seen, seconds)

    def wait(self, ready: Callable[[], bool], wait_policy: WaitPolicy, peer: int) -> None:
        """Block until ``ready()``, which ``peer`` makes true."""

        def pause(_: float) -> None:
            with self._changed:
                self._changed.wait_for(ready, WAIT_CHECK_SECONDS)

        wait_until(ready, pause, lambda: wait_policy.check([peer]))


class InProcessTransport(Transport):
    """Transport between the threads of one process."""

    name = "in_process"

    def __init__(self, rank: int, group: ThreadGroup, wait_policy: WaitPolicy) -> None:
        self.rank, self.size = rank, group.size
        self._group = group
        self._wait_policy = wait_policy

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102
        message = _Message(self._group, self._wait_policy, to, data, message_tag)
        self._group.update(lambda: self._group.queues[self.rank, to].append(message))
        return message

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        queue = self._group.queues[source, self.rank]
        while (receive_request := self.poll(source)) is None:  # it may have been withdrawn meanwhile
            self._group.wait(lambda: bool(queue), self._wait_policy, source)
        return receive_request

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        queue = self._group.queues[source, self.rank]
        with suppress(IndexError):
            return _Received(self._group, self._wait_policy, source, queue)
        return None

    def progress(self) -> bool:  # noqa: D102
        return False

    def waiter(self, sources: Collection[int], targets: Collection[int]) -> Callable[[float], None]:  # noqa: ARG002, D102
        return partial(self._group.wait_for_update, self._group.updates)

    def wake(self) -> None:  # noqa: D102
        self._group.update(lambda: None)

    def withdraw(self) -> None:  # noqa: D102
        def clear() -> None:
            for to in range(self.size):
                self._group.queues[self.rank, to].clear()

        self._group.update(clear)

    close = withdraw


class _Message(SendRequest):
    def __init__(
        self, group: ThreadGroup, wait_policy: WaitPolicy, to: int, data: Tensor, message_tag: MessageTag
    ) -> None:
        self.data, self.message_tag = data, message_tag
        self._group, self._wait_policy, self._to = group, wait_policy, to
        self.is_read = False

    def is_done(self) -> bool:
        return self.is_read

    def wait(self) -> None:
        self._group.wait(self.is_done, self._wait_policy, self._to)


class _Received(ReceiveRequest):
    def __init__(self, group: ThreadGroup, wait_policy: WaitPolicy, source: int, queue: deque[_Message]) -> None:
        self._group, self._wait_policy, self._source, self._queue = group, wait_policy, source, queue
        self._message = queue[0]
        self.message_tag, self.nbytes = self._message.message_tag, self._message.data.numel()

    def piece(self, index: int) -> Tensor:
        return self._message.data[index * PIECE : (index + 1) * PIECE]

    def into(self, target: Tensor) -> None:
        target.copy_(self._message.data)
        self.done()

    def done(self) -> None:
        self._group.update(self._finish)
        if not self._message.is_read:  # withdrawn, and perhaps written before it was read: `check` raises the reason
            self._group.wait(lambda: False, self._wait_policy, self._source)

    def _finish(self) -> None:
        if self._queue and self._queue[0] is self._message:
            self._queue.popleft()
            self._message.is_read = True
