"""Evaluation: scoring and prediction, by one or several workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from gangline.models.data.batches import concat, map_tensors
from gangline.models.data.sources import Item, Source, source
from gangline.models.loop.callbacks import BatchCallback, BatchEndParam
from gangline.models.metrics.metric import create
from gangline.models.workers import Workers

if TYPE_CHECKING:
    from gangline.models.module import Module


def score(
    module: Module,
    eval_data: Any,
    eval_metric: Any,
    batch_size: int | None,
    num_batch: int | None,
    after_batch: Sequence[BatchCallback],
    at_end: Sequence[BatchCallback],
    epoch: int,
) -> list[tuple[str, float]]:
    """Evaluate a metric; see `Module.score`."""
    metric = create(eval_metric, module.loss.loss)
    metric.reset()
    nbatch = -1
    is_ours = not isinstance(eval_data, Source)
    data_source = source(eval_data, batch_size, shuffle=False, seed=0, what="eval_data") if is_ours else eval_data
    context = {"module": module, "num_batches": data_source.num_batches()}
    with closing(data_source) if is_ours else nullcontext():
        for nbatch, item in enumerate(_forwarded(module, data_source, num_batch, with_labels=True)):
            data, label = item if item is not None else (None, None)
            if item is not None:
                metric.update_from(module, label)
            for callback in after_batch:
                callback(BatchEndParam(epoch, nbatch, metric, {**context, "data": data, "label": label}))
    metric.gather(module.workers)
    for callback in at_end:
        callback(BatchEndParam(epoch, nbatch, metric, context))
    return metric.get_global_name_value()


def iter_predict(
    module: Module, data: Any, batch_size: int | None, num_batch: int | None
) -> Iterator[tuple[Any, int, Any]]:
    """Yield the outputs of each batch; see `Module.iter_predict`."""
    data_source = source(data, batch_size, shuffle=False, seed=0, what="data", labels=False)
    with closing(data_source):
        for number, item in enumerate(_forwarded(module, data_source, num_batch)):
            if item is not None:
                yield module.get_outputs(), number, item[0]


def predict(module: Module, data: Any, batch_size: int | None, num_batch: int | None) -> Any:
    """Return the outputs of all samples; see `Module.predict`."""
    host = torch.device("cpu")
    data_source = source(data, batch_size, shuffle=False, seed=0, what="data", labels=False)
    with closing(data_source):
        own = [  # one per batch; None if this worker has no samples of it
            map_tensors(lambda tensor: tensor.to(host), module.get_outputs()) if item is not None else None
            for item in _forwarded(module, data_source, num_batch)
        ]
    if not own:
        raise ValueError("predict() got data without batches; expected at least one")
    received = module.workers.gather(own, "predict") if data_source.is_shared else [own]
    if not received:
        return None
    parts = [part for of_batch in zip(*received, strict=True) for part in of_batch if part is not None]
    return concat(parts, host)


def as_list(callbacks: Any) -> list[Any]:
    """Return one, several or no callbacks as a list; TypeError if a callback is a class or not callable."""
    if callbacks is None:
        return []
    found = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in found:
        if not callable(callback):
            raise TypeError(f"callback is {callback!r}; expected a function")
        if isinstance(callback, type):
            raise TypeError(
                f"callback is the class {callback.__name__}; expected an object: write {callback.__name__}(...)"
            )
    return found


def _forwarded(
    module: Module, data_source: Source, num_batch: int | None, *, with_labels: bool = False
) -> Iterator[Item | None]:
    """Run each batch forward and yield this worker's share; None if it has no samples.

    Data that the workers do not share is run without them.
    """
    is_joint = data_source.is_shared and not module.workers.is_elastic
    is_alone = not (is_joint or module.shards_weights)
    items = data_source.parts(Workers(), 0) if is_alone else module.worker_balance.batches(data_source, 0)
    for number, item in enumerate(items):
        if num_batch is not None and number >= num_batch:
            return
        if item is not None or module.shards_weights:
            data, label = item if item is not None else (None, None)
            module.forward(data, label if with_labels else None, is_train=False)
        yield item
