"""Shared memory: kinds of messages, full queues, write permissions, and leftovers."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gangline.bench.unequal.slow_process import QuotaProcess, can_set_quota
from gangline.collectives.bootstrap import groups, rendezvous
from gangline.collectives.communicator import Communicator, open_communicator
from gangline.collectives.errors import GanglineError, ProtocolError, StallError
from gangline.collectives.liveness import watchdog
from gangline.collectives.processes.spawning import Ranks, spawn
from gangline.collectives.transports.base import PIECE, BootstrapAllGather, MessageTag
from gangline.collectives.transports.shm import cma, futex_wakeup, segments, transport
from gangline.collectives.transports.shm.cpu_quota import are_enough, cpu_quotas
from gangline.collectives.transports.shm.host_group import open_host_group
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.transports.zmq.transport import ZmqTransport
from gangline.collectives.tuner import SHARED_LIMIT, Choice, Rule, Table, TableKey
from gangline.collectives.work import Work
from tests.collectives.grid import Cell, check, combined, values
from tests.collectives.processes import Rank, in_processes
from tests.collectives.ranks import (
    LARGE,
    PATIENT,
    SLOT_BYTES,
    exchange_over,
    open_again,
    open_files,
    same,
    with_exchange,
)

COUNT = 2 * (SLOT_BYTES // 4)  # float32 elements: whole pieces, and more than a slot holds


@dataclass
class Counts:
    """Bytes of each read of another process's memory, and of each piece that this rank staged for another one."""

    reads: list[int] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, int, int, int]:
        """Return reads, their bytes, staged pieces, their bytes, since the last call."""
        taken = len(self.reads), sum(self.reads), len(self.staged), sum(self.staged)
        self.reads.clear()
        self.staged.clear()
        return taken


@contextmanager
def counted() -> Iterator[Counts]:
    """Count reads and staged pieces in this rank's process."""
    counts = Counts()
    read, stage = cma.read, transport._SendQueue._stage

    def counted_read(process: int, address: int, target: int, nbytes: int) -> None:
        counts.reads.append(nbytes)
        read(process, address, target, nbytes)

    def counted_stage(out: Any, message: Any) -> None:
        left = message.data.numel() - (out._staged - message.location) * PIECE
        counts.staged.append(min(PIECE, left))
        stage(out, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cma, "read", counted_read)
        patch.setattr(transport._SendQueue, "_stage", counted_stage)
        yield counts


