"""Micro-batches of `gangline.balance`: equally many on all ranks, one synchronization, the gradient of one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gangline
from gangline import Communicator, spawn
from tests.models.measure import distance, mlp
from tests.models.test_unequal_errors import check_refused
from tests.models.test_unequal_ranks import weights, wrapped
from tests.models.test_unequal_steps import Product
from tests.models.unequal_jobs import gathered, join

SAMPLES, IGNORED = 17, -100
GENERATOR = torch.Generator().manual_seed(3)
FEATURES = torch.randn(SAMPLES, 5, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([IGNORED if number % 4 == 1 else number % 3 for number in range(SAMPLES)])
LENGTHS = [1 + number * 7 % 5 for number in range(SAMPLES)]
Batch = list[Tensor]


class Numbered(list[int]):
    """Samples that are their own number, which are read as [numbers, features, labels]."""


def read(samples: list[int], dropped: int = 1) -> Batch:
    """Collate; leave out each sample that ``dropped`` divides."""
    kept = torch.tensor([number for number in samples if dropped == 1 or number % dropped], dtype=torch.int64)
    return [kept, FEATURES[kept], LABELS[kept]]


def labelled(batch: Batch) -> Tensor:
    return (batch[2] != IGNORED).sum()


def mean_over(batch: Batch, outputs: Tensor, kind: str) -> Tensor:
    if kind == "count":
        return cross_entropy(outputs, batch[2], reduction="sum") / labelled(batch)  # NaN if all are ignored
    losses = outputs.square().sum(1)
    return losses.sum() if kind == "sum" else losses.mean()


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mean": ("mean", {}, {"max_size": 2}),
    "sum": ("sum", {"loss_reduction": "sum"}, {"max_size": 3}),
    "count": ("count", {"count": labelled}, {"max_size": 2}),
    "cost of counts": ("count", {"count": labelled}, {"max_cost": 1}),
    "cost": ("mean", {"lengths": LENGTHS, "padding": False}, {"max_cost": 7}),
    "cost of padded": ("mean", {"lengths": LENGTHS}, {"max_cost": 10.0}),
    "dropped by collate": ("mean", {}, {"max_size": 2}),
}
"""Kind of the loss, options of balance, limit of parts."""


def wrap(engine: str, network: nn.Module, reductions: list[str]) -> Any:
    """Wrap a network; DistributedDataParallel notes the buckets that it reduces."""
    if engine == "fsdp1":
        return FullyShardedDataParallel(network, device_id=torch.device("cpu"))
    if engine == "accelerate":
        from accelerate import Accelerator

        model: Any = Accelerator(cpu=True).prepare(network)
        assert isinstance(model, DistributedDataParallel)
    else:
        model = wrapped(engine, network)
    if isinstance(model, DistributedDataParallel):

        def note(_: object, bucket: dist.GradBucket) -> Any:
            reductions.append("all-reduce")
            return allreduce_hook(dist.group.WORLD, bucket)

        note.__annotations__.clear()  # texts, which are not what it expects
        model.register_comm_hook(None, note)
    return model


def train(engine: str, case: str, loads: list[float]) -> dict[str, Any]:
    """Train an epoch, and one process on the same samples; return the distance, sizes of parts, reductions a step."""
    kind, options, limit = CASES[case]
    reductions: list[str] = []
    model = wrap(engine, mlp(5, 7, 3, seed=0), reductions)
    alone = mlp(5, 7, 3, seed=0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    collate = partial(read, dropped=5 if case == "dropped by collate" else 1)
    data: Any = DataLoader(Numbered(range(SAMPLES)), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    found: dict[str, Any] = {"sizes": [], "reductions": [], "costs": []}
    with gangline.balance(model, data, loads=loads, **options) as loader:
        for batch in loader:
            reductions.clear()
            sizes, samples, costs = [], loader.samples, []
            for part in loader.micro_batches(batch, **limit):
                with CommDebugMode() if engine == "fsdp2" else nullcontext() as seen:
                    mean_over(part, model(part[1]), kind).backward()
                if isinstance(seen, CommDebugMode):
                    counts = seen.get_comm_counts()
                    reductions += ["reduce-scatter"] * sum(n for op, n in counts.items() if "reduce_scatter" in str(op))
                sizes.append(loader.samples)
                costs.append([LENGTHS[number] for number in part[0][: loader.samples].tolist()])
            assert loader.samples == samples
            whole = [torch.cat(column) for column in zip(*gathered([c[:samples] for c in batch]), strict=True)]
            mean_over(whole, alone(whole[1]), kind).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found["sizes"].append(sizes)
            found["costs"].append(costs)
            found["reductions"].append(len(reductions))
    found["distance"] = distance(weights(model), alone.state_dict()) if engine != "fsdp1" else 0.0
    return found


def run_cases(comm: Communicator, path: str) -> dict[str, Any]:
    join(comm, path, "gangline")
    names = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    found = {}
    for engine in ENGINES:
        for number, case in enumerate(CASES):
            loads = [3.0 if number % 2 or engine == "ddp" else 1.0, *[1.0] * (comm.size - 1)]
            found[engine, case] = train(engine, case, loads)
    dist.destroy_process_group()
    return found


ENGINES = ("ddp", "fsdp2", "fsdp1", "accelerate")


def test_debug(tmp_path: Path) -> None:
    for size in (2, 3):
        ranks = spawn(run_cases, size, str(tmp_path / f"store{size}"), threads=1)
        for key in ranks[0]:
            for r, rank in enumerate(ranks):
                print(size, key, r, rank[key]["distance"], rank[key]["sizes"], rank[key]["reductions"])
