"""Membership and watchdog: real processes that are killed, messages of strangers, and the errors that end waits."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.collectives.call_signature import CallSignature
from gangline.collectives.communicator import open_communicator
from gangline.collectives.environments.job_key import JobKey, write_file
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, ProtocolError, StallError
from gangline.collectives.limits import limits
from gangline.collectives.liveness.membership import CLOSED, LOST, PROPOSALS, ProcessMembership, ThreadMembership
from gangline.collectives.liveness.process_state import ending_error, state_of, this_process
from gangline.collectives.liveness.watchdog import Watchdog, mismatch
from gangline.collectives.processes import process_pool
from gangline.collectives.transports.addresses import required_key
from gangline.collectives.transports.base import BootstrapAllGather, MessageTag
from gangline.collectives.transports.zmq.context import SharedContext
from gangline.collectives.transports.zmq.peer_sockets import PeerSocket, PeerSockets
from gangline.collectives.transports.zmq.transport import ZmqTransport
from tests.collectives.processes import Processes, Rank, in_processes
from tests.collectives.ranks import PATIENT, with_exchange

pytestmark = pytest.mark.timeout(60)

LIMIT = 0.6
SUM = CallSignature("all_reduce", 4, torch.float32, "sum").code
FROM_0 = CallSignature("broadcast", 8, torch.float32, root=0).code
ADDRESSES = ("ipc", "tcp://127.0.0.1")


@pytest.fixture(autouse=True)
def _no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    process_pool.start()  # the server outlives this test, so it must not inherit its directories
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the ranks
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def open_membership(rank: Rank, address: str, limit: float = LIMIT) -> ProcessMembership:
    tempfile.tempdir = None  # the fork server's; the environment now names another
    return ProcessMembership(rank.rank, rank.size, rank.exchange, heartbeat=0.2, limit=limit, address=address)


def until(condition: Callable[[], Any], membership: ProcessMembership, sequence: int = 1, code: int = SUM) -> None:
    while not condition():
        membership.announce_and_read(sequence, code)
        os.sched_yield()


# Lost ranks


def _die_before_the_connection(rank: Rank, address: str) -> None:
    if rank.rank == 1:
        rank.exchange(msgpack.packb((msgpack.packb(this_process()), {})))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DeadNodeError) as raised:
        open_membership(rank, address)
    rank.tell(str(raised.value))


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_rank_that_dies_while_the_ranks_connect_is_named(address: str) -> None:
    with Processes(_die_before_the_connection, 2, address) as ranks:
        assert ranks.heard(0) == "rank 1 died while the ranks connected"


# Messages


KINDS = (GanglineError, DeadNodeError, StallError, ProtocolError, MismatchError)


def _tell_failures(rank: Rank) -> None:
    memberships = [open_membership(rank, "ipc") for _ in KINDS]
    text = "rank 1: größer " + "x" * 50_000
    for membership, kind in zip(memberships, KINDS, strict=True):
        if rank.rank == 1:
            membership.fail(kind(text))
        else:
            until(lambda membership=membership: membership.failure is not None, membership)
    rank.tell(
        [[type(membership.failure).__name__, str(membership.failure) == text[:32_000]] for membership in memberships]
    )
    rank.hear()


def test_an_error_reaches_the_others_with_its_class_and_text() -> None:
    told = [[kind.__name__, True] for kind in KINDS]
    assert in_processes(_tell_failures, 3) == [told, [["NoneType", False]] * len(KINDS), told]


def _wait_for_the_last(rank: Rank) -> None:
    membership = open_membership(rank, "ipc")
    told = []
    for _ in range(3):
        membership.announce_and_read(1, SUM, {rank.size - 1})
        told.append(len(membership._announced))
        is_last_told = rank.size - 1 in membership._announced or rank.rank == rank.size - 1
        assert is_last_told
    until(lambda: len(membership.at) == rank.size, membership)
    rank.tell(told)
    rank.hear()


def test_a_late_call_costs_each_rank_a_few_messages_at_a_time() -> None:
    assert in_processes(_wait_for_the_last, 13) == [[8, 12, 12]] * 13


# Invalid input


@contextmanager
def pair_of(address: str = "ipc", limit: float = LIMIT) -> Iterator[tuple[ProcessMembership, PeerSockets, str]]:
    """Yield the membership of rank 0, the bare sockets of rank 1, and rank 0's endpoint."""
    noted, identity = Mock(), msgpack.packb(["another host", 1, 1])

    def own(rank: int, exchange: BootstrapAllGather) -> ProcessMembership:
        noted.side_effect = exchange
        return ProcessMembership(rank, 2, noted, heartbeat=0.2, limit=limit, address=address)

    membership, other = with_exchange(
        own, lambda rank, exchange: PeerSockets(rank, 2, exchange, address=address, options={}, payload=identity)
    )
    try:
        [(endpoint, _)] = msgpack.unpackb(noted.call_args.args[0], strict_map_key=False)[1].values()
        yield membership, other, endpoint
    finally:
        other.close(0)
        membership.close()


