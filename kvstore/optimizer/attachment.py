"""Keys that a front, such as a `Trainer`, has taken in a store."""

from __future__ import annotations

from dataclasses import dataclass

from gangline.kvstore.optimizer.spec import Key, OptimizerSpec


@dataclass(frozen=True, eq=False)
class Attachment:
    """Keys of one front in a store; made by `KVStore.attach`."""

    owner: str
    """Kind of front: "Trainer", "Module" or "DistributedOptimizer"."""
    keys: frozenset[Key]
    spec: OptimizerSpec | None
    """The optimizer of the keys; None if the front updates the weights itself."""
