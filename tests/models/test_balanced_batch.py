"""Batches of balanced networks: gradients, layers and gathered rows belong to the batch that the loop trains."""

from __future__ import annotations

import copy
import gc
import io
import logging.handlers
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn
from tests.models.unequal_jobs import gathered, join

DATA = TensorDataset(torch.arange(2.0, 17.0, 2.0).double().reshape(-1, 1))  # 2, 4, ..., 16: their mean is 9


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def loader_of(model: Any, **options: Any) -> gangline.BalancedLoader:
    return gangline.balance(model, DataLoader(DATA, batch_size=4), **{"loads": [3, 1], **options})


def averaged(*parameters: Tensor) -> list[float]:
    """Average gradients over the ranks, remove them, and return them."""
    found = []
    for parameter in parameters:
        assert parameter.grad is not None
        found.append(sum(gathered(parameter.grad.item())) / dist.get_world_size())
        parameter.grad = None
    return found


def two_loaders(*, compiled: bool) -> list[float]:
    """Return gradients of the mean of gathered rows, and of normalized ones for their scale; another loader is read."""
    a, b = Line(), Line()
    normalized = gangline.convert_sync_batchnorm(nn.Sequential(Line(), nn.BatchNorm1d(1).double()))
    normalized[0].weight.data.fill_(1)  # type: ignore[index]
    layers = torch.compile(normalized, backend="aot_eager") if compiled else normalized
    found = []
    loaders = loader_of([a, normalized]), loader_of(b, global_batch=5)
    for (x,), (u,) in zip(*loaders, strict=False):
        output, _ = a(x), b(u)
        gangline.gather_rows(output).mean().backward()
        (layers(x) * x.square()).mean().backward()
        found += averaged(a.weight, normalized[0].weight)  # type: ignore[index]
        with pytest.raises(RuntimeError, match="2 balanced loaders have a batch each, and for rows that no") as raised:
            gangline.gather_rows(x)
        assert "close() loaders that are not read any more" in str(raised.value)
        break
    for each in loaders:
        each.close()
    assert gangline.gather_rows(torch.ones(1)).tolist() == [1, 1]
    return found


def read_ahead(forward: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
    """Return the gradients of shares [4, 1] and [2, 1], whose means are 6 and 14; the loop reads ahead of backward."""
    network, found = Line(), []
    batches = iter(loader_of(network, global_batch=5))
    batch = next(batches)
    while batch is not None:
        loss = forward(network, batch[0]).mean()
        batch = next(batches, None)
        loss.backward()  # type: ignore[no-untyped-call]
        found += averaged(network.weight)
    return found


def in_step(forward: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
    """Return the gradients of a loop that leaves out its second batch of three, of which means are 4, 10 and 15."""
    network, found = Line(), []
    for number, (x,) in enumerate(loader_of(network, global_batch=3)):
        if number != 1:
            forward(network, x).mean().backward()  # type: ignore[no-untyped-call]
            found += averaged(network.weight)
    return found


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "forward": lambda network, x: network(x),
    "another method": lambda network, x: network.forward(x),
    "checkpoint": lambda network, x: checkpoint(network, x, use_reentrant=False),
    "reentrant checkpoint": lambda network, x: checkpoint(network, x.requires_grad_(), use_reentrant=True),
}


def copies(loads: Any) -> list[float]:
    model = DistributedDataParallel(nn.Sequential(Line(), nn.BatchNorm1d(1).double()))
    for (x,) in loader_of(model, loads=loads):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False).module
        other = copy.deepcopy(model.module)
        for network in (other, loaded):
            network(x).sum().backward()
            assert network[0].weight.grad is not None
    hooks = [*loaded._forward_pre_hooks.values(), *other._forward_pre_hooks.values()]
    assert all(getattr(hook, "__self__", hook).__dict__.keys() <= {"_owner"} for hook in hooks)
    return [loaded(x).sum().item(), other(x).sum().item()]


def not_given() -> list[Any]:
    """Return the error of an optimizer with a parameter that balance() was not given, and gradients where it was."""
    found: list[Any] = []
    for given in (False, True):
        network, scale, left_out = Line(), nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.zeros(9))
        loader = loader_of([network, [scale]] if given else network)
        optimizer = torch.optim.SGD([*network.parameters(), scale, left_out], lr=0.0)
        for (x,) in loader:
            (network(x) + scale * x).mean().backward()
            if given:
                optimizer.step()
                found += averaged(network.weight, scale)
            else:
                with pytest.raises(RuntimeError) as raised:
                    optimizer.step()
                found.append(str(raised.value))
    return found


