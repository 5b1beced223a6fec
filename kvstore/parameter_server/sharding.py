"""Placement of keys on servers: split keys into shards, balance them by bytes, and agree on keys between workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from gangline.collectives.errors import MismatchError
from gangline.kvstore.group.serialization import dtype_named
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.protocol import DTYPES, MAX_ENTRIES
from gangline.kvstore.placement import place

_T = TypeVar("_T")
GRAIN = 65_536
"""Elements of the smallest shards of split keys, rounded down to whole rows."""
_VECTOR = 64
"""Elements: shards begin at multiples of it, so that fused optimizers give the same bits as on the whole key."""

_LARGEST = 4 << 20
_LARGEST_OF_TABLE = 8 << 30
_SMALLEST = 1 << 18
_PER_SERVER = 4
"""Shards of a key per server, unless they would be smaller than `_SMALLEST`; of a table one, which all calls reach."""
_PARTS = 64  # parts of a table per server of unequal ones, by which it gets its share


@dataclass(frozen=True)
class KeyLayout:
    """Key, dtype and shape on which all workers agree."""

    key: Key
    dtype: str
    """Name of the torch dtype, such as "float32"."""
    shape: tuple[int, ...]
    is_table: bool = field(default=False, compare=False)
    """True if it was initialised with a `RowSparse`."""

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_named(self.dtype).itemsize

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.itemsize

    @cached_property
    def row(self) -> int:
        """Elements per row, the unit of row-sparse values."""
        return max(1, math.prod(self.shape[1:]))

    @cached_property
    def grain(self) -> int:
        """Elements: shards begin at multiples of it, which are whole rows unless that needs large shards."""
        rows = math.lcm(self.row, _VECTOR)
        is_split_within = rows * self.itemsize > _LARGEST // 2 and not self.is_table
        return GRAIN if is_split_within else rows * max(1, GRAIN // rows)

    def empty(self, rows: int | None = None) -> Tensor:
        """Return an uninitialised host tensor of this layout; of at most ``rows`` rows."""
        shape = (*(min(length, rows or length) for length in self.shape[:1]), *self.shape[1:])
        return torch.empty(shape, dtype=dtype_named(self.dtype), device="cpu")


@dataclass(frozen=True)
class ShardPlacement:
    """A contiguous range of a key's elements and the server that holds it."""

    number: int
    """Unique in the job."""
    server: int
    layout: KeyLayout
    begin: int
    numel: int

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.layout.itemsize

    @cached_property
    def is_whole(self) -> bool:
        """True if this is the only shard of the key."""
        return self.numel == self.layout.numel

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the key if this is the only shard, else ``(numel,)``."""
        return self.layout.shape if self.is_whole else (self.numel,)

    @property
    def width(self) -> int:
        """Elements per row of the shard: the key's row, or a divisor of it if the key is split within rows."""
        return self.layout.row if self.is_whole else math.gcd(self.layout.row, self.layout.grain)


