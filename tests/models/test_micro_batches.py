"""Micro-batches of `gangline.balance`: equally many on all ranks, one synchronization, the gradient of one process."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn
from gangline.models.balance.micro_batches import MicroBatches
from gangline.models.balanced_batch import BalancedBatch
from tests.models.measure import distance, mlp
from tests.models.test_unequal_errors import check_refused
from tests.models.test_unequal_ranks import weights, wrapped
from tests.models.test_unequal_steps import Product, fail
from tests.models.unequal_jobs import balanced, gathered, join

SAMPLES, IGNORED = 17, -100
FEATURES = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.tensor([IGNORED if number % 4 == 1 else number % 3 for number in range(SAMPLES)])
LENGTHS = [1 + number * 7 % 5 for number in range(SAMPLES)]
Batch = list[Tensor]


def read(samples: list[int], dropped: int = SAMPLES) -> Batch:
    """Collate samples, which are their numbers; leave out those that ``dropped`` divides, so perhaps all."""
    kept = torch.tensor([number for number in samples if not number or number % dropped], dtype=torch.int64)
    return [kept, FEATURES[kept], LABELS[kept]]


def labelled(batch: Batch) -> Tensor:
    return (batch[2] != IGNORED).sum()


def loss_of(batch: Batch, outputs: Tensor, kind: str) -> Tensor:
    if kind == "count":
        return cross_entropy(outputs, batch[2], reduction="sum") / labelled(batch)  # NaN if all are ignored
    losses = outputs.square().sum(1)
    return losses.sum() if kind == "sum" else losses.mean()


Case = tuple[str, dict[str, Any], dict[str, Any], Callable[[Batch], Any]]
CASES: dict[str, Case] = {
    "mean": ("mean", {}, {"max_size": 2}, lambda part: len(part[0])),
    "sum": ("sum", {"loss_reduction": "sum"}, {"max_size": 3}, lambda part: len(part[0])),
    "count": ("count", {"count": labelled}, {"max_size": 2}, lambda part: len(part[0])),
    "cost of counts": ("count", {"count": labelled}, {"max_cost": 1}, labelled),
    "cost": (
        "mean",
        {"lengths": LENGTHS, "padding": False},
        {"max_cost": 7},
        lambda part: sum(LENGTHS[number] for number in part[0]),
    ),
    "cost of padded": (
        "mean",
        {"lengths": LENGTHS},
        {"max_cost": 10.0},
        lambda part: len(part[0]) * max(LENGTHS[number] for number in part[0]),
    ),
    "dropped": ("mean", {}, {"max_size": 2}, lambda part: len(part[0])),
}
"""Kind of the loss, options of balance, limit of parts, and what it limits."""
ENGINES = {
    "ddp": [*CASES],
    "fsdp2": ["sum", "count", "cost", "dropped"],
    "two networks": ["mean"],
    "fsdp1": ["count"],
    "accelerate": ["cost"],
}


def wrap(engine: str, network: nn.Module, reductions: list[str]) -> Any:
    """Wrap a network; DistributedDataParallel notes the buckets that it reduces."""
    if engine == "fsdp1":
        return FullyShardedDataParallel(network, device_id=torch.device("cpu"), use_orig_params=True)
    if engine == "fsdp2":
        return wrapped(engine, network)
    model = DistributedDataParallel(network)

    def note(_: object, bucket: Any) -> Any:
        reductions.append("all-reduce")
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    note.__annotations__.clear()  # texts, which are not what it expects
    model.register_comm_hook(None, note)  # type: ignore[no-untyped-call]
    return model


class Two(nn.Module):
    """Two networks with wrappers of their own."""

    def __init__(self, wrap_one: Callable[[nn.Module], Any] = lambda network: network) -> None:
        super().__init__()
        self.first, self.second = wrap_one(mlp(5, 4, seed=1)), wrap_one(mlp(4, 3, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(x).tanh())
        return outputs


def train(engine: str, case: str, loads: list[float]) -> dict[str, Any]:
    """Train an epoch, and one process on the same samples; return the distance, and the parts of steps."""
    kind, options, limit, cost = CASES[case]
    reductions: list[str] = []
    is_two, is_accelerated = engine == "two networks", engine == "accelerate"
    alone: Any = Two() if is_two else mlp(5, 7, 3, seed=0)
    wrap_one = partial(wrap, engine, reductions=reductions)
    model = Two(wrap_one) if is_two else wrap_one(mlp(5, 7, 3, seed=0))
    own, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone))
    collate = partial(read, dropped=5 if case == "dropped" else SAMPLES)
    data: Any = DataLoader(range(SAMPLES), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    optimizer: Any = own
    if is_accelerated:
        from accelerate import Accelerator

        optimizer, data = Accelerator(cpu=True).prepare(own, data)
    found: dict[str, Any] = {"sizes": [], "reductions": []}
    with gangline.balance([model.first, model.second] if is_two else model, data, loads=loads, **options) as loader:
        for batch in loader:
            sizes, samples = [], loader.samples
            reductions.clear()
            for part in loader.micro_batches(batch, **limit):
                if engine == "fsdp2" and case == "count":  # which needs less memory
                    model.set_requires_gradient_sync(True)
                with CommDebugMode() if engine == "fsdp2" else nullcontext() as seen:
                    loss_of(part, model(part[1]), kind).backward()
                if isinstance(seen, CommDebugMode):
                    calls = seen.get_comm_counts().items()
                    reductions += ["reduce-scatter"] * sum(n for call, n in calls if "reduce_scatter" in str(call))
                sizes.append(loader.samples)
                assert loader.samples in (0, 1) or cost(part) <= next(iter(limit.values()))
                if is_accelerated:  # steps with the last part
                    optimizer.step()
                    optimizer.zero_grad()
            assert loader.samples == samples
            if not is_accelerated:
                optimizer.step()
                optimizer.zero_grad()
            rows = [column[: sum(sizes)] for column in batch]
            whole = [torch.cat(column) for column in zip(*gathered(rows), strict=True)]
            loss_of(whole, alone(whole[1]), kind).backward()
            other.step()
            other.zero_grad()
            found["sizes"].append(sizes)
            found["reductions"].append(len(reductions))
    with FullyShardedDataParallel.summon_full_params(model) if engine == "fsdp1" else nullcontext():
        named = model.named_parameters() if engine in ("two networks", "fsdp1") else weights(model).items()
        trained = {name.replace("module.", ""): one.detach() for name, one in named}
        found["distance"] = distance(trained, alone.state_dict())
    return found


def accumulated() -> tuple[float, list[bool]]:
    """Train two batches with means of 4.5 and 12.5 in accelerate's accumulate(); return the weight, and what syncs."""
    from accelerate import Accelerator

    accelerator, seen = Accelerator(cpu=True), []
    accelerator.gradient_accumulation_steps = 2
    net = mlp(1, 1, seed=0)
    nn.init.zeros_(net[0].weight)
    numbers: Any = DataLoader(torch.arange(1.0, 17.0).double()[:, None], batch_size=8 // accelerator.num_processes)
    model, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), numbers)
    with gangline.balance(model, data, loads=[3.0, *[1.0] * (accelerator.num_processes - 1)]) as loader:
        for batch in loader:
            with accelerator.accumulate(model):
                for part in loader.micro_batches(batch, 2):
                    seen.append(model.require_backward_grad_sync and accelerator.sync_gradients)
                    accelerator.backward(model(part).mean())
                optimizer.step()
                optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    return float(net[0].weight), seen


