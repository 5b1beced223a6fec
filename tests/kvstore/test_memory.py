"""Tests of memory in bytes and of counted tensor operations, of stores of one process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gangline.kvstore import KVStore
from tests.kvstore.keyed import held
from tests.operations import Operations

pytestmark = pytest.mark.usefixtures("only_what_the_test_makes")

KEYS = ["a", "b", 3]
SHAPES = [(64, 33), (128,), (7, 5, 3)]
WEIGHTS = sum(4 * torch.Size(shape).numel() for shape in SHAPES)
"""Bytes of one copy of the weights, or of the gradients."""
MOMENTUM = ("sgd", {"lr": 0.1, "momentum": 0.9})


def values(devices: int) -> list[list[torch.Tensor]]:
    """Return each key's tensors, one per device; element i of the d-th holds (i + d) / 1000."""
    numbers = [torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in SHAPES]
    return [[(of_key + device) / 1000 for device in range(devices)] for of_key in numbers]


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in SHAPES]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_without_an_updater_a_store_holds_the_weights_only(kv: KVStore, devices: int) -> None:
    given, grads, outs = zeros(), values(devices), values(devices)
    before = held()
    kv.init(KEYS, given)
    assert held() - before == WEIGHTS
    for _ in range(3):
        kv.push(KEYS, grads)
        kv.pull(KEYS, outs)
        kv.pushpull(KEYS, grads, outs)
        kv.pushpull(KEYS, grads)
    assert held() - before == WEIGHTS


def subtract(key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
    stored.sub_(summed)


@pytest.mark.parametrize(
    ("spec", "copies_of_state", "sum_of_one", "step_counts"),
    [
        (("sgd", {"lr": 0.1, "wd": 0.1}), 0, False, 0),
        (MOMENTUM, 1, False, 0),
        ("adam", 2, False, 4 * len(KEYS)),
        (subtract, 0, True, 0),
    ],
    ids=["sgd with decay", "sgd with momentum", "adam", "updater"],
)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_store_holds_the_weights_one_sum_over_devices_and_the_state(
    kv: KVStore, devices: int, spec: Any, copies_of_state: int, sum_of_one: bool, step_counts: int
) -> None:
    given, grads, outs = zeros(), values(devices), values(devices)
    before = held()
    kv.init(KEYS, given)
    (kv.set_updater if spec is subtract else kv.set_optimizer)(spec)
    assert held() - before == WEIGHTS
    for _ in range(3):
        kv.push(KEYS, grads)
        kv.pull(KEYS, outs)
        assert held() - before == WEIGHTS * (1 + (devices > 1 or sum_of_one) + copies_of_state) + step_counts


def push_one_key(kv: KVStore, grads: list[list[torch.Tensor]]) -> None:
    kv.push(KEYS[1], grads[1])


def push_to_another_optimizer(kv: KVStore, grads: list[list[torch.Tensor]]) -> None:
    kv.push(KEYS, grads)
    kv.set_optimizer(("sgd", {"lr": 0.1}))
    kv.push(KEYS, grads)


def load_the_state(kv: KVStore, grads: list[list[torch.Tensor]]) -> None:
    kv.push(KEYS, grads)
    kv.load_optimizer_state(kv.optimizer_state())


def close(kv: KVStore, grads: list[list[torch.Tensor]]) -> None:
    kv.set_gradient_compression({"type": "2bit"})
    kv.push(KEYS, grads)
    for work in [kv.push(key, grads[index], async_op=True) for index, key in enumerate(KEYS)]:
        work.wait(20)
    kv.close()


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (push_one_key, WEIGHTS + 2 * 4 * 128),  # only this key has a sum and a state
        (push_to_another_optimizer, WEIGHTS * 2),  # the state of the first one is freed
        (load_the_state, WEIGHTS * 3),
        (close, 0),
    ],
)
def test_sums_and_states_are_held_once_and_as_long_as_they_are_used(
    kv: KVStore, use: Callable[[KVStore, list[list[torch.Tensor]]], None], expected: int
) -> None:
    given, grads = zeros(), values(2)
    before = held()
    kv.init(KEYS, given)
    kv.set_optimizer(MOMENTUM)
    use(kv, grads)
    assert held() - before == expected


def test_half_precision_keeps_no_wide_sum(kv: KVStore) -> None:
    given = torch.zeros(1000, dtype=torch.float16)
    grads = [torch.ones(1000, dtype=torch.float16) for _ in range(4)]
    before = held()
    kv.init("w", given)
    kv.push("w", grads)
    kv.pushpull("w", grads)
    assert held() - before == given.nbytes


def test_a_finished_push_releases_the_pushed_tensors(kv: KVStore) -> None:
    kv.init(KEYS, zeros())
    kv.set_optimizer(MOMENTUM)
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


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_calls_cost_one_add_per_key_and_further_device_and_one_copy_per_out(kv: KVStore, devices: int) -> None:
    kv.init(KEYS, zeros())
    added, copied = {"add": (devices - 1) * len(KEYS)}, {"copy": devices * len(KEYS)}
    calls: list[tuple[Callable[..., Any], int, dict[str, int]]] = [
        (kv.push, 1, added if devices > 1 else {"copy": len(KEYS)}),
        (kv.pull, 1, copied),
        *[(kv.pushpull, number, added | copied) for number in (1, 2) if devices > 1],  # in place, and into others
    ]
    for call, number, counts in calls:
        tensors = [values(devices) for _ in range(number)]
        with Operations() as operations:
            call(KEYS, *tensors)
        assert operations.counts == counts


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_plain_sgd_costs_the_sum_and_one_add_per_key(kv: KVStore, devices: int) -> None:
    kv.init(KEYS, zeros())
    kv.set_optimizer(("sgd", {"lr": 0.1}))
    grads = values(devices)
    kv.push(KEYS, grads)
    with Operations() as operations:
        kv.push(KEYS, grads)
    assert operations.counts == {"add": devices * len(KEYS)}
