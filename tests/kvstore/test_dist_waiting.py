"""Waiting for descriptors and ZeroMQ's sockets together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from gangline.kvstore.parameter_server.transport.poller import LOOKS_SECONDS, Poller


@pytest.fixture
def watch() -> Iterator[Poller]:
    watch = Poller()
    yield watch
    watch.close()


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


def until(watch: Poller, source: object, tries: int = 100) -> bool:
    """Whether something comes; a wait may end for nothing."""
    return any(source in watch.wait(100, looks) for _ in range(tries) for looks in (0.0, LOOKS_SECONDS))


def test_a_descriptor_is_told_of_as_long_as_it_can_be_read(
    watch: Poller, ends: tuple[socket.socket, socket.socket]
) -> None:
    near, far = ends
    watch.add(near.fileno())
    assert watch.wait(0) == set()
    far.send(b"12")
    for looks in (0.0, LOOKS_SECONDS):
        assert watch.wait(1000, looks) == {near.fileno()}
    near.recv(1)
    assert watch.wait(0) == {near.fileno()}
    near.recv(1)
    assert watch.wait(0) == set()
    far.send(b"3")
    watch.remove(near.fileno())
    assert watch.wait(0) == set()


def test_room_is_told_of_while_it_is_looked_for(watch: Poller, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    watch.add(near.fileno())
    with suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    watch.look_for_room(near.fileno(), room=True)
    assert watch.wait(0) == set()
    while far.recv(1 << 20, socket.MSG_DONTWAIT):
        if watch.wait(0):
            break
    assert watch.wait(0) == {near.fileno()}
    watch.look_for_room(near.fileno(), room=False)
    assert watch.wait(0) == set()


def test_an_end_that_is_gone_is_told_of(watch: Poller, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    watch.add(near.fileno())
    far.close()
    assert watch.wait(1000) == {near.fileno()}


def test_messages_that_came_before_anybody_watched_are_told_of(
    watch: Poller, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    near, far = sockets
    for number in range(3):
        near.send(b"%d" % number)
    assert far.poll(5000)  # they are here, and the descriptor has nothing to tell any more
    watch.add(far)
    for number in range(3):
        assert until(watch, far)
        assert far.recv(zmq.NOBLOCK) == b"%d" % number
    assert watch.wait(0) == set()


def test_messages_are_told_of_though_other_calls_took_notice_first(
    watch: Poller, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    near, far = sockets
    watch.add(far)
    for number in range(100):
        near.send(b"%d" % number)
        far.send(b"back")  # takes notice of what has come, and the descriptor is quiet again
        assert until(watch, far)
        assert far.recv(zmq.NOBLOCK) == b"%d" % number


def test_descriptors_are_told_of_beside_sockets(
    watch: Poller, ends: tuple[socket.socket, socket.socket], sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    bell = os.eventfd(1)
    try:
        watch.add(bell)
        watch.add(sockets[1])
        watch.add(ends[0].fileno())
        sockets[0].send(b"x")
        assert sockets[1].poll(5000)
        assert watch.wait(1000) == {bell, sockets[1]}
    finally:
        watch.remove(bell)
        os.close(bell)


def test_there_is_a_last_moment_before_sleep(watch: Poller, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    watch.add(near.fileno())
    called = []

    def last() -> None:
        called.append(1)
        far.send(b"x")

    assert watch.wait(10_000, LOOKS_SECONDS, last) == {near.fileno()}
    assert watch.wait(10_000, LOOKS_SECONDS, last) == {near.fileno()}  # it was there already
    assert called == [1]
