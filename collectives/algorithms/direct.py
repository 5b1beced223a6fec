"""Direct: every rank sends straight to every rank that needs its data.

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

from collections.abc import Callable, Iterator

import numpy as np

from gangline.collectives.schedule import Round, Rounds, Schedule, Transfers, transfers


def one_shot(size: int) -> Schedule:
    """All-reduce in which every rank receives all tensors and sums them itself."""

    def tables(_: int) -> Iterator[Transfers]:
        ranks = np.arange(size)
        for shift in range(1, size):
            yield transfers(ranks, (ranks + shift) % size, 0, reduce=True)

    return Schedule("all_reduce", "one_shot", size, 1, _one_round(size, tables))


def two_shot(size: int) -> Schedule:
    """All-reduce in which rank r sums chunk r of all ranks and sends the sum to all."""
    gather = gather_rows(size)
    return Schedule("all_reduce", "two_shot", size, size, gather.backwards(reduce=True) + gather)


def all_gather(size: int) -> Schedule:
    """All-gather in which every rank sends its row to all others."""
    return Schedule("all_gather", "direct", size, size, gather_rows(size))


def all_to_all(size: int) -> Schedule:
    """All-to-all in which every rank sends each other rank its row."""

    def tables(_: int) -> Iterator[Transfers]:
        ranks = np.arange(size)
        for shift in range(1, size):
            to = (ranks + shift) % size
            yield transfers(ranks, to, ranks * size + to)

    return Schedule("all_to_all", "direct", size, size * size, _one_round(size, tables))


def broadcast(size: int, root: int) -> Schedule:
    """Broadcast in which the root sends to every rank."""
    return Schedule("broadcast", "direct", size, 1, _from_root(size, root, rows=False), root)


def scatter(size: int, root: int) -> Schedule:
    """Scatter in which the root sends every rank its row."""
    return Schedule("scatter", "direct", size, size, _from_root(size, root, rows=True), root)


def gather_rows(size: int, width: int = 1) -> Rounds:
    """Return the round of the all-gather, with ``width`` chunks per row."""

    def tables(_: int) -> Iterator[Transfers]:
        ranks = np.arange(size)
        for shift in range(1, size):
            yield transfers(ranks, (ranks + shift) % size, ranks * width, (ranks + 1) * width)

    return _one_round(size, tables)


def _from_root(size: int, root: int, *, rows: bool) -> Rounds:
    def tables(_: int) -> Iterator[Transfers]:
        for shift in range(1, size):
            to = (root + shift) % size
            yield transfers(root, to, to if rows else 0)

    return _one_round(size, tables)


def _one_round(size: int, tables: Callable[[int], Round]) -> Rounds:
    return Rounds(1 if size > 1 else 0, tables)
