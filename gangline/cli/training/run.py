"""Run `gangline train`: build data, network, module and callbacks from the options, then fit and score."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.cli.logs import reported_first
from gangline.cli.options import (
    as_usage_errors,
    check_network,
    image_shape_of,
    metrics_of,
    normalization,
    numbers,
    signals_of,
)
from gangline.cli.training.checks import check_counts, check_fits, check_labels, first_sample
from gangline.cli.training.options import Plots, TrainOptions
from gangline.kvstore import KVStore, create
from gangline.kvstore.context import Context
from gangline.kvstore.default_store import default_store, job_store, num_workers
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.parameter_server.roles import serve_if_assigned
from gangline.kvstore.registry import IN_PROCESS
from gangline.kvstore.restart_variables import restart_number
from gangline.launcher.restarts import CHECKPOINTED, DIVERGED
from gangline.models import import_by_name
from gangline.models.checkpoint.checkpoint import epochs, existing, folder_of, read_metadata
from gangline.models.data import datasets
from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.sources import read_speed
from gangline.models.loop import schedules
from gangline.models.loop.callbacks import Checkpoint, ProgressBar, Speedometer
from gangline.models.loop.epochs import LEFT
from gangline.models.loop.stopping import EarlyStopping, received_signal, stop_on
from gangline.models.module import Module
from gangline.models.reports.page import TrainingProgress
from gangline.models.zoo import registry, transfer
from gangline.usage_error import UsageError

_HALF = ("bfloat16", "float16")  # what forward computes in; weights stay float32
_MOMENTUM = 0.9
"""Default of --mom."""
_FULL_RATE_WORKERS = 4
"""Maximum number of workers of an asynchronous store that train stably at the rate of one worker."""
_CLASSES_SHOWN = 10
_CLIPS = ("gradient", "norm", "global_norm")
_BENCHMARK_BATCHES = 100
_BENCHMARK_BYTES = 1e9  # limit for all random images; larger images make fewer batches


def run(options: TrainOptions) -> dict[str, Any] | None:
    """Train, and score the held-out data unless a signal ended training.

    Returns:
        Why training ended, the exit code and, on the first worker, the validation accuracy. None if only the speed of
        reading was measured.
    """
    serve_if_assigned()  # MXNet's trackers start one command in all roles
    with as_usage_errors():
        autocast, dtype = _number_formats(options)
        context = options.devices()
        store, max_staleness = _store(options, context)
        resume, schedule = _resume(options), _schedule(options)
        splits, about = _data(options, dtype)
        check_counts(splits, options.num_examples, options.num_classes)
    if options.test_io:
        speed = read_speed(splits.train, None if import_by_name.has_batches(splits.train) else options.batch_size)
        print(f"samples-per-second={speed:.1f}")
        return None
    torch.manual_seed(options.seed)
    with as_usage_errors():
        model = _network(options, splits, dtype)
        module = Module(
            model.network,
            nn.CrossEntropyLoss(),
            context,
            options.loads(),
            fixed_param_names=model.frozen,
            compression_params=_compression(options.gc_type, options.gc_threshold),
            autocast=autocast,
        )
        batch_size, rate = options.batch_size, options.lr
        workers = 1 if store in IN_PROCESS else num_workers()
        if options.scale_batch:
            batch_size, rate = transfer.scale_batch(batch_size, rate, len(module.contexts) * workers)
        schedules.schedule(schedule, rate, options.num_epochs, None)  # `fit` begins after the job has started
        params = _optimizer_params(options, rate, model.factors)
    module.run_state.metadata.update(about, network=options.network, num_classes=model.num_classes)
    adapted = _adapt_to_late_updates(params, options, store, workers)
    with ExitStack() as stack:
        kvstore: str | KVStore = store
        with as_usage_errors():
            if max_staleness is not None:
                kvstore = stack.enter_context(create(store, max_staleness=max_staleness))
            module.init_optimizer(kvstore, options.optimizer, params)
        if module.workers.is_first:
            for line in (*_description(module, options, batch_size, splits, model.num_classes), *adapted):
                module.logger.info("%s", line)
        callbacks = _callbacks(module, options, batch_size)
        result = _fit_and_score(module, options, splits, model.num_classes, batch_size, schedule, resume, callbacks)
        module.close()
    return result


def _number_formats(options: TrainOptions) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the dtype of autocast (None: no autocast), and the dtype of weights and data."""
    if options.dtype in _HALF:
        return getattr(torch, options.dtype), torch.float32
    return None, getattr(torch, options.dtype)


