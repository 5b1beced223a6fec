"""gangline's stores: push and pull one gradient per context for each key."""

from __future__ import annotations

from typing import Any

import torch

from gangline import kvstore
from gangline.bench.peers.kvstore.torch import Gradients


def join() -> dict[str, Any]:
    """Return what `serve.py` needs."""
    return {"who": "gangline", "prepare": prepare}


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Create a store with all keys.

    Args:
        options: beside those of `Gradients` ``store``, and ``call``: "push+pull" or "pushpull".
    """
    names = [name for name, _ in options["keys"]]
    gradients = Gradients(options)
    store = kvstore.create(options["store"])
    store.init(names, [torch.zeros_like(of_key[0]) for of_key in gradients.given])

    def step() -> None:
        if options["call"] == "pushpull":
            store.pushpull(names, gradients.given, gradients.outs)
        else:
            store.push(names, gradients.given)
            store.pull(names, gradients.outs)
        gradients.wait()

    return {"step": step, "wait": gradients.wait, "check": gradients.check}
