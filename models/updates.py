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

    def __init__(self, replicas: Replicas, kvstore: str | KVStore | None, spec: OptimizerSpec) -> None:
        """Give the weights to a store of that name, or to the store given; one replica needs neither.

        Raises:
            TypeError: ``kvstore`` is something else.
            ValueError: an unknown name, None with several replicas, or a key the optimizer does not take.
        """
        if kvstore is not None and not isinstance(kvstore, (str, KVStore)):
            raise TypeError(f"kvstore is {kvstore!r}; expected a store, its name, or None")
        several = len(replicas.all) > 1
        if kvstore is None and several:
            raise ValueError(f"kvstore is None, but gradients of {len(replicas.all)} contexts need one to sum them")
        self._replicas = replicas
        self._is_own = isinstance(kvstore, str)
        self.store = create(kvstore) if isinstance(kvstore, str) else kvstore
        if self.store is not None and self._is_own and not several and self.store.num_workers == 1:
            self.close()
        self._optimizer = KeyedOptimizer(spec)
        names = list(replicas.first.parameters)
        if self.store is not None:
            weights = [replicas.weights(name) for name in names]
            self.store.set_optimizer(spec)
            self.store.broadcast(names, [of_name[0] for of_name in weights], weights)
        else:
            for name in names:
                self._optimizer.add(name, replicas.first.parameters[name])

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