def _fit_and_score(
    module: Module,
    options: TrainOptions,
    splits: datasets.Splits,
    num_classes: int | None,
    batch_size: int,
    schedule: tuple[str, dict[str, Any]],
    resume: str | tuple[str, int] | None,
    callbacks: dict[str, Any],
) -> dict[str, Any]:
    """Train a module with an initialized optimizer; return the result of `run`."""
    has_batches = import_by_name.has_batches(splits.train), import_by_name.has_batches(splits.validation)
    metrics = metrics_of(options.top_k, num_classes)
    assert module.optimizer_request is not None
    kvstore, optimizer, optimizer_params = module.optimizer_request
    stops = dict.fromkeys((signal.SIGTERM, signal.SIGINT, *signals_of(os.environ.get("GANGLINE_STOP_SIGNALS"))))
    with stop_on(*stops), reported_first():
        try:
            ended = module.fit(
                splits.train,
                splits.validation,
                metrics,
                num_epoch=options.num_epochs,
                batch_size=None if has_batches[0] and has_batches[1] else batch_size,
                seed=options.seed,
                kvstore=kvstore,
                optimizer=optimizer,
                optimizer_params=optimizer_params,
                lr_scheduler=schedule,
                validation_metric=[*metrics, "loss"] if options.plots else None,
                resume=resume,
                **callbacks,
            )
        except (EOFError, ConnectionError):  # a signal to the process group has ended the server of the data workers
            name = received_signal()
            if name is None:
                raise
            ended = name
    result: dict[str, Any] = {"ended": ended, "exit_code": 0}
    reports = module.workers.is_first
    if ended == "diverged" or ended in signal.Signals.__members__:
        prefix, checkpoint = options.model_prefix, None
        if prefix is not None and (module.step or resume) and (there := epochs(prefix)):
            checkpoint = folder_of(prefix, there[-1])
        if ended == "diverged":
            result["exit_code"], how = DIVERGED, "diverged"
        else:  # the grace period is for the checkpoint, not for scoring
            result["exit_code"] = CHECKPOINTED if checkpoint is not None else 128 + signal.Signals[ended]
            how = f"was stopped by {ended}"
        if reports:
            module.logger.info("training %s %s", how, _how_to_resume(module, options, checkpoint))
        return result
    if ended == LEFT or (module.workers.is_elastic and not reports):  # worker 0 scores
        return result
    if ended != "epochs" and reports:
        module.logger.info("training ended by %s", ended)
    [(_, accuracy)] = module.score(splits.validation, "acc", batch_size=None if has_batches[1] else batch_size)
    if reports:
        result["validation_accuracy"] = accuracy
    return result


def _store(options: TrainOptions, context: str | list[Context]) -> tuple[str, int | None]:
    """Return the store and its maximum staleness; by default the store of the job, if any."""
    if options.kv_store is None:
        try:
            return (job_store() if context == "parallel" else default_store()), None
        except RuntimeError as error:  # there is no job
            raise UsageError(str(error)) from error
    name, colon, staleness = options.kv_store.partition(":")
    if colon and ("async" not in name or not staleness.isdecimal()):
        raise UsageError(f"--kv-store is {options.kv_store!r}; expected a number of updates, and dist_async before it")
    return name, int(staleness) if colon else None


