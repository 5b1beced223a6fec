"""Which GPUs are near each other, and the rings and trees that follow: pure functions over a `LinkMatrix`.

GPUs are named by their places in the matrix. All results follow from the matrix alone, so that every process of a
machine comes to the same ones.

Sources: rings that take each NVLink once are what NCCL looks for (S. Jeaugey, "NCCL 2.0", GTC 2017). Trees by
recursive halving, a tree for every root with the load shared out over the links, are those of MXNet's tree kvstore
(C. Yang, "Single machine all reduce topology-aware communication", 2018), which halves by B. W. Kernighan and S. Lin,
"An efficient heuristic procedure for partitioning graphs" (1970); up to 8 GPUs all ways to halve are tried here. The
best single ring is found as M. Held and R. M. Karp, "A dynamic programming approach to sequencing problems" (1962).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise

from collectives.links import Kind, LinkMatrix

_ALL_WAYS = 8  # GPUs up to which all cycles and all ways to halve are tried
_BEST_RING = 12  # GPUs up to which the best ring is found; it takes 2**GPUs steps
_STEPS = 20_000  # tries to fit rings together, well under a second


@dataclass(frozen=True, slots=True)
class Ring:
    """A way through all GPUs and back: each sends to the next in ``order``, the last to the first."""

    order: tuple[int, ...]
    lanes: int
    """NVLinks of each hop that are this ring's own in this direction; 0 where a hop is no NVLink."""
    gb_per_s: float
    """Estimate for its slowest hop with those lanes; rings share a tensor out in proportion."""

    @property
    def hops(self) -> list[tuple[int, int]]:
        """Sender and receiver of each hop; none for one GPU."""
        return _closed(self.order)


@dataclass(frozen=True, slots=True)
class Tree:
    """A broadcast in ``depth`` rounds: each GPU has a round in which its parent sends it the whole.

    In a round a GPU sends to at most one other. Turned round it is a reduction.
    """

    root: int
    parents: tuple[int, ...]
    """The parent of each GPU; -1 for the root."""
    rounds: tuple[int, ...]
    """From 1; 0 for the root."""

    @property
    def depth(self) -> int:
        """Rounds: ceil(log2(GPUs))."""
        return max(self.rounds)

    @property
    def hops(self) -> list[tuple[int, int]]:
        """Parent and child of each hop."""
        return [(parent, child) for child, parent in enumerate(self.parents) if parent >= 0]


def rings(matrix: LinkMatrix) -> tuple[Ring, ...]:
    """Rings through all GPUs, all to be run at once; none for no GPU.

    No order of the GPUs has a faster slowest hop than the first one's. If that is made of NVLinks between pairs,
    further rings take the NVLinks left over, each NVLink once each way, and each ring comes with its reverse. Elsewhere
    one ring uses all that a GPU has: through a switch, between two GPUs, and over PCIe, where it also has the fewest
    hops so slow, then the fewest of the next slower, and so on, and so stays within a root as long as it can. A GPU
    that is there twice counts as one, its places being neighbours.

    Up to 8 GPUs rings are fitted together by trying; above there is one and its reverse. Above 12 GPUs it follows
    `order`, near groups first, and need not be the best.
    """
    if not len(matrix):
        return ()
    copies: dict[int, list[int]] = {}
    for place, gpu in enumerate(matrix.gpus):
        copies.setdefault(gpu, []).append(place)
    places = list(copies.values())
    distinct = matrix.select([first for first, *_ in places])
    return tuple(
        Ring(tuple(place for one in ring.order for place in places[one]), ring.lanes, ring.gb_per_s)
        for ring in _rings_of_distinct(distinct)
    )


def trees(matrix: LinkMatrix, roots: Sequence[int] | None = None) -> tuple[Tree, ...]:
    """A tree of ceil(log2(GPUs)) rounds for each of ``roots``, by default for every GPU.

    Of all such trees each has the fewest hops of the farthest kind of link, then of the next, and so on; among equals
    the one that loads least what the trees before it have loaded, NVLinks between pairs or the ports of GPUs, by
    bandwidth. Above 8 GPUs, GPUs are first halved along `order`.

    Raises:
        ValueError: a root is no place in the matrix.
    """
    roots = range(len(matrix)) if roots is None else roots
    for root in roots:
        if not 0 <= root < len(matrix):
            raise ValueError(f"root is {root}; expected a place in a matrix of {len(matrix)} GPUs")
    halves = _halves(order(matrix))
    uses: Counter[tuple[int, int]] = Counter()  # see _carrier
    found = []
    for root in roots:
        tree = _tree(root, len(matrix), _tree_costs(matrix, uses), halves)
        uses.update(_carrier(matrix, *hop) for hop in tree.hops)
        found.append(tree)
    return tuple(found)


