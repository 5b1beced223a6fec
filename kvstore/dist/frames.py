"""Frames of ZeroMQ as tensors, without copies."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import zmq
from torch import Tensor


def bytes_of(frame: zmq.Frame) -> Tensor:
    """A frame's memory as uint8, to be read only; the tensor keeps the frame alive."""
    nbytes = len(frame)
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch and numpy warn of read-only memory; what is made from an address does not know that it is
    address = np.frombuffer(frame.buffer, dtype=np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.frame = frame  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's bytes, for a socket to read."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
