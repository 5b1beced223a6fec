"""Module on GPUs: streams, copies between host and GPU, and no synchronisation in the device store."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from measure import distance, plain_loop, replicas_are_equal, same_bits
from torch import nn

from gangline import Context, Module, contexts, cpu, gpu, num_gpus
from gangline.doctor.inventory import device_table
from gangline.kvstore import create
from gangline.kvstore.device import DeviceStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here"),
]
ELEMENTS = 1 << 20
CLASSES = 5


def lists_of_contexts() -> list[list[Context]]:
    found = [[gpu(0), gpu(0)], [gpu(0), cpu(0)]]
    return found + ([[gpu(index) for index in range(num_gpus())]] if num_gpus() > 1 else [])


def groups_of_gpus() -> list[list[Context]]:
    return [places for places in lists_of_contexts() if all(place.device_type == "gpu" for place in places)]


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Make every synchronisation of the host with a GPU an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
def test_the_device_store_orders_by_streams_and_never_waits_on_the_host() -> None:
    device = gpu(0).torch_device
    with create("device") as store:
        store.init("w", torch.zeros(ELEMENTS, device=device))
        store.set_optimizer(("sgd", {"lr": 1.0}))
        out = torch.empty(ELEMENTS, device=device)
        for step in range(1, 6):
            values = [torch.full((ELEMENTS,), float(step + place), device=device) for place in range(3)]
            torch.cuda._sleep(5_000_000)  # the caller's stream is late: the pushed values are not computed yet
            for value in values:
                value.mul_(2)
            store.push("w", values)
            for value in values:
                value.zero_()  # after the push the caller may change them
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_half_precision_and_keeps_float32_weights(dtype: torch.dtype) -> None:
    label = torch.randint(CLASSES, (64,))
    data = torch.randn(CLASSES, 32)[label] * 2 + torch.randn(64, 32)
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    losses = []
    for places in [[gpu(0)], *lists_of_contexts()]:
        with Module(copy.deepcopy(network), nn.CrossEntropyLoss(), places, autocast=dtype) as module:
            module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
            for _ in range(30):
                module.forward_backward_update(data, label)
                assert module.get_outputs().dtype == dtype
            losses.append(float(module.get_loss()))
            replicas_are_equal(module)
            assert all(value.dtype == torch.float32 for value in module.get_params().values())
            states = module.optimizer_state().tensors.values()
            assert all(value.dtype == torch.float32 for value in states)
            assert (module.loss_scale is not None) == (dtype == torch.float16)
    assert max(losses) < 0.2
    assert max(losses) - min(losses) < 0.02


def test_a_float16_step_that_overflows_is_skipped_on_every_gpu() -> None:
    for places in groups_of_gpus():
        with Module(nn.Linear(8, CLASSES), nn.CrossEntropyLoss(), places, autocast=torch.float16) as module:
            module.init_optimizer("device", "sgd", {"lr": 0.1})
            before, scale = module.get_params(), module.loss_scale
            assert scale is not None
            scale.value = 2.0**40
            data, label = torch.randn(8, 8), torch.randint(CLASSES, (8,))
            module.forward_backward_update(data, label)
            assert scale.value == 2.0**39
            assert distance(module.get_params(), before) == 0
            scale.value = 2.0**10
            module.forward_backward_update(data, label)
            assert distance(module.get_params(), before) > 0
            replicas_are_equal(module)


def test_two_bits_of_gpus_are_those_of_cpu_contexts() -> None:
    """All numbers are multiples of powers of two, which no kernel rounds; so the bits are equal on any device."""
    network = nn.Linear(6, 4).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape) / 4)
    batches = [(torch.randint(-4, 5, (16, 6)) / 4, torch.randint(-8, 9, (16, 4)) / 4) for _ in range(20)]
    for places in lists_of_contexts():
        found = []
        for contexts_of_run in (places, [cpu(index) for index in range(len(places))]):
            params = {"type": "2bit", "threshold": 2.0**-4}
            loss = nn.MSELoss()
            own = copy.deepcopy(network)
            with Module(own, loss, contexts_of_run, compression_params=params) as module:
                module.init_optimizer("device", "sgd", {"lr": 0.5})
                for data, label in batches:
                    module.forward_backward_update(data.double(), label.double())
                found.append(module.get_params() | module.compression_residuals())
        assert same_bits(*found)


def test_a_step_never_has_the_host_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels on the host are counted there; the first two steps create buckets, streams and kernels."""
    monkeypatch.setattr("gangline.kvstore.reducer.reducer.BUCKET_BYTES", 1 << 16)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    for places in groups_of_gpus():
        torch.manual_seed(0)
        network = nn.Sequential(*copy.deepcopy(layers), nn.Linear(128, CLASSES))
        batches = [(torch.randn(32, 128).pin_memory(), torch.randint(CLASSES, (32,)).pin_memory()) for _ in range(6)]
        with Module(network, nn.CrossEntropyLoss(), places) as module:
            module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
            for number, (data, label) in enumerate(batches):
                if number == 2:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    module.forward_backward_update(data, label)
                finally:
                    if number in (0, 1, len(batches) - 1):
                        torch.cuda.set_sync_debug_mode("default")
            replicas_are_equal(module)


