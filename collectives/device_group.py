"""Sums and copies among the tensors of one process, whatever devices they lie on.

The caller chooses where a sum is made (its owner); torch moves the bytes, between GPUs from device to
device, and orders them on the current streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reduce(values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write ``values[0] + values[1] + ...`` into ``out``, on out's device.

    Args:
        values: one or more tensors of out's shape and dtype. They are added in the order given, so that
            the sum has the same bits each time; float16 and bfloat16 are added in float32 and rounded once.
        out: any strides; must not overlap ``values[1:]``.
    """
    first, *others = values
    if not others:
        out.copy_(first)
        return
    total = out
    if out.dtype in (torch.float16, torch.bfloat16) and len(others) > 1:
        total = torch.empty_like(out, dtype=torch.float32)
    torch.add(_on(first, out).to(total.dtype), _on(others[0], out), out=total)
    for value in others[1:]:
        total.add_(_on(value, out))
    if total is not out:
        out.copy_(total)


def broadcast(value: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Copy ``value`` into each of ``outs``."""
    for out in outs:
        out.copy_(value, non_blocking=value.is_cuda and out.is_cuda)


def _on(value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return value if value.device == out.device else value.to(out.device, non_blocking=value.is_cuda and out.is_cuda)