def inner_loop() -> int:
    """Return how often new optimizers of copies of the network look through all objects."""
    network, looks = Line(), []
    sys.setprofile(lambda _frame, event, called: looks.append(event) if called is gc.get_objects else None)
    try:
        for (x,) in loader_of(network, global_batch=2):
            inner = copy.deepcopy(network)
            inner(x).mean().backward()
            torch.optim.SGD(inner.parameters(), lr=0.1).step()
    finally:
        sys.setprofile(None)
    return looks.count("c_call")


def label_warnings(labels: Sequence[int], loss: nn.Module, **options: Any) -> list[str]:
    """Return the warnings of a loop whose labels are these on all ranks."""
    network = nn.Linear(1, 3)
    data = TensorDataset(torch.ones(8, 1), torch.tensor(labels * 4))
    records = logging.handlers.MemoryHandler(99)
    logging.getLogger("gangline").addHandler(records)
    for x, y in gangline.balance(network, DataLoader(data, batch_size=1), loads=[1, 1], **options):
        loss(network(x), y).backward()
    logging.getLogger("gangline").removeHandler(records)
    assert sys.getprofile() is None
    return [record.getMessage() for record in records.buffer]


LOSSES: dict[str, tuple[Sequence[int], nn.Module, dict[str, Any], bool]] = {
    "ignored labels": ([1, -100], nn.CrossEntropyLoss(), {}, True),
    "ignored class": ([1, 2], nn.NLLLoss(ignore_index=2), {}, True),
    "class weights": ([1, 2], nn.CrossEntropyLoss(weight=torch.ones(3)), {}, True),
    "all labels": ([1, 2], nn.CrossEntropyLoss(ignore_index=-1), {}, False),
    "sum": ([1, -100], nn.CrossEntropyLoss(reduction="sum"), {}, False),
    "count": ([1, -100], nn.CrossEntropyLoss(), {"count": lambda batch: (batch[1] != -100).sum()}, False),
}
"""Labels, loss and options, and whether a warning is expected."""


def collated(collate: Callable[[list[Any]], Any], batch_size: int = 4, **options: Any) -> list[Any]:
    """Return the gradients of means over what a collate function leaves of samples 1 to 8, or the error."""
    network, found = Line(), []
    data: Any = [torch.tensor([number]).double() for number in range(1, 9)]
    try:
        loader = DataLoader(data, batch_size, collate_fn=collate)
        for batch in gangline.balance(network, loader, loads=[3, 1], **options):
            x = batch if isinstance(batch, Tensor) else batch[0]
            network(x.reshape(-1, 1)).mean().backward()
            found += averaged(network.weight)
    except ValueError as error:
        found.append(str(error))
    return found


def small(samples: list[Tensor]) -> Tensor:
    return torch.cat([x[None] for x in samples if x <= 7] or [torch.zeros(0, 1).double()])


COLLATED: dict[str, tuple[Callable[[list[Any]], Any], dict[str, Any], list[Any]]] = {
    "dropped": (small, {}, [4]),
    "dropped of a pair": (lambda samples: [small(samples), torch.zeros(len(small(samples)))], {}, [4]),
    "dropped later": (small, {"batch_size": 2}, [2.5, 6]),
    "two views": (lambda samples: torch.cat(samples * 2), {}, [4.5]),
    "rows unknown": (lambda samples: [torch.stack(samples), torch.zeros(1), "text"], {}, [4.5]),
    "time first": (lambda samples: torch.stack(samples).expand(-1, 3).t(), {"count": lambda x: x.shape[1]}, [4.5]),
    "time first, no count": (lambda samples: torch.stack(samples).expand(-1, 3).t(), {}, ["[6, 2]", "[3, 3]"]),
}
"""Collate function, options, and the gradients or parts of the error."""


def drift(way: str) -> str:
    """Return the error of a loop whose steps leave out the average of gradients in this way, or do not."""
    network = Line()
    model: nn.Module = network
    if way == "fsdp2":
        model = fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    elif way != "alone":
        model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    if way == "in backward":
        network.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    called = network if way == "past the wrapper" else model
    try:
        for number, (x,) in enumerate(loader_of(model, global_batch=2, loads=[1, 1])):
            with model.no_sync() if way == "no_sync" and number % 2 else nullcontext():  # type: ignore[operator]
                called(x).mean().backward()
            if way not in ("no_sync", "in backward") or number % 2:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


