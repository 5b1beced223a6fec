"""Poller: descriptors and ZeroMQ sockets together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from gangline.kvstore.parameter_server.transport.poller import SPIN_SECONDS, Poller


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        port = far.bind_to_random_port("tcp://127.0.0.1")
        near.connect(f"tcp://127.0.0.1:{port}")
        yield near, far


def until(poller: Poller, source: object, tries: int = 100) -> bool:
    """Return whether a source becomes ready; single waits may return nothing."""
    return any(source in poller.wait(100, spin) for _ in range(tries) for spin in (0.0, SPIN_SECONDS))


def test_a_writable_descriptor_is_reported_on_request(
    poller: Poller, ends: tuple[socket.socket, socket.socket]
) -> None:
    near, far = ends
    poller.add(near.fileno())
    with suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    poller.poll_writable(near.fileno(), writable=True)
    assert poller.wait(0) == set()
    while far.recv(1 << 20, socket.MSG_DONTWAIT):
        if poller.wait(0):
            break
    assert poller.wait(0) == {near.fileno()}
    poller.poll_writable(near.fileno(), writable=False)
    assert poller.wait(0) == set()


def test_messages_that_arrived_before_add_are_reported(
    poller: Poller, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    near, far = sockets
    for number in range(3):
        near.send(b"%d" % number)
    assert far.poll(5000)  # they have arrived, and the descriptor is no longer readable
    poller.add(far)
    for number in range(3):
        assert until(poller, far)
        assert far.recv(zmq.NOBLOCK) == b"%d" % number
    assert poller.wait(0) == set()


def test_messages_are_reported_after_other_calls_have_read_the_events(
    poller: Poller, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    near, far = sockets
    poller.add(far)
    for number in range(100):
        near.send(b"%d" % number)
        far.send(b"back")  # reads the events, so the descriptor is no longer readable
        assert until(poller, far)
        assert far.recv(zmq.NOBLOCK) == b"%d" % number


def test_descriptors_and_sockets_are_reported_together(
    poller: Poller, ends: tuple[socket.socket, socket.socket], sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    event_fd = os.eventfd(1)
    try:
        poller.add(event_fd)
        poller.add(sockets[1])
        poller.add(ends[0].fileno())
        sockets[0].send(b"x")
        assert sockets[1].poll(5000)
        assert poller.wait(1000) == {event_fd, sockets[1]}
    finally:
        poller.remove(event_fd)
        os.close(event_fd)
