"""Measure transfer learning with 1, 2 and 4 workers: accuracy against time, and images per second.

The experiment of MathWorks' white paper "Deep learning with MATLAB on multiple GPUs", in small. A network learns the
digits 0 to 4, which stands for the weights of ImageNet; then workers move it to all ten: its last layer is replaced
and learns 10 times as fast, its biases 20 times, layers before ``--freeze-until`` are fixed, and the rate drops once.
Images are real ones, the UCI handwritten digits, written as PNG files; those held out are no part of either task.

Batch and learning rate are multiplied by the number of workers, as there; with ``--same-batch`` they are the same for
all, and so are then the weights but for rounding: transfer is without dropout, which in fixed layers would only blur
what the new one sees. Each worker is a process of one thread: two cores carry two, more share them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report import Row, check_outputs, publish, spread
from gangline.bench.transfer_plot import draw
from gangline.bench.workload import command_line, images

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
    """What workers are told."""

    folder: Path
    """Where `write_images` has written."""
    network: str
    weights: Path
    freeze_until: str
    epochs: int
    drop_after: int
    """Epochs after which the learning rate is a tenth."""
    batch_size: int
    """Over all workers."""
    learning_rate: float


@dataclass
class Clock:
    """When each epoch of `fit` had trained and what it then scored; callbacks for both ends."""

    images: int
    """Of an epoch."""
    began: float = field(default_factory=time.perf_counter)
    epochs: list[dict[str, float]] = field(default_factory=list)
    """Seconds since the beginning, scoring counted in; images a second of training alone; accuracy."""

    def __post_init__(self) -> None:
        self._epoch_began = self.began

    def after_batch(self, param: BatchEndParam) -> None:
        """Note the end of an epoch's last batch."""
        if param.nbatch + 1 == param.locals["num_batches"]:
            self._trained = time.perf_counter()

    def after_scoring(self, param: BatchEndParam) -> None:
        """Note the accuracy, which is that over all workers."""
        [(_, accuracy)] = param.eval_metric.get_global_name_value()
        now = time.perf_counter()
        speed = self.images / (self._trained - self._epoch_began)
        self.epochs.append({"seconds": now - self.began, "samples_per_s": speed, "accuracy": float(accuracy)})
        self._epoch_began = now


def main(
    network: Annotated[str, typer.Option(help="A network of the zoo; images of at most 64x64.")] = "alexnet",
    freeze_until: Annotated[str, typer.Option(help="Layers before this one are fixed.")] = "classifier.6",
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas.")] = "1,2,4",
    source_epochs: Annotated[int, typer.Option(help="Epochs on the digits 0 to 4.", min=1)] = 4,
    epochs: Annotated[int, typer.Option(help="Epochs on all digits.", min=1)] = 10,
    batch_size: Annotated[int, typer.Option(help="Images in a batch, of one worker.", min=1)] = 32,
    source_lr: Annotated[float, typer.Option(help="The learning rate on the digits 0 to 4.")] = 0.001,
    lr: Annotated[float, typer.Option(help="The learning rate on all digits.")] = 0.001,
    scale_batch: Annotated[
        bool,
        typer.Option("--scale-batch/--same-batch", help="Multiply batch and learning rate by the number of workers."),
    ] = True,
    most: Annotated[int | None, typer.Option(help="Use so many training images only.", min=_CLASSES)] = None,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy and speed in this .png.")] = None,
) -> None:
    """Pretrain, transfer with each number of workers, and say how accurate and how fast they were."""
    check_outputs(json, plot)
    numbers = _counts(workers)
    shape = images(network).shape
    _check(network, freeze_until, batch_size, lr)
    with tempfile.TemporaryDirectory(prefix="gangline-transfer-") as name:
        folder = Path(name)
        held_out = write_images(folder, shape, most)
        _say(f"{network} learns the digits 0 to {_SOURCE_CLASSES - 1} in {source_epochs} epochs")
        weights, accuracy = pretrain(folder, network, source_epochs, batch_size, source_lr)
        _say(f"it knows {accuracy:.3f} of those held out; now all ten, {held_out} images held out")
        plan = Plan(folder, network, weights, freeze_until, epochs, max(1, 2 * epochs // 3), batch_size, lr)
        rows = measure(plan, numbers, scale_batch=scale_batch)
    command = "python -m gangline.bench.transfer" + command_line().removeprefix("gangline")
    publish(command, rows, json)
    for line in summary(rows):
        print(line)
    if plot is not None:
        draw(f"{command}\n{_sharing(numbers)}", rows, plot)


def write_images(folder: Path, image_shape: tuple[int, int, int], most: int | None = None) -> int:
    """Write the digits as PNG files: ``folder``/train and ``folder``/held_out, a sub-folder a class.

    Args:
        folder: where.
        image_shape: (channels, height, width), bilinearly enlarged from 8x8; 3 channels are RGB.
        most: training images at most, about equally many of each class; all held-out ones are written.

    Returns:
        How many are held out: a fifth of all, stratified.
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
        The file of the weights, in the folder, and the accuracy on those held out.
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
    """Rows for each number of workers and epoch.

    Args:
        plan: for one worker.
        numbers: of workers, in turn.
        scale_batch: multiply batch and learning rate by them, else leave both as they are.
    """
    from gangline.collectives import spawn
    from gangline.models.zoo.transfer import scale_batch as scaled

    found: dict[int, tuple[Plan, list[dict[str, float]]]] = {}
    for number in numbers:
        batch_size, rate = scaled(plan.batch_size, plan.learning_rate, number if scale_batch else 1)
        own = replace(plan, batch_size=batch_size, learning_rate=rate)
        _say(f"{_workers(number)}, batches of {batch_size}, learning rate {rate:g}")
        found[number] = own, spawn(transfer, number, own, threads=1)[0]
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


def transfer(comm: Communicator, plan: Plan) -> list[dict[str, float]]:
    """Be a worker that moves the pretrained network to all ten digits; what its `Clock` noted."""
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
        module.score(held_out, batch_size=plan.batch_size)  # what is imported for it is no part of the measurement
        store.barrier()  # the clock begins when all are ready
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
    """A line for each number of workers, and how far their accuracies are apart."""
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
        return f"each worker has a core of the {cores} for itself"
    return f"{' and '.join(map(str, sharing))} workers share {cores} cores"


def _check(network: str, freeze_until: str, batch_size: int, rate: float) -> None:
    """Raise now for what would fail only after the first task."""
    import torch

    from gangline.models import zoo
    from gangline.models.zoo import transfer

    with torch.device("meta"):
        transfer.freeze_until(zoo.create(network), freeze_until)
    transfer.scale_batch(batch_size, rate, 1)


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _counts(words: str) -> list[int]:
    found = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in found):
        raise ValueError(f"--workers is {words!r}; expected numbers above 0 with commas, such as 1,2,4")
    return list(dict.fromkeys(int(word) for word in found))


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
