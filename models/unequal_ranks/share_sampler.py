"""Share sampler: this rank's part of each global batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from gangline.models.unequal_ranks.global_order import GlobalOrder
from gangline.models.unequal_ranks.split_controller import SplitController


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch."""

    number: int
    """Number of the global batch, counted from the start of the job."""
    counts: list[int]
    """Samples of each rank."""
    total: int
    """Samples of the global batch."""


class ShareSampler(Sampler[list[Any]]):
    """Batch sampler of one rank: consecutive slices of the global batches.

    A rank without samples gets the batch's first sample, so that it makes the same steps; the sample has no weight.
    """

    def __init__(self, order: GlobalOrder, controller: SplitController, rank: int) -> None:
        self._order, self._controller, self._rank = order, controller, rank
        self.drawn: deque[Share] = deque()
        """Shares that were drawn and not yet handed out."""
        self.seed = 0
        """Seed of the next epoch."""
        self.skip = 0
        """Samples of the next epoch to leave out at its beginning."""
        self.first = 0
        """Number of the next epoch's first global batch."""

    def __iter__(self) -> Iterator[list[Any]]:
        """Draw an epoch. Collective."""
        self.drawn.clear()
        for number, batch in enumerate(self._order.batches(self.seed, self.skip), self.first):
            counts = self._controller.counts(number, len(batch))
            begin = sum(counts[: self._rank])
            self.drawn.append(Share(number, counts, len(batch)))
            yield batch[begin : begin + counts[self._rank]] or batch[:1]

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._order)


def draw_seed(generator: torch.Generator | None) -> int:
    """Return a random seed, as torch's RandomSampler draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
