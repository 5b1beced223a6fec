"""Tests of the stores of one process: values, keys, devices, updaters, asynchronous calls, create and register."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.collectives import Work
from gangline.kvstore import KVStore, create, register
from gangline.kvstore import registry as stores
from gangline.kvstore.local import LocalStore

NAMES = ["local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device"]
LIMIT = 20.0
"""Time limit of a wait, in seconds."""


@pytest.fixture(params=NAMES)
def kv(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with create(request.param) as made:
        yield made


def ranked(rank: int, shape: tuple[int, ...] = (2, 3), stride: int = 10) -> torch.Tensor:
    """Element i of rank r holds i * stride + r."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * stride + rank).reshape(shape)


def over(ranks: int, shape: tuple[int, ...] = (2, 3), first: int = 0) -> torch.Tensor:
    """The sum of `ranked` over ``ranks`` ranks from ``first``."""
    return ranked(0, shape) * ranks + sum(range(first, first + ranks))


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(shape, 99).to(dtype)
    kv.pull(key, out)
    return out


# -- init, push, pull -------------------------------------------------------------------------------------------------


def test_the_type_is_the_name_given() -> None:
    for name in NAMES:
        with create(name) as kv:
            assert kv.type == name
    with create() as kv:
        assert kv.type == "local"


def test_pull_returns_the_initial_value(kv: KVStore) -> None:
    kv.init("w", ranked(4))
    assert torch.equal(pulled(kv, "w"), ranked(4))
    assert torch.equal(pulled(kv, "w"), ranked(4))


def test_pull_fills_every_tensor_of_a_list(kv: KVStore) -> None:
    kv.init("w", ranked(4))
    outs = [torch.empty(2, 3) for _ in range(3)]
    kv.pull("w", outs)
    assert all(torch.equal(out, ranked(4)) for out in outs)


def test_a_push_replaces_the_value_of_an_earlier_push(kv: KVStore) -> None:
    kv.init("w", ranked(4))
    kv.push("w", ranked(1))
    assert torch.equal(pulled(kv, "w"), ranked(1))
    kv.push("w", ranked(2))
    kv.push("w", ranked(3))
    assert torch.equal(pulled(kv, "w"), ranked(3))


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_a_push_sums_over_its_devices(kv: KVStore, devices: int) -> None:
    kv.init("w", ranked(4))
    for first in (0, 7):
        kv.push("w", [ranked(first + rank) for rank in range(devices)])
        assert torch.equal(pulled(kv, "w"), over(devices, first=first))


def test_the_sum_is_added_in_the_order_of_the_devices(kv: KVStore) -> None:
    values = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    kv.init("w", torch.zeros(1))
    kv.push("w", values)
    assert pulled(kv, "w", (1,)).item() == 1.0
    kv.push("w", [values[index] for index in (0, 2, 1, 3)])
    assert pulled(kv, "w", (1,)).item() == 2.0


def test_a_list_of_keys_takes_one_value_per_key(kv: KVStore) -> None:
    keys, shapes = ["a", "b", 3], [(2, 3), (4,), (1, 2, 2)]
    kv.init(keys, [ranked(index, shape) for index, shape in enumerate(shapes)])
    outs = [torch.empty(shape) for shape in shapes]
    kv.pull(keys, outs)
    assert all(torch.equal(out, ranked(i, shape)) for i, (out, shape) in enumerate(zip(outs, shapes, strict=True)))
    kv.push(keys, [ranked(10 + index, shape) for index, shape in enumerate(shapes)])
    kv.pull(keys[::-1], outs[::-1])
    assert all(torch.equal(out, ranked(10 + i, shape)) for i, (out, shape) in enumerate(zip(outs, shapes, strict=True)))


def test_lists_of_keys_take_lists_of_devices(kv: KVStore) -> None:
    keys, shapes = ["a", "b", 3], [(2, 3), (4,), (1, 2, 2)]
    kv.init(keys, [torch.zeros(shape) for shape in shapes])
    kv.push(keys, [[ranked(100 * i + rank, shape) for rank in range(3)] for i, shape in enumerate(shapes)])
    outs = [[torch.empty(shape) for _ in range(3)] for shape in shapes]
    kv.pull(keys, outs)
    for index, (of_key, shape) in enumerate(zip(outs, shapes, strict=True)):
        assert all(torch.equal(out, over(3, shape, first=100 * index)) for out in of_key)


