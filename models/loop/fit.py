"""fit, written on Module's verbs alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.retention import epochs as numbers_of
from gangline.models.checkpoint.retention import unexplained
from gangline.models.data.sources import Source, source
from gangline.models.loop.callbacks import BatchCallback, Checkpoint, EpochCallback
from gangline.models.loop.epochs import Epochs, hear_signals, savers_of
from gangline.models.loop.eval_frequency import EvalFrequency
from gangline.models.loop.evaluation import many
from gangline.models.loop.improvement import check_metric
from gangline.models.loop.monitor import Monitor
from gangline.models.loop.rates import Rates
from gangline.models.metrics.metric import EvalMetric, create
from gangline.models.random_streams import host_states, set_host_states

if TYPE_CHECKING:
    from gangline.kvstore import KVStore
    from gangline.models.module import Module

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
    lr_scheduler: Any = None,
    eval_frequency: Any = 1,
    monitor: Monitor | None = None,
) -> str:
    """Train from ``begin_epoch`` to ``num_epoch``.

    With a store of several workers all of them call it, with the same arguments. Arrays and datasets hold the data of
    the whole job, and each worker reads its own share of each batch (loads: GANGLINE_WORK_LOAD_LIST, one number a
    worker); a DataLoader or iterable holds this worker's own batches, and an epoch ends when the last worker has run
    out of them. Callbacks are called on every worker; rank 0 logs and writes checkpoints. A worker that fails leaves
    the job, if the store was made here: the others get a DeadNodeError, and all go on from a checkpoint.

    A callback that returns True ends training after the update, or epoch, that it was called for; so does a signal
    within `stop_on`. In a job one worker's word is enough: it travels with what workers exchange in each step, so all
    of them end together, after the same update, which is that one or the next (workers of dist_async hear it after
    every 100 updates, or at an epoch's end where each has batches of its own). `Checkpoint` callbacks then save.

    Args:
        module: what is trained. What the user's own `init_optimizer` set stays, with a warning if another store or
            optimizer is asked for here; what an earlier `fit` set is replaced if another is.
        train_data: a TUPLE of two (tensors, arrays or dicts of them) or a Dataset, which need ``batch_size``; or a
            DataLoader or another iterable of (data, label) batches, iterable anew each epoch.
        eval_data: likewise, scored as often as ``eval_frequency`` says.
        eval_metric: as `gangline.models.metrics.metric.create` takes it.
        num_epoch: the epoch to end before; with ``resume`` too it counts from the first run's beginning.
        batch_size: samples in a batch over all contexts of all workers.
        shuffle: read arrays and datasets by a permutation of (seed, epoch).
        seed: of the permutations and of the contexts' random streams.
        begin_epoch: the number of the first epoch.
        kvstore: as `Module.init_optimizer` takes it.
        optimizer: likewise.
        optimizer_params: likewise; None: torch's own defaults.
        batch_end_callback: one or several, called after each update with the number of its last batch, and the part of
            that which this worker had (None: nothing). Callbacks that have a ``close`` are closed at the end; what
            those have that have a ``state()`` and a ``load_state(state)``, of plain data, is part of checkpoints.
        epoch_end_callback: one or several, called after each epoch with (epoch, network, params, buffers); those that
            save come last, behind validation.
        eval_end_callback: one or several, called after each scoring, such as `EarlyStopping`.
        validation_metric: None: as ``eval_metric``.
        resume: a checkpoint prefix (its newest), (prefix, epoch), or "auto": the newest of a `Checkpoint` callback
            given here, or a fresh start if there is none yet.
        accumulate: batches to an update, whose gradient is that of the mean over all of them, each valid element
            counted once; the last ones of an epoch make an update however few they are.
        lr_scheduler: the learning rate of each update: what `schedule` takes, such as ("cosine", {"warmup_epochs": 1}),
            or a function that makes a torch scheduler of an optimizer, which steps after each epoch
            (``TorchScheduler(function, "batch")``: each update). None: the rate stays, or callbacks set it.
        eval_frequency: validate after every so many epochs, or (number, "batches") of the whole run; at the end, too.
        monitor: looks at outputs, weights and gradients.

    Returns:
        Why it ended: "epochs" if all are done; "callback", or the ``reason`` that the callback has ("patience" of
        `EarlyStopping`); or the name of the signal, such as "SIGTERM".

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
    callbacks = many(batch_end_callback), many(epoch_end_callback), many(eval_end_callback)
    every_callback = list({id(callback): callback for kind in callbacks for callback in kind}.values())
    savers = savers_of(every_callback)
    saved = _checkpoint(resume, savers)
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
        per_epoch = _batches_per_epoch(module, train)
        rates = Rates(lr_scheduler, _base_rate(module), num_epoch, per_epoch)
        frequency = EvalFrequency(eval_frequency, per_epoch)
        _check_metrics([rates, *every_callback], validation if evaluation is not None else None)
        module.companions.clear()
        module.companions.update(_companions(every_callback, rates))
        module.workers.forget_stop()
        hear_signals(module)
        settings = {
            "num_epoch": num_epoch,
            "begin_epoch": begin_epoch,
            "accumulate": accumulate,
            "lr_scheduler": rates.plan(),
            "eval_frequency": [frequency.number, frequency.unit],
            "the Checkpoint callbacks": [saver.plan() for saver in savers],
        }
        _check_same(module, train, evaluation, saved, settings)
        if frequency.unit == "batches" and module.workers.count > 1 and not (train.is_shared or module.workers.in_step):
            raise ValueError(
                f"eval_frequency is {eval_frequency}, but workers of {kvstore!r} that have batches of their own do not "
                "meet within an epoch; validate after epochs"
            )
        if module.workers.stop is not None:
            return module.workers.stop
        skip = 0
        if saved is not None:
            _check_goes_on(module, train, saved)
            saved = saved.of_worker(module.workers.rank, module.workers.count)
            module.resume(saved)
            _load_companions(module, saved)
            begin_epoch, skip = _resumed_position(module, train)
        else:
            module.position.epoch = begin_epoch
        if monitor is not None:
            monitor.install(module.network, reports=module.workers.is_first)
        loop = Epochs(
            module,
            train,
            evaluation,
            metric,
            validation,
            rates,
            frequency,
            num_epoch,
            accumulate,
            monitor,
            *callbacks,
            per_epoch,
        )
        return loop.run(begin_epoch, skip, saved)
    except BaseException:
        if module.workers.count > 1:
            module.leave()
        raise
    finally:
        for data in (train, evaluation) if evaluation is not None else (train,):
            data.close()
        for callback in every_callback if monitor is None else [*every_callback, monitor]:
            if hasattr(callback, "close"):
                callback.close()


def _check_metrics(waiting: Iterable[Any], validation: EvalMetric | None) -> None:
    """See that validations have what some wait for."""
    for each in waiting:
        metric = getattr(each, "awaited_metric", None)
        if metric is not None:
            names = [name for name, _ in validation.get_name_value()] if validation is not None else []
            who = each.driven.name if isinstance(each, Rates) and each.driven is not None else type(each).__name__
            check_metric(who, metric, names)


def _batches_per_epoch(module: Module, train: Source) -> int | None:
    """How many the worker has that has most; None where somebody does not know."""
    counts = module.workers.exchange(train.num_batches())
    return max(counts) if None not in counts else None


def _base_rate(module: Module) -> float:
    """The rate that the optimizer was asked to begin with."""
    assert module.optimizer_request is not None
    _, optimizer, params = module.optimizer_request
    return float(OptimizerSpec.parse((optimizer, dict(params))).arguments["lr"])


def _companions(callbacks: Iterable[Any], rates: Rates) -> dict[str, Any]:
    """What has a state that a checkpoint holds, by names that the same run has again."""
    found: dict[str, Any] = {} if rates.driven is None else {"lr_scheduler": rates.driven}
    for callback in callbacks:
        if all(callable(getattr(callback, verb, None)) for verb in ("state", "load_state")):
            kind = type(callback).__name__
            number = sum(name.startswith(f"{kind}/") for name in found)
            found[f"{kind}/{number}"] = callback
    return found


def _load_companions(module: Module, saved: checkpoint.Checkpoint) -> None:
    for name, companion in module.companions.items():
        if name in saved.companions:
            companion.load_state(saved.companions[name])
        elif name == "lr_scheduler":
            module.logger.warning("%s was saved without this lr_scheduler, which begins anew", saved.path)


def _check_same(
    module: Module,
    train: Source,
    evaluation: Source | None,
    saved: checkpoint.Checkpoint | None,
    settings: dict[str, Any],
) -> None:
    """See that all workers are about to do the same."""
    for what, data in (("train_data", train), ("eval_data", evaluation)):
        shared = data is not None and data.is_shared
        settings[what] = "none" if data is None else data.plan() if shared else "batches of each worker's own"
    settings["the checkpoint to go on from"] = saved.id if saved is not None else None
    module.workers.check_same("fit()", settings)


def _check_epochs(begin_epoch: int, num_epoch: int) -> None:
    for name, value in (("num_epoch", num_epoch), ("begin_epoch", begin_epoch)):
        _check_int(name, value, least=0)


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")


def _checkpoint(resume: Resume | None, savers: list[Checkpoint]) -> checkpoint.Checkpoint | None:
    if resume is None:
        return None
    if isinstance(resume, tuple):
        return checkpoint.read(*resume)
    prefix = resume
    if resume == "auto":
        if not savers:
            raise ValueError("resume is 'auto', but no Checkpoint callback says where checkpoints are; give one")
        prefix = savers[0].prefix
    there = numbers_of(prefix)
    if there:
        return checkpoint.read(prefix, there[-1])
    if resume != "auto":
        raise FileNotFoundError(f"there is no checkpoint {prefix}-*.json to resume from")
    lost = unexplained(prefix)
    if lost is not None:
        raise ValueError(
            f"{lost} is there, but the JSON beside it is not, so nobody knows where that run stood; bring it back, or "
            "remove the file to begin anew"
        )
    return None


def _check_goes_on(module: Module, train: Source, saved: checkpoint.Checkpoint) -> None:
    """See that a run by other workers can go on in an epoch's middle."""
    wrote, are = len(saved.other_workers) + 1, module.workers.count
    if saved.position["batch"] and wrote != are and train.can_skip and not train.is_shared and max(wrote, are) > 1:
        raise ValueError(
            f"{saved.path} stands {saved.position['batch']} batches into an epoch of {wrote} workers with batches of "
            f"their own, but there are {are} now; go on with {wrote}, or from the end of an epoch"
        )


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
