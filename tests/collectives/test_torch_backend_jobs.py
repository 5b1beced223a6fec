"""Jobs of torch.distributed over gangline: ways to join, meshes, checkpoints; ranks that die, do not join, or leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives import torch_backend
from gangline.collectives.torch_backend import GanglineProcessGroup
from gangline.collectives.torch_backend.work import GroupWork
from gangline.collectives.work import Work
from gangline.launcher.job import free_ports
from tests.collectives.processes import Processes, Rank, join_group
from tests.collectives.situations import error_of


def use_a_mesh(rank: Rank, path: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    join_group(rank, path)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found = []
    for name in ("replica", "shard"):
        group = mesh.get_group(name)
        assert isinstance(group, GanglineProcessGroup)
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(numbers, torch.tensor([rank.rank]), group=group)
        found.append([int(number) for number in numbers])
    whole = torch.arange(24.0).view(4, 6)
    tensor = distribute_tensor(whole, mesh, [Replicate(), Shard(1)])
    assert torch.equal(tensor.to_local(), whole[:, 3 * (rank.rank % 2) :][:, :3])
    product = tensor @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate(), Shard(0)])
    assert torch.equal(product.full_tensor(), whole @ whole.T)
    resharded = tensor.redistribute(mesh, [Shard(0), Replicate()])
    assert torch.equal(resharded.to_local(), whole[2 * (rank.rank // 2) :][:2])
    torch.manual_seed(1)
    layer = nn.Linear(6, 3, bias=False)
    before = layer.weight.detach().clone()
    fully_shard(layer, mesh=mesh)  # replicated over one axis, sharded over the other
    layer(torch.full((1, 6), float(rank.rank))).sum().backward()
    assert torch.equal(layer.weight.full_tensor(), before)
    gradient = layer.weight.grad
    assert torch.equal(gradient.full_tensor(), torch.full((3, 6), 1.5))  # the mean of 0 to 3
    state = {"layer": layer.state_dict()}
    dcp.save(state, checkpoint_id=f"{path}.checkpoint")
    with torch.no_grad():
        layer.weight.zero_()
    dcp.load(state, checkpoint_id=f"{path}.checkpoint")
    assert torch.equal(layer.weight.full_tensor(), before)
    rank.tell(found)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_mesh_of_two_by_two_and_a_checkpoint_of_its_shards(tmp_path: Path) -> None:
    with Processes(use_a_mesh, 4, f"{tmp_path}/store", limit=60) as processes:
        assert processes.all_heard() == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def join_in_many_ways(rank: Rank, path: str, first: int, second: int, port: int) -> None:
    place = {"rank": rank.rank, "world_size": rank.size}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(first), RANK=str(rank.rank), WORLD_SIZE=str(rank.size))
    sums = []

    def use(*, backend: str = "gangline", check: Callable[[], None] | None = None, **options: Any) -> None:
        dist.init_process_group(backend, timeout=timedelta(seconds=30), **options)
        tensor = torch.tensor([10 + rank.rank])
        dist.all_reduce(tensor)
        sums.append(int(tensor))
        if check is not None:
            check()
        dist.destroy_process_group()

    def by_gloo() -> None:
        """Reduce by the backend for GPU tensors: there is no GPU, but the backend exists."""
        group = dist.group.WORLD
        assert isinstance(group, GanglineProcessGroup)
        assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
        backend = group._get_backend(torch.device("cuda"))
        assert isinstance(backend, dist.ProcessGroupGloo)
        assert backend is group._get_backend(torch.device("cuda:0"))
        tensor = torch.tensor([float(rank.rank)])
        backend.allreduce([tensor]).wait()
        assert tensor.item() == 1

    use()
    use(init_method=f"tcp://127.0.0.1:{second}", **place)
    use(init_method=f"file://{path}", **place)
    use(store=dist.FileStore(f"{path}.store", rank.size), **place)
    store = dist.TCPStore("127.0.0.1", port, rank.size, is_master=rank.rank == 0, timeout=timedelta(seconds=30))
    use(store=dist.PrefixStore("first", store), **place)
    use(store=dist.PrefixStore("cuda has another", store), backend="cpu:gangline,cuda:gloo", check=by_gloo, **place)
    use(store=dist.PrefixStore("cpu comes last", store), backend="cuda:gloo,cpu:gangline", **place)
    rank.tell(sums)
    rank.hear()  # the store ends with rank 0


def test_every_init_method(tmp_path: Path) -> None:
    with Processes(
        join_in_many_ways, 2, f"{tmp_path}/store", *free_ports(3), limit=60
    ) as processes:  # no store is at the port of another
        assert processes.all_heard() == [[21] * 7, [21] * 7]
        for rank in range(2):
            processes.say(rank, "go")


def test_one_rank_alone() -> None:
    dist.init_process_group("gangline", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.arange(3.0)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [0, 1, 2]
        found: list[Any] = [None]
        dist.all_gather_object(found, "x")
        assert found == ["x"]
        with pytest.raises(RuntimeError, match=r"on meta was passed to a process group of backend 'cpu:gangline'"):
            dist.all_reduce(torch.empty(3, device="meta"))
    finally:
        dist.destroy_process_group()


LARGE = 300_007


def lose_the_last(rank: Rank, path: str) -> None:
    join_group(rank, path)
    groups = [dist.new_group() for _ in range(5)]
    model = DistributedDataParallel(nn.Linear(400, 300))
    model(torch.ones(1, 400)).sum().backward()
    rank.tell("ready")
    if rank.rank == rank.size - 1:
        rank.hear()
    else:
        waiting = dist.all_reduce(torch.ones(LARGE), group=groups[0], async_op=True)
        receiving = dist.irecv(torch.zeros(3), rank.size - 1, group=groups[1])
        rank.tell("waits")
        calls = {
            "sync": lambda: dist.all_reduce(torch.ones(3)),
            "again": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
            "async": waiting.wait,
            "future": lambda: waiting.get_future().wait(),
            "recv": receiving.wait,
            "list": lambda: dist.all_gather([torch.zeros(2) for _ in range(rank.size)], torch.ones(2), group=groups[2]),
            "object": lambda: dist.all_gather_object([None] * rank.size, "x", group=groups[3]),
            "reduce_scatter": lambda: dist.reduce_scatter(
                torch.zeros(2), [torch.zeros(2)] * rank.size, group=groups[4]
            ),
            "ddp": lambda: model(torch.ones(1, 400)).sum().backward(),
        }
        errors = {}
        for name, call in calls.items():
            with pytest.raises(RuntimeError) as raised:
                call()
            errors[name] = type(raised.value).__name__, str(raised.value)
        rank.tell(errors)
        dist.destroy_process_group()
        rank.tell([thread.name for thread in threading.enumerate() if "gangline" in thread.name])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_killed_rank_is_an_error_that_names_it(size: int, tmp_path: Path) -> None:
    with Processes(lose_the_last, size, f"{tmp_path}/store") as processes:
        processes.all_heard()
        for rank in range(size - 1):
            assert processes.heard(rank) == "waits"
        processes.kill(size - 1, signal.SIGKILL)
        for rank in range(size - 1):
            errors = processes.heard(rank)
            for name, (kind, text) in errors.items():
                assert f"rank {size - 1} was killed or left" in text, (name, kind, text)
                assert kind == "DeadNodeError" or (name in ("future", "ddp") and "DeadNodeError" in text), (name, kind)
            assert processes.heard(rank) == []


def do_not_join(rank: Rank, path: str) -> None:
    join_group(rank, path)
    limited = dist.new_group()
    short = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group=limited)
    found = {}
    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(3), group=limited, async_op=True)
        found["wait"] = error_of(lambda: work.wait(timedelta(seconds=0.05)))
        found["is_completed"] = work.is_completed()
        found["monitored"] = error_of(lambda: limited.monitored_barrier(timedelta(seconds=0.05)))
        limited.set_timeout(timedelta(seconds=0.05))
        found["set_timeout"] = error_of(lambda: dist.barrier(group=limited))
        rank.tell("late")
        found["in the end"] = work.wait(timedelta(seconds=30))
        found["group"] = error_of(lambda: dist.all_reduce(torch.ones(3), group=short))
        rank.tell(found)
        rank.tell("done")
    else:
        rank.hear()
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=limited)
        dist.barrier(group=limited)
        rank.tell(tensor.tolist())
        rank.hear()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_late_rank_is_an_error_after_the_time_of_the_wait_the_barrier_or_the_group(tmp_path: Path) -> None:
    with Processes(do_not_join, 2, f"{tmp_path}/store") as processes:
        assert processes.heard(0) == "late"
        processes.say(1, "come")
        assert processes.heard(1) == [2, 2, 2]
        found = processes.heard(0)
        assert (found["is_completed"], found["in the end"]) == (False, True)
        for name, words in {
            "monitored": "Rank 1 failed to pass monitoredBarrier in 50 ms",
            "wait": "is still running after 0.05 s",
            "set_timeout": "is still running after 0.05 s",
            "group": "rank 0 arrived, rank 1 did not",
        }.items():
            kind, text = found[name]
            assert kind == "StallError"
            assert words in text
        processes.say(1, "go")


def never_join(rank: Rank, path: str) -> None:
    store = dist.PrefixStore("lonely", dist.FileStore(path, 2))
    rank.tell(error_of(lambda: torch_backend.GanglineProcessGroup(store, 1, 3, timedelta(seconds=0.2))))


def test_ranks_missing_at_the_start_are_named(tmp_path: Path) -> None:
    with Processes(never_join, 1, f"{tmp_path}/store") as processes:
        assert processes.heard(0) == ["StallError", "ranks 0, 2 of 3 did not reach the process group within 0.2 s"]


class TakenMeanwhile(Work):
    """A call that the queue's thread takes after `queued` was read once."""

    reads = 0

    @property
    def queued(self) -> Callable[[], None] | None:  # type: ignore[override]
        self.reads += 1
        return self.complete if self.reads == 1 else None

    @queued.setter
    def queued(self, _: object) -> None:
        pass


def test_a_wait_does_not_run_a_call_that_the_queue_takes_meanwhile() -> None:
    assert GroupWork(TakenMeanwhile("all_reduce"), []).wait()
