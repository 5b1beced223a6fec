"""A small run for the tests of progress pages: 20 samples in batches of 8, 8 and 4."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measure import labelled, mlp
from torch import nn

from gangline import Module, cpu

RATE = {"learning_rate": 0.1, "momentum": 0.9}
network = partial(mlp, 4, 8, 3, seed=3, dtype=torch.float32)


def arrays(samples: int = 20, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled(samples, 4, 3, seed=seed)


def module_on(loads: list[float], store: Any = "local") -> Module:
    module = Module(network(), nn.CrossEntropyLoss(), [cpu(place) for place in range(len(loads))], loads)
    module.init_optimizer(store, "sgd", RATE)
    return module


def fit(module: Module, report: Any, *others: Any, epochs: int = 3, **options: Any) -> None:
    """Train; ``others`` are called before the report's own callback."""
    request = module.optimizer_request
    assert request is not None
    settings: dict[str, Any] = dict(zip(("kvstore", "optimizer", "optimizer_params"), request, strict=True))
    callbacks = [*others, report]
    settings |= {"batch_end_callback": callbacks, "epoch_end_callback": report, "eval_end_callback": report}
    settings |= {"num_epoch": epochs, "batch_size": 8}
    module.fit(arrays(), **{**settings, **options})
