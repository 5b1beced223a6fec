"""Samples per second of Module beside a plain torch loop: `python -m bench.training`.

Both train LeNet on random 28x28 images with SGD and momentum; the loop has all of torch's threads, as Module has
on one context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.report import Row, in_turn, publish, spread
from collectives import cpu
from models.module import Module
from models.zoo import registry

_ARGUMENTS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def main(
    batch_size: Annotated[int, typer.Option(help="Samples in a batch, over all contexts.")] = 64,
    batches: Annotated[int, typer.Option(help="Batches in a run.")] = 40,
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.")] = 7,
    kv_store: Annotated[str, typer.Option(help="The store that two contexts use.")] = "device",
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Measure, print the table, and the ratios to the plain loop."""
    rows = measure(batch_size, batches, runs, kv_store)
    publish("training", rows, json)


def measure(batch_size: int, batches: int, runs: int, store: str) -> list[Row]:
    """Samples per second of the plain loop, and of Module on one and on two CPU contexts."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(batch_size, 1, 28, 28, generator=generator)
    label = torch.randint(10, (batch_size,), generator=generator)
    with ExitStack() as stack:
        sides = {
            ("plain torch loop", 1): _timed(_plain_step(data, label), batches, batch_size),
            **{
                ("gangline", contexts): _timed(
                    stack.enter_context(_module_step(contexts, store, data, label)), batches, batch_size
                )
                for contexts in (1, 2)
            },
        }
        by_name = {f"{who}/{contexts}": side for (who, contexts), side in sides.items()}
        speeds = in_turn(by_name, runs)
    plain, *_ = speeds.values()
    return [
        {
            "who": who,
            "contexts": contexts,
            "network": "lenet",
            "batch_size": batch_size,
            "samples_per_s": spread(of_side)["p50"],
            "ratio_to_plain": spread([ours / theirs for ours, theirs in zip(of_side, plain, strict=True)])["p50"],
            **spread(of_side),
        }
        for (who, contexts), of_side in zip(sides, speeds.values(), strict=True)
    ]


def _timed(step: Callable[[], Any], batches: int, batch_size: int) -> Callable[[], float]:
    def run() -> float:
        for _ in range(3):
            step()
        began = time.perf_counter()
        for _ in range(batches):
            step()
        return batches * batch_size / (time.perf_counter() - began)

    return run


def _plain_step(data: torch.Tensor, label: torch.Tensor) -> Callable[[], None]:
    network = registry.create("lenet")
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), **_ARGUMENTS)

    def step() -> None:
        optimizer.zero_grad()
        loss(network(data), label).backward()
        optimizer.step()

    return step


@contextmanager
def _module_step(contexts: int, store: str, data: torch.Tensor, label: torch.Tensor) -> Iterator[Callable[[], None]]:
    network = registry.create("lenet")
    with Module(network, torch.nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]) as module:
        module.init_optimizer(store, "sgd", dict(_ARGUMENTS))
        yield lambda: module.forward_backward_update(data, label)


if __name__ == "__main__":
    typer.run(main)
