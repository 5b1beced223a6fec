"""Rank balance: the samples of each rank in each global batch, from the ranks' speeds and limits of memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gangline.collectives.workload import split_within
from gangline.models.balance.balancer import Balancer, ElapsedTime, MemoryLimits, samples_that_fit
from gangline.models.balance.rank_timer import RankTimer
from gangline.models.balance.speed_model import SpeedModel, listed_rates
from gangline.models.console_log import log_to_stderr

_log = logging.getLogger("gangline")
_LOGGED_FROM = 8  # batches after which equal ranks are recognized


class _Split(NamedTuple):
    first: int  # global batch at which it takes effect
    loads: list[float]
    caps: list[int | None]


class RankBalance:
    """Decides how many samples of a global batch each rank gets; all ranks make the same decision.

    Each rank calls `begin_epoch` before every epoch and `begin_batch` before every batch. After another 2, 4, 8, ...,
    64 counted batches, and at the start of an epoch, the ranks exchange their times and derive the same loads from
    them. The first batch of a split, and smaller batches, are not counted.

    Up to ``horizon`` batches are prefetched, so new loads take effect at the first batch that no rank has drawn.
    """

    def __init__(
        self,
        rank: int,
        loads: Sequence[float],
        all_gather: Callable[[Any], list[Any]],
        timer: RankTimer | None = None,
        *,
        horizon: int = 0,
        device: torch.device | None = None,
        caps: Sequence[int | None] | None = None,
        minimum: int = 1,
    ) -> None:
        """Start with these loads; without ``timer``, which measures this rank, they are fixed.

        Each rank draws at most ``horizon`` batches ahead. The memory of ``device`` limits the growth of this rank's
        share, and ``caps`` that of each rank. ``minimum`` is the smallest share that is not empty.
        """
        self.timer, self.minimum = timer, minimum
        self._rank, self._size, self._all_gather, self._horizon = rank, len(loads), all_gather, horizon
        self._device = device
        names = [f"rank {number}" for number in range(self._size)]
        self._limits = MemoryLimits(names, max_samples=caps)
        speeds = SpeedModel(names, None, minimum=minimum, may_idle=False, averages=True, counts_first=True)
        self._speeds, self._balancer = speeds, Balancer(speeds)
        self.caps = list(self._limits.max_samples)
        """Maximum share of each rank; None: no limit is known."""
        self._splits = [_Split(0, [float(load) for load in loads], list(self.caps))]  # ascending
        self._counts: list[int] = []  # samples of each rank in the current batch
        self._counts_of_full: list[int] = []  # the same in the last full batch
        self._is_counted = False
        self._full = 0  # samples of the largest global batch
        self._largest = 0  # samples of this rank's largest share
        self._counted, self._next_exchange = 0, speeds.interval  # batches so far, and at the next exchange
        self._is_unlogged = True
        self.close = weakref.finalize(self, timer.close if timer is not None else lambda: None)
        """Remove the hooks of the model."""

    @property
    def loads(self) -> list[float]:
        """Latest loads, which may begin with a later batch."""
        return list(self._splits[-1].loads)

    def set_loads(self, loads: Sequence[float], batch: int | None) -> None:
        """Use these loads, and the current caps, from the first batch that no rank has drawn. All ranks call it.

        ``batch`` is the number of the current batch, from the start of the job; None: no batch was drawn.
        """
        first = 0 if batch is None else batch + self._horizon
        self._splits = [split for split in self._splits if split.first < first]
        self._splits.append(_Split(first, list(loads), list(self.caps)))

    def counts(self, batch: int, size: int) -> list[int]:
        """Return each rank's samples in a global batch of ``size``; no share is empty if there are enough samples."""
        while len(self._splits) > 1 and self._splits[1].first <= batch - 2 * self._horizon:
            self._splits.pop(0)  # no longer needed, even by a rank that is behind
        split = next(split for split in reversed(self._splits) if split.first <= batch)
        return split_within(size, split.loads, split.caps, self.minimum)

    def begin_batch(self, batch: int, counts: Sequence[int]) -> None:
        """Begin a batch with these samples of each rank; update the loads first if that is due. Collective."""
        self._end_batch()
        if self.timer is not None and self._counted >= self._next_exchange:
            self._exchange(batch)
        self._counts = list(counts)
        self._full = max(self._full, sum(counts))
        is_full = sum(counts) == self._full
        self._is_counted = is_full and self._counts == self._counts_of_full
        if is_full:
            self._counts_of_full = self._counts

    def begin_epoch(self) -> None:
        """Update the loads from the epoch before. Collective."""
        self._end_batch()
        self._counts = []
        if self.timer is not None and self._counted > 0:
            self._exchange(None)

    def discard_batch(self, batch: int, out_of_memory: Mapping[int, int]) -> None:
        """Do not count the current batch, which some ranks skipped. All ranks call it with the same arguments.

        Ranks in ``out_of_memory`` get at most half of these samples from now on, if other ranks have room.
        """
        self._is_counted = False
        self._limits.halve(out_of_memory)
        for rank in out_of_memory:
            self.caps[rank] = self._limits.max_samples[rank]
        self.set_loads(self.loads, batch + 1)

    def state(self) -> dict[str, Any]:
        """Return loads and speeds as plain data."""
        return {"loads": self.loads, "speeds": self._speeds.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, before a batch is drawn; speeds of other ranks are measured again."""
        loads = self.loads
        if self.timer is not None and len(state["loads"]) == self._size:
            self._speeds.load_state(state["speeds"])
            loads = [float(load) for load in state["loads"]]
        self.set_loads(loads, None)

    def _end_batch(self) -> None:
        """Record this rank's time of the last batch."""
        if self.timer is None:
            return
        samples = self._counts[self._rank] if self._counts else 0
        self._largest = max(self._largest, samples)
        time = self.timer.take()
        if self._is_counted:
            self._balancer.record(self._counted, [samples], [time or ElapsedTime()])
        self._counted += self._is_counted
        self._is_counted = False

    def _exchange(self, batch: int | None) -> None:
        """Exchange times and limits of memory, and update the loads."""
        fits = None if self._device is None else samples_that_fit(self._device, self._largest)
        rows = self._all_gather((self._balancer.message(), fits))
        both = zip(self._limits.max_samples, (limit for _, limit in rows), strict=True)
        self.caps = [min((cap for cap in limits if cap is not None), default=None) for limits in both]
        self._speeds.caps = list(self.caps)
        before = split_within(self._full, self.loads, self.caps, self.minimum)
        loads = self.loads
        if self._balancer.receive([measured for measured, _ in rows], now=True):
            loads = list(self._speeds.loads)
        self._next_exchange = self._counted + self._speeds.interval
        counts = split_within(self._full, loads, self.caps, self.minimum)
        self._log_split(counts, is_new=counts != before)
        if counts != before:
            self.set_loads(loads, batch)

    def _log_split(self, counts: Sequence[int], *, is_new: bool) -> None:
        rates = self._speeds.rates(self._full)
        if self._rank or not rates or not (is_new or (self._is_unlogged and self._counted >= _LOGGED_FROM)):
            return
        self._is_unlogged = False
        equal = split_within(self._full, [1] * self._size, self.caps, self.minimum)
        with log_to_stderr():
            _log.info(
                "balance: %s%s of %d samples (alone %s samples/s); expected step %.3g ms, equal split %.3g ms",
                "the split stays equal so far, " if counts == equal else "",
                ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts)),
                self._full,
                listed_rates(rates),
                1e3 * self._speeds.expected_seconds(counts),
                1e3 * self._speeds.expected_seconds(equal),
            )


def checked_caps(memory: Sequence[int], size: int, global_batch: int) -> list[int | None]:
    """Return the user's maximum shares; ValueError if their sum is below the global batch."""
    caps = list(memory)
    if len(caps) != size or not all(isinstance(cap, int) and cap >= 1 for cap in caps):
        raise ValueError(f"memory is {caps}; expected a maximum number of samples for each of {size} ranks, 1 or more")
    if sum(caps) < global_batch:
        raise ValueError(
            f"memory is {caps}, together {sum(caps)} samples; expected the global batch of {global_batch} or more: "
            f"raise them, or pass global_batch={sum(caps)} and accumulate gradients over more batches"
        )
    return list(caps)