def run_cases(comm: Communicator, path: str) -> dict[str, Any]:
    join(comm, path, "gangline")
    names = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    found = {}
    for engine, cases in ENGINES.items():
        for number, case in enumerate(cases):
            first = 3.0 if not (number + comm.size) % 2 or engine == "ddp" else 1.0
            found[f"{engine}, {case}"] = train(engine, case, [first, *[1.0] * (comm.size - 1)])
    if comm.size == 2:
        weight, seen = accumulated()
        assert weight == pytest.approx(-(4.5 + 12.5) / 2)
        assert seen == [False] * (len(seen) - 1) + [True]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parts_have_the_gradient_of_one_process_and_one_reduction(size: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks = spawn(run_cases, size, str(tmp_path / "store"), threads=1)
    for name in ranks[0]:
        assert max(found[name]["distance"] for found in ranks) < 1e-11, name
        for steps in zip(*(found[name]["sizes"] for found in ranks), strict=True):
            assert len({len(sizes) for sizes in steps}) == 1, name
        for found in ranks if "fsdp1" not in name else []:
            once = 2 if "two" in name else 1
            in_each = [len(sizes) for sizes in found[name]["sizes"]]
            assert found[name]["reductions"] == (in_each if name == "fsdp2, count" else [once] * len(in_each)), name
    if size == 2:  # shares of 6 and 2, or of 4 and 4, and of 1 and none
        assert [found["ddp, mean"]["sizes"] for found in ranks] == [[[2] * 3] * 2 + [[1]], [[1, 1, 0]] * 2 + [[0]]]
        assert [found["fsdp2, sum"]["sizes"] for found in ranks] == [[[3, 3]] * 2 + [[1]], [[1, 1]] * 2 + [[0]]]


def product_of(samples: int = 4) -> tuple[Any, torch.optim.SGD, Any]:
    """Return w, from 0, with a learning rate of 1, and a loader of as many samples of 1, of 2 and of 3."""
    model = DistributedDataParallel(Product())
    x = torch.tensor([1, 2, 3]).double().repeat_interleave(samples)
    loader = gangline.balance(model, DataLoader(TensorDataset(x), batch_size=samples // 2), loads=[1, 1])
    return model, torch.optim.SGD([model.module.w], lr=1), loader


def left(way: str) -> list[float]:
    """Train an epoch, of which rank 1 leaves the second batch in its first or second part; return the weights."""
    model, optimizer, loader = product_of()
    found: list[float] = []
    for number, (x,) in enumerate(loader):
        fails = dist.get_rank() == 1 and number == 1
        parts, kept = loader.micro_batches(x, 1), []
        try:
            kept.append(iter(parts))
            for place, part in enumerate(kept[0]):
                if fails and way == f"inside, part {place}":
                    try:
                        fail()
                    except torch.OutOfMemoryError:
                        loader.skip()
                        continue
                if fails and way == f"around, part {place}":
                    fail()
                model(part).mean().backward()
        except torch.OutOfMemoryError:
            loader.skip()
        assert model.require_backward_grad_sync or not fails
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(model.module.w.detach()))
    loader.close()
    return found


def left_in_update() -> None:
    """Skip the first batch of an update on rank 1 after its first part: all ranks drop it, and train the others."""
    model = DistributedDataParallel(Product())
    x = torch.tensor([1, 2, 3, 4]).double().repeat_interleave(4)
    loader = gangline.balance(
        model, DataLoader(TensorDataset(x), batch_size=2), loads=[1, 1], accumulate=2, count=lambda batch: len(batch[0])
    )
    for number, batch in enumerate(loader):
        for place, (part,) in enumerate(loader.micro_batches(batch, 1)):
            if dist.get_rank() == 1 and (number, place) == (0, 1):
                loader.skip()
                break
            (model(part).mean() / 2).backward()
        if loader.ends_update:
            expected = [1.0, 3.5][number // 2]  # of 2, without 1; and of 3 and 4
            assert model.module.w.grad == expected, (number, model.module.w.grad)
            model.zero_grad()
    loader.close()


def switches(engine: str) -> list[list[bool]]:
    """Return whether the parts of batches synchronize, which are left or trained in several ways, and what follows."""
    model = wrap(engine, mlp(1, 1, seed=0), [])
    group = model if engine == "ddp" else model._get_fsdp_state()._fsdp_param_groups[0]
    name, found = "require_backward_grad_sync" if engine == "ddp" else "reduce_grads", []
    data: Any = DataLoader(torch.ones(24, 1).double(), batch_size=4)
    with gangline.balance(model, data, loads=[1, 1]) as loader:
        for number, batch in enumerate(loader):
            seen = []
            if number == 0:
                setattr(group, name, False)  # as no_sync() does
            if number == 1:
                loader._begin_part(replace(loader._batch, ends_update=False))
            parts = loader.micro_batches(batch, 2)
            try:
                for part in parts:
                    seen.append(getattr(group, name))
                    model(part).mean().backward()
                    if number == 2:
                        raise KeyError
            except KeyError:
                pass
            seen.append(getattr(group, name))
            setattr(group, name, True)
            model(batch).mean().backward()
            found.append(seen)
    return found


def run_loops(comm: Communicator, path: str) -> None:
    join(comm, path, "gangline")
    exact, dropped = [-1.0, -3.0, -6.0], [-1.0, -1.0, -4.0]
    assert left("never") == left("inside, part 0") == left("around, part 0") == exact
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert left("inside, part 1") == left("around, part 1") == dropped
        left_in_update()
    for engine in ("ddp", "fsdp2"):
        assert switches(engine) == [[False, False, False], [False, False, True], [False, True]]
    model, _, loader = product_of(8)
    iteration: Any = None
    for number, (x,) in enumerate(loader):  # an iteration that is left, but kept, ends with its batch
        assert model.require_backward_grad_sync
        if number:
            model(x).mean().backward()
            continue
        iteration = iter(loader.micro_batches(x, 1))
        model(next(iteration)).mean().backward()
    assert list(iteration) == []
    loader.close()
    errors()
    dist.destroy_process_group()


def errors() -> None:
    is_first, net = not dist.get_rank(), nn.Linear(1, 1)
    numbers: Any = DataLoader(torch.arange(17.0)[:, None], batch_size=4)
    loader = gangline.balance(net, numbers, loads=[3, 1])
    check_refused(lambda: loader.micro_batches(torch.zeros(4), 2), "has no batch to cut")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (None, {}, "max_size=None and max_cost=None; expected one of them"),
        (None, {"max_size": 2, "max_cost": 3}, "max_size=2 and max_cost=3; expected one of them"),
        (None, {"max_size": 0}, "max_size=0"),
        (None, {"max_size": 1.5}, "max_size=1.5"),
        (None, {"max_cost": float("nan")}, "max_cost=nan"),
        (None, {"max_size": 2 * is_first}, "max_size=0"),  # of rank 1 only
        (None, {"max_cost": 3}, "max_cost is 3, but the costs of the batch's rows are not known; expected lengths="),
        (torch.zeros(17, 1), {"max_size": 2}, "a batch of 17 rows for "),
        ("x", {"max_size": 2}, "which has no entry for each sample"),
    ]
    parts: Any = None
    for batch in loader:
        if parts is not None:
            check_refused(partial(list, parts), "the loop has left the batch of these parts")
            break
        for other, limits, expected in wrong:
            check_refused(partial(loader.micro_batches, batch if other is None else other, **limits), expected)
        parts = loader.micro_batches(batch, 2)
        check_refused(
            partial(lambda each: [net(part) for part in each], parts), "part 1 of 3 ran forward without a back"
        )
        with torch.no_grad():
            assert len([net(part) for part in parts]) == 3
    loader.close()
    dropping: Any = DataLoader(range(SAMPLES), batch_size=4, collate_fn=partial(read, dropped=2))  # type: ignore[arg-type]
    others: list[tuple[str, dict[str, Any]]] = [
        ("drops none", {"lengths": LENGTHS}),
        ('expected "mean" or "sum"', {"loss_reduction": "normalized"}),
    ]
    for expected, options in others:
        with balanced(dropping, **options) as loader:
            for batch in loader:
                check_refused(partial(loader.micro_batches, batch, max_cost=8), expected)
                break

    def on_one_rank(other: Callable[[Any], object]) -> None:
        model = DistributedDataParallel(nn.Linear(1, 1))
        loader = gangline.balance(model, DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2), loads=[1, 1])
        for (x,) in loader:
            if is_first:
                loader.micro_batches(x, 2)
            else:
                other(model(x).mean())

    for other in (Tensor.backward, Tensor.detach):
        check_refused(partial(on_one_rank, other), "rank 0 called micro_batches() in global batch 0, rank 1 did not")


def test_gradients_are_synchronized_as_before_after_any_end_and_wrong_uses_are_errors_of_all(tmp_path: Path) -> None:
    spawn(run_loops, 2, str(tmp_path / "store"), threads=1)


def cut_alone(costs: list[float], limit: float, minimum: int, number: int = 0) -> list[int]:
    whole = BalancedBatch(samples=len(costs), costs=costs)
    parts: Any = MicroBatches(None, whole, costs, minimum, None, None, is_sum=False)  # type: ignore[arg-type]
    parts.cut(max(number, parts.needed(costs, None, limit)))
    assert sum(part.weight for _, part in parts._parts) == pytest.approx(1)
    assert [cost for data, part in parts._parts for cost in data[: part.samples]] == costs
    return [part.samples for _, part in parts._parts]


def test_parts_are_within_the_limit_and_nearly_equal() -> None:
    assert cut_alone([1.0] * 6, 4, 1) == [3, 3]
    assert cut_alone([1.0] * 6, 6, 1, 4) == [2, 2, 2, 0]
    assert cut_alone([9.0, 1, 2, 1], 3, 1) == [1, 2, 1]
    assert cut_alone([1.0] * 5, 4, 2) == [2, 3]
    assert cut_alone([1.0] * 5, 1, 2) == [2, 3]  # BatchNorm needs two
    assert cut_alone([0.0] * 3, 1, 1, 2) == [3, 0]
    draw = random.Random(0)
    for _ in range(50):
        costs = [float(draw.randint(0, 9)) for _ in range(draw.randint(1, 30))]
        limit, begin = draw.randint(1, 30), 0
        for size in cut_alone(costs, limit, 1):
            assert size == 1 or sum(costs[begin : begin + size]) <= limit
            begin += size
