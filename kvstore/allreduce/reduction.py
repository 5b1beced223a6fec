"""The sum of what the workers of an `allreduce` store have, by collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gangline.collectives.compression import Compression, check, compress_checked
from gangline.collectives.devices.device_group import Transfer, move, reduce
from gangline.kvstore.allreduce.negotiation import Meeting, WorkerGroup
from gangline.kvstore.arguments import Pushed, Value
from gangline.kvstore.buckets import BucketValue
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.sparse import RowSparse, summed

_HOST = torch.device("cpu")
_ABSENT, _DENSE, _ROWS = range(3)


@dataclass
class BucketPart:
    """What one worker has for a push: the sums over its own devices, on the host."""

    keys: list[Key]
    """The same on all workers."""
    values: Mapping[Key, Value]
    """Only read; a key that this worker has nothing for is missing."""
    stored: Callable[[Key], torch.Tensor]
    """What they are for."""
    buffer: Callable[[Key], torch.Tensor]
    """Where the sum of a key's dense values is made; may be the value itself."""
    flat: torch.Tensor | None = None
    """The memory that all buffers are views of, if they share one."""
    has_joined: bool = False
    """Whether this worker only takes part so that the others can."""

    def take(self, values: Sequence[BucketValue], by_key: Pushed) -> None:
        """Have what a bucket's push brings, summed over this worker's devices where there are several.

        Args:
            values: one a device: flat tensors, or keys' tensors.
            by_key: the same, for the keys that are pushed.
        """
        flats = [value for value in values if isinstance(value, torch.Tensor)]
        if self.flat is not None and len(flats) == len(values):
            reduce(flats, out=self.flat)
            self.values = {key: self.buffer(key) for key, _ in by_key}
            return
        found: dict[Key, Value] = {}
        transfers: list[Transfer] = []
        for key, of_key in by_key:
            tensors = [value for value in of_key if isinstance(value, torch.Tensor)]
            if len(tensors) == 1 and tensors[0].is_cpu:
                found[key] = tensors[0]
            elif tensors:
                found[key] = buffer = self.buffer(key)
                transfers.append((tensors, buffer, ()))
        move(transfers)
        self.values = found

    @property
    def is_uneven(self) -> bool:
        """Whether there is not a dense value for each key."""
        return any(not isinstance(self.values.get(key), torch.Tensor) for key in self.keys)