def rows_by_shard(ids: Tensor, shards: Sequence[ShardPlacement]) -> list[tuple[ShardPlacement, slice, Tensor]]:
    """Return for each shard of a key its part of distinct ascending rows, and their numbers within the shard.

    A part is a slice of rows of `ShardPlacement.width`.
    """
    width = shards[0].width
    split = shards[0].layout.row // width
    if split > 1:
        ids = (ids[:, None] * split + torch.arange(split, device="cpu")).view(-1)
    ends = torch.tensor([(shard.begin + shard.numel) // width for shard in shards], device="cpu")
    stops = torch.searchsorted(ids, ends).tolist()
    return [
        (shard, slice(start, stop), ids[start:stop] - shard.begin // width)
        for shard, start, stop in zip(shards, [0, *stops], stops, strict=False)
    ]


class Sharding:
    """Deterministic placement: equal calls give equal shards in every process.

    Each server gets bytes in proportion to its memory; without ``memory`` all get the same.
    """

    def __init__(self, servers: int, memory: Sequence[int] = ()) -> None:
        self.loads = [0] * servers
        """Bytes on each server."""
        self._is_unequal = len(set(memory)) > 1
        self._memory = memory if self._is_unequal else [1] * servers
        self._number = 0

    def place(self, layouts: Sequence[KeyLayout], *, whole: bool = False) -> dict[Key, list[ShardPlacement]]:
        """Split keys and assign each shard to the server that is the least full, the largest keys first.

        Layouts are in the same order on all workers. With ``whole`` keys stay whole, as some optimizers need them.
        """
        ordered = sorted(layouts, key=lambda layout: -layout.nbytes)  # stable: ties in the order given
        return {layout.key: self._place_one(layout, whole=whole) for layout in ordered}

    def remove(self, shards: Sequence[ShardPlacement]) -> None:
        """Subtract the bytes of these shards from the loads."""
        for shard in shards:
            self.loads[shard.server] -= shard.nbytes

    def _place_one(self, layout: KeyLayout, *, whole: bool) -> list[ShardPlacement]:
        sizes = [layout.numel] if whole else self._sizes(layout)
        servers = place([numel * layout.itemsize for numel in sizes], self._memory, self.loads)
        placed = zip(sizes, servers, strict=True)
        shards = []
        begin = 0
        for numel, server in _joined(placed, layout) if layout.is_table and self._is_unequal else placed:
            shards.append(ShardPlacement(self._number, server, layout, begin, numel))
            begin += numel
            self._number += 1
        return shards

    def _sizes(self, layout: KeyLayout) -> list[int]:
        """Return the elements of each shard: the same number of shards per server, as equal as the grain allows."""
        servers, grain = len(self.loads), layout.grain
        largest = _LARGEST_OF_TABLE if layout.is_table else _LARGEST
        count = servers * ((_PARTS if self._is_unequal else 1) if layout.is_table else _PER_SERVER)
        nbytes = min(largest, max(_SMALLEST, -(-layout.nbytes // count) if servers > 1 else largest))
        grains = -(-layout.numel // grain)
        if layout.nbytes <= nbytes or grains < 2:
            return [layout.numel]
        count = min(grains, math.ceil(math.ceil(layout.nbytes / nbytes) / servers) * servers)
        few, more = divmod(grains, count)
        sizes = [(few + (index < more)) * grain for index in range(count)]
        return [*sizes[:-1], layout.numel - sum(sizes[:-1])]


def _joined(placed: Iterable[tuple[int, int]], layout: KeyLayout) -> list[tuple[int, int]]:
    """Join the parts of a table, elements and server each, into one shard per server, as far as one may be as large."""
    parts = list(placed)
    last = parts[-1][1]  # its last part may be no multiple of the grain, so it stays the last
    joined: list[tuple[int, int]] = []
    for numel, server in sorted(parts, key=lambda part: (part[1] == last, part[1])):
        before, of = joined[-1] if joined else (0, -1)
        if of == server and (before + numel) * layout.itemsize <= _LARGEST_OF_TABLE:
            joined[-1] = before + numel, server
        else:
            joined.append((numel, server))
    return joined


def grouped_by_server(items: Iterable[tuple[_T, ShardPlacement, int]], most: int) -> list[tuple[int, list[_T]]]:
    """Group items by server into messages of at most ``most`` bytes (or one item) and `MAX_ENTRIES` items, in order."""
    groups: list[tuple[int, list[_T]]] = []
    open_groups: dict[int, list[_T]] = {}
    filled: dict[int, int] = {}
    for item, shard, nbytes in items:
        server = shard.server
        is_full = server in open_groups and len(open_groups[server]) == MAX_ENTRIES
        if server not in open_groups or is_full or filled[server] + nbytes > most:
            open_groups[server], filled[server] = [], 0
            groups.append((server, open_groups[server]))
        open_groups[server].append(item)
        filled[server] += nbytes
    return groups


def agree_on_keys(
    gathered: Sequence[list[Sequence[Any]] | None], known: Mapping[Key, Sequence[ShardPlacement]]
) -> list[KeyLayout]:
    """Return the keys that are new, in the same order on all workers.

    ``gathered`` has key, dtype, shape and whether its value is row-sparse, by worker in rank order; None for a worker
    inside join(). A key is a table if its value is row-sparse on any worker. ``known`` keys are already initialised.

    Raises:
        MismatchError: if workers give different layouts for a key or initialise different keys; same text on all.
        TypeError: if servers do not support a dtype.
        RuntimeError: if a worker is inside join() and would not learn of the keys.
    """
    if None in gathered:
        joined = gathered.index(None)
        raise RuntimeError(f"init() was called while worker {joined} is in join(); call it when all take part")
    workers = [one for one in gathered if one is not None]
    _check_same_keys(workers)
    tables = {key for layouts in workers for key, *_, is_sparse in layouts if is_sparse}
    new: dict[Key, tuple[int, KeyLayout]] = {}
    for rank, layouts in enumerate(workers):
        for key, dtype, shape, _ in layouts:
            layout = KeyLayout(key, dtype, tuple(shape), key in tables)
            is_known = key in known
            first, other = (0, known[key][0].layout) if is_known else new.get(key, (rank, layout))
            if other != layout:
                here = f"{_described(layout)} on rank {rank}"
                raise MismatchError(f"key {key!r} has {_described(other)} on rank {first}, but {here}")
            if dtype not in DTYPES:
                raise TypeError(f"key {key!r} has dtype {dtype}; expected one of {', '.join(DTYPES)}")
            if not is_known:
                new.setdefault(key, (rank, layout))
    return [layout for _, layout in new.values()]


def _check_same_keys(workers: Sequence[list[Sequence[Any]]]) -> None:
    """Check that lists of keys are equal on all workers; single keys may be initialised in a different order."""
    lists = [(rank, {key for key, *_ in layouts}) for rank, layouts in enumerate(workers)]
    for rank, keys in lists[1:]:
        first, expected = lists[0]
        differing = sorted(keys ^ expected, key=str)
        if differing and max(len(keys), len(expected)) > 1:
            here, missing = (first, rank) if differing[0] in expected else (rank, first)
            raise MismatchError(f"key {differing[0]!r} is initialised on rank {here}, but not on rank {missing}")


def _described(layout: KeyLayout) -> str:
    return f"shape {layout.shape} and dtype {layout.dtype}"
