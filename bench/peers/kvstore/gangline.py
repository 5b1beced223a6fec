"""gangline's stores: push and pull one gradient per context for each key."""

from __future__ import annotations

from typing import Any

import torch

from gangline import kvstore
from gangline.collectives.context import contexts


def join() -> dict[str, Any]:
    """Return what `serve.py` needs."""
    return {"who": "gangline", "prepare": prepare}


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Create a store with all keys.

    Args:
        options: ``keys`` (pairs of name and shape), ``contexts`` (words such as "cpu(0),cpu(1)"), ``store``, and
            ``call``: "push+pull" or "pushpull".
    """
    devices = [context.torch_device for context in contexts(options["contexts"])]
    names = [name for name, _ in options["keys"]]
    generator = torch.Generator().manual_seed(0)
    gradients = [
        [torch.rand(shape, generator=generator).to(device) for device in devices] for _, shape in options["keys"]
    ]
    outs = [[torch.zeros_like(gradient) for gradient in of_key] for of_key in gradients]
    store = kvstore.create(options["store"])
    store.init(names, [torch.zeros_like(of_key[0]) for of_key in gradients])

    def step() -> None:
        if options["call"] == "pushpull":
            store.pushpull(names, gradients, outs)
        else:
            store.push(names, gradients)
            store.pull(names, outs)
        wait()

    def wait() -> None:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def check() -> float:
        worst = 0.0
        for of_key, pulled in zip(gradients, outs, strict=True):
            exact = torch.stack([gradient.double().cpu() for gradient in of_key]).sum(0)
            worst = max(worst, *(float((out.double().cpu() - exact).abs().max()) for out in pulled))
        return worst

    return {"step": step, "wait": wait, "check": check}
