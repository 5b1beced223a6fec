"""`fit`: argument checks, resuming, and set-up of the loop over epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.collectives.errors import DeadNodeError
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.restart_variables import restart_number, run_id
from gangline.models.arguments import check_int
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import BEST, writing
from gangline.models.checkpoint.checkpoint import epochs as saved_epochs
from gangline.models.console_log import log_to_stderr
from gangline.models.data.sources import Source, source
from gangline.models.elastic_workers import ElasticWorkers
from gangline.models.import_by_name import has_batches
from gangline.models.loop.callbacks import Checkpoint, check_metric
from gangline.models.loop.epochs import (
    LEFT,
    Callbacks,
    Epochs,
    EvalFrequency,
    FitOptions,
    Resume,
    check_signals,
    obstacle_to_restarts,
)
from gangline.models.loop.evaluation import as_list
from gangline.models.loop.schedules import DrivenScheduler, Schedule, scheduler_of
from gangline.models.metrics.metric import EvalMetric, create
from gangline.models.names import parameters_of
from gangline.models.random_streams import host_states, set_host_states
from gangline.models.run_state import Position, Stateful

if TYPE_CHECKING:
    from gangline.models.module import Module

_fits: Counter[tuple[Path, ...]] = Counter()
"""Number of calls of `fit` in this process by checkpoint prefixes."""
_DEFAULT_REQUEST: tuple[str, str, dict[str, Any]] = ("auto", "sgd", {})


def fit(module: Module, train_data: Any, eval_data: Any, eval_metric: Any, options: FitOptions) -> str:
    """Train a module; see `Module.fit`."""
    check_int("num_epoch", options.num_epoch, 0)
    check_int("begin_epoch", options.begin_epoch, 0)
    check_int("accumulate", options.accumulate)
    uses_gpu = any(context.device_type == "gpu" for context in module.contexts)
    train, evaluation = _sources(train_data, eval_data, options, pin=uses_gpu)
    if options.on_nan not in ("stop", "continue"):
        raise ValueError(f"on_nan is {options.on_nan!r}; expected 'stop' or 'continue'")
    if not isinstance(options.shuffle, bool):
        raise TypeError(f"shuffle is {options.shuffle!r}; expected True, a new order in each epoch, or False")
    metric = create(eval_metric, module.loss.loss)
    validation_metric = options.validation_metric if options.validation_metric is not None else eval_metric
    shared = eval_metric if evaluation is not None else None
    validation = create(validation_metric, module.loss.loss, unless_in=shared)
    callbacks = Callbacks(
        as_list(options.batch_end_callback),
        as_list(options.epoch_end_callback),
        as_list(options.eval_batch_end_callback),
        as_list(options.eval_end_callback),
    )
    savers = callbacks.savers
    module.run_state.run = _name_of_run(savers)
    saved = _read_checkpoint(options.resume, savers) if not restart_number() else None  # else `_run` reads it
    module.run_state.seed, module.run_state.data_generator = options.seed, train.generator
    _initialize(module, train, options)
    try:
        with log_to_stderr():
            return _run(module, train, evaluation, metric, validation, callbacks, options, saved)
    except BaseException as error:
        workers = module.workers
        if isinstance(error, DeadNodeError) and isinstance(workers, ElasticWorkers) and workers.store.has_ended():
            return LEFT
        if workers.has_others:
            module.leave()
        raise
    finally:
        train.close()
        if evaluation is not None:
            evaluation.close()
        for callback in callbacks.all:
            if hasattr(callback, "close"):
                callback.close()


def _sources(train_data: Any, eval_data: Any, options: FitOptions, *, pin: bool) -> tuple[Source, Source | None]:
    """Return the sources of training and validation data; ``batch_size`` is for those that need it."""
    needs_size = not has_batches(train_data), not has_batches(eval_data)
    size = options.batch_size
    train_size = size if needs_size[0] or not needs_size[1] else None
    train = source(
        train_data,
        train_size,
        shuffle=options.shuffle,
        seed=options.seed,
        pin=pin,
        lengths=options.lengths,
        padding=options.padding,
        collate=options.collate_fn,
    )
    if eval_data is None:
        return train, None
    eval_size = size if needs_size[1] else None
    collate = options.collate_fn if needs_size[1] and not isinstance(eval_data, tuple) else None
    return train, source(eval_data, eval_size, shuffle=False, seed=0, what="eval_data", collate=collate)


def _initialize(module: Module, train: Source, options: FitOptions) -> None:
    """Initialize the parameters if requested, and the optimizer unless the user has done so."""
    request = (options.kvstore, options.optimizer, dict(options.optimizer_params or {}))
    set_by_fit = module.run_state.optimizer_set_by_fit
    sets_optimizer = not module.optimizer_initialized or (set_by_fit and request != module.optimizer_request)
    sets_params = any(one is not None for one in (options.initializer, options.arg_params, options.aux_params))
    if (sets_optimizer or sets_params) and module.bound.lazy_parameters():
        states = host_states(train.generator)
        module.bound.bind(train.first()[0])
        set_host_states(states, train.generator)
    if sets_params:
        module.init_params(
            options.initializer,
            options.arg_params,
            options.aux_params,
            allow_missing=options.allow_missing,
            force_init=options.force_init,
        )
    if sets_optimizer:
        module.init_optimizer(*request)
        module.run_state.optimizer_set_by_fit = True
    elif request not in (_DEFAULT_REQUEST, module.optimizer_request):
        module.logger.warning("init_optimizer() was called before; fit() ignores its own kvstore and optimizer")


def _run(
    module: Module,
    train: Source,
    evaluation: Source | None,
    metric: EvalMetric,
    validation: EvalMetric,
    callbacks: Callbacks,
    options: FitOptions,
    saved: checkpoint.TrainingState | None,
) -> str:
    """Check the rest, resume, and run the epochs."""
    savers = callbacks.savers
    elastic = module.workers if isinstance(module.workers, ElasticWorkers) else None
    if elastic is not None:
        _check_elastic(module, train, options)
    kept = _kept(module, train)
    if kept is not None:
        per_epoch, saved = kept["batches_per_epoch"], None
    else:
        per_epoch, own = _exchange_beginnings(module, train, _own_checkpoint(savers, module.run_state.run))
        if own is not None:
            saved = checkpoint.read(*own)
        elif restart_number():
            saved = _read_checkpoint(options.resume, savers)
    scheduler = scheduler_of(options.lr_scheduler, _base_rate(module), options.num_epoch, per_epoch)
    frequency = EvalFrequency(options.eval_frequency, per_epoch)
    _check_metrics([scheduler, *callbacks.all], validation if evaluation is not None else None)
    if elastic is not None and not elastic.is_first:
        evaluation = None  # worker 0 validates
    for saver in savers:
        saver.attach(module)
    module.run_state.stateful = _stateful(callbacks.all, scheduler)
    module.workers.forget_stop()
    check_signals(module)
    settings: dict[str, Any] = {
        "num_epoch": options.num_epoch,
        "begin_epoch": options.begin_epoch,
        "accumulate": options.accumulate,
        "on_nan": options.on_nan,
        "lr_scheduler": [scheduler.name, scheduler()] if isinstance(scheduler, DrivenScheduler) else repr(scheduler),
        "eval_frequency": [frequency.number, frequency.unit],
        "the Checkpoint callbacks": [saver.plan() for saver in savers],
    }
    for what, data in (("train_data", train), ("eval_data", evaluation)):
        shared = data is not None and data.is_shared
        settings[what] = "none" if data is None else data.plan() if shared else "batches of each worker's own"
    settings["the checkpoint to resume"] = saved.id if saved is not None else None
    if kept is None:
        module.workers.check_same(settings, "fit")
    if frequency.unit == "batches" and module.workers.count > 1 and not (train.is_shared or module.workers.in_step):
        raise ValueError(
            f"eval_frequency is {options.eval_frequency}, but workers of {options.kvstore!r} with batches of their own "
            "cannot validate together within an epoch; validate after epochs"
        )
    if module.workers.stop is not None:
        return module.workers.stop
    by_cost = options.lengths is not None
    if by_cost and module.workers.count > 1 and module.bound.dropout_by_sample:
        raise ValueError(
            "lengths is given, but random='sample' draws the masks of dropout by a sample's place in the batch, which "
            "then depends on the loads; expected random='context', or no lengths"
        )
    module.worker_balance.begin_fit(is_shared=train.is_shared, by_cost=by_cost)
    begin_epoch, skip = options.begin_epoch, 0
    began = _begin_elastic(elastic, module, per_epoch, saved, options.begin_epoch) if elastic is not None else None
    if elastic is not None and elastic.store.has_joined:
        saved = None
    if kept is not None:
        for name, each in module.run_state.stateful.items():
            each.load_state(kept["stateful"][name])
        begin_epoch, skip = module.run_state.position.epoch, module.run_state.position.batch
    elif saved is not None:
        begin_epoch, skip = _resumed_position(module, train, saved)
        module.resume(saved)
        whole, saved = saved, saved.of_worker(module.workers.rank, module.workers.count)
        _load_stateful(module, saved)
        saved.forget_tensors()
        whole.forget_tensors()
    else:
        module.run_state.position.epoch = begin_epoch
    if began is not None:
        begin_epoch, skip, module.run_state.step = began
    if kept is None:
        _log_beginning(module, savers, options, saved, begin_epoch, skip)
    loop = Epochs(module, train, evaluation, metric, validation, scheduler, frequency, callbacks, per_epoch, options)
    with _locked_prefixes(module, savers, alone=kept is not None):
        return loop.run(begin_epoch, skip, saved, kept)


def _check_elastic(module: Module, train: Source, options: FitOptions) -> None:
    """Check that joining and leaving workers do not change the weights."""
    refused = {
        "train_data with batches of each worker's own": (not train.is_shared, "give arrays or a Dataset"),
        "lengths": (options.lengths is not None, "leave it out"),
        f"accumulate={options.accumulate}": (options.accumulate > 1, "raise batch_size instead"),
        "sync_batchnorm=True": (module.bound.sync_batchnorm, "use a normalization over features"),
        "autocast=torch.float16": (module.loss_scale is not None, "use torch.bfloat16"),
    }
    for what, (is_given, remedy) in refused.items():
        if is_given:
            raise ValueError(
                f"{what} needs the same workers all the time, and those of an elastic job change; {remedy}"
            )


def _begin_elastic(
    workers: ElasticWorkers, module: Module, per_epoch: int | None, saved: checkpoint.TrainingState | None, epoch: int
) -> tuple[int, int, int]:
    """Return the epoch, batches to skip in it, and the step at which this worker begins."""
    assert per_epoch is not None  # the samples of each batch are chosen here
    batch, step = 0, module.run_state.step
    if saved is not None:
        epoch, batch, step = saved.position["epoch"], saved.position["batch"], saved.step
    position, step, resumes = workers.begin(epoch * per_epoch + batch, step, resumes=saved is not None)
    if workers.store.has_joined and resumes:
        module.follow_resume()
    first = workers.store.first_step
    return *divmod(position + first, per_epoch), step + first


def _kept(module: Module, train: Source) -> Any:
    """Return the state that this worker saved before its restart; None in its first start."""
    store = module.store
    if store is None or not store.keeps_state:
        return None
    if why := obstacle_to_restarts(module, train):
        store.check_not_restarted(why)
        return None
    kept = module.kept()
    if kept is not None and kept["run"] != module.run_state.run:
        store.check_not_restarted("a second call of fit")
    return kept


def _log_beginning(
    module: Module,
    savers: Iterable[Checkpoint],
    options: FitOptions,
    saved: checkpoint.TrainingState | None,
    begin_epoch: int,
    skip: int,
) -> None:
    """Log where the run continues, or which checkpoints it will replace."""
    if not module.workers.is_first:
        return
    if saved is not None:
        done = f"{begin_epoch} of {options.num_epoch} epochs" + (f" and {skip} batches of the next" if skip else "")
        nothing_left = "; nothing is left to train" * (begin_epoch >= options.num_epoch)
        module.logger.info("resuming from %s: %s are done%s", saved.path, done, nothing_left)
        return
    if savers and restart_number():
        module.logger.info("restart %d: no earlier start of this job has written a checkpoint", restart_number())
    for prefix in {saver.prefix for saver in savers}:
        replaced = [number for number in saved_epochs(prefix) if number > begin_epoch]
        if replaced:
            module.logger.warning(
                "%s has checkpoints of an earlier run, up to epoch %d, which this run replaces; to go on from them, "
                "resume (resume='auto', --load-epoch auto); to keep them, give another prefix",
                prefix,
                replaced[-1],
            )
        elif options.resume is not None:
            module.logger.info("%s has no checkpoint to resume from: a new run begins", prefix)


@contextmanager
def _locked_prefixes(module: Module, savers: Iterable[Checkpoint], *, alone: bool) -> Iterator[None]:
    """Lock these checkpoints for rank 0 in this context. Collective unless ``alone``."""
    with ExitStack() as stack:

        def lock() -> None:
            for saver in savers:
                stack.enter_context(writing(saver.prefix))

        if not alone:
            module.workers.run_on_first(lock, "fit")
        elif module.workers.is_first:
            lock()
        yield


def _check_metrics(users: Iterable[Any], validation: EvalMetric | None) -> None:
    """Check that validation computes the metrics that schedulers and callbacks need."""
    for user in users:
        metric = getattr(user, "awaited_metric", None)
        if metric is not None:
            names = [name for name, _ in validation.get_name_value()] if validation is not None else []
            check_metric(user.name if isinstance(user, DrivenScheduler) else type(user).__name__, metric, names)


def _exchange_beginnings(
    module: Module, train: Source, own: tuple[str, int] | None
) -> tuple[int | None, tuple[str, int] | None]:
    """Exchange the workers' numbers of batches, also of prefetched ones, and rank 0's newest checkpoint. Collective.

    Returns:
        The largest number of batches of a worker (None if a worker does not know its own), and rank 0's ``own``,
        because rank 0 writes the checkpoints.
    """
    gathered = module.workers.all_gather([train.num_batches(), train.reads_ahead, list(own or ())], "fit")
    counts = [count for count, _, _ in gathered]
    first = gathered[0][2]
    module.workers.reads_ahead = max(ahead for _, ahead, _ in gathered)
    return max(counts) if None not in counts else None, (first[0], first[1]) if first else None


def _base_rate(module: Module) -> float:
    """Return the learning rate that the optimizer was created with."""
    assert module.optimizer_request is not None
    _, optimizer, params = module.optimizer_request
    named = parameters_of(module.network)
    return OptimizerSpec.parse((optimizer, dict(params)), named).rate


def _stateful(callbacks: Iterable[Any], scheduler: Schedule | DrivenScheduler | None) -> dict[str, Stateful]:
    """Return the objects whose state checkpoints store, by a name that is the same in every run."""
    found: dict[str, Any] = {"lr_scheduler": scheduler} if isinstance(scheduler, DrivenScheduler) else {}
    for callback in callbacks:
        if all(callable(getattr(callback, method, None)) for method in ("state", "load_state")):
            name = f"{type(callback).__name__} {getattr(callback, 'state_key', '')}".rstrip()
            number = 1 + sum(other.partition(" #")[0] == name for other in found)
            found[name if number == 1 else f"{name} #{number}"] = callback
    return found


def _load_stateful(module: Module, saved: checkpoint.TrainingState) -> None:
    """Restore scheduler and callbacks; callbacks that keep the best also read ``PREFIX-best``, to not worsen it.

    Collective.
    """
    for name, each in module.run_state.stateful.items():
        if name in saved.stateful:
            each.load_state(saved.stateful[name])
        elif name == "lr_scheduler":
            module.logger.warning("%s was saved without this lr_scheduler, which starts from its beginning", saved.path)
        if isinstance(each, Checkpoint) and each.keep_best is not None:
            best = checkpoint.read_metadata(each.prefix, BEST, "companions") if module.workers.is_first else {}
            each.load_better(module.workers.broadcast(best.get(name), "fit"))
    unused = [name for name, state in saved.stateful.items() if state and name not in module.run_state.stateful]
    if unused and module.workers.is_first:
        module.logger.warning("%s has the state of %s, which this run does not have; it is dropped", saved.path, unused)


def _name_of_run(savers: list[Checkpoint]) -> str | None:
    """Return a name of this call of `fit` that is the same in every start of its job; None if the job has no name."""
    prefixes = tuple(saver.prefix for saver in savers)
    number, job = _fits[prefixes], run_id()
    _fits[prefixes] += 1
    return f"{job}/{number}" if job is not None else None


def _own_checkpoint(savers: list[Checkpoint], run: str | None) -> tuple[str, int] | None:
    """Return prefix and number of the newest checkpoint that earlier starts of the job wrote in this call of `fit`."""
    if run is None or not restart_number():
        return None
    return checkpoint.newest_of_run((str(saver.prefix) for saver in savers if saver.save_optimizer_states), run)


def _read_checkpoint(resume: Resume | None, savers: list[Checkpoint]) -> checkpoint.TrainingState | None:
    if resume is None:
        return None
    if isinstance(resume, tuple):
        return checkpoint.read(*resume)
    prefix = resume
    if resume == "auto":
        if not savers:
            raise ValueError("resume is 'auto', but no Checkpoint callback says where checkpoints are; give one")
        prefix = savers[0].prefix
    existing = saved_epochs(prefix)
    if existing:
        return checkpoint.read(prefix, existing[-1])
    if resume != "auto":
        raise FileNotFoundError(f"there is no checkpoint {prefix}-NNNN to resume from")
    return None


def _resumed_position(module: Module, train: Source, saved: checkpoint.TrainingState) -> tuple[int, int]:
    """Return the epoch to resume in, and the number of its batches to skip; this run must read it in the same way."""
    wrote, are = len(saved.other_workers) + 1, module.workers.count
    position = Position(**saved.of_worker(module.workers.rank, are).position)
    if position.batch and not train.can_skip:
        module.logger.warning(
            "the checkpoint was saved %d batches into epoch %d, but train_data is a plain iterable: the epoch starts "
            "again",
            position.batch,
            position.epoch,
        )
        return position.epoch, 0
    if position.batch and wrote != are and not train.is_shared:
        raise ValueError(
            f"{saved.path} was saved {position.batch} batches into an epoch of {wrote} workers with batches of their "
            f"own, but there are {are} now; resume with {wrote}, or from the end of an epoch"
        )
    if position.batch and train.plan() != position.plan:
        raise ValueError(
            f"the checkpoint was saved in the middle of an epoch read by {position.plan}, but this run reads by "
            f"{train.plan()}; give the same data, batch_size, shuffle, seed and lengths"
        )
    return position.epoch, position.batch
