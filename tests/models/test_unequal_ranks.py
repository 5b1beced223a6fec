"""`gangline.balance` in real torch.distributed jobs: the weights are those of one process on the global batches."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn, torch_backend

SAMPLES = 83
STEPS = 20
BATCH = 8
IGNORED = -100
TOLERANCE = 1e-11


class Data(TensorDataset):
    """Features, labels of which some are ignored, and the number of each sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        labels = torch.randint(3, (SAMPLES,), generator=generator)
        labels[torch.rand(SAMPLES, generator=generator) < 0.4] = IGNORED
        super().__init__(
            torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator), labels, torch.arange(SAMPLES)
        )


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels.clamp(min=0))


def valid_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels that are not ignored; 0 without any."""
    total = nn.functional.cross_entropy(output, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def sum_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels.clamp(min=0), reduction="sum") / 40


def valid_labels(batch: Sequence[Tensor]) -> Tensor:
    return (batch[1] != IGNORED).sum()


@dataclass(frozen=True)
class Case:
    """How a job trains."""

    engine: str = "ddp"
    loads: tuple[float, ...] = (3, 1)
    changed: tuple[float, ...] | None = None
    """Loads from the middle of the first epoch on."""
    loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
    options: tuple[tuple[str, Any], ...] = ()
    """Of balance()."""
    accumulate: int = 1
    l2: float = 0.0
    """Factor of a term of the loss that does not depend on the outputs."""


CASES = {
    "unequal": Case(),
    "very_unequal": Case(loads=(10, 1)),
    "changing": Case(changed=(1, 4)),
    "ignored_labels": Case(loss=valid_loss, options=(("count", valid_labels),)),
    "sum": Case(loss=sum_loss, options=(("loss_reduction", "sum"),)),
    "accumulated": Case(accumulate=4, loss=valid_loss, options=(("count", valid_labels),)),
    "beside_the_outputs": Case(l2=0.01),
    "fewer_samples_than_ranks": Case(options=(("global_batch", 41),)),  # 83 = 41 + 41 + 1
    "equal": Case(loads=(1, 1)),
}
ENGINES = ("ddp", "fsdp2", "by_hand")


def wrapped(engine: str, net: nn.Module) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(net)
    if engine == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def without_sync(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


def average_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def l2_of(model: nn.Module) -> Tensor:
    return sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(()))


def weights(model: nn.Module) -> list[Tensor]:
    values = (model.module if isinstance(model, DistributedDataParallel) else model).state_dict().values()
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def distance(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest distance of a weight from the expected one, relative to its norm."""
    return max(
        float((got - want).norm() / want.norm()) for got, want in zip(weights(model), weights(expected), strict=True)
    )


def train(case: Case) -> float:
    """Train 20 steps in this rank, and return the distance from one process."""
    size = dist.get_world_size()
    model = wrapped(case.engine, network())
    optimizer = optimizer_of(model)
    loads = [*case.loads, *[1] * size][:size]
    loader = gangline.balance(
        model, DataLoader(Data(), batch_size=BATCH, shuffle=True), loads=loads, **dict(case.options)
    )
    batches: list[list[int]] = []
    while len(batches) < STEPS * case.accumulate:
        for features, labels, numbers in loader:
            is_last = (len(batches) + 1) % case.accumulate == 0
            with without_sync(model, is_last):
                loss = case.loss(model(features), labels) + case.l2 * (l2_of(model) if case.l2 else 0)
                (loss / case.accumulate).backward()
            if is_last:
                if case.engine == "by_hand":
                    average_by_hand(model)
                optimizer.step()
                optimizer.zero_grad()
            of_ranks: list[Any] = [None] * size
            dist.all_gather_object(of_ranks, numbers[: loader.samples].tolist())
            batches.append([number for of_rank in of_ranks for number in of_rank])
            if case.changed is not None and len(batches) == 2:
                loader.controller.set_loads([*case.changed, *[1] * size][:size], [None] * size, 1)
            if len(batches) == STEPS * case.accumulate:
                break
    per_epoch = len(loader)
    loader.close()
    assert sorted(number for batch in batches[:per_epoch] for number in batch) == list(range(SAMPLES))
    return distance(model, alone(case, batches))


