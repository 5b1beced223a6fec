"""Module and its parts: replicas, training loop, data, metrics, checkpoints, reports and a zoo of networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.models.data.images.augmentation import Augmentation
    from gangline.models.data.images.folder import ImageFolder
    from gangline.models.data.images.splitting import split_each_label
    from gangline.models.loop.callbacks import Checkpoint, ProgressBar, Speedometer, do_checkpoint, module_checkpoint
    from gangline.models.loop.monitor import Monitor
    from gangline.models.loop.stopping import EarlyStopping, stop_on
    from gangline.models.module import Module
    from gangline.models.reports.page import TrainingProgress
    from gangline.models.reports.tensorboard import TensorBoard

_HOMES = {
    "Augmentation": "data.images.augmentation",
    "Checkpoint": "loop.callbacks",
    "EarlyStopping": "loop.stopping",
    "ImageFolder": "data.images.folder",
    "Module": "module",
    "Monitor": "loop.monitor",
    "ProgressBar": "loop.callbacks",
    "Speedometer": "loop.callbacks",
    "TensorBoard": "reports.tensorboard",
    "TrainingProgress": "reports.page",
    "do_checkpoint": "loop.callbacks",
    "module_checkpoint": "loop.callbacks",
    "split_each_label": "data.images.splitting",
    "stop_on": "loop.stopping",
}

__all__ = [
    "Augmentation",
    "Checkpoint",
    "EarlyStopping",
    "ImageFolder",
    "Module",
    "Monitor",
    "ProgressBar",
    "Speedometer",
    "TensorBoard",
    "TrainingProgress",
    "do_checkpoint",
    "module_checkpoint",
    "split_each_label",
    "stop_on",
]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'gangline.models' has no attribute {name!r}")
    return getattr(import_module(f"gangline.models.{_HOMES[name]}"), name)
