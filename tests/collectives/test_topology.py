"""Rings, trees and groups over recorded and random matrices: what they promise, and that none is better."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.links import Kind, LinkMatrix
from collectives.topology import Ring, Tree, groups, order, rings, trees
from tests.collectives.matrices import (
    BRIDGE,
    BRIDGED_PAIRS,
    CUBE_MESH,
    MACHINES,
    NONE,
    ONE,
    PASCAL_CUBE_MESH,
    SWITCHED,
    SWITCHES_OF_FOUR,
    TWICE,
    TWO_ROOTS,
    full,
    matrix,
)

WORDS = ["NV1", "NV2", "NV4", "PIX", "PXB", "PHB", "NODE", "SYS"]
EVERY = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


@st.composite
def matrices(draw: st.DrawFn, most: int = 8, words: Sequence[str] = WORDS) -> LinkMatrix:
    size = draw(st.integers(1, most))
    links = {pair: draw(st.sampled_from(words)) for pair in combinations(range(size), 2)}
    rows = [["X" if a == b else links[min(a, b), max(a, b)] for b in range(size)] for a in range(size)]
    return matrix("\n".join(map(" ".join, rows)))


@st.composite
def matrices_with_copies(draw: st.DrawFn) -> LinkMatrix:
    machine = draw(matrices(most=5))
    return machine.select(draw(st.lists(st.integers(0, len(machine) - 1), min_size=1, max_size=8)))


def closed(order: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 1 else []


def slowest(machine: LinkMatrix, order: Sequence[int]) -> float:
    return min((machine.links[a][b].gb_per_s for a, b in closed(order)), default=math.inf)


def kinds(machine: LinkMatrix, hops: Sequence[tuple[int, int]]) -> list[Kind]:
    return [machine.links[a][b].kind for a, b in hops]


def check_rings(machine: LinkMatrix, found: Sequence[Ring]) -> None:
    used: Counter[tuple[int, int]] = Counter()
    sent: Counter[int] = Counter()
    for ring in found:
        assert sorted(ring.order) == list(range(len(machine)))
        assert ring.hops == closed(ring.order)
        links = [machine.links[a][b] for a, b in ring.hops if machine.gpus[a] != machine.gpus[b]]
        if ring.lanes:
            assert ring.gb_per_s == min(ring.lanes * link.gb_per_s / link.lanes for link in links)
        else:
            assert ring.gb_per_s == slowest(machine, ring.order)
        for a, b in ring.hops:
            if machine.gpus[a] != machine.gpus[b]:
                used[machine.gpus[a], machine.gpus[b]] += ring.lanes
                sent[machine.gpus[a]] += ring.lanes
    for a, b in product(range(len(machine)), repeat=2):
        link = machine.links[a][b]
        assert link.kind is Kind.SAME or used[machine.gpus[a], machine.gpus[b]] <= link.lanes
        assert link.kind is not Kind.NVSWITCH or sent[machine.gpus[a]] <= link.lanes


def check_tree(machine: LinkMatrix, tree: Tree, root: int) -> None:
    size = len(machine)
    assert tree.root == root
    assert [place for place in range(size) if tree.parents[place] < 0] == [root]
    assert tree.rounds[root] == 0
    assert tree.depth == math.ceil(math.log2(size))
    for parent, child in tree.hops:
        assert tree.parents[child] == parent
        assert tree.rounds[parent] < tree.rounds[child]
    sends = Counter((parent, tree.rounds[child]) for parent, child in tree.hops)
    assert len(tree.hops) == size - 1
    assert set(sends.values()) <= {1}


class TestRings:
    @EVERY
    def test_each_visits_every_gpu_once_and_no_link_carries_more_than_it_has(self, machine: LinkMatrix) -> None:
        check_rings(machine, rings(machine))
        assert rings(machine) == rings(machine)

    @given(matrices() | matrices_with_copies())
    def test_so_on_any_machine(self, machine: LinkMatrix) -> None:
        found = rings(machine)
        assert found
        check_rings(machine, found)

    @given(matrices(most=6) | matrices(most=6, words=["NV1", "NV2", "SYS"]))
    def test_no_order_has_a_faster_bottleneck_than_the_first_ring(self, machine: LinkMatrix) -> None:
        first, *_ = rings(machine)
        others = permutations(range(1, len(machine)))
        assert slowest(machine, first.order) == max(slowest(machine, (0, *other)) for other in others)

    @given(matrices(most=6, words=["PIX", "PXB", "PHB", "NODE", "SYS"]))
    def test_over_pcie_none_has_fewer_slow_hops(self, machine: LinkMatrix) -> None:
        def from_slowest(order: Sequence[int]) -> list[float]:
            return sorted(machine.links[a][b].gb_per_s for a, b in closed(order))

        (ring,) = rings(machine)
        assert from_slowest(ring.order) == max(
            from_slowest((0, *other)) for other in permutations(range(1, len(machine)))
        )

    @given(matrices(most=5, words=["NV1", "NV2", "SYS"]))
    def test_nvlinks_are_used_by_as_many_rings_as_there_can_be(self, machine: LinkMatrix) -> None:
        found = rings(machine)
        if len(machine) < 3 or not all(ring.lanes for ring in found):
            return
        pairs = combinations(range(len(machine)), 2)
        lanes = {pair: machine.links[pair[0]][pair[1]].lanes for pair in pairs}
        assert sum(ring.lanes for ring in found) == 2 * most_cycles(lanes, len(machine))

    @pytest.mark.parametrize(("machine", "lanes"), [(CUBE_MESH, 6), (PASCAL_CUBE_MESH, 4)])
    def test_on_the_cube_mesh_they_take_every_nvlink_and_no_pcie(self, machine: LinkMatrix, lanes: int) -> None:
        found = rings(machine)
        used: Counter[tuple[int, int]] = Counter()
        for ring in found:
            assert set(kinds(machine, ring.hops)) == {Kind.NVLINK}
            used.update(dict.fromkeys(ring.hops, ring.lanes))
        assert sum(ring.lanes for ring in found) == lanes
        assert used == {
            (a, b): machine.links[a][b].lanes
            for a, b in product(range(8), repeat=2)
            if machine.links[a][b].kind is Kind.NVLINK
        }

    def test_on_the_cube_mesh_the_widest_comes_first(self) -> None:
        assert [(ring.lanes, ring.gb_per_s) for ring in rings(CUBE_MESH)] == [(2, 50), (2, 50), (1, 25), (1, 25)]

    def test_on_the_cube_mesh_however_numbered(self) -> None:
        machine = CUBE_MESH.select([5, 2, 7, 0, 3, 6, 1, 4])
        assert sum(ring.lanes for ring in rings(machine)) == 6

    def test_each_comes_with_its_reverse(self) -> None:
        found = rings(full(4, "NV4"))
        assert sum(ring.lanes for ring in found) == 12
        for one, back in zip(found[::2], found[1::2], strict=True):
            assert {(b, a) for a, b in one.hops} == set(back.hops)

    def test_through_a_switch_one_takes_all_the_lanes(self) -> None:
        assert rings(SWITCHED) == (Ring(tuple(range(8)), 18, 450.0),)

    def test_over_a_bridge_both_directions_make_one(self) -> None:
        assert rings(BRIDGE) == (Ring((0, 1), 4, 100.0),)

    @pytest.mark.parametrize(
        ("machine", "far"), [(TWO_ROOTS, Kind.SYS), (SWITCHES_OF_FOUR, Kind.SYS), (BRIDGED_PAIRS, Kind.NODE)]
    )
    def test_over_pcie_it_crosses_once_each_way(self, machine: LinkMatrix, far: Kind) -> None:
        (ring,) = rings(machine)
        assert kinds(machine, ring.hops).count(far) == 2
        assert ring.lanes == 0
        assert ring.gb_per_s == slowest(machine, ring.order)

    def test_within_a_socket_it_crosses_between_switches_once(self) -> None:
        (ring,) = rings(SWITCHES_OF_FOUR)
        assert Counter(kinds(SWITCHES_OF_FOUR, ring.hops)) == {Kind.SYS: 2, Kind.PXB: 2, Kind.PIX: 4}

    def test_the_same_gpu_twice_stands_side_by_side(self) -> None:
        assert rings(TWICE) == (Ring((0, 2, 1), 4, 100.0),)
        assert rings(ONE.select([0, 0])) == (Ring((0, 1), 0, math.inf),)

    def test_one_gpu_and_none(self) -> None:
        assert rings(ONE) == (Ring((0,), 0, math.inf),)
        assert rings(ONE)[0].hops == []
        assert rings(NONE) == ()

    def test_with_many_gpus_near_groups_stand_together(self) -> None:
        rows = [["X" if a == b else "PIX" if a % 4 == b % 4 else "SYS" for b in range(16)] for a in range(16)]
        machine = matrix("\n".join(map(" ".join, rows)))
        (ring,) = rings(machine)
        check_rings(machine, [ring])
        assert kinds(machine, ring.hops).count(Kind.SYS) == 4


class TestTrees:
    @EVERY
    def test_every_gpu_is_a_root_and_all_are_reached_in_a_logarithm_of_rounds(self, machine: LinkMatrix) -> None:
        found = trees(machine)
        assert len(found) == len(machine)
        for root, tree in enumerate(found):
            check_tree(machine, tree, root)
            (alone,) = trees(machine, [root])
            check_tree(machine, alone, root)
        assert found == trees(machine)

    @given(matrices() | matrices_with_copies())
    def test_so_on_any_machine(self, machine: LinkMatrix) -> None:
        for root, tree in enumerate(trees(machine)):
            check_tree(machine, tree, root)

    @given(matrices(most=6))
    def test_no_other_has_fewer_hops_of_the_farthest_kind(self, machine: LinkMatrix) -> None:
        for root, tree in enumerate(trees(machine)):
            assert sorted(kinds(machine, tree.hops), reverse=True) == nearest_broadcast(machine, root)

    @pytest.mark.parametrize("machine", [CUBE_MESH, PASCAL_CUBE_MESH, CUBE_MESH.select([5, 2, 7, 0, 3, 6, 1, 4])])
    def test_on_the_cube_mesh_no_hop_goes_over_pcie(self, machine: LinkMatrix) -> None:
        for tree in trees(machine):
            assert set(kinds(machine, tree.hops)) == {Kind.NVLINK}

    def test_on_the_cube_mesh_all_links_help_to_carry_all_trees(self) -> None:
        uses = Counter((min(hop), max(hop)) for tree in trees(PASCAL_CUBE_MESH) for hop in tree.hops)
        assert sum(uses.values()) == 8 * 7
        assert len(uses) == 16
        assert max(uses.values()) <= 5  # 3.5 on the average

    def test_links_with_more_lanes_carry_more(self) -> None:
        uses = Counter((min(hop), max(hop)) for tree in trees(CUBE_MESH) for hop in tree.hops)
        by_lanes = {1: 0, 2: 0}
        for (a, b), count in uses.items():
            by_lanes[CUBE_MESH.links[a][b].lanes] += count
        assert by_lanes[2] > 1.5 * by_lanes[1]

    def test_through_a_switch_all_gpus_send_alike(self) -> None:
        sends = Counter(parent for tree in trees(SWITCHED) for parent, _ in tree.hops)
        assert sum(sends.values()) == 8 * 7
        assert set(sends.values()) <= {6, 7, 8, 9}  # 7 on the average

    @pytest.mark.parametrize(("machine", "far"), [(TWO_ROOTS, Kind.SYS), (SWITCHES_OF_FOUR, Kind.SYS)])
    def test_over_pcie_each_crosses_the_roots_once(self, machine: LinkMatrix, far: Kind) -> None:
        for tree in trees(machine):
            assert kinds(machine, tree.hops).count(far) == 1

    def test_groups_of_unequal_size_are_not_cut(self) -> None:
        far = full(6, "SYS").links
        near = full(6, "PIX").links
        alike = [[near[a][b] if (a < 4) == (b < 4) else far[a][b] for b in range(6)] for a in range(6)]
        machine = LinkMatrix(tuple(range(6)), tuple(map(tuple, alike)), (None,) * 6)
        for tree in trees(machine):
            assert kinds(machine, tree.hops).count(Kind.SYS) == 1
            assert tree.depth == 3

    def test_above_eight_gpus_it_halves_along_the_order(self) -> None:
        rows = [["X" if a == b else "PIX" if a % 2 == b % 2 else "SYS" for b in range(16)] for a in range(16)]
        machine = matrix("\n".join(map(" ".join, rows)))
        for root, tree in enumerate(trees(machine, [0, 7, 15])):
            check_tree(machine, tree, (0, 7, 15)[root])
            assert kinds(machine, tree.hops).count(Kind.SYS) == 1

    @pytest.mark.parametrize("root", [-1, 2])
    def test_a_root_outside_is_refused(self, root: int) -> None:
        with pytest.raises(ValueError, match=rf"root is {root}; expected a place in a matrix of 2 GPUs"):
            trees(BRIDGE, [root])


class TestGroups:
    @pytest.mark.parametrize(
        ("machine", "expected"),
        [
            (CUBE_MESH, ((0, 1, 2, 3), (4, 5, 6, 7))),
            (PASCAL_CUBE_MESH, ((0, 1, 2, 3), (4, 5, 6, 7))),
            (SWITCHED, (tuple(range(8)),)),
            (TWO_ROOTS, ((0, 2), (1, 3))),
            (BRIDGED_PAIRS, ((0, 2), (1, 3))),
            (BRIDGE, ((0, 1),)),
            (SWITCHES_OF_FOUR, ((0, 1, 2, 3), (4, 5, 6, 7))),
            (SWITCHES_OF_FOUR.select([0, 1, 2, 3]), ((0, 1), (2, 3))),
            (TWICE, ((0, 2), (1,))),
            (ONE, ((0,),)),
            (NONE, ()),
        ],
    )
    def test_of_recorded_machines(self, machine: LinkMatrix, expected: tuple[tuple[int, ...], ...]) -> None:
        assert groups(machine) == expected

    def test_quads_of_the_cube_mesh_however_numbered(self) -> None:
        numbers = [0, 4, 1, 5, 2, 6, 3, 7]
        assert groups(CUBE_MESH.select(numbers)) == ((0, 2, 4, 6), (1, 3, 5, 7))

    @given(matrices() | matrices_with_copies())
    def test_each_gpu_is_in_one_and_no_farthest_link_inside(self, machine: LinkMatrix) -> None:
        found = groups(machine)
        assert sorted(place for group in found for place in group) == list(range(len(machine)))
        every = [machine.links[a][b].kind for a, b in combinations(range(len(machine)), 2)]
        if len(set(every)) > 1:
            inside = [machine.links[a][b].kind for group in found for a, b in combinations(group, 2)]
            assert all(kind < max(every) for kind in inside)
            assert max(map(len, found)) == largest_near_group(machine, max(every))
        else:
            assert len(found) == 1

    @EVERY
    def test_order_holds_each_once_with_groups_together(self, machine: LinkMatrix) -> None:
        row = order(machine)
        assert sorted(row) == list(range(len(machine)))
        for group in groups(machine):
            places = [row.index(one) for one in group]
            assert max(places) - min(places) == len(group) - 1

    def test_order_holds_groups_in_groups_together(self) -> None:
        machine = SWITCHES_OF_FOUR.select([0, 4, 2, 6, 1, 5, 3, 7])
        assert kinds(machine, list(pairwise(order(machine)))) == [
            Kind[word] for word in ("PIX", "PXB", "PIX", "SYS", "PIX", "PXB", "PIX")
        ]


def most_cycles(lanes: dict[tuple[int, int], int], size: int) -> int:
    """How many rings fit, by trying all of them on every state of the links."""
    ways = [(0, *way) for way in permutations(range(1, size)) if way[0] < way[-1]]
    hops = [[(min(hop), max(hop)) for hop in closed(way)] for way in ways]

    @cache
    def fit(left: tuple[tuple[tuple[int, int], int], ...]) -> int:
        free = dict(left)
        best = 0
        for cycle in hops:
            if all(free[hop] for hop in cycle):
                after = free | {hop: free[hop] - 1 for hop in cycle}
                best = max(best, 1 + fit(tuple(sorted(after.items()))))
        return best

    return fit(tuple(sorted(lanes.items())))


def nearest_broadcast(machine: LinkMatrix, root: int) -> list[Kind]:
    """The kinds of the hops, farthest first, of the best broadcast, by trying all that can be sent round by round."""
    size = len(machine)

    @cache
    def best(informed: frozenset[int], rounds: int) -> list[Kind] | None:
        if len(informed) == size:
            return []
        if not rounds:
            return None
        others = [place for place in range(size) if place not in informed]
        found = []
        for sends in all_sends(sorted(informed), others):
            rest = best(informed | {child for _, child in sends}, rounds - 1)
            if rest is not None:
                found.append(sorted(kinds(machine, sends) + rest, reverse=True))
        return min(found, default=None)

    answer = best(frozenset([root]), math.ceil(math.log2(size)))
    assert answer is not None
    return answer


def all_sends(informed: Sequence[int], others: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    if not informed:
        yield []
        return
    parent, *rest = informed
    for sends in all_sends(rest, others):
        yield sends
        taken = {child for _, child in sends}
        yield from ([(parent, child), *sends] for child in others if child not in taken)


def largest_near_group(machine: LinkMatrix, farthest: Kind) -> int:
    everywhere = range(len(machine))
    return max(
        size
        for size in range(1, len(machine) + 1)
        for group in combinations(everywhere, size)
        if all(machine.links[a][b].kind < farthest for a, b in combinations(group, 2))
    )