INVALID = [
    b"",
    b"\xff\xff",
    b"\x93" * 5000,
    b"\x81\x90\x90",
    msgpack.packb(None),
    msgpack.packb(["at"]),
    msgpack.packb(["at", "1", 2]),
    msgpack.packb(["at", -1, SUM]),
    msgpack.packb(["at", 1, -1]),
    msgpack.packb(["at", 1, 2**64 - 1]),
    msgpack.packb(["at", 1, SUM, 0]),
    msgpack.packb(["failed", "SystemExit", "0"]),
    msgpack.packb(["failed", "StallError", 0]),
    msgpack.packb(["failed", "StallError", "x" * 40_000]),
    msgpack.packb(["closed", 1]),
    msgpack.packb({"closed": 1}),
    msgpack.packb(msgpack.Timestamp(0)),
]


def test_invalid_messages_are_counted_and_dropped() -> None:
    with pair_of() as (membership, other, _):
        for message in INVALID:
            other.sockets[0].send(message)
        other.sockets[0].send(msgpack.packb(["at", 7, FROM_0]))
        until(lambda: 1 in membership.at, membership)
        assert membership.connections.invalid_messages == len(INVALID)
        assert (membership.gone, membership.failure, membership.at[1]) == ({}, None, (7, FROM_0))


def test_no_bytes_break_a_membership() -> None:
    with pair_of() as (membership, other, _):

        @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(st.binary(max_size=100))
        def look(message: bytes) -> None:
            other.sockets[0].send(message)
            before = membership.connections.invalid_messages
            until(lambda: membership.connections.invalid_messages > before, membership)

        look()


def test_a_message_beyond_the_limit_ends_the_connection_and_is_dropped() -> None:
    with pair_of() as (membership, other, _):
        other.sockets[0].send(bytes(1 << 20))
        until(lambda: membership.gone, membership)
        assert membership.gone == {1: f"was killed, left, or gave no sign of life for {LIMIT:g} s"}
        assert membership.connections.invalid_messages == 0


def test_a_stranger_at_the_port_neither_joins_nor_ends_a_connection() -> None:
    with pair_of("tcp://127.0.0.1") as (membership, other, port):
        with zmq.Context() as context, context.socket(zmq.PAIR) as stranger:
            stranger.linger = 0
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(port)
            stranger.send(msgpack.packb(["closed"]))  # before the handshake fails and takes the pipe away
            is_turned_away = monitor.poll(10_000)
            stranger.disable_monitor()
            monitor.close()
        assert is_turned_away
        host, _, number = port.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(number))) as program:
            program.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        end = time.monotonic() + LIMIT / 2  # time enough for a lost connection to count
        until(lambda: time.monotonic() > end, membership, 2)
        other.sockets[0].send(msgpack.packb(["at", 2, SUM]))
        until(lambda: 1 in membership.at, membership, 2)
        assert (membership.connections.invalid_messages, membership.gone) == (0, {})
        assert other.sockets[0].socket.poll(10_000)
        assert other.sockets[0].receive() == msgpack.packb(["at", 2, SUM])


