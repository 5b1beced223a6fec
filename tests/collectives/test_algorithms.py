"""Schedules: every algorithm is correct for every number of ranks, with the steps and bytes that its file states."""

from __future__ import annotations

import doctest
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gangline.bench.algorithms.cost import by_host, cost
from gangline.collectives import algorithms
from gangline.collectives.engine.executor import Chunks, Region, run
from gangline.collectives.errors import ProtocolError
from gangline.collectives.liveness.membership import ThreadMembership
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.schedule import (
    ROOTED,
    Receive,
    Reduce,
    Rounds,
    Schedule,
    Send,
    Step,
    Transfers,
    transfers,
)
from gangline.collectives.schedule.schedule import steps_by_rank
from gangline.collectives.transports.base import PIECE, MessageTag
from gangline.collectives.transports.in_process import InProcessTransport, ThreadGroup
from tests.collectives.grid import combined, values
from tests.collectives.ranks import same
from tests.collectives.symbolic import verify

SIZES = (*range(1, 18), 31, 32, 33)
OTHER_SIZES = sorted({*range(1, 65)} - {*SIZES})
LAYOUTS = {
    "equal": (0, 0, 0, 1, 1, 1, 2, 2, 2),
    "interleaved": (0, 1, 2, 0, 1, 2, 0, 1, 2),
    "unequal": (0, 0, 0, 0, 0, 1, 1, 2, 2),
    "unequal_and_scattered": (2, 0, 2, 2, 1, 0, 2, 5, 2),
    "one_rank_each": (8, 7, 6, 5, 4, 3, 2, 1, 0),
    "one_host": (3,) * 9,
    "two_of_one_size": (0, 0, 1, 1),
    "other_numbers": (0,) * 4 + (1,) * 4 + (2,) * 4,
}


