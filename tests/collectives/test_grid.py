"""The grid of collective calls: every schedule, destination, dtype, operation, size and way between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from random import Random

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.collectives import tuner
from gangline.collectives.bootstrap import groups, rendezvous
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.transports.base import PIECE, SLOT_BYTES
from gangline.collectives.transports.shm import cma
from tests.collectives.grid import (
    CALLS,
    COLLECTIVES,
    MEMORIES,
    Cell,
    check,
    drawn,
    is_valid,
    ops_of,
    outs_of,
    roots_of,
    walk,
)
from tests.collectives.ranks import in_threads, open_again

ALGORITHMS = sorted({name for collective in tuner.TUNED for name in tuner.names(collective)})
HOSTS: dict[str, Callable[[int], Sequence[int]]] = {
    "one host each": range,
    "pairs": lambda size: [rank // 2 for rank in range(size)],
    "scattered": lambda size: [rank * rank % 3 for rank in range(size)],
}


def calls_of(algorithm: str) -> list[str]:
    """Return the calls that have an algorithm; those without a choice exchange through slots."""
    return [call for call in CALLS if algorithm in (tuner.names(call) if call in tuner.TUNED else [tuner.SLOTS])]


def threads(size: int, algorithm: str, hosts: Sequence[int] | None = None, segments: int = 1) -> list[Communicator]:
    """Return communicators of threads that take an algorithm; with hosts, they have no slots, as between real hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_ALGO", f"{algorithm}:{segments}")
        resources = groups.open_in_process(size, timeout=60)
    if hosts is not None and size > 1:  # one rank has slots
        resources = [replace(one, hosts=tuple(hosts), slot_exchange=None) for one in resources]
    return [Communicator(one) for one in resources]


# Schedules: every call by every algorithm between 2 to 17 threads, in place, into other memory and into new memory


def _of_schedule(algorithm: str, size: int, calls: Sequence[str]) -> Iterator[Cell]:
    for number, call in enumerate(one for one in calls_of(algorithm) if one in calls):
        outs, roots = outs_of(call), roots_of(call, size)
        chosen = dict.fromkeys([*outs[:2], outs[(size + number) % len(outs)]])
        for place, out in enumerate(chosen if size < 10 else [*chosen][-2:]):
            count = (37, 2 * size + 1, 3)[(number + place) % 3]
            yield Cell(call, count, root=roots[(number + place) % len(roots)], out=out)


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        (range(2, 8), CALLS),
        (range(8, 12), CALLS),
        (range(12, 18), ("all_reduce", "reduce")),
        *(pytest.param(range(size, size + 1), CALLS, marks=pytest.mark.slow) for size in range(12, 18)),
    ],
    ids=str,
)
def test_every_schedule(sizes: range, calls: Sequence[str]) -> None:
    for size in sizes:
        segments = 1 if size > 9 else 1 + size % 3
        for algorithm in ALGORITHMS:
            ranks = threads(size, algorithm, segments=segments)
            in_threads(ranks, walk, f"{algorithm}:{segments}", [*_of_schedule(algorithm, size, calls)])
        for hosts in HOSTS:
            for algorithm in ("hierarchical", "ring")[: 2 if hosts == "scattered" else 1]:
                ranks = threads(size, algorithm, HOSTS[hosts](size))
                in_threads(ranks, walk, f"{algorithm}, {hosts}", [*_of_schedule(algorithm, size, calls)])


# Destinations, dtypes and operations between few threads, through slots and by schedules

FEW = [(2, "two_shot"), (3, "halving_doubling"), (3, tuner.SLOTS), (5, "ring"), (5, tuner.SLOTS)]


@pytest.mark.parametrize(("size", "algorithm"), FEW)
def test_every_destination(size: int, algorithm: str) -> None:
    random = Random(f"{size} {algorithm}")
    cells = [
        drawn(random, call, 6, size, root=root, out=out, memory=memory, async_op=async_op)
        for call in calls_of(algorithm)
        for out, memory in product(outs_of(call), MEMORIES)
        if is_valid(Cell(call, 6, out=out, memory=memory))
        for async_op, root in zip((False, True, False), [*roots_of(call, size)] * 3, strict=False)
    ]
    in_threads(threads(size, algorithm), walk, algorithm, cells)


def _of_dtypes(way: str, calls: Sequence[str], size: int) -> Iterator[Cell]:
    random = Random(f"{way} {size}")
    for call, dtype in product(calls, DTYPES):
        for op, kind in product(ops_of(call, dtype), ("exact", "special", "rough")):
            if is_valid(Cell(call, 1, dtype, op, kind=kind)) and (kind == "exact" or dtype.is_floating_point):
                count = random.choice([0, 1, size - 1, 17, 1030])
                yield drawn(random, call, count, size, dtype=dtype, op=op, kind=kind)


@pytest.mark.parametrize(("size", "algorithm"), FEW)
def test_every_dtype_and_operation(size: int, algorithm: str) -> None:
    in_threads(threads(size, algorithm), walk, algorithm, [*_of_dtypes(algorithm, calls_of(algorithm), size)])


# Sizes around a slot, around a piece of a message and around the limits of the built-in tables


