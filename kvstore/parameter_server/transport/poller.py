"""Poller for descriptors and ZeroMQ sockets that spins briefly before it sleeps, since waking a thread is slower."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Set

import zmq

SPIN_SECONDS = 0.0003

Source = int | zmq.Socket[bytes]
"""File descriptor or ZeroMQ socket."""


class Poller:
    """Set of descriptors and ZeroMQ sockets that one thread waits for, based on epoll."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by descriptor

    def add(self, source: Source) -> None:
        """Report a source from now on whenever it is readable or closed by its peer."""
        if isinstance(source, int):
            descriptor = source
        else:
            descriptor = int(source.getsockopt(zmq.FD))
            self._sockets[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)

    def poll_writable(self, descriptor: int, *, writable: bool) -> None:
        """Start or stop reporting a descriptor when it is writable, in addition to readable."""
        self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if writable else 0))

    def remove(self, source: Source) -> None:
        """Stop reporting a source; call it before the source is closed."""
        descriptor = source if isinstance(source, int) else int(source.getsockopt(zmq.FD))
        self._sockets.pop(descriptor, None)
        self._epoll.unregister(descriptor)

    def wait(
        self, timeout_ms: int, spin_seconds: float = 0.0, before_sleep: Callable[[], object] = lambda: None
    ) -> Set[Source]:
        """Wait until a source is ready and return the ready ones; spurious empty results are possible.

        Poll and yield the CPU for ``spin_seconds``; then call ``before_sleep`` and sleep for the timeout at most.
        """
        # A ZeroMQ descriptor is edge-triggered: messages from before the last read of EVENTS do not make it readable.
        ready = self._readable()
        if ready:
            return ready | self._poll(0)
        if spin_seconds:
            ends = time.perf_counter() + spin_seconds
            while True:
                ready = self._poll(0)
                if ready:
                    return ready
                if time.perf_counter() >= ends:
                    break
                os.sched_yield()
        before_sleep()
        # before_sleep may have sent, which also reads EVENTS and so consumes the edge
        ready = self._readable()
        return ready | self._poll(0) if ready else self._poll(timeout_ms / 1000)

    def close(self) -> None:
        """Close the epoll descriptor. Idempotent."""
        self._epoll.close()

    def _readable(self) -> set[Source]:
        return {socket for socket in self._sockets.values() if _is_readable(socket)} if self._sockets else set()

    def _poll(self, seconds: float) -> set[Source]:
        ready: set[Source] = set()
        for descriptor, _ in self._epoll.poll(seconds):
            socket = self._sockets.get(descriptor)
            if socket is None:
                ready.add(descriptor)
            elif _is_readable(socket):
                ready.add(socket)
        return ready


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
