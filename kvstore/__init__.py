"""Push, pull and update: stores of tensors by key, summed over devices and, later, workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.kvstore.interface import KVStore
    from gangline.kvstore.optimizer.spec import OptimizerSpec
    from gangline.kvstore.registry import create, register
    from gangline.kvstore.sparse import RowSparse
    from gangline.kvstore.trainer import Trainer

_HOMES = {
    "KVStore": "interface",
    "OptimizerSpec": "optimizer.spec",
    "RowSparse": "sparse",
    "Trainer": "trainer",
    "create": "registry",
    "register": "registry",
}

__all__ = ["KVStore", "OptimizerSpec", "RowSparse", "Trainer", "create", "register"]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'gangline.kvstore' has no attribute {name!r}")
    for store in ("local", "device", "allreduce.store", "parameter_server.store"):  # they register themselves
        import_module(f"gangline.kvstore.{store}")
    return getattr(import_module(f"gangline.kvstore.{_HOMES[name]}"), name)
