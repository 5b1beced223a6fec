"""fit, written on Module's verbs alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models import checkpoint
from models.callbacks import BatchCallback, Checkpoint, EpochCallback
from models.metric import EvalMetric, create
from models.random_streams import host_states, set_host_states
from models.scoring import after, call, many, score
from models.sources import Source, source

if TYPE_CHECKING:
    from kvstore import KVStore
    from models.module import Module

Resume = str | Path | tuple[str | Path, int]
_DEFAULT_REQUEST: tuple[str, str, dict[str, Any]] = ("local", "sgd", {})


def fit(
    module: Module,
    train_data: Any,
    eval_data: Any = None,
    eval_metric: Any = "acc",
    *,
    num_epoch: int,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    begin_epoch: int = 0,
    kvstore: str | KVStore | None = "local",
    optimizer: Any = "sgd",
    optimizer_params: dict[str, Any] | None = None,
    batch_end_callback: BatchCallback | Iterable[BatchCallback] | None = None,
    epoch_end_callback: EpochCallback | Iterable[EpochCallback] | None = None,
    eval_end_callback: BatchCallback | Iterable[BatchCallback] | None = None,
    validation_metric: Any = None,
    resume: Resume | None = None,
    accumulate: int = 1,
) -> None:
    """Train from ``begin_epoch`` to ``num_epoch``.

    With a store of several workers all of them call it, with the same arguments. Arrays and datasets hold the data of
    the whole job, and each worker reads its own share of each batch (loads: GANGLINE_WORK_LOAD_LIST, one number a
    worker); a DataLoader or iterable holds this worker's own batches, and an epoch ends when the last worker has run
    out of them. Callbacks are called on every worker; rank 0 logs and writes checkpoints. A worker that fails leaves
    the job, if the store was made here: the others get a DeadNodeError, and all go on from a checkpoint.

    Args:
        module: what is trained. What the user's own `init_optimizer` set stays, with a warning if another store or
            optimizer is asked for here; what an earlier `fit` set is replaced if another is.
        train_data: a TUPLE of two (tensors, arrays or dicts of them) or a Dataset, which need ``batch_size``; or a
            DataLoader or another iterable of (data, label) batches, iterable anew each epoch.
        eval_data: likewise, scored after each epoch.
        eval_metric: as `models.metric.create` takes it.
        num_epoch: the epoch to end before; with ``resume`` too it counts from the first run's beginning.
        batch_size: samples in a batch over all contexts of all workers.
        shuffle: read arrays and datasets by a permutation of (seed, epoch).
        seed: of the permutations and of the contexts' random streams.
        begin_epoch: the number of the first epoch.
        kvstore: as `Module.init_optimizer` takes it.
        optimizer: likewise.
        optimizer_params: likewise; None: torch's own defaults.
        batch_end_callback: one or several, called after each update with the number of its last batch, and the part of
            that which this worker had (None: nothing); those that have a ``close`` are closed at the end.
        epoch_end_callback: one or several, called after each epoch with (epoch, network, params, buffers).
        eval_end_callback: one or several, called after each scoring.
        validation_metric: None: as ``eval_metric``.
        resume: a checkpoint prefix (its newest), (prefix, epoch), or "auto": the newest of a `Checkpoint` callback
            given here, or a fresh start if there is none yet.
        accumulate: batches to an update, whose gradient is that of the mean over all of them, each valid element
            counted once; the last ones of an epoch make an update however few they are.

    Raises:
        TypeError: a wrong type.
        ValueError: anything that makes no sense, or a checkpoint of another run.
        MismatchError: workers were given different data, batch sizes, epochs or checkpoints.
        FileNotFoundError: no such checkpoint.
    """
    _check_epochs(begin_epoch, num_epoch)
    _check_int("accumulate", accumulate, least=1)
    needing = [_needs_batch_size(data) for data in (train_data, eval_data)]
    train = source(train_data, batch_size if needing[0] or not needing[1] else None, shuffle=shuffle, seed=seed)
    evaluation = None
    if eval_data is not None:
        evaluation = source(eval_data, batch_size if needing[1] else None, shuffle=False, seed=0, what="eval_data")
    metric = create(eval_metric, module.loss.loss)
    validation = create(validation_metric if validation_metric is not None else eval_metric, module.loss.loss)
    batch_callbacks, epoch_callbacks = many(batch_end_callback), many(epoch_end_callback)
    eval_callbacks = many(eval_end_callback)
    saved = _checkpoint(resume, [*batch_callbacks, *epoch_callbacks])
    module.seed, module.data_generator = seed, train.generator
    request = (kvstore, optimizer, dict(optimizer_params or {}))
    if not module.optimizer_initialized or (module.optimizer_is_fits and request != module.optimizer_request):
        if module.has_lazy_parameters:
            states = host_states(train.generator)
            module.bind_to(train.first()[0])
            set_host_states(states, train.generator)
        module.init_optimizer(*request)
        module.optimizer_is_fits = True
    elif request not in (_DEFAULT_REQUEST, module.optimizer_request):
        module.logger.warning(
            "init_optimizer() was called before: what fit() is given as kvstore and optimizer is ignored"
        )
    try:
        numbers = {"num_epoch": num_epoch, "begin_epoch": begin_epoch, "accumulate": accumulate}
        _check_same(module, train, evaluation, saved, numbers)
        skip = 0
        if saved is not None:
            saved = saved.of_worker(module.workers.rank, module.workers.count)
            module.resume(saved)
            begin_epoch, skip = _resumed_position(module, train)
        else:
            module.position.epoch = begin_epoch
        for epoch in range(begin_epoch, num_epoch):
            began = time.perf_counter()
            metric.reset()
            parts = _begin_epoch(module, train, epoch, skip, saved)
            with _adding(module, accumulate):
                _train(module, train, enumerate(parts, skip), epoch, metric, batch_callbacks, accumulate)
            skip = 0
            module.average_statistics()
            module.position = type(module.position)(epoch + 1)
            metric.gather(module.workers)
            for name, value in metric.get_global_name_value():
                _log(module, "Epoch[%d] Train-%s=%f", epoch, name, value)
            _log(module, "Epoch[%d] Time cost=%.3f", epoch, time.perf_counter() - began)
            if epoch_callbacks:
                _end_epoch(module, epoch, epoch_callbacks)
            if evaluation is not None:
                _validate(module, evaluation, validation, epoch, eval_callbacks)
    except BaseException:
        if module.workers.count > 1:
            module.leave()
        raise
    finally:
        for callback in batch_callbacks:
            if hasattr(callback, "close"):
                callback.close()


def _log(module: Module, line: str, *values: Any) -> None:
    if module.workers.is_first:
        module.logger.info(line, *values)


def _check_same(
    module: Module,
    train: Source,
    evaluation: Source | None,
    saved: checkpoint.Checkpoint | None,
    numbers: dict[str, int],
) -> None:
    """See that all workers are about to do the same."""
    settings: dict[str, Any] = {**numbers}
    for what, data in (("train_data", train), ("eval_data", evaluation)):
        shared = data is not None and data.is_shared
        settings[what] = "none" if data is None else data.plan() if shared else "batches of each worker's own"
    settings["the checkpoint to go on from"] = saved.id if saved is not None else None
    module.workers.check_same("fit()", settings)


@contextmanager
def _adding(module: Module, accumulate: int) -> Iterator[None]:
    """Have the module add up the gradients of batches while an epoch runs, if there is more than one to an update."""
    grad_req = module.grad_req
    try:
        if accumulate > 1:
            module.grad_req = "add"
        yield
    finally:
        module.grad_req = grad_req
        if accumulate > 1:
            module.drop_gradients()  # of a window that an error has cut off


def _train(
    module: Module,
    train: Source,
    parts: Iterable[tuple[int, Any]],
    epoch: int,
    metric: EvalMetric,
    callbacks: list[BatchCallback],
    accumulate: int,
) -> None:
    def after_update(nbatch: int, batches: int, data: Any, label: Any) -> None:
        module.position.batch = nbatch + 1
        if callbacks:
            call(callbacks, after(module, train, metric, epoch, nbatch, data, label, batches))

    waiting = 0  # batches whose gradients no update has used
    for nbatch, part in parts:
        data, label = part if part is not None else (None, None)
        if accumulate == 1:
            module.forward_backward_update(data, label)
        else:
            module.forward_backward(data, label)
        waiting += 1
        due = waiting == accumulate
        if due and accumulate > 1:
            module.update()
        if part is not None:
            metric.update(label, module.get_outputs(), module)
        if due:
            after_update(nbatch, waiting, data, label)
            waiting = 0
    if waiting:
        module.update()
        after_update(nbatch, waiting, data, label)


def _validate(module: Module, data: Source, metric: EvalMetric, epoch: int, callbacks: list[BatchCallback]) -> None:
    states = host_states(None)  # a loader that scoring iterates draws; training must not see it
    values = score(module, data, metric, score_end_callback=callbacks, epoch=epoch)
    set_host_states(states, None)
    for name, value in values:
        _log(module, "Epoch[%d] Validation-%s=%f", epoch, name, value)


def _check_epochs(begin_epoch: int, num_epoch: int) -> None:
    for name, value in (("num_epoch", num_epoch), ("begin_epoch", begin_epoch)):
        _check_int(name, value, least=0)


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")


def _begin_epoch(
    module: Module, train: Source, epoch: int, skip: int, saved: checkpoint.Checkpoint | None
) -> Iterator[Any]:
    """This worker's part of each batch; what a checkpoint in the epoch's middle must know is noted first."""
    if saved is not None and skip:
        # The sampler draws again what it drew as the epoch began; then random states are those of the checkpoint.
        random = saved.random
        set_host_states(module.position.random, train.generator)
        return train.parts(module.workers, epoch, skip, lambda: set_host_states(random, train.generator))
    if saved is not None and epoch == saved.position["epoch"]:
        begun = saved.position["batch"]  # a plain iterable, whose epoch begins anew
        set_host_states(saved.position["random"] if begun else saved.random, train.generator)
    module.position = type(module.position)(epoch, 0, train.plan(), host_states(train.generator))
    module.begin_epoch()
    return train.parts(module.workers, epoch)


def _end_epoch(module: Module, epoch: int, callbacks: list[EpochCallback]) -> None:
    params = module.get_params()
    names = {name for name, _ in module.network.named_parameters(remove_duplicate=False)}
    arg_params = {name: value for name, value in params.items() if name in names}
    buffers = {name: value for name, value in params.items() if name not in names}
    for callback in callbacks:
        callback(epoch, module.network, arg_params, buffers)


def _checkpoint(resume: Resume | None, callbacks: list[Any]) -> checkpoint.Checkpoint | None:
    if resume is None:
        return None
    if isinstance(resume, tuple):
        return checkpoint.read(*resume)
    prefix = resume
    if resume == "auto":
        prefixes = [callback.prefix for callback in callbacks if isinstance(callback, Checkpoint)]
        if not prefixes:
            raise ValueError("resume is 'auto', but no Checkpoint callback says where checkpoints are; give one")
        prefix = prefixes[0]
    there = checkpoint.epochs(prefix)
    if not there:
        if resume == "auto":
            return None
        raise FileNotFoundError(f"there is no checkpoint {prefix}-*.json to resume from")
    return checkpoint.read(prefix, there[-1])


def _resumed_position(module: Module, train: Source) -> tuple[int, int]:
    position = module.position
    if not position.batch:
        return position.epoch, 0
    if not train.can_skip:
        module.logger.warning(
            "the checkpoint stands %d batches into epoch %d, but train_data is a plain iterable: the epoch begins anew",
            position.batch,
            position.epoch,
        )
        return position.epoch, 0
    plan = train.plan()
    if plan != position.plan:
        raise ValueError(
            f"the checkpoint stands in the middle of an epoch read by {position.plan}, but this run reads by {plan}; "
            "give the same data, batch_size, shuffle and seed"
        )
    return position.epoch, position.batch


def _needs_batch_size(data: Any) -> bool:
    is_iterable = isinstance(data, torch.utils.data.IterableDataset)
    return isinstance(data, (tuple, torch.utils.data.Dataset)) and not is_iterable
