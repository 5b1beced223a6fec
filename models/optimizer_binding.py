"""Optimizer binding: sums of gradients and updates of weights, by a store or by an optimizer in place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gangline.collectives.errors import GanglineError, MismatchError
from gangline.kvstore import KVStore, create
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.reducer.owned_keys import OwnedKeys
from gangline.kvstore.reducer.reducer import Reducer, as_tables, cudnn_weights, sparse_tables
from gangline.kvstore.reducer.sharded_weights import ShardedWeights
from gangline.kvstore.reducer.written_weights import WrittenWeights
from gangline.kvstore.sparse import of_gradient
from gangline.kvstore.torch_hooks import watch_torch
from gangline.models.elastic_workers import ElasticWorkers
from gangline.models.names import plain_name
from gangline.models.replicas import Replicas
from gangline.models.workers import Workers

_ALL_RAISE = "all workers raise an error now, and no weight was updated"


@dataclass(frozen=True)
class StoreOptions:
    """Arguments of a module's `Workers`, of `KVStore.set_gradient_compression` and of `KVStore.set_optimizer`."""

    num_contexts: int
    measures_loads: bool
    compression: Mapping[str, Any] | None
    shard: str | None
    memory: Sequence[float] | str


class OptimizerBinding:
    """Sums the gradients of a module's replicas and updates their weights.

    This class updates the weights of a single replica in place. Subclasses need a store; methods that only subclasses
    need do nothing here.
    """

    is_set = True
    """False before `init_optimizer`."""
    store: KVStore | None = None
    owns_store = False
    """True if `close` must close the store, because it was created here."""
    shards_weights = False
    """True if weights are sharded: forward and backward are collective, and backward reduces gradients."""
    _optimizer: Any
    """A `KeyedOptimizer`, or what has its learning rate: `OptimizerGroup`, `OwnedKeys`, which has its state too."""

    def __init__(self, replicas: Replicas, optimizer: KeyedOptimizer) -> None:
        self._replicas, self._optimizer, self.workers = replicas, optimizer, Workers()
        watch_torch()  # where there is a reducer, it does so

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate."""
        return float(self._optimizer.learning_rate)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next update on."""
        self._optimizer.set_learning_rate(learning_rate)

    def update(self, weight: float | None = None) -> None:
        """Sum the replicas' gradients, weighted as in `Reducer.finish`, and update the weights of all replicas once."""
        if weight != 0:
            trained = self._replicas.first.parameters.items()
            self._optimizer.update([(name, of_gradient(one.grad)) for name, one in trained if one.grad is not None])

    def state(self) -> OptimizerState:
        """Return a copy of the optimizer's state, on the host; collective with sharded weights, see `OwnedKeys`."""
        return self._optimizer.state()  # type: ignore[no-any-return]

    def load_state(self, state: OptimizerState) -> None:
        """Replace the optimizer's state."""
        self._optimizer.load_state(state)

    def begin_forward(self, *, train: bool) -> None:
        """Copy weights written since the last step into all replicas; in training, rank 0's to all workers."""

    def begin_backward(
        self, active: Sequence[int], *, push_early: bool, weight: float | None = None, rerun: bool = False
    ) -> None:
        """Prepare for a backward, as `Reducer.begin`; with ``push_early``, `update` must follow directly."""

    def end_forward(self, *, has_samples: bool) -> None:
        """End a forward, or take part in the other workers' without samples."""

    def end_backward(self, *, has_graph: bool) -> None:
        """End a backward, or take part in the other workers' without samples."""

    def take_seconds_waiting(self) -> float:
        """Return the seconds of forward and backward spent waiting for other workers, since the last call."""
        return 0.0

    def refuse(self, error: Exception) -> None:
        """After a failed forward or backward, raise the error on workers that need this worker in theirs."""

    def abandon(self, error: BaseException) -> None:
        """After a failed backward, make the weights of replicas and store equal, and add notes to the error."""

    def assign_weights(self) -> None:
        """Copy the replicas' weights to the store; with several workers, rank 0's weights."""

    def pull_weights(self) -> None:
        """Copy the store's weights to the replicas."""

    def release_parameters(self) -> None:
        """Move the parameters of the user's network out of their buckets, until the next step."""

    def detach(self) -> None:
        """Remove the hooks from the replicas' parameters, and call `release_parameters`."""

    def close(self) -> None:
        """Detach, and close the store if it was created here."""
        self.detach()
        if self.store is not None and self.owns_store:
            self.store.close()