@pytest.mark.parametrize("collective", algorithms.REGISTRY)
class TestCorrectness:
    @pytest.mark.parametrize(
        "sizes", [SIZES, pytest.param(OTHER_SIZES, marks=pytest.mark.slow)], ids=["some", "others"]
    )
    def test_for_every_number_of_ranks(self, collective: str, sizes: Sequence[int]) -> None:
        for name, size in product(algorithms.names(collective), sizes):
            hosts = tuple(rank // 4 for rank in range(size)) if name == "hierarchical" else None
            verify(built(collective, name, size, root=size // 3, hosts=hosts))

    def test_for_every_root(self, collective: str) -> None:
        for name, size in product(algorithms.names(collective), range(2, 10) if collective in ROOTED else ()):
            for root in range(size):
                verify(built(collective, name, size, root))

    def test_in_any_number_of_segments(self, collective: str) -> None:
        for name, size, segments in product(algorithms.names(collective), range(1, 9), (2, 3, 7)):
            verify(built(collective, name, size, root=size - 1, segments=segments))

    def test_on_any_hosts(self, collective: str) -> None:
        for name, hosts in product(algorithms.names(collective), LAYOUTS.values()):
            for root in range(len(hosts)) if collective in ROOTED else (0,):
                verify(built(collective, name, len(hosts), root, segments=2, hosts=hosts))

    def test_no_rank_sends_or_receives_twice_in_a_table(self, collective: str) -> None:
        """The price is computed per table and would be wrong."""
        for name, size in product(algorithms.names(collective), (2, 5, 8, 12)):
            hosts = (0,) * (size // 2) + (1,) * (size - size // 2)
            for table in tables(built(collective, name, size, segments=2, hosts=hosts)):
                assert len(set(table.source.tolist())) == len(set(table.target.tolist())) == len(table) > 0


@pytest.mark.parametrize("collective", [collective for collective in algorithms.REGISTRY if "reduce" in collective])
def test_each_chunk_is_completed_at_one_rank_so_that_all_have_the_same_bits(collective: str) -> None:
    for name, size in product(algorithms.names(collective), (2, 7, 8)):
        schedule = built(collective, name, size)
        completed = Counter(
            chunk
            for rank in range(size)
            for step in schedule.program(rank)
            if isinstance(step, Reduce) and step.complete
            for chunk in range(step.first, step.last)
        )
        assert name == "one_shot" or completed == dict.fromkeys(range(schedule.chunks), 1)


def steps_and_bytes(size: int, segments: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Return the steps of each algorithm, and its bytes in units of the tensor's."""
    part, log = (size - 1) / size, math.ceil(math.log2(size))
    below_the_second = max(min(1 << power, size - (1 << power)) for power in range(log))
    chain = (size - 2 + segments, 1.0)
    in_segments = {
        ("all_reduce", "ring"): (2 * (size - 1), 2 * part),
        ("all_gather", "ring"): (size - 1, part),
        ("reduce_scatter", "ring"): (size - 1, part),
        ("broadcast", "ring"): chain,
        ("reduce", "ring"): chain,
    }
    if segments > 1:
        return in_segments
    return in_segments | {
        ("all_reduce", "halving_doubling"): (2 * log, 2 * part),
        ("all_gather", "halving_doubling"): (log, part),
        ("reduce_scatter", "halving_doubling"): (log, part),
        ("broadcast", "halving_doubling"): (2 * log, 2 * part),
        ("reduce", "halving_doubling"): (2 * log, part + below_the_second / size),
        ("all_reduce", "one_shot"): (1, size - 1),
        ("all_reduce", "two_shot"): (2, 2 * part),
        **{(name, "direct"): (1, part) for name in ("all_gather", "reduce_scatter", "all_to_all", "scatter")},
        ("broadcast", "direct"): (1, size - 1),
        ("reduce", "direct"): (1, 1),
        ("gather", "direct"): (1, 1 / size),
        ("broadcast", "binomial"): (log, log),
        ("reduce", "binomial"): (log, 1),
        ("scatter", "binomial"): (log, part),
        ("gather", "binomial"): (log, below_the_second / size),
        ("all_to_all", "pairwise"): (size - 1, part),
    }


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13, 16, 31])
@pytest.mark.parametrize("segments", [1, 4])
def test_steps_and_bytes_have_closed_forms(size: int, segments: int) -> None:
    n = 840 * size  # bytes: a multiple of every number of chunks
    for (collective, name), (steps, each) in steps_and_bytes(size, segments).items():
        schedule = built(collective, name, size, segments=segments)
        assert schedule.steps() == steps, (collective, name)
        assert schedule.bytes_on_wire(n) == pytest.approx(each * n, abs=0.5), (collective, name)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13, 16, 31])
@pytest.mark.parametrize("places", [1, 3, 4])
def test_steps_and_bytes_of_hierarchical_on_equal_hosts(size: int, places: int) -> None:
    hosts = tuple(host for host in range(size) for _ in range(places))
    schedule, n = built("all_reduce", "hierarchical", len(hosts), hosts=hosts), 840 * len(hosts)
    assert schedule.steps() == (2 if places > 1 else 0) + 2 * math.ceil(math.log2(size))
    assert schedule.bytes_on_wire(n) == pytest.approx(2 * (len(hosts) - 1) / len(hosts) * n, abs=0.5)


def test_hierarchical_sends_a_local_rank_s_share_of_the_ring_s_bytes_between_hosts() -> None:
    hosts, n = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2), 12 * 840
    schedule = built("all_reduce", "hierarchical", 12, hosts=hosts)
    between = sum(
        int(schedule.message_bytes(table, n)[np.asarray(hosts)[table.source] != np.asarray(hosts)[table.target]].sum())
        for table in tables(schedule)
    )
    assert between == 12 * (2 * n // 4 * 2 // 3)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_ring_s_pairs_form_a_ring(collective: str) -> None:
    schedule = built(collective, "ring", 7, segments=2)
    assert pairs(schedule) == {(rank, (rank + 1) % 7) for rank in range(7)}


def test_the_ring_enters_each_host_once() -> None:
    hosts = tuple(rank % 4 for rank in range(32))
    found = pairs(built("all_reduce", "ring", 32, hosts=hosts))
    assert len({pair for pair in found if hosts[pair[0]] != hosts[pair[1]]}) == 4


def test_4096_ranks_take_no_memory_until_rounds_are_generated() -> None:
    schedule = algorithms.build("all_to_all", "pairwise", 4096)
    assert schedule.steps() == 4095
    assert schedule.chunks == 4096**2
    (table,) = schedule.rounds.at(4000)
    assert len(table) == 4096


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all_reduce", "rings", 4), {}, "no algorithm 'rings'; expected one of ring, halving_doubling"),
        (("allreduce", "ring", 4), {}, "no collective 'allreduce' has algorithms; expected one of all_reduce"),
        (("all_reduce", "ring", 0), {}, "size is 0 and segments is 1"),
        (("all_reduce", "ring", 4), {"segments": 0}, "size is 4 and segments is 0"),
        (("all_reduce", "ring", 4), {"hosts": (0, 1)}, "hosts has 2 entries for 4 ranks"),
        (("all_reduce", "ring", 4), {"root": 1}, "root of all_reduce is 1; expected None"),
        (("reduce", "ring", 4), {}, "root of reduce is None; expected a rank from 0 to 3"),
    ],
)
def test_build_refuses(arguments: tuple[str, str, int], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithms.build(*arguments, **options)


def built(
    collective: str, name: str, size: int, root: int = 0, segments: int = 1, hosts: tuple[int, ...] | None = None
) -> Schedule:
    rooted = root if collective in ROOTED else None
    return algorithms.build(collective, name, size, root=rooted, segments=segments, hosts=hosts)


def tables(schedule: Schedule) -> Iterator[Transfers]:
    return (table for found in schedule.rounds for table in found)


def pairs(schedule: Schedule) -> set[tuple[int, int]]:
    return {(source, target) for table in tables(schedule) for source, target, *_ in table.rows()}


EVERY = [(collective, name) for collective in algorithms.REGISTRY for name in algorithms.names(collective)]


def rounds(*tables: list[Transfers]) -> Rounds:
    return Rounds(len(tables), tables.__getitem__)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_one_rank_s_program_equals_its_entry_in_all_programs(collective: str, name: str) -> None:
    schedule = built(collective, name, 6)
    together = steps_by_rank(schedule)
    assert [schedule.program(rank) for rank in range(6)] == [tuple(s for _, s in steps) for steps in together]
    with pytest.raises(ValueError, match="rank 6 is not in a schedule of 6 ranks"):
        schedule.program(6)


def test_unequal_chunks_cover_the_tensor_in_whole_bytes() -> None:
    schedule = Schedule("all_gather", "by_hand", 3, 3, Rounds(0, lambda _: ()))
    table = transfers(0, 1, [0, 1, 2])
    assert schedule.message_bytes(table, 10).tolist() == [3, 3, 4]
    assert schedule.message_bytes(transfers(0, 1, 1, 3), 10).tolist() == [7]


@pytest.mark.parametrize(
    ("tables", "combining", "price"),
    [
        ([[transfers(0, 1, 0), transfers(0, 2, 0)]], 100, 22),  # a port takes one message at a time
        ([[transfers(1, 0, 0), transfers(2, 0, 0)]], 100, 22),
        ([[transfers([0, 1], [1, 0], 0)]], 100, 11),  # sending and receiving do not wait for each other
        ([[transfers(0, 1, 0)], [transfers(1, 2, 0)], [transfers(2, 3, 0)]], 100, 33),  # messages of the last round
        ([[transfers(0, 1, 0)], [transfers(2, 3, 0)]], 100, 11),
        ([[transfers(1, 0, 0, reduce=True), transfers(2, 0, 0, reduce=True)]], 2, 22 + 2),  # beside the next message
        ([[transfers(1, 0, 0, reduce=True), transfers(2, 0, 0, reduce=True)]], 100, 11 + 2 * 100),
        ([[transfers(1, 0, 0, reduce=True)], [transfers(0, 1, 0)]], 100, 11 + 100 + 11),
    ],
)
def test_a_price_counts_what_ranks_wait_for(tables: list[list[Transfers]], combining: float, price: float) -> None:
    """A message costs 1, and its byte 10."""
    assert cost(Schedule("broadcast", "by_hand", 4, 1, rounds(*tables), root=0), 1, 1, 10, combining) == price


def test_links_between_hosts_have_their_own_price() -> None:
    schedule = algorithms.build("all_gather", "ring", 4)
    hosts = (0, 0, 1, 1)
    alone = cost(schedule, 4, by_host(hosts, 1, 1), 0, 0)
    mixed = cost(schedule, 4, by_host(hosts, 1, 100), by_host(hosts, 0, 1000), 0)
    assert (alone, mixed) == (3, 1100 * 3)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_verify_finds_any_message_missing_and_any_contribution_added_twice(collective: str, name: str) -> None:
    if (collective, name) == ("broadcast", "halving_doubling"):
        return  # it sends some chunks twice to a rank
    schedule = built(collective, name, 5)
    for index, reduces in enumerate(table.reduce for table in tables(schedule) for _ in table.rows()):
        for times in (0, 2) if reduces else (0,):
            with pytest.raises(ValueError, match=f"{name} {collective}"):
                verify(damaged(schedule, index, times))


def test_the_documentation_shows_schedules_and_prices_as_they_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "collectives.md"
    examples = re.sub(r"^```.*$", "", page.read_text(), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    assert len(session.examples) > 10
    found: list[str] = []
    assert doctest.DocTestRunner().run(session, out=found.append).failed == 0, "".join(found)


def damaged(schedule: Schedule, index: int, times: int) -> Schedule:
    """Return the schedule with one message, numbered over all tables, repeated ``times`` times."""

    def at(number: int) -> Iterator[Transfers]:
        before = sum(len(table) for tables in map(schedule.rounds.at, range(number)) for table in tables)
        for table in schedule.rounds.at(number):
            here = np.arange(before, before + len(table))
            before += len(table)
            yield table.where(here != index)
            for _ in range(times):
                yield table.where(here == index)

    return replace(schedule, rounds=Rounds(len(schedule.rounds), at))


# Execution: no memory is written while it is read, and foreign messages fail


TAG = MessageTag(7, 1234)


def transports(size: int) -> list[InProcessTransport]:
    """Return the transports of ranks that are threads of this process."""
    group = ThreadGroup(size)
    memberships = ThreadMembership.group(size)
    return [
        InProcessTransport(rank, group, Watchdog(membership, timeout=30, stall_warn=30))
        for rank, membership in enumerate(memberships)
    ]


def _one_chunk(memory: Tensor) -> Chunks:
    region = Region(memory, range(1))
    return Chunks(1, memory.numel(), region, region)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("count", [3, PIECE // 4 + 5])
def test_memory_is_not_written_before_a_slow_rank_has_read_it(is_reduced: bool, count: int) -> None:
    here, there = transports(2)
    own, others = values(count, 0, torch.float32), values(count, 1, torch.float32)
    mine = own.clone()
    step: Step = Reduce((0, 1), 0, 1, complete=True) if is_reduced else Receive(1, 0, 1)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, [Send(1, 0, 1), step], here, _one_chunk(mine), TAG)
        there.send(0, as_bytes(others), TAG).wait()  # rank 0 has read all of it, and would have written by now
        late = torch.empty(count)
        receive_request = there.receive(0)
        assert (receive_request.message_tag, receive_request.nbytes) == (TAG, count * 4)
        assert not running.done()  # it waits until its message is read
        receive_request.into(as_bytes(late))
        running.result()
    same(late, own, "what rank 0 sent")
    same(mine, combined([own, others], "sum") if is_reduced else others, "what rank 0 has in the end")


def test_a_message_of_another_length_is_an_error() -> None:
    here, there = transports(2)
    there.send(0, as_bytes(torch.ones(4)), TAG)
    with pytest.raises(ProtocolError, match="rank 1 sent 16 bytes, expected 12"):
        run([Receive(1, 0, 1)], here, _one_chunk(torch.ones(3)), TAG)
