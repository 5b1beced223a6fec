"""Rank balance: the part of each rank in each global batch, from the ranks' speeds and limits of memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gangline.models.balance.speed_model import WINDOW, SpeedModel, listed_rates, step_seconds
from gangline.models.console_log import log_to_stderr
from gangline.models.data.shares import ranks_by_speed, split_of
from gangline.models.elapsed_time import Measurements
from gangline.models.rank_timer import RankTimer

_log = logging.getLogger("gangline")
PARTS = 4096  # into which the cost of a global batch can be cut
_USED = 0.9  # part of the free memory for growing shares; the remainder is for fragmentation
_COMPARED = 32  # batches whose times show whether lengths explain them
_CLEARLY = 1.25  # ratio of variations that is no chance
_LOGGED_CHANGE = 0.1  # change of a share, relative to an equal one, that is logged


class Measured(NamedTuple):
    """Measurements of a rank since its last message."""

    seconds: float = 0.0  # of the batches whose time is known since the last message, without waits for other ranks
    cost: float = 0.0  # of these batches: samples, or what ``lengths`` count
    limit: float = 0.0  # largest cost of a share that fits into the memory of the rank; 0: unknown


class RankBalance:
    """Decides which part of a global batch each rank gets; all ranks make the same decision.

    Each message about the next batches carries what its rank measured since the one before (`measured`); `receive`
    takes those of all ranks. A global batch is cut by the `split` at the time when its samples are known, which all
    ranks read equally far ahead.
    """

    def __init__(
        self,
        rank: int,
        loads: Sequence[float],
        timer: RankTimer | None = None,
        *,
        horizon: int = 0,
        device: torch.device | None = None,
        caps: Sequence[int | None] | None = None,
        minimum: int = 1,
        by_cost: bool = False,
    ) -> None:
        """Start with these loads; without ``timer``, which measures this rank, they are fixed.

        At most ``horizon`` batches are read ahead. The memory of ``device`` limits the growth of this rank's share, and
        ``caps`` that of each rank. ``minimum`` is the smallest share that is not empty. With ``by_cost`` loads and caps
        are of the samples' lengths, not of their number.
        """
        self.timer, self._horizon, self._device, self._by_cost = timer, horizon, device, by_cost
        names, parts = [f"rank {number}" for number in range(len(loads))], PARTS if by_cost else None
        self._speeds = SpeedModel(names, None, minimum=1 if by_cost else minimum, may_idle=False, parts=parts)
        self._kept_caps = list(caps or [None] * len(loads))  # the user's, or after an out-of-memory error
        self.split = split_of(rank, [*map(float, loads)], minimum, self._kept_caps[:])
        self._measurements = Measurements()
        self._cost, self._samples = 0.0, 0  # of this rank's shares since the last message
        self._recent: list[tuple[float, float]] | None = [] if by_cost and not rank else None
        self._largest = 0.0  # of this rank's shares
        self._limit = 0.0  # what fits into this rank's memory
        self._full = 0.0  # cost of the largest global batch
        self._batches = 0
        self._counted_from = 0  # batch from which measurements are of the newest loads
        self._logged: list[float] = []  # loads of the last log line

    def set_loads(self, loads: Sequence[float]) -> None:
        """Use these loads for batches that are read from now on. All ranks call it."""
        self._speeds.loads = [*map(float, loads)]
        order = ranks_by_speed(loads, self.split.order)
        self.split = self.split._replace(loads=self._speeds.loads, order=order)

    def begin_batch(self, cost: float, samples: int = 0) -> None:
        """Begin to measure a batch in which this rank's share has this cost; 0: it has no samples."""
        self._cost, self._samples = self._cost + cost, self._samples + samples
        self._largest = max(self._largest, cost)

    def drop_time(self) -> None:
        """Do not count the current batch."""
        if self.timer is not None:
            self.timer.take()
        self._cost, self._samples = 0.0, 0

    def measured(self) -> Measured:
        """End the batches begun since the last call; return what all ranks must know of this one."""
        if self.timer is None:
            return Measured()
        time = self.timer.take()
        if time is not None and self._cost:
            self._measurements.add([self._cost, self._samples], [time])
        self._cost, self._samples = 0.0, 0
        seconds = cost = 0.0
        for (cost_of_batch, samples), (took,) in self._measurements.take():
            if took:
                seconds, cost = seconds + took, cost + cost_of_batch
                self._compare(took / cost_of_batch, took / max(samples, 1))
        if self._device is not None and not self._batches % WINDOW:
            self._limit = samples_that_fit(self._device, int(self._largest)) or 0.0
        self._batches += 1
        return Measured(seconds, cost, self._limit)

    def _compare(self, seconds_per_cost: float, seconds_per_sample: float) -> None:
        """Log once if the times of steps follow the number of samples more than what ``lengths`` say."""
        if self._recent is None:
            return
        self._recent.append((seconds_per_cost, seconds_per_sample))
        if len(self._recent) < _COMPARED:
            return
        by_cost, by_samples = (np.std(column) / np.mean(column) for column in zip(*self._recent, strict=True))
        self._recent = [] if by_cost <= _CLEARLY * by_samples else None
        if self._recent is None:
            with log_to_stderr():
                _log.info(
                    "balance: step times follow the number of samples more than lengths= (seconds per unit of length "
                    "vary by %.0f %%, seconds per sample by %.0f %%); expected the cost of a sample, as in time",
                    100 * by_cost,
                    100 * by_samples,
                )

    def receive(self, batch: int, rows: Sequence[Measured], cost: float) -> None:
        """Take the measurements of all ranks before this batch, and update the loads. All ranks call it.

        ``cost`` is that of the batch's samples without padding.
        """
        self._full = max(self._full, cost)
        if self.timer is None:
            return
        both = zip(self._kept_caps, (int(row.limit) or None for row in rows), strict=True)
        caps = [min((cap for cap in limits if cap is not None), default=None) for limits in both]
        if caps != self.split.caps:
            self.split = self.split._replace(caps=caps)
        part = self._full / PARTS if self._by_cost else 1.0
        self._speeds.caps = [None if cap is None else int(cap / (part or 1.0)) for cap in caps]
        is_counted = batch > self._counted_from and any(row.cost for row in rows)
        is_new = is_counted and self._speeds.record([row.cost for row in rows], [row.seconds for row in rows])
        if is_new:
            self.set_loads(self._speeds.loads)
            self._counted_from = batch + self._horizon + 1
        if is_new or self._batches == WINDOW:
            self._log_split()

    def discard_batch(self, out_of_memory: Mapping[int, int]) -> None:
        """Do not count the current batch, in which a rank had no gradient. All ranks call it with the same.

        Ranks that ran out of memory with these shares get at most half of them from now on, if others have room.
        """
        self.drop_time()
        caps = list(self.split.caps)
        for rank, share in out_of_memory.items():
            cap = self._kept_caps[rank]
            self._kept_caps[rank] = caps[rank] = max(1, share // 2 if cap is None else min(cap, share // 2))
        self.split = self.split._replace(caps=caps)

    def state(self) -> dict[str, Any]:
        """Return loads and speeds as plain data."""
        return {"loads": list(self.split.loads), "speeds": self._speeds.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, before a batch is read; speeds of other ranks are measured again."""
        if self.timer is not None and len(state["loads"]) == len(self.split.loads):
            self.set_loads(state["loads"])
            self._speeds.load_state(state["speeds"])

    def _log_split(self) -> None:
        """Log the split on rank 0, if it differs noticeably from the one that was logged last."""
        loads, speeds, full, ranks = self._speeds.loads, self._speeds.speeds(), self._full, len(self.split.loads)
        changes = [abs(load - logged) * ranks for load, logged in zip(loads, self._logged, strict=False)]
        if self.split.rank or not speeds or max(changes, default=1.0) <= _LOGGED_CHANGE:
            return
        kept = f"the split stays equal so far, {self._speeds.why_kept()}: "
        reason = "" if len(set(loads)) > 1 else "the split becomes equal again: " if self._logged else kept
        self._logged, rates = loads, [1 / speed for speed in speeds]
        if self._by_cost:
            costs, shown = [load * full for load in loads], [f"{load:.0%}" for load in loads]
            whole, unit = f"{full:.3g} units of length", "units"
        else:
            costs = [*map(float, self.split.counts(int(full)))]
            shown, whole, unit = [f"{cost:.0f}" for cost in costs], f"{int(full)} samples", "samples"
        with log_to_stderr():
            _log.info(
                "balance: %s%s of %s (%s %s/s); expected step %.3g ms, equal split %.3g ms",
                reason,
                ", ".join(f"rank {rank} {share}" for rank, share in enumerate(shown)),
                whole,
                listed_rates(speeds),
                unit,
                1e3 * step_seconds(costs, rates),
                1e3 * step_seconds([full / ranks] * ranks, rates),
            )


def checked_caps(max_share: Sequence[Any], size: int, global_batch: int) -> list[int | None]:
    """Return the user's maximum shares; ValueError if their sum is below the global batch."""
    caps = list(max_share)
    if len(caps) != size or not all(isinstance(cap, int) and cap >= 1 for cap in caps):
        raise ValueError(
            f"max_share is {caps}; expected a maximum number of samples for each of {size} ranks, 1 or more"
        )
    if sum(caps) < global_batch:
        raise ValueError(
            f"max_share is {caps}, together {sum(caps)} samples; expected the global batch of {global_batch} or more: "
            f"raise them, or pass global_batch={sum(caps)} and accumulate gradients over more batches"
        )
    return caps


def samples_that_fit(device: torch.device, samples: int) -> int | None:
    """Predict from the memory peak of real training steps the largest share that fits; call it between two steps.

    Memory allocated between steps, such as weights and optimizer state, does not grow with the share. Memory that a
    step adds is assumed to grow in proportion, although a part of it does not.

    Returns:
        At least ``samples``, the largest share that this rank has trained; None: no limit is known, as on CPUs.
    """
    if device.type != "cuda" or not samples:
        return None
    peak, fixed = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    return samples + max(0, int(_USED * room * samples / max(peak - fixed, 1)))