def test_a_stranger_that_replaces_a_lost_rank_is_ignored() -> None:
    with pair_of("tcp://127.0.0.1", 4) as (membership, other, port):
        other.close(0)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(port)
            for message in (["at", 3, SUM], ["failed", "StallError", "no"], ["closed"]):
                stranger.send(msgpack.packb(message))
            until(lambda: membership.gone, membership)
        assert membership.gone == {1: "was killed, left, or gave no sign of life for 8 s"}
        assert (membership.at.keys(), membership.failure) == ({0}, None)


def test_a_lost_connection_may_be_restored() -> None:
    with pair_of("tcp://127.0.0.1", 40) as (membership, other, port):
        token = other.sockets[0].token
        other.close(0)
        membership.fail(StallError("too late"))
        with zmq.Context() as context, context.socket(zmq.DEALER) as again:
            again.linger = 0
            again.routing_id = b"gangline-" + token
            again.connect(port)
            again.send(token[16:])
            again.send(msgpack.packb(["at", 3, SUM]))
            until(lambda: 1 in membership.at or membership.gone, membership)
            assert (membership.at[1], membership.gone) == ((3, SUM), {})
            assert [again.recv() for _ in range(2) if again.poll(10_000)] == [
                token[:16],
                msgpack.packb(["failed", "StallError", "too late"]),  # which may not have arrived before
            ]


# File descriptors


def _count_descriptors(rank: Rank) -> None:
    """Open and close a membership and a transport over each address; tell what they hold open, and what stays."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:  # starts pyzmq's thread that frees sent memory
        other.copy_threshold = 0
        other.linger = 0
        other.connect("inproc://nobody")
        other.send(b"", copy=False, track=True)
    before = len(os.listdir("/proc/self/fd"))
    kinds: tuple[Callable[[str], Any], ...] = (
        lambda address: open_membership(rank, address, limit=10),
        lambda address: ZmqTransport(rank.rank, rank.size, rank.exchange, PATIENT, address=address),
    )
    for address, kind in itertools.product(ADDRESSES, kinds):
        opened = kind(address)
        rank.tell(len(os.listdir("/proc/self/fd")) - before)
        rank.exchange(b"")
        opened.close()
        rank.tell(len(os.listdir("/proc/self/fd")) - before)
        rank.exchange(b"")


@pytest.mark.slow
def test_sixteen_ranks_open_few_descriptors_and_close_them() -> None:
    with Processes(_count_descriptors, 16) as ranks:
        for _ in range(2 * len(ADDRESSES)):
            assert max(ranks.all_heard()) <= 15 * 5 + 10
            assert ranks.all_heard() == [0] * 16


def _poll_without_descriptors(rank: Rank) -> None:
    membership = open_membership(rank, "ipc")
    with full_descriptor_table():
        membership.connections.next_state_check = 0.0
        try:
            membership.announce_and_read(1, SUM)
            found: Any = membership.gone
        except OSError as error:
            found = str(error)
    rank.tell(found)
    rank.hear()


@contextmanager
def full_descriptor_table() -> Iterator[None]:
    """Use up this process's file descriptors inside the section."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _share_a_context(rank: Rank) -> None:
    before, shared = _holdings(), SharedContext()
    first, second = (
        ZmqTransport(rank.rank, rank.size, rank.exchange, PATIENT, address="ipc", context=shared) for _ in range(2)
    )
    threads = _holdings()[1] - before[1]
    rank.exchange(b"")
    first.close()
    second.send(1 - rank.rank, torch.ones(3, dtype=torch.uint8), MessageTag(1, SUM))
    received = second.receive(1 - rank.rank).piece(0).tolist()
    rank.exchange(b"")
    second.close()
    end = time.monotonic() + 10  # a thread that has been joined is in /proc for a moment longer
    while _holdings() != before and time.monotonic() < end:
        time.sleep(0.01)
    rank.tell([threads, received, _holdings() == before])
    rank.hear()


