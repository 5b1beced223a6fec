"""score and predict, written on Module's verbs alone; by several workers, who share the data out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from gangline.models.data.batches import concat, map_tensors
from gangline.models.data.sources import Item, Source, source
from gangline.models.loop.callbacks import BatchCallback, BatchEndParam
from gangline.models.metrics.metric import EvalMetric, create
from gangline.models.workers import Workers

if TYPE_CHECKING:
    from gangline.models.module import Module


def score(
    module: Module,
    eval_data: Any,
    eval_metric: Any = "acc",
    *,
    batch_size: int | None = None,
    num_batch: int | None = None,
    batch_end_callback: BatchCallback | Iterable[BatchCallback] | None = None,
    score_end_callback: BatchCallback | Iterable[BatchCallback] | None = None,
    epoch: int = 0,
) -> list[tuple[str, float]]:
    """The metric over ``eval_data``, each sample counted once, as a list of (name, value).

    In a job, from `Module.init_optimizer` on, all workers call it: they share arrays and datasets out, and all get the
    value over what all of them have scored. ``batch_end_callback`` sees the worker's own.

    Args:
        module: what is scored, in evaluation mode.
        eval_data: as `fit` takes it.
        eval_metric: as `gangline.models.metrics.metric.create` takes it.
        batch_size: samples in a batch over all contexts of all workers, for arrays and datasets.
        num_batch: stop after so many batches.
        batch_end_callback: one or several, called after each batch.
        score_end_callback: one or several, called at the end.
        epoch: what callbacks are told.
    """
    metric = eval_metric if isinstance(eval_metric, EvalMetric) else create(eval_metric, module.loss.loss)
    metric.reset()
    after_batch, at_end = many(batch_end_callback), many(score_end_callback)
    nbatch = -1
    is_ours = not isinstance(eval_data, Source)
    data_source = source(eval_data, batch_size, shuffle=False, seed=0, what="eval_data") if is_ours else eval_data
    with closing(data_source) if is_ours else nullcontext():
        for nbatch, item in enumerate(_parts(module, data_source, num_batch)):
            data, label = item if item is not None else (None, None)
            if item is not None:
                module.forward(data, label, is_train=False)
                metric.update(label, module.get_outputs(), module)
            if after_batch:
                call(after_batch, after(module, data_source, metric, epoch, nbatch, data, label))
    metric.gather(module.workers)
    call(at_end, BatchEndParam(epoch, nbatch, metric, {"module": module, "num_batches": data_source.num_batches()}))
    return metric.get_global_name_value()


def iter_predict(
    module: Module, data: Any, *, batch_size: int | None = None, num_batch: int | None = None
) -> Iterator[tuple[Any, int, Any]]:
    """Yield (outputs, number, data) for each batch, in order; outputs lie on the first context.

    In a job each worker gets its own part of each batch, and nothing of batches of which it has none.
    """
    data_source = source(data, batch_size, shuffle=False, seed=0, what="data", labels=False)
    with closing(data_source):
        for number, item in enumerate(_parts(module, data_source, num_batch)):
            if item is not None:
                module.forward(item[0], is_train=False)
                yield module.get_outputs(), number, item[0]


def predict(module: Module, data: Any, *, batch_size: int | None = None, num_batch: int | None = None) -> Any:
    """The outputs for all samples, in order, on the host.

    In a job, from `Module.init_optimizer` on, all workers call it: they share arrays and datasets out, and all get all
    outputs. Of batches that each worker has of its own it gets its own outputs alone.

    Args:
        module: what predicts, in evaluation mode.
        data: a tensor, array or dict of them, or what `fit` takes; labels are not looked at.
        batch_size: samples in a batch over all contexts of all workers, for arrays and datasets.
        num_batch: stop after so many batches.

    Raises:
        ValueError: there is no batch.
    """
    host = torch.device("cpu")
    data_source = source(data, batch_size, shuffle=False, seed=0, what="data", labels=False)
    own: list[Any] = []  # a part a step, or None
    with closing(data_source):
        for item in _parts(module, data_source, num_batch):
            if item is not None:
                module.forward(item[0], is_train=False)
            own.append(map_tensors(lambda tensor: tensor.to(host), module.get_outputs()) if item is not None else None)
    everybody = module.workers.exchange(own) if data_source.is_shared else [own]
    parts = [part for of_step in zip(*everybody, strict=True) for part in of_step if part is not None]
    if not parts:
        raise ValueError("predict() got data without batches; expected at least one")
    return concat(parts, host)


def many(callbacks: Any) -> list[Any]:
    """One callback, several or none as a list; TypeError where one cannot be called."""
    if callbacks is None:
        return []
    found = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in found:
        if not callable(callback):
            raise TypeError(f"callback is {callback!r}; expected a function")
    return found


def call(callbacks: Iterable[Callable[[BatchEndParam], None]], param: BatchEndParam) -> None:
    """Call each with ``param``."""
    for callback in callbacks:
        callback(param)


def after(
    module: Module,
    data_source: Source,
    metric: EvalMetric,
    epoch: int,
    nbatch: int,
    data: Any,
    label: Any,
    batches: int = 1,
) -> BatchEndParam:
    """What callbacks are told after a batch."""
    context = {"module": module, "data": data, "label": label, "num_batches": data_source.num_batches()}
    return BatchEndParam(epoch, nbatch, metric, context, batches)


def _parts(module: Module, data_source: Source, num_batch: int | None) -> Iterator[Item | None]:
    """What this worker has of each batch; workers score batches of their own each by itself."""
    workers = module.workers if data_source.is_shared else Workers()
    for number, item in enumerate(data_source.parts(workers, 0)):
        if num_batch is not None and number >= num_batch:
            return
        yield item