def _how_to_resume(module: Module, options: TrainOptions, checkpoint: Path | None) -> str:
    """Return the progress of training, and the checkpoint to resume from."""
    epoch, batch = module.position.epoch, module.position.batch
    where = f"after {epoch} of {options.num_epochs} epochs" + (f" and {batch} batches of the next" if batch else "")
    if options.model_prefix is None:
        return f"{where}; no checkpoint was written, as there is no --model-prefix"
    if checkpoint is None:
        return f"{where}; there is no checkpoint yet"
    return f"{where}; the checkpoint is {checkpoint}, and --load-epoch auto resumes from it"


@dataclass(frozen=True)
class _Model:
    network: nn.Module
    num_classes: int | None
    frozen: list[str]
    factors: dict[str, float]
    """Learning-rate factor of each parameter, by name."""


def _network(options: TrainOptions, splits: datasets.Splits, dtype: torch.dtype) -> _Model:
    """Build the network, check that it fits the data, and find its learning-rate factors."""
    name, weights, classes = options.network, options.pretrained, splits.num_classes
    new: list[str] = []
    if weights is None:
        for flag in ("layer_factors", "freeze_until"):
            if getattr(options, flag) != getattr(TrainOptions, flag):
                raise UsageError(f"--{flag.replace('_', '-')} needs --pretrained, the weights that are transferred")
        network = registry.create(name, classes)
    elif classes is None:
        raise UsageError(f"--pretrained needs the number of classes, which {options.dataset!r} does not say")
    else:
        network, new = transfer.pretrained(name, weights, classes)
    network = network.to(dtype)
    frozen = transfer.freeze_until(network, options.freeze_until) if options.freeze_until else []
    weight, bias, others = numbers("--layer-factors", options.layer_factors, float, 3)
    factors = transfer.learning_rate_factors(network, new, weight, bias, others, frozen)
    sample = first_sample(splits.train)
    if sample is not None:
        classes = check_fits(network, sample, classes)
    if classes is not None:
        check_labels(splits.train, classes, "the training data")
        check_labels(splits.validation, classes, "the held-out data")
    return _Model(network, classes, frozen, factors)


def _data(options: TrainOptions, dtype: torch.dtype) -> tuple[datasets.Splits, dict[str, Any]]:
    """Load the data; return them and their description for checkpoints."""
    entry = registry.find(options.network)
    given = image_shape_of(options.image_shape)
    name, seed = options.dataset, options.seed
    if import_by_name.is_module_path(name) and options.data_dir is None:
        return import_by_name.make_data(name, given or entry.known_image_shape, dtype, seed), {}
    shape = given or entry.image_shape
    about: dict[str, Any] = {"image_shape": list(shape)}
    if name == "random":
        batch_bytes = options.batch_size * math.prod(shape) * dtype.itemsize
        batches = max(5, min(_BENCHMARK_BATCHES, int(_BENCHMARK_BYTES / batch_bytes)))
        samples = options.num_examples or batches * options.batch_size
        return datasets.synthetic(shape, dtype, seed, samples, options.num_classes or 10), about
    if options.data_dir is not None:
        return _image_folder(options, options.data_dir, shape, dtype, about), about
    for flag in ("val_dir", "augment", "rgb_mean", "rgb_std"):
        if getattr(options, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} needs --data-dir, a folder of images")
    if name != "digits":
        raise UsageError(f"--dataset is {name!r}; expected digits, random, package.module:make, or --data-dir")
    return datasets.digits(shape, dtype, seed), about


def _image_folder(
    options: TrainOptions, data_dir: str, shape: tuple[int, int, int], dtype: torch.dtype, about: dict[str, Any]
) -> datasets.Splits:
    """Load the images of --data-dir."""
    mean, std = normalization(options.rgb_mean, options.rgb_std, shape[0])
    splits = datasets.image_folder(
        data_dir,
        shape,
        dtype,
        options.seed,
        validation=options.val_dir,
        augmentation=Augmentation.parse(options.augment or "", mean=mean, std=std),
        num_workers=options.data_workers,
        skip_unreadable=options.skip_unreadable,
    )
    about.update(mean=mean, std=std, classes=splits.classes)
    return splits


