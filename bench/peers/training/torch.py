"""Steps of a plain torch training loop on one device."""

from __future__ import annotations

from typing import Any

import torch

from gangline.collectives.context import contexts
from gangline.models.zoo import registry


def join() -> dict[str, Any]:
    """Return what `serve.py` needs."""
    return {"who": f"torch {torch.__version__.partition('+')[0]}", "prepare": prepare}


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Build a network, its loss and its optimizer, on random images.

    Args:
        options: ``network``, ``image_shape``, ``classes``, ``batch_size`` and ``contexts`` (the first is used).
    """
    torch.manual_seed(0)
    device = contexts(options["contexts"])[0].torch_device
    network = registry.create(options["network"], options["classes"]).to(device)
    data = torch.rand(options["batch_size"], *options["image_shape"]).to(device)
    label = torch.randint(options["classes"], (options["batch_size"],)).to(device)
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
