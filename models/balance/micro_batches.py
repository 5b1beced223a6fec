"""Micro-batches: parts of each rank's share, equally many on all ranks, for wrappers that exchange in each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gangline.models.balanced_batch import NOTHING_COUNTS, BalancedBatch, BatchesOfNetworks
from gangline.models.data.joined_batches import JoinedBatches


class MicroBatches:
    """The parts of a rank's batch; an iteration gives the gradients of each part its weight."""

    def __init__(
        self,
        trained: BatchesOfNetworks,
        whole: BalancedBatch | None,
        batch: Any,
        samples: int,
        minimum: int,
        count: Callable[[Any], Any] | None,
        *,
        is_sum: bool,
    ) -> None:
        """Cut to parts of at most ``samples``; ranks that have fewer parts repeat ``minimum`` samples with weight 0.

        Weights are in proportion to what ``count`` returns for a part, None: to its samples; or equal if the loss is a
        sum.
        """
        if whole is None:
            raise RuntimeError("micro_batches() has no batch to cut; call it in the loop over this loader")
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"micro_batches() has parts of {samples!r}; expected a number of samples, 1 or more")
        self._trained, self._whole, own = trained, whole, whole.samples
        cutter, number = JoinedBatches((), own or minimum), max(-(-count // samples) for count in whole.counts)
        if own and (rows := cutter.length(batch)) != own:
            raise ValueError(
                f"micro_batches() got a batch of {rows} rows for {own} samples; expected the batch that the loader has "
                "returned last, with one entry for each sample"
            )
        filled = max(-(-own // samples), min(number, own // minimum))
        ends = [own * place // filled for place in range(filled + 1)] if filled else []
        parts = [(cutter.cut(batch, begin, end), end - begin) for begin, end in pairwise(ends)]
        parts += [(cutter.cut(batch, 0, minimum), 0)] * (number - filled)
        divisor = (lambda _: 1) if is_sum else count
        counted = [float(divisor(part) if divisor else size) if size else 0.0 for part, size in parts]
        total = 1.0 if is_sum else sum(counted) or 1.0
        self._parts = [(*part, each / total) for part, each in zip(parts, counted, strict=True)]

    def __len__(self) -> int:
        """Return the number of parts, equal on all ranks."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        """Return the parts, of which each is current until the next one is asked for."""
        try:
            for part, samples, fraction in self._parts:
                weight = self._whole.weight * fraction or (NOTHING_COUNTS if samples else 0.0)
                self._trained.begin_part(replace(self._whole, samples=samples, weight=weight))
                yield part
        finally:
            self._trained.begin_part(self._whole)
