"""TensorBoard scalars of the progress of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gangline.models.arguments import check_int
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.reports.record import Point
from gangline.models.reports.report import Report

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from gangline.models.module import Module


class TensorBoard(Report):
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
        super().__init__(module)
        self.updates_per_point = period

    def _begin(self, param: BatchEndParam) -> None:
        self._events = _writer()(str(self.folder), purge_step=self._module.step - param.batches + 1)

    def _add_validation(self, param: BatchEndParam) -> None:
        for name, value in param.eval_metric.get_global_name_value():
            self._events.add_scalar(f"validation/{name}", value, self._module.step)
        self._events.flush()

    def _add(self, point: Point) -> None:
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
            values |= {f"load_of/worker {rank}": load for rank, load in enumerate(self._module.workers.loads)}
        if self._module.load_balancer is not None and len(point.samples) > 1:
            loads = zip(point.samples, self._module.work_load_list, strict=True)
            values |= {f"load_of/{label}": load for label, load in loads}
        for tag, value in values.items():
            self._events.add_scalar(tag, value, point.step)

    def _end(self) -> None:
        self._events.close()


def _writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"TensorBoard needs the package tensorboard ({error}): pip install tensorboard") from error
    return SummaryWriter