def alone(case: Case, batches: Sequence[Sequence[int]]) -> nn.Module:
    """Train one process on the global batches."""
    model, data = network(), Data()
    optimizer = optimizer_of(model)
    for number, indices in enumerate(batches, 1):
        features, labels, _ = (torch.stack(column) for column in zip(*(data[i] for i in indices), strict=True))
        loss = case.loss(model(features), labels) + case.l2 * (l2_of(model) if case.l2 else 0)
        (loss / case.accumulate).backward()
        if number % case.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def run(comm: Communicator, call: Callable[..., Any], path: str, backend: str, *arguments: Any) -> Any:
    """Call a function in a rank of a torch.distributed job."""
    assert torch_backend
    dist.init_process_group(backend, init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    try:
        return call(*arguments)
    finally:
        dist.destroy_process_group()


def job(size: int, folder: Path, call: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Run a function in every rank of a job, and return the results."""
    return spawn(run, size, call, str(folder / "store"), backend, *arguments, threads=1)


def train_all(engine: str, names: Sequence[str]) -> dict[str, float]:
    cases = {name: Case(**{**vars(CASES[name]), "engine": engine}) for name in names}
    # FSDP2 averages what arrives through its units, not a term that is computed from the sharded parameters.
    return {name: train(case) for name, case in cases.items() if engine != "fsdp2" or not case.l2}


def check(size: int, folder: Path, engine: str, backend: str, names: Sequence[str] = tuple(CASES)) -> None:
    for found in job(size, folder, train_all, engine, names, backend=backend):
        assert {name: far for name, far in found.items() if not far < TOLERANCE} == {}


FEW = ("unequal", "accumulated", "ignored_labels", "fewer_samples_than_ranks")


@pytest.mark.parametrize(
    ("engine", "backend", "names"),
    [("ddp", "gloo", tuple(CASES)), ("by_hand", "gangline", FEW), ("fsdp2", "gloo", FEW[:2])],
)
def test_weights_after_20_steps_are_those_of_one_process(
    engine: str, backend: str, names: Sequence[str], tmp_path: Path
) -> None:
    check(2, tmp_path, engine, backend, names)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "gangline"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "by_hand"])
@pytest.mark.parametrize("size", [2, 3])
def test_weights_are_those_of_one_process_in_every_case(size: int, engine: str, backend: str, tmp_path: Path) -> None:
    check(size, tmp_path, engine, backend)


def one_step_in_bfloat16() -> float:
    data = Data()
    gradients = []
    for is_balanced in (True, False):
        net = network().float()
        if is_balanced:
            model = DistributedDataParallel(net)
            loader = gangline.balance(model, DataLoader(data, batch_size=24), loads=[3, 1])
            features, labels, _ = next(iter(loader))
        else:
            model, (features, labels, _) = net, data[:48]  # type: ignore[assignment]
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(model(features.float()), labels)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    balanced, expected = gradients
    return float((balanced - expected).norm() / expected.norm())


def test_under_autocast_the_gradient_is_within_the_rounding_of_bfloat16(tmp_path: Path) -> None:
    assert max(job(2, tmp_path, one_step_in_bfloat16)) < 2**-8


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


def test_a_resumed_epoch_reads_each_sample_once_with_another_number_of_ranks(tmp_path: Path) -> None:
    started = job(2, tmp_path, read, [3, 1], None, 4)
    state = started[0][0]
    assert (state["epoch"], state["samples"]) == (0, 32)
    (tmp_path / "store").unlink(missing_ok=True)
    resumed = job(3, tmp_path, read, [1, 2, 3], state, None)
    assert [found[0]["epoch"] for found in resumed] == [1, 1, 1]
    seen = [number for _, numbers in [*started, *resumed] for number in numbers]
    assert sorted(seen) == list(range(SAMPLES))


def resumed_weights(stop: int) -> list[Tensor]:
    """Train two epochs; after ``stop`` batches go on with a new model and loader, made of their saved states."""
    torch.manual_seed(7)
    model = DistributedDataParallel(network())
    loader = gangline.balance(model, DataLoader(Data(), batch_size=BATCH, shuffle=True), loads=[3, 1])
    optimizer, done = optimizer_of(model), 0
    while loader.epoch < 2:
        for features, labels, _ in loader:
            optimizer.zero_grad()
            mean_loss(model(features), labels).backward()
            optimizer.step()
            done += 1
            if done == stop:
                break
        if done == stop:
            states = (model.state_dict(), optimizer.state_dict(), loader.state_dict())
            random_state = torch.get_rng_state()
            model = DistributedDataParallel(network())
            optimizer = optimizer_of(model)
            loader = gangline.balance(model, DataLoader(Data(), batch_size=BATCH, shuffle=True), loads=[3, 1])
            for part, state in zip((model, optimizer, loader), states, strict=True):
                part.load_state_dict(state)
            torch.set_rng_state(random_state)
            done += 1
    return weights(model)


def both_ways() -> bool:
    at_once, resumed = resumed_weights(-1), resumed_weights(3)
    return all(torch.equal(one, other) for one, other in zip(at_once, resumed, strict=True))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert job(2, tmp_path, both_ways) == [True, True]


def train_past_the_wrapper() -> list[str]:
    model = DistributedDataParallel(network())
    loader = gangline.balance(model, DataLoader(Data(), batch_size=8), loads=[3, 1])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for features, labels, _ in loader:
            mean_loss(model.module(features), labels).backward()
    return [str(each.message) for each in found if "balance:" in str(each.message)]


def test_a_loop_that_does_not_call_the_model_is_warned_once(tmp_path: Path) -> None:
    for [text] in job(2, tmp_path, train_past_the_wrapper):
        assert text.startswith("balance: a batch was trained without calling the DistributedDataParallel")


class Hidden:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = network(), wrap

    def forward(self, features: Tensor) -> Any:
        return self.wrap(self.net(features))


def outputs_of_other_kinds() -> list[str]:
    texts = []
    data = Data()
    nested = Returns(lambda logits: {"out": [logits, None], "n": 3})
    loader = gangline.balance(nested, DataLoader(data, batch_size=8), loads=[3, 1])
    features, labels, _ = next(iter(loader))
    mean_loss(nested(features)["out"][0], labels).backward()
    weighted = torch.cat([parameter.grad.flatten() for parameter in nested.parameters() if parameter.grad is not None])
    nested.zero_grad()
    loader.close()
    mean_loss(nested(features)["out"][0], labels).backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in nested.parameters() if parameter.grad is not None])
    assert torch.allclose(weighted, plain * loader.weight)
    copy.deepcopy(nested)
    hidden = Returns(Hidden)
    features, labels, _ = next(iter(gangline.balance(hidden, DataLoader(data, batch_size=8), loads=[3, 1])))
    with pytest.raises(TypeError, match="returned a Hidden, whose tensors cannot be reached"):
        hidden(features)
    penalized = network()
    loader = gangline.balance(penalized, DataLoader(data, batch_size=8), loads=[3, 1])
    features, labels, _ = next(iter(loader))
    features.requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(penalized(features).sum(), features, create_graph=True)
    texts.append(f"{loader.weight:g}")
    assert torch.equal(penalized.eval()(features), copy.deepcopy(penalized)(features))
    return texts


def test_outputs_of_any_structure_are_weighted_or_refused(tmp_path: Path) -> None:
    assert job(2, tmp_path, outputs_of_other_kinds) == [["1.5"], ["0.5"]]
