"""The options of `gangline train`, with MXNet's flag names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import DeviceOptions, command
from gangline.collectives.errors import UsageError

_DATA, _WHERE, _RATE, _GRADIENTS = "Network and data", "Devices and workers", "Learning rate", "Optimizer and gradients"
_NEW, _KEEP, _SHOW = "Transfer learning", "Stopping and checkpoints", "Output"


class Dtype(StrEnum):
    """Number format of the weights; the half precisions keep float32 weights."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LearningRateSchedule(StrEnum):
    """Learning-rate schedules."""

    PIECEWISE = "piecewise"
    COSINE = "cosine"
    POLY = "poly"
    CONSTANT = "constant"


class GradientCompression(StrEnum):
    """Codecs for gradients."""

    TWO_BIT = "2bit"
    FP16 = "fp16"
    BF16 = "bf16"
    TOP_K = "topk"


class Plots(StrEnum):
    """What shows a run."""

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
        typer.Option(
            help="Network by name (lenet, mlp, alexnet, resnet18, ...), or package.module:build of your own.",
            rich_help_panel=_DATA,
            autocompletion=_networks,
        ),
    ] = "lenet"
    dataset: Annotated[
        str, typer.Option(help="Data set: digits, or package.module:make of your own.", rich_help_panel=_DATA)
    ] = "digits"
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of images instead of --dataset, one sub-folder per class: a path, or a URL such as "
            "s3://bucket/train.",
            rich_help_panel=_DATA,
        ),
    ] = None
    val_dir: Annotated[
        str | None,
        typer.Option(help="Folder of held-out images. Default: a fifth of --data-dir.", rich_help_panel=_DATA),
    ] = None
    image_shape: Annotated[
        str | None, typer.Option(help="Channels, height and width, such as 3,64,64.", rich_help_panel=_DATA)
    ] = None
    rgb_mean: Annotated[
        str | None,
        typer.Option(
            help="Mean of each channel, subtracted from images in [0, 1]; above 1: from images in [0, 255].",
            rich_help_panel=_DATA,
        ),
    ] = None
    rgb_std: Annotated[
        str | None,
        typer.Option(
            help="Standard deviation of each channel, in the unit of --rgb-mean; images are divided by it.",
            rich_help_panel=_DATA,
        ),
    ] = None
    augment: Annotated[
        str | None,
        typer.Option(help="Random augmentation of training images, such as flip,rotate=-10:10.", rich_help_panel=_DATA),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed for initial weights, shuffling, the validation split and dropout.",
            min=0,
            rich_help_panel=_DATA,
        ),
    ] = 0
    kv_store: Annotated[
        str | None,
        typer.Option(
            help="Store that sums gradients and updates weights: local, device or nccl; in a job allreduce, dist_sync "
            "or dist_async, where dist_async:N makes a worker wait that is more than N updates ahead of the slowest. "
            "Default: device; in a job of several workers dist_sync with servers, else allreduce.",
            rich_help_panel=_WHERE,
            autocompletion=_stores,
        ),
    ] = None
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Number format. bfloat16 and float16 keep float32 weights and compute forward in half precision.",
            rich_help_panel=_WHERE,
        ),
    ] = Dtype.FLOAT32
    num_epochs: Annotated[
        int,
        typer.Option(help="Total number of epochs, including those of a resumed run.", min=1, rich_help_panel=_RATE),
    ] = 10
    lr: Annotated[float, typer.Option(help="Initial learning rate.", rich_help_panel=_RATE)] = 0.05
    lr_schedule: Annotated[
        LearningRateSchedule, typer.Option(help="Learning-rate schedule.", rich_help_panel=_RATE)
    ] = LearningRateSchedule.PIECEWISE
    lr_factor: Annotated[
        float,
        typer.Option(help="Factor of the learning rate at each of --lr-step-epochs.", rich_help_panel=_RATE),
    ] = 0.1
    lr_step_epochs: Annotated[
        str | None,
        typer.Option(help="Epochs at which the piecewise schedule steps, such as 5,8.", rich_help_panel=_RATE),
    ] = None
    warmup_epochs: Annotated[
        float,
        typer.Option(help="Number of epochs in which the learning rate rises to --lr.", min=0, rich_help_panel=_RATE),
    ] = 0
    scale_batch: Annotated[
        bool,
        typer.Option(
            "--scale-batch",
            help="Read --batch-size and --lr as values per device: multiply both by the number of devices.",
            rich_help_panel=_RATE,
        ),
    ] = False
    optimizer: Annotated[str, typer.Option(help="Optimizer of torch.optim, by name.", rich_help_panel=_GRADIENTS)] = (
        "sgd"
    )
    mom: Annotated[
        float | None,
        typer.Option(
            help="Momentum, for optimizers that have it. Default: 0.9; 0 for several workers of dist_async, whose late "
            "updates diverge with momentum.",
            rich_help_panel=_GRADIENTS,
        ),
    ] = None
    wd: Annotated[float, typer.Option(help="Weight decay (L2).", rich_help_panel=_GRADIENTS)] = 1e-4
    clip: Annotated[
        list[str] | None,
        typer.Option(
            help="Clip gradients, repeatable: gradient=X each element to [-X, X], norm=X that of each parameter, "
            "global_norm=X all parameters together.",
            metavar="KIND=X",
            rich_help_panel=_GRADIENTS,
        ),
    ] = None
    gc_type: Annotated[
        GradientCompression | None,
        typer.Option(help="Compress gradients between devices or workers.", rich_help_panel=_GRADIENTS),
    ] = None
    gc_threshold: Annotated[
        float | None,
        typer.Option(
            help="Threshold of 2bit, in units of the gradient of the mean loss. Default: 0.5.",
            rich_help_panel=_GRADIENTS,
        ),
    ] = None
    pretrained: Annotated[
        Path | None,
        typer.Option(
            help="File of initial weights (.safetensors, .pth). If its number of classes differs, the last layer is "
            "replaced.",
            rich_help_panel=_NEW,
        ),
    ] = None
    layer_factors: Annotated[
        str,
        typer.Option(
            help="Learning-rate factors of weight and bias of the replaced layer, and of all other layers.",
            rich_help_panel=_NEW,
        ),
    ] = "10,20,1"
    freeze_until: Annotated[
        str | None, typer.Option(help="Freeze the layers before this one, by name.", rich_help_panel=_NEW)
    ] = None
    model_prefix: Annotated[
        str | None,
        typer.Option(help="Write a checkpoint PREFIX-NNNN after each epoch, and PREFIX-best.", rich_help_panel=_KEEP),
    ] = None
    load_epoch: Annotated[
        str | None,
        typer.Option(
            help="Resume from checkpoint PREFIX-NNNN. auto resumes from the newest, or starts if there is none.",
            rich_help_panel=_KEEP,
        ),
    ] = None
    save_period: Annotated[
        str,
        typer.Option(
            help="Write a checkpoint every N epochs; with Nmin every N minutes as well, also within an epoch.",
            metavar="N",
            rich_help_panel=_KEEP,
        ),
    ] = "1"
    keep: Annotated[
        int | None,
        typer.Option(help="Keep the newest N checkpoints only.", metavar="N", min=1, rich_help_panel=_KEEP),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            help="Stop after N validations without a better accuracy.", metavar="N", min=1, rich_help_panel=_KEEP
        ),
    ] = None
    disp_batches: Annotated[
        int, typer.Option(help="Log the speed every N batches.", metavar="N", min=1, rich_help_panel=_SHOW)
    ] = 20
    top_k: Annotated[
        int,
        typer.Option(help="Report top-K accuracy as well, for K above 1.", metavar="K", min=0, rich_help_panel=_SHOW),
    ] = 0
    plots: Annotated[
        list[Plots] | None,
        typer.Option(
            help="Write PREFIX.html (training-progress.html), a page that shows the run, or TensorBoard files in "
            "PREFIX-tensorboard (tensorboard). Repeatable.",
            rich_help_panel=_SHOW,
        ),
    ] = None
    monitor: Annotated[
        int,
        typer.Option(help="Log statistics of all layers every N batches.", metavar="N", min=0, rich_help_panel=_SHOW),
    ] = 0
    test_io: Annotated[
        bool, typer.Option("--test-io", help="Read the data and log the speed; train nothing.", rich_help_panel=_SHOW)
    ] = False
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Train on random images to measure speed.", rich_help_panel=_SHOW)
    ] = False


def parsed(words: Sequence[str]) -> TrainOptions:
    """Return the options of `gangline train` with these arguments.

    Raises:
        UsageError: if it has no such option, or does not accept its value.
    """
    found: list[TrainOptions] = []
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("train")(command(found.append, TrainOptions))
    try:
        app(list(words), standalone_mode=False)
    except Exception as error:
        raise UsageError(f"gangline train {' '.join(words)}: {getattr(error, 'message', error)}") from error
    return found[0]
