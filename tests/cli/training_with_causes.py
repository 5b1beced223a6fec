"""A DDP script over gangline's backend, slow for a reason that CAUSE names, on the rank SLOW."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gangline
import gangline.collectives.torch_backend  # noqa: F401

CAUSE = os.environ.get("CAUSE", "none")
WIDTH, BATCH, STEPS = (
    int(os.environ.get(name, default)) for name, default in (("WIDTH", "512"), ("BATCH", "256"), ("STEPS", "40"))
)
IS_SLOW = os.environ["RANK"] == os.environ.get("SLOW", "1")
SECONDS = {"input": 0.05, "forward": 0.05, "backward": 0.2}


def sleep(cause: str) -> None:
    if f"every {cause}" == CAUSE or (cause == CAUSE and IS_SLOW):
        time.sleep(SECONDS[cause])


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        sleep("backward")
        return gradient


class SlowLayer(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        sleep("forward")
        slowed: Tensor = SlowBackward.apply(values)
        return slowed


class Batches(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        size = BATCH * 3 if CAUSE == "uneven data" and IS_SLOW else BATCH
        self.batch = torch.randn(size, 64), torch.randint(0, 10, (size,))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= STEPS:
            raise IndexError
        sleep("input")
        return self.batch


def stand_still(seconds: float) -> None:
    stopped = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gangline")
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), SlowLayer()]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
    for step, (data, label) in enumerate(loader):
        if CAUSE == "pause" and IS_SLOW and step == STEPS // 2:
            stand_still(1.5)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), label).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
