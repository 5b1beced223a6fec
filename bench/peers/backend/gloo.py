"""A rank of torch.distributed over gloo: single collectives, and steps of programs that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gangline.bench.peers.ranks import gloo

_WIDTH = 512  # a layer's weights take 1 MiB
_SAMPLES = 8  # of a rank's step, few enough for communication to dominate
_FEATURES, _LOOKUPS, _TABLE_ROWS, _DIMENSION = 26, 64, 1000, 32
_IN_FLIGHT = 64
_GROUPS = 4


def join(backend: str = "gloo") -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    distributed.init_process_group(backend)
    return {
        "who": f"{backend}, torch {torch.__version__.partition('+')[0]}" if backend == "gloo" else backend,
        "rank": distributed.get_rank(),
        "size": distributed.get_world_size(),
        "barrier": distributed.barrier,
        "prepare": prepare,
        "leave": distributed.destroy_process_group,
    }


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Prepare a ``call``, or tensors for a collective."""
    if "collective" in options:
        return gloo.prepare(options)
    torch.manual_seed(distributed.get_rank())
    programs: dict[str, Callable[[], Callable[[], object]]] = {
        "barrier": lambda: distributed.barrier,
        "ddp": _ddp,
        "fsdp2": _fsdp2,
        "embeddings": _embeddings,
        "in_flight": _in_flight,
        "groups": _groups,
    }
    return {"step": programs[options["call"]]()}


def _layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.ReLU()) for _ in range(count)))


def _training_step(network: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
    data = torch.rand(_SAMPLES, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        network(data).square().mean().backward()
        optimizer.step()

    return step


def _ddp() -> Callable[[], object]:
    """Train with DDP: 24 buckets of 1 MiB."""
    return _training_step(nn.parallel.DistributedDataParallel(_layers(24), bucket_cap_mb=1))


def _fsdp2() -> Callable[[], object]:
    """Train with FSDP2: 12 layers of 1 MiB, each gathered for forward and for backward."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    network = _layers(12)
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return _training_step(network)


def _embeddings() -> Callable[[], object]:
    """Exchange data as DLRM does: for each feature the rows of its lookups, then the gradients of these rows.

    Every feature's table is sharded over the ranks by rows, so each rank requests different numbers of rows.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    tables = [torch.rand(_TABLE_ROWS, _DIMENSION) for _ in range(_FEATURES)]
    sent = [torch.randint(size, (_LOOKUPS,)).bincount(minlength=size) for _ in tables]
    received = [torch.empty_like(lengths) for lengths in sent]

    def step() -> None:
        for table, lengths, theirs in zip(tables, sent, received, strict=True):
            distributed.all_to_all_single(theirs, lengths)
            asked, given = lengths.tolist(), theirs.tolist()
            wanted = torch.arange(_LOOKUPS)
            keys = torch.empty(sum(given), dtype=torch.int64)
            distributed.all_to_all_single(keys, wanted, given, asked)
            rows = torch.empty(_LOOKUPS, _DIMENSION)
            distributed.all_to_all_single(rows, table[keys], asked, given)
            gradients = torch.empty(sum(given), _DIMENSION)
            distributed.all_to_all_single(gradients, rows, given, asked)
            table.index_add_(0, keys, gradients, alpha=-1e-6 * (rank + 1))

    return step


def _in_flight() -> Callable[[], object]:
    """Start 64 all-reduces of 64 KiB before waiting for the first."""
    return _overlapping([torch.zeros(1 << 14) for _ in range(_IN_FLIGHT)], [None] * _IN_FLIGHT)


def _groups() -> Callable[[], object]:
    """Start an all-reduce of 1 MiB in each of four groups of all ranks before waiting for the first."""
    groups = [distributed.new_group() for _ in range(_GROUPS)]
    return _overlapping([torch.zeros(1 << 18) for _ in groups], groups)


def _overlapping(tensors: Sequence[Tensor], groups: Sequence[Any]) -> Callable[[], object]:
    def step() -> None:
        pairs = zip(tensors, groups, strict=True)
        works = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor, group in pairs]
        for work in works:
            assert work is not None
            work.wait()

    return step
