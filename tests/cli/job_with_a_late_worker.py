"""Two workers of dist_sync, or two ranks of a process group; one is late until a file appears."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import gangline
from gangline import torch_backend  # noqa: F401  registers the backend


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def is_late(rank: int, step: int) -> bool:
    return rank == 1 and step == 5


def train_by_servers(until: Path) -> None:
    store = gangline.create("dist_sync")
    store.init("w", torch.zeros(1000))
    for step in range(10):
        if is_late(store.rank, step):
            wait_for(until)
        store.push("w", torch.ones(1000))
        store.pull("w", torch.empty(1000))
    store.close()


def train_by_ranks(until: Path) -> None:
    dist.init_process_group("gangline", timeout=timedelta(seconds=60))
    values = torch.ones(1000)
    for step in range(10):
        if is_late(dist.get_rank(), step):
            wait_for(until)
        dist.all_reduce(values)
    dist.destroy_process_group()


if __name__ == "__main__":
    {"servers": train_by_servers, "ranks": train_by_ranks}[sys.argv[1]](Path(sys.argv[2]))
