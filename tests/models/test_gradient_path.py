"""The way of a gradient from its hook to the store's sum: Python frames and thread hand-overs, counted."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Communicator, Module, cpu, spawn
from gangline.collectives.work import WorkQueue
from gangline.kvstore import KVStore, create, local
from gangline.kvstore.reducer import reducer

MOST_FRAMES = 13
MOST_FRAMES_TO_WORKERS = 15
"""To the sum over the workers of an `allreduce` store, one call behind the sum over its own devices."""
BUCKETS = 4
WIDTH = 6


def depth(until: str) -> list[int]:
    """Return the number of frames from the caller's to the next one of a function of this name; [] if there is none."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code.co_name != until:
        frame, count = frame.f_back, count + 1
    return [] if frame is None else [count]


def frames(store: KVStore, contexts: int, summing: Any, name: str) -> tuple[list[int], list[int]]:
    """Return the frames of each bucket of a step: from its hook to the hand-over, and from there to the sum.

    Args:
        store: A store.
        contexts: Number of contexts.
        summing: Module or object with the function that sums.
        name: Name of the function.
    """
    network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BUCKETS)])
    in_hook: list[int] = []
    in_store: list[int] = []
    submit, inner = WorkQueue.submit, getattr(summing, name)

    def submitted(self: WorkQueue, *arguments: Any) -> None:
        in_hook.extend(depth("_on_gradient"))  # a pull is submitted too if the queue is busy
        submit(self, *arguments)

    def summed(values: Any) -> Any:
        if summing is not local or (values and values[0][0]):  # values to sum, not weights to copy
            in_store.extend(depth("_serve"))
        return inner(values)

    data, label = torch.ones(6, WIDTH), torch.ones(6, WIDTH)
    with (
        pytest.MonkeyPatch.context() as patch,
        store,
        Module(network, nn.MSELoss(), [cpu(index) for index in range(contexts)]) as module,
    ):
        patch.setattr(reducer, "BUCKET_BYTES", 260)  # a layer of WIDTH
        module.init_optimizer(store, "sgd", {"lr": 0.1})
        for _ in range(2):
            module.forward_backward_update(data, label)
        threads = threading.active_count()
        patch.setattr(WorkQueue, "submit", submitted)
        patch.setattr(summing, name, summed)
        module.forward_backward_update(data, label)
        assert threading.active_count() == threads
    assert len(in_hook) == len(in_store) == BUCKETS  # one hand-over and one call that sums for each
    return in_hook, in_store


@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_bucket_takes_few_frames_and_one_hand_over_to_its_sum(store: str, count: int) -> None:
    in_hook, in_store = frames(create(store), count, local, "move")
    assert max(in_hook) + max(in_store) <= MOST_FRAMES


def frames_to_the_workers(comm: Communicator) -> tuple[list[int], list[int]]:
    return frames(create("allreduce", communicator=comm), 2, comm, "all_reduce")


def test_a_bucket_takes_few_frames_to_the_sum_over_the_workers() -> None:
    for in_hook, in_store in spawn(frames_to_the_workers, 2):
        assert max(in_hook) + max(in_store) <= MOST_FRAMES_TO_WORKERS
