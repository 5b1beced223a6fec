"""Steps: a network's replicas, stepped by MXNet's verbs: bind, init_optimizer, forward, backward, update."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from collectives.context import Context, contexts
from collectives.workload import check_work_load_list, split_batch
from kvstore import KVStore
from kvstore.optimizer import OptimizerState
from kvstore.optimizer_spec import OptimizerSpec, check_learning_rate
from models.batch import Batch, as_batch, concat, map_tensors, num_samples
from models.loss import Loss, Normalizer, SummedLoss
from models.replicas import Replicas, Share, call_network
from models.updates import Request, Updates


class Steps:
    """A training job's replicas, loss and optimizer, stepped from outside; `Module` builds the rest on it."""

    def __init__(
        self,
        network: nn.Module,
        loss: Loss = None,
        context: str | Context | Sequence[Context] = "auto",
        work_load_list: Sequence[float] | None = None,
        fixed_param_names: Sequence[str] | None = None,
        loss_normalizer: Normalizer | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Describe the job; replicas are made when they are first needed.

        Args:
            network: takes a batch's data, as one argument, or as several where the data is a tuple or dict.
            loss: a torch loss or a function of (output, label); None takes the network's output as the loss.
            context: one, a list, or words for `contexts`.
            work_load_list: one number >= 0 a context, in any unit; 0 leaves a context idle; None: equal loads.
            fixed_param_names: parameters that are not trained.
            loss_normalizer: what a loss of one's own divides by, as a function of the label; else samples.
            logger: where fit logs; None: "gangline".

        Raises:
            TypeError: a wrong type.
            ValueError: contexts that are not there, bad loads, unknown names, a loss that cannot be split.
        """
        if not isinstance(network, nn.Module):
            raise TypeError(f"network is a {type(network).__name__}; expected a torch.nn.Module")
        self.network = network
        self.contexts = contexts(context)
        self.work_load_list = check_work_load_list(work_load_list, len(self.contexts))
        self.logger = logger or logging.getLogger("gangline")
        self.seed = 0
        self.loss = SummedLoss(loss, loss_normalizer)
        self._fixed = self._known_parameters(fixed_param_names or ())
        self._step = 0
        self._for_training = True
        self._inputs_need_grad = False
        self._replicas: Replicas | None = None
        self._updates: Updates | None = None
        self.optimizer_request: Request | None = None
        """What `init_optimizer` was last asked for."""
        self.optimizer_is_fits = False
        """Whether `fit` asked; what the user asked for himself stays."""
        self._pending_state: OptimizerState | None = None
        self._shares: list[Share] = []
        self._normalizer = 0.0
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
    ) -> None:
        """Make the replicas before the first batch comes.

        Args:
            data_shapes: the shape of a batch's data, such as ``(64, 1, 28, 28)``, or a tuple, list or dict of shapes.
            label_shapes: the same for labels.
            for_training: what ``forward`` does when ``is_train`` is not given.
            inputs_need_grad: whether ``get_input_grads`` will be asked.

        Raises:
            ValueError: the batch sizes of the shapes differ.
        """
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
            self._replicas = Replicas(self.network, self.loss, self.contexts, self.work_load_list, self._fixed)
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
        updates = Updates(replicas, kvstore, spec, own_store)
        if self._pending_state is not None:
            updates.load_state(self._pending_state)
            self._pending_state = None
        if self._updates is not None and updates.store is not own_store:
            self._updates.close()
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
        data = as_batch(data, "data")
        size = num_samples(data, "data")
        if label is not None:
            label = as_batch(label, "label")
            labels = num_samples(label, "label")
            if labels != size:
                raise ValueError(f"data has {size} samples, but label has {labels}")
        train = self._for_training if is_train is None else is_train
        replicas = self._make_replicas(data)
        if train and self._gradients_used:
            replicas.clear_gradients()
        self._shares = []  # the last batch's graph goes before the next one is made
        self._shares = replicas.forward(
            data,
            label,
            split_batch(size, self.work_load_list),
            train=train,
            inputs_need_grad=self._inputs_need_grad and train,
            seed=(self.seed, self._step),
        )
        self._normalizer = 1.0 if self.loss.is_sum else sum(share.count for share in self._shares)
        self._step += train

    def backward(self, out_grads: Any = None) -> None:
        """Compute gradients of the last forward's loss, or of its outputs given ``out_grads``.

        A second backward before ``update`` adds to the first.

        Raises:
            RuntimeError: no forward in training mode came before, or it had neither loss nor out_grads.
            ValueError: ``out_grads`` has another batch size.
        """
        replicas = self._replicas
        if replicas is None or not self._shares:
            raise RuntimeError("backward() came before forward(); call forward(data, label) first")
        if not any(tensor.requires_grad for tensor in _graph(self._shares)):
            raise RuntimeError("backward() needs a forward() in training mode; call forward(..., is_train=True)")
        if out_grads is not None:
            grads = as_batch(out_grads, "out_grads")
            size = sum(share.samples for share in self._shares)
            if num_samples(grads, "out_grads") != size:
                raise ValueError(f"out_grads has {num_samples(grads, 'out_grads')} samples, but the batch has {size}")
            replicas.backward_from(self._shares, grads)
        elif self._shares[0].loss is None:
            raise RuntimeError(
                "backward() has no loss: forward() got no label, or loss=None and outputs that are no loss; "
                "give a label, or call backward(out_grads)"
            )
        else:
            replicas.backward(self._shares, self._normalizer)
        self._gradients_used = False

    def update(self) -> None:
        """Sum the gradients, run the optimizer once, and give every replica the new weights.

        Parameters that got no gradient are left alone.

        Raises:
            RuntimeError: before ``init_optimizer`` or before ``backward``.
        """
        updates = self._needs_updates("update()")
        if self._gradients_used:
            raise RuntimeError("update() came before backward(); call forward() and backward() first")
        updates.step()
        self._gradients_used = True

    def forward_backward(self, data: Any, label: Any = None) -> None:
        """`forward` in training mode, then `backward`."""
        self.forward(data, label, is_train=True)
        self.backward()

    def forward_backward_update(self, data: Any, label: Any = None) -> None:
        """A whole training step."""
        self.forward_backward(data, label)
        self.update()

    def get_outputs(self, merge: bool = True) -> Any:
        """The last forward's outputs, on the first context; ``merge=False`` gives a list, one a context that ran."""
        self._check_forwarded("get_outputs")
        outputs = [map_tensors(torch.Tensor.detach, share.output) for share in self._shares]
        return concat(outputs, self._shares[0].replica.context.torch_device) if merge else outputs

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
        grads = [
            map_tensors(lambda t: t.grad if t.grad is not None else torch.zeros_like(t), share.inputs)
            for share in self._shares
        ]
        return concat(grads, self._shares[0].replica.context.torch_device) if merge else grads

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
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
