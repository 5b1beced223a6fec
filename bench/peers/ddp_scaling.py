"""A worker that trains with torch's DistributedDataParallel over gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from models.zoo import registry


def join() -> dict[str, Any]:
    """This process as a rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say of what."""
    distributed.init_process_group("gloo")
    return {
        "who": f"ddp, torch {torch.__version__.partition('+')[0]}",
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