def test_transports_of_a_group_share_threads() -> None:
    assert in_processes(_share_a_context, 2) == [[2, [1, 1, 1], True]] * 2


def _open_with_few_descriptors(rank: Rank, address: str) -> None:
    few, hard = len(os.listdir("/proc/self/fd")) + 20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    open_membership(rank, address).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few  # the soft limit was raised
    rank.exchange(b"")
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="file descriptors left") as raised:
        open_membership(rank, address)
    rank.tell([raised.value.errno, raised.value.strerror, len(os.listdir("/proc/self/fd")) - before])
    rank.hear()


@pytest.mark.parametrize("address", ADDRESSES)
def test_too_few_descriptors_are_an_error_of_all_ranks_that_names_the_limit(address: str) -> None:
    first, second, third = in_processes(_open_with_few_descriptors, 3, address)
    assert first == second == third
    number, text, more = first
    assert (number, more) == (errno.EMFILE, 0)
    assert re.fullmatch(
        r"rank 1 has \d+ of \d+ file descriptors left, and its sockets to 2 ranks need 26; raise the limit with "
        r"`ulimit -n` before the job starts \(the hard limit is \d+\)",
        text,
    )


def test_a_full_descriptor_table_kills_nobody() -> None:
    assert in_processes(_poll_without_descriptors, 2) == [{}, {}]


def test_an_error_is_sent_to_the_peers_whose_sockets_work() -> None:
    with pair_of() as (membership, other, _):
        with zmq.Context() as context:
            broken = PeerSocket(context, bytes(32), binds=False)
            broken.close(0)
        sockets = membership.connections.peers.sockets
        membership.connections.peers.sockets = {0: broken, **sockets}
        membership.connections._shared[0] = {""}
        membership.fail(StallError("too late"))
        membership.connections.peers.sockets = sockets
        assert other.sockets[0].socket.poll(10_000)
        assert other.sockets[0].receive() == msgpack.packb(["failed", "StallError", "too late"])


# Groups that are split off