class Early(DeviceStore):
    """Records the keys pushed before every replica's backward had reached its first layer."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas
        self.arrived: list[int] = []
        self.early: set[Any] = set()

    def _push_bucket(self, bucket: Any, values: Any, keys: Any, *arguments: Any) -> Any:
        if len(self.arrived) < self.replicas:
            self.early.update(keys)
        return super()._push_bucket(bucket, values, keys, *arguments)


def test_buckets_leave_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.kvstore.reducer.reducer.BUCKET_BYTES", 1 << 12)
    for places in groups_of_gpus():
        network = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        with Early(len(places)) as store, Module(network, nn.CrossEntropyLoss(), places) as module:
            module.init_optimizer(store, "sgd", {"lr": 0.1})
            data, label = torch.randn(16, 32), torch.randint(CLASSES, (16,))
            module.forward_backward_update(data, label)
            store.early.clear()  # the first step only records the order
            for replica in module.bound.replicas.all:
                replica.network.get_parameter("0.weight").register_hook(
                    lambda _, store=store, number=replica.context_index: store.arrived.append(number)
                )
            module.forward_backward_update(data, label)
            assert sorted(store.arrived) == list(range(len(places)))
            assert {"4.weight", "4.bias"} <= store.early
            assert "0.weight" not in store.early
            replicas_are_equal(module)


class Spin(nn.Module):
    """Layer that keeps the GPU busy for each sample; the host continues at once."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if data.is_cuda and self.training:
            torch.cuda._sleep(1_000_000 * len(data))
        return data


def test_auto_measures_a_gpus_own_time_and_not_the_hosts(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.Linear(12, 16), Spin(), nn.Linear(16, CLASSES)).double()
    batches = [(torch.randn(32, 12).double(), torch.randint(CLASSES, (32,))) for _ in range(6)]
    expected = plain_loop(network, batches * 3, lr=0.05)
    with (
        caplog.at_level(logging.INFO, "gangline"),
        Module(network, nn.CrossEntropyLoss(), [gpu(0), cpu(0)], "auto") as module,
    ):
        module.init_optimizer("device", "sgd", {"lr": 0.05})
        module.fit(batches, num_epoch=3)
        assert module.work_load_list[0] < 0.3 < module.work_load_list[1]
        assert distance(module.get_params(), expected) <= 1e-9
    assert any(line.startswith("work_load_list auto: gpu(0) 0.") for line in caplog.messages)


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Limit torch on the first GPU to 256 MiB more than it has allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + (256 << 20)) / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_little_memory")
def test_auto_runs_a_batch_that_does_not_fit_in_micro_steps(caplog: pytest.LogCaptureFixture) -> None:
    layers = [layer for _ in range(8) for layer in (nn.Tanh(), nn.Sigmoid())]  # each keeps 128 MiB of a whole batch
    network = nn.Sequential(*layers, nn.Linear(1 << 14, CLASSES))
    data, label = torch.randn(2048, 1 << 14), torch.randint(CLASSES, (2048,))
    expected = plain_loop(network, [(data, label)] * 2, lr=0.01)
    with caplog.at_level(logging.INFO, "gangline"), Module(network, nn.CrossEntropyLoss(), [gpu(0)], "auto") as module:
        module.init_optimizer(None, "sgd", {"lr": 0.01})
        for _ in range(2):
            module.forward_backward_update(data, label)
        most = module.load_balancer.limits.max_samples[0]
        assert most is not None
        assert 1 <= most <= 1024
        assert distance(module.get_params(), expected) <= 1e-4
        assert module.get_outputs().shape == (2048, CLASSES)
    assert 1 <= sum("gpu(0) ran out of memory with" in line for line in caplog.messages) <= 9


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