class NoOptimizer(OptimizerBinding):
    """The binding before `init_optimizer`: no optimizer, store or other workers."""

    is_set = False

    def __init__(self) -> None:
        self.workers = Workers()


class StoreOptimizer(OptimizerBinding):
    """Optimizer of a store, to which a `Reducer` pushes the replicas' gradients."""

    store: KVStore

    def __init__(
        self, replicas: Replicas, store: KVStore, workers: Workers, group: OptimizerGroup, *, owns_store: bool
    ) -> None:
        """Register the reducer's hooks; the store must hold the weights already."""
        self._replicas, self.workers, self.store, self.owns_store = replicas, workers, store, owns_store
        self.group = self._optimizer = group
        uses_gpu = any(replica.context.device_type == "gpu" for replica in replicas.all)
        self._reducer = Reducer(
            [replica.parameters for replica in replicas.all],
            store,
            loose={plain_name(name) for name in cudnn_weights(replicas.first.network)} if uses_gpu else (),
            sparse={plain_name(name) for name in sparse_tables(replicas.first.network)},
            group=group,
            continues_by="a Module without fit",
        )
        self._written = WrittenWeights(replicas.first.parameters, self._reducer, store, sums_bits=True)

    def begin_forward(self, *, train: bool) -> None:  # noqa: D102  inherited
        if not train:
            for name in self._written.find() if len(self._replicas.all) > 1 else ():
                first, *others = self._replicas.weights(name)
                for other in others:
                    other.copy_(first)
        elif written := self._written.assign():
            self.store.pull(written, [self._replicas.weights(name) for name in written])
            self._written.note()

    def begin_backward(  # noqa: D102  inherited
        self, active: Sequence[int], *, push_early: bool, weight: float | None = None, rerun: bool = False
    ) -> None:
        if self.store.is_elastic and not self.workers.has_begun:
            self.store.check_not_restarted("training by a Module without fit")
        self._reducer.begin(active, push_early=push_early, weight=weight, rerun=rerun)

    def update(self, weight: float | None = None) -> None:  # noqa: D102  inherited
        self._reducer.finish(weight)
        self._written.note(after_step=True)

    def abandon(self, error: BaseException) -> None:  # noqa: D102  inherited
        if self.workers.has_others:
            _note_out_of_step(self.workers, error)
            return
        try:
            pushed, buckets = self._reducer.abandon()
        except Exception as second:  # noqa: BLE001  the first error is the one to raise
            error.add_note(f"the store's weights could not be pulled into the replicas either: {second}")
            return
        self._written.note()
        if pushed:
            error.add_note(
                f"{pushed} of {buckets} buckets had been pushed to the store; the replicas hold the weights updated "
                "with them"
            )

    def assign_weights(self) -> None:  # noqa: D102  inherited
        _assign(self.store, self._replicas, list(self._replicas.first.parameters))
        self._written.note()

    def pull_weights(self) -> None:  # noqa: D102  inherited
        names = list(self._replicas.first.parameters)
        self.store.pull(names, [self._replicas.weights(name) for name in names])
        self._written.note()

    def state(self) -> OptimizerState:  # noqa: D102  inherited
        trained = self._replicas.first.parameters  # the store may also hold weights that only an earlier fit trained
        state = self.store.optimizer_state(group=self.group).of_keys(trained.__contains__)
        shapes = {name: shape for name, shape in state.shapes.items() if json.loads(name) in trained}
        return replace(state, shapes=shapes)

    def load_state(self, state: OptimizerState) -> None:  # noqa: D102  inherited
        self.store.load_optimizer_state(state, group=self.group)

    def keep(self, state: Any) -> None:
        """Save a state and the store's state on this worker between two steps; see `KVStore.keep`."""
        self._reducer.keep(state)

    def kept(self) -> Any:
        """Restore the store on this worker and return the state saved before a restart; None if there is none."""
        found = self._reducer.kept()
        self._written.note()
        return found

    def release_parameters(self) -> None:  # noqa: D102  inherited
        self._reducer.release_parameters()

    def detach(self) -> None:  # noqa: D102  inherited
        self._reducer.close()


