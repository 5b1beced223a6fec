"""Training steps: forward, backward and update of batches over the replicas of a module."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from gangline.kvstore.workload import split_batch
from gangline.models.balance.worker_balance import WorkerBalance
from gangline.models.batchnorm.distributed_batchnorm import smallest_share
from gangline.models.data.batches import (
    Batch,
    as_batch,
    checked_batch,
    concat,
    is_empty,
    map_tensors,
    num_samples,
    tensors_of,
)
from gangline.models.elastic_workers import ElasticWorkers
from gangline.models.executor.context_balance import ContextBalance, MemoryLimits
from gangline.models.executor.executor import Executor, Share, is_out_of_memory
from gangline.models.loss.accumulation import GradientAccumulation
from gangline.models.loss.loss_scale import LossScale
from gangline.models.loss.summed_loss import SummedLoss
from gangline.models.optimizer_binding import NoOptimizer, OptimizerBinding
from gangline.models.replicas import all_finite
from gangline.models.run_state import RunState

_SMALL_OUTPUTS = 1 << 18  # elements to concatenate: counting one more share takes 0.2 ms, concatenating it 2 us
_context_index = attrgetter("replica.context_index")


class TrainingStep:
    """Runs batches forward and backward over the replicas, and updates the weights from their gradients.

    Each share's loss is summed and divided by the normalizer of this worker's batch, so that the sum of the replicas'
    gradients is that of the worker's mean loss. The store weights this gradient by the normalizer, to get the gradient
    of the mean over all workers.
    """

    def __init__(
        self,
        executor: Executor,
        loss: SummedLoss,
        run_state: RunState,
        *,
        loads: Sequence[float],
        load_balancer: ContextBalance | None,
        loss_scale: LossScale | None,
        logger: logging.Logger,
    ) -> None:
        """Start without an optimizer; fixed ``loads`` are used if there is no balancer."""
        self.network, self.bound, self.loss, self.run_state = executor.network, executor, loss, run_state
        self.logger = logger
        self.load_balancer = load_balancer
        """Measurements behind ``work_load_list="auto"``."""
        self.loss_scale = loss_scale
        """Scale of the loss under float16; None otherwise."""
        self._loads = list(loads)
        self._minimum = 1 if executor.sync_batchnorm else smallest_share(executor.network)
        self.grad_req = "write"
        """Accumulation of gradients before an `update`, see `bind`."""
        self._inputs_need_grad = False
        self._set_optimizer(NoOptimizer())
        self.seconds_waiting = 0.0
        """Seconds that steps have waited for the store, and through it for other workers; 0 without a store."""
        self._shares: list[Share] = []
        self._divisor: float | None = None  # of the batch's summed loss; None while it is unknown
        self._split: tuple[int, list[float]] | None = None  # samples and loads of the last cut
        self._cut: list[slice] = []
        self._first_sample = 0  # of this worker, within the batch of all workers
        self._has_no_samples = False
        self._accumulation = GradientAccumulation()
        self._input_factor = 1.0  # turns gradients of the inputs into those of the batch's own mean
        self._gradients_used = True
        self._weight: float | None = None
        """Number of samples of this worker's mean gradient; None if gradients are summed over the workers."""

    def _set_optimizer(self, optimizer: OptimizerBinding) -> None:
        """Set the optimizer of `update`, and join its workers' steps."""
        self._optimizer = optimizer
        self.workers = optimizer.workers
        """The workers of the job, from `init_optimizer` on."""
        self.workers.minimum = self._minimum
        self.worker_balance = WorkerBalance(self.workers, self.logger, best_split=self.load_balancer is not None)
        """Measurements of the workers, from `init_optimizer` on."""
        if self.workers.count > 1:
            self.bound.start_timers()

    @property
    def work_load_list(self) -> list[float]:
        """The current loads, one per context."""
        return self.load_balancer.loads if self.load_balancer is not None else self._loads

    @property
    def normalizer(self) -> float:
        """Divisor of the last forward's summed loss, on this worker."""
        return 1.0 if self.loss.is_sum else sum([share.count for share in self._shares], 0.0)

    def _unfrozen(self) -> list[str]:
        """Return the names of parameters that require gradients now and were frozen when the optimizer was set.

        Raises:
            RuntimeError: if there are some while gradients wait for `update`.
        """
        names = self.bound.replicas.unfrozen() if self._optimizer.is_set and self.bound.is_bound else []
        if names and not self._gradients_used:
            raise RuntimeError(f"{', '.join(names)} were unfrozen between backward() and update(); call update() first")
        return names

    # -- forward ------------------------------------------------------------------------------------------------

    def _run(self, data: Any, label: Any, *, train: bool) -> None:
        """Run a batch forward."""
        data, label = self._checked(data, label)
        replicas = self.bound.replicas
        if train:
            self._begin_batch(data)
        else:
            self._optimizer.begin_forward(train=False)
            replicas.copy_written(weights=not self._optimizer.is_set)
        try:
            self._forward_pass(data, label, train)
        finally:
            replicas.note()
        self.run_state.step += train

    def _forward_pass(self, data: Batch | None, label: Batch | None, train: bool) -> None:
        """Run a batch in one pass, or take part without samples; in evaluation, run parts that fit into memory."""
        self._shares = []  # frees the last batch's graph before the next one is built
        if data is not None:
            slices = self._slices(num_samples(data, "data"))
            if self.load_balancer is not None and not train:

                def run(steps: Sequence[Sequence[slice]]) -> list[Share]:
                    return [share for part in steps for share in self._run_forward(data, label, part, train=False)]

                self._shares = self._run_until_it_fits(self.load_balancer.limits, slices, run)
            else:
                with self._ending_on_error():
                    self._shares = self._run_forward(data, label, slices, train)
        elif train:
            self.bound.forward_without_samples()
        self._timed(self._optimizer.end_forward, has_samples=data is not None)

    def _slices(self, samples: int) -> list[slice]:
        split = samples, self.work_load_list
        if self._split != split:
            self._split, self._cut = split, split_batch(*split, self._minimum)
        return self._cut

    def _checked(self, data: Any, label: Any) -> tuple[Batch | None, Batch | None]:
        """Bind the replicas and return data and label as batches, or None on one of several workers without samples."""
        self._has_no_samples = self.workers.has_others and is_empty(data)
        data, label = (None, None) if self._has_no_samples else checked_batch(data, label)
        self.bound.bind(data)
        return data, label

    def _begin_batch(self, data: Batch | None) -> None:
        replicas = self.bound.replicas
        self._optimizer.begin_forward(train=True)
        replicas.copy_written(weights=not self._optimizer.is_set)
        replicas.copy_frozen_and_hooks()
        if isinstance(self.workers, ElasticWorkers):
            self._first_sample = self.workers.first_sample
        elif self.bound.dropout_by_sample and self.workers.in_step:
            own = 0 if data is None else num_samples(data, "data")
            counts = self._timed(self.workers.all_gather, own, "samples of each worker")
            self._first_sample = sum(counts[: self.workers.rank])
        if self._gradients_used:
            replicas.clear_gradients()
            self._accumulation = GradientAccumulation()
        self.bound.take_times()  # drops the times of a failed batch
        if self.load_balancer is not None:
            self.load_balancer.begin_batch()

    def _run_forward(
        self,
        data: Batch,
        label: Batch | None,
        slices: Sequence[slice],
        train: bool,
        number: int = 0,
        *,
        divisor: float | None = None,
    ) -> list[Share]:
        """Run one pass over the replicas; ``number`` counts the micro-steps of a batch."""
        seed, step = self.run_state.seed, self.run_state.step
        return self.bound.forward(
            data,
            label,
            slices,
            train=train,
            inputs_need_grad=self._inputs_need_grad and train,
            seed=(seed, step, number) if number else (seed, step),
            divisor=divisor,
            first_sample=self._first_sample,
        )

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(self, out_grads: Any = None) -> None:
        """Compute gradients of the last forward's loss, or from gradients of its outputs.

        A second backward before `update` adds to the first; see ``grad_req`` of `bind`.

        Args:
            out_grads: gradients of the outputs, for the whole batch; None: start from the loss.

        Raises:
            RuntimeError: if there was no forward in training mode, or there is neither a loss nor ``out_grads``.
            ValueError: if ``out_grads`` has another batch size.
        """
        if not self.bound.is_bound or not (self._shares or self._has_no_samples):
            raise RuntimeError("backward() came before forward(); call forward(data, label) first")
        if self._shares and not any(
            share.has_graph or any(tensor.requires_grad for tensor in tensors_of(share.output))
            for share in self._shares
        ):
            raise RuntimeError("backward() needs a forward() in training mode; call forward(..., is_train=True)")
        replicas = self.bound.replicas
        try:
            if out_grads is None:
                self._backward_from_loss(push_early=False)
                self._record_times()
            else:
                self._backward_from_outputs(out_grads)
        finally:
            replicas.note()
        self._gradients_used = False
        replicas.note_gradients(by_all=self.workers.has_others)

    def _backward_from_outputs(self, out_grads: Any) -> None:
        grads = as_batch(out_grads, "out_grads")
        size = sum(share.samples for share in self._shares)
        if not self._has_no_samples and num_samples(grads, "out_grads") != size:
            raise ValueError(f"out_grads has {num_samples(grads, 'out_grads')} samples, but the batch has {size}")
        if self.grad_req == "add":
            self._accumulation.add_output_gradients()
        elif not self._gradients_used:
            self._turn_mean_into_sum()
        self._weight = None
        self._begin_backward(self._shares)
        scale = self._scale
        self._input_factor = 1 / scale
        with self._ending_on_error(discards=True):
            self.bound.backward_from(self._shares, map_tensors(lambda grad: grad * scale, grads))
            self._timed(self._optimizer.end_backward, has_graph=bool(self._shares))

    def _backward_from_loss(self, *, push_early: bool) -> None:
        if self._shares:
            self._check_loss(self._shares)
        self._divisor = divisor = self._divisor_and_weight()
        self._backward_of(self._shares, divisor, push_early=push_early, discards=True)
        self._set_input_factor(divisor)

    def _record_times(self) -> None:
        """Record samples and time of each replica in this batch, after backward."""
        if self.load_balancer is None and self.workers.count == 1:
            return
        replicas, times = self.bound.replicas.all, self.bound.take_times()
        if times:
            waited = self._optimizer.take_seconds_waiting()  # only if there is one replica
            self.seconds_waiting += waited
            times[0].on_host -= waited
        samples = [0] * len(replicas)
        for share in self._shares:
            samples[replicas.index(share.replica)] += share.samples
        if self.load_balancer is not None and self._shares:
            self.load_balancer.measurements.add(samples, times)
        self.worker_balance.record(samples, times)

    def _divisor_and_weight(self) -> float:
        """Return the divisor of the batch's summed loss, and set the weight of its gradients."""
        if self.loss.is_sum:
            self._weight = None
            return 1.0
        if self.bound.joins_workers or (
            self._optimizer.shards_weights and (self.grad_req == "add" or not self._gradients_used)
        ):
            return self._joint_divisor()
        if self.grad_req == "add":
            divisor = self._accumulation.add(self.normalizer)
            self._weight = self._accumulation.total
            return divisor
        if self._gradients_used:
            self._weight = self.normalizer
            return self.normalizer or 1.0
        self._turn_mean_into_sum()  # a sum of means over different samples has no common weight
        return self._timed(self.workers.total, self.normalizer) or 1.0

    def _joint_divisor(self) -> float:
        """Return the divisor over all workers, whose gradients are summed without weights. Collective."""
        total = self._timed(self.workers.total, self.normalizer)
        divisor: float = total or 1.0
        if self.grad_req == "add":
            divisor = self._accumulation.add(total)
            total = self._accumulation.total
        self._weight = 0.0 if not total and (self._gradients_used or self.grad_req == "add") else None
        return divisor

    def _turn_mean_into_sum(self) -> None:
        """Scale gradients that are this worker's mean to its part of the mean over all workers. Collective."""
        if self._weight is not None and not self._optimizer.shards_weights:  # gradients are the mean over all workers
            factor = self._weight / (self._timed(self.workers.total, self._weight) or 1.0)
            if factor != 1.0:
                self.bound.replicas.scale_gradients(factor)
            self._weight = None

    def _backward_of(
        self, shares: Sequence[Share], divisor: float, *, discards: bool, push_early: bool = False, rerun: bool = False
    ) -> None:
        self._begin_backward(shares, push_early=push_early, rerun=rerun)
        with self._ending_on_error(discards=discards):
            self.bound.backward(shares, divisor / self._scale)
            self._timed(self._optimizer.end_backward, has_graph=any(share.has_graph for share in shares))

    def _begin_backward(self, shares: Sequence[Share], *, push_early: bool = False, rerun: bool = False) -> None:
        active = [self.bound.replicas.all.index(share.replica) for share in shares]
        self._optimizer.begin_backward(active, push_early=push_early, weight=self._weight, rerun=rerun)

    @contextmanager
    def _ending_on_error(self, *, discards: bool = False) -> Iterator[None]:
        """After an error, let workers that need this worker raise it; mark incomplete gradients as used."""
        try:
            yield
        except BaseException as error:
            self._gradients_used |= discards
            if isinstance(error, Exception):
                self._optimizer.refuse(error)
            raise

    @property
    def _scale(self) -> float:
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    def _set_input_factor(self, divisor: float) -> None:
        self._input_factor = divisor / (self.normalizer or float("nan")) / self._scale

    # -- update -------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Sum the gradients, run the optimizer once, and give every replica the new weights.

        Parameters without a gradient are not changed. If float16 gradients overflowed, the update is skipped. After an
        error the gradients are discarded; store and replicas have equal weights, of which some may be updated.

        Raises:
            RuntimeError: before `init_optimizer` or before `backward`.
        """
        if not self._optimizer.is_set:
            raise RuntimeError("update() came before init_optimizer(); call it first")
        if self._gradients_used:
            raise RuntimeError("update() came before backward(); call forward() and backward() first")
        replicas = self.bound.replicas
        finite = all_finite(replicas.all_gradients()) if self.loss_scale is not None else None
        self._gradients_used = True  # also after an error, which may leave gradients incomplete
        if replicas.noted_gradients and (names := replicas.take_written_gradients(by_all=self.workers.has_others)):
            raise RuntimeError(
                f"gradients of {', '.join(names)} were written between backward() and update(), but they are a part of "
                "the sum over all contexts and workers; expected clip_global_norm, clip_norm or clip_gradient in "
                "optimizer_params, or register_hook() of the parameter for what may be done to each part"
            )
        factor = self._accumulation.factor / self._scale
        if factor != 1.0:
            replicas.scale_gradients(factor)
        if self.loss_scale is not None and not self.loss_scale.accepts(self.workers.any(not finite)):
            self.loss_scale.log_skipped(self.logger, warns=self.workers.is_first)
            return
        try:
            self._timed(self._optimizer.update, self._weight)
        except BaseException as error:
            self._optimizer.abandon(error)
            raise

    def drop_gradients(self) -> None:
        """Discard gradients that no `update` has used."""
        self._gradients_used = True

    def _timed(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function; with a store, add its time to `seconds_waiting`."""
        if self._optimizer.store is None:
            return call(*arguments, **options)
        began = time.perf_counter()
        result = call(*arguments, **options)
        self.seconds_waiting += time.perf_counter() - began
        return result

    # -- whole steps --------------------------------------------------------------------------------------------

    def _run_both(self, data: Any, label: Any) -> None:
        """Run a batch forward and backward."""
        self._forward_backward(*self._checked(data, label), push_early=False)
        self.bound.replicas.note_gradients(by_all=self.workers.has_others)

    def _run_step(self, data: Any, label: Any) -> None:
        """Run a whole step."""
        data, label = self._checked(data, label)
        # With a loss scale no bucket is pushed early. A store updates the weights of a bucket once it is summed, and
        # cannot undo the update if the gradient of an earlier layer overflows afterwards.
        push_early = (
            self._optimizer.is_set and self.loss_scale is None and self._gradients_used and not self.bound.joins_workers
        )
        try:
            self._forward_backward(data, label, push_early=push_early)
            self.bound.replicas.noted_gradients = []  # nobody can write them before the update
            self.update()
        except BaseException as error:
            self.drop_gradients()
            if push_early:
                self._optimizer.abandon(error)
            raise

    def _forward_backward(self, data: Batch | None, label: Batch | None, *, push_early: bool) -> None:
        self._begin_batch(data)
        self._divisor = None
        self._shares = []
        balancer = self.load_balancer
        try:
            if data is None or balancer is None or self.bound.sync_batchnorm:  # joint statistics: the whole batch
                self._run_whole(data, label, push_early)
            else:
                self._run_in_parts(balancer, data, label, push_early)
        finally:
            self.bound.replicas.note()
        self.run_state.step += 1
        self._gradients_used = False
        self._record_times()

    def _run_whole(self, data: Batch | None, label: Batch | None, push_early: bool) -> None:
        """Run a batch forward and backward, in one task per replica if the normalizer is known in advance."""
        if push_early and data is not None and self.grad_req == "write" and self.bound.can_fuse_backward:
            samples = num_samples(data, "data")
            normalizer = self.loss.known_normalizer(label, samples)
            if normalizer is not None:
                self._fused_forward_backward(data, label, self._slices(samples), normalizer)
                return
        self._forward_pass(data, label, train=True)
        self._backward_from_loss(push_early=push_early)

    def _run_in_parts(self, balancer: ContextBalance, data: Batch, label: Batch | None, push_early: bool) -> None:
        """Run a batch whole or in micro-steps that fit into memory; after an out-of-memory error, in smaller ones."""
        replicas = self.bound.replicas
        if self.grad_req == "write" and not self._gradients_used:
            self._turn_mean_into_sum()
        kept = replicas.detach_gradients()
        undo = replicas.snapshot()
        has_failed = False

        def run(micro_steps: Sequence[Sequence[slice]]) -> list[Share]:
            if len(micro_steps) == 1:
                self._run_whole(data, label, push_early)
            else:
                self._run_micro_steps(data, label, micro_steps, rerun=has_failed)
            return self._shares

        def restore() -> None:
            nonlocal has_failed
            has_failed, self._shares = True, []
            undo()

        slices = self._slices(num_samples(data, "data"))
        with self._ending_on_error(discards=True):
            self._shares = self._run_until_it_fits(balancer.limits, slices, run, restore)
        replicas.add_gradients(kept)

    def _run_until_it_fits(
        self,
        limits: MemoryLimits,
        slices: Sequence[slice],
        run: Callable[[list[list[slice]]], list[Share]],
        restore: Callable[[], None] = lambda: None,
    ) -> list[Share]:
        """Run a batch in micro-steps that fit into each context's memory; return the shares, ordered by context.

        If they do not fit, ``restore`` undoes the failed attempt, and the next attempt has half the limits. Other
        errors, and errors of parts that cannot be made smaller, are raised.
        """
        while True:
            micro_steps = limits.micro_steps(slices)
            try:
                return sorted(run(micro_steps), key=_context_index)
            except Exception as error:
                restore()
                self.bound.take_times()  # drops the times of the failed attempt
                if not is_out_of_memory(error) or not limits.lower(self.bound.out_of_memory, micro_steps):
                    raise
            torch.cuda.empty_cache()  # outside the handler: the exception's frames hold tensors

    def _run_micro_steps(
        self, data: Batch, label: Batch | None, micro_steps: Sequence[Sequence[slice]], *, rerun: bool
    ) -> None:
        """Run a batch in parts, and free the graph of each.

        With ``rerun`` the batch has failed before. If backward had failed, divisor and weight are set, and buckets may
        have been pushed with gradients of the whole batch: the other buckets follow with gradients of the same sum.
        """
        samples = 1.0 if self.loss.is_sum else float(num_samples(data, "data"))
        divisor = self._divisor or samples
        for number, slices in enumerate(micro_steps):
            shares = self._run_forward(data, label, slices, True, number)
            self._check_loss(shares)
            self._backward_of(shares, divisor, discards=False, rerun=rerun)
            for share in shares:
                share.output = map_tensors(torch.Tensor.detach, share.output)
                share.loss = share.loss.detach() if share.loss is not None else None
            self._shares += shares
        if self._divisor is None:
            self._divisor = self._divisor_and_weight()
            if divisor != self._divisor:
                self.bound.replicas.scale_gradients(divisor / self._divisor)
        self._set_input_factor(divisor)

    def _fused_forward_backward(
        self, data: Batch, label: Batch | None, slices: Sequence[slice], normalizer: float
    ) -> None:
        """Run forward and backward of each replica in one thread task."""
        self._divisor = normalizer or 1.0
        self._weight = None if self.loss.is_sum else normalizer
        active = self.bound.active_replicas(slices)
        self._optimizer.begin_backward(active, push_early=True, weight=self._weight)
        self._shares = self._run_forward(data, label, slices, True, divisor=self._divisor)
        self._input_factor = normalizer / (normalizer or float("nan"))  # nothing is pushed early with a loss scale

    # -- results ------------------------------------------------------------------------------------------------

    def get_outputs(self, merge: bool = True) -> Any:
        """Return the last forward's outputs, on the first context; with ``merge=False`` a list, one per replica."""
        self._check_forwarded("get_outputs")
        return self._gather([map_tensors(torch.Tensor.detach, share.output) for share in self._shares], merge)

    def labelled_outputs(self) -> list[tuple[Batch | None, Batch]]:
        """Return (labels, outputs) of the last forward for metrics that can count a batch in parts.

        There is one pair per context, or a single pair on the first context if the outputs are small.
        """
        self._check_forwarded("labelled_outputs")
        labels = [share.label for share in self._shares]
        outputs = [map_tensors(torch.Tensor.detach, share.output) for share in self._shares]
        size = sum(tensor.numel() for output in outputs for tensor in tensors_of(output))
        if len(outputs) > 1 and size <= _SMALL_OUTPUTS:
            outputs = [self._gather(outputs, merge=True)]
            labels = [None if labels[0] is None else self._gather(labels, merge=True)]
        return list(zip(labels, outputs, strict=True))

    def get_loss(self) -> torch.Tensor:
        """Return the last forward's mean loss over this worker's batch: a scalar tensor on the first context."""
        self._check_forwarded("get_loss")
        losses = [share.loss.detach() for share in self._shares if share.loss is not None]
        if not losses:
            raise RuntimeError("get_loss() has no loss: forward() got no label")
        total = losses[0] if len(losses) == 1 else torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
        return total / self.normalizer

    def get_input_grads(self, merge: bool = True) -> Any:
        """Return the gradients of the last batch's data; needs ``bind(..., inputs_need_grad=True)``.

        Gradients of integer inputs, and of inputs that the loss does not depend on, are zeros.
        """
        self._check_forwarded("get_input_grads")
        if not self._inputs_need_grad:
            raise RuntimeError("get_input_grads() needs bind(..., inputs_need_grad=True)")
        if self._gradients_used:
            raise RuntimeError("get_input_grads() came before backward()")
        factor = self._input_factor
        grads = [
            map_tensors(lambda t: t.grad * factor if t.grad is not None else torch.zeros_like(t), share.inputs)
            for share in self._shares
        ]
        return self._gather(grads, merge)

    def _gather(self, parts: Sequence[Batch], merge: bool) -> Any:
        """Concatenate the shares' parts on the first context, or per replica in a list."""
        if merge:
            return concat(parts, self._shares[0].replica.context.torch_device)
        by_replica: dict[Any, list[Batch]] = {}
        for share, part in zip(self._shares, parts, strict=True):
            by_replica.setdefault(share.replica, []).append(part)
        return [
            own[0] if len(own) == 1 else concat(own, replica.context.torch_device)
            for replica, own in by_replica.items()
        ]

    def _check_loss(self, shares: Sequence[Share]) -> None:
        if shares[0].loss is None:
            raise self.loss.error_without_loss(shares[0].output)

    def _check_forwarded(self, call: str) -> None:
        if not self._shares:
            raise RuntimeError(f"{call}() came before forward()")
