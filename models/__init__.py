"""Module and what it trains: replicas, loops, data, metrics, checkpoints, the zoo, the training command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.callbacks import Checkpoint, ProgressBar, Speedometer, module_checkpoint
    from models.module import Module

_HOMES = {
    "Checkpoint": "callbacks",
    "Module": "module",
    "ProgressBar": "callbacks",
    "Speedometer": "callbacks",
    "module_checkpoint": "callbacks",
}

__all__ = ["Checkpoint", "Module", "ProgressBar", "Speedometer", "module_checkpoint"]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(f"models.{_HOMES[name]}"), name)