class ShardedOptimizer(OptimizerBinding):
    """Optimizer over weights sharded by memory; each worker holds and updates the weights that it owns."""

    store: KVStore
    shards_weights = True

    def __init__(
        self, weights: ShardedWeights, spec: OptimizerSpec, store: KVStore, workers: Workers, *, owns_store: bool
    ) -> None:
        self.weights, self.workers, self.store, self.owns_store = weights, workers, store, owns_store
        self._optimizer = OwnedKeys(spec, weights, store)
        self._weight = 0.0

    def end_forward(self, *, has_samples: bool) -> None:  # noqa: D102  inherited
        self._end_pass(has_samples)

    def begin_backward(self, active: Sequence[int], *, weight: float | None = None, **_: bool) -> None:
        """Prepare for a backward, which always pushes early; reruns, as measured loads need, are refused."""
        self._weight = 0.0 if not active else 1.0 if weight is None else weight
        self.weights.begin(active, push_early=True, weight=self._weight, is_sum=weight is None)

    def end_backward(self, *, has_graph: bool) -> None:  # noqa: D102  inherited
        within = self.weights.seconds_waiting
        self._end_pass(has_graph)
        self.weights.finish(self._weight)
        self.weights.seconds_waiting = within  # the caller times what comes after backward

    def _end_pass(self, has_run: bool) -> None:
        if has_run:
            self.weights.end_pass()
        else:
            self.weights.follow()

    def take_seconds_waiting(self) -> float:  # noqa: D102  inherited
        seconds, self.weights.seconds_waiting = self.weights.seconds_waiting, 0.0
        return seconds

    def update(self, weight: float | None = None) -> None:  # noqa: ARG002, D102  backward has used it
        self._optimizer.update()

    def refuse(self, error: Exception) -> None:  # noqa: D102  inherited
        if not isinstance(error, GanglineError):  # else the others have raised it, too
            error.add_note(_ALL_RAISE)
            with suppress(Exception):  # the first error is the one to raise
                self.weights.end_pass(error)

    def abandon(self, error: BaseException) -> None:  # noqa: D102  inherited
        if not isinstance(error, MismatchError) and _ALL_RAISE not in getattr(error, "__notes__", ()):
            _note_out_of_step(self.workers, error)

    def detach(self) -> None:  # noqa: D102  inherited
        self.weights.close()

    def replace(
        self, kvstore: str | KVStore | None, spec: OptimizerSpec, state: OptimizerState | None, replicas: Replicas
    ) -> None:
        """Replace the optimizer, starting from ``state``; the weights stay sharded.

        Raises:
            ValueError: if ``kvstore`` is another store, or the state does not fit.
        """
        if kvstore not in (self.store, self.store.type):
            raise ValueError(
                f"kvstore is {kvstore!r}, but the workers divide the network's weights in an {self.store.type!r} "
                "store; expected the same store again"
            )
        self.weights.train(replicas.first.parameters.values())
        keys = OwnedKeys(spec, self.weights, self.store)
        if state is not None:
            keys.load_state(state)
        self._optimizer = keys


def bind_optimizer(
    replicas: Replicas,
    kvstore: str | KVStore | None,
    spec: OptimizerSpec,
    options: StoreOptions,
    previous: OptimizerBinding,
    state: OptimizerState | None,
) -> OptimizerBinding:
    """Bind an optimizer to the weights of replicas; a single replica of a single worker needs no store.

    Collective with a store of several workers; rank 0's weights are used. On a single worker ``shard`` has no effect.
    The optimizer starts from ``state`` and replaces the optimizer of ``previous``, whose store is kept if it was
    created here by the same name.

    Raises:
        TypeError: if ``kvstore`` is anything else.
        ValueError: if the name is unknown, ``kvstore`` is None with several replicas, the optimizer does not accept a
            parameter, or the store holds the keys of another module.
    """
    if kvstore is not None and not isinstance(kvstore, (str, KVStore)):
        raise TypeError(f"kvstore is {kvstore!r}; expected a store, its name, or None")
    if kvstore is None and len(replicas.all) > 1:
        raise ValueError(f"kvstore is None, but gradients of {len(replicas.all)} contexts need one to sum them")
    if isinstance(previous, ShardedOptimizer):
        previous.replace(kvstore, spec, state, replicas)
        return previous
    optimizer = KeyedOptimizer(spec)
    for name, parameter in replicas.first.parameters.items():
        optimizer.add(name, parameter)
    if state is not None and options.shard != "weights":
        optimizer.load_state(state)  # before the store is changed: a state that does not fit must change nothing
    if kvstore is None:
        return OptimizerBinding(replicas, optimizer)
    owns_store = isinstance(kvstore, str)
    store = _own_store(kvstore, previous) if isinstance(kvstore, str) else kvstore
    workers = (
        ElasticWorkers(store, options.num_contexts)
        if store.is_elastic
        else Workers(store, options.num_contexts, measures_loads=options.measures_loads)
    )
    if owns_store and len(replicas.all) == 1 and store.num_workers == 1:
        store.attach("Module", (), None)
        store.close()
        return OptimizerBinding(replicas, optimizer)
    if options.shard == "weights" and store.num_workers > 1:
        first = replicas.first
        _check_no_max_norm(first.network)
        replicas.divided = ShardedWeights(list(first.parameters.values()), first.network, store, options.memory)
        store.attach("Module", (), None)
        binding = ShardedOptimizer(replicas.divided, spec, store, workers, owns_store=owns_store)
        if state is not None:
            binding.load_state(state)
        return binding
    before = previous.group if isinstance(previous, StoreOptimizer) and store is previous.store else None
    group = _init_store(store, replicas, spec, options, before)
    if state is not None:
        store.load_optimizer_state(state, group=group)
    return StoreOptimizer(replicas, store, workers, group, owns_store=owns_store)


