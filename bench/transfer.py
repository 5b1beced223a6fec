"""`gangline bench transfer`: transfer learning with 1, 2 and 4 workers, accuracy against time and images per second.

A small version of the experiment in MathWorks' white paper "Deep learning with MATLAB on multiple GPUs". A network
learns the digits 0 to 4, in place of ImageNet; then workers transfer it to all ten: its last layer is replaced and
learns 10 times as fast, its biases 20 times, layers before ``--freeze-until`` are fixed, and the rate drops once. The
images are the UCI handwritten digits, written as PNG files; the held-out ones are in neither task's training set.

Batch and learning rate are multiplied by the number of workers, as in the white paper; with ``--same-batch`` they are
not, and all numbers of workers give the same weights except for rounding. Transfer runs without dropout, which in fixed
layers would only add noise to the new layer's input. Each worker is a process of one thread.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.workload.networks import images
from gangline.bench.workload.options import Json, Plot
from gangline.bench.workload.sizes import counts

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator
    from gangline.models.loop.callbacks import BatchEndParam

_SOURCE_CLASSES = 5
_CLASSES = 10
_STORE = "allreduce"
_SEED = 0
_DROP = 0.1


@dataclass(frozen=True)
class Plan:
    """The training that workers run."""

    folder: Path
    """Folder written by `write_images`."""
    network: str
    weights: Path
    freeze_until: str
    epochs: int
    drop_after: int
    """Epochs after which the learning rate drops to a tenth."""
    batch_size: int
    """Images over all workers."""
    learning_rate: float


@dataclass
class Clock:
    """Time and accuracy of each epoch, recorded by two callbacks of `fit`."""

    images: int
    """Images of an epoch."""
    start: float = field(default_factory=time.perf_counter)
    epochs: list[dict[str, float]] = field(default_factory=list)
    """Seconds since the start, scoring included; images per second of training alone; accuracy."""

    def __post_init__(self) -> None:
        self._epoch_start = self.start

    def after_batch(self, param: BatchEndParam) -> None:
        """Record the end of an epoch's last batch."""
        if param.nbatch + 1 == param.locals["num_batches"]:
            self._trained = time.perf_counter()

    def after_scoring(self, param: BatchEndParam) -> None:
        """Record the accuracy over all workers."""
        [(_, accuracy)] = param.eval_metric.get_global_name_value()
        now = time.perf_counter()
        speed = self.images / (self._trained - self._epoch_start)
        self.epochs.append({"seconds": now - self.start, "samples_per_s": speed, "accuracy": float(accuracy)})
        self._epoch_start = now


