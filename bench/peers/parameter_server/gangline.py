"""A worker of gangline's parameter server: push and pull one key."""

from __future__ import annotations

import itertools
import json
import os
from functools import partial
from typing import Any

import torch

from gangline import kvstore
from gangline.bench.peers.ranks.gloo import accessors

_numbers = itertools.count()


def join() -> dict[str, Any]:
    """Join the job that DMLC_* describe.

    BENCH_STORE is the kind of store, BENCH_COMPRESSION the argument of `set_gradient_compression` as JSON.
    """
    store = kvstore.create(os.environ["BENCH_STORE"])
    compression = json.loads(os.environ.get("BENCH_COMPRESSION", "null"))
    if compression is not None:
        store.set_gradient_compression(compression)
    return {
        "who": "gangline",
        "rank": store.rank,
        "barrier": store.barrier,
        "prepare": partial(prepare, store),
        "leave": store.close,
    }


def prepare(store: kvstore.KVStore, options: dict[str, Any]) -> dict[str, Any]:
    """Create a key.

    Args:
        store: the store that holds it.
        options: ``count`` (float32 elements), and ``call``: "push", "push+pull" or "pushpull".
    """
    key, call = next(_numbers), options["call"]
    given, out = torch.zeros(options["count"]), torch.zeros(options["count"])
    store.init(key, given)

    def step() -> None:
        if call == "pushpull":
            store.pushpull(key, given, out)
        else:
            store.push(key, given)
            if call == "push":
                store.barrier()  # returns when the servers have the push
            else:
                store.pull(key, out)

    settle = partial(store.pull, key, out) if call == "push" or store.type.endswith("async") else None
    return {"step": step, **accessors(given, out), "settle": settle}
