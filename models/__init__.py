"""Module and what it trains: replicas, loops, data, metrics, checkpoints, the zoo, the training command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.callbacks import Checkpoint, ProgressBar, Speedometer, module_checkpoint
    from models.images.augmentation import Augmentation
    from models.images.folder import ImageFolder
    from models.images.splitting import split_each_label
    from models.module import Module
    from models.monitor import Monitor
    from models.pictures.page import TrainingProgress
    from models.pictures.tensorboard import TensorBoard
    from models.stopping import EarlyStopping, stop_on

_HOMES = {
    "Augmentation": "images.augmentation",
    "Checkpoint": "callbacks",
    "EarlyStopping": "stopping",
    "ImageFolder": "images.folder",
    "Module": "module",
    "Monitor": "monitor",
    "ProgressBar": "callbacks",
    "Speedometer": "callbacks",
    "TensorBoard": "pictures.tensorboard",
    "TrainingProgress": "pictures.page",
    "module_checkpoint": "callbacks",
    "split_each_label": "images.splitting",
    "stop_on": "stopping",
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
    "module_checkpoint",
    "split_each_label",
    "stop_on",
]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(f"models.{_HOMES[name]}"), name)
