"""Worker of `gangline bench unequal-hosts`, as bench/peers/serve.py documents: a step is an epoch."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from gangline import kvstore
from gangline.bench.workload.networks import convolutions
from gangline.models.module import Module

_CLASSES = 10
OPTIMIZER = {"learning_rate": 0.05, "momentum": 0.9}
_LOADS = "GANGLINE_WORK_LOAD_LIST"


def join() -> dict[str, Any]:
    """Join the job that the environment describes."""
    torch.set_num_threads(1)
    warm, data = problem(2, 1)
    warm.fit(data, batch_size=2, num_epoch=1)  # imports what a first epoch imports, before there is a quota
    store = kvstore.create("allreduce")
    return {
        "who": "gangline",
        "rank": store.rank,
        "size": store.num_workers,
        "barrier": store.barrier,
        "prepare": partial(prepare, os.environ[_LOADS]),
        "leave": store.close,
    }


def prepare(launched_with: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build a Module with a store of its own, and the data of the whole job.

    Args:
        launched_with: loads of the job.
        options: ``loads`` (in place of those of the job; None: those), ``batch_size`` (over all workers) and
            ``batches`` (in an epoch).
    """
    os.environ[_LOADS] = options["loads"] or launched_with
    module, data = problem(options["batch_size"], options["batches"])
    store = kvstore.create("allreduce")
    module.init_optimizer(store, "sgd", OPTIMIZER)
    epochs: list[float] = []

    def train_epoch() -> None:
        began, epoch = time.perf_counter(), len(epochs)
        module.fit(data, batch_size=options["batch_size"], begin_epoch=epoch, num_epoch=epoch + 1)
        epochs.append(time.perf_counter() - began)

    def report() -> dict[str, Any]:
        weights = {name: value.flatten().tolist() for name, value in module.get_params().items()}
        return {"epochs": epochs, "loads": list(module.workers.loads), "weights": weights}

    return {"step": train_epoch, "report": report}


def problem(batch_size: int, batches: int) -> tuple[Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return a Module with seeded weights, and images with labels for so many batches, in float64."""
    torch.manual_seed(1)
    samples = batch_size * batches
    data = torch.rand(samples, 3, 16, 16, dtype=torch.float64), torch.randint(_CLASSES, (samples,))
    return Module(convolutions().double(), nn.CrossEntropyLoss()), data
