"""MXNet's KVStore on CPU contexts: push and pull one gradient per context for each key."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np


def join() -> dict[str, Any]:
    """Return what `serve.py` needs."""
    return {"who": f"mxnet {mx.__version__}", "prepare": prepare}


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Create a store with all keys.

    Args:
        options: ``keys`` (pairs of name and shape), ``contexts`` (words such as "cpu(0),cpu(1)"), ``store``, and
            ``call``: "push+pull" or "pushpull".
    """
    contexts = [mx.cpu(place) for place in range(options["contexts"].count(",") + 1)]
    names = [name for name, _ in options["keys"]]
    random = np.random.default_rng(0)
    gradients = [
        [mx.nd.array(random.random(shape, dtype=np.float32), context) for context in contexts]
        for _, shape in options["keys"]
    ]
    outs = [[mx.nd.zeros(gradient.shape, gradient.context) for gradient in of_key] for of_key in gradients]
    store = mx.kv.create(options["store"])
    store.init(names, [mx.nd.zeros(shape) for _, shape in options["keys"]])

    def step() -> None:
        if options["call"] == "pushpull":
            store.pushpull(names, gradients, out=outs)
        else:
            store.push(names, gradients)
            store.pull(names, out=outs)
        mx.nd.waitall()

    def check() -> float:
        worst = 0.0
        for of_key, pulled in zip(gradients, outs, strict=True):
            exact = np.stack([gradient.asnumpy() for gradient in of_key]).sum(0, dtype=np.float64)
            worst = max(worst, *(float(np.abs(out.asnumpy() - exact).max()) for out in pulled))
        return worst

    return {"step": step, "wait": mx.nd.waitall, "check": check}
