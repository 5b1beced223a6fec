"""Lockstep: every rank takes the same step at the same time, and an error of one rank ends the step on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from gangline.models.unequal_ranks.rank_exchange import GatheredNumbers, RankExchange

_FAILED = -1.0

Count = Callable[[Any], float | Tensor]
"""Returns what the mean of the loss counts in a batch."""


@dataclass(frozen=True)
class Piece:
    """What one rank read for a step."""

    samples: int
    """Samples that it trains on; 0: the batch repeats one sample without weight."""
    batch: Any
    whole: int = 0
    """Number that must be the same on all ranks: samples of the global batch, or a checksum of them."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch."""

    number: int
    """Number of the global batch, counted from the start of the job."""
    counts: list[int]
    """Samples of each rank."""
    total: int
    """Samples of the global batch."""
    counted: list[float]
    """What the loss's mean counts on each rank."""


def in_lockstep(
    pieces: Iterator[Piece], first: int, exchange: RankExchange, *, counter: Count | None, smallest: int = 1
) -> Iterator[tuple[Share, Any]]:
    """Return the batches of an epoch with the shares of all ranks. Collective.

    A batch is read, and the ranks exchange its counts, while the one before it is trained: one small message a step,
    for which nobody waits. The epoch ends when no rank has a sample.

    Args:
        pieces: this rank's; a rank that has no more samples ends, or goes on with pieces of 0 samples.
        first: number of the first global batch.
        exchange: connects the ranks.
        counter: what the loss's mean counts in a batch; None: samples.
        smallest: samples of the smallest global batch; the first one that is smaller ends the epoch.

    Raises:
        Exception: if reading or counting failed on this rank.
        RuntimeError: if it failed on another rank, or the ranks read different samples.
        ValueError: if ``counter`` returned an invalid number on any rank.
    """
    ahead = _Step(pieces, exchange, counter)
    for number in count(first):
        step = ahead
        counts, counted = step.wait(exchange, number)
        if sum(counts) < max(smallest, 1):
            return
        ahead = _Step(pieces, exchange, counter)
        yield Share(number, counts, sum(counts), counted), step.piece.batch


class _Step:
    """A piece that was read ahead."""

    def __init__(self, pieces: Iterator[Piece], exchange: RankExchange, counter: Count | None) -> None:
        self.piece = Piece(0, None)
        self._error: Exception | None = None
        try:
            self.piece = next(pieces, self.piece)
            samples = float(self.piece.samples)
            counted = float(counter(self.piece.batch)) if counter is not None and samples else samples
        except Exception as raised:  # noqa: BLE001  raised on all ranks when the step begins
            samples, counted, self._error = _FAILED, 0.0, raised
        self._numbers: GatheredNumbers = exchange.start_gather([samples, counted, self.piece.whole])

    def wait(self, exchange: RankExchange, number: int) -> tuple[list[int], list[float]]:
        """Return the samples of all ranks, and what the loss's mean counts on each."""
        rows = self._numbers.wait()
        if any(samples == _FAILED for samples, _, _ in rows):
            exchange.all_gather_results(self._raise, f"reading global batch {number}")
        for rank, (_, counted, whole) in enumerate(rows):
            if not (0 <= counted < math.inf):
                raise ValueError(
                    f"count= returned {counted} on rank {rank} for global batch {number}; expected a number, 0 or more"
                )
            if whole != rows[0][2]:
                raise RuntimeError(
                    f"rank {rank} read other samples than rank 0 for global batch {number}; expected the same data "
                    'set, and with stream="same" the same order of samples (the same seed of shuffles), on all ranks'
                )
        return [int(samples) for samples, _, _ in rows], [counted for _, counted, _ in rows]

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it keeps its traceback's frames until garbage is collected
