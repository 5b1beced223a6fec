"""Balance of a module's contexts: loads that follow measured speeds, and limits of their memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from gangline.kvstore.context import Context
from gangline.models.balance.speed_model import SpeedModel
from gangline.models.elapsed_time import Measurements


class ContextBalance:
    """Loads of contexts from the times of their shares, and limits of their memory.

    It logs one line per change of the loads, and a warning per limit of memory.
    """

    def __init__(self, contexts: Sequence[Context], logger: logging.Logger, minimum: int = 1) -> None:
        """Start with equal loads; ``minimum`` is the smallest share that is not empty."""
        names = [str(context) for context in contexts]
        on_one_device = len({context.torch_device for context in contexts}) == 1
        self._speeds = SpeedModel(names, logger, minimum=minimum, on_one_device=on_one_device)
        self.limits = MemoryLimits(names, logger)
        self.measurements = Measurements()  # samples and times of the contexts in training batches

    @property
    def loads(self) -> list[float]:
        """Current loads, one per context, for `split_batch`."""
        return list(self._speeds.loads)

    def begin_batch(self, *, wait: bool = False) -> None:
        """Update the loads from the batches that are complete; with ``wait``, from all batches."""
        for samples, seconds in self.measurements.take(wait=wait):
            self._speeds.record(samples, seconds)

    def begin_epoch(self) -> None:
        """Update the loads from all batches; a trial of idle contexts may begin."""
        self.begin_batch(wait=True)
        self._speeds.begin_epoch()

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"speeds": self._speeds.state(), "most": list(self.limits.max_samples)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; with other contexts, start from equal loads and log a warning."""
        self._speeds.load_state(state["speeds"])
        if state["speeds"]["contexts"] == self._speeds.names:
            self.limits.max_samples = list(state["most"])


class MemoryLimits:
    """Maximum number of samples that each context processes at once; larger shares run in micro-steps."""

    def __init__(self, names: Sequence[str], logger: logging.Logger) -> None:
        """Start without limits; each halved limit is logged as a warning."""
        self._names, self._logger = list(names), logger
        self.max_samples: list[int | None] = [None] * len(names)  # one per context; None: no limit is known

    def micro_steps(self, slices: Sequence[slice]) -> list[list[slice]]:
        """Return the slices of each micro-step: equal parts of each context's slice that fit, padded by empty ones."""
        if not any(self.max_samples):
            return [list(slices)]
        cuts = [_cut(part, limit) for part, limit in zip(slices, self.max_samples, strict=True)]
        return [
            [cut[number] if number < len(cut) else slice(0, 0) for cut in cuts] for number in range(max(map(len, cuts)))
        ]

    def lower(self, indices: Sequence[int], micro_steps: Sequence[Sequence[slice]]) -> bool:
        """Halve the limits of contexts that may have run out of memory; return False if no limit can be halved."""
        tried = {index: max(parts[index].stop - parts[index].start for parts in micro_steps) for index in indices}
        if not tried or max(tried.values()) < 2:
            return False
        for index, samples in tried.items():
            limit = self.max_samples[index]
            self.max_samples[index] = max(1, samples // 2 if limit is None else min(limit, samples // 2))
            self._logger.warning(
                "%s ran out of memory with %d samples; the batch is run again, and from now on its share runs in "
                "micro-steps of at most %d samples",
                self._names[index],
                samples,
                self.max_samples[index],
            )
        return True


def _cut(part: slice, limit: int | None) -> list[slice]:
    samples = part.stop - part.start
    pieces = math.ceil(samples / limit) if limit else 1
    ends = [part.start + samples * (number + 1) // pieces for number in range(pieces)]
    return [slice(begin, end) for begin, end in zip([part.start, *ends], ends, strict=False)]