def _holdings() -> tuple[int, int]:
    """Return the numbers of this process's file descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _split_membership(rank: Rank, address: str) -> None:
    whole = open_membership(rank, address)
    before = _holdings()
    pair = whole.subgroup([2, 0], 1) if rank.rank != 1 else None
    again = whole.subgroup([0, 1, 2], 2)
    rank.exchange(b"")
    assert _holdings() == before
    until(lambda: len(again.at) == 3, again, 5)
    assert again.at == dict.fromkeys(range(3), (5, SUM))
    assert whole.at == {}
    rank.exchange(b"")
    whole.close()
    if pair is not None:
        until(lambda: len(pair.at) == 2, pair, 7, FROM_0)
        assert (pair.rank, pair.at) == (0 if rank.rank == 2 else 1, dict.fromkeys(range(2), (7, FROM_0)))
        assert pair.gone == {}
        if rank.rank == 0:
            pair.fail(StallError("of the pair"))
        else:
            until(lambda: pair.failure, pair, 7, FROM_0)
            assert str(pair.failure) == "of the pair"
    rank.exchange(b"")
    assert (again.failure, again.gone) == (None, {})
    if pair is not None:
        pair.close()
    rank.tell("ready")
    until(lambda: 1 in again.gone or rank.rank == 1, again, 6)
    while rank.rank == 1:
        again.announce_and_read(6, SUM)  # until it is killed
    rank.tell(again.gone)
    again.close()
    rank.tell(_holdings() < before)


@pytest.mark.parametrize("address", ADDRESSES)
def test_groups_share_connections_that_outlive_the_group_they_were_split_from(address: str) -> None:
    with Processes(_split_membership, 3, address) as ranks:
        assert ranks.all_heard() == ["ready"] * 3
        ranks.kill(1)
        for rank in (0, 2):
            assert ranks.heard(rank)[1] == LOST
            assert ranks.heard(rank) is True


def _close_in_any_order(rank: Rank, address: str) -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        whole = open_membership(rank, address)
        groups = [whole, whole.subgroup([0, 1], 1), whole.subgroup([0, 1], 2)]
        rank.exchange(b"")
        if rank.rank == 0:
            for index in order:
                groups[index].close()
                groups[index].close()
                rank.exchange(b"")
        else:
            for index in order:
                until(lambda group=groups[index]: group.gone, groups[index])
                assert groups[index].gone == {0: CLOSED}
                assert [bool(group.gone) for group in groups].count(True) == order.index(index) + 1
                rank.exchange(b"")
            for group in groups:
                group.close()
    whole = open_membership(rank, address)
    groups = [whole, whole.subgroup([0, 1], 1)]
    rank.exchange(b"")
    for group in groups if rank.rank else groups[::-1]:  # in opposite order
        group.close()
    rank.tell([group.gone.get(1 - rank.rank, CLOSED) for group in groups])


@pytest.mark.parametrize("address", ADDRESSES)
def test_groups_close_one_by_one_in_any_order_and_the_connection_ends(address: str) -> None:
    assert in_processes(_close_in_any_order, 2, address) == [[CLOSED] * 2] * 2


def _close_after_an_error(rank: Rank) -> None:
    membership = open_membership(rank, "ipc")
    if rank.rank == 0:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")
        except torch.OutOfMemoryError:
            membership.close()
    else:
        until(lambda: membership.gone, membership)
    rank.tell(membership.gone)


def test_a_rank_that_closes_after_an_error_names_it() -> None:
    why = f"{CLOSED} after OutOfMemoryError: CUDA out of memory."
    assert in_processes(_close_after_an_error, 2) == [{}, {0: why}]


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nMore lines"), "OutOfMemoryError: CUDA out of memory."),
        (MemoryError(), "MemoryError"),
        (ValueError("x" * 1000), f"ValueError: {'x' * 288}"),
        (ValueError("\udcff"), "ValueError: ?"),
        (_UnprintableError(), "_UnprintableError"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(0), ""),
        (SystemExit(), ""),
    ],
)
def test_an_error_that_ends_a_process_has_one_short_line(error: BaseException, text: str) -> None:
    try:
        raise error
    except BaseException:  # noqa: BLE001
        assert ending_error() == text


def _count_rounds_of_split(rank: Rank) -> None:
    exchange = Mock(wraps=rank.exchange)
    comm = open_communicator(rank.rank, rank.size, exchange)
    assert exchange.call_count == 4
    sockets = [len(comm._resources.membership.connections.peers.sockets)]
    before, number = _holdings(), comm._engine.next_number
    group = comm.split(0)
    assert exchange.call_count == 4
    sockets.append(len(group._resources.membership.connections.peers.sockets))
    collectives = comm._engine.next_number - number
    rank.tell([sockets, _holdings() == before, collectives])
    comm.close()
    assert group.all_reduce(torch.ones(3)).tolist() == [3.0] * 3
    group.close()


def test_a_split_opens_no_socket_and_no_thread() -> None:
    rounds = 4  # colors, memory, outcome, end; each is two all-gathers: lengths and bytes
    assert in_processes(_count_rounds_of_split, 3) == [[[2, 2], True, 2 * rounds]] * 3


def test_a_failed_exchange_leaves_no_resources(tmp_path: Path) -> None:
    def exchange(data: bytes) -> list[bytes]:
        assert len(list(tmp_path.iterdir())) == 1
        assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o700
        raise ConnectionError(errno.ECONNRESET, "no store")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionError, match="no store"):
        ProcessMembership(0, 3, exchange, heartbeat=1, limit=10, address="ipc")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before

    with pytest.raises(ProtocolError, match=r"rank 0 sent b'nonsense' in the bootstrap.*; expected a map of its"):
        ProcessMembership(0, 2, lambda _: [b"nonsense"] * 2, heartbeat=1, limit=10, address="ipc")


def test_addresses_that_strangers_can_reach_need_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGLINE_INSECURE", raising=False)
    monkeypatch.delenv("GANGLINE_JOB_KEY_FILE", raising=False)
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]", "lo"):
        assert required_key(host) is None
    for host in ("10.0.0.1", "0.0.0.0", "::", "eth0", "no such host"):
        with pytest.raises(RuntimeError, match=r"address .* can be reached.*_JOB_KEY_FILE.*GANGLINE_INSECURE=1"):
            required_key(host)
    with pytest.raises(RuntimeError, match=r"address 10\.0\.0\.1 can be reached"):
        ProcessMembership(0, 1, lambda data: [data], heartbeat=1, limit=10, address="tcp://10.0.0.1")
    monkeypatch.setenv("GANGLINE_INSECURE", "1")
    assert required_key("10.0.0.1") is None
    key = JobKey.new()
    write_file(key, tmp_path / "key")
    monkeypatch.setenv("GANGLINE_JOB_KEY_FILE", str(tmp_path / "key"))
    assert required_key("10.0.0.1") == key  # a key is used where there is one
    assert required_key("127.0.0.1") is None
    (tmp_path / "key").unlink()
    for address in ("udp://1.1.1.1", "tcp://", "127.0.0.1"):
        with pytest.raises(ValueError, match="expected 'ipc' or 'tcp://HOST'"):
            ProcessMembership(0, 1, lambda data: [data], heartbeat=1, limit=10, address=address)


# Waits


def group_at(*calls: tuple[int, int] | None) -> list[ThreadMembership]:
    """Return memberships of ranks that have announced these calls; None: that have not announced any."""
    group = ThreadMembership.group(len(calls))
    for membership, call in zip(group, calls, strict=True):
        if call is not None:
            membership.announce_and_read(*call)
    return group


def watch_of(membership: ThreadMembership, timeout: float = 60) -> Watchdog:
    watchdog = Watchdog(membership, timeout, stall_warn=60)
    watchdog.begin(5, SUM)
    return watchdog


def check_until(watchdog: Watchdog, missing: list[int]) -> GanglineError:
    while True:
        try:
            watchdog.check(missing)
        except GanglineError as error:
            return error


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock by one that advances by 10 ms at each call, so that the test need not wait."""
    ticks = itertools.count(10_000)
    monkeypatch.setattr(
        "gangline.collectives.liveness.watchdog.time", SimpleNamespace(monotonic=lambda: next(ticks) / 100)
    )


