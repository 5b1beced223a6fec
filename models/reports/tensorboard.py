"""TensorBoard scalars of the progress of training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.models.arguments import check_int
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.reports.meter import Meter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from gangline.models.module import Module


class TensorBoard:
    """Callback of `fit` that writes loss, metrics, learning rate, throughput and waiting time for TensorBoard.

    Give it to `fit` as batch_end_callback, epoch_end_callback and eval_end_callback. The tags are train/loss,
    train/METRIC, validation/METRIC, learning_rate, samples_per_second, samples_per_second_of/CONTEXT (for several
    contexts), load_of/WORKER and load_of/CONTEXT (for measured loads) and waiting, the fraction of the time in which
    training waited for the store. Steps count batches from the start of the first run; a resumed run replaces the
    scalars after its checkpoint. In a job every worker has a `TensorBoard`, and rank 0 writes; loss, training metric
    and contexts are rank 0's own.
    """

    def __init__(self, module: Module, folder: str | Path, period: int = 10) -> None:
        """Create the folder.

        Args:
            module: module that `fit` trains.
            folder: folder of the event files; created if missing.
            period: updates per point; the loss is their mean, the metric is of the last batch.

        Raises:
            ImportError: if the package tensorboard is not installed.
            ValueError: if ``folder`` is a file, or ``period`` is below 1.
        """
        _writer()
        check_int("period", period)
        self.folder, self.period = Path(folder), period
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{folder} is a file; expected a folder for TensorBoard's event files")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._module = module
        self._meter = Meter(module)
        self._events: SummaryWriter | None = None
        self._begun = 0.0

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        """Record a batch, a validation or the end of an epoch."""
        if not self._module.workers.is_first:
            return
        if not isinstance(when, BatchEndParam):
            self._meter.pause()
        elif "data" in when.locals:  # a batch; the locals of a validation have no data
            self._count(when)
        elif self._events is not None:
            for name, value in when.eval_metric.get_global_name_value():
                self._events.add_scalar(f"validation/{name}", value, self._module.step)
            self._events.flush()
            self._meter.pause()

    def close(self) -> None:
        """Write the last point; `fit` calls this when it ends."""
        if self._events is not None:
            self._add_point()
            self._events.close()
            self._events = None

    def _count(self, param: BatchEndParam) -> None:
        if self._events is None:
            begins_at = self._module.step - param.batches
            self._events = _writer()(str(self.folder), purge_step=begins_at + 1)
            self._meter.begin_run()
            self._begun = time.perf_counter()
        last = self._meter.pending.updates + 1 >= self.period
        self._meter.count(param, measure=last)
        if last:
            self._add_point()

    def _add_point(self) -> None:
        if not self._meter.pending.updates or self._events is None:
            return
        point = self._meter.point(time.perf_counter() - self._begun)
        values = {f"train/{name}": value for name, value in point.metrics.items()}
        if point.loss is not None:
            values["train/loss"] = point.loss
        values["learning_rate"] = point.learning_rate
        if point.seconds:  # the time of a run's first update is not counted
            values["samples_per_second"] = point.total / point.seconds
            values["waiting"] = point.waiting / point.seconds
            if len(point.samples) > 1:
                for label, samples in point.samples.items():
                    values[f"samples_per_second_of/{label}"] = samples / point.seconds
        if self._module.workers.is_auto:
            for rank, load in enumerate(self._module.workers.loads):
                values[f"load_of/worker {rank}"] = load
        if self._module.load_balancer is not None and len(point.samples) > 1:
            for label, load in zip(point.samples, self._module.work_load_list, strict=True):
                values[f"load_of/{label}"] = load
        for tag, value in values.items():
            self._events.add_scalar(tag, value, point.step)


def _writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard needs the package tensorboard ({error}): pip install tensorboard") from error
    return SummaryWriter
