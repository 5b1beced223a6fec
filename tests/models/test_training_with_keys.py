"""Training on three hosts (network namespaces) with a job key gives the same bits as training on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gangline.bench.driver.hosts import Hosts, enter, obstacle
from gangline.collectives import Communicator, connect, spawn
from gangline.kvstore import create
from tests.collectives.processes import Processes, Rank
from tests.collectives.test_keyed_ranks import PORT, use_key, write_keys
from tests.kvstore.parameter_server.processes import DistJob, run_job
from tests.kvstore.parameter_server.test_keys import KeyedProcess
from tests.models.test_workers_dist import over_collectives, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(110),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]


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


def _train_apart(rank: Rank, folder: str, namespaces: list[str], address: str) -> None:
    enter(namespaces[rank.rank])
    use_key(folder, "right")
    with connect(rank.rank, rank.size, f"{address}:{PORT}", timeout=60) as comm:
        assert comm.transport == "tcp"
        with create("allreduce", communicator=comm) as store:
            accuracy, weights = train(store)
        torch.save((accuracy, weights), f"{folder}/rank{rank.rank}")
    rank.tell("done")
    rank.hear()


def _train_together(comm: Communicator) -> Any:
    return over_collectives(comm)


def test_ranks_on_three_hosts(tmp_path: Path) -> None:
    write_keys(tmp_path)
    together = spawn(_train_together, 3)
    with Hosts(3) as hosts, Processes(_train_apart, 3, str(tmp_path), hosts.names, hosts.addresses[0]) as ranks:
        assert ranks.all_heard() == ["done"] * 3
    check_equal(together, [torch.load(tmp_path / f"rank{rank}") for rank in range(3)])


def check_equal(together: list[Any], apart: list[Any]) -> None:
    for (first_accuracy, first), (second_accuracy, second) in zip(together, apart, strict=True):
        assert first_accuracy == second_accuracy > 0.5
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name