def test_the_death_of_a_rank_ends_waits_on_all_ranks() -> None:
    group = group_at(None, None, None, None)
    group[0].gone.update({3: LOST, 2: CLOSED, 1: LOST})
    error = check_until(watch_of(group[0]), [])
    text = f"ranks 1, 3 {LOST} (rank 0 waited in all_reduce(4 x float32, sum))"
    assert (type(error), str(error)) == (DeadNodeError, text)
    assert [(type(membership.failure), str(membership.failure)) for membership in group[1:]] == [
        (DeadNodeError, text)
    ] * 3
    again = check_until(watch_of(group[2]), [0])
    assert (type(again), str(again)) == (DeadNodeError, text)


@pytest.mark.usefixtures("quick_clock")
def test_a_closed_rank_is_an_error_only_for_ranks_that_wait_for_it() -> None:
    group = group_at(None, None, None)
    group[1].close()
    group[1].close()
    watchdog = watch_of(group[0])
    for _ in range(500):  # longer than what it sent may take to arrive
        watchdog.check([2])
    watchdog.check([1])  # what it sent before may still arrive
    error = check_until(watchdog, [1, 2])
    assert str(error) == f"rank 1 {CLOSED} (rank 0 waited in all_reduce(4 x float32, sum))"
    assert isinstance(error, DeadNodeError)


