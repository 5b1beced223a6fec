"""Dropout with other sources of random numbers: a hash of the sample, or a generator of the replica's own.

By sample, several contexts give the weights of one. By replica, contexts of one device need not share its generator.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_WHOLE_CHANNELS = {F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}  # axes of a batch
_DROPOUTS = (F.dropout, torch.dropout, *_WHOLE_CHANNELS)
_HALF = 1 << 31


class _Dropout(TorchFunctionMode, abc.ABC):
    """Within its block, dropout multiplies by `_scales`."""

    @abc.abstractmethod
    def _scales(self, tensor: Tensor, p: float, *, whole_channels: bool) -> Tensor:
        """Return 0 for the elements to drop and 1 / (1 - p) for the others."""

    def _replaces(self, tensor: Tensor, axes: int | None) -> bool:  # noqa: ARG002
        """Return True if this call of dropout is to be replaced; ``axes``: those that whole channels need."""
        return True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace dropout, and run other functions as they are."""
        if func not in _DROPOUTS:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **(kwargs or {})}
        tensor, p = given["input"], given.get("p", 0.5)
        training = given.get("training", given.get("train", True))
        if not training or p == 0:
            return tensor
        if not 0 < p <= 1 or not self._replaces(tensor, _WHOLE_CHANNELS.get(func)):
            return func(*args, **(kwargs or {}))  # raises for another p
        scales = self._scales(tensor, p, whole_channels=func in _WHOLE_CHANNELS)
        return tensor.mul_(scales) if given.get("inplace") else tensor * scales


class ReplicaDropout(_Dropout):
    """Within its block, dropout on a device draws the numbers that its default generator with this seed would give.

    Activation checkpoints, which restore torch's own generators, and compiled code keep these.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)
        self.has_drawn = False

    def _replaces(self, tensor: Tensor, axes: int | None) -> bool:
        if torch.compiler.is_compiling():  # to which a generator is a break in the graph
            return False
        is_batch = axes is None or tensor.dim() == axes
        return is_batch and tensor.device == self._generator.device and not _is_checkpointed()

    def _scales(self, tensor: Tensor, p: float, *, whole_channels: bool) -> Tensor:
        self.has_drawn = True
        if whole_channels:
            scales = tensor.new_empty(*tensor.shape[:2], *[1] * (tensor.dim() - 2))
        else:
            scales = torch.empty_like(tensor, requires_grad=False)
        return scales.bernoulli_(1 - p, generator=self._generator).div_(1 - p) if p < 1 else scales.zero_()


class SampleDropout(_Dropout):
    """Within its block, dropout draws its masks by hashing (key, call, sample, element).

    The masks are the same bits on every device and in every split of the batch. Calls are counted within the block, so
    each layer has masks of its own. The first axis of a layer's input must be the samples', or a multiple of it with
    the samples outermost, such as batch times heads.

    Covers `dropout`, `dropout1d`, `dropout2d` and `dropout3d` of torch.nn.functional and the layers that call them. The
    key is a number of at most 64 bits; ``first`` is the number of the first sample within the whole batch.
    """

    def __init__(self, key: int, first: int, samples: int) -> None:
        super().__init__()
        self._key, self._first, self._samples = key, first, samples
        self._calls = 0

    def _scales(self, tensor: Tensor, p: float, *, whole_channels: bool) -> Tensor:
        if _is_checkpointed():
            raise RuntimeError(
                "random='sample' knows the layers of a network by their order in forward, which activation "
                "checkpointing runs twice (as do parts under no_grad); leave the dropout out of these parts, or use "
                "random='context'"
            )
        rows = tensor.shape[0] if tensor.dim() else 0
        if not rows or rows % self._samples:
            raise ValueError(
                f"dropout has an input of shape {tuple(tensor.shape)} for {self._samples} samples; random='sample' "
                "needs the samples on the first axis, or use random='context'"
            )
        shape = tensor.shape[:2] if whole_channels else tensor.shape
        of_row = shape.numel() // rows
        numbers = torch.arange(rows, dtype=torch.int32, device=tensor.device) + self._first * (rows // self._samples)
        low, high = self._keys()
        keys = _hash(_hash(numbers + low) ^ high)
        elements = torch.arange(of_row, dtype=torch.int32, device=tensor.device)
        bits = _hash(_hash(elements[None, :] ^ keys[:, None]) + keys[:, None])
        kept = bits >= round(p * 2 * _HALF) - _HALF if p < 1 else torch.zeros_like(bits, dtype=torch.bool)
        scales = kept.to(tensor.dtype).mul_(1 / (1 - p) if p < 1 else 0.0).reshape(shape)
        return scales.reshape(*shape, *[1] * (tensor.dim() - 2)) if whole_channels else scales

    def _keys(self) -> tuple[int, int]:
        """Return two numbers of 32 bits for the next call of a dropout function."""
        self._calls += 1
        mixed = (self._key + self._calls * 0x9E3779B97F4A7C15) % (1 << 64)  # SplitMix64, Steele et al. 2014
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (1 << 64)
        mixed ^= mixed >> 31
        return mixed % (1 << 32) - _HALF, (mixed >> 32) - _HALF


def _hash(numbers: Tensor) -> Tensor:
    """Mix the bits of int32 numbers, in place; Ellis and others' "lowbias32" (hash prospector, 2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, None)):
        numbers ^= (numbers >> shift) & (1 << (32 - shift)) - 1  # >> keeps the sign
        if factor is not None:
            numbers *= factor
    return numbers


def _is_checkpointed() -> bool:
    """Return True if this forward runs again during backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not torch.is_grad_enabled() or bool(hooks and hooks[0].__module__ == "torch.utils.checkpoint")
