"""Epochs: the loop that `fit` runs once all is checked and set up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gangline.models.checkpoint import checkpoint
from gangline.models.data.sources import Source
from gangline.models.loop.callbacks import BatchCallback, Checkpoint, EpochCallback
from gangline.models.loop.eval_frequency import EvalFrequency
from gangline.models.loop.evaluation import after, score
from gangline.models.loop.monitor import Monitor
from gangline.models.loop.rates import Rates
from gangline.models.loop.stopping import signal_heard
from gangline.models.metrics.metric import EvalMetric
from gangline.models.random_streams import host_states, set_host_states

if TYPE_CHECKING:
    from gangline.models.module import Module

ALL_EPOCHS = "epochs"
"""Why training ended, where nothing has stopped it."""
_CALLBACK = "callback"
_ASYNC_STEPS = 100
"""Workers that are not in step, but have equally many batches, meet after so many to hear whether one wants to stop."""


@dataclass
class Epochs:
    """Training, epoch by epoch, written on Module's verbs."""

    module: Module
    train: Source
    evaluation: Source | None
    metric: EvalMetric
    validation: EvalMetric
    rates: Rates
    eval_frequency: EvalFrequency
    num_epoch: int
    accumulate: int
    monitor: Monitor | None
    batch_callbacks: Sequence[BatchCallback]
    epoch_callbacks: Sequence[EpochCallback]
    eval_callbacks: Sequence[BatchCallback]
    batches_per_epoch: int | None
    """Of the worker that has most; None where somebody does not know."""
    savers: list[Checkpoint] = field(init=False)

    def __post_init__(self) -> None:
        """Find the callbacks that save."""
        self.savers = savers_of([*self.batch_callbacks, *self.epoch_callbacks])

    def run(self, begin_epoch: int, skip: int, saved: checkpoint.Checkpoint | None) -> str:
        """Train, from batch ``skip`` of an epoch on; returns why that ended."""
        self.eval_frequency.begin(begin_epoch, skip)
        for epoch in range(begin_epoch, self.num_epoch):
            began = time.perf_counter()
            self.metric.reset()
            parts = self._begin_epoch(epoch, skip, saved)
            with self._adding():
                is_cut = self._train(enumerate(parts, skip), epoch)
            skip = 0
            if is_cut:
                for saver in self.savers:
                    saver.save_at_stop(epoch)
            else:
                self._end_epoch(epoch, began)
            if self.module.workers.stop is not None and (is_cut or epoch + 1 < self.num_epoch):
                return self.module.workers.stop
        return ALL_EPOCHS

    def _begin_epoch(self, epoch: int, skip: int, saved: checkpoint.Checkpoint | None) -> Iterator[Any]:
        """This worker's part of each batch; what a checkpoint in the epoch's middle must know is noted first."""
        module, train = self.module, self.train
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

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Have the module add up the gradients of batches while an epoch runs, where several make an update."""
        module, grad_req = self.module, self.module.grad_req
        try:
            if self.accumulate > 1:
                module.grad_req = "add"
            yield
        finally:
            module.grad_req = grad_req
            if self.accumulate > 1:
                module.drop_gradients()  # of a window that an error has cut off

    def _train(self, parts: Iterable[tuple[int, Any]], epoch: int) -> bool:
        """Run the batches of an epoch; True if all workers are to stop before its end."""
        module, waiting = self.module, 0  # batches whose gradients no update has used
        for nbatch, part in parts:
            if part is None and module.workers.count == 1:
                continue  # nothing of this batch could be read: no update, and nobody else to make one
            data, label = part if part is not None else (None, None)
            if not waiting:
                hear_signals(self.module)  # before what workers exchange in this step, which tells the others
                self._set_rate(epoch, nbatch)
                if self.monitor is not None:
                    self.monitor.tic()
            if self.accumulate == 1:
                module.forward_backward_update(data, label)
            else:
                module.forward_backward(data, label)
            waiting += 1
            due = waiting == self.accumulate
            if due and self.accumulate > 1:
                module.update()
            if part is not None:
                self.metric.update(label, module.get_outputs(), module)
            if due:
                is_last = nbatch + 1 == self.batches_per_epoch
                self._after_update(epoch, nbatch, waiting, data, label, is_last)
                waiting = 0
                if module.workers.stop is not None and not is_last:
                    return True
        if waiting:
            module.update()
            self._after_update(epoch, nbatch, waiting, data, label, is_last=True)
        return False

    def _after_update(self, epoch: int, nbatch: int, batches: int, data: Any, label: Any, is_last: bool) -> None:
        module = self.module
        module.position.batch = nbatch + 1
        self.rates.after_update()
        if self.monitor is not None:
            self.monitor.toc_print()
        validates = not is_last and self.evaluation is not None and self.eval_frequency.is_due(epoch, nbatch + 1)
        if validates or self.batch_callbacks:
            param = after(module, self.train, self.metric, epoch, nbatch, data, label, batches)
            now, then = _without_savers(self.batch_callbacks) if validates else (self.batch_callbacks, [])
            self._call(now, param)
            if validates:
                module.average_statistics()  # what is scored is what a checkpoint of this moment holds
                self._validate(epoch, f"Epoch[{epoch}] Batch [{nbatch + 1}]")
            self._call(then, param)
        hear_signals(self.module)
        workers = module.workers
        if workers.count > 1 and not workers.in_step and self.train.is_shared and not is_last:
            done = nbatch + 1
            if done // _ASYNC_STEPS > (done - batches) // _ASYNC_STEPS:
                workers.exchange(None)

    def _end_epoch(self, epoch: int, began: float) -> None:
        module, workers = self.module, self.module.workers
        module.average_statistics()
        module.position = type(module.position)(epoch + 1)
        self.metric.gather(workers)
        for name, value in self.metric.get_global_name_value():
            log(module, "Epoch[%d] Train-%s=%f", epoch, name, value)
        log(module, "Epoch[%d] Time cost=%.3f", epoch, time.perf_counter() - began)
        self.rates.after_epoch()
        now, then = _without_savers(self.epoch_callbacks)
        if now:
            params = module.get_params()
            names = {name for name, _ in module.network.named_parameters(remove_duplicate=False)}
            arg_params = {name: value for name, value in params.items() if name in names}
            buffers = {name: value for name, value in params.items() if name not in names}
            self._call(now, epoch, module.network, arg_params, buffers)
        ends = epoch + 1 == self.num_epoch
        if self.evaluation is not None and (self.eval_frequency.is_due_at_end(epoch) or ends):
            self._validate(epoch, f"Epoch[{epoch}]")
        hear_signals(self.module)
        workers.exchange(None)  # what anybody has asked for so far, all know from here on
        self._call(then, epoch)  # behind validation, whose outcome is part of what they save
        if workers.stop is not None and not ends:
            for saver in self.savers:
                saver.save_at_stop(epoch + 1)

    def _validate(self, epoch: int, where: str) -> None:
        assert self.evaluation is not None
        module = self.module
        states = host_states(None)  # a loader that scoring iterates draws; training must not see it
        call = lambda param: self._call(self.eval_callbacks, param)  # noqa: E731
        values = score(module, self.evaluation, self.validation, score_end_callback=call, epoch=epoch)
        set_host_states(states, None)
        for name, value in values:
            log(module, "%s Validation-%s=%f", where, name, value)
        self.rates.after_validation(dict(values))
        for saver in self.savers:
            saver.after_validation(dict(values))

    def _call(self, callbacks: Iterable[Any], *told: Any) -> None:
        for callback in callbacks:
            answer = callback(*told)
            if isinstance(answer, (bool, np.bool_)) and answer:
                self.module.workers.ask_to_stop(getattr(callback, "reason", _CALLBACK))

    def _set_rate(self, epoch: int, nbatch: int) -> None:
        rate = self.rates.rate(epoch, nbatch)
        if rate is not None and rate != self.module.learning_rate:
            self.module.set_learning_rate(rate)


def savers_of(callbacks: Iterable[Any]) -> list[Checkpoint]:
    """Those that save, each once."""
    return list(dict.fromkeys(callback for callback in callbacks if isinstance(callback, Checkpoint)))


def _without_savers(callbacks: Sequence[Any]) -> tuple[list[Any], list[Checkpoint]]:
    others = [callback for callback in callbacks if not isinstance(callback, Checkpoint)]
    return others, [callback for callback in callbacks if isinstance(callback, Checkpoint)]


def hear_signals(module: Module) -> None:
    """Ask all workers to stop, if this one has heard a signal."""
    name = signal_heard()
    if name is not None:
        module.workers.ask_to_stop(name)


def log(module: Module, line: str, *values: Any) -> None:
    """Log a line, once in a job."""
    if module.workers.is_first:
        module.logger.info(line, *values)