def transfer(
    network: Annotated[str, typer.Option(help="Network of the zoo; its images have at most 64x64 pixels.")] = "alexnet",
    freeze_until: Annotated[str, typer.Option(help="Layers before this one are fixed.")] = "classifier.6",
    workers: Annotated[str, typer.Option("-n", "--workers", help="Numbers of workers, with commas.")] = "1,2,4",
    source_epochs: Annotated[int, typer.Option(help="Epochs on the digits 0 to 4.", min=1)] = 4,
    epochs: Annotated[int, typer.Option(help="Epochs on all digits.", min=1)] = 10,
    batch_size: Annotated[int, typer.Option(help="Images in a batch of one worker.", min=1)] = 32,
    source_lr: Annotated[float, typer.Option(help="Learning rate on the digits 0 to 4.")] = 0.001,
    lr: Annotated[float, typer.Option(help="Learning rate on all digits.")] = 0.001,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch/--same-batch", help="Multiply batch and learning rate by the number of workers."),
    ] = True,
    most: Annotated[
        int | None, typer.Option(help="Upper bound of the number of training images.", min=_CLASSES)
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Pretrain a network, transfer it with each number of workers, and print accuracy and speed."""
    from gangline.bench.driver.candidates import say

    check_outputs(json, plot)
    numbers = counts(workers, "--workers")
    shape = images(network).shape
    _check(network, freeze_until, batch_size, lr)
    with tempfile.TemporaryDirectory(prefix="gangline-transfer-") as name:
        folder = Path(name)
        held_out = write_images(folder, shape, most)
        say(f"{network} learns the digits 0 to {_SOURCE_CLASSES - 1} in {source_epochs} epochs")
        weights, accuracy = pretrain(folder, network, source_epochs, batch_size, source_lr)
        say(f"accuracy on their held-out images: {accuracy:.3f}; now all ten digits, {held_out} held-out images")
        plan = Plan(folder, network, weights, freeze_until, epochs, max(1, 2 * epochs // 3), batch_size, lr)
        rows = measure(plan, numbers, scale_batch=scale_batch)
    publish(command_line(), rows, json)
    for line in summary(rows):
        print(line)
    if plot is not None:
        from gangline.bench.report.transfer_plot import draw_transfer

        draw_transfer(f"{command_line()}\n{_sharing(numbers)}", rows, plot)


def write_images(folder: Path, image_shape: tuple[int, int, int], most: int | None = None) -> int:
    """Write the digits as PNG files: ``folder``/train and ``folder``/held_out, a sub-folder per class.

    Args:
        folder: an existing folder.
        image_shape: (channels, height, width), bilinearly enlarged from 8x8; 3 channels are RGB.
        most: upper bound of the training images, about equally many per class; all held-out images are written.

    Returns:
        The number of held-out images: a stratified fifth of all.
    """
    import torch
    from PIL import Image

    from gangline.models.data.datasets import digits

    data = digits(image_shape, torch.float32, _SEED)
    for part, (pixels, labels) in (("train", data.train), ("held_out", data.validation)):
        for label in range(_CLASSES):
            (folder / part / str(label)).mkdir(parents=True)
        limit = len(labels) if most is None or part == "held_out" else most
        for number, (image, label) in enumerate(zip(pixels[:limit], labels[:limit].tolist(), strict=True)):
            levels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            path = folder / part / str(label) / f"{number:04d}.png"
            Image.fromarray(levels if levels.shape[2] == 3 else levels[:, :, 0]).save(path)
    return len(data.validation[1])


def pretrain(folder: Path, network: str, epochs: int, batch_size: int, learning_rate: float) -> tuple[Path, float]:
    """Train on the digits 0 to 4 of `write_images`' folder.

    Returns:
        The file of the weights, in the folder, and the accuracy on the held-out images.
    """
    import torch
    from safetensors.torch import save_file
    from torch.utils.data import Subset

    from gangline.collectives import cpu
    from gangline.models import zoo
    from gangline.models.data.images.folder import ImageFolder
    from gangline.models.module import Module

    train, held_out = (
        Subset(data, [index for index, label in enumerate(data.labels) if label < _SOURCE_CLASSES])
        for data in (ImageFolder(folder / part, images(network).shape) for part in ("train", "held_out"))
    )
    torch.manual_seed(_SEED)
    with Module(zoo.create(network, _SOURCE_CLASSES), torch.nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(
            train,
            num_epoch=epochs,
            batch_size=batch_size,
            seed=_SEED,
            optimizer="sgd",
            optimizer_params={"learning_rate": learning_rate, "momentum": 0.9},
        )
        [(_, accuracy)] = module.score(held_out, batch_size=batch_size)
        weights = folder / "source.safetensors"
        save_file(module.get_params(), weights)
    return weights, accuracy


def measure(plan: Plan, numbers: Sequence[int], *, scale_batch: bool) -> list[Row]:
    """Measure each epoch with each number of workers.

    Args:
        plan: training of one worker.
        numbers: numbers of workers.
        scale_batch: multiply batch and learning rate by the number of workers.
    """
    from gangline.bench.driver.candidates import say
    from gangline.collectives import spawn
    from gangline.models.zoo.transfer import scale_batch as scaled

    found: dict[int, tuple[Plan, list[dict[str, float]]]] = {}
    for number in numbers:
        batch_size, rate = scaled(plan.batch_size, plan.learning_rate, number if scale_batch else 1)
        own = replace(plan, batch_size=batch_size, learning_rate=rate)
        say(f"{_workers(number)}, batches of {batch_size}, learning rate {rate:g}")
        found[number] = own, spawn(train_worker, number, own, threads=1)[0]
    alone = found[1][1] if 1 in found else None
    return [
        {
            "who": "gangline",
            "network": plan.network,
            "store": _STORE,
            "workers": number,
            "batch_size": own.batch_size,
            "learning_rate": own.learning_rate,
            "epoch": epoch,
            **figures,
            "efficiency": figures["samples_per_s"] / alone[epoch]["samples_per_s"] / number if alone else None,
            **spread([figures["samples_per_s"]]),
        }
        for number, (own, of_epochs) in found.items()
        for epoch, figures in enumerate(of_epochs)
    ]


def train_worker(comm: Communicator, plan: Plan) -> list[dict[str, float]]:
    """Train the pretrained network on all ten digits as one worker; return what its `Clock` recorded."""
    import torch

    from gangline.collectives import cpu
    from gangline.kvstore import create
    from gangline.models.data.images.folder import ImageFolder
    from gangline.models.module import Module
    from gangline.models.zoo.transfer import freeze_until, learning_rate_factors, pretrained

    torch.manual_seed(_SEED)
    network, new = pretrained(plan.network, plan.weights, _CLASSES)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    frozen = freeze_until(network, plan.freeze_until)
    train, held_out = (ImageFolder(plan.folder / part, images(plan.network).shape) for part in ("train", "held_out"))
    optimizer: dict[str, Any] = {
        "learning_rate": plan.learning_rate,
        "momentum": 0.9,
        "lr_mult": learning_rate_factors(network, new, frozen=frozen),
    }
    with (
        create(_STORE, communicator=comm) as store,
        Module(network, torch.nn.CrossEntropyLoss(), cpu(), fixed_param_names=frozen) as module,
    ):
        module.init_optimizer(store, "sgd", optimizer)
        module.score(held_out, batch_size=plan.batch_size)  # imports what the measurement must not include
        store.barrier()  # the clock starts when all workers are ready
        clock = Clock(len(train))

        def drop(param: BatchEndParam) -> None:
            if param.epoch + 1 == plan.drop_after:
                module.set_learning_rate(plan.learning_rate * _DROP)

        module.fit(
            train,
            held_out,
            num_epoch=plan.epochs,
            batch_size=plan.batch_size,
            seed=_SEED,
            kvstore=store,
            optimizer="sgd",
            optimizer_params=optimizer,
            batch_end_callback=clock.after_batch,
            eval_end_callback=[clock.after_scoring, drop],
        )
    return clock.epochs


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a line for each number of workers, and the difference of their accuracies."""
    lines, last = [], [row for row in rows if row["epoch"] == max(row["epoch"] for row in rows)]
    for row in last:
        speeds = [other["samples_per_s"] for other in rows if other["workers"] == row["workers"]]
        lines.append(
            f"{_workers(row['workers'])}: accuracy {row['accuracy']:.4f} after {row['seconds']:.1f} s, "
            f"{statistics.median(speeds):.0f} images/s"
        )
    accuracies = [row["accuracy"] for row in last]
    points = 100 * (max(accuracies) - min(accuracies))
    return [*lines, f"accuracies are {points:.2f} points apart", _sharing([row["workers"] for row in last])]


def _sharing(numbers: Sequence[int]) -> str:
    cores = len(os.sched_getaffinity(0))
    sharing = [number for number in numbers if number > cores]
    if not sharing:
        return f"each worker has a core of its own ({cores} cores)"
    return f"{' and '.join(map(str, sharing))} workers share {cores} cores"


def _check(network: str, freeze_until: str, batch_size: int, rate: float) -> None:
    """Check now the options that would otherwise fail after the first task."""
    import torch

    from gangline.models import zoo
    from gangline.models.zoo import transfer

    with torch.device("meta"):
        transfer.freeze_until(zoo.create(network), freeze_until)
    transfer.scale_batch(batch_size, rate, 1)


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"
