"""Reduction of a push over the workers of an `allreduce` store: dense, row-sparse or compressed values.

Values stay on the devices that store their keys. The communicator reduces them there by NCCL, or copies each tensor
that it gets to the host once: a fused bucket is one tensor, and so are the payloads of a compressed push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gangline.collectives.devices.device_group import Transfer, move, reduce
from gangline.kvstore.allreduce.negotiation import MOST_KEYS, Negotiation, Negotiator
from gangline.kvstore.allreduce.owners import Run
from gangline.kvstore.arguments import Value, by_key, of_only_device
from gangline.kvstore.buckets import Bucket, BucketValues
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.sparse import RowSparse, summed

_ABSENT, _DENSE, _ROWS = range(3)


@dataclass
class BucketPart:
    """One worker's part of a push: the sums over its own devices, each on the device that stores the key."""

    keys: list[Key]
    """The same on all workers."""
    values: Mapping[Key, Value]
    """Read only; without the keys that this worker has no value for."""
    stored: Callable[[Key], torch.Tensor]
    """Returns a key's stored value."""
    buffer: Callable[[Key], torch.Tensor]
    """Returns a key's buffer for the sum over workers, of its shape and dtype; may be the value itself."""
    flat: torch.Tensor | None = None
    """The flat tensor that all buffers are views of; None if there is none."""
    flat_stored: torch.Tensor | None = None
    """The flat tensor that all stored values are views of, in the places of the buffers; None if there is none."""
    whole: torch.Tensor | None = None
    """The flat tensor that all values are views of, in the places of the buffers; None if they are apart."""
    has_joined: bool = False
    """True if this worker is in `KVStore.join`: it has no values."""

    def take(
        self,
        bucket: Bucket,
        values: BucketValues,
        keys: Sequence[Key],
        views_of: Callable[[torch.Tensor], Mapping[Key, torch.Tensor]],
    ) -> None:
        """Sum a fused bucket's values over this worker's devices into the buffers; refer to a single value.

        ``keys`` are those that have a value; ``views_of`` is as `Bucket.views`.
        """
        assert self.flat is not None
        flats = [value for value in values if isinstance(value, torch.Tensor)]
        if len(flats) == len(values):
            if len(flats) == 1 and flats[0].device == self.flat.device:
                self.whole = flats[0]
            else:
                self.whole = self.flat
                reduce(flats, out=self.flat)
            views = views_of(self.whole)
            self.values = views if len(keys) == len(views) else {key: views[key] for key in keys}
            return
        if only := of_only_device(values, keys, self.flat.device):
            self.values = only
            return
        found: dict[Key, Value] = {}
        transfers: list[Transfer] = []
        for key, of_key in by_key(bucket, values, keys):
            tensors = [value for value in of_key if isinstance(value, torch.Tensor)]
            if len(tensors) == 1 and tensors[0].device == self.flat.device:
                found[key] = tensors[0]
            elif tensors:
                found[key] = buffer = self.buffer(key)
                transfers.append((tensors, buffer, ()))
        move(transfers)
        self.values = found

    @property
    def dense(self) -> int | None:
        """Keys with a dense value, as `Negotiation.dense`; None if there are row-sparse values, or too many keys."""
        if len(self.values) == len(self.keys) and {*map(type, self.values.values())} == {torch.Tensor}:
            return -1
        values = [self.values.get(key) for key in self.keys]
        if all(isinstance(value, torch.Tensor) for value in values):
            return -1
        if len(values) > MOST_KEYS or any(isinstance(value, RowSparse) for value in values):
            return None
        return sum(1 << index for index, value in enumerate(values) if value is not None)


def reduce_over_workers(
    workers: Negotiator,
    negotiation: Negotiation,
    part: BucketPart,
    compressed: CompressedPushes | None,
    *,
    is_mean: bool,
    runs: Sequence[Run] | None = None,
) -> list[tuple[Key, Value]]:
    """Sum all workers' parts, or take their weighted mean, without autograd. Collective: all workers must call it.

    The buffers of this worker's ``part`` are overwritten. ``compressed`` has codec and residuals of floating-point
    values; None sends them as they are. ``runs`` are parts of ``part.flat`` whose sums only their owners need; None:
    all workers need all. Return the sums of the keys that some worker has a value for, the same bits on all ranks.
    """
    total = sum(negotiation.weights)
    if is_mean and not total:
        return []
    factor = negotiation.weights[workers.rank] / total if is_mean else 1.0
    kinds = _kinds(workers, part, negotiation.dense)
    dense = [key for key in part.keys if kinds[key] == _DENSE]
    sums: dict[Key, Value] = {}
    if dense:
        sums |= _filled(part, dense, factor)
        sent = [key for key in dense if sums[key].dtype.is_floating_point] if compressed is not None else []
        if compressed is not None and sent:
            _reduce_payloads(workers, negotiation, part, compressed, sent)
        with workers.communicator(on_gpus=negotiation.on_gpus and not sent) as communicator:
            if part.flat is not None and not sent:
                if runs is None:
                    communicator.all_reduce(part.flat)
                else:
                    parts = [part.flat[run.begin : run.end] for run in runs]
                    communicator.reduce_each(parts, [run.owner for run in runs])
            else:
                for key in dense:
                    if key not in sent:
                        communicator.all_reduce(part.buffer(key))
    sums |= _reduce_rows(workers, part, [key for key in part.keys if kinds[key] == _ROWS], factor)
    return [(key, sums[key]) for key in part.keys if key in sums]