def _resume(options: TrainOptions) -> str | tuple[str, int] | None:
    """Return the ``resume`` argument of `fit`, after checking that the checkpoint is of this network."""
    prefix, word = options.model_prefix, options.load_epoch
    if word is None:
        return None
    if prefix is None:
        raise UsageError("--load-epoch needs --model-prefix, which says where the checkpoint is")
    if word != "auto" and not word.isdecimal():
        raise UsageError(f"--load-epoch is {word!r}; expected a number of epochs, or auto")
    for epoch in epochs(prefix)[-1:] if word == "auto" else [int(word)]:
        place = folder_of(prefix, epoch)
        if existing(prefix, epoch) is None and not restart_number():  # a restart has checkpoints of its own
            raise UsageError(f"{place} does not exist; checkpoints of that prefix: {epochs(prefix) or 'none'}")
        check_network(place, read_metadata(prefix, epoch), options.network)
    return "auto" if word == "auto" else (prefix, int(word))


def _optimizer_params(options: TrainOptions, rate: float, factors: dict[str, float]) -> dict[str, Any]:
    params: dict[str, Any] = {"learning_rate": rate, "wd": options.wd}
    if options.mom is not None and not 0 <= options.mom < 1:
        raise UsageError(f"--mom is {options.mom:g}; expected a momentum from 0 to below 1, such as 0.9")
    if "momentum" in OptimizerSpec.parse(options.optimizer).optional_arguments:
        params["momentum"] = _MOMENTUM if options.mom is None else options.mom
    if factors:
        params["lr_mult"] = factors
    for word in options.clip or ():
        kind, _, threshold = word.partition("=")
        if kind not in _CLIPS or not threshold:
            raise UsageError(f"--clip is {word!r}; expected {' or '.join(f'{one}=X' for one in _CLIPS)}")
        [params[f"clip_{kind}"]] = numbers("--clip", threshold, float, 1)
    return params


def _adapt_to_late_updates(params: dict[str, Any], options: TrainOptions, store: str, workers: int) -> list[str]:
    """Change settings that diverge with late updates of several workers; return messages to log.

    A gradient is used about ``workers - 1`` updates after it was computed. With curvature c, momentum m and a delay of
    d updates the weights follow z^(d+1) - (1+m) z^d + m z^(d-1) + rate c = 0, whose roots must lie inside the unit
    circle: with momentum 0.9 the largest stable rate is 38 times smaller for d=1 than for d=0, and 240 times for d=7;
    without momentum 2 times and 10 times.
    """
    if "async" not in store or workers == 1:
        return []
    lines = []
    if options.mom is None and params.get("momentum"):
        params["momentum"] = 0.0
        lines.append(
            f"{store}: momentum is 0, because updates of {workers} workers come late and diverge with momentum "
            f"{_MOMENTUM}; --mom sets it"
        )
        if workers > _FULL_RATE_WORKERS:
            params["learning_rate"] *= _FULL_RATE_WORKERS / workers
            lines.append(
                f"{store}: the learning rate is {params['learning_rate']:g}, --lr times "
                f"{_FULL_RATE_WORKERS}/{workers}, because each of {workers} workers updates the weights; --mom keeps it"
            )
    return lines


def _compression(kind: str | None, threshold: float | None) -> dict[str, Any] | None:
    if threshold is not None and kind != "2bit":
        raise UsageError(f"--gc-threshold is {threshold}, but --gc-type is {kind}; only 2bit has a threshold")
    params = {"type": kind, "threshold": threshold}
    return {name: value for name, value in params.items() if value is not None} or None


