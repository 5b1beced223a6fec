"""Who sums gradients and updates weights: a store, or the optimizer itself where one replica needs none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore import KVStore, create
from kvstore.optimizer import KeyedOptimizer, OptimizerState
from kvstore.optimizer_spec import OptimizerSpec
from models.replicas import Replicas


class Updates:
    """What `Module.init_optimizer` chose."""

    def __init__(
        self, replicas: Replicas, kvstore: str | KVStore | None, spec: OptimizerSpec, own_store: KVStore | None = None
    ) -> None:
        """Give the weights to a store of that name, or to the store given; one replica needs neither.

        Args:
            replicas: whose weights are updated.
            kvstore: a store's name, a store, or None.
            spec: the optimizer.
            own_store: the store that holds these weights already, if one does.

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
        self._is_own = isinstance(kvstore, str)
        self.store = create(kvstore) if isinstance(kvstore, str) else kvstore
        if self.store is None:
            return
        if self._is_own and len(replicas.all) == 1 and self.store.num_workers == 1:
            self.close()
        else:
            self._give_to(self.store, spec, is_ours=self.store is own_store)

    def _give_to(self, store: KVStore, spec: OptimizerSpec, is_ours: bool) -> None:
        names = list(self._replicas.first.parameters)
        held = [name for name in names if name in store]
        if held and not is_ours:
            raise ValueError(f"the {store.type!r} store holds keys {held} already; give each module a store of its own")
        store.set_optimizer(spec)
        weights = {name: self._replicas.weights(name) for name in names}
        new = [name for name in names if name not in held]
        store.broadcast(new, [weights[name][0] for name in new], [weights[name] for name in new])
        for name in held:
            store.assign(name, weights[name][0])

    def step(self) -> None:
        """Sum the gradients there are, update their weights once, and give those to every replica."""
        gradients = self._replicas.gradients()
        if self.store is not None:
            names = list(gradients)
            self.store.pushpull(names, list(gradients.values()), [self._replicas.weights(name) for name in names])
        else:
            self._optimizer.update([(name, gradient) for name, (gradient,) in gradients.items()])

    def take_over_weights(self) -> None:
        """Have the store hold what the replicas hold."""
        if self.store is not None:
            for name, parameter in self._replicas.first.parameters.items():
                self.store.assign(name, parameter)

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

    def close(self) -> None:
        """Close the store, if it was made here."""
        if self.store is not None and self._is_own:
            self.store.close()
        self.store = None


Request = tuple[Any, Any, Mapping[str, Any]]
"""(kvstore, optimizer, optimizer_params) as `init_optimizer` got them."""
