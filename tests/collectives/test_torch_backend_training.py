"""Features of torch.distributed over the backend "gangline": meshes, sharded checkpoints and ways to join."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gangline.collectives.torch_backend import GanglineProcessGroup
from gangline.launcher.job import free_ports
from tests.collectives.processes import Processes, Rank, join_group


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
