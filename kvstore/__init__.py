"""Key-value stores: push gradients, which are reduced over devices and workers, and pull weights.

Every public name is loaded when it is first used, because importing torch takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.kvstore.interface import KVStore
    from gangline.kvstore.local_steps import LocalSteps
    from gangline.kvstore.optimizer.spec import OptimizerSpec
    from gangline.kvstore.reducer.distributed_optimizer import DistributedOptimizer
    from gangline.kvstore.registry import create, register
    from gangline.kvstore.sparse import RowSparse
    from gangline.kvstore.trainer import Trainer

_MODULES = {
    "DistributedOptimizer": "reducer.distributed_optimizer",
    "KVStore": "interface",
    "LocalSteps": "local_steps",
    "OptimizerSpec": "optimizer.spec",
    "RowSparse": "sparse",
    "Trainer": "trainer",
    "create": "registry",
    "register": "registry",
}

__all__ = [
    "DistributedOptimizer",
    "KVStore",
    "LocalSteps",
    "OptimizerSpec",
    "RowSparse",
    "Trainer",
    "create",
    "register",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'gangline.kvstore' has no attribute {name!r}")
    return getattr(import_module(f"gangline.kvstore.{_MODULES[name]}"), name)
