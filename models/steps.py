"""Steps: a network's replicas, stepped by MXNet's verbs: bind, init_optimizer, forward, backward, update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from collectives.compression import parse
from collectives.context import Context, contexts
from collectives.workload import check_work_load_list, split_batch
from kvstore import KVStore
from kvstore.optimizer import OptimizerState
from kvstore.optimizer_spec import OptimizerSpec, check_learning_rate
from models.balance import AutoLoads
from models.batch import Batch, as_batch, concat, map_tensors, num_samples
from models.loss import Loss, Normalizer, SummedLoss
from models.loss_scale import LossScale
from models.memory import Limits, empty_caches, is_out_of_memory
from models.passes import Lap, Passes, Share, call_network
from models.replicas import Replicas
from models.updates import Request, Updates
from models.weighting import Weighting


class Steps:
    """A training job's replicas, loss and optimizer, stepped from outside; `Module` builds the rest on it."""

    def __init__(
        self,
        network: nn.Module,
        loss: Loss = None,
        context: str | Context | Sequence[Context] = "auto",
        work_load_list: Sequence[float] | str | None = None,
        fixed_param_names: Sequence[str] | None = None,
        compression_params: Mapping[str, Any] | None = None,
        sync_batchnorm: bool = False,
        loss_normalizer: Normalizer | None = None,
        logger: logging.Logger | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Describe the job; replicas are made when they are first needed.

        Args:
            network: takes a batch's data, as one argument, or as several where the data is a tuple or dict.
            loss: a torch loss or a function of (output, label); None takes the network's output as the loss.
            context: one, a list, or words for `contexts`.
            work_load_list: one number >= 0 a context, in any unit; 0 leaves a context idle; None: equal loads. "auto"
                measures the contexts while they train, splits by their speed, looks again every epoch, and has a
                context whose share does not fit into its memory run it in micro-steps.
            fixed_param_names: parameters that are not trained.
            compression_params: how gradients travel to the store, such as ``{"type": "2bit", "threshold": 0.03}``, in
                units of the mean over the global batch; see `KVStore.set_gradient_compression`.
            sync_batchnorm: take batch statistics over all replicas.
            loss_normalizer: what a loss of one's own divides by, as a function of the label; else samples.
            logger: where fit logs; None: "gangline".
            autocast: torch.bfloat16 or torch.float16: forward computes in it where torch's autocast does, parameters
                and gradients stay as they are. With float16 the loss is scaled, and steps that overflow are skipped.

        Raises:
            TypeError: a wrong type.
            ValueError: contexts that are not there, bad loads, unknown names, a loss that cannot be split.
        """
        if not isinstance(network, nn.Module):
            raise TypeError(f"network is a {type(network).__name__}; expected a torch.nn.Module")
        self.network = network
        self.contexts = contexts(context)
        self.logger = logger or logging.getLogger("gangline")
        self.auto: AutoLoads | None = None
        """What ``work_load_list="auto"`` has found out."""
        if isinstance(work_load_list, str):
            if work_load_list != "auto":
                raise ValueError(f"work_load_list is {work_load_list!r}; expected one number a context, or 'auto'")
            self.auto = AutoLoads([str(context) for context in self.contexts], self.logger)
            work_load_list = self.auto.loads
        self.work_load_list = check_work_load_list(work_load_list, len(self.contexts))
        self.limits = Limits(self.contexts, self.logger)
        """How many samples contexts hold at once; learnt under "auto"."""
        self._compression = parse(compression_params).params if compression_params is not None else None
        self._sync_batchnorm = bool(sync_batchnorm)
        self._autocast = _checked_autocast(autocast)
        self.loss_scale = LossScale() if autocast is torch.float16 else None
        """Of float16's loss."""
        self.seed = 0
        self.loss = SummedLoss(loss, loss_normalizer)
        self._fixed = self._known_parameters(fixed_param_names or ())
        self._step = 0
        self._for_training = True
        self._inputs_need_grad = False
        self.grad_req = "write"
        """What backwards before an `update` add up to; see `bind`."""
        self._weighting = Weighting()
        self._replicas: Replicas | None = None
        self._passes: Passes | None = None
        self._updates: Updates | None = None
        self.optimizer_request: Request | None = None
        """What `init_optimizer` was last asked for."""
        self.optimizer_is_fits = False
        """Whether `fit` asked; what the user asked for himself stays."""
        self._pending_state: OptimizerState | None = None
        self._shares: list[Share] = []
        self._laps: list[tuple[list[int], list[Lap]]] = []
        self._normalizer = 0.0
        self._input_factor = 1.0
        self._gradients_used = True

    def _known_parameters(self, names: Sequence[str]) -> list[str]:
        if isinstance(names, str):
            raise TypeError(f"fixed_param_names is {names!r}; expected a list of names")
        known = [name for name, _ in self.network.named_parameters()]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"fixed_param_names has {unknown}, which are no parameters; they are {known}")
        return list(names)

    def bind(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        grad_req: str = "write",
    ) -> None:
        """Make the replicas before the first batch comes.

        Args:
            data_shapes: the shape of a batch's data, such as ``(64, 1, 28, 28)``, or a tuple, list or dict of shapes.
            label_shapes: the same for labels.
            for_training: what ``forward`` does when ``is_train`` is not given.
            inputs_need_grad: whether ``get_input_grads`` will be asked.
            grad_req: "write": each backward's gradients are those of its own batch's mean, and what several of them
                before an ``update`` give is added. "add": several backwards before an ``update`` give the gradients of
                the mean over all their batches, each valid element counted once.

        Raises:
            ValueError: the batch sizes of the shapes differ, or an unknown ``grad_req``.
        """
        if grad_req not in ("write", "add"):
            raise ValueError(f"grad_req is {grad_req!r}; expected 'write' or 'add'")
        if self._replicas is not None:
            self.logger.warning("the module is bound already; bind() is ignored")
            return
        zeros = zeros_of(data_shapes, "data_shapes")
        size = num_samples(zeros, "data_shapes")
        if label_shapes is not None:
            labels = num_samples(zeros_of(label_shapes, "label_shapes"), "label_shapes")
            if labels != size:
                raise ValueError(f"data_shapes have a batch of {size}, but label_shapes one of {labels}")
        self._for_training = bool(for_training)
        self._inputs_need_grad = bool(inputs_need_grad)
        self.grad_req = grad_req
        self._make_replicas(zeros)

    @property
    def binded(self) -> bool:
        """Whether the replicas are made (MXNet's spelling)."""
        return self._replicas is not None

    @property
    def has_lazy_parameters(self) -> bool:
        """Whether parameters have no shape before a batch has come."""
        return bool(self._lazy_parameters())

    def bind_to(self, data: Any) -> None:
        """Make the replicas for batches like ``data``."""
        self._make_replicas(as_batch(data, "data"))

    def _lazy_parameters(self) -> list[str]:
        return [
            name
            for name, parameter in self.network.named_parameters()
            if isinstance(parameter, nn.parameter.UninitializedParameter)
        ]

    @property
    def replicas(self) -> Replicas:
        """The replicas, made when they are first asked for."""
        return self._make_replicas(None)

    def _make_replicas(self, data: Batch | None) -> Replicas:
        if self._replicas is None:
            self._materialise(data)
            loads = self.work_load_list if self.auto is None else [1] * len(self.contexts)
            self._replicas = Replicas(self.network, self.contexts, loads, self._fixed)
            self._passes = Passes(
                self._replicas.all,
                self.loss,
                sync_batchnorm=self._sync_batchnorm,
                autocast=self._autocast,
                measure=self.auto is not None,
            )
        return self._replicas

    def _materialise(self, data: Batch | None) -> None:
        """Run the network once where it has lazy layers, which learn their shapes from data."""
        lazy = self._lazy_parameters()
        if not lazy:
            return
        if data is None:
            raise RuntimeError(f"parameters {lazy} have no shape yet; call bind(data_shapes) or forward() first")
        training = self.network.training
        self.network.eval()
        with torch.no_grad():
            inputs = map_tensors(lambda tensor: tensor[:1].cpu(), data)
            call_network(self.network.cpu(), inputs)
        self.network.train(training)

    def init_optimizer(
        self, kvstore: str | KVStore | None = "local", optimizer: Any = "sgd", optimizer_params: Any = None
    ) -> None:
        """Choose who sums gradients and updates weights; calling it again begins with fresh optimizer state.

        Args:
            kvstore: a store's name, a store, or None. One context needs no store, and pays nothing for a name.
            optimizer: a name or a class of torch.optim; see `OptimizerSpec.parse`.
            optimizer_params: its arguments, by torch's names or MXNet's.

        Raises:
            ValueError: an unknown store, optimizer, argument or parameter name; None with several contexts.
            TypeError: a wrong type.
        """
        spec = OptimizerSpec.parse((optimizer, dict(optimizer_params or {})))
        replicas = self.replicas
        replicas.read_what_is_trained()
        spec.check_keys(name for name, _ in self.network.named_parameters())
        if not replicas.first.parameters:
            raise ValueError("the network has no parameter that is trained")
        own_store = self._updates.store if self._updates is not None else None
        updates = Updates(replicas, kvstore, spec, own_store, self._compression, self._pending_state)
        self._pending_state = None
        if self._updates is not None:
            self._updates.let_go()
            if updates.store is not own_store:
                self._updates.close()
        if self._compression is not None and updates.store is None:
            self.logger.warning("one context alone sends no gradients, so compression_params changes nothing")
        self._updates = updates
        self.optimizer_request = (kvstore, optimizer, dict(optimizer_params or {}))
        self.optimizer_is_fits = False

    @property
    def optimizer_initialized(self) -> bool:
        """Whether `init_optimizer` was called."""
        return self._updates is not None

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate; RuntimeError before `init_optimizer`."""
        return self._needs_updates("learning_rate").learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next update on."""
        check_learning_rate(learning_rate)
        self._needs_updates("set_learning_rate()").set_learning_rate(learning_rate)

    def optimizer_state(self) -> OptimizerState:
        """A copy of the optimizer's state, on the host; RuntimeError before `init_optimizer`."""
        return self._needs_updates("optimizer_state()").state()

    def _needs_updates(self, call: str) -> Updates:
        if self._updates is None:
            raise RuntimeError(f"{call} came before init_optimizer(); call it first")
        return self._updates

    # -- a step -------------------------------------------------------------------------------------------------

    def forward(self, data: Any, label: Any = None, is_train: bool | None = None) -> None:
        """Run the network on a batch, split over the contexts.

        Args:
            data: a tensor, array, tuple or dict, with the batch on the first axis of each tensor.
            label: the labels, likewise; None computes no loss (unless the output is the loss).
            is_train: training mode with gradients, or evaluation mode without; None: as bound.

        Raises:
            ValueError: the batch sizes of data and label differ, or there are no samples.
        """
        data, label = _checked_batch(data, label)
        train = self._for_training if is_train is None else is_train
        self._make_replicas(data)
        if train:
            self._begin_batch()
        self._shares = []  # the last batch's graph goes before the next one is made
        slices = split_batch(num_samples(data, "data"), self.work_load_list)
        if train or self.auto is None:
            self._shares = self._forward(data, label, slices, train)
        else:
            self._shares = self._in_rounds(slices, partial(self._forward, data, label, train=False))
        self._normalizer = self._normalizer_of(self._shares)
        self._step += train

    def _begin_batch(self) -> None:
        if self._gradients_used:
            self.replicas.clear_gradients()
            self._weighting = Weighting()
        if self.auto is not None:
            self._read_laps(wait=False)
            if self.auto.due() and self.auto.look():
                self.work_load_list = list(self.auto.loads)

    def _forward(
        self, data: Batch, label: Batch | None, slices: Sequence[slice], train: bool, number: int = 0
    ) -> list[Share]:
        """One pass over the replicas; ``number`` counts the passes of a batch."""
        assert self._passes is not None
        return self._passes.forward(
            data,
            label,
            slices,
            train=train,
            inputs_need_grad=self._inputs_need_grad and train,
            seed=(self.seed, self._step, number) if number else (self.seed, self._step),
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
        if self._passes is None or not self._shares:
            raise RuntimeError("backward() came before forward(); call forward(data, label) first")
        if not any(tensor.requires_grad for tensor in _graph(self._shares)):
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
                self._passes.backward_from(self._shares, map_tensors(lambda grad: grad * scale, grads))
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
        _check_loss(self._shares)
        divisor = self._normalizer
        counts = self.grad_req == "add" and not self.loss.is_sum
        if counts:
            divisor = self._weighting.divisor(self._normalizer)
        with self._dropping_what_fails():
            self._backward_of(self._shares, divisor, leave_early=leave_early)
        if counts:
            self._weighting.count(self._normalizer)
        self._note_divisor(divisor)
        self._record(self._shares)

    def _backward_of(self, shares: Sequence[Share], divisor: float, *, leave_early: bool) -> None:
        assert self._passes is not None
        self._begin_backward(shares, leave_early=leave_early)
        self._passes.backward(shares, divisor / self._loss_scaling)

    def _note_divisor(self, divisor: float) -> None:
        """Keep what turns the inputs' gradients into those of the batch's own mean."""
        self._input_factor = divisor / (self._normalizer or float("nan")) / self._loss_scaling

    def _begin_backward(self, shares: Sequence[Share], *, leave_early: bool) -> None:
        if self._updates is not None:
            places = [self.replicas.all.index(share.replica) for share in shares]
            self._updates.begin(places, leave_early=leave_early)

    def _record(self, shares: Sequence[Share]) -> None:
        """Note for "auto" what a batch took; a GPU may not have come to its end yet."""
        if self.auto is None or self._passes is None:
            return
        samples = [0] * len(self.contexts)
        for share in shares:
            samples[share.replica.number] += share.samples
        self._laps.append((samples, self._passes.laps()))

    def _read_laps(self, *, wait: bool) -> None:
        """Tell "auto" what batches took, those that are over or, with ``wait``, all."""
        assert self.auto is not None
        while self._laps and (wait or all(lap.is_over() for lap in self._laps[0][1])):
            samples, laps = self._laps.pop(0)
            seconds: list[float | None] = [None] * len(self.contexts)
            for replica, lap in zip(self.replicas.all, laps, strict=True):
                seconds[replica.number] = lap.seconds()
            self.auto.record(samples, seconds)

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
        if self.loss_scale is not None:
            factor /= self.loss_scale.value
            if not self.loss_scale.accepts(self.replicas.all_gradients()):
                self.logger.debug("gradients overflowed float16; the step is skipped")
                self._gradients_used = True
                return
        self._gradients_used = True  # whatever happens: what an error has spoilt must not be added to
        if factor != 1.0:
            self.replicas.scale_gradients(factor)
        try:
            updates.step()
        except BaseException as error:
            updates.abandon(error)
            raise

    def forward_backward(self, data: Any, label: Any = None) -> None:
        """`forward` in training mode, then `backward`.

        With ``work_load_list="auto"`` a batch for which a context's memory is too small is done again in micro-steps.
        """
        if self.auto is None or self._sync_batchnorm:  # statistics of a whole batch want the whole batch at once
            self.forward(data, label, is_train=True)
            self.backward()
            return
        data, label = _checked_batch(data, label)
        self._make_replicas(data)
        self._begin_batch()
        self._shares = []
        slices = split_batch(num_samples(data, "data"), self.work_load_list)
        weighting = self._weighting if self.grad_req == "add" else Weighting()
        divisor = 1.0 if self.loss.is_sum else weighting.divisor(num_samples(data, "data"))
        kept = self.replicas.set_gradients_aside()
        put_back = self.replicas.snapshot()
        with self._dropping_what_fails():
            self._shares = self._in_rounds(slices, partial(self._whole_round, data, label, divisor), put_back)
        self._normalizer = self._normalizer_of(self._shares)
        if not self.loss.is_sum:
            weighting.count(self._normalizer)
        if self.grad_req == "write" and weighting.factor != 1.0:
            self.replicas.scale_gradients(weighting.factor)
        self.replicas.add_gradients(kept)
        self._note_divisor(divisor)
        self._step += 1
        self._gradients_used = False
        self._record(self._shares)

    def _in_rounds(
        self, slices: Sequence[slice], run: Callable[..., list[Share]], put_back: Callable[[], None] = lambda: None
    ) -> list[Share]:
        """Run the parts of a batch that fit into each context's memory; where one does not, all again in smaller ones.

        Args:
            slices: one a context, of the batch.
            run: runs a round, given its slices and number.
            put_back: undoes what a round that failed has done.
        """
        assert self._passes is not None
        while True:
            rounds = self.limits.rounds(slices)
            try:
                shares = [share for number, parts in enumerate(rounds) for share in run(slices=parts, number=number)]
            except Exception as error:
                put_back()
                self._passes.laps()  # what the failed attempt took says nothing of the contexts' speed
                if not is_out_of_memory(error) or not self.limits.lower(self._passes.out_of_memory, rounds):
                    raise
            else:
                return sorted(shares, key=lambda share: share.replica.number)
            empty_caches(self.contexts)  # here the error is gone, and with it what its frames held

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
            self.forward(data, label, is_train=True)
            try:
                self._backward(leave_early=True)
            except BaseException as error:
                self._updates.abandon(error)
                raise
            self._gradients_used = False
        self.update()

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
            self._read_laps(wait=True)
            self.auto.begin_epoch()
            self.work_load_list = list(self.auto.loads)

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """What gradient compression has left out so far, on the host; see `KVStore.compression_residuals`."""
        return self._updates.compression_residuals() if self._updates is not None else {}

    def get_loss(self) -> torch.Tensor:
        """The last forward's loss over the whole batch, without axes, on the first context."""
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
        """What the last forward's summed loss was divided by."""
        return self._normalizer

    @property
    def step(self) -> int:
        """Training batches run so far; the random streams of the contexts depend on it."""
        return self._step

    def close(self) -> None:
        """End the threads, and the store if it was made here; the network keeps its weights."""
        if self._updates is not None:
            self._updates.close()
        self._updates = None
        self._shares = []
        if self._passes is not None:
            self._passes.close()
        self._replicas = self._passes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_batch(data: Any, label: Any) -> tuple[Batch, Batch | None]:
    data = as_batch(data, "data")
    size = num_samples(data, "data")
    if label is not None:
        label = as_batch(label, "label")
        labels = num_samples(label, "label")
        if labels != size:
            raise ValueError(f"data has {size} samples, but label has {labels}")
    return data, label


def _check_loss(shares: Sequence[Share]) -> None:
    if shares[0].loss is None:
        raise RuntimeError(
            "backward() has no loss: forward() got no label, or loss=None and outputs that are no loss; "
            "give a label, or call backward(out_grads)"
        )


def _checked_autocast(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is {dtype!r}; expected torch.bfloat16, torch.float16 or None")
    return dtype


def _graph(shares: Iterable[Share]) -> Iterator[torch.Tensor]:
    for share in shares:
        if share.loss is not None:
            yield share.loss
        found: list[torch.Tensor] = []
        map_tensors(found.append, share.output)
        yield from found


def zeros_of(shapes: Any, what: str) -> Batch:
    """Zeros of the shapes that a shape, or a tuple, list or dict of shapes, describes."""
    if isinstance(shapes, Mapping):
        return {name: zeros_of(shape, what) for name, shape in shapes.items()}
    if isinstance(shapes, (tuple, list)) and shapes:
        if all(isinstance(size, int) and not isinstance(size, bool) for size in shapes):
            return torch.zeros(*shapes)
        return tuple(zeros_of(shape, what) for shape in shapes)
    raise TypeError(f"{what} is {shapes!r}; expected a shape such as (64, 1, 28, 28), or a tuple or dict of shapes")
