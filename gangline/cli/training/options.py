"""The options of `gangline train`, with MXNet's flag names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from gangline.cli.options import DeviceOptions
from gangline.cli.options import data_option as _data
from gangline.cli.options import device_option as _where

_rate = partial(typer.Option, rich_help_panel="Learning rate")
_gradients = partial(typer.Option, rich_help_panel="Optimizer and gradients")
_transfer = partial(typer.Option, rich_help_panel="Transfer learning")
_keep = partial(typer.Option, rich_help_panel="Stopping and checkpoints")
_show = partial(typer.Option, rich_help_panel="Output")


class Plots(StrEnum):  # typer has no lists of literals
    """Displays of a run."""

    TRAINING_PROGRESS = "training-progress"


def _networks(begin: str) -> list[str]:
    from gangline.models.zoo import registry

    return [name for name in registry.names() if name.startswith(begin)]


def _stores(begin: str) -> list[str]:
    return [
        name for name in ("local", "device", "nccl", "allreduce", "dist_sync", "dist_async") if name.startswith(begin)
    ]


@dataclass(frozen=True)
class TrainOptions(DeviceOptions):
    """The options of `gangline train`."""

    network: Annotated[str, _data(autocompletion=_networks)] = "lenet"
    """Network by name (lenet, mlp, alexnet, resnet18, ...), or package.module:build of your own."""
    dataset: Annotated[str, _data()] = "digits"
    """Data set: digits, random images to measure speed, or package.module:make of your own."""
    data_dir: Annotated[str | None, _data()] = None
    """Folder of images instead of --dataset, one sub-folder per class: a path, or a URL such as s3://bucket/train."""
    val_dir: Annotated[str | None, _data()] = None
    """Folder of held-out images. Default: a fifth of --data-dir."""
    num_classes: Annotated[int | None, _data(min=1)] = None
    """Number of classes of random images; that of other data is checked."""
    num_examples: Annotated[int | None, _data(min=1)] = None
    """Number of random images; that of other data is checked."""
    image_shape: Annotated[str | None, _data()] = None
    """Channels, height and width, such as 3,64,64."""
    rgb_mean: Annotated[str | None, _data()] = None
    """Mean of each channel, subtracted from images in [0, 1]; above 1: from images in [0, 255]."""
    rgb_std: Annotated[str | None, _data()] = None
    """Standard deviation of each channel, in the unit of --rgb-mean; images are divided by it."""
    augment: Annotated[str | None, _data()] = None
    """Random augmentation of training images, such as flip,rotate=-10:10."""
    seed: Annotated[int, _data(min=0)] = 0
    """Random seed for initial weights, shuffling, the validation split and dropout."""
    kv_store: Annotated[str | None, _where(autocompletion=_stores)] = None
    """Store that sums gradients and updates weights: local, device or nccl; in a job allreduce, dist_sync or
    dist_async, where dist_async:N makes a worker wait that is more than N updates ahead of the slowest. Default:
    device; in a job of several workers dist_sync with servers, else allreduce."""
    dtype: Annotated[Literal["float32", "float64", "bfloat16", "float16"], _where()] = "float32"
    """Number format. bfloat16 and float16 keep float32 weights and compute forward in half precision."""
    num_epochs: Annotated[int, _rate(min=1)] = 10
    """Total number of epochs, including those of a resumed run."""
    lr: Annotated[float, _rate()] = 0.05
    """Initial learning rate."""
    lr_schedule: Annotated[Literal["piecewise", "cosine", "poly", "constant"], _rate()] = "piecewise"
    """Learning-rate schedule."""
    lr_factor: Annotated[float, _rate()] = 0.1
    """Factor of the learning rate at each of --lr-step-epochs."""
    lr_step_epochs: Annotated[str | None, _rate()] = None
    """Epochs at which the piecewise schedule steps, such as 5,8."""
    warmup_epochs: Annotated[float, _rate(min=0)] = 0
    """Number of epochs in which the learning rate rises to --lr."""
    scale_batch: Annotated[bool, _rate("--scale-batch")] = False
    """Read --batch-size and --lr as values per device: multiply both by the number of devices."""
    optimizer: Annotated[str, _gradients()] = "sgd"
    """Optimizer of torch.optim, by name."""
    mom: Annotated[float | None, _gradients()] = None
    """Momentum, for optimizers that have it. Default: 0.9; 0 for several workers of dist_async, whose late updates
    diverge with momentum."""
    wd: Annotated[float, _gradients()] = 1e-4
    """Weight decay (L2)."""
    clip: Annotated[list[str] | None, _gradients(metavar="KIND=X")] = None
    """Clip gradients, repeatable: gradient=X each element to [-X, X], norm=X that of each parameter, global_norm=X all
    parameters together."""
    gc_type: Annotated[Literal["2bit", "fp16", "bf16", "topk"] | None, _gradients()] = None
    """Compress gradients between devices or workers."""
    gc_threshold: Annotated[float | None, _gradients()] = None
    """Threshold of 2bit, in units of the gradient of the mean loss. Default: 0.5."""
    pretrained: Annotated[Path | None, _transfer()] = None
    """Initial weights, a checkpoint or a .safetensors or .pth file. A last layer of other classes is replaced."""
    layer_factors: Annotated[str, _transfer()] = "10,20,1"
    """Learning-rate factors of weight and bias of the replaced layer, and of all other layers."""
    freeze_until: Annotated[str | None, _transfer()] = None
    """Freeze the layers before this one, by name."""
    model_prefix: Annotated[str | None, _keep()] = None
    """Write a checkpoint PREFIX-NNNN after each epoch, and PREFIX-best."""
    load_epoch: Annotated[str | None, _keep()] = None
    """Resume from checkpoint PREFIX-NNNN. auto resumes from the newest, or starts if there is none."""
    save_period: Annotated[str, _keep(metavar="N")] = "1"
    """Write a checkpoint every N epochs; with Nmin every N minutes as well, also within an epoch."""
    keep: Annotated[int | None, _keep(metavar="N", min=1)] = None
    """Keep the newest N checkpoints only."""
    patience: Annotated[int | None, _keep(metavar="N", min=1)] = None
    """Stop after N validations without a better accuracy."""
    disp_batches: Annotated[int, _show(metavar="N", min=1)] = 20
    """Log the speed every N batches."""
    top_k: Annotated[int, _show(metavar="K", min=0)] = 0
    """Report top-K accuracy as well, for K above 1."""
    plots: Annotated[list[Plots] | None, _show()] = None
    """Write PREFIX.html (training-progress.html), a page that shows the run."""
    test_io: Annotated[bool, _show("--test-io")] = False
    """Read the data and log the speed; train nothing."""
