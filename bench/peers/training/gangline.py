"""A process that trains with gangline's Module: alone on several contexts, or as one worker of a job."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from gangline import kvstore
from gangline.kvstore.context import contexts
from gangline.models.module import Module
from gangline.models.zoo import registry


def join() -> dict[str, Any]:
    """Join the job that the environment describes.

    BENCH_STORE is the kind of store that connects the workers. "apart": every worker updates its own weights, and only
    the starts are synchronized. Not set: there is no job, and the options name the store.
    """
    kind = os.environ.get("BENCH_STORE")
    if kind is None:
        return {"who": "gangline", "prepare": partial(prepare, 0, None)}
    store = kvstore.create("allreduce" if kind == "apart" else kind)
    return {
        "who": "gangline",
        "rank": store.rank,
        "size": store.num_workers,
        "barrier": store.barrier,
        "prepare": partial(prepare, store.rank, None if kind == "apart" else store),
        "leave": store.close,
    }


def prepare(rank: int, store: kvstore.KVStore | None, options: dict[str, Any]) -> dict[str, Any]:
    """Build a Module on random images of this worker.

    Args:
        rank: this worker's rank.
        store: the store of the job, if any.
        options: ``network``, ``image_shape``, ``classes``, ``samples`` (of this process's batch), ``contexts`` (words
            such as "cpu(0),cpu(1)") and ``store`` (the kind to use where there is no job; None: none).
    """
    torch.manual_seed(rank)
    own = contexts(options["contexts"])
    network = registry.create(options["network"], options["classes"])
    data = torch.rand(options["samples"], *options["image_shape"]).to(own[0].torch_device)
    label = torch.randint(options["classes"], (options["samples"],)).to(own[0].torch_device)
    module = Module(network, torch.nn.CrossEntropyLoss(), own)
    module.init_optimizer(store or options.get("store"), "sgd", {"learning_rate": 0.01, "momentum": 0.9})

    def wait() -> None:
        for context in own:
            if context.device_type == "gpu":
                torch.cuda.synchronize(context.torch_device)

    return {"step": lambda: module.forward_backward_update(data, label), "wait": wait}
