"""Moving and summing tensors between devices and processes; it imports nothing else of gangline's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.context import Context, contexts, cpu, gpu, num_gpus
    from collectives.work import Work
    from collectives.workload import split_batch

_HOMES = {
    "Context": "context",
    "contexts": "context",
    "cpu": "context",
    "gpu": "context",
    "num_gpus": "context",
    "Work": "work",
    "split_batch": "workload",
}

__all__ = ["Context", "Work", "contexts", "cpu", "gpu", "num_gpus", "split_batch"]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'collectives' has no attribute {name!r}")
    return getattr(import_module(f"collectives.{_HOMES[name]}"), name)
