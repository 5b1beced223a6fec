"""Bootstrap all-gathers within groups of ranks, built on the all-gather of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gangline.collectives.transports.base import BootstrapAllGather

_CONTINUE, _DONE = b"+", b"-"


@contextmanager
def within(exchange: BootstrapAllGather, members: Sequence[int]) -> Iterator[BootstrapAllGather]:
    """Yield the all-gather of this rank's group; each group may call it any number of times.

    Collective over all ranks, not only the group: leaving the context blocks until all groups have left it.

    Args:
        exchange: all-gather of all ranks.
        members: ranks of the group: rank i of the group is rank ``members[i]`` of all.
    """

    def group_exchange(data: bytes) -> list[bytes]:
        gathered = exchange(_CONTINUE + data)
        return [gathered[rank][len(_CONTINUE) :] for rank in members]

    try:
        yield group_exchange
    finally:
        while any(status != _DONE for status in exchange(_DONE)):
            pass