DRIFTS = ("alone", "past the wrapper", "no_sync", "in backward")


def run(comm: Communicator, path: str) -> dict[str, Any]:
    join(comm, path, "gangline")
    try:
        found = {f"read ahead, {name}": read_ahead(forward) for name, forward in FORWARDS.items()}
        found |= {f"in step, {name}": in_step(forward) for name, forward in FORWARDS.items()}
        found |= {
            "not given": not_given(),
            "inner loop": inner_loop(),
            "two loaders": two_loaders(compiled=False),
        }
        found |= {f"labels, {name}": label_warnings(*case[:2], **case[2]) for name, case in LOSSES.items()}
        found |= {f"collated, {name}": collated(case[0], **case[1]) for name, case in COLLATED.items()}
        found |= {f"drift, {way}": drift(way) for way in (*DRIFTS, "ddp", "fsdp2")}
        return found | {"copies": [copies(loads) for loads in ([3, 1], "auto")]}
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(run, 2, str(tmp_path_factory.mktemp("job") / "store"), threads=1)


def test_with_two_balanced_loaders_rows_and_layers_have_the_weight_of_their_own(job: list[dict[str, Any]]) -> None:
    for each in job:
        assert each["two loaders"] == pytest.approx([9, 0], abs=1e-3)


def run_compiled(comm: Communicator, path: str) -> list[float]:
    join(comm, path, "gangline")
    try:
        return two_loaders(compiled=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_compiled_layers_have_the_weight_of_their_own_loader(tmp_path: Path) -> None:
    assert spawn(run_compiled, 2, str(tmp_path / "store"), threads=1) == [pytest.approx([9, 0], abs=1e-3)] * 2


@pytest.mark.parametrize("name", FORWARDS)
def test_a_gradient_has_the_weight_of_the_batch_of_its_forward(name: str, job: list[dict[str, Any]]) -> None:
    for each in job:
        assert each[f"read ahead, {name}"] == pytest.approx([6, 14])
        assert each[f"in step, {name}"] == pytest.approx([4, 15])


def test_an_optimizer_of_the_network_and_of_parameters_that_were_not_given_is_an_error(job: Any) -> None:
    for text, *gradients in (each["not given"] for each in job):
        assert "steps the network, and also other parameters that balance() was not given, of shapes (1,), so" in text
        assert "write balance([network, other_network, parameter], loader)" in text
        assert gradients == pytest.approx([9, 9])


def test_optimizers_of_an_inner_loop_are_looked_up_once(job: list[dict[str, Any]]) -> None:
    assert [each["inner loop"] for each in job] == [1, 1]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_ignores_or_weights_labels_without_a_count_is_warned_of(
    name: str, job: list[dict[str, Any]]
) -> None:
    texts = [text for each in job for text in each[f"labels, {name}"]]
    assert len(texts) == (LOSSES[name][-1] and (1 if "ignored" in name else 2))
    assert all("ignores or weights labels" in text and "pass count=" in text for text in texts)


@pytest.mark.parametrize("name", COLLATED)
def test_samples_that_collate_drops_do_not_count(name: str, job: list[dict[str, Any]]) -> None:
    expected = COLLATED[name][2]
    for found in (each[f"collated, {name}"] for each in job):
        if "no count" in name:
            assert all(part in found[0] for part in [*expected, "pass count=", "count=len"])
        else:
            assert found == pytest.approx(expected)


@pytest.mark.parametrize("way", DRIFTS)
def test_replicas_that_drift_apart_are_an_error_on_all_ranks(way: str, job: list[dict[str, Any]]) -> None:
    for each in job:
        assert each[f"drift, {way}"].startswith(f"balance: before global batch {1 + (way == 'no_sync')} the optimizer")
        assert "must average gradients before the step" in each[f"drift, {way}"]
        assert each["drift, ddp"] == each["drift, fsdp2"] == ""


def test_a_balanced_model_can_be_saved_and_copied_whole(job: list[dict[str, Any]]) -> None:
    assert [each["copies"] for each in job] == [[[0, 0], [0, 0]]] * 2
