"""Threads of a server: each gets about the same bytes of the shards that this server holds."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(60)

NUMEL = 1 << 24
"""Elements of a key of 64 MiB."""


@pytest.mark.parametrize(("servers", "threads"), [(1, 2), (2, 2), (4, 4)])
def test_a_large_key_uses_all_threads_of_all_servers_alike(
    servers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(threads)))
    with Job(1, servers) as job, job.stores()[0] as kv:
        kv.init("large", torch.zeros(NUMEL))
        used: Counter[tuple[int, int]] = Counter()
        for index in range(servers):
            for shard in job.server()._rounds.shards.values():
                used[index, shard.thread] += shard.flat.nbytes
    bytes_by_thread = [used[index, thread] for index in range(servers) for thread in range(threads)]
    assert bytes_by_thread == [4 * NUMEL // (servers * threads)] * servers * threads


def test_a_removed_shard_makes_room_on_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    pool = ThreadPool()
    assert [pool.assign(nbytes) for nbytes in (8, 4, 2, 2, 1)] == [0, 1, 1, 1, 0]
    pool.unassign(0, 8)
    assert pool.assign(7) == 0
    pool.close()