def _schedule(options: TrainOptions) -> tuple[str, dict[str, Any]]:
    """Return the ``lr_scheduler`` argument of `fit`."""
    name, steps = options.lr_schedule, numbers("--lr-step-epochs", options.lr_step_epochs, int)
    settings: dict[str, Any] = {}
    if name == "piecewise":
        late = [step for step in steps if step >= options.num_epochs]
        if late and options.model_prefix is None:  # a run with checkpoints may be the first part of a longer one
            raise UsageError(
                f"--lr-step-epochs is {options.lr_step_epochs}, but --num-epochs is {options.num_epochs}: the rate "
                f"would not step at epoch {late[0]}"
            )
        settings |= {"epochs": steps, "factor": options.lr_factor}
    elif steps:
        raise UsageError(
            f"--lr-step-epochs is {options.lr_step_epochs}, but --lr-schedule is {name}; only piecewise steps"
        )
    if options.warmup_epochs:
        settings["warmup_epochs"] = options.warmup_epochs
    return name, settings


def _callbacks(module: Module, options: TrainOptions, batch_size: int) -> dict[str, Any]:
    """Build the callbacks, by the names of the arguments of `fit`."""
    after_batch: list[Any] = []
    after_epoch: list[Any] = []
    after_validation: list[Any] = []
    if sys.stderr.isatty():
        after_batch.append(ProgressBar(batch_size=batch_size))
    else:
        after_batch.append(Speedometer(batch_size, options.disp_batches))
    prefix, (period, minutes) = options.model_prefix, _save_period(options.save_period)
    if prefix is not None:
        after_epoch.append(Checkpoint(module, prefix, period, keep_best="accuracy", keep=options.keep))
        if minutes is not None:
            after_batch.append(Checkpoint(module, prefix, minutes=minutes, keep=options.keep))
    elif minutes is not None or options.keep is not None:
        raise UsageError("--save-period in minutes and --keep need --model-prefix")
    if options.patience is not None:
        after_validation.append(EarlyStopping(options.patience))
    shown: list[Any] = []
    plots = options.plots or ()
    if Plots.TRAINING_PROGRESS in plots:
        data_name = options.data_dir or options.dataset
        page = f"{prefix or 'training-progress'}.html"
        shown.append(TrainingProgress(module, page, title=f"{options.network} on {data_name}"))
    return {
        "batch_end_callback": after_batch + shown,
        "epoch_end_callback": after_epoch + shown,
        "eval_end_callback": after_validation + shown,
    }


def _save_period(word: str) -> tuple[int, float | None]:
    """Return the epochs, and the minutes, between two checkpoints: 1 and 10 for "10min"."""
    is_minutes = word.endswith("min")
    try:
        found = float(word.removesuffix("min")) if is_minutes else int(word)
    except ValueError:
        found = 0
    if not 0 < found < math.inf:
        raise UsageError(f"--save-period is {word!r}; expected epochs, such as 2, or minutes, such as 10min")
    return (1, found) if is_minutes else (int(found), None)


def _description(
    module: Module, options: TrainOptions, batch_size: int, splits: datasets.Splits, classes: int | None
) -> list[str]:
    """Return the lines that describe the run at its start."""
    contexts = ", ".join(map(str, module.contexts))
    if len(module.contexts) > 1:
        contexts += f" by loads {_listed(module.work_load_list)}" + " (auto)" * (module.load_balancer is not None)
    workers = module.workers
    if workers.count > 1:
        loads = _listed(workers.loads) + " (auto)" * workers.is_auto
        contexts = f"{workers.count} workers by loads {loads}, each on {contexts}"
    lines = [
        f"{options.network} on {contexts}, store {module.store_type or 'none'}, batch size {batch_size}, "
        f"{classes} classes, {options.dtype}"
    ]
    if options.data_dir is None or splits.classes is None:
        return lines
    shape = tuple(module.run_state.metadata["image_shape"])
    shown = ", ".join(splits.classes[:_CLASSES_SHOWN]) + ", ..." * (len(splits.classes) > _CLASSES_SHOWN)
    kind = "grey" if shape[0] == 1 else "RGB"
    images = f"{len(splits.train)} training and {len(splits.validation)} held-out images"
    return [*lines, f"{images} of {shown}; read as {shape[1]}x{shape[2]} {kind}"]


def _listed(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:g}" for load in loads)