def groups(matrix: LinkMatrix) -> tuple[tuple[int, ...], ...]:
    """The near groups: in each, any two GPUs are joined by something nearer than the farthest kind of link here.

    The largest such group first takes its GPUs (of equals the one with most bandwidth inside), then the largest among
    the rest. All are one group if all links are of one kind. A group's own groups: ``groups(matrix.select(group))``.

    Returns:
        Each GPU in one group; groups, and the GPUs in them, by their places.
    """
    everywhere = range(len(matrix))
    farthest = max((matrix.links[a][b].kind for a, b in combinations(everywhere, 2)), default=Kind.SAME)
    near = [{b for b in everywhere if b != a and matrix.links[a][b].kind < farthest} for a in everywhere]
    if not any(near):
        return (tuple(everywhere),) if len(matrix) else ()

    def size_and_bandwidth(group: tuple[int, ...]) -> tuple[int, float]:
        return len(group), math.fsum(matrix.links[a][b].gb_per_s for a, b in combinations(group, 2))

    left, found = set(everywhere), []
    while left:
        group = max(sorted(_cliques(near, left)), key=size_and_bandwidth)
        found.append(group)
        left -= set(group)
    return tuple(sorted(found))


def order(matrix: LinkMatrix) -> tuple[int, ...]:
    """All GPUs in a row in which near groups, and near groups in them, stand together."""
    near = groups(matrix)
    if len(near) in (1, len(matrix)):
        return tuple(range(len(matrix)))
    return tuple(group[place] for group in near for place in order(matrix.select(group)))


def _closed(way: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise((*way, way[0]))) if len(way) > 1 else []


def _rings_of_distinct(matrix: LinkMatrix) -> list[Ring]:
    size = len(matrix)
    best = _best_ring(_ring_costs(matrix)) if size <= _BEST_RING else order(matrix)
    links = [matrix.links[a][b] for a, b in _closed(best)]
    lanes = min((link.lanes for link in links), default=0)
    slowest = min((link.gb_per_s for link in links), default=math.inf)
    if size < 3 or any(link.kind is not Kind.NVLINK for link in links):
        return [Ring(best, lanes, slowest)]
    fitted = _fit(matrix, slowest) if size <= _ALL_WAYS else Counter({best: lanes})
    found = []
    for way, own in fitted.items():
        links = [matrix.links[a][b] for a, b in _closed(way)]
        speed = own * min(link.gb_per_s / link.lanes for link in links)
        found += [Ring(way, own, speed), Ring((way[0], *way[:0:-1]), own, speed)]
    return found


def _ring_costs(matrix: LinkMatrix) -> list[list[int]]:
    """Costs of which no number of faster hops in a ring makes up one slower hop."""
    speeds = sorted({link.gb_per_s for row in matrix.links for link in row}, reverse=True)
    cost = {speed: (len(matrix) + 1) ** rank for rank, speed in enumerate(speeds)}
    return [[cost[link.gb_per_s] for link in row] for row in matrix.links]


def _best_ring(costs: list[list[int]]) -> tuple[int, ...]:
    """The cheapest ring from place 0; of equals the one with the lowest places first."""
    size = len(costs)
    ways: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(1, 0): (0, (0,))}
    for _ in range(size - 1):
        longer: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        for (seen, last), (cost, way) in ways.items():
            for place in range(size):
                if not seen >> place & 1:
                    end = (seen | 1 << place, place)
                    one = (cost + costs[last][place], (*way, place))
                    longer[end] = min(longer.get(end, one), one)
        ways = longer
    return min((cost + costs[last][0], way) for (_, last), (cost, way) in ways.items())[1]


