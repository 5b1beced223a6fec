"""A store's optimizer over the weights that a worker owns; the other workers update the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer import files, state_parts
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.reducer.sharded_weights import ShardedWeights


class OwnedKeys:
    """Updates of the owned weights, with rank 0's learning rate and the common norm of all gradients."""

    def __init__(self, spec: OptimizerSpec, weights: ShardedWeights, store: KVStore) -> None:
        self._weights, self._store, self._max_norm = weights, store, spec.clip_global_norm
        self.optimizer = KeyedOptimizer(replace(spec, clip_global_norm=None))
        for name, parameter in weights.owned().items():
            self.optimizer.add(name, parameter.data)

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate."""
        return self.optimizer.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next update on; rank 0's counts."""
        self.optimizer.set_learning_rate(learning_rate)

    def update(self) -> None:
        """Update the owned weights from the means of their gradients. Collective."""
        self.set_learning_rate(self._store.group.broadcast(self.learning_rate, "learning rate"))
        self._weights.before_update()
        if self._max_norm is not None:
            self._weights.clip_grad_norm_(self._max_norm)
        owned = self._weights.owned().items()
        self.optimizer.update([(name, one.grad) for name, one in owned if one.grad is not None])

    def state(self) -> OptimizerState:
        """Return the state of all weights on the host at rank 0, that of the owned ones elsewhere. Collective."""
        own = self.optimizer.state()
        gathered = self._store.group.gather([own.header(), own.tensors], "optimizer_state")
        return OptimizerState.merged([OptimizerState.from_parts(*one) for one in gathered] or [own])

    def load_state(self, whole: OptimizerState) -> None:
        """Replace the state by the owned part of ``whole``, equal on all workers; ValueError if it does not match."""
        whole.check(self.optimizer.spec, {name: one.shape for name, one in self._weights.updated().items()})
        owned = self._weights.owned()
        shapes = {json.dumps(name): list(one.shape) for name, one in owned.items()}
        self.optimizer.load_state(replace(whole.of_keys(owned.__contains__), shapes=shapes))

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the state of all weights to a file on rank 0. Collective."""
        whole = self.state()
        if not self._store.rank:
            files.save(Path(path), whole.tensors, whole.header())

    def load_optimizer_states(self, path: str | Path) -> None:
        """Replace the state by that of rank 0's file, as `KVStore.load_optimizer_states`. Collective."""
        read: list[object] = []
        self._store.group.run_on_rank(lambda: read.append(state_parts.load_whole(Path(path))), "load_states")
        state = read[0] if read else None
        parts = [state.header(), state.tensors] if isinstance(state, OptimizerState) else None
        self.load_state(OptimizerState.from_parts(*self._store.group.broadcast(parts, "load_states")))
