"""Settings of the allocator of host memory."""

from __future__ import annotations

import torch

_LARGEST_BLOCK = (32 << 20) - (1 << 16)  # bytes: with malloc's header, the largest block that raises glibc's limits


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks for reuse, in all threads of the process.

    glibc returns large freed blocks to the kernel, and the next step gets them back page by page, each zeroed in a page
    fault: 2,500 faults, a seventh of a step of LeNet on two CPU contexts; a third of a round over tcp. Its limits rise
    with the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD), so one untouched block is freed here. Limits set
    through environment variables stay; other allocators are not affected.
    """
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8, device="cpu")
