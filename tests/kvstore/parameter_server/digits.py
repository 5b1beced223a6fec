"""Training by base-4 digits: each push is a digit of its own, so sums show which is lost or counted twice."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.store import DistStore

NUMEL: dict[Key, int] = {"small": 4, "large": 100_003}
"""Elements of the keys: one is in the message, the other in shared memory or a frame of its own."""
LIMITS = {"GANGLINE_TIMEOUT": "60", "GANGLINE_HEARTBEAT": "0.2", "GANGLINE_HEARTBEAT_LIMIT": "5"}


def init(kv: DistStore, numel: Mapping[Key, int] = NUMEL) -> dict[Key, torch.Tensor]:
    """Define the keys, whose pushes add up; return the tensors to pull into."""
    kv.init(list(numel), [torch.zeros(size, dtype=torch.float64) for size in numel.values()])
    if not kv.is_async:  # which adds up by itself
        kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    return {key: torch.empty(size, dtype=torch.float64) for key, size in numel.items()}


def train(kv: DistStore, outs: Mapping[Key, torch.Tensor], steps: int, body: str = "async, pull at odd steps") -> None:
    """Push the worker's digit of each step; the words of the body say how, and what else a step does."""
    for step in range(kv.first_step, steps):
        if "barrier first" in body:
            kv.barrier()
        for key, out in outs.items():
            digit = torch.full_like(out, 4.0 ** (kv.rank + kv.num_workers * step))
            if "pushpull" in body:
                kv.pushpull(key, digit, out)
            else:
                kv.push(key, digit, async_op="async" in body)
        if "pull" in body and (step % 2 or "odd" not in body):
            kv.pull(list(outs), list(outs.values()))
        if "barrier last" in body:
            kv.barrier()


def sums(kv: DistStore, outs: Mapping[Key, torch.Tensor]) -> dict[Key, list[int]]:
    """Return the digits of each key once all workers have pushed: 1 for a push that counts once."""
    kv.barrier()
    kv.pull(list(outs), list(outs.values()))
    return {key: digits_of(*out.unique().tolist()) for key, out in outs.items()}


def every_push(steps: int, workers: int) -> dict[Key, list[int]]:
    return dict.fromkeys(NUMEL, [1] * steps * workers)


def digits_of(value: float) -> list[int]:
    """Return the base-4 digits of a whole number, the last one first."""
    rest, digits = int(abs(value)), []
    while rest:
        rest, digit = divmod(rest, 4)
        digits.append(digit)
    return digits