def _kinds(workers: Negotiator, part: BucketPart, dense: int | None) -> dict[Key, int]:
    """Return each key's kind over all workers: dense if any worker has a dense value, else rows, else absent."""
    if dense == -1:
        return dict.fromkeys(part.keys, _DENSE)
    if dense is not None:
        return {key: _DENSE if dense >> index & 1 else _ABSENT for index, key in enumerate(part.keys)}
    own = [_kind(part.values.get(key)) for key in part.keys]
    gathered = workers.all_gather(torch.tensor(own, dtype=torch.uint8, device="cpu"))
    kinds = {}
    for key, of_key in zip(part.keys, gathered.T.tolist(), strict=True):
        kinds[key] = _DENSE if _DENSE in of_key else max(of_key)
    return kinds


def _kind(value: Value | None) -> int:
    return _ABSENT if value is None else _DENSE if isinstance(value, torch.Tensor) else _ROWS


def _filled(part: BucketPart, keys: Sequence[Key], factor: float) -> dict[Key, torch.Tensor]:
    """Fill the keys' buffers with this worker's addends and return them."""
    flat, whole = part.flat, part.whole
    if flat is not None and (not factor or not part.values):
        flat.zero_()
    elif flat is not None and whole is not None:
        if factor != 1.0:
            torch.mul(whole, factor, out=flat)
        elif whole is not flat:
            flat.copy_(whole)
        for key in keys:
            if key not in part.values:
                part.buffer(key).zero_()
    else:
        copied = _copied_jointly(part, keys) if factor == 1.0 else set()
        return {key: part.buffer(key) if key in copied else _filled_buffer(part, key, factor) for key in keys}
    return dict(zip(keys, map(part.buffer, keys), strict=True))


def _copied_jointly(part: BucketPart, keys: Sequence[Key]) -> set[Key]:
    """Copy dense values into their buffers, all in one kernel; return their keys."""
    values = {key: value for key in keys if isinstance(value := part.values.get(key), torch.Tensor)}
    copied = [(buffer, value) for key, value in values.items() if (buffer := part.buffer(key)) is not value]
    if copied:
        torch._foreach_copy_([buffer for buffer, _ in copied], [value for _, value in copied])
    return set(values)


def _filled_buffer(part: BucketPart, key: Key, factor: float) -> torch.Tensor:
    buffer, value = part.buffer(key), part.values.get(key)
    if value is None or not factor:
        return buffer.zero_()  # not value * 0, which is NaN for a NaN
    if isinstance(value, RowSparse):
        rows = summed([value], buffer.device)
        return buffer.zero_().index_copy_(0, rows.indices, rows.values * factor if factor != 1.0 else rows.values)
    if factor == 1.0:
        return buffer if value is buffer else buffer.copy_(value)
    return torch.mul(value, factor, out=buffer)


def _reduce_payloads(
    workers: Negotiator, negotiation: Negotiation, part: BucketPart, compressed: CompressedPushes, keys: Sequence[Key]
) -> None:
    """All-gather the payloads of all keys at once, and sum them into the buffers in rank order."""
    codec = compressed.compression.codec
    buffers = [part.buffer(key) for key in keys]
    device = buffers[0].device
    sizes = [codec.payload_bytes(buffer.numel(), buffer.dtype) for buffer in buffers]
    if part.has_joined:  # it sends nothing, not even its residuals
        own = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    else:
        own = torch.cat([compressed.encode(key, buffer).to(device) for key, buffer in zip(keys, buffers, strict=True)])
    received = [row.split(sizes) for row in workers.all_gather(own)]
    received = [row for row, has_joined in zip(received, negotiation.has_joined, strict=True) if not has_joined]
    for index, buffer in enumerate(buffers):
        values = [torch.empty_like(buffer) for _ in received]
        for row, value in zip(received, values, strict=True):
            codec.decode(row[index].to(value.device), value)
        reduce(values, out=buffer)


def _reduce_rows(workers: Negotiator, part: BucketPart, keys: Sequence[Key], factor: float) -> dict[Key, RowSparse]:
    """Return the sums of keys that have only rows on all workers; only these rows are sent."""
    if not keys:
        return {}
    own = [part.values.get(key) for key in keys]
    counts = workers.all_gather(
        torch.tensor([len(rows.indices) if isinstance(rows, RowSparse) else 0 for rows in own], device="cpu")
    )
    sums = {}
    for key, rows, of_key in zip(keys, own, counts.T.tolist(), strict=True):
        like = part.stored(key)
        indices = torch.zeros(max(of_key), dtype=torch.int64, device=like.device)
        values = torch.zeros(max(of_key), *like.shape[1:], dtype=like.dtype, device=like.device)
        if isinstance(rows, RowSparse):
            count = len(rows.indices)
            indices[:count] = rows.indices
            values[:count] = rows.values * factor if factor != 1.0 else rows.values
        by_rank = zip(workers.all_gather(indices), workers.all_gather(values), of_key, strict=True)
        sums[key] = summed([RowSparse(i[:count], v[:count], like.shape) for i, v, count in by_rank], like.device)
    return sums
