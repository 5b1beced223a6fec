"""Placement of tensors on servers, devices or workers: each gets bytes in proportion to its memory."""

from __future__ import annotations

from collections.abc import Sequence


def place(sizes: Sequence[int], memory: Sequence[float], nbytes: list[int]) -> list[int]:
    """Return the holder of each tensor: the one that is then the least full for its memory, of equal ones the first.

    Args:
        sizes: bytes of each tensor, in the order in which they are placed.
        memory: relative memory of each holder; 0: it holds nothing.
        nbytes: bytes that each holder has; updated.
    """
    able = [index for index, of_holder in enumerate(memory) if of_holder]
    holders = []
    for size in sizes:
        holder = min(able, key=lambda index: (nbytes[index] + size) / memory[index])
        nbytes[holder] += size
        holders.append(holder)
    return holders
