"""What CPU contexts cannot show: streams, copies between host and GPU, and that the device store never waits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from measure import distance
from torch import nn

from collectives.devices import device_table
from gangline import Context, Module, contexts, cpu, gpu, num_gpus
from kvstore import create

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here"),
]
ELEMENTS = 1 << 20


def lists_of_contexts() -> list[list[Context]]:
    found = [[gpu(0), gpu(0)], [gpu(0), cpu(0)]]
    return found + ([[gpu(index) for index in range(num_gpus())]] if num_gpus() > 1 else [])


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Make every synchronisation of the host with a GPU an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("store", ["local", "device"])
def test_float64_weights_are_those_of_one_device(store: str) -> None:
    data, label = torch.randn(50, 12).double(), torch.randint(5, (50,))
    network = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    for places in lists_of_contexts():
        reference, own = copy.deepcopy(network), copy.deepcopy(network)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        with Module(own, nn.CrossEntropyLoss(), places, list(range(len(places), 0, -1))) as module:
            module.init_optimizer(store, "sgd", {"lr": 0.1, "momentum": 0.9})
            for _ in range(20):
                module.forward_backward_update(data, label)
                optimizer.zero_grad()
                nn.functional.cross_entropy(reference(data), label).backward()
                optimizer.step()
            assert distance(module.get_params(), reference.state_dict()) <= 1e-11


@pytest.mark.usefixtures("_no_waiting")
def test_the_device_store_orders_by_streams_and_never_waits_on_the_host() -> None:
    device = gpu(0).torch_device
    with create("device") as store:
        store.init("w", torch.zeros(ELEMENTS, device=device))
        store.set_optimizer(("sgd", {"lr": 1.0}))
        out = torch.empty(ELEMENTS, device=device)
        for step in range(1, 6):
            values = [torch.full((ELEMENTS,), float(step + place), device=device) for place in range(3)]
            torch.cuda._sleep(5_000_000)  # the caller's stream is behind: what is pushed is not there yet
            for value in values:
                value.mul_(2)
            store.push("w", values)
            for value in values:
                value.zero_()  # after the push they are the caller's again
            store.pull("w", out)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.cpu(), torch.full((ELEMENTS,), -2.0 * sum(3 * step + 3 for step in range(1, 6))))


def test_asynchronous_operations_are_waited_for_by_streams() -> None:
    device = gpu(0).torch_device
    with create("device") as store:
        store.init("w", torch.zeros(ELEMENTS, device=device))
        values = [torch.full((ELEMENTS,), 3.0, device=device), torch.full((ELEMENTS,), 4.0, device=device)]
        out = [torch.empty(ELEMENTS, device=device) for _ in range(2)]
        store.push("w", values, async_op=True)
        work = store.pull("w", out, async_op=True)
        work.wait()
        assert all(torch.equal(one.cpu(), torch.full((ELEMENTS,), 7.0)) for one in out)


def test_random_layers_repeat_on_a_gpu_listed_twice() -> None:
    found = []
    for _ in range(2):
        with Module(nn.Dropout(0.5), context=[gpu(0), gpu(0)]) as module:
            module.forward(torch.ones(8, 100), is_train=True)
            found.append(module.get_outputs().cpu())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][:4], found[0][4:])


def test_contexts_and_the_device_table_name_the_gpus() -> None:
    assert contexts("auto") == [gpu(0)]
    assert contexts("multi-gpu") == [gpu(index) for index in range(num_gpus())]
    rows = device_table()
    assert [row.context for row in rows] == ["cpu(0)", *(f"gpu({index})" for index in range(num_gpus()))]
    assert all(0 < row.memory_free <= row.memory_total for row in rows)