@contextmanager
def unreadable(comm: Communicator) -> Iterator[Communicator]:
    """Open another communicator of the same ranks as if no process could read another's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cma, "may_read", lambda *_: False)
        other = open_again(comm, "shared_memory")
    with other:
        yield other


# Kinds of messages


def _filled(tensor: Tensor, rank: int) -> Tensor:
    return tensor.copy_(values(tensor.numel(), rank, tensor.dtype))


def _reduced(comm: Communicator, tensor: Tensor, counts: Counts) -> tuple[int, int, int, int]:
    _filled(tensor, comm.rank)
    comm.barrier()
    counts.take()
    comm.all_reduce(tensor)
    taken = counts.take()
    same(tensor, combined([_filled(tensor.clone(), rank) for rank in range(comm.size)], "sum"), "all_reduce")
    return taken


def _ways(comm: Communicator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with counted() as counts:
        registered = comm.empty(COUNT)
        found["registered"] = _reduced(comm, registered, counts)
        found["slice of registered"] = _reduced(comm, registered[5:], counts)
        found["plain"] = _reduced(comm, torch.empty(COUNT), counts)
        found["mixed"] = _reduced(comm, registered if comm.rank == 0 else torch.empty(COUNT), counts)
        found["in slots"] = _reduced(comm, torch.empty(100), counts)
        with unreadable(comm) as other:
            found["staged"] = _reduced(other, torch.empty(COUNT), counts)
            found["registered with another"] = _reduced(other, registered, counts)
            found["registered, unreadable"] = _reduced(other, other.empty(COUNT), counts)
    return found


def test_registered_memory_is_read_in_place_other_memory_by_cma_or_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [Rule(SHARED_LIMIT, Choice("shared")), Rule(None, Choice("two_shot"))]
    Table({TableKey("all_reduce", "shared_memory", 2, 1): rules}).dump(tmp_path / "tuning.json")
    monkeypatch.setenv("GANGLINE_TUNING", str(tmp_path / "tuning.json"))  # the core would take all through slots
    nbytes, half = COUNT * 4, COUNT * 2
    for rank, found in enumerate(spawn(_ways, 2, transport="shared_memory", timeout=60)):
        nothing = (0, 0, 0, 0)
        assert found["registered"] == found["slice of registered"] == found["registered, unreadable"] == nothing
        assert found["in slots"] == nothing
        # half of the other's tensor in pieces, to be added; then the other half at once, into its destination
        assert found["plain"] == (half // PIECE + 1, nbytes, 0, 0)
        assert found["mixed"] == (nothing if rank == 1 else (half // PIECE + 1, nbytes, 0, 0))
        assert found["staged"] == found["registered with another"] == (0, 0, nbytes // PIECE, nbytes)


def _small_and_large(comm: Communicator) -> list[tuple[int, int, int, int]]:
    """Send messages of five sizes from rank 0 to rank 1, then broadcast memory of the process and of the segment."""
    taken = []
    with counted() as counts:
        for nbytes in (0, 1, 1 << 15, (1 << 15) + 1, PIECE + 1):
            counts.take()
            if comm.rank == 0:
                comm.send(values(nbytes, 0, torch.uint8), 1)
            elif comm.rank == 1:
                got = torch.empty(nbytes, dtype=torch.uint8)
                comm.recv(got, 0)
                same(got, values(nbytes, 0, torch.uint8), f"{nbytes} bytes")
            taken.append(counts.take())
        for tensor in (torch.empty(COUNT), comm.empty(COUNT)):
            _filled(tensor, comm.rank)
            comm.barrier()
            counts.take()
            comm.broadcast(tensor, 1)
            taken.append(counts.take())
            same(tensor, values(COUNT, 1, torch.float32), "broadcast")
    return taken


def test_small_messages_are_staged_and_large_ones_and_broadcasts_are_one_read() -> None:
    sender, receiver, third = spawn(_small_and_large, 3, transport="shared_memory", timeout=60)
    nothing, of_root = (0, 0, 0, 0), (1, COUNT * 4, 0, 0)
    assert sender == [nothing, (0, 0, 1, 1), (0, 0, 1, 1 << 15), nothing, nothing, of_root, nothing]
    assert receiver == [nothing] * 3 + [(1, (1 << 15) + 1, 0, 0), (1, PIECE + 1, 0, 0), nothing, nothing]
    assert third == [nothing] * 5 + [of_root, nothing]


# Full queues


def _more_than_fits(comm: Communicator) -> int:
    """Send more messages than a queue has entries and more pieces than buffers, both ways, before one is read."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sizes = [{0: 3 * PIECE + 5, 10: PIECE}.get(number % 20, (1, 0, 40_000)[number % 3]) for number in range(80)]

    def message(number: int, rank: int) -> Tensor:
        return values(sizes[number], rank + number, torch.uint8)

    with unreadable(comm) as other, counted() as counts:
        sends = [
            other.send(message(number, comm.rank), to, number % 2, async_op=True)
            for number in range(len(sizes))
            for to in others
        ]
        assert not sends[-1].is_completed()
        comm.barrier()  # no rank has read anything
        for source in others:
            targets = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            receives = [other.recv(target, source, number % 2, async_op=True) for number, target in enumerate(targets)]
            for number, work in enumerate(receives):
                work.wait()
                same(targets[number], message(number, source), f"message {number} from {source}")
        for work in sends:
            work.wait()
        pieces, nbytes = counts.take()[2:]
        assert nbytes == sum(sizes) * len(others)
        other.barrier()
    return pieces


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_messages_wait_for_space_and_none_is_lost(size: int) -> None:
    pieces_of_one = 4 * 4 + 4 * 1 + sum(number % 20 not in (0, 10) and number % 3 != 1 for number in range(80))
    assert spawn(_more_than_fits, size, transport="shared_memory", timeout=60) == [pieces_of_one * (size - 1)] * size


