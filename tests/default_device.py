"""Ways to train in a script that calls `torch.set_default_device`, whose values on the host must stay there.

Device "meta" takes the place of a GPU: a value that lands there by mistake is lost, and its first use fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
import gangline.horovod.torch as hvd
from gangline import DistributedOptimizer, Module, Trainer, cpu

Weights = dict[str, Tensor]
HOST = torch.device("cpu")


def _network() -> nn.Module:
    torch.manual_seed(0)
    with HOST:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))


def _dataset(rank: int = 0, ranks: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(64, 8, generator=generator, device=HOST)[rank::ranks]
    return TensorDataset(data, torch.randint(4, (64,), generator=generator, device=HOST)[rank::ranks])


def _batches(rank: int = 0, ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(2):
        dataset = _dataset(rank, ranks)
        yield from zip(dataset.tensors[0].split(8), dataset.tensors[1].split(8), strict=True)


def module(store: str) -> Weights:
    network = _network()
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)], work_load_list=[3, 1]) as trained:
        options = {"lr": 0.1, "momentum": 0.9}
        trained.fit(
            _dataset(), _dataset(), batch_size=16, num_epoch=2, kvstore=store, optimizer="sgd", optimizer_params=options
        )
        trained.predict(_dataset(), batch_size=16)
    return network.state_dict()


def trainer(store: str, compression: str = "") -> Weights:
    network = _network()
    with gangline.create(store) as kv:
        if compression:
            kv.set_gradient_compression({"type": compression})
        # torch 2.11's Adam counts its steps in a tensor on the default device
        trained = Trainer(network, "sgd" if torch.__version__ < "2.12" else "adam", {"lr": 0.01}, kv)
        for data, label in _batches(kv.rank, kv.num_workers):
            trained.zero_grad()
            cross_entropy(network(data), label).backward()
            trained.step(len(label))
    return network.state_dict()


def sparse(store: str) -> Weights:
    torch.manual_seed(0)
    with HOST:
        network = nn.Embedding(30, 4, sparse=True)
    with gangline.create(store) as kv:
        trained = Trainer(network, "sgd", {"lr": 0.1}, kv)
        for _ in range(3):
            trained.zero_grad()
            network(torch.tensor([1, 4, 7, 29], device=HOST) - kv.rank).sum().backward()
            trained.step(4)
    return network.state_dict()


def optimizer(shard: str) -> Weights:
    network = _network()
    store = gangline.create("allreduce")
    plain = torch.optim.SGD(network.parameters(), lr=0.1)
    wrapped = DistributedOptimizer(plain, store, shard=shard or None, network=network)
    for data, label in _batches(store.rank, store.num_workers):
        wrapped.zero_grad()
        cross_entropy(network(data), label).backward()
        wrapped.step()
    weights = network.state_dict() if shard != "weights" else wrapped.model_state_dict()
    store.close()
    return weights


def balance(backend: str) -> Weights:
    store = f"file://{os.environ['STORES']}/{torch.get_default_device()}"  # one of a port would meet the group before
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    network = _network()
    model = DistributedDataParallel(network)
    stepped = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = gangline.balance(model, DataLoader(_dataset(), batch_size=8), loads=[1, 1])  # BatchNorm sees the split
    for _ in range(2):
        batches = iter(loader)
        with HOST:  # a DataLoader draws its seed on the default device, which "meta" cannot
            first = next(batches)
        for data, label in chain([first], batches):
            stepped.zero_grad()
            cross_entropy(model(data), label).backward()
            stepped.step()
    dist.destroy_process_group()
    return network.state_dict()


def horovod() -> Weights:
    hvd.init()
    network = _network()
    stepped = torch.optim.SGD(network.parameters(), lr=0.1)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    wrapped = hvd.DistributedOptimizer(stepped, named_parameters=network.named_parameters())
    for data, label in _batches(hvd.rank(), hvd.size()):
        wrapped.zero_grad()
        cross_entropy(network(data), label).backward()
        wrapped.step()
    assert hvd.allgather_object(hvd.rank()) == [*range(hvd.size())]
    hvd.shutdown()
    return network.state_dict()


ON_RANKS: dict[str, Callable[[], Weights]] = {
    "module": partial(module, "allreduce"),
    "trainer": partial(trainer, "allreduce"),
    "sparse": partial(sparse, "allreduce"),
    "optimizer": partial(optimizer, ""),
    "sharded optimizer": partial(optimizer, "optimizer"),
    "sharded weights": partial(optimizer, "weights"),
    "2bit": partial(trainer, "allreduce", "2bit"),
    "topk": partial(trainer, "allreduce", "topk"),
    "horovod": horovod,
    "balance": partial(balance, "gangline"),
}


def check(way: Callable[[], Weights], on_meta: Callable[[], Weights]) -> None:
    """Train with the default device of torch, and with another one; the weights must be equal."""
    expected = way()
    torch.set_default_device("meta")
    try:
        found = on_meta()
    finally:
        torch.set_default_device(None)  # "cpu" would leave a mode that calls Python for each torch function
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    if sys.argv[1:]:
        way = {"module": module, "trainer": trainer, "sparse": sparse}[sys.argv[1]]
        check(partial(way, "allreduce"), partial(way, "dist_sync"))
    else:
        for one in ON_RANKS.values():
            check(one, one)
