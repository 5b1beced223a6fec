"""`gangline train`: a network of the zoo or your own on digits, image folders or your own data; MXNet's flag names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import logging_to_stderr

_DATA, _WHERE, _RATE, _GRADIENTS = "Network and data", "Devices and workers", "Learning rate", "Optimizer and gradients"
_NEW, _KEEP, _SHOW = "Transfer learning", "Stopping and checkpoints", "What to show"


def train(
    network: Annotated[
        str,
        typer.Option(
            help="A network of the zoo (lenet, mlp, alexnet, resnet18 and so on), or package.module:build of your own.",
            rich_help_panel=_DATA,
        ),
    ] = "lenet",
    dataset: Annotated[
        str,
        typer.Option(help="A data set by name, digits, or package.module:make of your own.", rich_help_panel=_DATA),
    ] = "digits",
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="A folder of images instead, one sub-folder a class: a path, or a URL such as s3://bucket/train.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    val_dir: Annotated[
        str | None,
        typer.Option(help="A folder of held-out images; else a fifth of --data-dir's.", rich_help_panel=_DATA),
    ] = None,
    image_shape: Annotated[
        str | None, typer.Option(help="Channels, height and width, such as 3,64,64.", rich_help_panel=_DATA)
    ] = None,
    rgb_mean: Annotated[
        str | None, typer.Option(help="Taken off each channel of images, in [0, 1].", rich_help_panel=_DATA)
    ] = None,
    rgb_std: Annotated[
        str | None, typer.Option(help="What each channel is then divided by.", rich_help_panel=_DATA)
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(help="Random changes of training images, such as flip,rotate=-10:10.", rich_help_panel=_DATA),
    ] = None,
    data_workers: Annotated[int, typer.Option(help="Processes that decode images.", min=0, rich_help_panel=_DATA)] = 0,
    skip_unreadable: Annotated[
        int, typer.Option(help="So many unreadable images may be passed over.", min=0, rich_help_panel=_DATA)
    ] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Samples in a batch, over all contexts of all workers.", min=1, rich_help_panel=_DATA)
    ] = 64,
    seed: Annotated[
        int,
        typer.Option(
            help="Of initial weights, batches, held-out fifth and random layers.", min=0, rich_help_panel=_DATA
        ),
    ] = 0,
    context: Annotated[
        str | None,
        typer.Option(help="auto, cpu, gpu, multi-gpu, or parallel: all processes of the job.", rich_help_panel=_WHERE),
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to train on, such as 0,2.", rich_help_panel=_WHERE)] = None,
    cpus: Annotated[
        int | None, typer.Option(help="Train on so many CPU contexts.", min=1, rich_help_panel=_WHERE)
    ] = None,
    kv_store: Annotated[
        str | None,
        typer.Option(
            help="Who sums gradients and updates weights: local, device; in a job allreduce, dist_sync. "
            "Default: device, or with --context parallel what the job offers.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    work_load_list: Annotated[
        str | None,
        typer.Option(
            help="The speed of each context, such as 3,1, or auto to measure it; the batch is split by it.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32 or float64; bfloat16 or float16: float32 weights, forward in half precision.",
            rich_help_panel=_WHERE,
        ),
    ] = "float32",
    num_epochs: Annotated[int, typer.Option(help="The epoch to end before.", min=0, rich_help_panel=_RATE)] = 10,
    lr: Annotated[float, typer.Option(help="The learning rate to begin with.", rich_help_panel=_RATE)] = 0.05,
    lr_schedule: Annotated[
        str, typer.Option(help="piecewise, cosine, poly or constant.", rich_help_panel=_RATE)
    ] = "piecewise",
    lr_factor: Annotated[
        float,
        typer.Option(help="What the rate is multiplied by at each of --lr-step-epochs.", rich_help_panel=_RATE),
    ] = 0.1,
    lr_step_epochs: Annotated[
        str | None, typer.Option(help="Epochs at which the rate steps, such as 5,8.", rich_help_panel=_RATE)
    ] = None,
    warmup_epochs: Annotated[
        float, typer.Option(help="Epochs in which the rate climbs to --lr.", min=0, rich_help_panel=_RATE)
    ] = 0,
    scale_batch: Annotated[
        bool,
        typer.Option(
            "--scale-batch",
            help="Take --batch-size and --lr as those of one device: both times the devices of all workers.",
            rich_help_panel=_RATE,
        ),
    ] = False,
    optimizer: Annotated[
        str, typer.Option(help="An optimizer of torch.optim, by name.", rich_help_panel=_GRADIENTS)
    ] = "sgd",
    mom: Annotated[
        float, typer.Option(help="Momentum, for optimizers that have it.", rich_help_panel=_GRADIENTS)
    ] = 0.9,
    wd: Annotated[float, typer.Option(help="Weight decay (L2).", rich_help_panel=_GRADIENTS)] = 1e-4,
    clip_gradient: Annotated[
        float | None,
        typer.Option(help="Clip each element of the gradient to +- this.", rich_help_panel=_GRADIENTS),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(help="Scale each parameter's gradient to this norm at most.", rich_help_panel=_GRADIENTS),
    ] = None,
    clip_global_norm: Annotated[
        float | None,
        typer.Option(help="Scale all gradients to this norm of all of them at most.", rich_help_panel=_GRADIENTS),
    ] = None,
    gc_type: Annotated[
        str | None,
        typer.Option(
            help="Compress gradients on their way to the store: 2bit, fp16, bf16 or topk.", rich_help_panel=_GRADIENTS
        ),
    ] = None,
    gc_threshold: Annotated[
        float | None,
        typer.Option(
            help="What 2bit sends, in units of the mean gradient (0.5 unless given).", rich_help_panel=_GRADIENTS
        ),
    ] = None,
    pretrained: Annotated[
        Path | None,
        typer.Option(
            help="Weights to begin from (.safetensors, .pth); another class count gets a new last layer.",
            rich_help_panel=_NEW,
        ),
    ] = None,
    replace_last: Annotated[
        bool,
        typer.Option(
            "--replace-last", help="A new last layer though the class count is the same.", rich_help_panel=_NEW
        ),
    ] = False,
    new_layer_factors: Annotated[
        str,
        typer.Option(help="Learning-rate factors of the new weights and biases.", rich_help_panel=_NEW),
    ] = "10,20",
    early_factor: Annotated[
        float, typer.Option(help="Learning-rate factor of all other layers.", rich_help_panel=_NEW)
    ] = 1.0,
    freeze_until: Annotated[
        str | None, typer.Option(help="Layers before this one are not trained.", rich_help_panel=_NEW)
    ] = None,
    model_prefix: Annotated[
        str | None,
        typer.Option(help="Write a checkpoint PREFIX-NNNN after each epoch, and PREFIX-best.", rich_help_panel=_KEEP),
    ] = None,
    load_epoch: Annotated[
        str | None,
        typer.Option(
            help="Go on from checkpoint PREFIX-NNNN; auto: the newest, or from the beginning where there is none.",
            rich_help_panel=_KEEP,
        ),
    ] = None,
    save_period: Annotated[
        int, typer.Option(help="A checkpoint every so many epochs.", min=1, rich_help_panel=_KEEP)
    ] = 1,
    save_minutes: Annotated[
        float | None,
        typer.Option(help="One every so many minutes as well, in the middle of an epoch.", rich_help_panel=_KEEP),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(help="Keep the newest so many checkpoints.", min=1, rich_help_panel=_KEEP)
    ] = None,
    eval_frequency: Annotated[
        int, typer.Option(help="Validate after every so many epochs.", min=1, rich_help_panel=_KEEP)
    ] = 1,
    patience: Annotated[
        int | None,
        typer.Option(help="End after so many validations without a better accuracy.", min=1, rich_help_panel=_KEEP),
    ] = None,
    disp_batches: Annotated[
        int, typer.Option(help="Log speed every so many batches.", min=1, rich_help_panel=_SHOW)
    ] = 20,
    top_k: Annotated[
        int, typer.Option(help="Top-k accuracy beside accuracy, for k above 1.", min=0, rich_help_panel=_SHOW)
    ] = 0,
    plots: Annotated[
        str | None,
        typer.Option(
            help="training-progress: an HTML page that shows how training goes, PREFIX.html or training-progress.html.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="A folder for TensorBoard's files.", rich_help_panel=_SHOW)
    ] = None,
    monitor: Annotated[
        int, typer.Option(help="Log statistics of all layers every so many batches.", min=0, rich_help_panel=_SHOW)
    ] = 0,
    test_io: Annotated[
        bool, typer.Option("--test-io", help="Only read the data, and log how fast.", rich_help_panel=_SHOW)
    ] = False,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Train on random images, to measure speed.", rich_help_panel=_SHOW)
    ] = False,
) -> None:
    """Train a network; the last line of stdout is Validation-accuracy=<float>."""
    options = dict(locals())
    from gangline.cli.training_run import run

    with logging_to_stderr():
        accuracy = run(options)
    if accuracy is not None:
        print(f"Validation-accuracy={accuracy}")
