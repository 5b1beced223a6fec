"""Waiting for sockets: a look or two while others run, and only then sleep, for to be woken costs more than to look."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Set

import zmq

LOOKS_SECONDS = 0.0003

Source = int | zmq.Socket[bytes]
"""What can be waited for: a descriptor, or a socket of ZeroMQ's."""


class Poller:
    """Descriptors and sockets that one thread waits for together; the kernel keeps the list."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by descriptor

    def add(self, source: Source) -> None:
        """Wait for it from now on: until it can be read, or is broken."""
        if isinstance(source, int):
            descriptor = source
        else:
            descriptor = int(source.getsockopt(zmq.FD))
            self._sockets[descriptor] = source
        self._epoll.register(descriptor, select.EPOLLIN)

    def look_for_room(self, descriptor: int, *, room: bool) -> None:
        """Wait also until a descriptor takes bytes, or no longer."""
        self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if room else 0))

    def remove(self, descriptor: int) -> None:
        """Wait for it no longer; to be called before it is closed."""
        self._epoll.unregister(descriptor)

    def wait(
        self, timeout_ms: int, looks_seconds: float = 0.0, before_sleep: Callable[[], object] = lambda: None
    ) -> Set[Source]:
        """What has come; returns when something has, after ``timeout_ms``, and now and then for nothing.

        Args:
            timeout_ms: in milliseconds.
            looks_seconds: how long to look and let others run before this thread sleeps.
            before_sleep: called when that was in vain.
        """
        # A socket's descriptor tells of changes only: what was there before they were looked at last must be asked for.
        come: set[Source] = {socket for socket in self._sockets.values() if _has_come(socket)}
        if come:
            return come | self._look(0)
        if looks_seconds:
            ends = time.perf_counter() + looks_seconds
            while True:
                come = self._look(0)
                if come:
                    return come
                if time.perf_counter() >= ends:
                    break
                os.sched_yield()
        before_sleep()
        come = {socket for socket in self._sockets.values() if _has_come(socket)}  # it may have sent, and taken notice
        return come | self._look(0) if come else self._look(timeout_ms / 1000)

    def close(self) -> None:
        """Give the list back; again: nothing."""
        self._epoll.close()

    def _look(self, seconds: float) -> set[Source]:
        come: set[Source] = set()
        for descriptor, _ in self._epoll.poll(seconds):
            socket = self._sockets.get(descriptor)
            if socket is None:
                come.add(descriptor)
            elif _has_come(socket):
                come.add(socket)
        return come


def _has_come(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
