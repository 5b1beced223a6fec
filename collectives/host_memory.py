"""What the host's memory allocator keeps."""

from __future__ import annotations

import torch

_LARGEST_BLOCK = (32 << 20) - (1 << 16)  # bytes: with what malloc adds to it, the most that moves glibc's limits


def keep_freed_memory() -> None:
    """Have the host's malloc keep what a step frees for the next step, here and in all threads of the process.

    glibc hands large blocks back to the kernel when they are freed, and the next step gets them page by page, each
    cleared by a fault: 2,500 faults, a seventh of a step of LeNet on two CPU contexts; a third of a round over
    tcp. Its limits rise with the largest block freed so far (mallopt(3), M_MMAP_THRESHOLD), so one is freed here,
    untouched. Limits that a user has set by environment variables stay; other allocators are not affected.
    """
    torch.empty(_LARGEST_BLOCK, dtype=torch.uint8, device="cpu")
