"""ZeroMQ transport: order of messages, invalid messages, and lost ranks."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from gangline import connect
from gangline.collectives.call_signature import CallSignature
from gangline.collectives.errors import GanglineError, ProtocolError
from gangline.collectives.liveness.membership import ProcessMembership
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.transports.base import PIECE, MessageTag
from gangline.collectives.transports.zmq.peer_sockets import PeerSockets
from gangline.collectives.transports.zmq.transport import INLINE, ZmqTransport
from gangline.launcher.job import free_ports
from tests.collectives.grid import values
from tests.collectives.processes import Processes, Rank
from tests.collectives.ranks import PATIENT, with_exchange
from tests.hosts import Hosts, enter, obstacle

pytestmark = pytest.mark.timeout(60)

ADDRESSES = ("ipc", "tcp://127.0.0.1")
SUM = CallSignature("all_reduce", 4, torch.float32, "sum").code
LIMIT = 1.0
ramp = partial(values, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the ranks
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def open_transport(rank: Rank, address: str) -> ZmqTransport:
    return ZmqTransport(rank.rank, rank.size, rank.exchange, PATIENT, address=address)


# Valid messages


def _close_at_once(rank: Rank, address: str) -> None:
    transport = open_transport(rank, address)
    if rank.rank:
        transport.send(0, ramp(PIECE + 1, 1), MessageTag(1, SUM)).wait()
        for number in range(5000):
            transport.send(0, ramp(1000, number), MessageTag(number, SUM))
        transport.close()
        transport.close()
        rank.tell("closed")
        return
    rank.tell("open")
    rank.hear()
    out, small = torch.empty(PIECE + 1, dtype=torch.uint8), torch.empty(1000, dtype=torch.uint8)
    transport.receive(1).into(out)
    right = torch.equal(out, ramp(PIECE + 1, 1))
    for number in range(5000):
        transport.receive(1).into(small)
        right = right and torch.equal(small, ramp(1000, number))
    rank.tell(right)


@pytest.mark.parametrize("address", ADDRESSES)
def test_close_waits_for_a_rank_that_is_behind(address: str) -> None:
    with Processes(_close_at_once, 2, address) as ranks:
        assert ranks.heard(0) == "open"
        ranks.say(0, "receive")
        assert ranks.all_heard() == [True, "closed"]


# Invalid messages


@contextmanager
def bare() -> Iterator[tuple[ZmqTransport, PeerSockets]]:
    """Yield the transport of rank 0 and the bare sockets of rank 1."""
    transport, other = with_exchange(
        lambda rank, exchange: ZmqTransport(rank, 2, exchange, PATIENT, address="ipc"),
        lambda rank, exchange: PeerSockets(rank, 2, exchange, address="ipc", options={}),
    )
    try:
        yield transport, other
    finally:
        other.close(0)
        transport.close()


def header(
    magic: bytes = b"gll1", number: int = 0, sequence: int = 1, code: int = SUM, nbytes: int = 0, body: bytes = b""
) -> bytes:
    return struct.pack("<4sQqQQ", magic, number, sequence, code, nbytes) + body


def _send_to_a_late_rank(rank: Rank, address: str, count: int, nbytes: int) -> None:
    """Rank 1 receives only when no more of rank 0's messages leave."""
    process = psutil.Process()
    transport = open_transport(rank, address)
    if rank.rank == 0:
        data = ramp(nbytes, 0)
        before = process.memory_info().rss
        sends = []
        for number in range(count):
            sends.append(transport.send(1, data, MessageTag(number, SUM)))
            for _ in range(100):
                if nbytes <= INLINE or sends[-1].is_done():
                    break
                time.sleep(0.01)  # until it has left, or waits for rank 1
            if not sends[-1].is_done():
                break
        rank.tell([len(sends), process.memory_info().rss - before])
        for request in sends:
            request.wait()
        rank.hear()
    else:
        before = process.memory_info().rss
        sent = rank.hear()
        rank.tell(process.memory_info().rss - before)
        got = torch.empty(nbytes, dtype=torch.uint8)
        for _ in range(sent):
            transport.receive(0).into(got)
            assert torch.equal(got, ramp(nbytes, 0))
        rank.tell("right")
    transport.close()
    rank.tell("closed")


@pytest.mark.parametrize(("count", "nbytes"), [pytest.param(64, 8 << 20, marks=pytest.mark.slow), (8192, INLINE)])
def test_a_late_rank_buffers_a_bounded_amount(count: int, nbytes: int) -> None:
    with Processes(_send_to_a_late_rank, 2, "tcp://127.0.0.1", count, nbytes) as ranks:
        sent, at_sender = ranks.heard(0)
        assert sent < count
        ranks.say(1, sent)
        assert max(ranks.heard(1), at_sender) < 128 << 20
        assert ranks.heard(1) == "right"
        ranks.say(0, "end")
        assert ranks.all_heard() == ["closed"] * 2


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"", "rank 1 sent 0 bytes; expected a message header of 36"),
        (b"x" * 35, "rank 1 sent 35 bytes; expected a message header of 36"),
        (b"x" * 36, "which is not a message header"),
        (header(magic=b"gll2"), "which is not a message header"),
        (header(nbytes=5, body=b"1234"), "which is not a message header"),
        (header(nbytes=0, body=b"1"), "which is not a message header"),
        (header(nbytes=INLINE + 1, body=b"1"), "which is not a message header"),
        (header(nbytes=1 << 60), "which is not a message header"),
        (header(number=2), "rank 1 sent message 2, expected 0: messages were lost"),
    ],
)
def test_a_bad_header_is_refused(message: bytes, text: str) -> None:
    with bare() as (transport, other):
        other.sockets[0].send(message)
        with pytest.raises(ProtocolError, match=text):
            transport.receive(1)


