"""Conversion between message frames and tensors without copies."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

INLINE = 1 << 15
"""Bytes up to which data are sent in the message even if memory is shared: this saves one or two messages."""

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


def tensor_of(frame: memoryview) -> Tensor:
    """Return a frame's memory as a read-only uint8 tensor, which keeps the frame alive."""
    if not frame.nbytes:
        return _EMPTY
    if not frame.readonly:
        return torch.frombuffer(frame, dtype=torch.uint8)
    # torch and numpy warn about read-only buffers; a ctypes array made from the address does not carry that flag.
    address = np.frombuffer(frame, dtype=np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * frame.nbytes).from_address(address)
    memory.frame = frame  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def frame_of(tensor: Tensor) -> bytes | memoryview:
    """Return the bytes of a contiguous host tensor: a copy up to `INLINE` bytes, else a view."""
    if tensor.nbytes <= INLINE:
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
