"""Memory: how many samples each context holds at once, learnt from running out of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from gangline.collectives.context import Context

_WORDS = ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # the host's allocator, CUDA, cuBLAS and cuDNN


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, or Python, says that there is no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def empty_caches(contexts: Sequence[Context]) -> None:
    """Give back to the GPUs among these contexts what torch keeps for later."""
    for device in {context.torch_device for context in contexts if context.device_type == "gpu"}:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


class Limits:
    """The most samples that each context takes at once; a larger share runs in micro-steps."""

    def __init__(self, contexts: Sequence[Context], logger: logging.Logger) -> None:
        self._contexts = list(contexts)
        self._logger = logger
        self.most: list[int | None] = [None] * len(contexts)
        """One a context; None: no limit is known."""

    def rounds(self, slices: Sequence[slice]) -> list[list[slice]]:
        """Each context's slice cut into equal parts that fit, the parts of one round side by side.

        Args:
            slices: one a context, of the batch.

        Returns:
            For each round a slice a context; empty ones for contexts that are done.
        """
        cuts = [_cut(part, most) for part, most in zip(slices, self.most, strict=True)]
        return [
            [cut[number] if number < len(cut) else slice(0, 0) for cut in cuts] for number in range(max(map(len, cuts)))
        ]

    def lower(self, numbers: Sequence[int], rounds: Sequence[Sequence[slice]]) -> bool:
        """Halve what these contexts take at once; False where none of them can take less.

        Args:
            numbers: of the contexts that ran out of memory, or may have.
            rounds: what they were given, as `rounds` cut it.
        """
        tried = {number: max(parts[number].stop - parts[number].start for parts in rounds) for number in numbers}
        if not tried or max(tried.values()) < 2:
            return False
        for number, samples in tried.items():
            context = self._contexts[number]
            self.most[number] = max(1, samples // 2)
            self._logger.warning(
                "%s ran out of memory with %d samples; the batch is done again, and from now on its share runs in "
                "micro-steps of at most %d samples",
                context,
                samples,
                self.most[number],
            )
        return True


def _cut(part: slice, most: int | None) -> list[slice]:
    samples = part.stop - part.start
    pieces = math.ceil(samples / most) if most else 1
    ends = [part.start + samples * (number + 1) // pieces for number in range(pieces)]
    return [slice(begin, end) for begin, end in zip([part.start, *ends], ends, strict=False)]
