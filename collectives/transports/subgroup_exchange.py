"""Exchanges within groups of ranks, by means of an exchange of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gangline.collectives.transports.base import BootstrapAllGather

_WITHIN, _DONE = b"+", b"-"


@contextmanager
def within(exchange: BootstrapAllGather, members: Sequence[int]) -> Iterator[BootstrapAllGather]:
    """Gives the exchange of one's own group, which may be called as often as the group likes.

    All ranks enter and leave at the same place; who has left waits until all groups are done, or have failed.

    Args:
        exchange: of all ranks.
        members: the group: rank i of its exchange is ``members[i]`` of all.
    """

    def of_group(blob: bytes) -> list[bytes]:
        said = exchange(_WITHIN + blob)
        return [said[rank][len(_WITHIN) :] for rank in members]

    try:
        yield of_group
    finally:
        while any(said != _DONE for said in exchange(_DONE)):
            pass
