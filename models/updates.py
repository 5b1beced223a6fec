"""Who sums gradients and updates weights: a store, or the optimizer itself where one replica needs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gangline.kvstore import KVStore, create
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.sparse import RowSparse, summed
from gangline.models.reducer.reducer import Reducer
from gangline.models.reducer.worker_reducer import Expected, WorkerReducer
from gangline.models.replicas import Replicas
from gangline.models.workers import Workers


class Updates:
    """What `Module.init_optimizer` chose."""

    def __init__(
        self,
        replicas: Replicas,
        kvstore: str | KVStore | None,
        spec: OptimizerSpec,
        own_store: KVStore | None = None,
        compression: Mapping[str, Any] | None = None,
        state: OptimizerState | None = None,
        num_contexts: int = 1,
    ) -> None:
        """Give the weights to a store of that name, or to the store given; one replica needs neither.

        With a store of several workers it is for all of them to call, and rank 0's weights win.

        Args:
            replicas: whose weights are updated.
            kvstore: a store's name, a store, or None.
            spec: the optimizer.
            own_store: the store that holds these weights already, if one does.
            compression: how gradients travel to the store; None: as they are.
            state: of an optimizer that this one goes on from.
            num_contexts: how many contexts this worker has.

        Raises:
            TypeError: ``kvstore`` is something else.
            ValueError: an unknown name, None with several replicas, a key the optimizer does not take, or a store
                that holds another module's keys.
        """
        if kvstore is not None and not isinstance(kvstore, (str, KVStore)):
            raise TypeError(f"kvstore is {kvstore!r}; expected a store, its name, or None")
        if kvstore is None and len(replicas.all) > 1:
            raise ValueError(f"kvstore is None, but gradients of {len(replicas.all)} contexts need one to sum them")
        self._replicas = replicas
        self._optimizer = KeyedOptimizer(spec)
        for name, parameter in replicas.first.parameters.items():
            self._optimizer.add(name, parameter)
        if state is not None:
            self._optimizer.load_state(state)  # before a store has these keys: what does not fit changes nothing
        self.owns_store = isinstance(kvstore, str)
        """Whether the store was made here, and is closed here."""
        self.store = create(kvstore) if isinstance(kvstore, str) else kvstore
        self._flow: Reducer | None = None
        self.workers = Workers(self.store, num_contexts)
        if self.store is None:
            return
        if self.owns_store and len(replicas.all) == 1 and self.store.num_workers == 1:
            self.close()
        else:
            if compression is not None:
                self.store.set_gradient_compression(compression)
            self._give_to(self.store, spec, is_ours=self.store is own_store)
            if state is not None:
                self.store.load_optimizer_state(state)
            self._optimizer = KeyedOptimizer(spec)  # the store has its own
            in_step = self.workers.in_step
            self._flow = (
                WorkerReducer(replicas.all, self.store, self.workers) if in_step else Reducer(replicas.all, self.store)
            )

    def _give_to(self, store: KVStore, spec: OptimizerSpec, is_ours: bool) -> None:
        _check_forward_leaves_weights(self._replicas.first.network)
        names = list(self._replicas.first.parameters)
        held = [name for name in names if name in store]
        if held and not is_ours:
            raise ValueError(f"the {store.type!r} store holds keys {held} already; give each module a store of its own")
        store.set_optimizer(spec)
        weights = {name: self._replicas.weights(name) for name in names}
        new = [name for name in names if name not in held]
        store.broadcast(new, [weights[name][0] for name in new], [weights[name] for name in new])
        if held:
            store.assign(held, [weights[name][0] for name in held])
            if store.num_workers > 1:  # rank 0's won
                store.pull(held, [weights[name] for name in held])

    def begin(self, places: Sequence[int], *, leave_early: bool, expected: Expected | None = None) -> None:
        """Get ready for a backward.

        Args:
            places: of the replicas that run it.
            leave_early: whether nothing but `step` follows it.
            expected: what workers in step have agreed on; without it they agree in `step`.
        """
        if isinstance(self._flow, WorkerReducer):
            self._flow.expect(expected)
        if self._flow is not None:
            self._flow.begin(places, leave_early=leave_early)

    def step(self) -> None:
        """Sum the gradients there are, update their weights once, and give those to every replica."""
        if self._flow is not None:
            self._flow.finish()
        else:
            self._optimizer.update([(name, _plain(gradient)) for name, gradient in self._replicas.gradients().items()])

    def abandon(self, error: BaseException) -> None:
        """After a backward that failed: leave replicas and store with the same weights."""
        if self.workers.count > 1:
            error.add_note(
                f"it was rank {self.workers.rank} of {self.workers.count}, whose workers are out of step now: end the "
                "job and go on from a checkpoint"
            )
        elif self._flow is not None:
            try:
                gone, buckets = self._flow.abandon()
            except Exception as second:  # noqa: BLE001  the first error is the one to raise
                error.add_note(f"nor could the replicas be given what the store holds: {second}")
                return
            if gone:
                error.add_note(
                    f"{gone} of {buckets} buckets had gone to the store; the replicas hold what it made of them"
                )

    def take_over_weights(self) -> None:
        """Have the store hold what the replicas hold."""
        if self.store is not None:
            names = list(self._replicas.first.parameters)
            self.store.assign(names, [self._replicas.weights(name)[0] for name in names])
            if self.workers.count > 1:  # rank 0's won
                self.pull_weights()

    def pull_weights(self) -> None:
        """Have the replicas hold what the store holds."""
        if self.store is not None:
            names = list(self._replicas.first.parameters)
            self.store.pull(names, [self._replicas.weights(name) for name in names])

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate."""
        return self._optimizer.learning_rate if self.store is None else self.store.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next step on."""
        if self.store is None:
            self._optimizer.learning_rate = learning_rate
        else:
            self.store.set_learning_rate(learning_rate)

    def state(self) -> OptimizerState:
        """A copy of the optimizer's state, on the host."""
        return self._optimizer.state() if self.store is None else self.store.optimizer_state()

    def load_state(self, state: OptimizerState) -> None:
        """Replace the optimizer's state."""
        if self.store is None:
            self._optimizer.load_state(state)
        else:
            self.store.load_optimizer_state(state)

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """What compression has left out so far, on the host."""
        return self.store.compression_residuals() if self.store is not None else {}

    def load_compression_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Put back what `compression_residuals` returned, if gradients are compressed here."""
        if self.store is not None and self.store.compresses:
            self.store.load_compression_residuals(residuals)

    def let_go(self) -> None:
        """Take the hooks off the replicas' parameters."""
        if self._flow is not None:
            self._flow.close()
            self._flow = None

    def close(self) -> None:
        """Close the store, if it was made here."""
        self.let_go()
        if self.store is not None and self.owns_store:
            self.store.close()
        self.store = None


def _check_forward_leaves_weights(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"layer {name!r} has max_norm={module.max_norm}: its forward changes weights, and the store would undo "
                "that; normalise what the layer gives instead, or train on one context without a store"
            )


def _plain(gradient: torch.Tensor) -> torch.Tensor | RowSparse:
    """A dense gradient, or the rows of a sparse one, each once."""
    if gradient.layout == torch.strided:
        return gradient
    return summed([RowSparse.from_coo(gradient)], gradient.device)


Request = tuple[Any, Any, Mapping[str, Any]]
"""(kvstore, optimizer, optimizer_params) as `init_optimizer` got them."""
