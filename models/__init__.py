"""Module and its parts: replicas, training loop, data, metrics, checkpoints, reports and a zoo of networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.models.batchnorm.distributed_batchnorm import convert_sync_batchnorm
    from gangline.models.checkpoint.checkpoint import load_weights
    from gangline.models.data.datasets import digits, image_folder, raw_digits, synthetic
    from gangline.models.data.elastic import ElasticBatches
    from gangline.models.data.images.augmentation import Augmentation
    from gangline.models.data.images.folder import ImageFolder
    from gangline.models.data.images.patches import ImagePatches, class_weights
    from gangline.models.data.images.splitting import split_each_label
    from gangline.models.data.sources import read_speed
    from gangline.models.data.text import python_documentation
    from gangline.models.loop.callbacks import Checkpoint, ProgressBar, Speedometer, do_checkpoint, module_checkpoint
    from gangline.models.loop.monitor import Monitor
    from gangline.models.loop.stopping import EarlyStopping, stop_on
    from gangline.models.loop.torch_schedulers import TorchScheduler
    from gangline.models.metrics.metric import create_metric
    from gangline.models.module import Module
    from gangline.models.pipelines.pipeline import Pipeline
    from gangline.models.reports.page import TrainingProgress, read_progress
    from gangline.models.reports.tensorboard import TensorBoard
    from gangline.models.segmentation.overlays import segmentation_page
    from gangline.models.segmentation.scenes import digit_scenes, write_scenes
    from gangline.models.segmentation.tiles import predict_image
    from gangline.models.sweeps.sweep import SweepResult, sweep
    from gangline.models.sweeps.trial import Trial, TrialResult
    from gangline.models.unequal_ranks.balanced_loader import BalancedLoader, balance
    from gangline.models.unequal_ranks.gather_rows import gather_rows
    from gangline.models.zoo import create_network
    from gangline.models.zoo.lstm import lstm_language_model
    from gangline.models.zoo.transfer import (
        freeze_until,
        learning_rate_factors,
        pretrained,
        replace_last_layer,
        scale_batch,
    )

_HOMES = {
    "Augmentation": "data.images.augmentation",
    "BalancedLoader": "unequal_ranks.balanced_loader",
    "Checkpoint": "loop.callbacks",
    "EarlyStopping": "loop.stopping",
    "ElasticBatches": "data.elastic",
    "ImageFolder": "data.images.folder",
    "ImagePatches": "data.images.patches",
    "Module": "module",
    "Monitor": "loop.monitor",
    "Pipeline": "pipelines.pipeline",
    "ProgressBar": "loop.callbacks",
    "Speedometer": "loop.callbacks",
    "SweepResult": "sweeps.sweep",
    "TensorBoard": "reports.tensorboard",
    "TorchScheduler": "loop.torch_schedulers",
    "TrainingProgress": "reports.page",
    "Trial": "sweeps.trial",
    "TrialResult": "sweeps.trial",
    "balance": "unequal_ranks.balanced_loader",
    "class_weights": "data.images.patches",
    "convert_sync_batchnorm": "batchnorm.distributed_batchnorm",
    "create_metric": "metrics.metric",
    "create_network": "zoo",
    "digit_scenes": "segmentation.scenes",
    "digits": "data.datasets",
    "do_checkpoint": "loop.callbacks",
    "freeze_until": "zoo.transfer",
    "gather_rows": "unequal_ranks.gather_rows",
    "image_folder": "data.datasets",
    "learning_rate_factors": "zoo.transfer",
    "load_weights": "checkpoint.checkpoint",
    "lstm_language_model": "zoo.lstm",
    "module_checkpoint": "loop.callbacks",
    "predict_image": "segmentation.tiles",
    "pretrained": "zoo.transfer",
    "python_documentation": "data.text",
    "raw_digits": "data.datasets",
    "read_progress": "reports.page",
    "read_speed": "data.sources",
    "replace_last_layer": "zoo.transfer",
    "scale_batch": "zoo.transfer",
    "segmentation_page": "segmentation.overlays",
    "split_each_label": "data.images.splitting",
    "stop_on": "loop.stopping",
    "sweep": "sweeps.sweep",
    "synthetic": "data.datasets",
    "write_scenes": "segmentation.scenes",
}

__all__ = [
    "Augmentation",
    "BalancedLoader",
    "Checkpoint",
    "EarlyStopping",
    "ElasticBatches",
    "ImageFolder",
    "ImagePatches",
    "Module",
    "Monitor",
    "Pipeline",
    "ProgressBar",
    "Speedometer",
    "SweepResult",
    "TensorBoard",
    "TorchScheduler",
    "TrainingProgress",
    "Trial",
    "TrialResult",
    "balance",
    "class_weights",
    "convert_sync_batchnorm",
    "create_metric",
    "create_network",
    "digit_scenes",
    "digits",
    "do_checkpoint",
    "freeze_until",
    "gather_rows",
    "image_folder",
    "learning_rate_factors",
    "load_weights",
    "lstm_language_model",
    "module_checkpoint",
    "predict_image",
    "pretrained",
    "python_documentation",
    "raw_digits",
    "read_progress",
    "read_speed",
    "replace_last_layer",
    "scale_batch",
    "segmentation_page",
    "split_each_label",
    "stop_on",
    "sweep",
    "synthetic",
    "write_scenes",
]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'gangline.models' has no attribute {name!r}")
    return getattr(import_module(f"gangline.models.{_HOMES[name]}"), name)
