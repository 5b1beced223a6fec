"""Direct: every rank sends directly to every rank that needs its data.

One round (two for "two_shot"), the minimum number of waits, but with up to p - 1 messages per rank. Best for small
tensors, and wherever ranks can read each other's memory. Sums are rounded once, in rank order.

| collective | rounds | bytes sent per rank at most (p ranks, n bytes) |
| --- | --- | --- |
| all_reduce "one_shot" | 1 | n (p - 1) |
| all_reduce "two_shot" | 2 | 2 n (p - 1) / p |
| all_gather, reduce_scatter, all_to_all | 1 | n (p - 1) / p |
| broadcast | 1 | n (p - 1), the root |
| scatter | 1 | n (p - 1) / p, the root |
| reduce; gather | 1 | n; n / p |

The k-th message of rank r goes to r + k, so that no two ranks send to the same one at a time. Two-shot is the direct
reduce-scatter followed by the direct all-gather. One-shot and two-shot follow NVIDIA's TensorRT-LLM and PyTorch's
symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gangline.collectives.schedule import IntArray, Rounds, Transfers, transfers


def one_shot(size: int) -> tuple[int, Rounds]:
    """All-reduce in which every rank receives all tensors and sums them itself."""
    return 1, _to_all(size, lambda ranks, to: transfers(ranks, to, 0, reduce=True))


def two_shot(size: int) -> tuple[int, Rounds]:
    """All-reduce in which rank r sums chunk r of all ranks and sends the sum to all."""
    gather = gather_rows(size)
    return size, gather.backwards(reduce=True) + gather


def all_gather(size: int) -> tuple[int, Rounds]:
    """All-gather in which every rank sends its row to all others."""
    return size, gather_rows(size)


def all_to_all(size: int) -> tuple[int, Rounds]:
    """All-to-all in which every rank sends each other rank its row."""
    return size * size, _to_all(size, lambda ranks, to: transfers(ranks, to, ranks * size + to))


def broadcast(size: int, root: int) -> tuple[int, Rounds]:
    """Broadcast in which the root sends to every rank."""
    return 1, _from_root(size, root, rows=False)


def scatter(size: int, root: int) -> tuple[int, Rounds]:
    """Scatter in which the root sends every rank its row."""
    return size, _from_root(size, root, rows=True)


def gather_rows(size: int, width: int = 1) -> Rounds:
    """Return the round of the all-gather, with ``width`` chunks per row."""
    return _to_all(size, lambda ranks, to: transfers(ranks, to, ranks * width, (ranks + 1) * width))


def _to_all(size: int, table: Callable[[IntArray, IntArray], Transfers]) -> Rounds:
    """Return the round whose messages are, for each shift, ``table(ranks, ranks + shift)``."""
    ranks = np.arange(size)
    return Rounds(min(size - 1, 1), lambda _: (table(ranks, (ranks + shift) % size) for shift in range(1, size)))


def _from_root(size: int, root: int, *, rows: bool) -> Rounds:
    targets = [(root + shift) % size for shift in range(1, size)]
    return Rounds(min(size - 1, 1), lambda _: (transfers(root, to, to if rows else 0) for to in targets))
