"""A worker that trains with DistributedDataParallel: over gloo, or over gangline where BENCH_BACKEND says so."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from gangline.models.zoo import registry


def join() -> dict[str, Any]:
    """This process as a rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say of what."""
    backend = os.environ.get("BENCH_BACKEND", "gloo")
    if backend == "gangline":
        import gangline.collectives.torch_backend  # noqa: F401  registers it
    distributed.init_process_group(backend)
    return {
        "who": "gangline" if backend == "gangline" else f"ddp, torch {torch.__version__.partition('+')[0]}",
        "rank": distributed.get_rank(),
        "barrier": distributed.barrier,
        "prepare": prepare,
        "leave": distributed.destroy_process_group,
    }


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """A network, its loss and its optimizer, on random images of this rank's own.

    Args:
        options: ``network``, ``image_shape``, ``classes`` and ``samples`` (of a rank's step).
    """
    torch.manual_seed(distributed.get_rank())
    network = torch.nn.parallel.DistributedDataParallel(registry.create(options["network"], options["classes"]))
    data = torch.rand(options["samples"], *options["image_shape"])
    label = torch.randint(options["classes"], (options["samples"],))
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(network(data), label).backward()
        optimizer.step()

    return {"step": step}
