"""Epochs: the loop that `fit` runs after all arguments are checked."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gangline.collectives.timeline import recorder
from gangline.kvstore import KVStore
from gangline.kvstore.allreduce.store import AllReduceStore
from gangline.kvstore.replica_check import check_interval, compare_weights, number_of_weights
from gangline.models.arguments import check_int
from gangline.models.checkpoint import checkpoint
from gangline.models.data.batches import num_samples
from gangline.models.data.reader import Collate
from gangline.models.data.sources import Source
from gangline.models.loop.callbacks import BatchCallback, BatchEndParam, Checkpoint, EpochCallback
from gangline.models.loop.evaluation import score
from gangline.models.loop.schedules import DrivenScheduler, Schedule
from gangline.models.loop.stopping import received_signal
from gangline.models.metrics.metric import EvalMetric
from gangline.models.names import parameters_of
from gangline.models.random_streams import host_states, host_states_kept, set_host_states
from gangline.models.run_state import Position

if TYPE_CHECKING:
    from gangline.models.module import Module

ALL_EPOCHS = "epochs"
"""Return value of a `fit` that was not stopped."""
LEFT = "left"
"""Return value of a `fit` on a worker that has left an elastic job."""
DIVERGED = "diverged"
"""Return value of `fit` if a loss or a weight was not finite."""
_CALLBACK = "callback"
_UNITS = ("epochs", "batches")
_EVERY = 10
"""Number of batches between checks of a loss on a GPU, each of which waits for the GPU."""
_RECENT = 50
"""Number of batches over which the loss is averaged."""
_RISE = 2.0
"""Rise of the loss, relative to its start, that counts as divergence."""

BatchCallbacks = BatchCallback | Iterable[BatchCallback] | None
EpochCallbacks = EpochCallback | Iterable[EpochCallback] | None
Resume = str | Path | tuple[str | Path, int]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of `Module.fit`; see there."""

    num_epoch: int
    batch_size: int | None
    lengths: Any
    padding: bool
    collate_fn: Collate | None
    shuffle: bool
    seed: int
    begin_epoch: int
    kvstore: str | KVStore | None
    optimizer: Any
    optimizer_params: Mapping[str, Any] | None
    batch_end_callback: BatchCallbacks
    epoch_end_callback: EpochCallbacks
    eval_end_callback: BatchCallbacks
    eval_batch_end_callback: BatchCallbacks
    validation_metric: Any
    resume: Resume | None
    accumulate: int
    lr_scheduler: Any
    eval_frequency: Any
    initializer: Any
    arg_params: Mapping[str, torch.Tensor] | None
    aux_params: Mapping[str, torch.Tensor] | None
    allow_missing: bool
    force_init: bool
    on_nan: str


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a `fit`."""

    batch_end: Sequence[BatchCallback]
    epoch_end: Sequence[EpochCallback]
    eval_batch_end: Sequence[BatchCallback]
    eval_end: Sequence[BatchCallback]

    @property
    def all(self) -> list[Any]:
        """Every callback, once."""
        kinds = (self.batch_end, self.epoch_end, self.eval_batch_end, self.eval_end)
        return list({id(callback): callback for kind in kinds for callback in kind}.values())

    @property
    def savers(self) -> list[Checkpoint]:
        """The callbacks that save checkpoints, each once."""
        return [callback for callback in self.all if isinstance(callback, Checkpoint)]


class EvalFrequency:
    """Decides when to validate: every N epochs, or every N batches of the run."""

    def __init__(self, spec: Any, batches_per_epoch: int | None) -> None:
        """Parse a number of epochs, or (number, "epochs" or "batches").

        If the number of batches per epoch is unknown, the count of batches restarts in each epoch.
        """
        number, unit = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, "epochs")
        check_int("eval_frequency", number)
        if unit not in _UNITS:
            raise ValueError(f"eval_frequency is {spec!r}; expected one of the units {list(_UNITS)}")
        self.number: int = number
        self.unit: str = unit
        self._per_epoch = batches_per_epoch
        self._counted = 0  # batches done at the last call

    def begin(self, epoch: int, batch: int) -> None:
        """Start counting at a position of the run; called before each epoch."""
        self._counted = self._done(epoch, batch)

    def is_due(self, epoch: int, batch: int) -> bool:
        """Return True if validation is due within an epoch, after ``batch`` of its batches."""
        if self.unit == "epochs":
            return False
        before, self._counted = self._counted, self._done(epoch, batch)
        return self._counted // self.number > before // self.number

    def is_due_at_end(self, epoch: int) -> bool:
        """Return True if validation is due at the end of an epoch."""
        if self.unit == "epochs":
            return (epoch + 1) % self.number == 0
        return self._per_epoch is not None and self.is_due(epoch, self._per_epoch)

    def _done(self, epoch: int, batch: int) -> int:
        return batch if self._per_epoch is None else epoch * self._per_epoch + batch


@dataclass
class Epochs:
    """Training of a module, epoch by epoch."""

    module: Module
    train: Source
    evaluation: Source | None
    metric: EvalMetric
    validation: EvalMetric
    scheduler: Schedule | DrivenScheduler | None
    eval_frequency: EvalFrequency
    callbacks: Callbacks
    batches_per_epoch: int | None
    """Largest number of batches of a worker; None if a worker does not know its own."""
    options: FitOptions

    def __post_init__(self) -> None:
        on_host = all(replica.context.device_type == "cpu" for replica in self.module.bound.replicas.all)
        self._rise = LossRise(on_host=on_host, batches_per_epoch=self.batches_per_epoch)
        store = self.module.store
        # Servers hold the weights of other stores, and each worker copies them in each step.
        in_replicas = isinstance(store, AllReduceStore) and self.module.bound.replicas.divided is None
        self._compares_weights = in_replicas and check_interval() > 0
        can_restart = store is not None and store.keeps_state
        self._keeps_state = can_restart and not obstacle_to_restarts(self.module, self.train)
        self._divergence: list[Any] | None = None
        """First divergence of this worker: whether its inputs are finite, the step, and a text."""

    def run(
        self,
        begin_epoch: int,
        skip: int,
        saved: checkpoint.TrainingState | None,
        kept: Mapping[str, Any] | None = None,
    ) -> str:
        """Train from batch ``skip`` of an epoch on; return the reason for the end.

        ``saved`` is the restored checkpoint; ``kept`` the state that `_keep` saved, if this worker was restarted.
        """
        for epoch in range(begin_epoch, self.options.num_epoch):
            self.eval_frequency.begin(epoch, skip)
            began, waited = time.perf_counter(), self.module.seconds_waiting
            self.metric.reset()
            parts = self._begin_epoch(epoch, skip, saved) if kept is None else self._continue_epoch(epoch, skip, kept)
            with self._accumulating():
                stopped = self._train(self._numbered(parts, skip), epoch)
            if self.module.workers.has_left:
                return LEFT
            skip, kept = 0, None
            self._warn_of_rise(ends_epoch=True)
            if self._diverged(epoch):
                return DIVERGED
            if stopped:
                self._save_at_stop(epoch)
            else:
                self._end_epoch(epoch, began, waited)
            if self.module.workers.stop is not None and (stopped or epoch + 1 < self.options.num_epoch):
                return self.module.workers.stop
        for saver in self.callbacks.savers:
            saver.save_at_end(self.options.num_epoch)
        return ALL_EPOCHS

    def _begin_epoch(self, epoch: int, skip: int, saved: checkpoint.TrainingState | None) -> Iterator[Any]:
        """Return this worker's shares of the batches, and record the state for a checkpoint within the epoch."""
        module, train = self.module, self.train
        run_state = module.run_state
        if saved is not None and skip:
            # Repeat the sampler's draws from the start of the epoch, then set the checkpoint's random states.
            random = saved.random
            set_host_states(run_state.position.random, train.generator)
            return module.worker_balance.batches(train, epoch, skip, lambda: set_host_states(random, train.generator))
        if saved is not None and epoch == saved.position["epoch"]:
            begun = saved.position["batch"]  # above 0 for a plain iterable, whose epoch starts again
            set_host_states(saved.position["random"] if begun else saved.random, train.generator)
        run_state.position = Position(epoch, 0, train.plan(), host_states(train.generator))
        module.begin_epoch()
        return module.worker_balance.batches(train, epoch, skip)

    def _continue_epoch(self, epoch: int, skip: int, kept: Mapping[str, Any]) -> Iterator[Any]:
        """Return this worker's shares of the batches that it had not trained before its restart."""
        module, train = self.module, self.train
        module.worker_balance.rhythm = kept["rhythm"]
        if kept["metric"] is not None:
            self.metric.count_on(kept["metric"])
        else:
            module.logger.warning("the training metric of epoch %d begins with batch %d on this worker", epoch, skip)
        set_host_states(module.run_state.position.random, train.generator)
        return module.worker_balance.batches(
            train, epoch, skip, lambda: set_host_states(kept["random"], train.generator)
        )

    def _numbered(self, parts: Iterator[Any], first: int) -> Iterator[tuple[int, Any]]:
        """Yield the shares with the numbers of their batches; before each step, save the state to repeat it.

        Waits for the shares are "data" in the timeline, if any.
        """
        numbered = enumerate(parts, first)
        for nbatch in count(first):
            if self._keeps_state and not nbatch % self.options.accumulate:
                self._keep()
            with recorder.current.span("data") if recorder.current is not None else nullcontext():
                found = next(numbered, None)
            if found is None:
                return
            yield found

    def _keep(self) -> None:
        self.module.keep(
            {
                "run": self.module.run_state.run,
                "stateful": {name: each.state() for name, each in self.module.run_state.stateful.items()},
                "batches_per_epoch": self.batches_per_epoch,
                "rhythm": self.module.worker_balance.rhythm,
                "metric": self.metric.counted(),
                "random": host_states(self.train.generator),
            }
        )

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Switch the module to ``grad_req="add"`` inside the block, if several batches make an update."""
        module, grad_req = self.module, self.module.grad_req
        try:
            if self.options.accumulate > 1:
                module.grad_req = "add"
            yield
        finally:
            module.grad_req = grad_req
            if self.options.accumulate > 1:
                module.drop_gradients()  # of an update interrupted by an error

    def _train(self, parts: Iterable[tuple[int, Any]], epoch: int) -> bool:
        """Run the batches of an epoch; return True if all workers stop before its end."""
        module, accumulated = self.module, 0
        for nbatch, part in parts:
            if part is None and not module.workers.has_others:
                continue  # no sample of this batch could be read
            data, label = part if part is not None else (None, None)
            scheduler = self.scheduler if not accumulated else None
            if scheduler is not None and (rate := scheduler(epoch, nbatch)) != module.learning_rate:
                module.set_learning_rate(rate)
            if self.options.accumulate == 1:
                module.forward_backward_update(data, label)
            else:
                module.forward_backward(data, label)
            accumulated += 1
            is_due = accumulated == self.options.accumulate
            if is_due and self.options.accumulate > 1:
                module.update()
            if part is not None:
                self.metric.update_from(module, label)
                self._check_loss(epoch, nbatch, data, label)
            if is_due:
                is_last = nbatch + 1 == self.batches_per_epoch
                self._after_update(epoch, nbatch, accumulated, data, label, is_last)
                accumulated = 0
                if module.workers.stop is not None and not is_last:
                    return True
        if accumulated:
            module.update()
            self._after_update(epoch, nbatch, accumulated, data, label, is_last=True)
        return False

    def _check_loss(self, epoch: int, nbatch: int, data: Any, label: Any) -> None:
        """Check a batch's loss: end training if it is not finite, and warn on rank 0 if it rises.

        With float16 a loss that is not finite changes no weight.
        """
        module = self.module
        if not module.normalizer or self._divergence is not None or not self._rise.is_due():
            return
        loss = float(module.get_loss())
        if math.isfinite(loss):
            self._rise.add(loss)
            self._warn_of_rise(ends_epoch=False)
        elif module.loss_scale is None:
            found, cause = self._cause(data, label)
            self._note_divergence(f"the training loss is {loss:g} {self._where(epoch, nbatch)}: {cause}", found)

    def _cause(self, data: Any, label: Any) -> tuple[bool, str]:
        """Return whether a batch holds inf or nan, and a text about the first one, or about the settings."""
        for name, part in (("data", data), ("label", label)):
            found = first_non_finite(part, name)
            if found is not None:
                sample, text = found
                samples = num_samples(part, name)
                number = self.train.number_of(sample, samples)
                which = f"sample {sample} of {samples} in the batch" + (
                    f", number {number} of the data" if number is not None else ""
                )
                return True, f"{text}, {which}; remove or repair it"
        earlier = self._rise.every - 1
        unless = f" (those of the {earlier} batches before were not looked at)" if earlier else ""
        return False, f"its inputs are finite{unless}, so training diverges with {self._advice()}"

    def _where(self, epoch: int, nbatch: int) -> str:
        worker = f" of worker {self.module.workers.rank}" if self.module.workers.has_others else ""
        return f"in batch {nbatch}{worker} of epoch {epoch}"

    def _note_divergence(self, text: str, is_input: bool = False) -> None:
        """Record the first divergence of this worker, and request that all workers stop."""
        self._divergence = [not is_input, self.module.run_state.step, text]
        if self.module.workers.is_elastic:
            return  # all workers detect it in the weights at the end of the epoch
        if self.options.on_nan == "stop":
            self.module.workers.ask_to_stop(DIVERGED)
        else:
            self.module.logger.warning("%s", text)

    def _diverged(self, epoch: int) -> bool:
        """Return True if a loss or a weight of any worker is not finite; rank 0 logs the first one. Collective."""
        module, workers = self.module, self.module.workers
        if self.options.on_nan != "stop":
            return False
        name = module.bound.replicas.first_non_finite() if self._divergence is None else None
        if name is not None:
            where = self._where(epoch, module.run_state.position.batch - 1)
            self._note_divergence(f"parameter {name!r} is not finite {where}: training diverges with {self._advice()}")
        noted = [one for one in workers.all_gather(self._divergence, "divergence") if one is not None]
        if noted:
            workers.stop = DIVERGED
            if workers.is_first:
                module.logger.error("training stops, and saves no checkpoint: %s", min(noted)[-1])
        return bool(noted)

    def _warn_of_rise(self, *, ends_epoch: bool) -> None:
        """Warn once, on rank 0, if the training loss has risen far above its start."""
        if self.module.workers.is_first:
            loss = self._rise.risen(ends_epoch=ends_epoch)
            if loss is not None:
                text = "the training loss went from %.4g to %.4g: training diverges with %s"
                self.module.logger.warning(text, self._rise.start, loss, self._advice())

    def _advice(self) -> str:
        """Return the settings that may be the cause of divergence, and what to change."""
        module = self.module
        assert module.optimizer_request is not None
        kvstore, _, params = module.optimizer_request
        settings, remedies = [f"learning rate {module.learning_rate:g}"], ["lower the learning rate"]
        momentum = params.get("momentum")
        if momentum:
            settings.append(f"momentum {momentum:g}")
            remedies.append("set a smaller momentum")
        if module.workers.count > 1 and not module.workers.in_step:
            bound = getattr(kvstore, "max_staleness", None)
            settings.append(f"late updates of {module.workers.count} workers, max_staleness {bound}")
            remedies.append("set a smaller max_staleness")
        return f"{', '.join(settings)}; {' or '.join(remedies)}"

    def _after_update(self, epoch: int, nbatch: int, batches: int, data: Any, label: Any, is_last: bool) -> None:
        module = self.module
        module.run_state.position.batch = nbatch + 1
        self._step_scheduler("batch")
        validates = not is_last and self.evaluation is not None and self.eval_frequency.is_due(epoch, nbatch + 1)
        callbacks = self.callbacks.batch_end
        if validates or callbacks:
            batch = {"module": module, "data": data, "label": label, "num_batches": self.train.num_batches()}
            param = BatchEndParam(epoch, nbatch, self.metric, batch, batches)
            before, after = _split_savers(callbacks) if validates else (callbacks, [])
            self._call(before, param)
            if validates:
                module.average_statistics()  # a checkpoint saved now must hold the scored statistics
                self._validate(epoch, f"Epoch[{epoch}] Batch [{nbatch + 1}]")
            self._call(after, param)
        check_signals(self.module)
        if not is_last:
            module.worker_balance.after_update(batches)

    def _end_epoch(self, epoch: int, began: float, waited: float) -> None:
        module, workers = self.module, self.module.workers
        report = module.worker_balance.report(time.perf_counter() - began, module.seconds_waiting - waited)
        module.average_statistics()
        module.run_state.position = Position(epoch + 1)
        self.metric.gather(workers)
        for name, value in self.metric.get_global_name_value():
            log(module, "Epoch[%d] Train-%s=%f", epoch, name, value)
        log(module, "Epoch[%d] Time cost=%.3f", epoch, time.perf_counter() - began)
        self._step_scheduler("epoch")
        before, after = _split_savers(self.callbacks.epoch_end)
        if before:
            params = module.get_params()
            names = parameters_of(module.network, remove_duplicate=False)
            arg_params = {name: value for name, value in params.items() if name in names}
            buffers = {name: value for name, value in params.items() if name not in names}
            self._call(before, epoch, module.network, arg_params, buffers)
        ends = epoch + 1 == self.options.num_epoch
        if self.evaluation is not None and (self.eval_frequency.is_due_at_end(epoch) or ends):
            self._validate(epoch, f"Epoch[{epoch}]")
        check_signals(self.module)
        weights = module.bound.replicas.first.parameters if self._compares_weights else {}
        # All workers now know the stop requests of this epoch.
        received = workers.all_gather([report, number_of_weights(weights.values())], "end of epoch")
        reports, numbers = zip(*received, strict=True)
        compare_weights(numbers, weights, partial(workers.all_gather, name="weights"), f"after epoch {epoch}")
        if workers.count > 1:
            module.worker_balance.log_epoch(epoch, reports)
        self._call(after, epoch)  # after validation, because they save its result
        if workers.stop is not None and not ends:
            self._save_at_stop(epoch + 1)

    def _save_at_stop(self, completed: int) -> None:
        """Save once under each prefix: the time until the process is killed may be short."""
        savers = {(saver.prefix, saver.save_optimizer_states): saver for saver in reversed(self.callbacks.savers)}
        for saver in savers.values():
            saver.save_at_stop(completed)

    def _validate(self, epoch: int, where: str) -> None:
        assert self.evaluation is not None
        module = self.module
        at_end = [lambda param: self._call(self.callbacks.eval_end, param)]
        after_batch = self.callbacks.eval_batch_end
        with host_states_kept():  # a loader used for scoring may draw random numbers, which must not affect training
            values = score(module, self.evaluation, self.validation, None, None, after_batch, at_end, epoch)
        for name, value in values:
            log(module, "%s Validation-%s=%f", where, name, value)
        self._step_scheduler("validation", dict(values))
        for saver in self.callbacks.savers:
            saver.after_validation(dict(values))

    def _call(self, callbacks: Iterable[Any], *arguments: Any) -> None:
        for callback in callbacks:
            result = callback(*arguments)
            if isinstance(result, (bool, np.bool_)) and result:
                self.module.workers.ask_to_stop(getattr(callback, "reason", _CALLBACK))

    def _step_scheduler(self, event: str, values: Mapping[str, float] | None = None) -> None:
        if isinstance(self.scheduler, DrivenScheduler):
            self.scheduler.after(event, values or {})


def obstacle_to_restarts(module: Module, train: Source) -> str:
    """Return why a worker that is restarted alone cannot repeat its step exactly; "" if it can."""
    if not train.is_shared:
        return "reading batches of each worker's own"
    return "measuring the loads of the workers" if module.workers.is_auto else ""


def _split_savers(callbacks: Sequence[Any]) -> tuple[list[Any], list[Checkpoint]]:
    """Split callbacks into those that do not save and those that do."""
    others = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    return others, [callback for callback in callbacks if isinstance(callback, Checkpoint)]


def check_signals(module: Module) -> None:
    """Request that all workers stop, if this process has received a signal."""
    name = received_signal()
    if name is not None:
        module.workers.ask_to_stop(name)


def log(module: Module, message: str, *values: Any) -> None:
    """Log a line on rank 0."""
    if module.workers.is_first:
        module.logger.info(message, *values)


class LossRise:
    """Compares the recent training loss with its start, until it has risen far above."""

    def __init__(self, *, on_host: bool, batches_per_epoch: int | None) -> None:
        """Start before the first batch; ``on_host``: losses can be read without waiting for a GPU."""
        self.every = 1 if on_host else min(_EVERY, max(1, (batches_per_epoch or _RECENT) // 5))
        """Interval of checks in batches."""
        self._batches = 0
        self._recent: deque[float] = deque(maxlen=_RECENT // self.every)
        self._is_over = False
        self.start = math.nan  # the first loss

    def is_due(self) -> bool:
        """Count a batch; return True if its loss must be checked."""
        self._batches += 1
        return (self._batches - 1) % self.every == 0

    def add(self, loss: float) -> None:
        """Add the mean loss of a batch, a finite number."""
        if math.isnan(self.start):
            self.start = loss
        self._recent.append(loss)

    def risen(self, *, ends_epoch: bool = False) -> float | None:
        """Return the recent loss if it is far above its start, the first time; otherwise None.

        At the end of an epoch any number of batches is enough; otherwise there must be `_RECENT`.
        """
        if self._is_over or not self._recent or not (ends_epoch or len(self._recent) == self._recent.maxlen):
            return None
        mean = sum(self._recent) / len(self._recent)
        self._is_over = mean - self.start > _RISE * abs(self.start)
        return mean if self._is_over else None


def first_non_finite(batch: Any, name: str) -> tuple[int, str] | None:
    """Return the first sample of a batch that holds inf or nan, and a text with the value and its position."""
    for path, tensor in _named(batch, name):
        if tensor.is_floating_point() or tensor.is_complex():
            places = torch.nonzero(~torch.isfinite(tensor))
            if len(places):
                sample, *place = places[0].tolist()
                where = f" at {place}" if place else ""
                return sample, f"{path} of that sample holds {tensor[tuple(places[0])].item():g}{where}"
    return None


def _named(batch: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with their names."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif batch is not None:
        for key, part in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            yield from _named(part, f"{name}[{key!r}]")
