"""Push, pull and update: stores of tensors by key, summed over devices and, later, workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.base import KVStore
    from kvstore.optimizer_spec import OptimizerSpec
    from kvstore.registry import create, register
    from kvstore.sparse import RowSparse
    from kvstore.trainer import Trainer

_HOMES = {
    "KVStore": "base",
    "OptimizerSpec": "optimizer_spec",
    "RowSparse": "sparse",
    "Trainer": "trainer",
    "create": "registry",
    "register": "registry",
}

__all__ = ["KVStore", "OptimizerSpec", "RowSparse", "Trainer", "create", "register"]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    for store in ("local", "device", "allreduce", "dist.worker"):  # they register themselves
        import_module(f"kvstore.{store}")
    return getattr(import_module(f"kvstore.{_HOMES[name]}"), name)
