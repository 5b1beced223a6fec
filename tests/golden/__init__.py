"""Losses of the first 20 steps of networks of the zoo, which `python -m tests.golden` has written to the files here."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, Module, Trainer, cpu, spawn

STEPS, BATCH = 20, 4
SHAPES = {"mlp": (1, 28, 28), "lenet": (1, 28, 28), "alexnet": (3, 64, 64), "resnet18": (3, 64, 64)}
"""Image shapes by network; others of the zoo are these with other numbers of layers.

Losses must not depend on the last bits, in which processors differ. With images of 32 x 32 those of resnet18 did: its
last layers normalize one value per sample, and weights that differed by 1e-13 gave other losses from the third step on.
Here they differ by 4e-13.
"""
RATES = {"mlp": 0.05, "lenet": 0.01, "alexnet": 1e-5, "resnet18": 0.0002}
MOMENTUM = 0.9


def made(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a network in float64, and its batches."""
    torch.manual_seed(1)
    network = gangline.create_network(name, 10).double()
    images = torch.randn(STEPS * BATCH, *SHAPES[name], dtype=torch.float64)
    labels = torch.randint(10, (STEPS * BATCH,))
    torch.manual_seed(2)
    return network, list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def by_module(name: str) -> list[float]:
    """Train on two contexts that get 3 samples and 1."""
    network, batches = made(name)
    losses = []
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)], [3, 1], random="sample") as module:
        module.bind(tuple(batches[0][0].shape))
        module.init_optimizer("device", "sgd", {"learning_rate": RATES[name], "momentum": MOMENTUM})
        for images, labels in batches:
            module.forward_backward_update(images, labels)
            losses.append(float(module.get_loss()))
    return losses


def by_trainer(name: str) -> list[float]:
    """Train with `Trainer`."""
    network, batches = made(name)
    trainer = Trainer(network, "sgd", {"learning_rate": RATES[name], "momentum": MOMENTUM}, "local")
    losses = []
    for images, labels in batches:
        trainer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.step(len(images))
        losses.append(float(loss.detach()))
    return losses


def on_rank(comm: Communicator, name: str, path: str) -> list[float]:
    """Train with DDP and `balance` on a rank that gets 3 samples or 1."""
    dist.init_process_group("gangline", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    network, batches = made(name)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[name], momentum=MOMENTUM)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loader = gangline.balance(model, DataLoader(TensorDataset(images, labels), BATCH), loads=[3, 1], global_batch=BATCH)
    losses = []
    for own_images, own_labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(own_images), own_labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean = loss.detach() * len(own_labels) / BATCH
        dist.all_reduce(mean)
        losses.append(float(mean))
    dist.destroy_process_group()
    return losses


def by_balance(name: str) -> list[float]:
    """Train on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return spawn(on_rank, 2, name, f"{folder}/store", threads=1)[0]  # type: ignore[no-any-return]


def _alone(_: Communicator, way: Callable[[str], list[float]], name: str) -> list[float]:
    return way(name)


WAYS: dict[str, Callable[[str], list[float]]] = {
    "module": lambda name: spawn(_alone, 1, by_module, name, threads=1)[0],
    "trainer": lambda name: spawn(_alone, 1, by_trainer, name, threads=1)[0],
    "balance": by_balance,
}


def machine() -> str:
    """Return what the last bits may depend on: torch, and the processor's kind."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "stepping", "flags"))}
    processor = hashlib.sha256("\n".join(sorted(kinds)).encode()).hexdigest()[:16]
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def path_of(name: str) -> Path:
    """Return the file of a network."""
    return Path(__file__).with_name(f"{name}.json")


def write(names: Iterable[str]) -> None:
    """Write the files of networks."""
    for name in names:
        losses = {way: train(name) for way, train in WAYS.items()}
        path_of(name).write_text(json.dumps({"machine": machine(), "losses": losses}, indent=1) + "\n")
        print(name, *(f"{way} {of_way[0]:.6f} to {of_way[-1]:.6f}" for way, of_way in losses.items()))
