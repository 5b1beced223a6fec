"""Measured loads: the split of global batches over ranks, from the ranks' speeds and the limits of their memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gangline.collectives.console_log import log_to_stderr
from gangline.collectives.workload import split_within
from gangline.models.load_balance.speed_model import SpeedModel, listed_rates
from gangline.models.unequal_ranks.rank_memory import samples_that_fit
from gangline.models.unequal_ranks.rank_timer import RankTime, RankTimer

_log = logging.getLogger("gangline")
_LOGGED_FROM = 8  # batches after which it is known whether ranks are equal

AllGather = Callable[[Any], list[Any]]


class MeasuredLoads:
    """Loads and caps of all ranks, equal on all ranks at every batch.

    Each rank calls `begin_batch` before every batch and `begin_epoch` before every epoch. After 2, 4, 8, ..., 64
    counted batches more, and at the start of an epoch, the ranks exchange their times, and every rank derives the same
    loads from them. A batch is not counted if it is the first of its split, or smaller than others.
    """

    def __init__(
        self,
        rank: int,
        loads: Sequence[float],
        all_gather: AllGather,
        timer: RankTimer | None = None,
        *,
        device: torch.device | None = None,
        caps: Sequence[int | None] | None = None,
        minimum: int = 1,
    ) -> None:
        """Start with these loads.

        Args:
            rank: this rank.
            loads: one per rank.
            all_gather: exchanges plain data of each rank. Collective.
            timer: measures this rank; None: the loads stay.
            device: its memory limits the growth of this rank's share; None: nothing does.
            caps: maximum share of each rank; None: no limits.
            minimum: smallest share that is not empty.
        """
        self.loads = [float(load) for load in loads]
        """One per rank, for `split_within`."""
        self._rank, self._size = rank, len(self.loads)
        self._given: list[int | None] = list(caps) if caps is not None else [None] * self._size
        self.caps = list(self._given)
        """Maximum share of each rank; None: no limit is known."""
        self.timer = timer
        self._all_gather, self._device, self._minimum = all_gather, device, minimum
        self._speeds = self._new_speeds()
        self._counts: list[int] = []  # samples of each rank in the current batch
        self._counts_of_full: list[int] = []  # the same in the last full batch
        self._is_counted = False
        self._full = 0  # samples of the largest global batch
        self._largest = 0  # samples of this rank's largest share
        self._counted, self._next_look = 0, self._speeds.interval  # batches so far, and at the next exchange
        self._pending: list[tuple[int, RankTime]] = []  # samples and times of batches that a GPU may not have finished
        self._measured: list[tuple[int, float]] = []  # samples and seconds of this rank since the last look
        self._is_unlogged = True
        self.close = weakref.finalize(self, timer.close if timer is not None else lambda: None)
        """Remove the hooks of the model."""

    def _new_speeds(self) -> SpeedModel:
        names = [f"rank {rank}" for rank in range(self._size)]
        return SpeedModel(names, None, minimum=self._minimum, may_idle=False, averages=True)

    def begin_batch(self, counts: Sequence[int]) -> bool:
        """Record the time of the batch before, and look at the speeds if that is due. Collective.

        Args:
            counts: samples of each rank in the batch that begins.

        Returns:
            True if loads or caps changed.
        """
        self._end_batch()
        changed = self.timer is not None and self._counted >= self._next_look and self._look()
        self._counts = list(counts)
        self._full = max(self._full, sum(counts))
        is_full = sum(counts) == self._full
        self._is_counted = is_full and self._counts == self._counts_of_full
        if is_full:
            self._counts_of_full = self._counts
        return changed

    def discard_batch(self, limits: Mapping[int, int]) -> None:
        """Leave out the current batch, which some ranks skipped. All ranks call it alike.

        Args:
            limits: samples that ranks get at most from now on, where the others can take the rest: they ran out of
                memory.
        """
        self._is_counted = False
        for rank, samples in limits.items():
            cap = self._given[rank]
            self.caps[rank] = self._given[rank] = max(1, samples if cap is None else min(cap, samples))

    def begin_epoch(self) -> bool:
        """Look at the speeds of the epoch before. Collective.

        Returns:
            True if loads or caps changed.
        """
        self._end_batch()
        self._counts = []
        return self.timer is not None and self._counted > 0 and self._look()

    def state(self) -> dict[str, Any]:
        """Return loads and speeds as plain data."""
        return {"loads": list(self.loads), "speeds": self._speeds.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; speeds of another number of ranks are measured again."""
        if self.timer is None or len(state["loads"]) != self._size:
            return
        self._speeds = self._new_speeds()
        self._speeds.load_state(state["speeds"])
        self.loads = [float(load) for load in state["loads"]]

    def _end_batch(self) -> None:
        """Record this rank's time of the batch that has ended."""
        if self.timer is None:
            return
        samples = self._counts[self._rank] if self._counts else 0
        self._largest = max(self._largest, samples)
        time = self.timer.take()
        if self._is_counted and samples and time is not None:
            self._pending.append((samples, time))
        self._counted += self._is_counted
        self._is_counted = False
        while self._pending and self._pending[0][1].is_complete():
            samples, time = self._pending.pop(0)
            if seconds := time.seconds():
                self._measured.append((samples, seconds))

    def _look(self) -> bool:
        """Exchange times and limits; return True if the loads or caps changed."""
        fits = None if self._device is None else samples_that_fit(self._device, self._largest)
        rows = self._all_gather((self._measured, fits))
        self._measured = []
        both = zip(self._given, (limit for _, limit in rows), strict=True)
        self.caps = [min((cap for cap in limits if cap is not None), default=None) for limits in both]
        self._speeds.caps = list(self.caps)
        for rank, (measured, _) in enumerate(rows):
            self._speeds.record_of(rank, self._full, measured)
        before = split_within(self._full, self.loads, self.caps, self._minimum)
        if self._speeds.update_loads():
            self.loads = list(self._speeds.loads)
        self._next_look = self._counted + self._speeds.interval
        counts = split_within(self._full, self.loads, self.caps, self._minimum)
        self._log_split(counts, is_new=counts != before)
        return counts != before

    def _log_split(self, counts: Sequence[int], *, is_new: bool) -> None:
        rates = self._speeds.rates(self._full)
        if self._rank or not rates or not (is_new or (self._is_unlogged and self._counted >= _LOGGED_FROM)):
            return
        self._is_unlogged = False
        equal = split_within(self._full, [1] * self._size, self.caps, self._minimum)
        with log_to_stderr():
            _log.info(
                "balance: %s%s of %d samples (alone %s samples/s); expected step %.3g ms, equal split %.3g ms",
                "the split stays equal, " if counts == equal else "",
                ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts)),
                self._full,
                listed_rates(rates),
                1e3 * self._speeds.expected_seconds(counts),
                1e3 * self._speeds.expected_seconds(equal),
            )
