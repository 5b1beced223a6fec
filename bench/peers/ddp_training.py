"""Steps of torch's DistributedDataParallel over gloo: a process a share of the batch, on the host."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from gangline.models.zoo import registry


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """This process as rank 0, and the other ranks as processes that step when it does.

    Args:
        options: ``network``, ``image_shape``, ``classes``, ``batch_size`` (over all ranks), and ``contexts``: words,
            as many as there are to be ranks.
    """
    for pipe in _followers:  # those of an earlier call
        pipe.send(False)
    _followers.clear()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    ranks = options["contexts"].count(",") + 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    for rank in range(1, ranks):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=_follow, args=(rank, ranks, where, options, theirs), daemon=True).start()
        theirs.close()
        _followers.append(ours)
    own_step = _steps(0, ranks, where, options)

    def step() -> None:
        for pipe in _followers:
            pipe.send(True)
        own_step()

    return {"who": f"ddp, torch {torch.__version__.partition('+')[0]}", "step": step, "wait": lambda: None}


_followers: list[Connection] = []


def _follow(rank: int, ranks: int, where: str, options: dict[str, Any], pipe: Connection) -> None:
    """Step whenever rank 0 does, until it says no or is gone."""
    step = _steps(rank, ranks, where, options)
    try:
        while pipe.recv():
            step()
    except EOFError:
        pass


def _steps(rank: int, ranks: int, where: str, options: dict[str, Any]) -> Callable[[], None]:
    distributed.init_process_group("gloo", where, rank=rank, world_size=ranks)
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

    return step
