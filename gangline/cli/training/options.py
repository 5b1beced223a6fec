"""The options of `gangline train`, with MXNet's flag names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from gangline.cli.options import DeviceOptions, command
from gangline.cli.options import data_option as _data
from gangline.cli.options import device_option as _where
from gangline.cli.training.mxnet_flags import TrainCommand
from gangline.collectives.errors import UsageError

_rate = partial(typer.Option, rich_help_panel="Learning rate")
_gradients = partial(typer.Option, rich_help_panel="Optimizer and gradients")
_transfer = partial(typer.Option, rich_help_panel="Transfer learning")
_keep = partial(typer.Option, rich_help_panel="Stopping and checkpoints")
_show = partial(typer.Option, rich_help_panel="Output")


class Plots(StrEnum):  # typer has no lists of literals
    """Displays of a run."""

    TRAINING_PROGRESS = "training-progress"
    TENSORBOARD = "tensorboard"


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

    network: Annotated[
        str,
        _data(
            help="Network by name (lenet, mlp, alexnet, resnet18, ...), or package.module:build of your own.",
            autocompletion=_networks,
        ),
    ] = "lenet"
    dataset: Annotated[
        str, _data(help="Data set: digits, random images to measure speed, or package.module:make of your own.")
    ] = "digits"
    data_dir: Annotated[
        str | None,
        _data(
            help="Folder of images instead of --dataset, one sub-folder per class: a path, or a URL such as "
            "s3://bucket/train."
        ),
    ] = None
    val_dir: Annotated[str | None, _data(help="Folder of held-out images. Default: a fifth of --data-dir.")] = None
    num_classes: Annotated[
        int | None, _data(help="Number of classes of random images; that of other data is checked.", min=1)
    ] = None
    num_examples: Annotated[
        int | None, _data(help="Number of random images; that of other data is checked.", min=1)
    ] = None
    image_shape: Annotated[str | None, _data(help="Channels, height and width, such as 3,64,64.")] = None
    rgb_mean: Annotated[
        str | None,
        _data(help="Mean of each channel, subtracted from images in [0, 1]; above 1: from images in [0, 255]."),
    ] = None
    rgb_std: Annotated[
        str | None,
        _data(help="Standard deviation of each channel, in the unit of --rgb-mean; images are divided by it."),
    ] = None
    augment: Annotated[
        str | None, _data(help="Random augmentation of training images, such as flip,rotate=-10:10.")
    ] = None
    seed: Annotated[
        int, _data(help="Random seed for initial weights, shuffling, the validation split and dropout.", min=0)
    ] = 0
    kv_store: Annotated[
        str | None,
        _where(
            help="Store that sums gradients and updates weights: local, device or nccl; in a job allreduce, dist_sync "
            "or dist_async, where dist_async:N makes a worker wait that is more than N updates ahead of the slowest. "
            "Default: device; in a job of several workers dist_sync with servers, else allreduce.",
            autocompletion=_stores,
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"],
        _where(help="Number format. bfloat16 and float16 keep float32 weights and compute forward in half precision."),
    ] = "float32"
    num_epochs: Annotated[int, _rate(help="Total number of epochs, including those of a resumed run.", min=1)] = 10
    lr: Annotated[float, _rate(help="Initial learning rate.")] = 0.05
    lr_schedule: Annotated[
        Literal["piecewise", "cosine", "poly", "constant"], _rate(help="Learning-rate schedule.")
    ] = "piecewise"
    lr_factor: Annotated[float, _rate(help="Factor of the learning rate at each of --lr-step-epochs.")] = 0.1
    lr_step_epochs: Annotated[str | None, _rate(help="Epochs at which the piecewise schedule steps, such as 5,8.")] = (
        None
    )
    warmup_epochs: Annotated[float, _rate(help="Number of epochs in which the learning rate rises to --lr.", min=0)] = 0
    scale_batch: Annotated[
        bool,
        _rate(
            "--scale-batch",
            help="Read --batch-size and --lr as values per device: multiply both by the number of devices.",
        ),
    ] = False
    optimizer: Annotated[str, _gradients(help="Optimizer of torch.optim, by name.")] = "sgd"
    mom: Annotated[
        float | None,
        _gradients(
            help="Momentum, for optimizers that have it. Default: 0.9; 0 for several workers of dist_async, whose late "
            "updates diverge with momentum."
        ),
    ] = None
    wd: Annotated[float, _gradients(help="Weight decay (L2).")] = 1e-4
    clip: Annotated[
        list[str] | None,
        _gradients(
            help="Clip gradients, repeatable: gradient=X each element to [-X, X], norm=X that of each parameter, "
            "global_norm=X all parameters together.",
            metavar="KIND=X",
        ),
    ] = None
    gc_type: Annotated[
        Literal["2bit", "fp16", "bf16", "topk"] | None,
        _gradients(help="Compress gradients between devices or workers."),
    ] = None
    gc_threshold: Annotated[
        float | None, _gradients(help="Threshold of 2bit, in units of the gradient of the mean loss. Default: 0.5.")
    ] = None
    pretrained: Annotated[
        Path | None,
        _transfer(
            help="File of initial weights (.safetensors, .pth). If its number of classes differs, the last layer is "
            "replaced."
        ),
    ] = None
    layer_factors: Annotated[
        str, _transfer(help="Learning-rate factors of weight and bias of the replaced layer, and of all other layers.")
    ] = "10,20,1"
    freeze_until: Annotated[str | None, _transfer(help="Freeze the layers before this one, by name.")] = None
    model_prefix: Annotated[
        str | None, _keep(help="Write a checkpoint PREFIX-NNNN after each epoch, and PREFIX-best.")
    ] = None
    load_epoch: Annotated[
        str | None,
        _keep(help="Resume from checkpoint PREFIX-NNNN. auto resumes from the newest, or starts if there is none."),
    ] = None
    save_period: Annotated[
        str,
        _keep(
            help="Write a checkpoint every N epochs; with Nmin every N minutes as well, also within an epoch.",
            metavar="N",
        ),
    ] = "1"
    keep: Annotated[int | None, _keep(help="Keep the newest N checkpoints only.", metavar="N", min=1)] = None
    patience: Annotated[
        int | None, _keep(help="Stop after N validations without a better accuracy.", metavar="N", min=1)
    ] = None
    disp_batches: Annotated[int, _show(help="Log the speed every N batches.", metavar="N", min=1)] = 20
    top_k: Annotated[int, _show(help="Report top-K accuracy as well, for K above 1.", metavar="K", min=0)] = 0
    plots: Annotated[
        list[Plots] | None,
        _show(
            help="Write PREFIX.html (training-progress.html), a page that shows the run, or TensorBoard files in "
            "PREFIX-tensorboard (tensorboard). Repeatable."
        ),
    ] = None
    monitor: Annotated[int, _show(help="Log statistics of all layers every N batches.", metavar="N", min=0)] = 0
    test_io: Annotated[bool, _show("--test-io", help="Read the data and log the speed; train nothing.")] = False


def parsed(words: Sequence[str]) -> TrainOptions:
    """Return the options of `gangline train` with these arguments."""
    found: list[TrainOptions] = []
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("train", cls=TrainCommand)(command(found.append, TrainOptions))
    try:
        app(list(words), standalone_mode=False)
    except Exception as error:
        raise UsageError(f"gangline train {' '.join(words)}: {getattr(error, 'message', error)}") from error
    return found[0]
