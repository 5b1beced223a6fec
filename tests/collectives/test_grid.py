"""The grid of collective calls: every schedule, destination, dtype, operation, size and way between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from gangline.collectives import tuner
from gangline.collectives.bootstrap import groups
from gangline.collectives.communicator import Communicator
from tests.collectives.grid import CALLS, Cell, outs_of, roots_of, walk
from tests.collectives.ranks import in_threads

ALGORITHMS = sorted({name for collective in tuner.TUNED for name in tuner.names(collective)})
HOSTS: dict[str, Callable[[int], Sequence[int]]] = {
    "one host each": range,
    "pairs": lambda size: [rank // 2 for rank in range(size)],
    "scattered": lambda size: [rank * rank % 3 for rank in range(size)],
}


def calls_of(algorithm: str) -> list[str]:
    """Return the calls that have an algorithm; those without a choice exchange through slots."""
    return [call for call in CALLS if algorithm in (tuner.names(call) if call in tuner.TUNED else [tuner.SHARED])]


def threads(size: int, algorithm: str, hosts: Sequence[int] | None = None, segments: int = 1) -> list[Communicator]:
    """Return communicators of threads that take an algorithm; with hosts, they have no slots, as between real hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_ALGO", f"{algorithm}:{segments}")
        resources = groups.open_in_process(size, timeout=60)
    if hosts is not None:
        resources = [replace(one, hosts=tuple(hosts), slot_exchange=None) for one in resources]
    return [Communicator(one) for one in resources]


# Schedules: every call by every algorithm between 2 to 17 threads, in place, into other memory and into new memory


def _of_schedule(algorithm: str, size: int) -> Iterator[Cell]:
    for number, call in enumerate(calls_of(algorithm)):
        outs, roots = outs_of(call), roots_of(call, size)
        chosen = dict.fromkeys([*outs[:2], outs[(size + number) % len(outs)]])
        for place, out in enumerate(chosen if size < 10 else [*chosen][-2:]):
            count = (37, 2 * size + 1, 3)[(number + place) % 3]
            yield Cell(call, count, root=roots[(number + place) % len(roots)], out=out)


@pytest.mark.parametrize("sizes", [range(2, 8), range(8, 12), range(12, 15), range(15, 18)], ids=str)
def test_every_schedule(sizes: range) -> None:
    for size in sizes:
        segments = 1 if size > 9 else 1 + size % 3
        for algorithm in ALGORITHMS:
            ranks = threads(size, algorithm, segments=segments)
            in_threads(ranks, walk, f"{algorithm}:{segments}", [*_of_schedule(algorithm, size)])
        for hosts in HOSTS:
            for algorithm in ("hierarchical", "ring")[: 2 if hosts == "scattered" else 1]:
                ranks = threads(size, algorithm, HOSTS[hosts](size))
                in_threads(ranks, walk, f"{algorithm}, {hosts}", [*_of_schedule(algorithm, size)])