class Payloads(CompressedPushes):
    """What a worker sends instead of its sums, and what it still owes."""

    def __init__(self, compression: Compression) -> None:
        super().__init__(compression)
        self.codec = compression.codec

    def check(self, part: BucketPart) -> None:
        """Raise ValueError for NaN or infinity in what is to be sent."""
        for key, value in part.values.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                check(value, self._residual(key, 0, value), f"key {key!r}")

    def size(self, value: torch.Tensor) -> int:
        """The bytes that are sent for it."""
        return self.codec.payload_bytes(value.numel(), value.dtype)

    def of(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """The payload of a value that was checked; what it leaves out goes with the key's next one."""
        return compress_checked(self.codec, value, self._residual(key, 0, value))


@torch.no_grad()
def summed_over_workers(
    workers: WorkerGroup, meeting: Meeting, part: BucketPart, payloads: Payloads | None, *, is_mean: bool
) -> list[tuple[Key, Value]]:
    """Add up all workers' parts, or take their weighted mean.

    Args:
        workers: who take part; all call this.
        meeting: what they said for this push.
        part: this worker's; its buffers are written.
        payloads: what is sent instead of floating-point numbers; None: these themselves.
        is_mean: whether values are multiplied by ``weight / sum of weights`` before they leave.

    Returns:
        The keys that a worker has something for, with the sums; the same bits on all workers.
    """
    total = sum(meeting.weights)
    if is_mean and not total:
        return []
    factor = meeting.weights[workers.rank] / total if is_mean else 1.0
    kinds = _kinds(workers, part) if meeting.is_uneven else dict.fromkeys(part.keys, _DENSE)
    dense = [key for key in part.keys if kinds[key] == _DENSE]
    sums: dict[Key, Value] = {key: _filled(part, key, factor) for key in dense}
    if part.flat is not None and payloads is None:
        if dense:
            workers.add_up(part.flat)
    else:
        sent = [key for key in dense if payloads is not None and sums[key].dtype.is_floating_point]
        if payloads is not None and sent:
            _add_payloads(workers, meeting, part, payloads, sent)
        for key in dense:
            if key not in sent:
                workers.add_up(part.buffer(key))
    sums |= _summed_rows(workers, part, [key for key in part.keys if kinds[key] == _ROWS], factor)
    return [(key, sums[key]) for key in part.keys if key in sums]


def _kinds(workers: WorkerGroup, part: BucketPart) -> dict[Key, int]:
    """For each key what the workers have: nothing, or rows alone, or dense values too."""
    own = [_kind(part.values.get(key)) for key in part.keys]
    told = workers.gather(torch.tensor(own, dtype=torch.uint8))
    kinds = {}
    for key, of_key in zip(part.keys, told.T.tolist(), strict=True):
        kinds[key] = _DENSE if _DENSE in of_key else max(of_key)
    return kinds


def _kind(value: Value | None) -> int:
    return _ABSENT if value is None else _DENSE if isinstance(value, torch.Tensor) else _ROWS


def _filled(part: BucketPart, key: Key, factor: float) -> torch.Tensor:
    """A key's buffer, holding what this worker gives to the sum."""
    buffer, value = part.buffer(key), part.values.get(key)
    if value is None or not factor:
        return buffer.zero_()  # whatever the value is: NaN times 0 is NaN
    if isinstance(value, RowSparse):
        rows = summed([value], _HOST)
        return buffer.zero_().index_copy_(0, rows.indices, rows.values * factor if factor != 1.0 else rows.values)
    if factor == 1.0:
        return buffer if value is buffer else buffer.copy_(value)
    return torch.mul(value, factor, out=buffer)


def _add_payloads(
    workers: WorkerGroup, meeting: Meeting, part: BucketPart, payloads: Payloads, keys: Sequence[Key]
) -> None:
    """Send payloads, all keys' at once, and have the buffers be the sums of what arrived, in rank order."""
    buffers = [part.buffer(key) for key in keys]
    sizes = [payloads.size(buffer) for buffer in buffers]
    if part.has_joined:  # it owes nothing that would be due now
        own = torch.zeros(sum(sizes), dtype=torch.uint8)
    else:
        own = torch.cat([payloads.of(key, buffer) for key, buffer in zip(keys, buffers, strict=True)])
    arrived = [row.split(sizes) for row in workers.gather(own)]
    arrived = [row for row, has_joined in zip(arrived, meeting.has_joined, strict=True) if not has_joined]
    for place, buffer in enumerate(buffers):
        values = [torch.empty_like(buffer) for _ in arrived]
        for row, value in zip(arrived, values, strict=True):
            payloads.codec.decode(row[place], value)
        reduce(values, out=buffer)


def _summed_rows(workers: WorkerGroup, part: BucketPart, keys: Sequence[Key], factor: float) -> dict[Key, RowSparse]:
    """The sums of keys of which all have rows alone; only rows that somebody has travel."""
    if not keys:
        return {}
    own = [part.values.get(key) for key in keys]
    counts = workers.gather(torch.tensor([len(rows.indices) if isinstance(rows, RowSparse) else 0 for rows in own]))
    sums = {}
    for key, rows, of_key in zip(keys, own, counts.T.tolist(), strict=True):
        like = part.stored(key)
        indices = torch.zeros(max(of_key), dtype=torch.int64)
        values = torch.zeros(max(of_key), *like.shape[1:], dtype=like.dtype)
        if isinstance(rows, RowSparse):
            count = len(rows.indices)
            indices[:count] = rows.indices
            values[:count] = rows.values * factor if factor != 1.0 else rows.values
        everybody = zip(workers.gather(indices), workers.gather(values), of_key, strict=True)
        sums[key] = summed([RowSparse(i[:count], v[:count], like.shape) for i, v, count in everybody], _HOST)
    return sums
