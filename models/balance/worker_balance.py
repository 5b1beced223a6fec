"""Worker balance: the message that keeps workers in step, and a split of batches that follows their measured speed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from gangline.models.balance.rank_balance import PARTS, Measured
from gangline.models.balance.speed_model import TRIAL_BATCHES, SpeedModel
from gangline.models.data.sources import Item, Source
from gangline.models.elapsed_time import ElapsedTime, Measurements
from gangline.models.workers import Workers

_SECONDS = 0.5
_MOST = 100
"""Bounds of the time between messages, in seconds and batches."""
_AHEAD = 4
"""Batches to prefetch from data of unknown length, to know that at least as many steps follow."""
_SILENT = logging.Logger("gangline.silent", logging.CRITICAL + 1)


class WorkerReport(NamedTuple):
    """Times of a worker in an epoch."""

    computed: float  # seconds of forward and backward
    waited: float  # seconds in which it waited for the store, and through it for other workers, without computing


class WorkerBalance:
    """Keeps the workers of a job in step, and splits batches over them by their measured speeds.

    One message, after the same batches on all workers, carries a worker's stop request and clock, the times of its
    batches since the last message, and the number of batches that it is certain to have. Synchronous workers send it
    after the first update and then about twice a second, at most `_MOST` batches apart; asynchronous workers every
    `_MOST` batches. Workers with batches of their own also send it when the certain batches end, and those whose loads
    follow measured speeds at each epoch's start. The loads are derived from the messages, so they are equal on all
    workers at every batch. The speed of a worker is that of all its contexts, without waits.
    """

    def __init__(self, workers: Workers, logger: logging.Logger, *, best_split: bool) -> None:
        """Start with the loads of ``workers``.

        With ``best_split`` the speed of this worker assumes the best split over its contexts, because their loads also
        follow measured speeds; otherwise the current split.
        """
        self._workers, self._logger, self._best_split = workers, logger, best_split
        self._is_shared = True
        self._computed = 0.0
        self.rhythm: list[Any] = [0, 1, None]
        """Batches since the last message, batches between messages, and the clock at the last one."""
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
        self._measured: deque[Measured] = deque(maxlen=_MOST)  # of this worker, since its last message

    def begin_fit(self, *, is_shared: bool, by_cost: bool) -> None:
        """Prepare for a run of `fit`; ``is_shared``: the workers train parts of the same batches."""
        if by_cost != self._by_cost:
            self._reset(by_cost=by_cost)
        self._is_shared, self._computed = is_shared, 0.0
        self.rhythm = [0, 1 if self._workers.in_step else _MOST, None]
        if self._workers.is_auto and not is_shared and self._workers.is_first:
            self._logger.warning(
                "the loads of the workers are auto, but train_data holds batches of each worker's own, which are not "
                "split; give arrays or a Dataset with the samples of the whole job"
            )

    @property
    def _is_measured(self) -> bool:
        return self._workers.is_auto and self._is_shared

    def begin_epoch(self) -> None:
        """Update the loads from all measurements. Collective if the loads follow measured speeds."""
        if self._is_measured:
            self._exchange()
            if self._speeds.begin_epoch():
                self.rhythm[1] = TRIAL_BATCHES
            self._workers.loads = self._speeds.loads

    def batches(self, source: Source, epoch: int, skip: int = 0, *skipped: Callable[[], None]) -> Iterator[Item | None]:
        """Yield this worker's share of each step's batch, see `Source.parts`. Collective if workers are in step.

        Workers with batches of their own make the same steps: one that has run out of them gets None.
        """
        workers, items = self._workers, source.parts(self._workers, epoch, skip, *skipped)
        if source.is_shared or not workers.in_step:
            yield from items
            return
        number = source.num_batches() if source.length_is_certain else None
        left = None if number is None else max(0, number - skip)
        ahead: deque[Item | None] = deque()
        while True:
            if left is None:
                ahead.extend(islice(items, _AHEAD - len(ahead)))
            steps = self._exchange(len(ahead) if left is None else left)
            if not steps:
                next(items, None)  # draws and drops the skipped batches, although none is left
                return
            for _ in range(steps):
                yield ahead.popleft() if ahead else next(items, None)
            left = None

    def record(self, samples: Sequence[int], times: Sequence[ElapsedTime]) -> None:
        """Record samples and compute time of each replica in a batch. All workers record each batch."""
        cost, self._workers.share_cost = self._workers.share_cost, None
        if self._workers.count > 1:
            of_sample = 1 if cost is None else cost / max(sum(samples), 1)  # replicas share one padded batch
            self._measurements.add([count * of_sample for count in samples], times)
            self._measure()

    def _measure(self, *, wait: bool = False) -> None:
        """Take the times of the batches that are complete; with ``wait``, of all batches."""
        for costs, seconds in self._measurements.take(wait=wait):
            measured = [(cost, took) for cost, took in zip(costs, seconds, strict=True) if cost and took]
            together = max([took for _, took in measured], default=0.0)
            self._computed += together
            if self._best_split and measured:
                together = sum(costs) / sum(cost / took for cost, took in measured)
            self._measured.append(Measured(together, sum(costs)))

    def after_update(self, batches: int) -> None:
        """Count the batches of an update, and exchange messages if they are due. Collective."""
        workers = self._workers
        if workers.count == 1 or not (workers.in_step or self._is_shared):
            return
        self.rhythm[0] += batches
        done, interval, began = self.rhythm
        if done < interval:
            return
        self._exchange()
        if workers.in_step and began is not None:
            seconds = max((self.rhythm[2] - began) / done, 1e-9)
            self.rhythm[1] = max(1, min(2 * interval, int(_SECONDS / seconds), _MOST))

    def _exchange(self, ahead: int = 0) -> int:
        """Exchange messages, and update the loads; return the largest number of batches ``ahead``. Collective."""
        self._measure(wait=True)
        measured = list(self._measured) if self._is_measured else []
        received = self._workers.all_gather([measured, ahead], "step of fit")
        self._measured.clear()
        self.rhythm[::2] = 0, self._workers.clock  # rank 0's, so all workers compute the same interval
        changed = False
        for rows in zip_longest(*(theirs for theirs, _ in received), fillvalue=Measured()):
            seconds, costs, _ = zip(*rows, strict=True)
            changed |= self._speeds.record(costs, seconds)
        if changed:
            self._workers.loads = self._speeds.loads
        return max(int(theirs) for _, theirs in received)

    def report(self, seconds: float, waited: float) -> WorkerReport:
        """Return this worker's times of an epoch of ``seconds``, to be gathered from all workers."""
        self._measure(wait=True)
        computed, self._computed = self._computed, 0.0
        # The host's waits include waits for its own GPU, which computes meanwhile.
        return WorkerReport(computed, max(0.0, min(waited, seconds - computed)))

    def log_epoch(self, epoch: int, reports: Sequence[Any]) -> None:
        """Store each worker's `report` by rank; log them on rank 0."""
        self.reports = [WorkerReport(*report) for report in reports]
        if self._workers.is_first:
            texts = [
                f"worker {rank}: load {load:.3g}, computed {report.computed:.3f} s, waited {report.waited:.3f} s"
                for rank, (load, report) in enumerate(zip(self._workers.loads, self.reports, strict=True))
            ]
            self._logger.info("Epoch[%d] %s", epoch, "; ".join(texts))

    def state(self) -> dict[str, Any] | None:
        """Return plain data for a checkpoint, equal on all workers; None if the loads are fixed."""
        return self._speeds.state() if self._workers.is_auto else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned; with another number of workers, start from equal loads and log a warning."""
        if self._workers.is_auto and state is not None:
            self._speeds.load_state(state)
            self._workers.loads = self._speeds.loads
