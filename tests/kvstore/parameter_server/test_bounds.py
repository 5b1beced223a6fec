"""Bounds before trust: what strangers send costs no memory, and an honest round goes on beside it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from gangline.kvstore.parameter_server.store import DistStore
from gangline.kvstore.parameter_server.transport.client_channel import scheduler_address
from gangline.kvstore.parameter_server.transport.pieces import PIECE
from tests.kvstore.parameter_server.fuzz import check
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.parameter_server.processes import DistJob

pytestmark = pytest.mark.timeout(110)
MIB = 1 << 20
IDENTITY = b"glu1" + struct.pack("<IQ", 1, 16) + b"s" * 16
"""First message of a process to a Unix socket."""
Attack = Callable[[str, ExitStack], None]


def rounds(folder: str) -> int:
    """Run rounds until the test is over, with exact sums; worker 0 counts them in a file."""
    here = Path(folder)
    with DistStore("dist_sync") as kv:
        kv.init("key", torch.zeros(1000))
        over, out, count = torch.zeros(1000), torch.empty(1000), 0
        kv.init("over", over)
        if kv.rank == 0:
            servers, scheduler = kv._scheduler.servers, scheduler_address(kv._scheduler._address)
            (here / "names.part").write_text(f"{scheduler} {servers[0]}".replace("unix://", ""))
            (here / "names.part").rename(here / "names")
        while not over.any():
            digit = 4.0 ** (kv.rank + 2 * (count % 3))
            kv.pushpull("key", torch.full((1000,), digit), out=out)
            assert out.tolist() == [5 * 16.0 ** (count % 3)] * 1000
            kv.pushpull("over", torch.full((1000,), float((here / "over").exists())), out=over)
            count += 1
            if kv.rank == 0:
                (here / "count.part").write_text(str(count))
                (here / "count.part").rename(here / "count")
        return count


def nested(name: str, stack: ExitStack) -> None:
    """Send 68 MiB of nested lists."""
    send(connected(name, stack), IDENTITY + b"glu1" + struct.pack("<IQ", 1, 68 * MIB), b"\x90" * MIB, 68)


def large_header(name: str, stack: ExitStack) -> None:
    """Announce a frame of 2 GiB and begin to send it."""
    send(connected(name, stack), IDENTITY + b"glu1" + struct.pack("<IQ", 1, 2 << 30), bytes(MIB), 256)


def endless_multipart(name: str, stack: ExitStack) -> None:
    """Send the head of a message of more frames than a stranger may send, and frames without end."""
    sizes = struct.pack("<I", 65_535) + struct.pack("<Q", 1000) * 65_535
    send(connected(name, stack), IDENTITY + b"glu1" + sizes, bytes(MIB), 100)


def unread_answers(name: str, stack: ExitStack) -> None:
    """Send small messages, and read none of the answers."""
    small = b"glu1" + struct.pack("<IQ", 1, 3) + b"\x93\x04\x99"
    send(connected(name, stack), IDENTITY, small * 1000, 100)


def idle_connections(name: str, stack: ExitStack) -> None:
    """Make 2,000 connections and keep them."""
    for number in range(2000):
        send(connected(name, stack), IDENTITY if number % 2 else b"", b"", 0)


def slow_handshakes(name: str, stack: ExitStack) -> None:
    """Send the first message of 100 connections byte by byte."""
    connections = [connected(name, stack) for _ in range(100)]
    for byte in IDENTITY[:20]:
        for connection in connections:
            send(connection, bytes([byte]), b"", 0)
        time.sleep(0.005)


def connected(name: str, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(f"\0{name}")  # waits while the queue of the listener is full
    connection.settimeout(20)
    return connection


def send(connection: socket.socket, head: bytes, body: bytes, times: int) -> None:
    """Send bytes as far as the other side takes them."""
    with suppress(ConnectionError):
        connection.sendall(head)
        for _ in range(times):
            connection.sendall(body)


@contextmanager
def running(folder: Path) -> Iterator[tuple[DistJob, list[str]]]:
    """Run honest rounds; yield the job and the names of the sockets of its scheduler and its server."""
    with DistJob(rounds, 2, 1, str(folder)) as job, ThreadPoolExecutor(1) as pool:
        ending = pool.submit(job.results)  # also relays what the processes exchange
        wait_for_rounds(folder)
        yield job, (folder / "names").read_text().split()
        (folder / "over").touch()
        assert len(set(ending.result(60))) == 1


def wait_for_rounds(folder: Path, count: int = 3) -> None:
    """Wait until some more honest rounds are complete."""
    file, limit = folder / "count", time.monotonic() + 60
    begin = int(file.read_text()) if file.exists() else 0
    while not file.exists() or int(file.read_text()) < begin + count:
        assert time.monotonic() < limit, "no honest round is completed"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_strangers_cost_no_memory_and_delay_no_honest_round(role: str, tmp_path: Path) -> None:
    attacks: list[Attack] = [nested, large_header, endless_multipart, unread_answers, idle_connections, slow_handshakes]
    with running(tmp_path) as (job, names):
        process = psutil.Process(job.pid(role, 0))
        name = names[role == "server"]
        before, descriptors = process.memory_info().rss, process.num_fds()
        for attack in attacks:
            with ExitStack() as stack:
                attack(name, stack)
                wait_for_rounds(tmp_path)
                assert process.memory_info().rss - before < 64 * MIB, attack
                assert process.num_fds() - descriptors <= 128 + 1, attack
        with ExitStack() as stack:  # a stranger is not waited for without end
            assert connected(name, stack).recv(1) == b""
            wait_for_rounds(tmp_path)


@pytest.mark.parametrize("flags", [2, 6], ids=["message", "command"])
def test_over_tcp_a_large_frame_is_refused_by_its_header(flags: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", "tcp")
    with Job(1) as job, socket.create_connection(("127.0.0.1", job.scheduler.port)) as stranger:
        stranger.settimeout(20)
        greeting = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(52, b"\0")
        ready = b"\5READY\x0bSocket-Type\0\0\0\6DEALER"
        handshake = b"\4" + bytes([len(ready)]) + ready if flags == 2 else b""
        stranger.sendall(greeting + handshake + bytes([flags]) + struct.pack(">Q", 2 << 30))
        with suppress(ConnectionError):
            while stranger.recv(1000):
                pass
        with job.stores()[0] as kv:
            kv.init("key", torch.zeros(PIECE // 4 + 3))  # in two pieces
            out = torch.empty(PIECE // 4 + 3)
            kv.pushpull("key", torch.ones(PIECE // 4 + 3), out=out)
            assert out.eq(1).all()


# A thousand mutated messages to a live job; `make fuzz` sends a million


@pytest.mark.parametrize("name", ["dist_async", pytest.param("dist_sync", marks=pytest.mark.slow)])
def test_mutated_messages_change_no_honest_round(name: str) -> None:
    print(check(name, 1000, seed=1))


def test_a_message_of_the_first_zeromq_protocol_does_not_end_the_scheduler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", "tcp")
    with Job(1) as job:
        port = int(job.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\x01\x00\x03\x00ab")  # an empty identity and a frame; it carries no descriptor
            with job.stores()[0] as kv:
                kv.init("key", torch.zeros(1))
    assert job.scheduler._listener.rejected == 1
    assert "a message of an old version of ZeroMQ's protocol" in caplog.text
