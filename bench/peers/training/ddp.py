"""A rank that trains with torch's DistributedDataParallel on the host."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from gangline.models.zoo import registry


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, over BENCH_BACKEND or gloo."""
    backend = os.environ.get("BENCH_BACKEND", "gloo")
    if backend == "gangline":
        import gangline.collectives.torch_backend  # noqa: F401  registers the backend
    distributed.init_process_group(backend)
    return {
        "who": "gangline" if backend == "gangline" else f"ddp, torch {torch.__version__.partition('+')[0]}",
        "rank": distributed.get_rank(),
        "size": distributed.get_world_size(),
        "barrier": distributed.barrier,
        "prepare": prepare,
        "leave": distributed.destroy_process_group,
    }


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Build a network, its loss and its optimizer, on random images of this rank's own.

    Args:
        options: ``network``, ``image_shape``, ``classes`` and ``batch_size`` (over all ranks).
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(rank)
    network = torch.nn.parallel.DistributedDataParallel(registry.create(options["network"], options["classes"]))
    share = options["batch_size"] // ranks + (rank < options["batch_size"] % ranks)
    data = torch.rand(share, *options["image_shape"])
    label = torch.randint(options["classes"], (share,))
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(network(data), label).backward()
        optimizer.step()

    return {"step": step}
