"""Share sampler: this rank's part of each global batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import Sampler

from gangline.models.unequal_ranks.global_order import GlobalOrder
from gangline.models.unequal_ranks.lockstep import Piece
from gangline.models.unequal_ranks.split_controller import SplitController

_END = object()


class ShareSampler(Sampler[list[Any]]):
    """Batch sampler of one rank: consecutive slices of the global batches.

    A rank without samples gets the batch's first sample, so that it makes the same steps; the sample has no weight.
    """

    def __init__(self, order: GlobalOrder, controller: SplitController, rank: int, ahead: int) -> None:
        """Cut an order.

        Args:
            order: of the samples of all ranks.
            controller: decides the size of shares.
            rank: this rank.
            ahead: most batches that the DataLoader of any rank draws before the one that it returns.
        """
        self._order, self._controller, self._rank, self._ahead = order, controller, rank, ahead
        self._known: deque[list[Any]] = deque()  # global batches that are not drawn yet
        self._drawn: deque[tuple[int, int]] = deque()  # (own samples, all samples) of batches not returned yet
        self._is_complete = False
        self.seed = 0
        """Seed of the next epoch."""
        self.skip = 0
        """Samples of the next epoch to leave out at its beginning."""
        self.first = 0
        """Number of the next epoch's first global batch."""

    def pieces(self, loader: Any) -> Iterator[Piece]:
        """Return this rank's batches of an epoch. Collective, in the order of the training steps.

        The order is read here, as many batches ahead on every rank, and not when a DataLoader draws: ranks whose
        DataLoaders draw at different times would wait for each other.

        Args:
            loader: draws from this sampler.
        """
        self._known.clear()
        self._drawn.clear()
        self._is_complete = False
        order = self._order.batches(self.seed, self.skip)
        for _ in range(self._ahead):
            self._read(order)
        batches: Iterator[Any] | None = None
        while True:
            self._read(order)
            batches = iter(loader) if batches is None else batches
            batch = next(batches, _END)
            if batch is _END:
                return
            yield Piece(self._drawn[0][0], batch, self._drawn.popleft()[1])

    def _read(self, order: Iterator[list[Any]]) -> None:
        batch = next(order, None)
        if batch is None:
            self._is_complete = True
        else:
            self._known.append(batch)

    def __iter__(self) -> Iterator[list[Any]]:
        """Draw the shares of the epoch that `pieces` began."""
        for number in count(self.first):
            if not self._known:
                assert self._is_complete, "the DataLoader drew further ahead than num_workers x prefetch_factor"
                return
            batch = self._known.popleft()
            counts = self._controller.counts(number, len(batch))
            begin = sum(counts[: self._rank])
            self._drawn.append((counts[self._rank], len(batch)))
            yield batch[begin : begin + counts[self._rank]] or batch[:1]

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._order)


def draw_seed(generator: torch.Generator | None) -> int:
    """Return a random seed, as torch's RandomSampler draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
