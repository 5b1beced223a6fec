"""`gangline.balance` in real torch.distributed jobs: the weights are those of one process on the global batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import distance, mlp, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn
from tests.models.unequal_jobs import flat, gathered, join

SAMPLES = 83
STEPS = 20
BATCH = 8
network = partial(mlp, 6, 8, 3, seed=3)


class Data(TensorDataset):
    """Features, labels, and the number of each sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        features = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
        super().__init__(features, torch.randint(3, (SAMPLES,), generator=generator), torch.arange(SAMPLES))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def wrapped(engine: str, net: nn.Module) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine == "fsdp2":
        return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def weights(model: nn.Module) -> dict[str, Tensor]:
    state = (model.module if isinstance(model, DistributedDataParallel) else model).state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def train(engine: str, changed: Sequence[float], options: dict[str, Any]) -> float:
    """Train some steps in this rank, from the second on with changed loads; return the distance from one process."""
    model = wrapped(engine, network())
    optimizer = optimizer_of(model)
    loader = gangline.balance(model, DataLoader(Data(), batch_size=BATCH, shuffle=True), loads=[3, 1], **options)
    batches: list[list[int]] = []
    while len(batches) < STEPS:
        for features, labels, numbers in loader:
            step(model, optimizer, features, labels)
            if engine == "by_hand":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()
            batches.append(flat(gathered(numbers[: loader.samples].tolist())))
            if len(batches) == 2 and changed:
                loader._balance.set_loads(changed)
    per_epoch = len(loader)
    loader.close()
    assert sorted(flat(batches[:per_epoch])) == list(range(SAMPLES))
    alone, data = network(), Data()
    optimizer = optimizer_of(alone)
    for batch in batches:
        features, labels, _ = data[batch]
        step(alone, optimizer, features, labels)
        optimizer.step()
    return distance(weights(model), alone.state_dict())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor, labels: Tensor) -> None:
    """Run a backward of a loss with a term of the weights, which does not depend on the outputs."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss = loss + 0.01 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    loss.backward()  # type: ignore[no-untyped-call]


CALLS: dict[str, list[tuple[str, Callable[..., Any], Sequence[Any]]]] = {}
"""For each backend the calls that two ranks make, with their names and arguments, one job for all."""


def run(comm: Communicator, path: str, backend: str) -> dict[str, Any]:
    """Make the calls of a backend as a rank of a torch.distributed job; return their results."""
    join(comm, path, backend)
    try:
        return {name: call(*arguments) for name, call, arguments in CALLS[backend]}
    finally:
        dist.destroy_process_group()


Results = list[dict[str, Any]]
"""The results of each rank, by name."""


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return spawn(run, 2, str(tmp_path_factory.mktemp("gloo") / "store"), "gloo", threads=1)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return spawn(run, 2, str(tmp_path_factory.mktemp("own") / "store"), "gangline", threads=1)


def test_weights_after_20_steps_are_those_of_one_process(gloo: Results, own: Results) -> None:
    assert max(each["ddp"] for each in gloo) < 1e-11
    assert max(each["by hand"] for each in own) < 1e-11


def read(loads: Sequence[float], state: dict[str, Any] | None, batches: int | None) -> tuple[Any, list[int]]:
    """Read so many batches, or the rest of the epoch; return the state and the numbers of this rank's samples."""
    torch.manual_seed(dist.get_rank())
    model = network()
    loader = gangline.balance(model, DataLoader(Data(), batch_size=4, shuffle=True), loads=loads)
    if state is not None:
        loader.load_state_dict(state)
    seen: list[int] = []
    for number, (_, _, numbers) in enumerate(loader, 1):
        seen += numbers[: loader.samples].tolist()
        if number == batches:
            return loader.state_dict(), seen
    return loader.state_dict(), seen


def resume(comm: Communicator, path: str, state: dict[str, Any]) -> tuple[Any, list[int]]:
    join(comm, path)
    try:
        return read([1, 2, 3], state, None)
    finally:
        dist.destroy_process_group()


def test_a_resumed_epoch_reads_each_sample_once_with_another_number_of_ranks(gloo: Results, tmp_path: Path) -> None:
    started = [each["read"] for each in gloo]
    state = started[0][0]
    assert (state["epoch"], state["samples"]) == (0, 32)
    resumed = spawn(resume, 3, str(tmp_path / "store"), state, threads=1)
    assert [found[0]["epoch"] for found in resumed] == [1, 1, 1]
    seen = [number for _, numbers in [*started, *resumed] for number in numbers]
    assert sorted(seen) == list(range(SAMPLES))


