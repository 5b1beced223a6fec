"""Training on several hosts (network namespaces) with a job key: servers that workers start, and the torch backend."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gangline.collectives.environments.job_key import JobKey, open_descriptor
from gangline.collectives.errors import GanglineError
from gangline.kvstore import create
from tests.collectives.processes import Processes, Rank
from tests.collectives.test_keyed_ranks import PORT, use_key, write_keys
from tests.hosts import Hosts, enter, obstacle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(110),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]


def _with_own_servers(rank: Rank, folder: str, namespaces: list[str], address: str) -> None:
    """Join a job as under torchrun, where a worker of each host starts servers and gets the key in a descriptor."""
    enter(namespaces[rank.rank])
    descriptor = open_descriptor(JobKey.from_hex(Path(folder, "right").read_text()))
    use_key(folder, "none")
    os.environ.update(
        RANK=str(rank.rank), WORLD_SIZE=str(rank.size), MASTER_ADDR=address, MASTER_PORT=str(PORT),
        GANGLINE_JOB_KEY_FD=str(descriptor),
    )  # fmt: skip
    with create("dist_sync", timeout=60) as kv:
        kv.init("key", torch.zeros(3))
        kv.push("key", torch.full((3,), 10.0**rank.rank))
        got = torch.empty(3)
        kv.pull("key", got)
    rank.tell(got.tolist())
    rank.hear()


def test_servers_that_workers_start_get_the_key(tmp_path: Path) -> None:
    write_keys(tmp_path)
    with Hosts(2) as hosts, Processes(_with_own_servers, 2, str(tmp_path), hosts.names, hosts.addresses[0]) as ranks:
        assert ranks.all_heard() == [[11.0] * 3] * 2


def _sum_by_torch(rank: Rank, folder: str, kinds: list[str], namespaces: list[str], address: str) -> None:
    import gangline.collectives.torch_backend  # noqa: F401  registers the backend

    enter(namespaces[rank.rank])
    use_key(folder, kinds[rank.rank])
    place = {"rank": rank.rank, "world_size": rank.size, "init_method": f"tcp://{address}:{PORT}"}
    try:
        dist.init_process_group("gangline", timeout=timedelta(seconds=30), **place)
        total = torch.full((3,), 10.0**rank.rank)
        dist.all_reduce(total)
        rank.tell(total.tolist())
        dist.destroy_process_group()
    except (GanglineError, RuntimeError) as error:
        rank.tell(str(error))
    rank.hear()


@pytest.mark.parametrize("kinds", [("right", "right"), ("right", "other"), ("plain text", "right"), ("none", "none")])
def test_the_torch_backend_uses_the_key(tmp_path: Path, kinds: tuple[str, str]) -> None:
    write_keys(tmp_path)
    with Hosts(2) as hosts:
        place = hosts.names, hosts.addresses[0]
        with Processes(_sum_by_torch, 2, str(tmp_path), list(kinds), *place) as ranks:
            results = ranks.all_heard()
    if kinds == ("right", "right"):
        assert results == [[11.0] * 3] * 2
    else:
        assert all("GANGLINE_JOB_KEY_FILE" in text for text in results), results
