"""Memory of a server that outlives its process: values, optimizer state, and records of what has been applied.

The launcher creates it (a memfd) and passes its descriptor to each start of the server. A process may be killed between
any two instructions; what it has written until then stays. Layout, in bytes from the beginning:

    0      magic number
    64     record of the settings: optimizer, compression, workers inside join(), messages that were handled, rates
    128    record of the shards: their definitions, and the offsets of their own records
    4096   undo area of each thread, 64 bytes each: see `_UndoArea`
    ...    allocations: values, state tensors, kept sums, records and their slots, copies for undo

The record of a shard says which rounds are applied, where its values are, and the state of its optimizer. It is
written when an update is complete, and makes it final. Everything else about pushes is in the workers, which repeat a
push until its memory has been released, and that happens after its round is final.
"""

from __future__ import annotations

import ctypes
import math
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from torch import Tensor

from gangline.kvstore.group.serialization import dtype_named, name_of_dtype
from gangline.kvstore.parameter_server.server.optimizer_shards import ShardOptimizers
from gangline.kvstore.parameter_server.server.shards import Shard, Slot, add_push
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool, aligned
from gangline.kvstore.sparse import RowSparse

_MAGIC = 0x6C676B31
_SETTINGS, _SHARDS, _UNDO = 64, 128, 4096
_THREADS = 1024
_UNDO_BYTES = 64
_BEGIN = _UNDO + _THREADS * _UNDO_BYTES
_RECORD_BYTES = 64
_LOOP = 8192  # bytes that are copied in the time that another range takes


class Record:
    """Bytes that are replaced as a whole: two slots are written in turn, and one word says which one is valid.

    Seven words: the version, then offset, capacity and length of the slot of even and of odd versions. A slot begins
    with the checksum of its version and content.
    """

    def __init__(self, pool: SharedMemoryPool, offset: int, *, is_new: bool) -> None:
        self.offset = offset
        self._pool = pool
        self._words = pool.segment.words(offset, 7)
        for index in range(7 if is_new else 0):
            self._words[index] = 0

    @property
    def version(self) -> int:
        """Number of times that it was written."""
        return self._words[0]

    def ranges(self) -> list[tuple[int, int]]:
        """Return offset and size of the slots."""
        return [(self._words[at], self._words[at + 1]) for at in (1, 4) if self._words[at + 1]]

    def read(self) -> bytes:
        """Return the content; b"" if there is none yet. OSError if its checksum is wrong."""
        version = self._words[0]
        if not version:
            return b""
        begin, _, length = self._words[1 + 3 * (version % 2) :][:3]
        stored = bytes(self._pool.segment.bytes(begin, 8 + length))
        if int.from_bytes(stored[:8], "little") != zlib.crc32(stored[8:], version & 0xFFFFFFFF):
            raise OSError(f"the kept memory has a record at {self.offset} whose checksum is wrong")
        return stored[8:]

    def write(self, content: bytes) -> None:
        """Replace the content."""
        words = self._words
        version = words[0] + 1
        at = 1 + 3 * (version % 2)
        needed = 8 + len(content)
        if words[at + 1] < needed:
            if words[at + 1]:
                words[at + 1] = 0
                self._pool.free(words[at])
            words[at] = self._pool.allocate(2 * needed)
            words[at + 1] = 2 * needed
        checksum = zlib.crc32(content, version & 0xFFFFFFFF).to_bytes(8, "little")
        self._pool.segment.bytes(words[at], needed)[:] = checksum + content
        words[at + 2] = len(content)
        words[0] = version

    def free(self) -> None:
        """Free the record and its slots."""
        for offset, _ in self.ranges():
            self._pool.free(offset)
        self._pool.free(self.offset)


