"""Algorithms of the collectives, one file each: pure functions that return a number of chunks and `Rounds`.

`build` returns the schedule for the names of a collective and an algorithm; `names` lists the algorithms of a
collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from gangline.collectives.algorithms import binomial, direct, halving_doubling, hierarchical, pairwise, ring
from gangline.collectives.schedule import ROOTED, Rounds, Schedule


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """The parameters of `build`; an algorithm uses those that apply to it."""

    size: int
    root: int
    segments: int
    hosts: tuple[int, ...]
    """Host of each rank."""

    @property
    def order(self) -> tuple[int, ...]:
        """Ranks ordered by host."""
        return tuple(sorted(range(self.size), key=self.hosts.__getitem__))


Algorithm = Callable[[ScheduleRequest], tuple[int, Rounds]]
"""Function that returns the number of chunks and the rounds."""


def _reversed(make: Algorithm, *, reduce: bool = True) -> Algorithm:
    """Reverse an algorithm: every message is sent back, and summed with ``reduce``."""

    def reverse(request: ScheduleRequest) -> tuple[int, Rounds]:
        chunks, rounds = make(request)
        return chunks, rounds.backwards(reduce=reduce)

    return reverse


_BROADCAST: dict[str, Algorithm] = {
    "ring": lambda request: ring.broadcast(request.order, request.root, request.segments),
    "direct": lambda request: direct.broadcast(request.size, request.root),
    "binomial": lambda request: binomial.broadcast(request.size, request.root),
    "hierarchical": lambda request: hierarchical.broadcast(request.hosts, request.root),
}
_ALL_GATHER: dict[str, Algorithm] = {
    "ring": lambda request: ring.all_gather(request.order, request.segments),
    "halving_doubling": lambda request: halving_doubling.all_gather(request.size),
    "direct": lambda request: direct.all_gather(request.size),
}
_SCATTER: dict[str, Algorithm] = {
    "direct": lambda request: direct.scatter(request.size, request.root),
    "binomial": lambda request: binomial.scatter(request.size, request.root),
}

REGISTRY: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": lambda request: ring.all_reduce(request.order, request.segments),
        "halving_doubling": lambda request: halving_doubling.all_reduce(request.size),
        "one_shot": lambda request: direct.one_shot(request.size),
        "two_shot": lambda request: direct.two_shot(request.size),
        "hierarchical": lambda request: hierarchical.all_reduce(request.hosts),
    },
    "reduce": {
        **{name: _reversed(make) for name, make in _BROADCAST.items()},
        "halving_doubling": lambda request: halving_doubling.reduce(request.size, request.root),
    },
    "broadcast": {
        **_BROADCAST,
        "halving_doubling": lambda request: halving_doubling.broadcast(request.size, request.root),
    },
    "all_gather": _ALL_GATHER,
    "reduce_scatter": {
        "ring": lambda request: ring.reduce_scatter(request.order, request.segments),
        "halving_doubling": _reversed(_ALL_GATHER["halving_doubling"]),
        "direct": _reversed(_ALL_GATHER["direct"]),
    },
    "all_to_all": {
        "pairwise": lambda request: pairwise.all_to_all(request.size),
        "direct": lambda request: direct.all_to_all(request.size),
    },
    "gather": {name: _reversed(make, reduce=False) for name, make in _SCATTER.items()},
    "scatter": _SCATTER,
}
"""Algorithms of each collective, by name."""


def names(collective: str) -> tuple[str, ...]:
    """Return the algorithms of a collective.

    Raises:
        ValueError: if the collective is unknown.
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
    """Return the schedule of a collective between ``size`` ranks; results are cached.

    Args:
        collective: name such as "all_reduce".
        algorithm: one of `names`.
        size: number of ranks.
        root: root rank of reduce, broadcast, gather and scatter.
        segments: number of messages per chunk for the pipelined algorithm, ring; others ignore it.
        hosts: host of each rank, for the algorithms that use it (ring, hierarchical); None: all ranks are on one host.

    Raises:
        ValueError: if a name is unknown or an argument is out of range.
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
    chunks, rounds = found(ScheduleRequest(size, root or 0, segments, hosts or (0,) * size))
    return Schedule(collective, algorithm, size, chunks, rounds, root)


def _algorithms(collective: str) -> dict[str, Algorithm]:
    if collective not in REGISTRY:
        raise ValueError(f"no collective {collective!r} has algorithms; expected one of {', '.join(REGISTRY)}")
    return REGISTRY[collective]
