"""Memory of the host: tensors as bytes."""

from __future__ import annotations

import ctypes

from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU as a writable view that keeps the tensor alive.

    `Tensor.numpy` would mark its storage as not resizable for ever: FSDP and PowerSGD resize what they have reduced.

    Raises:
        TypeError: if the tensor has no memory of its own, like a DTensor.
    """
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise TypeError(f"tensor is a {type(tensor).__name__}, which has no memory of its own; expected a plain tensor")
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(address)
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
