"""Preconditions and postconditions of the collectives: the ranks whose contributions each chunk holds.

A chunk's value is represented by the set of ranks that contributed to it, as the bits of an int; 0 means "not written".
"""

from __future__ import annotations

from typing import NamedTuple


class Collective(NamedTuple):
    """A collective between ``size`` ranks on a tensor of ``chunks`` chunks."""

    name: str
    size: int
    chunks: int
    root: int | None

    def initial(self) -> list[list[int]]:
        """Return the contributions in each chunk of each rank before the first round."""
        if self.name in ("all_reduce", "reduce", "reduce_scatter"):
            return [[1 << rank] * self.chunks for rank in range(self.size)]
        if self.name in ("broadcast", "scatter"):
            return [[1 << rank if rank == self.root else 0] * self.chunks for rank in range(self.size)]
        held = [[0] * self.chunks for _ in range(self.size)]
        for rank, chunks_of_rank in enumerate(held):
            for chunk in self._row(rank):
                chunks_of_rank[chunk] = 1 << rank
        return held

    def final(self, rank: int) -> dict[int, int]:
        """Return the contributions that a rank's result chunks must hold after the last round, by chunk.

        Raises:
            ValueError: if the collective is unknown.
        """
        size, root = self.size, self.root
        every_chunk, every_rank = range(self.chunks), (1 << size) - 1
        match self.name:
            case "all_reduce":
                return dict.fromkeys(every_chunk, every_rank)
            case "reduce":
                return dict.fromkeys(every_chunk, every_rank) if rank == root else {}
            case "broadcast":
                return dict.fromkeys(every_chunk, 1 << (root or 0))
            case "all_gather":
                return {chunk: 1 << owner for owner in range(size) for chunk in self._row(owner)}
            case "reduce_scatter":
                return dict.fromkeys(self._row(rank), every_rank)
            case "gather":
                owners = range(size) if rank == root else ()
                return {chunk: 1 << owner for owner in owners for chunk in self._row(owner)}
            case "scatter":
                return dict.fromkeys(self._row(rank), 1 << (root or 0))
            case "all_to_all":
                width = self.chunks // size**2
                begins = ((source, (source * size + rank) * width) for source in range(size))
                return {chunk: 1 << source for source, begin in begins for chunk in range(begin, begin + width)}
        raise ValueError(f"cannot verify a schedule of the unknown collective {self.name!r}")

    def _row(self, rank: int) -> range:
        """Return the chunks of a rank's row; in an all_to_all, those that the rank sends."""
        width = self.chunks // self.size
        return range(rank * width, (rank + 1) * width)
