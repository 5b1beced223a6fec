"""Steps of gangline's Module."""

from __future__ import annotations

from typing import Any

import torch

from gangline.collectives.context import contexts
from gangline.models.module import Module
from gangline.models.zoo import registry


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """A Module on random images.

    Args:
        options: ``network``, ``image_shape``, ``classes``, ``batch_size``, ``contexts`` (words such as
            "cpu(0),cpu(1)") and ``store``.
    """
    torch.manual_seed(0)
    where = contexts(options["contexts"])
    network = registry.create(options["network"], options["classes"])
    data = torch.rand(options["batch_size"], *options["image_shape"]).to(where[0].torch_device)
    label = torch.randint(options["classes"], (options["batch_size"],)).to(where[0].torch_device)
    module = Module(network, torch.nn.CrossEntropyLoss(), where)
    module.init_optimizer(options["store"], "sgd", {"learning_rate": 0.01, "momentum": 0.9})

    def wait() -> None:
        for context in where:
            if context.device_type == "gpu":
                torch.cuda.synchronize(context.torch_device)

    return {"who": "gangline", "step": lambda: module.forward_backward_update(data, label), "wait": wait}
