"""Load balancing: a split that follows measured speed, and micro-steps where a context's memory is too small."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gangline.collectives.context import Context
from gangline.models.executor.executor import ElapsedTime, Executor, Share, is_out_of_memory
from gangline.models.load_balance.memory_limits import MemoryLimits, empty_caches
from gangline.models.load_balance.speed_model import SpeedModel


class LoadBalancer:
    """Measures the contexts of a module while it trains, and derives loads and micro-steps from that."""

    def __init__(self, contexts: Sequence[Context], logger: logging.Logger, minimum: int = 1) -> None:
        """Start with equal loads and no memory limits.

        Args:
            contexts: contexts of the module.
            logger: receives one line per change of the loads, and a warning per limit of memory.
            minimum: smallest share that is not empty.
        """
        self._contexts = list(contexts)
        on_one_device = len({context.torch_device for context in contexts}) == 1
        names = [str(context) for context in contexts]
        self._speeds = SpeedModel(names, logger, minimum=minimum, on_one_device=on_one_device)
        self.limits = MemoryLimits(contexts, logger)
        """Numbers of samples that fit into the contexts' memory."""
        self._pending: list[tuple[list[int], list[ElapsedTime]]] = []  # (samples, times) of batches not yet evaluated

    @property
    def loads(self) -> list[float]:
        """Current loads, one per context, for `split_batch`."""
        return list(self._speeds.loads)

    def begin_batch(self) -> None:
        """Update the loads if enough batches have been measured."""
        self._record_finished(wait=False)
        if self._speeds.due():
            self._speeds.update_loads()

    def begin_epoch(self) -> None:
        """Update the loads from all measurements."""
        self._record_finished(wait=True)
        self._speeds.begin_epoch()

    def record(self, samples: Sequence[int], times: Sequence[ElapsedTime]) -> None:
        """Record a training batch, by context; a GPU may not have finished it yet."""
        self._pending.append((list(samples), list(times)))

    def _record_finished(self, *, wait: bool) -> None:
        """Pass times of finished batches to the speed model; with ``wait``, of all batches."""
        while self._pending and (wait or all(time.is_complete() for time in self._pending[0][1])):
            samples, times = self._pending.pop(0)
            self._speeds.record(samples, [time.seconds() for time in times])

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
            micro_steps = self.limits.micro_steps(slices)
            try:
                return sorted(run(micro_steps), key=lambda share: share.replica.context_index)
            except Exception as error:
                restore()
                executor.take_times()  # the times of a failed attempt are no measure of speed
                if not is_out_of_memory(error) or not self.limits.lower(executor.out_of_memory, micro_steps):
                    raise
            empty_caches(self._contexts)  # outside the handler: the exception's frames hold tensors

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"speeds": self._speeds.state(), "most": list(self.limits.max_samples)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; with other contexts, start from equal loads and log a warning."""
        self._speeds.load_state(state["speeds"])
        if state["speeds"]["contexts"] == [str(context) for context in self._contexts]:
            self.limits.max_samples = list(state["most"])