def made() -> tuple[nn.Module, torch.optim.Optimizer, gangline.BalancedLoader]:
    model = DistributedDataParallel(network())
    loader = gangline.balance(model, DataLoader(Data(), batch_size=BATCH, shuffle=True), loads=[3, 1])
    return model, optimizer_of(model), loader


def resumed_weights(stop: int) -> dict[str, Tensor]:
    """Train two epochs; after ``stop`` batches go on with a new model and loader, made of their saved states."""
    torch.manual_seed(7)
    model, optimizer, loader = made()
    done = 0
    while loader.epoch < 2:
        for features, labels, _ in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            done += 1
            if done == stop:
                break
        if done == stop:
            states = [part.state_dict() for part in (model, optimizer, loader)]
            random_state = torch.get_rng_state()
            model, optimizer, loader = made()
            for part, state in zip((model, optimizer, loader), states, strict=True):
                part.load_state_dict(state)
            torch.set_rng_state(random_state)
            done += 1
    return weights(model)


def both_ways() -> bool:
    return same_bits(resumed_weights(-1), resumed_weights(3))


def test_a_resumed_run_ends_with_the_same_bits(gloo: Results) -> None:
    assert [each["both ways"] for each in gloo] == [True, True]


def line() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    return layer


def gradient_under_fsdp1() -> list[float]:
    model = FullyShardedDataParallel(line(), device_id=torch.device("cpu"))
    data = TensorDataset(torch.arange(2.0, 17.0, 2.0).double().reshape(-1, 1))
    for [x] in gangline.balance(model, DataLoader(data, batch_size=4), loads=[3, 1]):
        model(x).mean().backward()
    return [float(p.grad) for p in model.parameters() if p.grad is not None and p.grad.numel()]


def test_the_gradient_under_fsdp1_is_that_of_the_whole_batch(own: Results) -> None:
    assert own[0]["fsdp1"] == [9]


def step_of_a_network_that_was_not_named(engine: str) -> str:
    first, second = wrapped(engine, nn.Sequential(line())), wrapped(engine, nn.Sequential(line()))
    data = TensorDataset(torch.ones(8, 1).double())
    for [x] in gangline.balance(first, DataLoader(data, batch_size=4), loads=[3, 1]):
        (first(x) + second(x)).mean().backward()
        optimizer_of(first).step()
        with pytest.raises(RuntimeError) as raised:
            optimizer_of(second).step()
    return str(raised.value)


@pytest.mark.parametrize(
    ("engine", "name"), [("ddp", "DistributedDataParallel of Sequential"), ("fsdp2", "FSDPSequential")]
)
def test_a_network_that_trains_on_a_balanced_batch_without_being_named_is_an_error(
    engine: str, name: str, gloo: Results, own: Results
) -> None:
    for each in gloo if engine == "ddp" else own:
        text = each["not named"]
        assert text.startswith(f"balance: a {name}")
        assert "write balance([network, other_network], loader)" in text


def gather_wrong_rows() -> list[str]:
    texts = []
    for rows in (torch.ones(2, 3 + dist.get_rank()), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"gather_rows|rows is") as raised:
            gangline.gather_rows(rows)
        texts.append(str(raised.value))
    return texts


def test_rows_that_do_not_fit_together_are_an_error_on_all_ranks(own: Results) -> None:
    for different, scalar in (each["wrong rows"] for each in own):
        assert different.startswith("gather_rows: rank 1 has rows of another shape or dtype than rank 0")
        assert scalar == "rows is a tensor of 0 dimensions; expected [rows, ...]"


CALLS["gloo"] = [
    ("ddp", train, ("ddp", [1, 4], {})),
    ("read", read, ([3, 1], None, 4)),
    ("both ways", both_ways, ()),
    ("not named", step_of_a_network_that_was_not_named, ("ddp",)),
]
CALLS["gangline"] = [  # FSDP over gloo aborts now and then when processes end
    ("by hand", train, ("by_hand", [], {"global_batch": 41})),  # 83 = 41 + 41 + 1: fewer samples than ranks
    ("fsdp1", gradient_under_fsdp1, ()),
    ("not named", step_of_a_network_that_was_not_named, ("fsdp2",)),
    ("wrong rows", gather_wrong_rows, ()),
]
