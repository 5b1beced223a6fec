"""``work_load_list="auto"``: a split that follows measured speed, and micro-steps where memory is too small."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from gangline.collectives.context import Context
from gangline.models.executor.executor import Executor, Lap, Share
from gangline.models.load_balance.memory_limits import Limits, empty_caches, is_out_of_memory
from gangline.models.load_balance.speed_model import AutoLoads


class LoadBalancer:
    """What a module learns of its contexts while it trains, and what it does with that."""

    def __init__(self, contexts: Sequence[Context], logger: logging.Logger) -> None:
        """Begin with equal loads and no limits."""
        self._contexts = list(contexts)
        self._speeds = AutoLoads([str(context) for context in contexts], logger)
        self.limits = Limits(contexts, logger)
        """How many samples contexts hold at once."""
        self._laps: list[tuple[list[int], list[Lap]]] = []  # (samples, what they took) of batches not looked at yet

    @property
    def loads(self) -> list[float]:
        """One a context, for `split_batch`."""
        return list(self._speeds.loads)

    def begin_batch(self) -> None:
        """Look at the speeds where it is time."""
        self._read_laps(wait=False)
        if self._speeds.due():
            self._speeds.look()

    def begin_epoch(self) -> None:
        """Look at the speeds."""
        self._read_laps(wait=True)
        self._speeds.begin_epoch()

    def record(self, shares: Sequence[Share], passes: Executor) -> None:
        """Note what a training batch took; a GPU may not have come to its end yet."""
        samples = [0] * len(self._contexts)
        for share in shares:
            samples[share.replica.number] += share.samples
        self._laps.append((samples, passes.laps()))

    def _read_laps(self, *, wait: bool) -> None:
        """Record what batches took, those that are over or, with ``wait``, all."""
        while self._laps and (wait or all(lap.is_over() for lap in self._laps[0][1])):
            samples, laps = self._laps.pop(0)
            self._speeds.record(samples, [lap.seconds() for lap in laps])

    def in_rounds(
        self,
        slices: Sequence[slice],
        passes: Executor,
        run: Callable[..., list[Share]],
        put_back: Callable[[], None] = lambda: None,
    ) -> list[Share]:
        """Run the parts of a batch that fit into each context's memory; where one does not, all again in smaller ones.

        Args:
            slices: one a context, of the batch.
            passes: what runs them.
            run: runs a round, given its ``slices`` and ``number``.
            put_back: undoes what a round that failed has done.

        Raises:
            Exception: whatever a round raised, if it was not for memory or no part could be smaller.
        """
        while True:
            rounds = self.limits.rounds(slices)
            try:
                shares = [share for number, parts in enumerate(rounds) for share in run(slices=parts, number=number)]
            except Exception as error:
                put_back()
                passes.laps()  # what the failed attempt took says nothing of the contexts' speed
                if not is_out_of_memory(error) or not self.limits.lower(passes.out_of_memory, rounds):
                    raise
            else:
                return sorted(shares, key=lambda share: share.replica.number)
            empty_caches(self._contexts)  # here the error is gone, and with it what its frames held

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain data."""
        return {"speeds": self._speeds.state(), "most": list(self.limits.most)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; with other contexts, from the beginning, and the log says so."""
        self._speeds.load_state(state["speeds"])
        if state["speeds"]["contexts"] == [str(context) for context in self._contexts]:
            self.limits.most = list(state["most"])
