"""Load balancing between workers: their times of computing and waiting, and a split that follows measured speed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gangline.models.balance.rank_balance import PARTS
from gangline.models.balance.speed_model import TRIAL_BATCHES, SpeedModel
from gangline.models.elapsed_time import ElapsedTime, Measurements
from gangline.models.workers import Workers

_MOST = 64
"""Maximum number of batches in a message, about 2 KB."""
_SILENT = logging.Logger("gangline.silent", logging.CRITICAL + 1)


@dataclass(frozen=True)
class WorkerReport:
    """Times of a worker in an epoch."""

    computed: float
    """Seconds of forward and backward."""
    waited: float
    """Seconds in which it waited for the store, and through it for other workers, without computing."""
    context_loads: list[float]
    """Loads of its contexts at the end."""


class WorkerBalance:
    """Measures this worker while it trains, and splits batches over the workers of the job by their measured speeds.

    The speed of a worker is that of all its contexts, without waits. Measurements are piggybacked on the exchanges of
    stop requests, plus one message at each epoch's start. All workers derive the loads from the same measurements, so
    the loads are equal on all workers at every batch.
    """

    def __init__(self, workers: Workers, logger: logging.Logger, *, best_split: bool) -> None:
        """Start with the loads of ``workers``.

        With ``best_split`` the speed of this worker assumes the best split over its contexts, because their loads also
        follow measured speeds; otherwise the current split.
        """
        self._workers, self._logger, self._best_split = workers, logger, best_split
        self._is_shared, self._reads_ahead, self._in_turn = True, 0, False
        self._trial_left: int | None = None
        self._computed = 0.0
        self.reports: list[WorkerReport] = []
        """Times of all workers in the last epoch, by rank; empty before its end."""
        self._reset(by_cost=False)

    def _reset(self, *, by_cost: bool) -> None:
        """Measure anew, from equal loads; with ``by_cost`` these are of the samples' lengths, and no worker is idle."""
        names, self._by_cost = [f"worker {rank}" for rank in range(self._workers.count)], by_cost
        logger = self._logger if self._workers.is_first else _SILENT
        minimum, parts = (1, PARTS) if by_cost else (self._workers.minimum, None)
        self._speeds = SpeedModel(names, logger, minimum=minimum, may_idle=not by_cost, parts=parts)
        self._measurements = Measurements()  # of this worker's replicas
        self._unsent: deque[list[float]] = deque(maxlen=_MOST)  # cost and seconds of this worker in each batch
        self._received: list[deque[list[float]]] = [deque(maxlen=_MOST) for _ in names]  # the same of all workers

    def record(self, samples: Sequence[int], times: Sequence[ElapsedTime], *, in_turn: bool) -> None:
        """Record samples and compute time of each replica in a batch. All workers record each batch."""
        cost, self._workers.share_cost = self._workers.share_cost, None
        if self._workers.count > 1:
            self._in_turn = in_turn
            of_sample = 1 if cost is None else cost / max(sum(samples), 1)  # replicas share one padded batch
            self._measurements.add([count * of_sample for count in samples], times)
            self._measure()
            if self._trial_left is not None:
                self._trial_left -= 1

    def _measure(self, *, wait: bool = False) -> None:
        """Take the times of the batches that are complete; with ``wait``, of all batches."""
        for costs, seconds in self._measurements.take(wait=wait):
            measured = [(cost, took) for cost, took in zip(costs, seconds, strict=True) if cost and took]
            times = [took for _, took in measured]
            together = sum(times) if self._in_turn else max(times, default=0.0)
            self._computed += together
            if self._best_split and measured and not self._in_turn:
                together = sum(costs) / sum(cost / took for cost, took in measured)
            if self._is_measured:
                self._unsent.append([sum(costs), together])

    def begin_fit(self, *, is_shared: bool, reads_ahead: int, by_cost: bool) -> None:
        """Prepare for a run of `fit`; ``reads_ahead`` is the number of batches that a worker may read early."""
        if by_cost != self._by_cost:
            self._reset(by_cost=by_cost)
        self._is_shared, self._reads_ahead = is_shared, reads_ahead
        self._computed = 0.0
        if self._workers.is_auto and not is_shared and self._workers.is_first:
            self._logger.warning(
                "the loads of the workers are auto, but train_data holds batches of each worker's own, which are not "
                "split; give arrays or a Dataset with the samples of the whole job"
            )

    @property
    def _is_measured(self) -> bool:
        return self._workers.is_auto and self._is_shared

    @property
    def is_urgent(self) -> bool:
        """True, on all workers, if messages should be exchanged now because the trial of an idle worker is over."""
        return self._trial_left is not None and self._trial_left <= 0

    def message(self, *, wait: bool = False) -> list[list[float]]:
        """Return what was measured since the last message, for `receive`; with ``wait``, of all batches."""
        self._measure(wait=wait or self.is_urgent)
        message = list(self._unsent)
        self._unsent.clear()
        return message

    def receive(self, messages: Sequence[Any], batch: int) -> None:
        """Record all workers' messages before the batch with this index, and update the loads if due."""
        if self.is_urgent:
            self._trial_left = None
        for received, message in zip(self._received, messages, strict=True):
            received.extend(message)
        changed = False
        while all(self._received):
            costs, seconds = zip(*(received.popleft() for received in self._received), strict=True)
            changed |= self._speeds.record(costs, seconds)
        if changed:
            self._workers.set_loads(self._speeds.loads, batch + self._reads_ahead)

    def begin_epoch(self) -> None:
        """Update the loads from all measurements. Collective if the loads follow measured speeds."""
        if self._is_measured:
            self.receive(self._workers.all_gather(self.message(wait=True), "begin_epoch"), 0)
            self._trial_left = TRIAL_BATCHES if self._speeds.begin_epoch() else None
            self._workers.set_loads(self._speeds.loads)

    def report(self, seconds: float, waited: float, context_loads: Sequence[float]) -> list[Any]:
        """Return this worker's times of an epoch of ``seconds``, as plain data, to be gathered from all workers."""
        self._measure(wait=True)
        computed, self._computed = self._computed, 0.0
        # The host's waits include waits for its own GPU, which computes meanwhile.
        return [computed, max(0.0, min(waited, seconds - computed)), list(context_loads)]

    def log_epoch(self, epoch: int, reports: Sequence[Any]) -> None:
        """Store each worker's `report` by rank; log them on rank 0."""
        self.reports = [WorkerReport(*report) for report in reports]
        if self._workers.is_first:
            loads = self._workers.loads
            texts = [_described(rank, loads[rank], report) for rank, report in enumerate(self.reports)]
            self._logger.info("Epoch[%d] %s", epoch, "; ".join(texts))

    def state(self) -> dict[str, Any] | None:
        """Return plain data for a checkpoint, equal on all workers; None if the loads are fixed."""
        return self._speeds.state() if self._workers.is_auto else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned; with another number of workers, start from equal loads and log a warning."""
        if self._workers.is_auto and state is not None:
            self._speeds.load_state(state)
            self._workers.set_loads(self._speeds.loads)


def _described(rank: int, load: float, report: WorkerReport) -> str:
    contexts = report.context_loads
    split = f" (contexts {', '.join(f'{each:.3g}' for each in contexts)})" if len(contexts) > 1 else ""
    return f"worker {rank}: load {load:.3g}{split}, computed {report.computed:.3f} s, waited {report.waited:.3f} s"
