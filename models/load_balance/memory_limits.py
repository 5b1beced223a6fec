"""Memory limits: the number of samples each context can process at once, learnt from out-of-memory errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from gangline.collectives.context import Context


def empty_caches(contexts: Sequence[Context]) -> None:
    """Return unused memory of torch's caching allocator to the GPUs among these contexts."""
    for device in {context.torch_device for context in contexts if context.device_type == "gpu"}:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


class MemoryLimits:
    """The maximum number of samples each context processes at once; larger shares run in micro-steps."""

    def __init__(self, contexts: Sequence[Context], logger: logging.Logger) -> None:
        self._contexts = list(contexts)
        self._logger = logger
        self.max_samples: list[int | None] = [None] * len(contexts)
        """One per context; None: no limit is known."""

    def micro_steps(self, slices: Sequence[slice]) -> list[list[slice]]:
        """Cut each context's slice into equal parts that fit.

        Args:
            slices: one per context, of the batch.

        Returns:
            For each micro-step one slice per context; empty ones for contexts that have finished.
        """
        cuts = [_cut(part, limit) for part, limit in zip(slices, self.max_samples, strict=True)]
        return [
            [cut[number] if number < len(cut) else slice(0, 0) for cut in cuts] for number in range(max(map(len, cuts)))
        ]

    def lower(self, indices: Sequence[int], micro_steps: Sequence[Sequence[slice]]) -> bool:
        """Halve the limits of contexts that ran out of memory; return False if none can be lowered.

        Args:
            indices: contexts that ran out of memory, or may have.
            micro_steps: slices that were tried, as `micro_steps` returned them.
        """
        tried = {index: max(parts[index].stop - parts[index].start for parts in micro_steps) for index in indices}
        if not tried or max(tried.values()) < 2:
            return False
        for index, samples in tried.items():
            self.max_samples[index] = max(1, samples // 2)
            self._logger.warning(
                "%s ran out of memory with %d samples; the batch is run again, and from now on its share runs in "
                "micro-steps of at most %d samples",
                self._contexts[index],
                samples,
                self.max_samples[index],
            )
        return True


def _cut(part: slice, limit: int | None) -> list[slice]:
    samples = part.stop - part.start
    pieces = math.ceil(samples / limit) if limit else 1
    ends = [part.start + samples * (number + 1) // pieces for number in range(pieces)]
    return [slice(begin, end) for begin, end in zip([part.start, *ends], ends, strict=False)]
