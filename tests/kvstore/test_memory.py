"""Tests of memory in bytes and of counted tensor operations, of stores of one process."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gangline.kvstore import KVStore, create

KEYS = ["a", "b", 3]
SHAPES = [(64, 33), (128,), (7, 5, 3)]
WEIGHTS = sum(4 * torch.Size(shape).numel() for shape in SHAPES)
"""Bytes of one copy of the weights, or of the gradients."""


@pytest.fixture(autouse=True)
def _only_what_the_test_makes() -> Iterator[None]:
    """Freeze existing objects for the garbage collector: scanning all of torch each time takes long."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["local", "device"])
def kv(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with create(request.param) as made:
        yield made


def held() -> int:
    """Return the bytes of all storages that tensors made in this test keep alive."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout == torch.strided and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def values(devices: int, rank: int = 0) -> list[list[torch.Tensor]]:
    """Return each key's tensors, one per device; element i of the d-th holds (i + rank + d) / 1000."""
    return [
        [(torch.arange(torch.Size(shape).numel()).reshape(shape) + rank + device) / 1000 for device in range(devices)]
        for shape in SHAPES
    ]


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in SHAPES]


class Operations(TorchDispatchMode):
    """Counts torch's sums ("add") and copies ("copy")."""

    NAMES: ClassVar = {"add": "add", "add_": "add", "sum": "add", "copy_": "copy", "clone": "copy", "_to_copy": "copy"}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.counts[self.NAMES[name]] += 1
        return func(*args, **(kwargs or {}))


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_the_counter_counts_each_storage_once() -> None:
    before = held()
    tensor = torch.zeros(1000)
    views = [tensor[10:], tensor.reshape(10, 100), tensor.detach()]
    assert held() - before == 4000
    copies = [tensor.clone(), tensor.half()]
    assert held() - before == 10000
    del tensor, views, copies
    assert held() == before


def test_init_holds_one_copy_of_the_weights(kv: KVStore) -> None:
    given = zeros()
    before = held()
    kv.init(KEYS, given)
    assert held() - before == WEIGHTS


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_without_an_updater_a_store_holds_the_weights_only(kv: KVStore, devices: int) -> None:
    given, grads, outs = zeros(), values(devices), values(devices)
    before = held()
    kv.init(KEYS, given)
    for _ in range(3):
        kv.push(KEYS, grads)
        kv.pull(KEYS, outs)
        kv.pushpull(KEYS, grads, outs)
        kv.pushpull(KEYS, grads)
    assert held() - before == WEIGHTS


@pytest.mark.parametrize(
    ("spec", "copies_of_state"),
    [
        (("sgd", {"lr": 0.1}), 0),
        (("sgd", {"lr": 0.1, "wd": 0.1}), 0),
        (("sgd", {"lr": 0.1, "momentum": 0.9}), 1),
        (("nag", {"lr": 0.1, "momentum": 0.9}), 1),
    ],
    ids=["sgd", "sgd with decay", "sgd with momentum", "nag"],
)
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_add_the_weights_one_sum_and_the_state(
    kv: KVStore, devices: int, spec: Any, copies_of_state: int
) -> None:
    given, grads, outs = zeros(), values(devices), values(devices)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer(spec)
    assert held() - before == WEIGHTS
    for _ in range(3):
        kv.push(KEYS, grads)
        kv.pull(KEYS, outs)
        assert held() - before == WEIGHTS * (2 + copies_of_state)


@pytest.mark.parametrize(
    ("spec", "copies_of_state"), [(("sgd", {"lr": 0.1}), 0), (("sgd", {"lr": 0.1, "momentum": 0.9}), 1)]
)
def test_one_device_adds_no_copy_of_the_gradients(kv: KVStore, spec: Any, copies_of_state: int) -> None:
    given, grads = zeros(), values(1)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer(spec)
    for _ in range(3):
        kv.push(KEYS, grads)
        assert held() - before == WEIGHTS * (1 + copies_of_state)


@pytest.mark.parametrize("devices", [1, 2])
def test_adam_adds_two_copies_and_its_step_counts(kv: KVStore, devices: int) -> None:
    given, grads = zeros(), values(devices)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer("adam")
    for _ in range(3):
        kv.push(KEYS, grads)
    assert held() - before == WEIGHTS * (3 + (devices > 1)) + 4 * len(KEYS)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_updater_adds_one_sum(kv: KVStore, devices: int) -> None:
    given, grads = zeros(), values(devices)
    before = held()
    kv.init(KEYS, given)
    kv.set_updater(lambda key, summed, stored: stored.sub_(summed))
    for _ in range(3):
        kv.push(KEYS, grads)
    assert held() - before == WEIGHTS * 2


