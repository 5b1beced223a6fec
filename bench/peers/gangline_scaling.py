"""A worker that trains with gangline's Module."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from gangline import kvstore
from gangline.collectives.context import cpu
from gangline.models.module import Module
from gangline.models.zoo import registry


def join() -> dict[str, Any]:
    """This process as a worker of the job that its environment describes.

    BENCH_STORE is the kind of store; "apart": each worker updates its own weights, and all only begin together.
    """
    kind = os.environ["BENCH_STORE"]
    store = kvstore.create("allreduce" if kind == "apart" else kind)
    return {
        "who": "gangline",
        "rank": store.rank,
        "barrier": store.barrier,
        "prepare": partial(prepare, store.rank, None if kind == "apart" else store),
        "leave": store.close,
    }


def prepare(rank: int, store: kvstore.KVStore | None, options: dict[str, Any]) -> dict[str, Any]:
    """A Module on random images of this worker's own.

    Args:
        rank: this worker's.
        store: what joins the workers; None: nothing does.
        options: ``network``, ``image_shape``, ``classes`` and ``samples`` (of a worker's step).
    """
    torch.manual_seed(rank)
    network = registry.create(options["network"], options["classes"])
    data = torch.rand(options["samples"], *options["image_shape"])
    label = torch.randint(options["classes"], (options["samples"],))
    module = Module(network, torch.nn.CrossEntropyLoss(), cpu())
    module.init_optimizer(store, "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    return {"step": lambda: module.forward_backward_update(data, label)}