def _fit(matrix: LinkMatrix, slowest: float) -> Counter[tuple[int, ...]]:
    """Rings, each with its lanes, that together take most lanes; the first alone has no hop below ``slowest`` GB/s."""
    size, costs = len(matrix), _ring_costs(matrix)
    direct = [[link.lanes if link.kind is Kind.NVLINK else 0 for link in row] for row in matrix.links]
    cycles = sorted((sum(costs[a][b] for a, b in hops), way, hops) for way, hops in _cycles(direct))
    first = sum(all(matrix.links[a][b].gb_per_s >= slowest for a, b in hops) for _, _, hops in cycles)
    left = {(a, b): direct[a][b] for a, b in combinations(range(size), 2)}
    most = min(sum(row) // 2 for row in direct)
    best: list[int] = []
    steps = 0

    def extend(chosen: list[int]) -> None:
        nonlocal best, steps
        if len(chosen) > len(best):
            best = chosen.copy()
        for number in range(chosen[-1], len(cycles)) if chosen else range(first):
            if len(best) == most or steps >= _STEPS:
                return
            steps += 1
            hops = cycles[number][2]
            if all(left[hop] for hop in hops):
                for hop in hops:
                    left[hop] -= 1
                extend([*chosen, number])
                for hop in hops:
                    left[hop] += 1

    extend([])
    return Counter(cycles[number][1] for number in best)


def _cycles(direct: list[list[int]]) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Each ring of links that are there, in one of its directions, with its hops from lower to higher place."""
    size = len(direct)

    def extend(way: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(way) == size:
            if direct[way[-1]][0] and way[1] < way[-1]:
                yield way
            return
        for place in range(1, size):
            if direct[way[-1]][place] and place not in way:
                yield from extend((*way, place))

    for way in extend((0,)):
        yield way, [(min(hop), max(hop)) for hop in _closed(way)]


def _tree_costs(matrix: LinkMatrix, uses: Counter[tuple[int, int]]) -> list[list[int]]:
    """Costs of which first the kinds of link count, then their load.

    The load of what is used u times is u squared by its bandwidth; the sum is least when loads are even.
    """
    size = len(matrix)
    kinds = sorted({link.kind for row in matrix.links for link in row})
    fastest = max((link.gb_per_s for row in matrix.links for link in row if link.kind is not Kind.SAME), default=1.0)

    def load(a: int, b: int) -> int:
        return round(1000 * fastest / matrix.links[a][b].gb_per_s) * (2 * uses[_carrier(matrix, a, b)] + 1)

    loads = [[load(a, b) for b in range(size)] for a in range(size)]
    above = 1 + size * max(map(max, loads), default=0)
    return [
        [size ** kinds.index(matrix.links[a][b].kind) * above + loads[a][b] for b in range(size)] for a in range(size)
    ]


def _carrier(matrix: LinkMatrix, sender: int, receiver: int) -> tuple[int, int]:
    """What a hop keeps busy: the NVLinks of these two, else the port through which the sender reaches all others."""
    direct = matrix.links[sender][receiver].kind is Kind.NVLINK
    return (min(sender, receiver), max(sender, receiver)) if direct else (sender, sender)


Halves = Callable[[frozenset[int], int], list[frozenset[int]]]


def _halves(row: Sequence[int]) -> Halves:
    """Ways to split GPUs in two so that no round is lost, each given as the half without the root."""

    @cache
    def of(members: frozenset[int], root: int) -> list[frozenset[int]]:
        most = 1 << _rounds(len(members)) - 1
        sizes = range(len(members) - most, most + 1)
        if len(members) <= _ALL_WAYS:
            others = sorted(members - {root})
            return [frozenset(half) for size in sizes if size for half in combinations(others, size)]
        standing = [place for place in row if place in members]
        firsts = [frozenset(standing[:size]) for size in sizes if size]
        return [members - first if root in first else first for first in firsts]

    return of


def _tree(root: int, size: int, costs: list[list[int]], halves: Halves) -> Tree:
    """The cheapest tree: its first hop leads into the other half, and both halves go on by themselves."""

    @cache
    def best(members: frozenset[int], top: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        if len(members) == 1:
            return 0, ()
        rounds = _rounds(len(members))
        found = []
        for half in halves(members, top):
            cost, hops = best(members - half, top)
            for child in half:
                below, lower = best(half, child)
                found.append((cost + below + costs[top][child], ((-rounds, top, child), *hops, *lower)))
        return min(found)

    parents, numbers = [-1] * size, [0] * size
    for rounds, parent, child in sorted(best(frozenset(range(size)), root)[1]):
        parents[child], numbers[child] = parent, _rounds(size) + rounds + 1
    return Tree(root, tuple(parents), tuple(numbers))


def _rounds(members: int) -> int:
    return (members - 1).bit_length()


def _cliques(near: Sequence[set[int]], among: set[int]) -> Iterator[tuple[int, ...]]:
    """Groups whose members are all near each other and that nobody can join (Bron and Kerbosch, 1973)."""

    def extend(group: set[int], candidates: set[int], done: set[int]) -> Iterator[tuple[int, ...]]:
        if not candidates and not done:
            yield tuple(sorted(group))
            return
        pivot = max(sorted(candidates | done), key=lambda one: len(near[one] & candidates))
        for one in sorted(candidates - near[pivot]):
            yield from extend(group | {one}, candidates & near[one], done & near[one])
            candidates = candidates - {one}
            done = done | {one}

    yield from extend(set(), set(among), set())