def test_only_pushed_keys_hold_a_sum_and_a_state(kv: KVStore) -> None:
    given, grads = zeros(), values(2)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer(("sgd", {"lr": 0.1, "momentum": 0.9}))
    kv.push(KEYS[1], grads[1])
    assert held() - before == WEIGHTS + 2 * grads[1][0].nbytes


def test_a_new_optimizer_drops_the_state_of_the_one_before(kv: KVStore) -> None:
    given, grads = zeros(), values(2)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer("adam")
    kv.push(KEYS, grads)
    kv.set_optimizer(("sgd", {"lr": 0.1}))
    kv.push(KEYS, grads)
    assert held() - before == WEIGHTS * 2


def test_loading_a_state_holds_it_once(kv: KVStore) -> None:
    given, grads = zeros(), values(2)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer(("sgd", {"lr": 0.1, "momentum": 0.9}))
    kv.push(KEYS, grads)
    kv.load_optimizer_state(kv.optimizer_state())
    assert held() - before == WEIGHTS * 3


def test_half_precision_keeps_no_wide_sum(kv: KVStore) -> None:
    given = torch.zeros(1000, dtype=torch.float16)
    grads = [torch.ones(1000, dtype=torch.float16) for _ in range(4)]
    before = held()
    kv.init("w", given)
    kv.push("w", grads)
    kv.pushpull("w", grads)
    assert held() - before == given.nbytes


def test_close_frees_all_memory(kv: KVStore) -> None:
    given, grads = zeros(), values(2)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer("adam")
    kv.push(KEYS, grads)
    works = [kv.push(key, grads[index], async_op=True) for index, key in enumerate(KEYS)]
    for work in works:
        work.wait(20)
    kv.close()
    assert held() == before


def test_a_finished_push_releases_the_pushed_tensors(kv: KVStore) -> None:
    kv.init(KEYS, zeros())
    kv.set_optimizer(("sgd", {"lr": 0.1, "momentum": 0.9}))
    grads = values(2)
    before = held()
    kv.push(KEYS, grads)
    of_store = held() - before
    del grads
    assert held() - before == of_store - 2 * WEIGHTS


def test_a_finished_async_push_releases_the_pushed_arrays(kv: KVStore) -> None:
    kv.init("w", torch.zeros(1000))
    gone = threading.Event()
    array = np.ones(1000, np.float32)
    weakref.finalize(array, gone.set)
    work = kv.push("w", array, async_op=True)
    work.wait(20)
    del array
    assert gone.wait(2), "the store keeps the pushed array after wait()"


# -- operations -------------------------------------------------------------------------------------------------------


def test_pushpull_over_two_devices_costs_one_add_per_key_and_one_copy_per_out(kv: KVStore) -> None:
    kv.init(KEYS, zeros())
    grads, outs = values(2), values(2, rank=9)
    with Operations() as operations:
        kv.pushpull(KEYS, grads, outs)
    assert operations.counts == {"add": len(KEYS), "copy": 2 * len(KEYS)}
    with Operations() as operations:
        kv.pushpull(KEYS, grads)
    assert operations.counts == {"add": len(KEYS), "copy": 2 * len(KEYS)}
    assert all(torch.equal(grad, out) for g, o in zip(grads, outs, strict=True) for grad, out in zip(g, o, strict=True))


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_push_costs_one_add_per_further_device(kv: KVStore, devices: int) -> None:
    kv.init(KEYS, zeros())
    grads = values(devices)
    with Operations() as operations:
        kv.push(KEYS, grads)
    assert operations.counts == ({"add": (devices - 1) * len(KEYS)} if devices > 1 else {"copy": len(KEYS)})


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_pull_costs_one_copy_per_out(kv: KVStore, devices: int) -> None:
    kv.init(KEYS, zeros())
    outs = values(devices)
    with Operations() as operations:
        kv.pull(KEYS, outs)
    assert operations.counts == {"copy": devices * len(KEYS)}


def test_init_costs_one_copy_per_key(kv: KVStore) -> None:
    given = zeros()
    with Operations() as operations:
        kv.init(KEYS, given)
    assert operations.counts == {"copy": len(KEYS)}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_plain_sgd_costs_the_sum_and_one_add_per_key(kv: KVStore, devices: int) -> None:
    kv.init(KEYS, zeros())
    kv.set_optimizer(("sgd", {"lr": 0.1}))
    grads = values(devices)
    kv.push(KEYS, grads)
    with Operations() as operations:
        kv.push(KEYS, grads)
    assert operations.counts == {"add": devices * len(KEYS)}
