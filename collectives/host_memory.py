"""Memory of the host: settings of its allocator, and tensors as bytes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_LARGEST_BLOCK = (32 << 20) - (1 << 16)  # bytes: with malloc's header, the largest block that raises glibc's limits


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks for reuse, in all threads of the process.

    glibc returns large freed blocks to the kernel, and the next step gets them back page by page, each zeroed in a page
    fault: 2,500 faults, a seventh of a step of LeNet on two CPU contexts; a third of a round over tcp. Its limits rise
    with the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD), so one untouched block is freed here. Limits set
    through environment variables stay; other allocators are not affected.
    """
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8, device="cpu")


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
