"""Write scalars of a run for TensorBoard: pip install tensorboard, then tensorboard --logdir runs."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from gangline import Module, cpu, create_network
from gangline.data import digits
from gangline.models.loop.callbacks import BatchEndParam
from torch.utils.tensorboard import SummaryWriter


class Scalars:
    """Callback for batches and validations. Steps count batches; a resumed run replaces what follows its checkpoint."""

    def __init__(self, module: Module, folder: str | Path, batch_size: int, period: int = 10) -> None:
        self._module, self._folder, self._batch_size, self._period = module, folder, batch_size, period
        self._events: SummaryWriter | None = None
        self._last = 0, time.perf_counter(), 0.0  # step, time and waiting of the last period

    def __call__(self, param: BatchEndParam) -> None:
        """Write the scalars of a batch, in every period, or of a validation."""
        module = self._module
        if not module.workers.is_first:
            return
        if self._events is None:
            self._events = SummaryWriter(str(self._folder), purge_step=module.step)
            self._last = module.step, time.perf_counter(), module.seconds_waiting
        metrics = param.eval_metric.get_global_name_value()
        if "data" not in param.locals:  # a validation
            self._write({f"validation/{name}": value for name, value in metrics})
        elif module.step % self._period == 0 and param.locals["data"] is not None:
            (step, since, waited), now = self._last, time.perf_counter()
            self._last = module.step, now, module.seconds_waiting
            values = {f"train/{name}": value for name, value in metrics}
            values |= {"train/loss": float(module.get_loss()), "learning_rate": module.learning_rate}
            values["samples_per_second"] = (module.step - step) * self._batch_size / (now - since)
            values["waiting"] = (module.seconds_waiting - waited) / (now - since)
            self._write(values | {f"load_of/{i}": load for i, load in enumerate(module.work_load_list)})

    def _write(self, values: dict[str, float]) -> None:
        assert self._events is not None
        for tag, value in values.items():
            self._events.add_scalar(tag, value, self._module.step)
        self._events.flush()


def main(folder: str | Path = "runs/mlp") -> None:
    """Train a perceptron and write its scalars."""
    train, held_out, _ = digits((1, 28, 28), torch.float32, seed=0)
    with Module(create_network("mlp"), torch.nn.CrossEntropyLoss(), context=[cpu(0), cpu(1)]) as module:
        scalars = Scalars(module, folder, batch_size=64)
        options = {"num_epoch": 2, "batch_size": 64, "optimizer_params": {"lr": 0.1, "momentum": 0.9}}
        module.fit(train, held_out, batch_end_callback=scalars, eval_end_callback=scalars, **options)


if __name__ == "__main__":
    main()
