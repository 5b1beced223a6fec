"""Frames of messages as tensors, and tensors as frames."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

INLINE = 1 << 15
"""Bytes up to which a message carries its data even where memory is shared: one or two messages less."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


def bytes_of(frame: memoryview) -> Tensor:
    """A frame's memory as uint8, to be read only; the tensor keeps the frame alive."""
    if not frame.nbytes:
        return _NOTHING
    if not frame.readonly:
        return torch.frombuffer(frame, dtype=torch.uint8)
    # torch and numpy warn of read-only memory; what is made from an address does not know that it is
    address = np.frombuffer(frame, dtype=np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * frame.nbytes).from_address(address)
    memory.frame = frame  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def memory_of(tensor: Tensor) -> bytes | memoryview:
    """A contiguous host tensor's bytes, for a socket to read: a copy where it is small."""
    if tensor.nbytes <= INLINE:
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
