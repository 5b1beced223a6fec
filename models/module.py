"""Module: a network trained on one or several contexts, with MXNet's verbs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collectives.context import Context, contexts
from collectives.workload import check_work_load_list, split_batch
from kvstore import KVStore, create
from kvstore.optimizer import KeyedOptimizer, OptimizerState
from kvstore.optimizer_spec import OptimizerSpec, check_learning_rate
from models import checkpoint, loops
from models.batch import Batch, as_batch, concat, map_tensors, num_samples
from models.initializer import InitializerSpec, initialise
from models.loss import Loss, Normalizer, SummedLoss
from models.replicas import Replicas, Share

Params = Mapping[str, torch.Tensor]


@dataclass
class Position:
    """Where training stands: what a run that goes on must know."""

    epoch: int = 0
    """Epochs completed."""
    batch: int = 0
    """Batches done of the epoch that runs."""
    plan: dict[str, Any] = field(default_factory=dict)
    """How that epoch is read: seed, shuffle, batch size, number of samples."""
    random: dict[str, Any] = field(default_factory=dict)
    """The host's random states as that epoch began."""


class Module:
    """A network trained on one or several contexts as one would train it.

    Each context with a load holds a replica; a batch is split over them by ``work_load_list``, each share's loss
    counts by what it holds of the whole batch, gradients are summed and the weights updated once. The network
    itself is the first replica, moved to its context.

    Life: ``bind`` (the first batch does it) -> ``init_params`` (the network's own values serve) ->
    ``init_optimizer`` -> ``forward``, ``backward``, ``update``, over and over. `fit`, `score` and `predict` do it all.
    """

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
        self.position = Position()
        self.seed = 0
        self.data_generator: torch.Generator | None = None  # a DataLoader's own, of the running fit
        self.loss = SummedLoss(loss, loss_normalizer)
        self._fixed = self._known_parameters(fixed_param_names or ())
        self._step = 0
        self._for_training = True
        self._inputs_need_grad = False
        self._params_given = False
        self._replicas: Replicas | None = None
        self._store: KVStore | None = None
        self._own_store = False
        self._optimizer: KeyedOptimizer | None = None
        self._request: tuple[Any, ...] | None = None
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

    # -- bind and initialise ------------------------------------------------------------------------------------

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
        zeros = _zeros(data_shapes, "data_shapes")
        size = num_samples(zeros, "data_shapes")
        if label_shapes is not None:
            labels = num_samples(_zeros(label_shapes, "label_shapes"), "label_shapes")
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
    def optimizer_initialized(self) -> bool:
        """Whether `init_optimizer` was called."""
        return self._request is not None

    @property
    def optimizer_request(self) -> tuple[Any, ...] | None:
        """(kvstore, optimizer, optimizer_params) of the last `init_optimizer`."""
        return self._request

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
            self.network.cpu()(*inputs) if isinstance(inputs, tuple) else self.network.cpu()(inputs)
        self.network.train(training)

    def init_params(
        self,
        initializer: InitializerSpec | None = None,
        arg_params: Params | None = None,
        allow_missing: bool = False,
        allow_extra: bool = False,
        force_init: bool = False,
    ) -> None:
        """Give the parameters values: those of ``arg_params``, else the initializer's, else the network's own.

        Args:
            initializer: a name of MXNet's ("xavier", "uniform", ...), (name, arguments), or a function that
                fills a tensor; biases become 0 and normalisation layers what torch begins with.
            arg_params: tensors by state_dict name; a leading ``module.`` on all of them is dropped.
            allow_missing: let names that ``arg_params`` lacks take the initializer's or their own values.
            allow_extra: ignore names that the network does not have.
            force_init: do it again though it was done.

        Raises:
            RuntimeError: names are missing from ``arg_params``.
            ValueError: it has extra ones, or a tensor of another shape.
        """
        if self._params_given and not force_init:
            self.logger.warning("the parameters are initialised already; init_params() is ignored (force_init=True)")
            return
        replicas = self._make_replicas(None)
        state = {}
        if arg_params is not None:
            state = checkpoint.matched(replicas.first.network, arg_params, allow_missing, allow_extra)
        if initializer is not None:
            initialise(replicas.first.network, initializer, skip=set(state))
            state = replicas.first.network.state_dict() | state
        self._params_given = True
        self._load_state(state)

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
        replicas = self._make_replicas(None)
        spec.check_keys(name for name, _ in self.network.named_parameters())
        if not replicas.first.parameters:
            raise ValueError("the network has no parameter that is trained")
        if kvstore is not None and not isinstance(kvstore, (str, KVStore)):
            raise TypeError(f"kvstore is {kvstore!r}; expected a store, its name, or None")
        if kvstore is None and len(replicas.all) > 1:
            raise ValueError(f"kvstore is None, but gradients of {len(replicas.all)} contexts need one to sum them")
        self._drop_store()
        if isinstance(kvstore, KVStore):
            self._store = kvstore
        elif kvstore is not None:
            store = create(kvstore)  # an unknown name is an error, also where no store is needed
            if len(replicas.all) > 1 or store.num_workers > 1:
                self._store, self._own_store = store, True
            else:
                store.close()
        if self._store is not None:
            self._store.set_optimizer(spec)
            names = list(replicas.first.parameters)
            weights = [replicas.weights(name) for name in names]
            self._store.broadcast(names, [of_name[0] for of_name in weights], weights)
        else:
            self._optimizer = KeyedOptimizer(spec)
            for name, parameter in replicas.first.parameters.items():
                self._optimizer.add(name, parameter)
        self._request = (kvstore, optimizer, dict(optimizer_params or {}))
        self._params_given = True
        if self._pending_state is not None:
            self._load_optimizer_state(self._pending_state)
            self._pending_state = None

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
        if self._request is None:
            raise RuntimeError("update() came before init_optimizer(); call it first")
        replicas = self._replicas
        if replicas is None or self._gradients_used:
            raise RuntimeError("update() came before backward(); call forward() and backward() first")
        gradients = replicas.gradients()
        if self._store is not None:
            names = list(gradients)
            self._store.pushpull(names, list(gradients.values()), [replicas.weights(name) for name in names])
        elif self._optimizer is not None:
            self._optimizer.update([(name, gradient) for name, (gradient,) in gradients.items()])
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

    # -- parameters and learning rate ---------------------------------------------------------------------------

    def get_params(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers on the host, by state_dict name; running statistics averaged over replicas."""
        return self._make_replicas(None).state_dict()

    def set_params(self, params: Params, allow_missing: bool = False, allow_extra: bool = False) -> None:
        """Replace parameters and buffers everywhere, in the store too.

        Raises:
            RuntimeError: names are missing.
            ValueError: extra ones, or a tensor of another shape.
        """
        replicas = self._make_replicas(None)
        self._load_state(checkpoint.matched(replicas.first.network, params, allow_missing, allow_extra))

    def _load_state(self, state: Params) -> None:
        replicas = self._make_replicas(None)
        replicas.load_state_dict(dict(state))
        for replica in replicas.all:
            replica.samples_seen = 0
        if self._store is not None and self._request is not None:
            names = list(replicas.first.parameters)
            for name in names:
                self._store.assign(name, replicas.first.parameters[name])

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate; RuntimeError before `init_optimizer`."""
        optimizer = self._store or self._optimizer
        if optimizer is None:
            raise RuntimeError("learning_rate is not known before init_optimizer()")
        return optimizer.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next update on."""
        check_learning_rate(learning_rate)
        if self._store is not None:
            self._store.set_learning_rate(learning_rate)
        elif self._optimizer is not None:
            self._optimizer.learning_rate = learning_rate
        else:
            raise RuntimeError("set_learning_rate() came before init_optimizer()")

    def summary(self, data_shapes: Any) -> str:
        """A table of the network's layers, output shapes and parameter counts, by torchinfo.

        Args:
            data_shapes: the shape of a batch's data, as `bind` takes it.
        """
        import torchinfo

        data = map_tensors(lambda t: t.to(self.contexts[0].torch_device), _zeros(data_shapes, "data_shapes"))
        network = self._make_replicas(data).first.network
        return str(torchinfo.summary(network, input_data=data, verbose=0))

    def average_statistics(self) -> None:
        """Give every replica the average of running statistics, by samples seen; `fit` does it after each epoch."""
        self._make_replicas(None).average_buffers()

    # -- whole loops, written on the verbs ----------------------------------------------------------------------

    def fit(self, train_data: Any, eval_data: Any = None, eval_metric: Any = "acc", **options: Any) -> None:
        """Train; see `models.loops.fit` for all options."""
        loops.fit(self, train_data, eval_data, eval_metric, **options)

    def score(self, eval_data: Any, eval_metric: Any = "acc", **options: Any) -> list[tuple[str, float]]:
        """Evaluate metrics; see `models.loops.score`."""
        return loops.score(self, eval_data, eval_metric, **options)

    def predict(self, data: Any, **options: Any) -> Any:
        """The network's outputs for all samples, in order, on the host; see `models.loops.predict`."""
        return loops.predict(self, data, **options)

    def iter_predict(self, data: Any, **options: Any) -> Iterator[tuple[Any, int, Any]]:
        """Outputs batch by batch; see `models.loops.iter_predict`."""
        return loops.iter_predict(self, data, **options)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, prefix: str | Path, epoch: int, save_optimizer_states: bool = False) -> None:
        """Write ``PREFIX-%04d`` files; see `models.checkpoint`."""
        checkpoint.save(self, prefix, epoch, save_optimizer_states)

    @classmethod
    def load(
        cls,
        prefix: str | Path,
        epoch: int,
        *,
        network: nn.Module,
        load_optimizer_states: bool = False,
        **options: Any,
    ) -> Module:
        """A module with the parameters of a checkpoint.

        Args:
            prefix: as given to `save_checkpoint`.
            epoch: likewise.
            network: the network the checkpoint is of; code is not part of a checkpoint.
            load_optimizer_states: have `init_optimizer` take over the checkpoint's optimizer state.
            options: further arguments of `Module`.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: a torn or foreign file, other names or shapes, or no optimizer state in it.
        """
        saved = checkpoint.read(prefix, epoch)
        module = cls(network, **options)
        module.set_params(saved.params)
        module._params_given = True
        if load_optimizer_states:
            module._pending_state = saved.needed_optimizer_state()
        return module

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Stand where a checkpoint stood; after `init_optimizer`, and with its contexts, bit for bit.

        The learning rate is taken over too, unless this run's optimizer was given another one to begin with.

        Raises:
            ValueError: other names or shapes, another optimizer, or no optimizer state in it.
            RuntimeError: before ``init_optimizer``.
        """
        if self._request is None:
            raise RuntimeError("resume() came before init_optimizer()")
        state = saved.needed_optimizer_state()
        self.set_params(saved.params)
        self._load_optimizer_state(state)
        if self.learning_rate == state.initial_learning_rate:
            self.set_learning_rate(state.learning_rate)
        self._step = saved.step
        self.position = Position(**saved.position)
        replicas = self._make_replicas(None)
        if len(saved.samples_seen) == len(replicas.all):
            replicas.set_own_buffers(saved.replica_buffers, saved.samples_seen)

    @property
    def step(self) -> int:
        """Training batches run so far; the random streams of the contexts depend on it."""
        return self._step

    def replica_buffers(self) -> tuple[dict[str, list[torch.Tensor]], list[int]]:
        """Each replica's buffers where they may differ, by name, and the samples it has seen since they were equal."""
        replicas = self._make_replicas(None)
        seen = [replica.samples_seen for replica in replicas.all]
        return (replicas.own_buffers() if len(seen) > 1 and any(seen) else {}), seen

    def optimizer_state(self) -> OptimizerState:
        """A copy of the optimizer's state, on the host; RuntimeError before `init_optimizer`."""
        if self._store is not None:
            return self._store.optimizer_state()
        if self._optimizer is None:
            raise RuntimeError("there is no optimizer state before init_optimizer()")
        return self._optimizer.state()

    def _load_optimizer_state(self, state: OptimizerState) -> None:
        target = self._store or self._optimizer
        if isinstance(target, KVStore):
            target.load_optimizer_state(state)
        elif target is not None:
            target.load_state(state)

    # -- the end ------------------------------------------------------------------------------------------------

    def _drop_store(self) -> None:
        if self._store is not None and self._own_store:
            self._store.close()
        self._store, self._own_store, self._optimizer = None, False, None

    def close(self) -> None:
        """End the threads, and the store if the module made it; the network keeps its weights."""
        self._drop_store()
        self._request = None
        self._shares = []
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None

    def __enter__(self) -> Module:
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


def _zeros(shapes: Any, what: str) -> Batch:
    """Zeros of the shapes that a shape, or a tuple, list or dict of shapes, describes."""
    if isinstance(shapes, Mapping):
        return {name: _zeros(shape, what) for name, shape in shapes.items()}
    if isinstance(shapes, (tuple, list)) and shapes:
        if all(isinstance(size, int) and not isinstance(size, bool) for size in shapes):
            return torch.zeros(*shapes)
        return tuple(_zeros(shape, what) for shape in shapes)
    raise TypeError(f"{what} is {shapes!r}; expected a shape such as (64, 1, 28, 28), or a tuple or dict of shapes")
