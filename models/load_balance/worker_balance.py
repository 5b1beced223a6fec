"""Load balancing between workers: their times of computing and waiting, and a split that follows measured speed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gangline.models.executor.executor import ElapsedTime
from gangline.models.load_balance.speed_model import SpeedModel
from gangline.models.workers import Workers

_SENT = 32
"""Measured batches in a message, the newest: what a look at the speeds needs, and less than a kilobyte."""
_TRIAL_BATCHES = 3
"""Batches of a worker that was idle, after which its speed is looked at, as in `SpeedModel`."""
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


@dataclass(frozen=True)
class _Batch:
    """A training batch of a worker, by replica."""

    step: int
    samples: list[int]
    times: list[ElapsedTime]
    in_turn: bool

    def seconds(self, *, best_split: bool) -> float:
        """Return the time of all replicas together, with their present split or the one that suits their speeds."""
        measured = [
            (count, seconds)
            for count, time in zip(self.samples, self.times, strict=True)
            if count and (seconds := time.seconds()) is not None
        ]
        if self.in_turn:
            return sum(seconds for _, seconds in measured)
        if best_split and measured:
            return sum(self.samples) / sum(count / seconds for count, seconds in measured)
        return max((seconds for _, seconds in measured), default=0.0)


class WorkerBalance:
    """Measures this worker while it trains, and splits batches over the workers of the job by their measured speeds.

    The speed of a worker is that of its contexts together, without the time it waits. All workers derive the loads from
    the same measurements of all, which travel with messages that are sent anyway, the exchanges of stop requests, and
    with one at each epoch's start. So the loads are equal on all workers at every batch.
    """

    def __init__(self, workers: Workers, logger: logging.Logger, *, best_split: bool) -> None:
        """Start with the loads of ``workers``.

        Args:
            workers: the workers of the job; if their loads follow measured speeds, they are changed here.
            logger: receives one line per change of the loads, on rank 0.
            best_split: the speed of this worker is that of its contexts with the best split over them, because their
                loads follow measured speeds too; otherwise that with the present split.
        """
        self._workers, self._logger, self._best_split = workers, logger, best_split
        self._speeds: SpeedModel | None = None
        if workers.is_auto:
            names = [f"worker {rank}" for rank in range(workers.count)]
            log = logger if workers.is_first else _SILENT
            self._speeds = SpeedModel(names, log, minimum=workers.minimum, averages=True)
        self._pending: deque[_Batch] = deque()  # batches that a GPU may still compute
        self._unsent: deque[tuple[int, int, float]] = deque(maxlen=_SENT)  # (step, samples, seconds)
        self._received: dict[int, dict[int, tuple[int, float]]] = {}  # by step and rank
        self._is_shared, self._reads_ahead = True, 0
        self._trial_left: int | None = None
        self._computed = 0.0
        self.reports: list[WorkerReport] = []
        """Times of all workers in the last epoch, by rank; empty before its end."""

    def record(self, step: int, samples: Sequence[int], times: Sequence[ElapsedTime], *, in_turn: bool) -> None:
        """Record a training batch of this worker.

        Args:
            step: number of the batch, equal on all workers.
            samples: samples of each replica; all 0 if the worker had none.
            times: working time of each replica.
            in_turn: True if the replicas ran one after another.
        """
        if self._workers.count > 1:
            self._pending.append(_Batch(step, list(samples), list(times), in_turn))
            self._measure_finished(wait=False)
            if self._trial_left is not None:
                self._trial_left -= 1

    def _measure_finished(self, *, wait: bool) -> None:
        """Measure the batches that the contexts have finished; with ``wait``, all of them."""
        while self._pending and (wait or all(time.is_complete() for time in self._pending[0].times)):
            batch = self._pending.popleft()
            self._computed += batch.seconds(best_split=False)
            self._unsent.append((batch.step, sum(batch.samples), batch.seconds(best_split=self._best_split)))

    def begin_fit(self, *, is_shared: bool, reads_ahead: int) -> None:
        """Prepare for a run of `fit`, with the same arguments on all workers.

        Args:
            is_shared: True if each worker takes its share of common batches, False if it has batches of its own.
            reads_ahead: batches that a worker may have begun to read before their turn.
        """
        self._is_shared, self._reads_ahead = is_shared, reads_ahead
        self._computed = 0.0
        if self._speeds is not None and not is_shared and self._workers.is_first:
            self._logger.warning(
                "the loads of the workers are auto, but train_data holds batches of each worker's own, which are not "
                "split; give arrays or a Dataset with the samples of the whole job"
            )

    @property
    def is_urgent(self) -> bool:
        """True if messages should be exchanged now, because the trial of an idle worker is over; equal on all."""
        return self._trial_left is not None and self._trial_left <= 0

    def message(self) -> Any:
        """Return the measurements since the last message, as plain data, to be gathered from all workers."""
        if self._speeds is None or not self._is_shared:
            return None
        self._measure_finished(wait=self.is_urgent)
        unsent = [list(measured) for measured in self._unsent]
        self._unsent.clear()
        return unsent

    def receive(self, messages: Sequence[Any], batch: int) -> None:
        """Take in the messages of all workers, and update the loads if it is due.

        Args:
            messages: one per worker, by rank.
            batch: index of the next batch of the epoch.
        """
        if self._speeds is None or not self._is_shared:
            return
        if self.is_urgent:
            self._trial_left = None
        self._record(self._speeds, messages)
        if self._speeds.due() and self._speeds.update_loads():
            self._workers.set_loads(self._speeds.loads, batch + self._reads_ahead)

    def _record(self, speeds: SpeedModel, messages: Sequence[Any]) -> None:
        """Record the batches that all workers have measured."""
        for rank, measured in enumerate(messages):
            for step, samples, seconds in measured:
                self._received.setdefault(step, {})[rank] = samples, seconds
        complete = sorted(step for step, ranks in self._received.items() if len(ranks) == self._workers.count)
        for step in complete:
            ranks = self._received[step]
            measurements = [ranks[rank] for rank in range(self._workers.count)]
            speeds.record([samples for samples, _ in measurements], [seconds for _, seconds in measurements])
        if complete:  # every worker finishes its batches in order
            self._received = {step: ranks for step, ranks in self._received.items() if step > complete[-1]}

    def begin_epoch(self) -> None:
        """Update the loads from all measurements. Collective if the loads follow measured speeds."""
        if self._speeds is None or not self._is_shared:
            return
        self._measure_finished(wait=True)
        self._record(self._speeds, self._workers.all_gather(self.message(), "begin_epoch"))
        self._speeds.update_loads()
        was_idle = 0 in self._speeds.loads
        self._speeds.begin_epoch()  # may try idle workers
        self._trial_left = _TRIAL_BATCHES if was_idle and 0 not in self._speeds.loads else None
        self._workers.set_loads(self._speeds.loads)

    def report(self, seconds: float, waited: float, context_loads: Sequence[float]) -> list[Any]:
        """Return this worker's times of an epoch, as plain data, to be gathered from all workers.

        Args:
            seconds: duration of the epoch's training.
            waited: seconds in which its steps have waited for the store.
            context_loads: loads of its contexts.
        """
        self._measure_finished(wait=True)
        computed, self._computed = self._computed, 0.0
        # The host waits for its own GPU too, which computes meanwhile.
        return [computed, max(0.0, min(waited, seconds - computed)), list(context_loads)]

    def log_epoch(self, epoch: int, reports: Sequence[Any]) -> None:
        """Take in the `report` of each worker, by rank; log them on rank 0."""
        self.reports = [WorkerReport(*report) for report in reports]
        if self._workers.is_first:
            loads = self._workers.loads
            texts = [_described(rank, loads[rank], report) for rank, report in enumerate(self.reports)]
            self._logger.info("Epoch[%d] %s", epoch, "; ".join(texts))

    def state(self) -> dict[str, Any] | None:
        """Return plain data for a checkpoint, equal on all workers; None if the loads are fixed."""
        return self._speeds.state() if self._speeds is not None else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned; with another number of workers, start from equal loads and log a warning."""
        if self._speeds is not None and state is not None:
            self._speeds.load_state(state)
            self._workers.set_loads(self._speeds.loads)


def _described(rank: int, load: float, report: WorkerReport) -> str:
    contexts = report.context_loads
    split = f" (contexts {', '.join(f'{each:.3g}' for each in contexts)})" if len(contexts) > 1 else ""
    return f"worker {rank}: load {load:.3g}{split}, computed {report.computed:.3f} s, waited {report.waited:.3f} s"