def _open_elsewhere(rank: int, size: int, exchange: BootstrapAllGather, **options: Any) -> Communicator:
    """Open a communicator as if odd ranks were on another host and no rank could read another's memory."""
    rendezvous.host_identity = lambda: f"host {rank % 2}"
    cma.may_read = lambda *_: False
    return open_communicator(rank, size, exchange, **options)


def _on_two_hosts(comm: Communicator) -> tuple[int, ...]:
    registered = comm.empty(COUNT, torch.int32)
    registered.copy_(values(COUNT, comm.rank, torch.int32))
    comm.all_reduce(registered)
    same(registered, combined([values(COUNT, rank, torch.int32) for rank in range(comm.size)], "sum"), "registered")
    group = comm.split(comm.rank % 2)
    assert group.transport == "shared_memory"
    check(group, Cell("all_gather", LARGE))
    group.close()
    return comm.hosts


def test_ranks_of_a_host_use_shared_memory_and_others_the_network() -> None:
    with Ranks(_on_two_hosts, 3, transport="auto", timeout=60, opener=_open_elsewhere) as ranks:
        assert ranks.results() == [(0, 1, 0)] * 3


def _far_waits_for_near(comm: Communicator) -> None:
    """Ranks 0 and 2 share a host: 2 sends to 1 only after it has all of 0's bytes; 0 waits for 1 meanwhile."""
    large, small = 9 * PIECE // 4, 5
    transport = comm._resources.transport

    if comm.rank == 0:
        near = transport.send(2, values(large, 0, torch.float32).view(torch.uint8), MessageTag(1, 1))
        got = torch.empty(small)
        transport.receive(1).into(got.view(torch.uint8))
        same(got, values(small, 2, torch.float32), "passed on")
        near.wait()
    elif comm.rank == 1:
        got = torch.empty(small)
        transport.receive(2).into(got.view(torch.uint8))
        transport.send(0, got.view(torch.uint8), MessageTag(1, 1)).wait()
    else:
        got = torch.empty(large)
        transport.receive(0).into(got.view(torch.uint8))
        same(got, values(large, 0, torch.float32), "from the neighbour")
        transport.send(1, values(small, 2, torch.float32).view(torch.uint8), MessageTag(1, 1)).wait()
    comm.barrier()


def test_a_wait_for_another_host_progresses_messages_to_this_host() -> None:
    with Ranks(_far_waits_for_near, 3, transport="auto", timeout=20, opener=_open_elsewhere) as ranks:
        ranks.results()


def _wait_on_two_hosts(comm: Communicator, closing: int) -> str:
    """Rank 0 waits for rank 2, the other one of its host, while ``closing`` has closed; return its error."""
    watchdog.CLOSE_GRACE_SECONDS = 0.05
    comm.barrier()
    if comm.rank == closing:
        comm.close()
    elif comm.rank == 0:
        try:
            comm.recv(torch.empty(3), 2)
        except GanglineError as error:
            return str(error)
    elif comm.rank == 2:
        time.sleep(0.5)
        comm.send(torch.ones(3), 0)
    return ""


@pytest.mark.parametrize(
    ("closing", "text"),
    [(1, ""), (2, "rank 2 closed its communicator (rank 0 waited in recv(3 x float32))")],
)
def test_a_rank_waits_for_the_jobs_rank_not_for_the_number_on_its_host(closing: int, text: str) -> None:
    with Ranks(_wait_on_two_hosts, 4, (closing,), transport="auto", timeout=5, opener=_open_elsewhere) as ranks:
        assert ranks.outcomes()[0].value == text


# Write permissions and leftovers