def _own_store(name: str, previous: OptimizerBinding) -> KVStore:
    """Return the open store that the module created by this name before, or create one.

    A job with servers has one store per worker, so a second one could not take the place of the first.
    """
    store = previous.store
    if store is not None and previous.owns_store and store.type == name and not store.is_closed:
        return store
    return create(name)


def _init_store(
    store: KVStore, replicas: Replicas, spec: OptimizerSpec, options: StoreOptions, before: OptimizerGroup | None
) -> OptimizerGroup:
    """Give the store the optimizer and the replicas' weights."""
    _check_no_max_norm(replicas.first.network)
    names = list(replicas.first.parameters)
    held = [name for name in names if name in store]
    group = store.attach(
        "Module",
        names,
        spec,
        shard=None if options.shard == "weights" else options.shard,
        memory=options.memory,
        compression=options.compression,
        replaces=before,
    )
    if store.is_elastic:  # before the first pull, with which workers that join take part
        replicas.load_untrained(store.group.broadcast(replicas.untrained(), "init_optimizer"))
    new = [name for name in names if name not in held]
    tables = {plain_name(name) for name in sparse_tables(replicas.first.network)}
    values = as_tables(store, {name: replicas.weights(name)[0] for name in new}, tables)
    store.broadcast(new, values, [replicas.weights(name) for name in new])
    if held:
        _assign(store, replicas, held)
    assert group is not None
    return group


def _assign(store: KVStore, replicas: Replicas, names: Sequence[str]) -> None:
    """Copy weights of the first replica to the store; with several workers, rank 0's weights."""
    store.assign(names, [replicas.weights(name)[0] for name in names])
    if store.num_workers > 1:
        store.pull(names, [replicas.weights(name) for name in names])


def _note_out_of_step(workers: Workers, error: BaseException) -> None:
    note = (
        f"it was raised on rank {workers.rank}{f' of {workers.count}' if workers.count > 1 else ''}, whose workers are "
        "out of step now: end the job and resume from a checkpoint"
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _check_no_max_norm(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"layer {name!r} has max_norm={module.max_norm}: its forward changes weights, and the store would undo "
                "that; normalize the layer's output instead, or train on one context without a store"
            )


def check_divided(
    num_contexts: int, load_balancer: object, compression: object, sync_batchnorm: bool, autocast: torch.dtype | None
) -> None:
    """Check the other arguments of a module with ``shard="weights"``."""
    if num_contexts > 1:
        raise ValueError(
            f"shard='weights' divides the weights among workers, and this one has {num_contexts} contexts; expected "
            "one context each: start a worker for each context, with gangline launch, and pass context='parallel'"
        )
    refused = {
        "work_load_list='auto'": (load_balancer is not None, "set GANGLINE_WORK_LOAD_LIST=auto for measured workers"),
        "compression_params": (compression is not None, "leave them out"),
        "sync_batchnorm=True": (bool(sync_batchnorm), "use a normalization over features, or shard='optimizer'"),
        "autocast=torch.float16": (autocast is torch.float16, "use torch.bfloat16"),
    }
    for argument, (is_given, remedy) in refused.items():
        if is_given:
            raise ValueError(f"{argument} is not available with shard='weights'; {remedy}")