def counts(call: str, size: int, dtype: torch.dtype) -> list[int]:
    """Return numbers of elements, of each row if the call has rows."""
    limits = (
        100 << 10,
        164 << 10,
        PIECE - dtype.itemsize,
        PIECE,
        SLOT_BYTES,
        SLOT_BYTES + dtype.itemsize,
        (2 << 20) + 24,
    )
    rows = size if call in ("reduce_scatter", "all_to_all", "scatter", "messages", "all_to_all_uneven") else 1
    return [1009, *(-(-limit // dtype.itemsize // rows) for limit in limits)]


@pytest.mark.parametrize("size", [2, 3])
def test_sizes_around_limits(size: int) -> None:
    random = Random(size)
    cells = [
        drawn(random, call, counts(call, size, dtype)[place], size, dtype=dtype)
        for call in CALLS
        for place, dtype in zip(random.sample(range(8), 3), random.sample(DTYPES, 3), strict=True)
    ]
    in_threads(size, walk, "built-in choice", cells)


# Processes: through the core, without it, with other processes' memory unreadable, by sockets, and as on several hosts

HOSTS_OF_PROCESSES: dict[str, Callable[[int, int], int]] = {
    "two hosts": lambda rank, size: rank % 2,
    "three hosts": lambda rank, size: max(0, rank - size + 3),  # most ranks are on the first one
}
WAYS = ("core", "staged", "ipc", "tcp", *HOSTS_OF_PROCESSES)


@contextmanager
def between(comm: Communicator, way: str) -> Iterator[Communicator]:
    """Open another communicator between the same processes, with another way to exchange data, or with an algorithm."""
    with pytest.MonkeyPatch.context() as patch:
        transport = way if way in ("ipc", "tcp") else "auto" if way in HOSTS_OF_PROCESSES else "shared_memory"
        if way == "staged":
            patch.setattr(cma, "may_read", lambda *_: False)
        elif way in HOSTS_OF_PROCESSES:
            host = HOSTS_OF_PROCESSES[way](comm.rank, comm.size)
            patch.setattr(rendezvous, "host_identity", lambda: f"host {host}")
        elif way in ALGORITHMS:
            patch.setenv("GANGLINE_ALGO", way)
        other = open_again(comm, transport)
    with other:
        yield other


def _of_processes(way: str, size: int, larges: int) -> Iterator[Cell]:
    random = Random(f"{way} {size}")
    for call in calls_of(way) if way in ALGORITHMS else CALLS:
        larger = random.sample(range(1, 8), larges if call != "all_reduce" or way in ALGORITHMS else 7)
        for place in [*(() if way in ALGORITHMS else (-2, -1)), 0, *larger]:
            dtype = random.choice(DTYPES)
            count = counts(call, size, dtype)[place] if place >= 0 else place + 2
            yield drawn(random, call, count, size, dtype=dtype)


def _in_processes(comm: Communicator, ways: Sequence[str], larges: int) -> None:
    for way in ways:
        with between(comm, way) as group:
            walk(group, way, _of_processes(way, comm.size, larges))
            if way == "core":  # each call begins in this thread, and ends there
                outs = [(call, out) for call in (*COLLECTIVES, "barrier") for out in outs_of(call)[:2]]
                walk(group, way, [Cell(call, 6, out=out, root=comm.size - 1, async_op=True) for call, out in outs])
            if way == "core" and comm.size < 4:
                walk(group, way, _of_dtypes(way, COLLECTIVES, comm.size))
    random = Random(comm.size)
    for call in CALLS:
        with comm.split(0) as group:
            count = random.choice([5, counts(call, comm.size, torch.float32)[6]])
            check(group, drawn(random, call, count, comm.size, dtype=torch.float32), "core, first call")


@pytest.mark.parametrize(
    ("size", "ways"),
    [
        (2, ("core", "staged", "tcp")),
        (3, WAYS),
        (4, ("tcp", "three hosts")),
        (5, ("core", "ipc")),
        pytest.param(9, ("core",), marks=pytest.mark.slow),
    ],
)
def test_processes(size: int, ways: Sequence[str]) -> None:
    spawn(_in_processes, size, ways, size < 9, transport="shared_memory", timeout=120, threads=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", range(2, 10))
def test_processes_in_every_way(size: int) -> None:
    spawn(_in_processes, size, (*WAYS, *ALGORITHMS), 3, transport="shared_memory", timeout=120, threads=1)


# The whole product, by chance


@given(st.randoms(use_true_random=False), st.integers(1, 9), st.sampled_from(ALGORITHMS), st.integers(1, 5))
def test_any_cell(random: Random, size: int, algorithm: str, segments: int) -> None:
    host_of = random.choice([*HOSTS.values()]) if random.random() < 0.3 and algorithm != tuner.SLOTS else None
    cells = [
        drawn(random, random.choice(calls_of(algorithm)), random.choice([0, 1, 5, 40, 3000, 16_385]), size)
        for _ in range(8)
    ]
    in_threads(threads(size, algorithm, host_of and host_of(size), segments), walk, f"{algorithm}:{segments}", cells)


# Beyond 32 bits

_MANY = (1 << 31) + 8
"""Elements of a tensor whose bytes and indices exceed 32 bits."""


def _large(comm: Communicator) -> None:
    tensor = torch.full((_MANY,), comm.rank + 1, dtype=torch.uint8)
    tensor[-1] = 7
    comm.all_reduce(tensor)
    assert tensor[[0, _MANY // 2, -2, -1]].tolist() == [3, 3, 3, 14]
    assert int(tensor[::1021].max()) == int(tensor[::1021].min()) == 3
    rows = tensor.view(2, -1)
    rows[0], rows[1] = 10 * comm.rank, 10 * comm.rank + 1
    rows[:, -1] += 5
    taken = torch.empty_like(rows)
    comm.all_to_all(rows, out=taken)
    for source in range(2):
        value = 10 * source + comm.rank
        assert int(taken[source, :-1:1021].max()) == int(taken[source, :-1:1021].min()) == value
        assert int(taken[source, -1]) == value + 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_tensors_above_2_gib(transport: str) -> None:
    if psutil.virtual_memory().available < 12 << 30:
        pytest.skip("less than 12 GiB of memory are free")
    spawn(_large, 2, transport=transport, timeout=300)
