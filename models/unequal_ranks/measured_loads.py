"""Measured loads: the split of global batches over ranks, from the ranks' speeds and the limits of their memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gangline.models.load_balance.speed_model import SpeedModel, listed_rates, next_update, totals
from gangline.models.unequal_ranks.rank_memory import RankMemory
from gangline.models.unequal_ranks.rank_timer import RankTime, RankTimer
from gangline.models.unequal_ranks.split_controller import check_room, split_within

_log = logging.getLogger("gangline")
_MIN_GAIN = 0.03  # relative gain in step time that a new split must promise; equal ranks keep the equal split

AllGather = Callable[[Sequence[float]], list[list[float]]]


class MeasuredLoads:
    """Loads of all ranks, equal on all ranks at every batch.

    Each rank calls `begin_batch` before every batch and `begin_epoch` before every epoch. After 2, 4, 8, ..., 64
    counted batches, then after each 64, and at the start of an epoch the ranks exchange their times, and every rank
    derives the same loads from them. A batch is not counted if it is the first of its split, or smaller than others.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        all_gather: AllGather,
        timer: RankTimer | None = None,
        memory: RankMemory | None = None,
        loads: Sequence[float] | None = None,
        caps: Sequence[int | None] | None = None,
    ) -> None:
        """Start with equal loads, or with the given ones.

        Args:
            rank: this rank.
            size: number of ranks.
            all_gather: exchanges a few numbers of each rank. Collective.
            timer: measures this rank; None: the loads stay.
            memory: learns the limit of this rank's share; None: it is not limited by measurement.
            loads: one per rank; None: equal loads.
            caps: maximum share of each rank; None: no limits.
        """
        self.loads = [float(load) for load in loads] if loads is not None else [1.0] * size
        """One per rank, for `split_within`."""
        self.caps: list[int | None] = list(caps) if caps is not None else [None] * size
        """Maximum share of each rank; None: no limit is known."""
        self._rank, self._size = rank, size
        self._all_gather = all_gather
        self._timer = timer
        self._memory = memory
        self._given_caps = list(self.caps)
        self._speeds = self._new_speeds()
        self._counts: list[int] = []  # samples of each rank in the current batch
        self._counts_of_full: list[int] = []  # the same in the last full batch
        self._is_counted = False
        self._full = 0  # samples of the largest global batch
        self._counted = 0  # batches so far
        self._next_look = next_update(0)
        self._pending: list[tuple[int, RankTime]] = []  # samples and times of batches that a GPU may not have finished
        self._measured: list[tuple[int, float]] = []  # samples and seconds of this rank since the last look
        self._is_unlogged = True

    def _new_speeds(self) -> SpeedModel:
        return SpeedModel([f"rank {rank}" for rank in range(self._size)], None, least=1, min_gain=_MIN_GAIN)

    def try_memory(self, read: Callable[[int], Any] | None, global_batch: int) -> None:
        """Find the limit of this rank's memory with a batch of its share, before training. Collective.

        Args:
            read: returns a batch of so many samples, as the loader returns it; None: peaks of real steps alone count.
            global_batch: samples over all ranks.

        Raises:
            ValueError: if the limits of the ranks do not hold a global batch; on all ranks.
        """
        if self._memory is not None and read is not None:
            samples = split_within(global_batch, self.loads, self.caps)[self._rank]
            self._memory.try_batch(partial(read, samples), samples)
            self._merge_caps([row[0] for row in self._all_gather([self._own_cap()])])
        check_room(global_batch, self.caps)

    def begin_batch(self, counts: Sequence[int]) -> bool:
        """Record the time of the batch before, and look at the speeds if that is due. Collective.

        Args:
            counts: samples of each rank in the batch that begins.

        Returns:
            True if loads or caps changed.
        """
        self._end_batch()
        changed = self._counted >= self._next_look and self._look()
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
            limits: samples that ranks get at most from now on: they ran out of memory.
        """
        self._is_counted = False
        for rank, samples in limits.items():
            cap = self._given_caps[rank]
            self._given_caps[rank] = max(1, samples if cap is None else min(cap, samples))
        caps = [
            min(pair, key=lambda cap: math.inf if cap is None else cap)
            for pair in zip(self.caps, self._given_caps, strict=True)
        ]
        if None in caps or sum(cap for cap in caps if cap is not None) >= self._full:
            self.caps = caps

    def add_loading(self, seconds: float) -> None:
        """Add the time that this rank took to load a batch."""
        if self._timer is not None:
            self._timer.add_loading(seconds)

    def begin_epoch(self) -> bool:
        """Look at the speeds of the epoch before. Collective.

        Returns:
            True if loads or caps changed.
        """
        self._end_batch()
        self._counts = []
        return self._counted > 0 and self._look()

    def expected_rates(self) -> list[float]:
        """Return the samples per second of each rank alone; empty before the first look."""
        return self._speeds.rates(self._counts_of_full) if self._counts_of_full else []

    def state(self) -> dict[str, Any]:
        """Return loads and speeds as plain data."""
        return {"loads": list(self.loads), "speeds": self._speeds.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; speeds of another number of ranks are measured again."""
        if self._timer is None or len(state["loads"]) != self._size:
            return
        self._speeds = self._new_speeds()
        self._speeds.load_state(state["speeds"])
        self.loads = [float(load) for load in state["loads"]]

    def close(self) -> None:
        """Remove the hooks of the model."""
        if self._timer is not None:
            self._timer.close()

    def _end_batch(self) -> None:
        """Record this rank's time and memory of the batch that has ended."""
        if self._timer is None and self._memory is None:
            return
        samples = self._counts[self._rank] if self._counts else 0
        if self._memory is not None:
            self._memory.record_step(samples)
        if self._timer is not None:
            time = self._timer.take()
            if self._is_counted and samples:
                self._pending.append((samples, time))
        self._counted += self._is_counted
        self._is_counted = False
        while self._pending and self._pending[0][1].is_complete():
            samples, time = self._pending.pop(0)
            seconds = time.seconds()
            if seconds is not None and seconds > 0:
                self._measured.append((samples, seconds))

    def _look(self) -> bool:
        """Exchange times and limits; return True if the loads or caps changed."""
        self._next_look = next_update(self._counted)
        if self._timer is None and self._memory is None:
            return False
        samples, seconds = totals(self._measured)
        rows = self._all_gather([float(len(self._measured)), float(samples), seconds, self._own_cap()])
        self._measured = []
        caps = list(self.caps)
        self._merge_caps([row[3] for row in rows])
        changed = caps != self.caps
        if self._timer is not None:
            self._speeds.caps = list(self.caps)
            batches = [int(row[0]) for row in rows]
            self._speeds.record_totals(self._full, batches, [int(row[1]) for row in rows], [row[2] for row in rows])
            changed |= self._update_loads()
        return changed

    def _update_loads(self) -> bool:
        before = split_within(self._full, self.loads, self.caps)
        if self._speeds.update_loads():
            self.loads = list(self._speeds.loads)
        counts = split_within(self._full, self.loads, self.caps)
        rates = self._speeds.rates(counts)
        if rates and (counts != before or self._is_unlogged):
            self._is_unlogged = False
            if self._rank == 0:
                equal = split_within(self._full, [1.0] * self._size, self.caps)
                _log.info(
                    "balance: %s of %d samples (alone %s samples/s); expected step %.3g ms, equal split %.3g ms",
                    ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts)),
                    self._full,
                    listed_rates(rates),
                    1e3 * self._speeds.expected_seconds(counts),
                    1e3 * self._speeds.expected_seconds(equal),
                )
        return counts != before

    def _own_cap(self) -> float:
        """Return the limit of this rank's memory; -1: none is known."""
        cap = self._memory.max_samples() if self._memory is not None else None
        return -1.0 if cap is None else float(cap)

    def _merge_caps(self, measured: Sequence[float]) -> None:
        """Combine the limits that were given with those that were measured."""
        both = zip(self._given_caps, measured, strict=True)
        limits = [
            [cap for cap in (given, int(found) if found >= 0 else None) if cap is not None] for given, found in both
        ]
        self.caps = [min(of_rank, default=None) for of_rank in limits]