@pytest.mark.parametrize("frame", [b"", bytes(PIECE - 1), bytes(PIECE + 1)])
def test_a_piece_of_another_size_is_refused(frame: bytes) -> None:
    with bare() as (transport, other):
        for number, read in enumerate(("piece", "into", "done")):
            other.sockets[0].send(header(number=number, nbytes=2 * PIECE))
            other.sockets[0].send(frame)
            receive_request = transport.receive(1)
            arguments = {"piece": (0,), "into": (torch.empty(2 * PIECE, dtype=torch.uint8),), "done": ()}[read]
            with pytest.raises(
                ProtocolError, match=f"sent {len(frame)} bytes as a piece of a message, expected {PIECE}"
            ):
                getattr(receive_request, read)(*arguments)


# Lost ranks


def _wait_for_the_other_host(rank: Rank, addresses: list[str], namespaces: list[str]) -> None:
    enter(namespaces[rank.rank])
    os.environ["GANGLINE_INSECURE"] = "1"
    host = f"tcp://{addresses[rank.rank]}"
    membership = ProcessMembership(rank.rank, rank.size, rank.exchange, heartbeat=0.2, limit=LIMIT, address=host)
    watchdog = Watchdog(membership, 60, 60)
    transport = ZmqTransport(rank.rank, rank.size, rank.exchange, watchdog, address=host)
    watchdog.begin(1, SUM)
    rank.tell("ready")
    try:
        transport.receive(1 - rank.rank)
    except GanglineError as error:
        begin = time.monotonic()
        transport.close()
        membership.close()
        rank.tell([type(error).__name__, str(error), time.monotonic() - begin < 4])
    rank.hear()


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_a_cut_cable_between_two_hosts_is_an_error_for_both_ends() -> None:
    with Hosts(2) as hosts, Processes(_wait_for_the_other_host, 2, hosts.addresses, hosts.names) as ranks:
        assert ranks.all_heard() == ["ready"] * 2
        hosts.cut(1)
        for rank, (name, text, is_closed_soon) in enumerate(ranks.all_heard()):
            assert (name, is_closed_soon) == ("DeadNodeError", True)
            assert text.startswith(f"rank {1 - rank} gave no sign of life for 2 s")


def _add_up(rank: Rank, names: list[str], addresses: list[str]) -> None:
    os.environ["GANGLINE_INSECURE"] = "1"
    enter(names[rank.rank])
    with connect(rank.rank, rank.size, f"{addresses[0]}:29500", timeout=60) as comm:
        while rank.hear() == "add":
            value = torch.full([1000], float(1 + rank.rank))
            rank.tell("begins")
            comm.all_reduce(value)
            rank.tell(value.unique().tolist())


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_a_cut_between_two_hosts_that_heals_within_the_limit_loses_nothing() -> None:
    with Hosts(2) as hosts, Processes(_add_up, 2, hosts.names, hosts.addresses) as ranks:

        def add(cut: int = 0) -> None:
            links = [(0, hosts.addresses[1]), (1, hosts.addresses[0])]
            for host, address in links if cut else ():
                wrong = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
                hosts.run(host, ["ip", "neigh", "replace", address, *wrong])
            for rank in range(2):
                ranks.say(rank, "add")
            assert ranks.all_heard() == ["begins"] * 2
            if cut:
                hosts.run(0, ["sleep", str(cut)])
                for host, address in links:
                    hosts.run(host, ["ip", "neigh", "delete", address, "dev", "eth0"])
            assert ranks.all_heard() == [[3.0]] * 2

        for cut in (0, 9, 0):
            add(cut)
        for rank in range(2):
            ranks.say(rank, "end")


# File descriptors


@pytest.mark.slow
def test_processes_that_do_not_close_their_communicator_end_without_a_word() -> None:
    program = """
import torch
from gangline import connect
comm = connect(transport="tcp")
comm.all_reduce(torch.ones(1 << 20))
"""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, **place, "RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    assert [(process.communicate()[1], process.returncode) for process in processes] == [(b"", 0)] * 2


# Hosts


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_simulated_hosts_are_isolated_from_this_machine_and_removed_afterwards() -> None:
    def namespaces() -> set[str]:
        return {path.name for path in Path("/run/netns").glob(f"gangline-{os.getpid()}-*")}

    with Hosts(2) as hosts:
        assert namespaces() >= set(hosts.names)
        for host, address in enumerate(hosts.addresses):
            shown = hosts.run(host, ["ip", "-brief", "-4", "address", "show", "eth0"], {"LANG": "C"})
            assert f"{address}/24" in shown
            assert "UP" in shown
        endless = hosts.start(0, ["sleep", "infinity"])
    assert endless.returncode == -signal.SIGKILL
    assert namespaces() == set()

    with pytest.raises(KeyboardInterrupt), Hosts(3):
        raise KeyboardInterrupt
    assert namespaces() == set()