@pytest.mark.usefixtures("quick_clock")
def test_a_mismatch_waits_a_little_for_ranks_that_have_not_announced_a_call() -> None:
    group = group_at((5, SUM), (5, FROM_0), None)
    watchdog = watch_of(group[0])
    watchdog.check([1])
    group[2].announce_and_read(6, FROM_0)  # past this call
    with pytest.raises(MismatchError, match=r"rank 0: all_reduce\(.*\); rank 1: broadcast\([^;]*\)$"):
        watchdog.check([1])
    late = group_at((5, SUM), (5, FROM_0), None)
    assert str(check_until(watch_of(late[0]), [1])) == str(check_until(watchdog, [1])) == str(group[1].failure)


def test_a_mismatch_names_numbers_and_unknown_calls() -> None:
    text = str(mismatch({2: (4, SUM), 0: (5, SUM), 1: (5, 15 << 59)}))
    assert text == (
        "ranks are at different calls: rank 0: all_reduce(4 x float32, sum) as call 5; "
        f"rank 1: an unknown call ({15 << 59}) as call 5; rank 2: all_reduce(4 x float32, sum) as call 4"
    )


def test_a_rank_that_proposes_a_call_has_not_arrived_in_it() -> None:
    group = group_at((5, SUM), (5 + PROPOSALS, FROM_0), (6 + 2 * PROPOSALS, FROM_0))
    error = check_until(watch_of(group[0], timeout=0.01), [1])
    assert str(error).endswith(": ranks 0, 2 arrived, rank 1 did not; the timeout is 0.01 s")


def test_the_clock_starts_again_with_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gangline.collectives.liveness.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    group = group_at(None, None)
    watchdog = watch_of(group[0], timeout=10)
    for sequence in (5, 6):
        watchdog.begin(sequence, SUM)
        now[0] += 50  # before the wait
        watchdog.check([1])
        now[0] += 9.9
        watchdog.check([1])
    now[0] += 0.2
    with pytest.raises(StallError, match=r"call 6, has waited 10\.1 s: rank 0 arrived, rank 1 did not"):
        watchdog.check([1])


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("HEARTBEAT", "HEARTBEAT_LIMIT", "STALL_WARN", "TIMEOUT", "RESTART_LIMIT")
    names = [f"GANGLINE_{word}" for word in words]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert limits() == (1, 10, 60, 1800, 120)
    for seconds, name in enumerate(names, 2):
        monkeypatch.setenv(name, f"{seconds}.5")
    assert limits() == (2.5, 3.5, 4.5, 5.5, 6.5)
    for name in names:
        for word in ("0", "-1", "nan", "inf", "ten", ""):
            with monkeypatch.context() as patch:
                patch.setenv(name, word)
                with pytest.raises(ValueError, match=f"{name} is '{word}'; expected a number of seconds above 0"):
                    limits()


# Processes of other time namespaces


TELL = """
import json
from gangline.collectives.liveness.process_state import state_of, this_process
print(json.dumps(this_process()), flush=True)
input()
"""


@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/proc/self/ns/time").exists(), reason="needs root and time namespaces"
)
@pytest.mark.parametrize(
    ("namespace", "state"), [((), "S"), (("unshare", "--time", "--monotonic", "100000", "--boottime", "100000"), "?")]
)
def test_a_process_of_another_time_namespace_cannot_be_observed(namespace: tuple[str, ...], state: str) -> None:
    command = [*namespace, sys.executable, "-c", TELL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert state_of(told) in {state, "R" if state == "S" else state}
        process.communicate(b"\n")
    assert state_of(told) == ("?" if namespace else "")
