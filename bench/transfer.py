"""`gangline bench training --transfer`: accuracy and images per second of transfer learning by several workers.

A network learns UCI's handwritten digits 0 to 4. Each number of workers, with a thread each, then adapts it to all ten
digits: its last layer is replaced, and the layers before ``freeze_until`` are fixed. Dropout is off, so that equal
batches give equal weights for any number of workers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gangline import cpu, spawn
from gangline.bench.driver.harness import say
from gangline.bench.report.rows import Row, spread
from gangline.bench.workload.networks import images
from gangline.collectives.communicator import Communicator
from gangline.kvstore import create
from gangline.models import zoo
from gangline.models.data.datasets import digits
from gangline.models.module import Module
from gangline.models.zoo import transfer

Samples = tuple[torch.Tensor, torch.Tensor]
_SOURCE_CLASSES = 5
_SOURCE_EPOCHS = 4
_CLASSES = 10
_STORE = "allreduce"
_SEED = 0
_DROP = 0.1


@dataclass(frozen=True)
class Plan:
    """The training of one worker."""

    network: str = "alexnet"
    freeze_until: str = "classifier.6"
    epochs: int = 10
    """Number of epochs; after two thirds the learning rate drops to a tenth."""
    batch_size: int = 32
    """Images per batch over all workers."""
    learning_rate: float = 0.001

    def check(self) -> None:
        """Check options, whose errors would otherwise be raised after the first task."""
        with torch.device("meta"):
            transfer.freeze_until(zoo.create(self.network), self.freeze_until)
        transfer.scale_batch(self.batch_size, self.learning_rate, 1)


def measure(plan: Plan, numbers: Sequence[int], *, scale_batch: bool) -> list[Row]:
    """Pretrain a network and transfer it with each number of workers."""
    plan.check()
    plans: dict[int, Plan] = {}
    found: dict[int, tuple[float, list[float], float]] = {}
    with tempfile.TemporaryDirectory(prefix="gangline-transfer-") as folder:
        weights = Path(folder, "source.safetensors")
        say(f"{plan.network} learns the digits 0 to {_SOURCE_CLASSES - 1} in {_SOURCE_EPOCHS} epochs")
        pretrain(plan, weights)
        for number in numbers:
            batch_size, rate = transfer.scale_batch(plan.batch_size, plan.learning_rate, number if scale_batch else 1)
            plans[number] = replace(plan, batch_size=batch_size, learning_rate=rate)
            say(f"{number} workers, batches of {batch_size}, learning rate {rate:g}")
            found[number] = spawn(train_worker, number, plans[number], weights, threads=1)[0]
    medians = {number: statistics.median(speeds) for number, (_, speeds, _) in found.items()}
    return [
        {
            "who": "gangline",
            "network": plan.network,
            "store": _STORE,
            "workers": number,
            "batch_size": plans[number].batch_size,
            "learning_rate": plans[number].learning_rate,
            "accuracy": accuracy,
            "seconds": seconds,
            "samples_per_s": medians[number],
            "efficiency": medians[number] / medians[1] / number if 1 in medians else None,
            **spread(speeds),
        }
        for number, (seconds, speeds, accuracy) in found.items()
    ]


def pretrain(plan: Plan, weights: Path) -> None:
    """Train on the digits 0 to 4 and write the weights."""
    pixels, labels = _digits(plan.network)[0]
    known = labels < _SOURCE_CLASSES
    torch.manual_seed(_SEED)
    with Module(zoo.create(plan.network, _SOURCE_CLASSES), torch.nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(
            (pixels[known], labels[known]),
            num_epoch=_SOURCE_EPOCHS,
            batch_size=plan.batch_size,
            seed=_SEED,
            optimizer="sgd",
            optimizer_params={"learning_rate": plan.learning_rate, "momentum": 0.9},
        )
        save_file(module.get_params(), weights)


def train_worker(comm: Communicator, plan: Plan, weights: Path) -> tuple[float, list[float], float]:
    """Train the pretrained network on all ten digits as one worker.

    Returns:
        The seconds of all epochs, scoring included; images per second of each epoch's training; the accuracy on the
        held-out images.
    """
    torch.manual_seed(_SEED)
    network, new = transfer.pretrained(plan.network, weights, _CLASSES)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    frozen = transfer.freeze_until(network, plan.freeze_until)
    train, held_out = _digits(plan.network)
    optimizer: dict[str, Any] = {
        "learning_rate": plan.learning_rate,
        "momentum": 0.9,
        "lr_mult": transfer.learning_rate_factors(network, new, frozen=frozen),
    }
    speeds: list[float] = []
    with (
        create(_STORE, communicator=comm) as store,
        Module(network, torch.nn.CrossEntropyLoss(), cpu(), fixed_param_names=frozen) as module,
    ):
        module.init_optimizer(store, "sgd", optimizer)
        module.score(held_out, batch_size=plan.batch_size)  # imports modules, which must not be measured
        store.barrier()  # the clock starts when all workers are ready
        start = time.perf_counter()
        for epoch in range(plan.epochs):
            if epoch == max(1, 2 * plan.epochs // 3):
                module.set_learning_rate(plan.learning_rate * _DROP)
            began = time.perf_counter()
            module.fit(train, begin_epoch=epoch, num_epoch=epoch + 1, batch_size=plan.batch_size, seed=_SEED)
            speeds.append(len(train[1]) / (time.perf_counter() - began))
            [(_, accuracy)] = module.score(held_out, batch_size=plan.batch_size)
        return time.perf_counter() - start, speeds, float(accuracy)


def _digits(network: str) -> tuple[Samples, Samples]:
    """Return the images and labels for training and a held-out fifth."""
    data = digits(images(network).shape, torch.float32, _SEED)
    return data.train, data.validation
