"""Keys of a store that share an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gangline.collectives.work import Work
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec


class Store(Protocol):
    """Calls of a `KVStore` for one group; None: its only one."""

    def learning_rate_of(self, group: OptimizerGroup | None) -> float: ...  # noqa: D102
    def set_learning_rate(self, learning_rate: float, *, group: OptimizerGroup | None) -> None: ...  # noqa: D102
    def optimizer_state(self, *, group: OptimizerGroup | None) -> OptimizerState: ...  # noqa: D102
    def save_optimizer_states(self, path: str | Path, *, group: OptimizerGroup | None) -> None: ...  # noqa: D102
    def load_optimizer_states(self, path: str | Path, *, group: OptimizerGroup | None) -> None: ...  # noqa: D102


class OptimizerGroup:
    """Some keys of a store and their optimizer, with its own learning rate and state; see `KVStore.set_optimizer`."""

    def __init__(
        self, store: Store, number: int, spec: OptimizerSpec, keys: frozenset[Key] | None, owner: str = ""
    ) -> None:
        self._store = store
        self.number = number
        """Number of the group in its store; 0: all keys outside of the other groups."""
        self.spec = spec
        self.keys = keys
        """Keys of the group; None: all keys outside of the others."""
        self.owner = owner
        """Front that has attached the keys, such as "Trainer"; "" without one."""
        self.pending: dict[Key, Work] = {}
        """Pushes that wait for `KVStore.update`."""

    @property
    def updates_wait(self) -> bool:
        """True if pushed gradients wait for `KVStore.update`: the optimizer has ``clip_global_norm``."""
        return self.spec.clip_global_norm is not None

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate."""
        return self._store.learning_rate_of(self)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate, as `KVStore.set_learning_rate`."""
        self._store.set_learning_rate(learning_rate, group=self)

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the state to a file, as `KVStore.save_optimizer_states`."""
        self._store.save_optimizer_states(path, group=self)

    def load_optimizer_states(self, path: str | Path) -> None:
        """Load the state from a file, as `KVStore.load_optimizer_states`. Collective."""
        self._store.load_optimizer_states(path, group=self)


class OptimizerGroups:
    """The optimizer groups of a store, by number, and the group of each key."""

    def __init__(self) -> None:
        self.all: dict[int, OptimizerGroup] = {}
        """Groups by number, in ascending order of their first `add`."""
        self._of_key: dict[Key, OptimizerGroup] = {}
        self.updates_wait = False
        """True if a group has ``clip_global_norm``."""

    def add(self, group: OptimizerGroup) -> None:
        """Add a group; it replaces the one of the same number."""
        self.remove(group.number)
        self.all[group.number] = group
        self._of_key.update(dict.fromkeys(group.keys or (), group))
        self.updates_wait |= group.updates_wait

    def remove(self, number: int) -> None:
        """Remove a group, if there is one of this number."""
        self.all.pop(number, None)
        self._of_key = {key: group for key, group in self._of_key.items() if group.number != number}
        self.updates_wait = any(group.updates_wait for group in self.all.values())

    def of(self, key: Key) -> OptimizerGroup | None:
        """Return the group of a key; None if no optimizer updates it."""
        return self._of_key.get(key) or self.all.get(0)

    def of_keys(self, keys: Iterable[Key]) -> OptimizerGroup | None:
        """Return the group of all keys; ValueError if they are of several."""
        if not self._of_key:
            return self.all.get(0)
        keys = list(keys)
        found = {self.of(key): key for key in keys}
        if len(found) > 1:
            raise ValueError(
                f"keys {list(found.values())} of one call have different optimizers; expected a call for the keys of "
                "each optimizer"
            )
        return next(iter(found), None)

    def only(self, call: str) -> OptimizerGroup:
        """Return the only group; RuntimeError if there are several or none."""
        if not self.all:
            raise RuntimeError(f"{call} needs an optimizer; call set_optimizer first")
        if len(self.all) > 1:
            owners = ", ".join(one.owner or "set_optimizer" for one in self.all.values())
            raise RuntimeError(
                f"{call} is ambiguous: the store has {len(self.all)} optimizers ({owners}); expected a call of "
                "the Trainer, or of what set_optimizer has returned"
            )
        return next(iter(self.all.values()))