def test_a_list_of_keys_may_mix_tensors_and_lists(kv: KVStore) -> None:
    kv.init(["a", "b"], [torch.zeros(2, 3)] * 2)
    kv.push(["a", "b"], [ranked(5), [ranked(0), ranked(1)]])
    outs = [torch.empty(2, 3) for _ in range(3)]
    kv.pull(["a", "b"], [outs[:2], outs[2]])
    assert torch.equal(outs[0], ranked(5))
    assert torch.equal(outs[1], ranked(5))
    assert torch.equal(outs[2], over(2))


def test_tuples_are_lists(kv: KVStore) -> None:
    kv.init(("a", "b"), (ranked(1), ranked(2)))
    kv.push(("a", "b"), ((ranked(0), ranked(1)), ranked(7)))
    outs = (torch.empty(2, 3), torch.empty(2, 3))
    kv.pull(("a", "b"), outs)
    assert torch.equal(outs[0], over(2))
    assert torch.equal(outs[1], ranked(7))


def test_a_list_of_one_key_is_a_list(kv: KVStore) -> None:
    kv.init(["w"], [ranked(1)])
    kv.push(["w"], [[ranked(0), ranked(1)]])
    out = torch.empty(2, 3)
    kv.pull(["w"], [out])
    assert torch.equal(out, over(2))


def test_no_keys_are_nothing_to_do(kv: KVStore) -> None:
    kv.init("w", ranked(1))
    kv.init([], [])
    kv.push([], [])
    kv.pull([], [])
    kv.pushpull([], [])
    assert torch.equal(pulled(kv, "w"), ranked(1))


def test_a_number_and_its_digits_are_two_keys(kv: KVStore) -> None:
    kv.init([3, "3"], [ranked(3), ranked(33)])
    kv.push(3, ranked(4))
    assert torch.equal(pulled(kv, 3), ranked(4))
    assert torch.equal(pulled(kv, "3"), ranked(33))
    kv.push(["3", 3], [ranked(5), ranked(6)])
    assert torch.equal(pulled(kv, "3"), ranked(5))
    assert torch.equal(pulled(kv, 3), ranked(6))


def test_any_str_or_int_is_a_key(kv: KVStore) -> None:
    keys = ["", "a.b/c", "ключ", 0, -1, 2**70]
    kv.init(keys, [ranked(index) for index in range(len(keys))])
    for index, key in enumerate(keys):
        assert torch.equal(pulled(kv, key), ranked(index))


def test_an_int_subclass_that_is_no_bool_is_a_key(kv: KVStore) -> None:
    kv.init(1, ranked(1))
    kv.init(0, ranked(0))
    assert torch.equal(pulled(kv, 1), ranked(1))
    assert torch.equal(pulled(kv, 0), ranked(0))


def test_a_key_twice_in_a_call_is_one_push_of_the_sum(kv: KVStore) -> None:
    kv.init(["a", "b"], [torch.zeros(2, 3)] * 2)
    kv.push(["a", "b", "a"], [ranked(0), ranked(9), ranked(1)])
    assert torch.equal(pulled(kv, "a"), over(2))
    assert torch.equal(pulled(kv, "b"), ranked(9))
    kv.push(["a", "a"], [[ranked(0), ranked(1)], [ranked(2), ranked(3)]])
    assert torch.equal(pulled(kv, "a"), over(4))


def test_a_key_may_be_pulled_twice_in_one_call(kv: KVStore) -> None:
    kv.init("a", ranked(1))
    outs = [torch.empty(2, 3) for _ in range(3)]
    kv.pull(["a", "a"], [outs[0], outs[1:]])
    assert all(torch.equal(out, ranked(1)) for out in outs)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 1, 3, 1)])
def test_values_of_any_shape(kv: KVStore, shape: tuple[int, ...]) -> None:
    kv.init("w", ranked(1, shape))
    kv.push("w", [ranked(0, shape), ranked(1, shape)])
    assert torch.equal(pulled(kv, "w", shape), over(2, shape))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_values_of_any_type_keep_it(kv: KVStore, dtype: torch.dtype) -> None:
    kv.init("w", ranked(1).to(dtype))
    assert torch.equal(pulled(kv, "w", dtype=dtype), ranked(1).to(dtype))
    kv.push("w", [ranked(0).to(dtype), ranked(1).to(dtype)])
    assert torch.equal(pulled(kv, "w", dtype=dtype), over(2).to(dtype))


def test_half_precision_is_summed_in_float32(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, dtype=torch.float16))
    kv.push("w", [torch.full((2,), value, dtype=torch.float16) for value in (2048.0, 1.0, 1.0)])
    assert pulled(kv, "w", (2,), torch.float16).tolist() == [2050.0, 2050.0]


