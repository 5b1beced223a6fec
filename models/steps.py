"""Steps: a job's replicas, stepped by MXNet's verbs: forward, backward, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gangline.collectives.workload import split_batch
from gangline.models.data.batches import Batch, as_batch, checked_batch, concat, map_tensors, num_samples
from gangline.models.executor.autograd_graph import reached
from gangline.models.executor.executor import Share
from gangline.models.job import Job
from gangline.models.loss.accumulation import Weighting
from gangline.models.reducer.worker_reducer import Expected, named_by_any
from gangline.models.updates import Updates


class Steps(Job):
    """A job that is stepped from outside; `Module` builds the rest on it."""

    seconds_waiting = 0.0
    """How long the training thread has waited for the store, and through it for other workers, in steps so far: what
    sums, updates and pulls took beyond the backwards that they ran beside. 0 for a context that needs no store."""

    def forward(self, data: Any, label: Any = None, is_train: bool | None = None) -> None:
        """Run the network on a batch, split over the contexts.

        Args:
            data: a tensor, array, tuple or dict, with the batch on the first axis of each tensor. In a job of several
                workers this one's part of the batch; None where it has no samples of it and only takes part.
            label: the labels, likewise; None computes no loss (unless the output is the loss).
            is_train: training mode with gradients, or evaluation mode without; None: as bound.

        Raises:
            ValueError: the batch sizes of data and label differ, or there are no samples.
        """
        data, label = self._checked(data, label)
        train = self._for_training if is_train is None else is_train
        self._make_replicas(data)
        if train:
            self._begin_batch()
        self._shares = []  # the last batch's graph goes before the next one is made
        if data is not None:
            slices = split_batch(num_samples(data, "data"), self.work_load_list)
            run = partial(self._forward, data, label, train=train)
            in_rounds = self.auto is not None and not train
            self._shares = self.auto.in_rounds(slices, self.passes, run) if self.auto and in_rounds else run(slices)
        self._normalizer = self._normalizer_of(self._shares)
        self._step += train

    def _checked(self, data: Any, label: Any) -> tuple[Batch | None, Batch | None]:
        """Data and label as batches; None is a part without samples, which only one of several workers can have."""
        self._has_no_samples = data is None and self.workers.count > 1
        return (None, None) if self._has_no_samples else checked_batch(data, label)

    def _begin_batch(self) -> None:
        if self._gradients_used:
            self.replicas.clear_gradients()
            self._weighting = Weighting()
        if self.auto is not None:
            self.auto.begin_batch()
            self.work_load_list = self.auto.loads

    def _forward(
        self,
        data: Batch,
        label: Batch | None,
        slices: Sequence[slice],
        train: bool,
        number: int = 0,
        divisor: float | None = None,
    ) -> list[Share]:
        """One pass over the replicas; ``number`` counts the passes of a batch."""
        return self.passes.forward(
            data,
            label,
            slices,
            train=train,
            inputs_need_grad=self._inputs_need_grad and train,
            seed=(self.seed, self._step, number) if number else (self.seed, self._step),
            divisor=divisor,
        )

    def _normalizer_of(self, shares: Sequence[Share]) -> float:
        return 1.0 if self.loss.is_sum else sum(share.count for share in shares)

    def backward(self, out_grads: Any = None) -> None:
        """Compute gradients of the last forward's loss, or of its outputs given ``out_grads``.

        A second backward before ``update`` adds to the first; see ``grad_req`` of `bind`.

        Raises:
            RuntimeError: no forward in training mode came before, or it had neither loss nor out_grads.
            ValueError: ``out_grads`` has another batch size.
        """
        if self._passes is None or not (self._shares or self._has_no_samples):
            raise RuntimeError("backward() came before forward(); call forward(data, label) first")
        if self._shares and not any(tensor.requires_grad for tensor in _graph(self._shares)):
            raise RuntimeError("backward() needs a forward() in training mode; call forward(..., is_train=True)")
        if out_grads is not None:
            grads = as_batch(out_grads, "out_grads")
            size = sum(share.samples for share in self._shares)
            if num_samples(grads, "out_grads") != size:
                raise ValueError(f"out_grads has {num_samples(grads, 'out_grads')} samples, but the batch has {size}")
            if self.grad_req == "add":
                self._weighting.take_given()
            self._begin_backward(self._shares, leave_early=False)
            scale = self._loss_scaling
            self._input_factor = 1 / scale
            with self._dropping_what_fails():
                self.passes.backward_from(self._shares, map_tensors(lambda grad: grad * scale, grads))
        else:
            self._backward(leave_early=False)
        self._gradients_used = False

    @property
    def _loss_scaling(self) -> float:
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    @contextmanager
    def _dropping_what_fails(self) -> Iterator[None]:
        """After an error in backward, have the next forward begin with no gradients: those there are incomplete."""
        try:
            yield
        except BaseException:
            self._gradients_used = True
            raise

    def _backward(self, *, leave_early: bool) -> None:
        """Backward of the last forward's loss."""
        if self._shares:
            _check_loss(self._shares)
        divisor, expected = self._normalizer, None
        counts = self.grad_req == "add" and not self.loss.is_sum
        if counts:
            divisor = self._weighting.divisor(self._normalizer)
            leave_early = leave_early and not self.workers.in_step  # the divisor is for update() to find
        elif self.workers.in_step:
            divisor, expected = self._agree(leave_early=leave_early)
        with self._dropping_what_fails():
            self._backward_of(self._shares, divisor, leave_early=leave_early, expected=expected)
        if counts:
            self._weighting.count(self._normalizer)
        self._note_divisor(divisor)
        if self.auto is not None and self._shares:
            self.auto.record(self._shares, self.passes)

    def _agree(self, *, leave_early: bool) -> tuple[float, Expected | None]:
        """The whole batch's normaliser, and the gradients that workers in step will have; one exchange."""
        names = list(self.replicas.first.parameters)
        here: dict[int, set[str]] = {}
        for share in self._shares if leave_early else ():
            if share.loss is not None:
                found = reached([share.loss], share.replica.parameters)
                here.setdefault(self.replicas.all.index(share.replica), set()).update(found)
        own = bytes(any(name in found for found in here.values()) for name in names)
        everybody = self._timed(self.workers.exchange, [self._normalizer, own])
        divisor = 1.0 if self.loss.is_sum else sum(normalizer for normalizer, _ in everybody)
        if not leave_early:
            return divisor, None
        return divisor, Expected(named_by_any(names, [theirs for _, theirs in everybody]), here)

    def _backward_of(
        self, shares: Sequence[Share], divisor: float, *, leave_early: bool, expected: Expected | None = None
    ) -> None:
        self._begin_backward(shares, leave_early=leave_early, expected=expected)
        self.passes.backward(shares, divisor / self._loss_scaling)

    def _note_divisor(self, divisor: float) -> None:
        """Keep what turns the inputs' gradients into those of the batch's own mean."""
        self._input_factor = divisor / (self._normalizer or float("nan")) / self._loss_scaling

    def _begin_backward(self, shares: Sequence[Share], *, leave_early: bool, expected: Expected | None = None) -> None:
        if self._updates is not None:
            places = [self.replicas.all.index(share.replica) for share in shares]
            self._updates.begin(places, leave_early=leave_early, expected=expected)

    def update(self) -> None:
        """Sum the gradients, run the optimizer once, and give every replica the new weights.

        Parameters that got no gradient are left alone. With a float16 loss whose gradients overflowed, all are. After
        an error the gradients are dropped; what it left updated is so in the store and in every replica.

        Raises:
            RuntimeError: before ``init_optimizer`` or before ``backward``.
        """
        updates = self._needs_updates("update()")
        if self._gradients_used:
            raise RuntimeError("update() came before backward(); call forward() and backward() first")
        factor = self._weighting.factor
        if self.workers.in_step and self.grad_req == "add":
            factor = self._weighting.factor_for(self._timed(self.workers.total, self._weighting.total))
        if self.loss_scale is not None:
            factor /= self.loss_scale.value
            if not self.loss_scale.accepts(self.replicas.all_gradients(), self.workers.any):
                self.logger.debug("gradients overflowed float16; the step is skipped")
                self._gradients_used = True
                return
        self._gradients_used = True  # whatever happens: what an error has spoilt must not be added to
        if factor != 1.0:
            self.replicas.scale_gradients(factor)
        try:
            self._timed(updates.step)
        except BaseException as error:
            updates.abandon(error)
            raise

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What ``call`` returns; its time counts as waiting where there is a store."""
        if self._updates is None or self._updates.store is None:
            return call(*arguments)
        began = time.perf_counter()
        result = call(*arguments)
        self.seconds_waiting += time.perf_counter() - began
        return result

    def forward_backward(self, data: Any, label: Any = None) -> None:
        """`forward` in training mode, then `backward`.

        With ``work_load_list="auto"`` a batch for which a context's memory is too small is done again in micro-steps.
        """
        if self.auto is None or self._sync_batchnorm:  # statistics of a whole batch want the whole batch at once
            self.forward(data, label, is_train=True)
            self.backward()
            return
        data, label = self._checked(data, label)
        self._make_replicas(data)
        self._begin_batch()
        self._shares = []
        samples = num_samples(data, "data") if data is not None else 0
        weighting = self._weighting if self.grad_req == "add" else Weighting()
        divisor = 1.0 if self.loss.is_sum else weighting.divisor(samples)
        kept = self.replicas.set_gradients_aside()
        put_back = self.replicas.snapshot()
        with self._dropping_what_fails():
            if data is not None:
                run = partial(self._whole_round, data, label, divisor)
                slices = split_batch(samples, self.work_load_list)
                self._shares = self.auto.in_rounds(slices, self.passes, run, put_back)
        self._normalizer = self._normalizer_of(self._shares)
        if not self.loss.is_sum:
            weighting.count(self._normalizer)
        if self.grad_req == "write":
            factor = weighting.factor_for(self._timed(self.workers.total, weighting.total))
            if factor != 1.0:
                self.replicas.scale_gradients(factor)
        self.replicas.add_gradients(kept)
        self._note_divisor(divisor)
        self._step += 1
        self._gradients_used = False
        if self._shares:
            self.auto.record(self._shares, self.passes)

    def _whole_round(
        self, data: Batch, label: Batch | None, divisor: float, slices: Sequence[slice], number: int
    ) -> list[Share]:
        """Forward and backward of one part of a batch; its graph is freed."""
        shares = self._forward(data, label, slices, True, number)
        _check_loss(shares)
        self._backward_of(shares, divisor, leave_early=False)
        for share in shares:
            share.output = map_tensors(torch.Tensor.detach, share.output)
            share.loss = share.loss.detach() if share.loss is not None else None
        return shares

    def forward_backward_update(self, data: Any, label: Any = None) -> None:
        """A whole training step; gradients leave for the store while backward still runs.

        A store updates what has left: if backward fails in its middle, some parameters have made the step and others
        have not. Store and replicas agree on them, and the error's notes say how many.
        """
        early = self.auto is None and self.loss_scale is None and self._gradients_used
        if self._updates is None or not early:
            self.forward_backward(data, label)
        else:
            data, label = self._checked(data, label)
            normalizer = self._known_normalizer(data, label)
            if normalizer is None:
                self.forward(data, label, is_train=True)
            try:
                if normalizer is None:
                    self._backward(leave_early=True)
                else:
                    self._go_through(self._updates, data, label, normalizer)
            except BaseException as error:
                self._updates.abandon(error)
                raise
            self._gradients_used = False
        self.update()

    def _known_normalizer(self, data: Batch | None, label: Batch | None) -> float | None:
        """The batch's normaliser, where it is known before forward and nobody need meet for it."""
        if data is None or self.workers.in_step:
            return None
        if self.grad_req != "write" or not self.passes.can_go_on:
            return None
        return self.loss.known_normalizer(label, num_samples(data, "data"))

    def _go_through(self, updates: Updates, data: Batch, label: Batch | None, normalizer: float) -> None:
        """Forward and backward at one go, each replica in its thread."""
        self._begin_batch()
        self._shares = []
        slices = split_batch(num_samples(data, "data"), self.work_load_list)
        updates.begin(self.passes.places(slices), leave_early=True)
        with self._dropping_what_fails():
            self._shares = self._forward(data, label, slices, True, divisor=normalizer)
        self._normalizer = normalizer
        self._note_divisor(normalizer)
        self._step += 1

    def get_outputs(self, merge: bool = True) -> Any:
        """The last forward's outputs, on the first context; ``merge=False`` gives a list, one a context that ran."""
        self._check_forwarded("get_outputs")
        return self._gathered([map_tensors(torch.Tensor.detach, share.output) for share in self._shares], merge)

    def drop_gradients(self) -> None:
        """Forget gradients that no `update` has used: the next forward begins anew."""
        self._gradients_used = True

    def begin_epoch(self) -> None:
        """Have ``work_load_list="auto"`` look again at what the contexts' shares took."""
        if self.auto is not None:
            self.auto.begin_epoch()
            self.work_load_list = self.auto.loads

    def get_loss(self) -> torch.Tensor:
        """The last forward's loss over the whole batch, of this worker, without axes, on the first context."""
        self._check_forwarded("get_loss")
        losses = [share.loss.detach() for share in self._shares if share.loss is not None]
        if not losses:
            raise RuntimeError("get_loss() has no loss: forward() got no label")
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum() / self._normalizer

    def get_input_grads(self, merge: bool = True) -> Any:
        """The gradients of the last batch's data; needs ``bind(..., inputs_need_grad=True)``.

        Inputs that are no floating-point numbers, or that nothing depends on, have gradients of zeros.
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
        return self._gathered(grads, merge)

    def _gathered(self, parts: Sequence[Batch], merge: bool) -> Any:
        """What the shares have, joined on the first context, or a list with one entry a context."""
        if merge:
            return concat(parts, self._shares[0].replica.context.torch_device)
        replicas = dict.fromkeys(share.replica for share in self._shares)
        of_replicas = [
            [part for share, part in zip(self._shares, parts, strict=True) if share.replica is replica]
            for replica in replicas
        ]
        return [
            own[0] if len(own) == 1 else concat(own, replica.context.torch_device)
            for replica, own in zip(replicas, of_replicas, strict=True)
        ]

    def _check_forwarded(self, call: str) -> None:
        if not self._shares:
            raise RuntimeError(f"{call}() came before forward()")

    @property
    def normalizer(self) -> float:
        """What the last forward's summed loss counts, on this worker."""
        return self._normalizer


def _check_loss(shares: Sequence[Share]) -> None:
    if shares[0].loss is None:
        raise RuntimeError(
            "backward() has no loss: forward() got no label, or loss=None and outputs that are no loss; "
            "give a label, or call backward(out_grads)"
        )


def _graph(shares: Iterable[Share]) -> Iterator[torch.Tensor]:
    for share in shares:
        if share.loss is not None:
            yield share.loss
        found: list[torch.Tensor] = []
        map_tensors(found.append, share.output)
        yield from found
