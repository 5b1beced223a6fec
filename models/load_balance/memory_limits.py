"""Memory limits: the number of samples each context or rank can process at once, learnt from out-of-memory errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from gangline.models.executor.executor import Executor, Share, is_out_of_memory

_USED = 0.9  # part of the free memory that growing shares may take; the rest is for fragmentation


class MemoryLimits:
    """The maximum number of samples each context or rank processes at once, halved when it runs out of memory.

    Larger shares of contexts run in micro-steps; those of ranks are cut.
    """

    def __init__(
        self,
        names: Sequence[str],
        logger: logging.Logger | None = None,
        max_samples: Sequence[int | None] | None = None,
    ) -> None:
        """Start with these limits.

        Args:
            names: names of the contexts or ranks, for logs.
            logger: receives a warning for each limit that is halved.
            max_samples: one per context or rank; None: no limits.
        """
        self._names, self._logger = list(names), logger
        self.max_samples = list(max_samples) if max_samples is not None else [None] * len(names)
        """One per context or rank; None: no limit is known."""

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
        self.halve(tried)
        return True

    def halve(self, tried: Mapping[int, int]) -> None:
        """Halve the limits of contexts or ranks that ran out of memory with so many samples."""
        for index, samples in tried.items():
            limit = self.max_samples[index]
            self.max_samples[index] = max(1, samples // 2 if limit is None else min(limit, samples // 2))
            if self._logger is not None:
                self._logger.warning(
                    "%s ran out of memory with %d samples; the batch is run again, and from now on its share runs in "
                    "micro-steps of at most %d samples",
                    self._names[index],
                    samples,
                    self.max_samples[index],
                )

    def run_in_parts(
        self,
        slices: Sequence[slice],
        executor: Executor,
        run: Callable[[list[list[slice]]], list[Share]],
        restore: Callable[[], None] = lambda: None,
    ) -> list[Share]:
        """Run a batch in parts that fit into each context's memory; on out-of-memory, restart with smaller parts.

        Args:
            slices: one per context, of the batch.
            executor: executor that ``run`` uses.
            run: runs the batch in micro-steps, of which each has one slice per context, and returns their shares.
            restore: undoes the effects of a failed attempt.

        Returns:
            The shares, ordered by context.

        Raises:
            Exception: the error of an attempt, if it is not for memory or no part can be made smaller.
        """
        while True:
            micro_steps = self.micro_steps(slices)
            try:
                return sorted(run(micro_steps), key=lambda share: share.replica.context_index)
            except Exception as error:
                restore()
                executor.take_times()  # the times of a failed attempt are no measure of speed
                if not is_out_of_memory(error) or not self.lower(executor.out_of_memory, micro_steps):
                    raise
            torch.cuda.empty_cache()  # outside the handler: the exception's frames hold tensors


def _cut(part: slice, limit: int | None) -> list[slice]:
    samples = part.stop - part.start
    pieces = math.ceil(samples / limit) if limit else 1
    ends = [part.start + samples * (number + 1) // pieces for number in range(pieces)]
    return [slice(begin, end) for begin, end in zip([part.start, *ends], ends, strict=False)]


def samples_that_fit(device: torch.device, samples: int) -> int | None:
    """Return the largest share that the peak of real training steps predicts to fit, between two steps.

    What is allocated between steps, such as weights and optimizer state, does not grow with the share; what a step adds
    is taken to grow in proportion, although a part of it does not.

    Args:
        device: device of the model.
        samples: the largest share that this rank has trained.

    Returns:
        A number of samples, ``samples`` or more; None: no limit is known, as on CPUs.
    """
    if device.type != "cuda" or not samples:
        return None
    peak, fixed = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    return samples + max(0, int(_USED * room * samples / max(peak - fixed, 1)))