def test_tensors_of_any_strides_go_in_and_out(kv: KVStore) -> None:
    kv.init("w", ranked(1, (3, 2)).t())
    assert torch.equal(pulled(kv, "w"), ranked(1, (3, 2)).t())
    kv.push("w", [ranked(0, (3, 2)).t(), ranked(1)[:, :1].expand(2, 3)])
    wide = torch.full((4, 6), -1.0)
    kv.pull("w", [wide[::2, ::2], wide[1::2, 1::2].t().contiguous().t()])
    assert torch.equal(wide[::2, ::2], ranked(0, (3, 2)).t() + ranked(1)[:, :1])
    assert (wide[1::2] == -1).all()
    assert (wide[:, 1::2] == -1).all()


def test_parameters_and_their_gradients_are_tensors_like_others(kv: KVStore) -> None:
    parameter = torch.nn.Parameter(ranked(1))
    kv.init("w", parameter)
    (parameter * 3).sum().backward()
    kv.push("w", [parameter.grad, parameter])
    kv.pull("w", parameter)
    assert torch.equal(parameter.detach(), ranked(1) + 3)
    assert parameter.requires_grad
    assert parameter.grad_fn is None


# -- numpy ------------------------------------------------------------------------------------------------------------


def test_numpy_arrays_go_in_and_out(kv: KVStore) -> None:
    kv.init("w", ranked(1).numpy())
    kv.push("w", [ranked(0).numpy(), ranked(1)])
    outs = [np.zeros((2, 3), np.float32), torch.empty(2, 3)]
    kv.pull("w", outs)
    assert np.array_equal(outs[0], over(2).numpy())
    assert torch.equal(torch.as_tensor(outs[1]), over(2))


def test_pushpull_writes_back_into_numpy_arrays(kv: KVStore) -> None:
    kv.init("w", np.zeros((2, 3), np.float32))
    values = [ranked(rank).numpy() for rank in range(3)]
    kv.pushpull("w", values)
    assert all(np.array_equal(value, over(3).numpy()) for value in values)


def test_read_only_numpy_arrays_may_be_pushed(kv: KVStore) -> None:
    array = ranked(1).numpy().copy()
    array.flags.writeable = False
    kv.init("w", array)
    kv.push("w", [array, array])
    assert torch.equal(pulled(kv, "w"), ranked(1) * 2)
    assert np.array_equal(array, ranked(1).numpy())


