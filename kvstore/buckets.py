"""Buckets: many small keys side by side in one flat tensor, so that they move as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gangline.kvstore.optimizer.spec import Key

_ALIGNMENT = 64  # bytes: a cache line, and what vectorised loads like


@dataclass(frozen=True)
class Slot:
    """Where a key lies in its bucket."""

    key: Key
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""

    @classmethod
    def of(cls, key: Key, tensor: torch.Tensor, offset: int = 0) -> Slot:
        """A slot for a tensor like ``tensor``; its order of axes in memory (channels_last, say) is kept."""
        stride = tensor.stride() if _is_gapless(tensor) else torch.empty(tensor.shape, device="meta").stride()
        return cls(key, tensor.shape, tuple(stride), offset)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Keys of one dtype and their places in a flat tensor of ``numel`` elements."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    numel: int

    @property
    def keys(self) -> list[Key]:
        """The keys, in the bucket's order."""
        return [slot.key for slot in self.slots]

    def __contains__(self, key: object) -> bool:
        return any(slot.key == key and type(slot.key) is type(key) for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """What a flat tensor of this bucket takes."""
        return self.numel * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """A flat tensor for the bucket; the gaps between keys hold zeros, so that sums of them stay finite."""
        return torch.zeros(self.numel, dtype=self.dtype, device=device)

    def views(self, flat: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Each key's part of ``flat``, in its shape."""
        begin = flat.storage_offset()
        return {slot.key: flat.as_strided(slot.shape, slot.stride, begin + slot.offset) for slot in self.slots}


BucketValue = torch.Tensor | Mapping[Key, torch.Tensor]
"""What a device has for a bucket: a flat tensor, or some of its keys' tensors."""


def plan(tensors: Sequence[tuple[Key, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Cut keys, in order, into buckets of one dtype and at most ``max_bytes`` (a larger key is alone in its own)."""
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


def _is_gapless(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill its memory, each once, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
