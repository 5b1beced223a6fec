"""Threads of a server: each gets about the same bytes of the shards that this server holds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import pytest
import torch

from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(60)

LARGE = {"large": (1 << 24,)}
"""Shapes of one key of 64 MiB."""


def resnet18() -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of ResNet-18."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, inputs: int, outputs: int, size: int) -> None:
        shapes[name] = (outputs, inputs, size, size)
        shapes[f"{name}.scale"] = shapes[f"{name}.shift"] = (outputs,)

    convolution("stem", 3, 64, 7)
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for block in range(2):
            convolution(f"{stage}.{block}.a", inputs, outputs, 3)
            convolution(f"{stage}.{block}.b", outputs, outputs, 3)
            if inputs != outputs:
                convolution(f"{stage}.{block}.skip", inputs, outputs, 1)
            inputs = outputs
    shapes["head"], shapes["head.bias"] = (1000, 512), (1000,)
    return shapes


def bytes_by_thread(
    shapes: Mapping[str, tuple[int, ...]], servers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Initialise keys on real servers and return the bytes of shards that each of their threads updates."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(threads)))
    with Job(1, servers) as job, job.stores()[0] as kv:
        kv.init(list(shapes), [torch.zeros(shape) for shape in shapes.values()])
        used: Counter[tuple[int, int]] = Counter()
        for index in range(servers):
            for shard in job.server()._rounds.shards.values():
                used[index, shard.thread] += shard.flat.nbytes
    return [used[index, thread] for index in range(servers) for thread in range(threads)]


@pytest.mark.parametrize(("servers", "threads"), [(1, 2), (2, 2), (4, 4)])
def test_a_large_key_uses_all_threads_of_all_servers_alike(
    servers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = bytes_by_thread(LARGE, servers, threads, monkeypatch)
    assert used == [(64 << 20) // (servers * threads)] * servers * threads


@pytest.mark.parametrize(("servers", "threads"), [(1, 2), (2, 2), (4, 4)])
def test_the_keys_of_a_network_use_all_threads_alike(
    servers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = bytes_by_thread(resnet18(), servers, threads, monkeypatch)
    assert max(used) <= 1.3 * sum(used) / len(used), used


def test_a_removed_shard_makes_room_on_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    pool = ThreadPool()
    assert [pool.assign(nbytes) for nbytes in (8, 4, 2, 2, 1)] == [0, 1, 1, 1, 0]
    pool.unassign(0, 8)
    assert pool.assign(7) == 0
    pool.close()