def test_numpy_views_with_steps_may_be_pushed_and_pulled_into(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    wide = np.full((4, 6), -1.0, np.float32)
    wide[::2, ::2] = ranked(1).numpy()
    kv.push("w", wide[::2, ::2])
    assert torch.equal(pulled(kv, "w"), ranked(1))
    kv.push("w", ranked(2))
    kv.pull("w", wide[::2, ::2])
    assert np.array_equal(wide[::2, ::2], ranked(2).numpy())
    assert (wide[1::2] == -1).all()


def test_numpy_views_that_run_backwards_may_be_pushed(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    kv.push("w", np.ascontiguousarray(ranked(1).numpy()[::-1])[::-1])
    assert torch.equal(pulled(kv, "w"), ranked(1))


def test_numpy_arrays_of_a_foreign_byte_order_may_be_pushed(kv: KVStore) -> None:
    kv.init("w", ranked(1).numpy().astype(">f4"))
    assert torch.equal(pulled(kv, "w"), ranked(1))
    kv.push("w", [ranked(2).numpy().astype(">f4"), ranked(3).numpy().astype("<f4")])
    assert torch.equal(pulled(kv, "w"), over(2, first=2))


# -- pushpull and broadcast -------------------------------------------------------------------------------------------


def test_pushpull_gives_every_out_the_sum(kv: KVStore) -> None:
    kv.init("w", ranked(9))
    values, outs = [ranked(rank) for rank in range(4)], [torch.empty(2, 3) for _ in range(2)]
    for _ in range(2):
        kv.pushpull("w", values, outs)
        assert all(torch.equal(out, over(4)) for out in outs)
    assert all(torch.equal(value, ranked(rank)) for rank, value in enumerate(values))
    kv.pushpull("w", values, outs[0])
    assert torch.equal(outs[0], over(4))


def test_pushpull_without_outs_writes_back_into_the_values(kv: KVStore) -> None:
    kv.init("w", ranked(9))
    values = [ranked(rank) for rank in range(4)]
    kv.pushpull("w", values)
    assert all(torch.equal(value, over(4)) for value in values)
    one = ranked(5)
    kv.pushpull("w", one)
    assert torch.equal(one, ranked(5))


def test_pushpull_of_four_ones_gives_four_each_time(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    for _ in range(3):
        values = [torch.ones(2, 3) for _ in range(4)]
        kv.pushpull("w", values)
        assert [value.unique().tolist() for value in values] == [[4.0]] * 4
    assert pulled(kv, "w").unique().tolist() == [4.0]


def test_pushpull_of_lists_of_keys(kv: KVStore) -> None:
    keys = ["a", 3, "b"]
    kv.init(keys, [torch.zeros(2, 3)] * 3)
    values = [[ranked(10 * index + rank) for rank in range(2)] for index in range(3)]
    outs = [torch.empty(2, 3) for _ in range(3)]
    kv.pushpull(keys, values, outs)
    assert all(torch.equal(out, over(2, first=10 * index)) for index, out in enumerate(outs))
    kv.pushpull(keys, values)
    for index, of_key in enumerate(values):
        assert all(torch.equal(value, over(2, first=10 * index)) for value in of_key)


def test_pushpull_may_pull_other_keys_than_it_pushes(kv: KVStore) -> None:
    kv.init(["a", "b"], [ranked(1), ranked(2)])
    outs = [torch.empty(2, 3), torch.empty(2, 3)]
    kv.pushpull(["a"], [ranked(5)], [outs[0]])
    kv.pull("b", outs[1])
    assert torch.equal(outs[0], ranked(5))
    assert torch.equal(outs[1], ranked(2))


def test_a_key_twice_in_a_pushpull_gives_the_whole_sum_to_both(kv: KVStore) -> None:
    kv.init("a", torch.zeros(2, 3))
    values = [ranked(0), [ranked(1), ranked(2)]]
    kv.pushpull(["a", "a"], values)
    assert torch.equal(torch.as_tensor(values[0]), over(3))
    assert all(torch.equal(value, over(3)) for value in values[1])


def test_broadcast_is_init_and_pull(kv: KVStore) -> None:
    outs = [torch.empty(2, 3) for _ in range(3)]
    kv.broadcast("w", ranked(1), outs)
    assert all(torch.equal(out, ranked(1)) for out in outs)
    assert torch.equal(pulled(kv, "w"), ranked(1))


def test_broadcast_of_lists_of_keys(kv: KVStore) -> None:
    outs: list[Any] = [torch.empty(2, 3), [np.zeros(4, np.float32), torch.empty(4)]]
    kv.broadcast(["a", 3], [ranked(1), ranked(2, (4,)).numpy()], outs)
    assert torch.equal(outs[0], ranked(1))
    assert np.array_equal(outs[1][0], ranked(2, (4,)).numpy())
    assert torch.equal(outs[1][1], ranked(2, (4,)))


# -- nothing of the caller's is shared --------------------------------------------------------------------------------


def test_init_copies(kv: KVStore) -> None:
    value, array = ranked(1), ranked(2).numpy().copy()
    kv.init(["a", "b"], [value, array])
    value.fill_(-5)
    array.fill(-5)
    assert torch.equal(pulled(kv, "a"), ranked(1))
    assert torch.equal(pulled(kv, "b"), ranked(2))
    kv.push("a", ranked(7))
    assert (value == -5).all()


def test_one_tensor_for_two_keys_is_two_values(kv: KVStore) -> None:
    value = torch.zeros(2, 3)
    kv.init(["a", "b"], [value, value])
    kv.push("a", ranked(1))
    assert torch.equal(pulled(kv, "b"), torch.zeros(2, 3))


@pytest.mark.parametrize("devices", [1, 2])
def test_pushing_and_pulling_leaves_the_pushed_tensor_alone(kv: KVStore, devices: int) -> None:
    kv.init("w", torch.zeros(2, 3))
    values = [ranked(rank) for rank in range(devices)]
    kv.push("w", values)
    out = torch.empty(2, 3)
    kv.pull("w", out)
    out.fill_(-1)
    kv.push("w", [ranked(8)] * devices)
    assert all(torch.equal(value, ranked(rank)) for rank, value in enumerate(values))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_change_of_the_pushed_tensor_is_no_push(kv: KVStore, devices: int) -> None:
    kv.init("w", torch.zeros(2, 3))
    values = [ranked(rank) for rank in range(devices)]
    kv.push("w", values)
    for value in values:
        value.fill_(-1)
    assert torch.equal(pulled(kv, "w"), over(devices))


def test_a_change_of_the_pulled_tensor_is_no_push(kv: KVStore) -> None:
    kv.init("w", ranked(1))
    outs = [torch.empty(2, 3), torch.empty(2, 3)]
    kv.pull("w", outs)
    outs[0].fill_(-1)
    assert torch.equal(outs[1], ranked(1))
    assert torch.equal(pulled(kv, "w"), ranked(1))


@pytest.mark.parametrize("devices", [1, 2])
def test_an_updater_that_changes_the_sum_leaves_the_pushed_tensors_alone(kv: KVStore, devices: int) -> None:
    kv.init("w", torch.zeros(2, 3))
    kv.set_updater(lambda key, summed, stored: stored.copy_(summed.mul_(2)))
    values = [ranked(rank) for rank in range(devices)]
    kv.push("w", values)
    assert torch.equal(pulled(kv, "w"), over(devices) * 2)
    assert all(torch.equal(value, ranked(rank)) for rank, value in enumerate(values))


def test_assign_copies(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    value = ranked(1)
    kv.assign("w", value)
    value.fill_(-1)
    assert torch.equal(pulled(kv, "w"), ranked(1))
    kv.push("w", ranked(2))
    assert (value == -1).all()


# -- set_updater and assign -------------------------------------------------------------------------------------------


def test_the_updater_is_called_once_per_push_and_key(kv: KVStore) -> None:
    calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def updater(key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        calls.append((key, summed.clone(), stored.clone()))
        stored.add_(summed, alpha=0.5)

    kv.init(["a", 3], [ranked(1), ranked(2)])
    kv.set_updater(updater)
    kv.push(["a", 3, "a"], [[ranked(0), ranked(1)], ranked(7), [ranked(2), ranked(3)]])
    assert [key for key, _, _ in calls] == ["a", 3]
    assert [type(key) for key, _, _ in calls] == [str, int]
    assert torch.equal(calls[0][1], over(4))
    assert torch.equal(calls[0][2], ranked(1))
    assert torch.equal(calls[1][1], ranked(7))
    assert torch.equal(calls[1][2], ranked(2))
    assert torch.equal(pulled(kv, "a"), ranked(1) + over(4) / 2)
    assert torch.equal(pulled(kv, 3), ranked(2) + ranked(7) / 2)


def test_updates_accumulate_over_pushes(kv: KVStore) -> None:
    kv.init("w", ranked(1))
    kv.set_updater(lambda key, summed, stored: stored.sub_(summed))
    for _ in range(3):
        kv.push("w", [ranked(0), ranked(1)])
    assert torch.equal(pulled(kv, "w"), ranked(1) - 3 * over(2))


def test_pushpull_gives_the_updated_value(kv: KVStore) -> None:
    kv.init("w", ranked(1))
    kv.set_updater(lambda key, summed, stored: stored.sub_(summed))
    values, outs = [ranked(0), ranked(1)], [torch.empty(2, 3), torch.empty(2, 3)]
    kv.pushpull("w", values, outs)
    assert all(torch.equal(out, ranked(1) - over(2)) for out in outs)
    kv.pushpull("w", values)
    assert all(torch.equal(value, ranked(1) - 2 * over(2)) for value in values)


def test_the_updater_runs_on_values_that_need_no_gradient(kv: KVStore) -> None:
    parameter = torch.nn.Parameter(ranked(1))
    kv.init("w", parameter)
    kv.set_updater(lambda key, summed, stored: stored.mul_(summed))
    kv.push("w", torch.nn.Parameter(ranked(2)))
    assert torch.equal(pulled(kv, "w"), ranked(1) * ranked(2))


def test_the_last_set_updater_or_optimizer_applies(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    kv.set_updater(lambda key, summed, stored: stored.add_(summed))
    kv.set_updater(lambda key, summed, stored: stored.sub_(summed))
    kv.push("w", ranked(1))
    assert torch.equal(pulled(kv, "w"), -ranked(1))
    kv.set_optimizer(("sgd", {"lr": 2.0}))
    kv.push("w", ranked(1))
    assert torch.equal(pulled(kv, "w"), -3 * ranked(1))
    kv.set_updater(lambda key, summed, stored: stored.copy_(summed))
    kv.push("w", ranked(4))
    assert torch.equal(pulled(kv, "w"), ranked(4))
    with pytest.raises(RuntimeError, match="set_optimizer"):
        _ = kv.learning_rate


def test_assign_replaces_without_an_update(kv: KVStore) -> None:
    calls: list[Any] = []
    kv.init(["a", "b"], [torch.zeros(2, 3)] * 2)
    kv.set_updater(lambda key, summed, stored: calls.append(key))
    kv.assign("a", ranked(1))
    kv.assign(["b", "a"], [ranked(2).numpy(), ranked(3)])
    assert calls == []
    assert torch.equal(pulled(kv, "a"), ranked(3))
    assert torch.equal(pulled(kv, "b"), ranked(2))


def test_assign_keeps_the_optimizers_state(kv: KVStore) -> None:
    weight = torch.nn.Parameter(ranked(1))
    reference = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    kv.init("w", ranked(1))
    kv.set_optimizer(("sgd", {"lr": 0.5, "momentum": 0.9}))
    for step in range(4):
        if step == 2:
            kv.assign("w", ranked(50))
            weight.data.copy_(ranked(50))
        kv.push("w", [ranked(step), ranked(1)])
        weight.grad = ranked(step) + ranked(1)
        reference.step()
    assert torch.equal(pulled(kv, "w"), weight.detach())


# -- async ------------------------------------------------------------------------------------------------------------


class Gate:
    """Updater that blocks at the key "gate" until it is opened, and records the order of the other keys."""

    def __init__(self, kv: KVStore) -> None:
        self.order: list[Any] = []
        self._reached, self._opened = threading.Event(), threading.Event()
        kv.init("gate", torch.zeros(1))
        kv.set_updater(self._update)
        self.work = kv.push("gate", torch.zeros(1), async_op=True)
        assert self._reached.wait(LIMIT)

    def open(self) -> None:
        self._opened.set()

    def _update(self, key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        if key == "gate":
            self._reached.set()
            assert self._opened.wait(LIMIT)
        else:
            self.order.append(key)
            stored.copy_(summed)


def test_every_call_returns_a_work_which_is_complete_unless_async(kv: KVStore) -> None:
    out = torch.empty(2, 3)
    works = [
        kv.init("w", ranked(1)),
        kv.push("w", ranked(2)),
        kv.pull("w", out),
        kv.pushpull("w", ranked(2), out),
        kv.broadcast("v", ranked(2), out),
    ]
    for work in works:
        assert isinstance(work, Work)
        assert work.is_completed()
        assert work.exception() is None
        work.wait()


def test_async_calls_take_effect_in_the_order_of_each_key(kv: KVStore) -> None:
    outs = [torch.empty(2, 3) for _ in range(4)]
    works = [kv.init("w", ranked(0), async_op=True), kv.pull("w", outs[0], async_op=True)]
    works += [kv.push("w", [ranked(1), ranked(2)], async_op=True), kv.pull("w", outs[1], priority=5, async_op=True)]
    works += [kv.pushpull("w", ranked(3), outs[2], priority=-5, async_op=True)]
    works += [kv.push("w", ranked(4), priority=-9, async_op=True), kv.pull("w", outs[3], priority=9, async_op=True)]
    for work in works:
        work.wait(LIMIT)
        assert work.is_completed()
    expected = [ranked(0), over(2, first=1), ranked(3), ranked(4)]
    assert all(torch.equal(out, one) for out, one in zip(outs, expected, strict=True))


def test_async_broadcast_fills_its_outs(kv: KVStore) -> None:
    outs = [torch.empty(2, 3), torch.empty(2, 3)]
    kv.broadcast("w", ranked(3), outs, async_op=True).wait(LIMIT)
    assert all(torch.equal(out, ranked(3)) for out in outs)


def test_an_async_push_is_running_until_it_is_done(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    gate = Gate(kv)
    work = kv.push("w", ranked(1), async_op=True)
    assert not gate.work.is_completed()
    assert not work.is_completed()
    assert work.exception() is None
    with pytest.raises(TimeoutError, match="push of key 'w' is still running"):
        work.wait(0)
    gate.open()
    work.wait(LIMIT)
    gate.work.wait(LIMIT)
    assert work.is_completed()
    assert torch.equal(pulled(kv, "w"), ranked(1))


def test_higher_priorities_run_first_among_keys(kv: KVStore) -> None:
    priorities = {"a": 0, "b": 3, "c": -2, "d": 3, "e": 7}
    kv.init(list(priorities), [torch.zeros(2, 3)] * 5)
    gate = Gate(kv)
    works = [kv.push(key, ranked(1), priority=priority, async_op=True) for key, priority in priorities.items()]
    gate.open()
    for work in works:
        work.wait(LIMIT)
    assert gate.order == ["e", "b", "d", "a", "c"]


def test_a_synchronous_call_runs_after_async_calls_of_its_key(kv: KVStore) -> None:
    kv.init(["w", "v"], [torch.zeros(2, 3)] * 2)
    gate = Gate(kv)
    works = [kv.push("w", ranked(rank), async_op=True) for rank in (1, 2, 3)]
    opener = threading.Thread(target=gate.open)
    opener.start()
    assert torch.equal(pulled(kv, "w"), ranked(3))
    assert all(work.is_completed() for work in works)
    opener.join(LIMIT)


def test_set_updater_waits_for_pending_calls(kv: KVStore) -> None:
    kv.init("w", torch.zeros(2, 3))
    gate = Gate(kv)
    work = kv.push("w", ranked(1), priority=-5, async_op=True)
    opener = threading.Thread(target=gate.open)
    opener.start()
    kv.set_updater(lambda key, summed, stored: stored.sub_(summed))
    assert gate.order == ["w"]
    work.wait(LIMIT)
    kv.push("w", ranked(2))
    assert torch.equal(pulled(kv, "w"), ranked(1) - ranked(2))
    opener.join(LIMIT)


def test_an_error_of_the_updater_reaches_the_caller_and_the_store_stays_usable(kv: KVStore) -> None:
    error = ArithmeticError("no update today")

    def updater(key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        if key == "bad":
            raise error
        stored.add_(summed)

    kv.init(["w", "bad"], [torch.zeros(2, 3)] * 2)
    kv.set_updater(updater)
    with pytest.raises(ArithmeticError, match="no update today"):
        kv.push("bad", ranked(1))
    work = kv.push("bad", ranked(1), async_op=True)
    with pytest.raises(ArithmeticError, match="no update today"):
        work.wait(LIMIT)
    assert work.exception() is error
    kv.push("w", ranked(1))
    kv.push("w", ranked(2), async_op=True).wait(LIMIT)
    assert torch.equal(pulled(kv, "w"), ranked(1) + ranked(2))
    assert torch.equal(pulled(kv, "bad"), torch.zeros(2, 3))


calls = st.lists(
    st.tuples(
        st.sampled_from(["push", "pushpull", "pull", "assign"]),
        st.lists(st.sampled_from(["a", "b", 3]), min_size=1, max_size=3),
        st.integers(1, 3),
        st.integers(-2, 2),
        st.booleans(),
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", ["local", "device"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(calls)
def test_any_sequence_of_calls_equals_a_model_with_a_dict(
    name: str, sequence: list[tuple[str, list[Any], int, int, bool]]
) -> None:
    keys = ["a", "b", 3]
    model = {key: ranked(index, (2, 2)) for index, key in enumerate(keys)}
    checks: list[tuple[torch.Tensor, torch.Tensor]] = []
    with create(name) as kv:
        kv.init(keys, [model[key] for key in keys])
        works = []
        for number, (call, chosen, devices, priority, async_op) in enumerate(sequence):
            values = [[ranked(number + 7 * i + d, (2, 2)) for d in range(devices)] for i in range(len(chosen))]
            outs = [torch.empty(2, 2) for _ in chosen]
            if call in ("push", "pushpull"):
                model.update(
                    {
                        key: sum(torch.stack(values[i]).sum(0) for i, other in enumerate(chosen) if other == key)
                        for key in chosen
                    }
                )
            if call == "push":
                works.append(kv.push(chosen, values, priority, async_op=async_op))
            elif call == "pushpull":
                works.append(kv.pushpull(chosen, values, outs, priority, async_op=async_op))
            elif call == "pull":
                works.append(kv.pull(chosen, outs, priority, async_op=async_op))
            else:
                kv.assign(chosen[0], values[0][0])
                model[chosen[0]] = values[0][0]
            if call in ("pushpull", "pull"):
                checks += [(out, model[key]) for key, out in zip(chosen, outs, strict=True)]
        for work in works:
            work.wait(LIMIT)
        assert all(torch.equal(out, expected) for out, expected in checks)
        assert all(torch.equal(pulled(kv, key, (2, 2)), model[key]) for key in keys)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_close_finishes_async_work(kv: KVStore) -> None:
    keys = [f"key {index}" for index in range(20)]
    kv.init(keys, [ranked(index) for index in range(20)])
    outs = [torch.empty(2, 3) for _ in keys]
    works = [kv.pull(key, out, async_op=True) for key, out in zip(keys, outs, strict=True)]
    kv.close()
    assert all(work.is_completed() for work in works)
    assert all(torch.equal(out, ranked(index)) for index, out in enumerate(outs))
    assert [work.exception() for work in works] == [None] * 20


def test_closing_again_does_nothing(kv: KVStore) -> None:
    kv.init("w", ranked(1))
    kv.close()
    kv.close()
    with pytest.raises(RuntimeError, match="closed"):
        kv.pull("w", torch.empty(2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_with_section_closes_the_store_whatever_happens(name: str) -> None:
    with create(name) as kv:
        kv.init("w", ranked(1))
    with pytest.raises(RuntimeError, match=f"the '{name}' store is closed"):
        kv.push("w", ranked(1))
    with pytest.raises(ZeroDivisionError, match="inside"), create(name) as other:
        raise ZeroDivisionError("inside")
    with pytest.raises(RuntimeError, match="closed"):
        other.init("w", ranked(1))


def test_two_stores_share_nothing(kv: KVStore) -> None:
    with create(kv.type) as other:
        kv.init("w", ranked(1))
        other.init("w", ranked(2))
        kv.push("w", ranked(3))
        assert torch.equal(pulled(other, "w"), ranked(2))
    assert torch.equal(pulled(kv, "w"), ranked(3))


def test_a_store_of_one_process_is_a_job_of_one_worker(kv: KVStore) -> None:
    assert (kv.rank, kv.num_workers) == (0, 1)
    assert kv.dead_nodes() == []
    assert kv.num_dead_nodes() == kv.num_dead_nodes(timeout=0.5) == 0
    kv.barrier()


# -- create and register ----------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate the registry for one test."""
    monkeypatch.setattr(stores, "_registered", dict(stores._registered))


@pytest.mark.parametrize("name", ["", "Local", "dist_", "loca", "local ", "no_such_store"])
def test_an_unknown_name_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match=f"no store named {name!r}") as caught:
        create(name)
    assert all(repr(known) in str(caught.value) for known in NAMES)


@pytest.mark.parametrize("name", [None, 3, True, ["local"], LocalStore])
def test_a_name_that_is_no_str_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match="expected a str") as caught:
        create(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="colour"):
        create(name, colour="red")


def test_a_third_partys_store_is_made_by_each_of_its_names(registry: None) -> None:
    @register("doubling", "twofold")
    class Doubling(LocalStore):
        """Third-party store that pushes multiples of its values; has an option."""

        def __init__(self, name: str, factor: int = 2) -> None:
            super().__init__(name)
            self.factor = factor

        def _push(self, pairs: Any, priority: int, async_op: bool) -> Work:
            return super()._push([(k, [v * self.factor for v in values]) for k, values in pairs], priority, async_op)

    for name in ("doubling", "twofold"):
        with create(name) as kv:
            assert type(kv) is Doubling
            assert kv.type == name
            kv.init("w", torch.zeros(2, 3))
            kv.push("w", [ranked(0), ranked(1)])
            assert torch.equal(pulled(kv, "w"), over(2) * 2)
    with create("doubling", factor=5) as kv:
        kv.init("w", torch.zeros(2, 3))
        kv.push("w", ranked(1))
        assert torch.equal(pulled(kv, "w"), ranked(1) * 5)
    with pytest.raises(ValueError, match="'twofold'"):
        create("no_such_store")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_taken_is_refused_and_its_store_stays(registry: None, name: str) -> None:
    with pytest.raises(ValueError, match=f"a store named '{name}' is registered already: (Local|Device)Store"):
        register("quite_new", name)
    with pytest.raises(ValueError, match="no store named 'quite_new'"):
        create("quite_new")
    with create(name) as kv:
        assert type(kv).__name__ in ("LocalStore", "DeviceStore")


def test_register_refuses_invalid_names_and_stores(registry: None) -> None:
    with pytest.raises(ValueError, match="got no name"):
        register()
    with pytest.raises(TypeError, match="a store's name is 3; expected a str"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no subclass of KVStore"):
        register("an_int")(int)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="no subclass of KVStore"):
        register("a_function")(lambda name: None)  # type: ignore[type-var]
    for name in ("an_int", "a_function"):
        with pytest.raises(ValueError, match=f"no store named '{name}'"):
            create(name)


@pytest.mark.slow
def test_a_store_is_imported_when_it_is_created() -> None:
    code = (
        "import sys\n"
        "from gangline.kvstore.registry import IN_PROCESS, create\n"
        "for name in IN_PROCESS:\n"
        "    create(name).close()\n"
        "print([name for name in sys.modules if name.startswith('gangline.kvstore.parameter_server')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_built_in_name_has_a_store() -> None:
    for place in stores._BUILT_IN.values():
        module, _, name = place.partition(":")
        assert issubclass(getattr(import_module(f"gangline.kvstore.{module}"), name), KVStore)
