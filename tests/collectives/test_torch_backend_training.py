"""Features of torch.distributed over the backend "gangline": DDP, FSDP2, meshes and checkpoints."""

from __future__ import annotations

import copy
import os
import socket
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives import torch_backend
from gangline.collectives.torch_backend import GanglineProcessGroup
from tests.collectives.processes import Processes, Rank

STEPS = 20
WORDS, LENGTH, WIDTH = 17, 9, 32


class Transformer(nn.Module):
    """Two layers of causal attention that predict the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.words(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=ahead)
        return self.head(hidden)


def losses_of(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(STEPS):
        start = torch.randint(WORDS, (6, 1), generator=generator)
        text = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: Rank, path: str) -> None:
    assert torch_backend.__all__
    dist.init_process_group("gangline", init_method=f"file://{path}", rank=rank.rank, world_size=rank.size)
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(7)
    first = Transformer()
    train_by_ddp(rank, first, gloo)
    train_by_fsdp(rank, first, gloo, path)
    dist.destroy_process_group()


def train_by_ddp(rank: Rank, first: nn.Module, gloo: dist.ProcessGroup) -> None:
    losses = {}
    for name, group in (("gloo", gloo), ("gangline", None)):
        model = DistributedDataParallel(copy.deepcopy(first), process_group=group, bucket_cap_mb=0.02)
        losses[name] = losses_of(model, rank.rank)
    rank.tell(losses)


def train_by_fsdp(rank: Rank, first: nn.Module, gloo: dist.ProcessGroup, path: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def sharded(mesh: DeviceMesh) -> Any:
        model = copy.deepcopy(first)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    mesh = dist.init_device_mesh("cpu", (rank.size,))
    assert isinstance(mesh.get_group(), GanglineProcessGroup)
    by_gloo = losses_of(sharded(DeviceMesh.from_group(gloo, "cpu")), rank.rank)
    trained = sharded(mesh)
    rank.tell({"gloo": by_gloo, "gangline": losses_of(trained, rank.rank)})
    dcp.save({"model": get_model_state_dict(trained)}, checkpoint_id=f"{path}.checkpoint")
    restored = sharded(mesh)
    state = {"model": get_model_state_dict(restored)}
    dcp.load(state, checkpoint_id=f"{path}.checkpoint")
    set_model_state_dict(restored, state["model"])
    pairs = zip(trained.parameters(), restored.parameters(), first.parameters(), strict=True)
    full = [(one.full_tensor(), other.full_tensor(), before) for one, other, before in pairs]
    rank.tell([torch.equal(one, other) and not torch.equal(one, before) for one, other, before in full])


@pytest.mark.slow
def test_ddp_and_fully_shard_match_gloo_and_a_checkpoint_round_trips(tmp_path: Path) -> None:
    with Processes(train, 2, f"{tmp_path}/store", limit=60) as processes:
        by_ddp = processes.all_heard()
        by_fsdp = processes.all_heard()
        for one, other in (by_ddp, by_fsdp):
            assert one["gloo"][0] > 2 * one["gloo"][-1]  # the loss decreases
            assert one["gloo"] != other["gloo"]  # each rank its own
            for losses in (one, other):
                want = torch.tensor(losses["gloo"])
                torch.testing.assert_close(torch.tensor(losses["gangline"]), want, rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.tensor(by_ddp[0]["gloo"]), torch.tensor(by_fsdp[0]["gloo"]), rtol=0, atol=1e-4)
        for flags in processes.all_heard():
            assert all(flags)
            assert len(flags) > 20


def use_a_mesh(rank: Rank, path: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gangline", init_method=f"file://{path}", rank=rank.rank, world_size=rank.size)
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
    rank.tell(found)
    dist.destroy_process_group()


def test_a_mesh_of_two_by_two(tmp_path: Path) -> None:
    with Processes(use_a_mesh, 4, f"{tmp_path}/store", limit=60) as processes:
        assert processes.all_heard() == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def join_in_many_ways(rank: Rank, path: str, first: int, second: int, port: int) -> None:
    place = {"rank": rank.rank, "world_size": rank.size}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(first), RANK=str(rank.rank), WORLD_SIZE=str(rank.size))
    sums = []

    def use(**options: Any) -> None:
        dist.init_process_group(options.pop("backend", "gangline"), timeout=timedelta(seconds=30), **options)
        tensor = torch.tensor([10 + rank.rank])
        dist.all_reduce(tensor)
        sums.append(int(tensor))
        dist.destroy_process_group()

    use()
    use(init_method=f"tcp://127.0.0.1:{second}", **place)
    use(init_method=f"file://{path}", **place)
    use(store=dist.FileStore(f"{path}.store", rank.size), **place)
    store = dist.TCPStore("127.0.0.1", port, rank.size, is_master=rank.rank == 0, timeout=timedelta(seconds=30))
    use(store=dist.PrefixStore("first", store), **place)
    use(store=dist.PrefixStore("cuda has another", store), backend="cpu:gangline,cuda:gloo", **place)
    use(store=dist.PrefixStore("cpu comes last", store), backend="cuda:gloo,cpu:gangline", **place)
    rank.tell(sums)
    rank.hear()  # the store ends with rank 0


def free_ports(count: int) -> list[int]:
    """Each store has a port of its own, because a rank might still find the previous store at the same port."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def test_every_init_method(tmp_path: Path) -> None:
    with Processes(join_in_many_ways, 2, f"{tmp_path}/store", *free_ports(3), limit=60) as processes:
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


def leave_cuda_to_another(rank: Rank, path: str) -> None:
    place = {"rank": rank.rank, "world_size": rank.size}
    dist.init_process_group("cpu:gangline,cuda:gloo", init_method=f"file://{path}", **place)
    group = dist.group.WORLD
    assert isinstance(group, GanglineProcessGroup)
    assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
    backend = group._get_backend(torch.device("cuda"))
    assert isinstance(backend, dist.ProcessGroupGloo)
    assert backend is group._get_backend(torch.device("cuda:0"))
    tensor = torch.tensor([float(rank.rank)])
    backend.allreduce([tensor]).wait()  # there is no GPU, but the backend for GPU tensors exists
    rank.tell(tensor.item())
    dist.destroy_process_group()


def test_another_backend_serves_another_device(tmp_path: Path) -> None:
    with Processes(leave_cuda_to_another, 2, f"{tmp_path}/store", limit=60) as processes:
        assert processes.all_heard() == [1, 1]
