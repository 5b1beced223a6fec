"""Buckets: many small keys side by side in one flat tensor, so that they are sent as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gangline.collectives.engine.host_staging import is_dense
from gangline.kvstore.optimizer.spec import Key

BUCKET_BYTES = 25 << 20
"""Default size limit of a bucket: that of torch's DistributedDataParallel."""
_ALIGNMENT = 64  # bytes: a cache line, and enough for vectorised loads


@dataclass(frozen=True)
class Slot:
    """Position of a key in its bucket."""

    key: Key
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Offset from the beginning of the bucket, in elements."""

    @classmethod
    def of(cls, key: Key, tensor: torch.Tensor, offset: int = 0) -> Slot:
        """Return a slot for tensors like ``tensor``; a dense memory format (channels_last, say) is kept."""
        stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        return cls(key, tensor.shape, tuple(stride), offset)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Keys of one dtype and their slots in a flat tensor of ``numel`` elements."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    numel: int

    @cached_property
    def keys(self) -> list[Key]:
        """The keys in the order of their slots; read only."""
        return [slot.key for slot in self.slots]

    @cached_property
    def layout(self) -> dict[Key, tuple[torch.Size, torch.dtype]]:
        """The keys' shapes and dtypes; read only."""
        return {slot.key: (slot.shape, self.dtype) for slot in self.slots}

    def __contains__(self, key: object) -> bool:
        return any(slot.key == key and type(slot.key) is type(key) for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Size of a flat tensor of this bucket in bytes."""
        return self.numel * self.dtype.itemsize

    @torch.inference_mode(mode=False)
    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of zeros, shape (numel,): sums over the gaps between keys stay finite."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def views(self, flat: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return a view of ``flat`` for each key, in the key's shape and stride."""
        begin = flat.storage_offset()
        return {slot.key: flat.as_strided(slot.shape, slot.stride, begin + slot.offset) for slot in self.slots}


BucketValue = torch.Tensor | Mapping[Key, torch.Tensor]
"""One device's value for a bucket: a flat tensor of shape (numel,), or tensors of some of its keys."""
BucketValues = Sequence[BucketValue]
"""One value per device."""


def plan(tensors: Sequence[tuple[Key, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Divide keys, in order, into buckets of one dtype and at most ``max_bytes``; a larger key gets its own bucket."""
    slots: list[Slot] = []
    numel, dtype = 0, None
    for key, tensor in tensors:
        size = tensor.dtype.itemsize
        if slots and dtype is not None and (tensor.dtype != dtype or numel * size + tensor.nbytes > max_bytes):
            yield Bucket(tuple(slots), dtype, numel)
            slots, numel = [], 0
        dtype = tensor.dtype
        slots.append(Slot.of(key, tensor, numel))
        step = max(1, _ALIGNMENT // size)
        numel += math.ceil(tensor.numel() / step) * step
    if slots and dtype is not None:
        yield Bucket(tuple(slots), dtype, numel)
