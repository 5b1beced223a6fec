"""Ranks find each other wherever they run: long folder names, late ranks, other hosts, IPv6 alone, unequal groups."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gangline import connect
from gangline.collectives import torch_backend
from gangline.collectives.communicator import open_communicator
from gangline.collectives.errors import StallError
from gangline.collectives.torch_backend import GanglineProcessGroup
from gangline.collectives.transports import unix_sockets
from tests.collectives.processes import Processes, Rank, join_group
from tests.hosts import Hosts, enter, obstacle
from tests.programs import run

pytestmark = pytest.mark.timeout(90)


def _sum_with_temporary_folder(rank: Rank, folder: str) -> None:
    tempfile.tempdir = folder
    for transport in ("shared_memory", "ipc"):
        with open_communicator(rank.rank, rank.size, rank.exchange, transport=transport, timeout=20) as comm:
            total = comm.all_reduce(torch.ones(3))
        rank.tell(total.tolist())
    rank.hear()


def test_a_long_name_of_the_temporary_folder_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with Processes(_sum_with_temporary_folder, 2, str(folder)) as ranks:
        for _ in range(2):
            assert ranks.all_heard() == [[2.0] * 3] * 2
    assert list(folder.iterdir()) == []


def _connect_again(rank: Rank, port: int) -> None:
    """Rank 0 gives up twice before rank 1 comes; afterwards both connect once more."""
    if rank.rank == 0:
        for _ in range(2):
            with pytest.raises(StallError, match="rank 1 of 2 did not reach"):
                connect(0, 2, f"127.0.0.1:{port}", timeout=0.2)
        rank.tell("late")
    else:
        rank.hear()
    for number in range(2):
        with connect(rank.rank, 2, f"127.0.0.1:{port}", timeout=30) as comm:
            rank.tell(comm.all_reduce(torch.full((1,), 10.0**number)).tolist())
    rank.hear()


def test_connect_can_be_repeated_after_a_timeout() -> None:
    with Processes(_connect_again, 2, unix_sockets.free_port("store")) as ranks:
        assert ranks.heard(0) == "late"
        ranks.say(1, "go")
        for number in range(2):
            assert ranks.all_heard() == [[2 * 10.0**number]] * 2


class _OwnStore(dist.Store):
    """A store of a user, without all that gloo does not need."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=20)) -> None:
        self._inner.wait(keys, timeout)


def _sum_through_file(rank: Rank, path: str, namespaces: list[str], is_custom: bool) -> None:
    enter(namespaces[rank.rank])
    os.environ["GANGLINE_INSECURE"] = "1"
    if is_custom:
        assert torch_backend.__all__  # it registers the backend
        store = _OwnStore(dist.FileStore(path, 2))
        dist.init_process_group("gangline", store=store, rank=rank.rank, world_size=2, timeout=timedelta(seconds=20))
    else:
        join_group(rank, path, seconds=20)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert isinstance(dist.group.WORLD, GanglineProcessGroup)
    rank.tell([dist.group.WORLD.communicator.transport, total.tolist()])
    rank.hear()


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize("is_custom", [False, True])
def test_hosts_that_share_a_file_or_a_store_of_the_user_reach_each_other(is_custom: bool, tmp_path: Path) -> None:
    with Hosts(2) as hosts, Processes(_sum_through_file, 2, f"{tmp_path}/store", hosts.names, is_custom) as ranks:
        assert ranks.all_heard() == [["tcp", [2.0, 2.0]]] * 2


def _groups_of_some(rank: Rank, path: str) -> None:
    join_group(rank, path, seconds=20)
    if rank.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    found = []
    for number in range(2):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        total = torch.full((2,), float(number + 1))
        dist.all_reduce(total, group=group)
        found.append(total.tolist())
        if number == 0:
            dist.destroy_process_group(group)
    rank.tell(found)
    rank.hear()


def test_ranks_may_have_made_unequal_numbers_of_groups(tmp_path: Path) -> None:
    with Processes(_groups_of_some, 2, f"{tmp_path}/store") as ranks:
        assert ranks.all_heard() == [[[2.0, 2.0], [4.0, 4.0]]] * 2


SUM = """
import torch, gangline
torch.set_num_threads(1)
for store in ("allreduce", "dist_sync"):
    with gangline.create(store) as kv:
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.ones(2))
        out = torch.zeros(2)
        kv.pull("w", out)
        assert out.tolist() == [2, 2], out
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and the command unshare"
)
@pytest.mark.slow
def test_a_host_with_ipv6_alone_runs_a_job() -> None:
    setup = 'ip link set lo up; ip -4 address flush dev lo; exec "$@"'
    command = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--", sys.executable, "-c", SUM]
    run(["unshare", "-n", "sh", "-ec", setup, "sh", *command], code=0)


CONNECT = """
import sys, torch, gangline
from gangline.collectives.bootstrap import rendezvous
torch.set_num_threads(1)
opened, open_store = [], rendezvous.TCPStore
rendezvous.TCPStore = lambda *args, **options: opened.append(args) or open_store(*args, **options)
for number in range(3):
    with gangline.connect(timeout=60) as comm:
        assert comm.all_reduce(torch.ones(1)).item() == 2
sys.stdout.write(f"{len(opened)} connection\\n")
"""


@pytest.mark.slow
def test_ranks_of_torchrun_connect_to_its_store_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = run([*command, sys.executable, "-c", CONNECT], code=0)
    assert done.stdout.splitlines() == ["1 connection"] * 2
