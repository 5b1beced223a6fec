"""Which server holds which part of which key: the same on every worker, balanced by bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gangline.kvstore.optimizer.spec import Key

GRAIN = 65_536
"""Elements: parts of a cut key begin at multiples of it, and fused optimizers give the same bits as on the whole."""

_LARGEST = 4 << 20
_SMALLEST = 1 << 18
_PER_SERVER = 4
"""Parts that a key should give each server, as far as they are not too small."""


@dataclass(frozen=True)
class KeyLayout:
    """A key as all workers know it."""

    key: Key
    dtype: str
    """torch's name of it, such as "float32"."""
    shape: tuple[int, ...]
    itemsize: int

    @cached_property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.itemsize

    @property
    def row(self) -> int:
        """Elements of a row, the unit of row-sparse values."""
        return max(1, math.prod(self.shape[1:]))


@dataclass(frozen=True)
class ShardPlacement:
    """A run of a key's elements on one server."""

    number: int
    """Unique in the job."""
    server: int
    layout: KeyLayout
    begin: int
    numel: int

    @cached_property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.layout.itemsize

    @cached_property
    def is_whole(self) -> bool:
        """Whether the key has no other part."""
        return self.numel == self.layout.numel

    @property
    def shape(self) -> tuple[int, ...]:
        """The key's shape where this is all of it, else flat."""
        return self.layout.shape if self.is_whole else (self.numel,)

    @property
    def width(self) -> int:
        """Elements of which its rows are made: the key's row, or what divides it and every place of a cut."""
        return self.layout.row if self.is_whole else math.gcd(self.layout.row, GRAIN)


class Sharding:
    """Deals out keys as they come; equal calls give equal parts in every process.

    Args:
        servers: how many there are.
    """

    def __init__(self, servers: int) -> None:
        self.loads = [0] * servers
        """Bytes on each server."""
        self._number = 0

    def place(self, layouts: Sequence[KeyLayout], *, whole: bool = False) -> dict[Key, list[ShardPlacement]]:
        """Cut keys and give each part to the server that holds the fewest bytes, the largest keys first.

        Args:
            layouts: new keys, in an order that all workers share.
            whole: leave each key in one part, for optimizers that must see all of it.
        """
        ordered = sorted(layouts, key=lambda layout: -layout.nbytes)  # stable: ties in the order given
        return {layout.key: self._place_one(layout, whole=whole) for layout in ordered}

    def remove(self, parts: Sequence[ShardPlacement]) -> None:
        """Count the bytes of these no more."""
        for part in parts:
            self.loads[part.server] -= part.nbytes

    def _place_one(self, layout: KeyLayout, *, whole: bool) -> list[ShardPlacement]:
        parts = []
        begin = 0
        for numel in [layout.numel] if whole else self._sizes(layout):
            server = min(range(len(self.loads)), key=self.loads.__getitem__)
            parts.append(ShardPlacement(self._number, server, layout, begin, numel))
            begin += numel
            self._number += 1
            self.loads[server] += parts[-1].nbytes
        return parts

    def _sizes(self, layout: KeyLayout) -> list[int]:
        """Elements of the key's parts: equal numbers of them for all servers, as equal as `GRAIN` allows."""
        servers = len(self.loads)
        share = -(-layout.nbytes // (servers * _PER_SERVER)) if servers > 1 else _LARGEST
        nbytes = min(_LARGEST, max(_SMALLEST, share))
        grains = -(-layout.numel // GRAIN)
        if layout.nbytes <= nbytes or grains < 2:
            return [layout.numel]
        count = min(grains, math.ceil(math.ceil(layout.nbytes / nbytes) / servers) * servers)
        few, more = divmod(grains, count)
        sizes = [(few + (index < more)) * GRAIN for index in range(count)]
        return [*sizes[:-1], layout.numel - sum(sizes[:-1])]