def _mappings() -> dict[str, str]:
    """Return the segments that this process has mapped: inode -> permissions."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:gangline" in line]
    return {line[4]: line[1] for line in lines}


def _permissions(comm: Communicator) -> tuple[dict[str, str], int]:
    kept = comm.empty(1000)
    comm.barrier()
    found = _mappings()
    comm.barrier()
    return found, kept.numel()


def test_ranks_write_their_own_segments_only() -> None:
    of_ranks = [found for found, _ in spawn(_permissions, 3, transport="shared_memory", timeout=60)]
    assert len({frozenset(found) for found in of_ranks}) == 1  # all have mapped the same
    for inode in of_ranks[0]:
        assert sorted(found[inode] for found in of_ranks) == ["r--s", "r--s", "rw-s"]


def test_a_segment_can_neither_shrink_nor_grow_nor_be_unsealed() -> None:
    def share(rank: int, exchange: BootstrapAllGather) -> None:
        def and_look(blob: bytes) -> list[bytes]:
            everybody = exchange(blob)
            number = segments._HANDLE.unpack(blob)[1] if len(blob) == segments._HANDLE.size else None
            if number is not None:
                assert fcntl.fcntl(number, 1034) == 1 | 2 | 4
                for nbytes in (0, 1 << 20):
                    with pytest.raises(PermissionError):
                        os.ftruncate(number, nbytes)
            return everybody

        mine, theirs = (lambda found: (found[rank], found[1 - rank]))(segments.share(rank, 100 + rank, and_look))
        assert (mine.nbytes, theirs.nbytes) == (100 + rank, 101 - rank)

    assert with_exchange(share, share) == [None, None]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("unsealed", r"rank 0 cannot open the memory of rank 1: /proc/\d+/fd/\d+ can still shrink"),
        ("token", r"rank 0 cannot open the memory of rank 1: /proc/\d+/fd/\d+ is another job's memory"),
        ("size", r"rank 0 cannot open the memory of rank 1: /proc/\d+/fd/\d+ holds 116 bytes, expected 117"),
        ("gone", r"rank 0 cannot open the memory of rank 1: \[Errno 2\] No such file"),
    ],
)
def test_memory_other_than_the_offered_segment_is_refused_by_all_ranks(change: str, text: str) -> None:
    foreign = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(foreign, 100 + 16)

    def share(rank: int, exchange: BootstrapAllGather) -> None:
        def and_change(blob: bytes) -> list[bytes]:
            if rank == 1 and len(blob) == segments._HANDLE.size:
                process, number, nbytes, token = segments._HANDLE.unpack(blob)
                changed = {
                    "unsealed": (process, foreign, nbytes, token),
                    "token": (process, number, nbytes, bytes(16)),
                    "size": (process, number, nbytes + 1, token),
                    "gone": (process, 1 << 20, nbytes, token),
                }
                blob = segments._HANDLE.pack(*changed[change])
            return exchange(blob)

        segments.share(rank, 100, and_change)

    try:
        errors = with_exchange(share, share)
    finally:
        os.close(foreign)
    assert all(isinstance(error, OSError) and re.match(text, str(error)) for error in errors), errors


def _open_and_close(comm: Communicator, transport: str, folder: str) -> None:
    tempfile.tempdir = folder

    def some(number: int) -> None:
        with open_again(comm, transport) as other:
            kept = [other.empty(1000 * number + 1) for _ in range(3)]
            other.all_reduce(kept[0])
            other.all_reduce(torch.ones(20_000))
            group = other.split(comm.rank % 2)
            with group:
                group.barrier()

    some(0)  # creates what a process creates only once
    gc.collect()
    comm.barrier()
    before = open_files(), _mappings(), os.listdir(folder), threading.active_count()
    comm.barrier()
    for number in range(4):
        some(number)
    gc.collect()
    comm.barrier()
    after = open_files(), _mappings(), os.listdir(folder), threading.active_count()
    assert after[0].keys() == before[0].keys(), (before[0], after[0])
    assert after[1:] == before[1:]
    comm.barrier()


@pytest.mark.parametrize(
    "transport", ["shared_memory", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ipc", "tcp"))]
)
def test_closed_communicators_leave_no_resources(transport: str, tmp_path: Path) -> None:
    spawn(_open_and_close, 2, transport, str(tmp_path), transport="shared_memory", timeout=60)


def _register_at_each_step(comm: Communicator) -> None:
    before = len(open_files())
    many = [comm.empty(100, torch.int16) for _ in range(200)]
    assert len(open_files()) <= before
    many[150].copy_(values(100, comm.rank, torch.int16))
    comm.all_reduce(many[150])
    same(many[150], combined([values(100, rank, torch.int16) for rank in range(comm.size)], "sum"), "the 150th")
    first = comm.empty(COUNT)
    kept = first.fill_(7 + comm.rank).view(-1)[-3:]
    del first
    held = set()
    for step in range(6):
        tensor = comm.empty(COUNT).fill_(step + comm.rank)
        comm.all_reduce(tensor)
        assert tensor.eq(comm.size * step + comm.size * (comm.size - 1) / 2).all()
        if step > 1:
            maps = Path("/proc/self/maps").read_text().splitlines()
            held.add((len(open_files()), sum("/memfd:gangline" in line for line in maps)))
    assert len(held) == 1, held
    comm.all_reduce(kept)
    assert kept.eq(comm.size * 7 + comm.size * (comm.size - 1) / 2).all()


def test_registered_memory_holds_no_descriptors_and_is_released_when_its_tensors_are_gone() -> None:
    spawn(_register_at_each_step, 3, transport="shared_memory", timeout=60)


# Received entries


def _shared(rank: int, exchange: BootstrapAllGather) -> SharedMemoryTransport:
    group = open_host_group(rank, [0, 1], SharedMemoryTransport.nbytes(2), exchange)
    return SharedMemoryTransport(group, PATIENT)


def test_an_invalid_queue_entry_is_an_error() -> None:
    first, second = with_exchange(_shared, _shared)
    first.send(1, torch.zeros(8, dtype=torch.uint8), MessageTag(1, 1))
    entry = first._send_queues[1]._entries
    kind = transport._WORDS + transport._KIND
    for number, text in ((9, "rank 0 posted a message of kind 9"), (1, "rank 0 refers to bytes 0 to 8 of")):
        entry[kind] = number
        with pytest.raises(ProtocolError, match=text):
            second.poll(0)


# Permission to read other processes


@pytest.fixture
def children() -> Iterator[list[int]]:
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "1000"])) for _ in range(2)]
        for one in started:
            stack.callback(one.kill)
        yield [one.pid for one in started]


@pytest.mark.parametrize("scope", ["0", "1", "2", None])
def test_reads_are_allowed_to_the_common_ancestor_of_all_ranks_so_far(
    scope: str | None, children: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(f"{scope}\n")
    prctl = SimpleNamespace(prctl=lambda option, process: calls.append((option, process.value)))
    monkeypatch.setattr(cma, "_PTRACE_SCOPE", file)
    monkeypatch.setattr(cma, "_libc", prctl)
    monkeypatch.setattr(cma, "_readers", {1 << 30})  # a rank that has ended
    for ranks in ([os.getpid()], [os.getpid(), *children], [os.getpid(), os.getppid()], [os.getpid()]):
        cma.allow_reads(ranks)
    own, parent = (cma._PR_SET_PTRACER, os.getpid()), (cma._PR_SET_PTRACER, os.getppid())
    assert calls == ([own, own, parent, parent] if scope == "1" else [])


# Failures while transports open


def _fail_at_the_second_transport(comm: Communicator) -> None:
    opened: list[ZmqTransport] = []

    def open_one(*arguments: Any, **options: Any) -> ZmqTransport:
        if opened:
            raise OSError("no second one")
        opened.append(ZmqTransport(*arguments, **options))
        return opened[0]

    before = len(open_files())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "ZmqTransport", open_one)
        with pytest.raises(OSError, match="no second one"):
            open_again(comm, "ipc")
    assert len(open_files()) == before
    assert opened[0]._peers.sockets[1 - comm.rank].socket.closed
    comm.barrier()


def test_the_first_transport_is_closed_if_the_second_fails() -> None:
    spawn(_fail_at_the_second_transport, 2, transport="shared_memory", timeout=60)


def _yields_before_sleep(comm: Communicator, is_crowded: bool, async_op: bool) -> int:
    """Return the yields of rank 0 while it waits for rank 1, which is late."""
    libc = futex_wakeup._libc
    yields = Mock(wraps=libc.sched_yield)
    with pytest.MonkeyPatch.context() as patch:
        if is_crowded:
            patch.setattr(os, "sched_getaffinity", lambda _: {0})
        with open_communicator(comm.rank, comm.size, exchange_over(comm), transport="shared_memory") as other:
            other.barrier()
            patch.setattr(libc, "sched_yield", yields)
            if comm.rank == 1:
                time.sleep(0.3)
            if async_op:
                other._engine.hold()  # else it begins in this thread
            work = other.all_reduce(torch.ones(3), async_op=async_op)
            if isinstance(work, Work):
                work.wait()
    return yields.call_count


def _yields_of_both_kinds(comm: Communicator) -> list[int]:
    return [_yields_before_sleep(comm, *kind) for kind in ((True, False), (False, True))]


def test_ranks_that_outnumber_the_cores_and_background_threads_soon_sleep() -> None:
    first, _ = spawn(_yields_of_both_kinds, 2, transport="ipc")
    assert all(0 < yields <= 20 for yields in first)


def _with_quota(rank: Rank, factor: float) -> None:
    quota = QuotaProcess(os.getpid())
    try:
        quota.slow_down(factor)
        group = open_host_group(rank.rank, range(rank.size), 4096, rank.exchange)
        rank.tell([min(cpu_quotas().values(), default=math.inf), group.has_cores])
    finally:
        quota.close()
    rank.hear()


@pytest.mark.skipif(not can_set_quota(), reason="only root may set CPU quotas")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize(("factor", "cores"), [(2, 0.5), (1, math.inf)])
def test_ranks_whose_quota_is_less_than_a_core_do_not_spin(factor: float, cores: float) -> None:
    assert in_processes(_with_quota, 2, factor) == [[cores, cores > 1]] * 2


def test_quotas_of_both_versions_of_cgroups_and_of_their_parents_count(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for files, lines, quotas in (
        ({"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "50000 10000"}, "0::/a/b", [5.0, 1.5]),
        ({"cpu/a/cpu.cfs_quota_us": "20000", "cpu/a/cpu.cfs_period_us": "10000"}, "4:cpu,cpuacct:/a", [2.0]),
        ({"cpu/c/cpu.cfs_quota_us": "-1", "cpu/c/cpu.cfs_period_us": "10000"}, "5:memory:/a\n4:cpu:/c", []),
        ({}, "", []),
    ):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        own.write_text(lines)
        assert list(cpu_quotas(tmp_path, own).values()) == quotas
    assert are_enough([{"a": 2.0}, {"a": 2.0}, {"b": 1.0}, {}])
    assert not are_enough([{"a": 1.5}, {"a": 1.5}])


def _wait_with_slow_yields(comm: Communicator, noticed: Path) -> int:
    """Return how often rank 0 yields, as on a host whose cores are busy, before it notices that rank 1 is late."""
    yields = Mock(side_effect=partial(time.sleep, 0.005))
    comm.barrier()
    futex_wakeup._libc = SimpleNamespace(sched_yield=yields, syscall=futex_wakeup._libc.syscall)
    if comm.rank == 1:
        while not noticed.exists():
            time.sleep(0.01)
    else:
        with pytest.raises(StallError):
            comm.barrier()
        noticed.touch()
    return yields.call_count


def test_a_wait_is_bounded_by_time_however_slow_its_yields_are(tmp_path: Path) -> None:
    first, _ = spawn(_wait_with_slow_yields, 2, tmp_path / "noticed", transport="shared_memory", timeout=1)
    assert first < 100
