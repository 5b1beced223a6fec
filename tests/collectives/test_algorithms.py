"""Every algorithm: correct for every number of ranks, with the steps and bytes that its file states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from gangline.collectives import algorithms
from gangline.collectives.algorithms.double_tree import Tree, two_trees
from gangline.collectives.schedule import ROOTED, Reduce, Schedule, Transfers
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
    depth = max(int(tree.depth.max()) for tree in two_trees(range(size)))
    schedule = built("all_reduce", "double_tree", size, segments=segments)
    assert schedule.steps() == 2 * depth + segments - 1
    assert schedule.bytes_on_wire(n) <= 2 * n
    below = max(int(tree.depth.max()) for tree in two_trees(range(size - 1)))
    for collective in ("broadcast", "reduce"):
        schedule = built(collective, "double_tree", size, segments=segments)
        assert schedule.steps() == below + segments
        assert schedule.bytes_on_wire(n) == n


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


@pytest.mark.parametrize("name", ["ring", "double_tree"])
def test_algorithms_that_use_hosts_send_few_messages_between_them(name: str) -> None:
    hosts = tuple(rank % 4 for rank in range(32))
    crossing = {pair for pair in pairs(built("all_reduce", name, 32, hosts=hosts)) if hosts[pair[0]] != hosts[pair[1]]}
    blind = {pair for pair in pairs(built("all_reduce", name, 32)) if hosts[pair[0]] != hosts[pair[1]]}
    assert len(crossing) < len(blind) / 2
    if name == "ring":
        assert len(crossing) == 4


class TestTwoTrees:
    def test_no_rank_is_inside_both(self) -> None:
        for size in range(1, 300):
            first, second = two_trees(range(size))
            assert not set(inside(first)) & set(inside(second)), size

    def test_are_binary_and_reach_every_rank_from_one_root_in_a_logarithm(self) -> None:
        for size in range(1, 300):
            for tree in two_trees(range(size)):
                (root,) = np.flatnonzero(tree.parent < 0)
                others = np.flatnonzero(tree.parent >= 0)
                assert (tree.depth[others] == tree.depth[tree.parent[others]] + 1).all()
                assert tree.depth[root] == 0
                assert max(Counter(tree.parent[others].tolist()).values(), default=0) <= 2
                assert tree.depth.max() <= math.log2(size)


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


def inside(tree: Tree) -> list[int]:
    return tree.parent[tree.parent >= 0].tolist()
