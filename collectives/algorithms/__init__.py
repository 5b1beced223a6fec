"""The algorithms of the collectives, one file each: pure functions that give a `Schedule`.

`build` makes a schedule by the names of collective and algorithm; `names` lists the algorithms of a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from gangline.collectives.algorithms import (
    binomial,
    direct,
    double_tree,
    halving_doubling,
    hierarchical,
    pairwise,
    ring,
)
from gangline.collectives.schedule.schedule import ROOTED, Schedule


@dataclass(frozen=True, slots=True)
class Wish:
    """What a schedule is built for; an algorithm takes of it what it needs."""

    size: int
    root: int
    segments: int
    hosts: tuple[int, ...]
    """The host of each rank."""

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks, those of a host next to each other."""
        return tuple(sorted(range(self.size), key=self.hosts.__getitem__))


REGISTRY: dict[str, dict[str, Callable[[Wish], Schedule]]] = {
    "all_reduce": {
        "ring": lambda wish: ring.all_reduce(wish.order, wish.segments),
        "halving_doubling": lambda wish: halving_doubling.all_reduce(wish.size),
        "double_tree": lambda wish: double_tree.all_reduce(wish.order, wish.segments),
        "one_shot": lambda wish: direct.one_shot(wish.size),
        "two_shot": lambda wish: direct.two_shot(wish.size),
        "hierarchical": lambda wish: hierarchical.all_reduce(wish.hosts),
    },
    "reduce": {
        "ring": lambda wish: ring.reduce(wish.order, wish.root, wish.segments),
        "double_tree": lambda wish: double_tree.reduce(wish.order, wish.root, wish.segments),
        "direct": lambda wish: direct.reduce(wish.size, wish.root),
        "binomial": lambda wish: binomial.reduce(wish.size, wish.root),
        "hierarchical": lambda wish: hierarchical.reduce(wish.hosts, wish.root),
    },
    "broadcast": {
        "ring": lambda wish: ring.broadcast(wish.order, wish.root, wish.segments),
        "double_tree": lambda wish: double_tree.broadcast(wish.order, wish.root, wish.segments),
        "direct": lambda wish: direct.broadcast(wish.size, wish.root),
        "binomial": lambda wish: binomial.broadcast(wish.size, wish.root),
        "hierarchical": lambda wish: hierarchical.broadcast(wish.hosts, wish.root),
    },
    "all_gather": {
        "ring": lambda wish: ring.all_gather(wish.order, wish.segments),
        "halving_doubling": lambda wish: halving_doubling.all_gather(wish.size),
        "direct": lambda wish: direct.all_gather(wish.size),
    },
    "reduce_scatter": {
        "ring": lambda wish: ring.reduce_scatter(wish.order, wish.segments),
        "halving_doubling": lambda wish: halving_doubling.reduce_scatter(wish.size),
        "direct": lambda wish: direct.reduce_scatter(wish.size),
    },
    "all_to_all": {
        "pairwise": lambda wish: pairwise.all_to_all(wish.size),
        "direct": lambda wish: direct.all_to_all(wish.size),
    },
    "gather": {
        "direct": lambda wish: direct.gather(wish.size, wish.root),
        "binomial": lambda wish: binomial.gather(wish.size, wish.root),
    },
    "scatter": {
        "direct": lambda wish: direct.scatter(wish.size, wish.root),
        "binomial": lambda wish: binomial.scatter(wish.size, wish.root),
    },
}
"""For each collective its algorithms by name."""


def names(collective: str) -> tuple[str, ...]:
    """The algorithms of a collective.

    Raises:
        ValueError: there is no such collective.
    """
    return tuple(_algorithms(collective))


@lru_cache(maxsize=256)
def build(
    collective: str,
    algorithm: str,
    size: int,
    *,
    root: int | None = None,
    segments: int = 1,
    hosts: tuple[int, ...] | None = None,
) -> Schedule:
    """The schedule of a collective between ``size`` ranks; remembered.

    Args:
        collective: such as "all_reduce".
        algorithm: one of `names`.
        size: number of ranks.
        root: the rank that gives or gets, for reduce, broadcast, gather and scatter.
        segments: how many messages a chunk is cut into, for algorithms that pipeline (ring, double_tree); others do
            not heed it.
        hosts: the host of each rank, for algorithms that heed it (ring, double_tree, hierarchical); None: all ranks
            are on one.

    Raises:
        ValueError: an unknown name, or an argument that does not fit.
    """
    found = _algorithms(collective).get(algorithm)
    if found is None:
        expected = ", ".join(names(collective))
        raise ValueError(f"{collective} has no algorithm {algorithm!r}; expected one of {expected}")
    if size < 1 or segments < 1:
        raise ValueError(f"size is {size} and segments is {segments}; expected both to be 1 or more")
    if hosts is not None and len(hosts) != size:
        raise ValueError(f"hosts has {len(hosts)} entries for {size} ranks; expected one for each rank")
    if collective in ROOTED and (root is None or not 0 <= root < size):
        raise ValueError(f"root of {collective} is {root}; expected a rank from 0 to {size - 1}")
    if collective not in ROOTED and root is not None:
        raise ValueError(f"root of {collective} is {root}; expected None, for {collective} has no root")
    return found(Wish(size, root or 0, segments, hosts or (0,) * size))


def _algorithms(collective: str) -> dict[str, Callable[[Wish], Schedule]]:
    if collective not in REGISTRY:
        raise ValueError(f"no collective {collective!r} has algorithms; expected one of {', '.join(REGISTRY)}")
    return REGISTRY[collective]