class _UndoArea:
    """Copy of the state that an update of one thread changes, until the update is final; values are written elsewhere.

    Six words: 1 while an update runs, offset and capacity of the copies, offset and version of the shard's record when
    the update began, offset of the value that it writes. The copies begin with their number; offset and length of each;
    then the bytes.
    """

    def __init__(self, pool: SharedMemoryPool, index: int) -> None:
        self._pool = pool
        self._words = pool.segment.words(_UNDO + index * _UNDO_BYTES, 6)
        self._base = pool.segment.address

    def save(self, record: Record, value: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy ranges, (offset, bytes) each, before an update changes them; ``value``: offset of the one it writes."""
        words = self._words
        head = aligned(8 + 16 * len(ranges))
        needed = head + sum(aligned(nbytes) for _, nbytes in ranges)
        if words[2] < needed:
            if words[2]:
                words[2] = 0
                self._pool.free(words[1])
            words[1] = self._pool.allocate(needed)
            words[2] = needed
        at = words[1]
        table = self._pool.segment.words(at, 1 + 2 * len(ranges))
        table[0] = len(ranges)
        at += head
        for index, (offset, nbytes) in enumerate(ranges):
            table[1 + 2 * index], table[2 + 2 * index] = offset, nbytes
            ctypes.memmove(self._base + at, self._base + offset, nbytes)
            at += aligned(nbytes)
        words[3], words[4], words[5] = record.offset, record.version, value
        words[0] = 1

    def clear(self) -> None:
        """Forget the copies: the update is final."""
        self._words[0] = 0

    def ranges(self) -> list[tuple[int, int]]:
        """Return offset and capacity of the copies."""
        return [(self._words[1], self._words[2])] if self._words[2] else []

    def undo(self) -> list[int]:
        """Undo the update that a killed process has left incomplete, if any; return the offset of its value.

        It is undone again until its shard's record is written, or `clear` is called.
        """
        words = self._words
        is_open = bool(words[0]) and Record(self._pool, words[3], is_new=False).version == words[4]
        if is_open:
            count = self._pool.segment.words(words[1], 1)[0]
            table = self._pool.segment.words(words[1] + 8, 2 * count)
            at = words[1] + aligned(8 + 16 * count)
            for offset, nbytes in zip(table[::2], table[1::2], strict=True):
                ctypes.memmove(self._base + offset, self._base + at, nbytes)
                at += aligned(nbytes)
        return [words[5]] if is_open else []


@dataclass(eq=False)
class _KeptShard:
    """Description of a shard in the memory, beside its values."""

    shard: Shard
    record: Record
    state: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    """Tensors of the optimizer's state and their offsets, by name."""
    sums: list[tuple[Tensor, int]] = field(default_factory=list)
    """Copy of the sum that waits for the command "update", and its offsets; rows and values of a sparse one."""
    source: Tensor | RowSparse | None = None
    """The sum that was copied."""
    applied: dict[int, int] = field(default_factory=dict)
    """Async mode: as `Shard.pushed`, of the pushes that are applied."""
    applied_ahead: dict[int, set[int]] = field(default_factory=dict)


@dataclass
class Settings:
    """State of a server beside its shards."""

    optimizers: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Optimizer of each group, by number: how many were set, as state of an earlier one is not valid any more, and the
    result of `pack_group`."""
    compression: bytes | None = None
    """Payload of the command."""
    joined: list[int] = field(default_factory=list)
    """Workers inside join()."""
    handled: dict[bytes, list[int]] = field(default_factory=dict)
    """Sequence numbers of messages that must not be handled twice, by identity of the worker."""
    rates: dict[int, dict[int, float]] = field(default_factory=dict)
    """Async mode: learning rates that workers have set, by number of the group and rank."""


class KeptMemory:
    """Memory of a server that outlives its process; OSError if it cannot be mapped, or is damaged.

    Updates of an interrupted process are undone when it is opened; `restore` then gives its shards.
    """

    def __init__(self, descriptor: int) -> None:
        self.pool = SharedMemoryPool(descriptor)
        magic = self.pool.segment.words(0, 1)
        if magic[0] not in (0, _MAGIC):
            raise OSError(f"the kept memory begins with {magic[0]:#x}; expected {_MAGIC:#x}")
        if not magic[0]:  # else `restore` does it
            self.pool.reserve([(0, _BEGIN)])
        self._settings = Record(self.pool, _SETTINGS, is_new=not magic[0])
        self._definitions = Record(self.pool, _SHARDS, is_new=not magic[0])
        self._undo_areas = [_UndoArea(self.pool, index) for index in range(_THREADS)]
        self.was_used = bool(magic[0])
        """True if a former process of this server has used it."""
        self._torn = [offset for area in self._undo_areas for offset in area.undo()]
        self.undone = len(self._torn)
        """Number of updates that were undone."""
        magic[0] = _MAGIC
        self._shards: dict[int, _KeptShard] = {}
        self._stale: list[int] = []  # offsets to free when the settings are saved
        content = self._settings.read()
        self.settings = Settings(*msgpack.unpackb(content, strict_map_key=False)) if content else Settings()

    # Start again

    def restore(self, optimizers: Mapping[int, ShardOptimizers], threads: int) -> list[Shard]:
        """Return the shards as the former process has left them; call it once. Optimizers are by number."""
        ranges = [(0, _BEGIN), *self._settings.ranges(), *self._definitions.ranges()]
        for area in self._undo_areas:
            ranges += area.ranges()
        content = self._definitions.read()
        torn: list[tuple[Shard, int | None]] = []  # with the numbers of their optimizers
        for packed in msgpack.unpackb(content) if content else ():
            number, dtype, shape, width, key, begin, is_whole, thread, at = packed
            record = Record(self.pool, at, is_new=False)
            values, *content = msgpack.unpackb(record.read(), strict_map_key=False)
            slots = [
                Slot(self._tensor(dtype, shape, offset), offset, first, last)
                for offset, first, last in values
                if offset not in self._torn
            ]
            shard = Shard(number, key, begin, width, slots, is_whole, thread % threads)
            kept = self._shards[number] = _KeptShard(shard, record)
            ranges += [(slot.offset, slot.flat.nbytes) for slot in slots]
            ranges += [(at, _RECORD_BYTES), *record.ranges()]
            if len(slots) < len(values):
                torn.append((shard, content[2]))
            self._restore(kept, content, optimizers)
            ranges += [(offset, tensor.nbytes) for tensor, offset in [*kept.state.values(), *kept.sums]]
        self.pool.reserve(ranges)
        for shard, group in torn:  # before its memory is used for something else
            self.save(shard, shard.closed, None if group is None else optimizers.get(group))
        for area in self._undo_areas:
            area.clear()
        return [kept.shard for kept in self._shards.values()]

    def _restore(self, kept: _KeptShard, content: Sequence[Any], by_number: Mapping[int, ShardOptimizers]) -> None:
        shard = kept.shard
        shard.closed, rate, number, generation, applied, shard.problems, shard.rejected, sums, state, plain = content
        for rank, last, ahead in applied:
            kept.applied[rank], kept.applied_ahead[rank] = last, set(ahead)
        shard.pushed = dict(kept.applied)
        shard.ahead = {rank: set(ahead) for rank, ahead in kept.applied_ahead.items()}
        optimizers = by_number.get(number)
        if optimizers is None or generation != self.settings.optimizers[number][0]:
            return
        kept.state = {name: (self._tensor(*layout), layout[2]) for name, layout in state.items()}
        optimizers.restore(shard, {**{name: tensor for name, (tensor, _) in kept.state.items()}, **plain}, rate)
        if sums:
            kept.sums = [(self._tensor(*layout), layout[2]) for layout in sums]
            first, *more = [tensor.clone() for tensor, _ in kept.sums]
            shape = len(shard.flat) // shard.width, shard.width
            kept.source = RowSparse(first, more[0], shape) if more else first
            optimizers.keep_sum(shard, kept.source)

    def _tensor(self, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
        nbytes = math.prod(shape) * dtype_named(dtype).itemsize
        return self.pool.tensor_at(offset, nbytes).view(dtype_named(dtype)).view(list(shape))

    # Shards

    def add(self, shards: Iterable[Shard]) -> None:
        """Add new shards, whose values are written."""
        for shard in shards:
            at = self.pool.allocate(_RECORD_BYTES)
            self._shards[shard.number] = _KeptShard(shard, Record(self.pool, at, is_new=True))
            self.save(shard, shard.closed, None)
        self._save_definitions()

    def remove(self, shards: Sequence[Shard]) -> None:
        """Remove shards and free all of their memory but the values."""
        removed = [self._shards.pop(shard.number) for shard in shards]
        self._save_definitions()
        for kept in removed:
            kept.record.free()
            for _, offset in [*kept.state.values(), *kept.sums]:
                self.pool.free(offset)

    def _save_definitions(self) -> None:
        packed = []
        for kept in self._shards.values():
            shard = kept.shard
            dtype, shape, _ = _layout(shard.slot.stored, 0)
            definition = [shard.number, dtype, shape, shard.width, shard.key, shard.begin, shard.is_whole]
            packed.append([*definition, shard.thread, kept.record.offset])
        self._definitions.write(msgpack.packb(packed))

    # Updates

    def begin(self, shard: Shard, slot: Slot | None, rows: Tensor | None = None) -> None:
        """Copy the state that an update of rows, by default of all, changes; runs in the shard's thread."""
        kept = self._shards[shard.number]
        ranges = []
        for tensor, offset in kept.state.values() if slot is not None else ():
            nbytes = shard.width * tensor.itemsize
            if rows is None or tensor.shape != shard.weight.shape or len(rows) * (nbytes + _LOOP) > tensor.nbytes:
                ranges.append((offset, tensor.nbytes))
            else:
                ranges += [(offset + row * nbytes, nbytes) for row in rows.tolist()]
        self._undo_areas[shard.thread].save(kept.record, 0 if slot is None else slot.offset, ranges)

    def count(self, shard: Shard, rank: int, number: int, before: int = 0) -> None:
        """Async mode: count a push as applied from the next `save` on; see `add_push`."""
        kept = self._shards[shard.number]
        add_push(kept.applied, kept.applied_ahead, rank, number, before)

    def commit(self, shard: Shard, closed: int, optimizers: ShardOptimizers | None, slot: Slot | None) -> None:
        """Make the update since `begin` final, with the value that it has written; runs in the shard's thread."""
        self.save(shard, closed, optimizers, slot)
        self._undo_areas[shard.thread].clear()

    def save(self, shard: Shard, closed: int, optimizers: ShardOptimizers | None, slot: Slot | None = None) -> None:
        """Write the record of a shard; new state tensors of its optimizer are moved into this memory.

        ``slot`` is the value after round ``closed``, which is published next; None: the current one stays.
        """
        kept = self._shards[shard.number]
        value = shard.slot if slot is None else slot
        values = [(value.offset, shard.slot.first if slot is None else closed, sys.maxsize)]
        values += [(one.offset, one.first, min(one.last, closed - 1)) for one in shard.slots if one is not value]
        plain: Mapping[str, Any] = {}
        rate, number, generation = None, None, 0
        unused: list[int] = []
        if optimizers is not None:
            number = optimizers.number
            generation, _ = self.settings.optimizers[number]
            plain = self._keep_state(kept, optimizers.state_of(shard), unused)
            rate = optimizers.learning_rate_of(shard)
            self._keep_sum(kept, optimizers.sum_of(shard), unused)
        content = [
            values,
            closed,
            rate,
            number,
            generation,
            [(rank, last, list(kept.applied_ahead.get(rank, ()))) for rank, last in kept.applied.items()],
            shard.problems,
            shard.rejected,
            [_layout(*one) for one in kept.sums],
            {name: _layout(*one) for name, one in kept.state.items()},
            plain,
        ]
        kept.record.write(msgpack.packb(content))
        for offset in unused:
            self.pool.free(offset)

    def _keep_state(self, kept: _KeptShard, state: dict[str, Any], unused: list[int]) -> dict[str, Any]:
        """Move tensors of an optimizer's state into this memory; return the other values."""
        plain = {}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                plain[name] = value
                continue
            tensor, offset = kept.state.get(name, (None, 0))
            if tensor is value:
                continue
            if tensor is None or tensor.shape != value.shape or tensor.dtype is not value.dtype:
                if tensor is not None:
                    unused.append(offset)
                offset = self.pool.allocate(value.nbytes)
                tensor = self._tensor(name_of_dtype(value.dtype), value.shape, offset)
                kept.state[name] = tensor, offset
            tensor.copy_(value)
            state[name] = tensor
        unused += [kept.state.pop(name)[1] for name in kept.state.keys() - state.keys()]
        return plain

    def _keep_sum(self, kept: _KeptShard, total: Tensor | RowSparse | None, unused: list[int]) -> None:
        """Copy a sum that waits for the command "update", once; free the one before."""
        if total is kept.source:
            return
        unused += [offset for _, offset in kept.sums]
        kept.source, kept.sums = total, []
        for one in () if total is None else (total.indices, total.values) if isinstance(total, RowSparse) else (total,):
            offset = self.pool.allocate(one.nbytes)
            tensor = self._tensor(name_of_dtype(one.dtype), one.shape, offset)
            tensor.copy_(one)
            kept.sums.append((tensor, offset))

    # Settings

    def set_optimizer(self, number: int, payload: bytes, shards: Iterable[Shard]) -> None:
        """Set the optimizer of a group and drop the state of its shards, from the next `save_settings` on."""
        before, _ = self.settings.optimizers.get(number, (0, b""))
        self.settings.optimizers[number] = before + 1, payload
        for kept in [self._shards[shard.number] for shard in shards]:
            self._stale += [offset for _, offset in [*kept.state.values(), *kept.sums]]
            kept.state, kept.sums, kept.source = {}, [], None

    def save_settings(self) -> None:
        """Write the settings; their changes are final then."""
        self._settings.write(msgpack.packb(list(vars(self.settings).values())))
        for offset in self._stale:
            self.pool.free(offset)
        self._stale.clear()


def _layout(tensor: Tensor, offset: int) -> tuple[str, list[int], int]:
    return name_of_dtype(tensor.dtype), list(tensor.shape), offset
