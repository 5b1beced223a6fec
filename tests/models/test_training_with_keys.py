"""Training on three hosts (network namespaces) with a job key gives the same bits as training on one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import same_bits
from torch import nn

from gangline import Module
from gangline.collectives.environments.job_key import JobKey, open_descriptor
from gangline.collectives.errors import GanglineError
from gangline.kvstore import create
from gangline.models.data.datasets import digits
from tests.collectives.processes import Processes, Rank
from tests.collectives.test_keyed_ranks import PORT, use_key, write_keys
from tests.hosts import Hosts, enter, obstacle
from tests.kvstore.parameter_server.processes import DistJob, run_job
from tests.kvstore.parameter_server.test_keys import KeyedProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(110),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]


def train(kvstore: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Train three epochs of digits in float64 with a partial last batch; return accuracy and weights."""
    torch.set_num_threads(1)
    data = digits((1, 28, 28), torch.float64, 0)
    images, labels = data.train
    torch.manual_seed(11)
    layers = nn.Conv2d(1, 6, 5, stride=3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 8 * 8, 32), nn.Tanh()
    with Module(nn.Sequential(*layers, nn.Linear(32, 10)).double(), nn.CrossEntropyLoss()) as module:
        how = {"num_epoch": 3, "batch_size": 96, "optimizer_params": {"learning_rate": 0.2, "momentum": 0.9}}
        module.fit((images[:1000], labels[:1000]), kvstore=kvstore, **how)
        [(_, accuracy)] = module.score(data.validation, "acc", batch_size=100)
        return accuracy, module.get_params()


def test_workers_and_servers_on_three_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_keys(tmp_path)
    together = run_job(train, 2, 1, "dist_sync")
    with Hosts(3) as hosts:
        monkeypatch.setenv("GANGLINE_TEST_HOSTS", " ".join(hosts.names))
        monkeypatch.setenv("GANGLINE_TEST_SCHEDULER", hosts.addresses[0])
        monkeypatch.setenv("GANGLINE_TEST_KEYS", str(tmp_path))
        monkeypatch.setenv("GANGLINE_TEST_KIND", "right")
        with DistJob(train, 2, 1, "dist_sync", opener=KeyedProcess) as job:
            apart = job.results()
    check_equal(together, apart)


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


def check_equal(together: list[Any], apart: list[Any]) -> None:
    for (first_accuracy, first), (second_accuracy, second) in zip(together, apart, strict=True):
        assert first_accuracy == second_accuracy > 0.5
        assert same_bits(first, second)
