"""A worker of MXNet's parameter server: push and pull one key."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np

_numbers = itertools.count()


def join() -> dict[str, Any]:
    """Join the job that DMLC_* describe; BENCH_STORE is the kind of store."""
    store = mx.kv.create(os.environ["BENCH_STORE"])
    return {
        "who": f"mxnet {mx.__version__}",
        "rank": store.rank,
        "barrier": store._barrier,
        "prepare": partial(prepare, store),
        "leave": lambda: None,  # MXNet leaves when the interpreter exits
    }


def prepare(store: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Create a key.

    Args:
        store: the store that holds it.
        options: ``count`` (float32 elements), and ``call``: "push+pull" or "pushpull".
    """
    key, call = str(next(_numbers)), options["call"]
    given, out = mx.nd.zeros((options["count"],)), mx.nd.zeros((options["count"],))
    store.init(key, given)

    def step() -> None:
        if call == "pushpull":
            store.pushpull(key, given, out=out)
        else:
            store.push(key, given)
            store.pull(key, out=out)
        out.wait_to_read()

    def write(start: int, values: Any) -> None:
        given[start : start + len(values)] = mx.nd.array(values.astype(np.float32))
        given.wait_to_read()

    def read(start: int, stop: int) -> Any:
        return out[start:stop].asnumpy().astype(np.float64)

    return {"step": step, "write": write, "read": read, "settle": None}
