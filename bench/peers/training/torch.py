"""A plain torch training loop on one device, or with BENCH_BACKEND a rank of torch's DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from gangline.kvstore.context import contexts
from gangline.models.zoo import registry


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, if BENCH_BACKEND is set."""
    version = f"torch {torch.__version__.partition('+')[0]}"
    backend = os.environ.get("BENCH_BACKEND")
    if backend is None:
        return {"who": version, "prepare": prepare}
    if backend == "gangline":
        import gangline.collectives.torch_backend  # noqa: F401  registers the backend
    distributed.init_process_group(backend)
    return {
        "who": "gangline" if backend == "gangline" else f"ddp, {version}",
        "rank": distributed.get_rank(),
        "size": distributed.get_world_size(),
        "barrier": distributed.barrier,
        "prepare": prepare,
        "leave": distributed.destroy_process_group,
    }


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Build a network, its loss and its optimizer, on random images of this process.

    Args:
        options: ``network``, ``image_shape``, ``classes``, ``batch_size`` (over all ranks) and ``contexts``, of which
            the first is used; ranks use the host.
    """
    is_rank = distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if is_rank else (0, 1)
    torch.manual_seed(rank)
    device = torch.device("cpu") if is_rank else contexts(options["contexts"])[0].torch_device
    network: torch.nn.Module = registry.create(options["network"], options["classes"]).to(device)
    if is_rank:
        network = torch.nn.parallel.DistributedDataParallel(network)
    share = options["batch_size"] // ranks + (rank < options["batch_size"] % ranks)
    data = torch.rand(share, *options["image_shape"]).to(device)
    label = torch.randint(options["classes"], (share,)).to(device)
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(network(data), label).backward()
        optimizer.step()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return {"step": step, "wait": wait}
