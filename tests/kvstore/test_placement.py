"""Tests of the `device` store: which device owns a key."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.kvstore.device import DeviceStore
from tests.kvstore.keyed import owned


@pytest.fixture
def kv() -> Iterator[DeviceStore]:
    made = DeviceStore()
    yield made
    made.close()


def initialised(kv: DeviceStore, sizes: dict[Any, int]) -> None:
    kv.init(list(sizes), [torch.zeros(size) for size in sizes.values()])


def lists(sizes: list[int], places: int) -> list[list[torch.Tensor]]:
    """Return each key's tensors; element i on device p holds i * 10 + p."""
    return [[torch.arange(size) * 10.0 + place for place in range(places)] for size in sizes]


def push(kv: DeviceStore, sizes: dict[Any, int], places: int) -> None:
    kv.push(list(sizes), lists(list(sizes.values()), places))


def owners(kv: DeviceStore, sizes: dict[Any, int]) -> list[int | None]:
    return [kv.owner(key) for key in sizes]


def on(device_type: str) -> int:
    """Return the number of tensors on that device in this process."""
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) and one.device.type == device_type for one in gc.get_objects())


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("call", ["push", "pull", "pushpull"])
def test_any_call_with_lists_places_a_key(kv: DeviceStore, call: str, async_op: bool) -> None:
    sizes = {"a": 1, "b": 2, "c": 3, "d": 4}
    initialised(kv, sizes)
    getattr(kv, call)(list(sizes), lists(list(sizes.values()), 2), async_op=async_op).wait(20)
    assert owners(kv, sizes) == [0, 1, 1, 0]


def test_bytes_count_and_not_elements(kv: DeviceStore) -> None:
    values = {"wide": torch.zeros(4, dtype=torch.float64), "narrow": torch.zeros(6, dtype=torch.float16)}
    values |= {"middle": torch.zeros(5), "tiny": torch.zeros(1, dtype=torch.int8)}
    kv.init(list(values), list(values.values()))
    kv.push(list(values), [[value, value] for value in values.values()])
    assert {key: kv.owner(key) for key in values} == {"wide": 0, "middle": 1, "narrow": 1, "tiny": 0}  # 32, 20, 12, 1


def test_an_owner_never_changes(kv: DeviceStore) -> None:
    sizes = {"a": 1, "b": 2, "c": 3, "d": 4}
    initialised(kv, sizes | {"late": 100})
    push(kv, sizes, 2)
    before = owners(kv, sizes)
    push(kv, dict(reversed(sizes.items())), 2)
    push(kv, {"a": 1}, 4)
    push(kv, {"b": 2}, 1)
    push(kv, {"late": 100}, 2)
    kv.pull(list(sizes), lists(list(sizes.values()), 3))
    kv.set_optimizer("adam")
    push(kv, sizes, 2)
    kv.assign("a", torch.zeros(1))
    assert owners(kv, sizes) == before


def test_devices_added_later_get_new_keys(kv: DeviceStore) -> None:
    sizes = {"a": 4, "b": 3, "c": 2, "d": 1}
    initialised(kv, sizes)
    push(kv, {"a": 4, "b": 3}, 2)
    push(kv, {"c": 2, "d": 1}, 4)
    assert owners(kv, sizes) == [0, 1, 2, 3]


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "broadcast"])
def test_bare_tensors_do_not_decide_the_owner(kv: DeviceStore, call: str) -> None:
    sizes = {"a": 4, "b": 3, "c": 2, "d": 1}
    bare = [torch.zeros(size) for size in sizes.values()]
    if call == "broadcast":
        kv.broadcast(list(sizes), bare, [one.clone() for one in bare])
    else:
        initialised(kv, sizes)
        getattr(kv, call)(list(sizes), bare)
    push(kv, sizes, 2)
    assert owned(kv, sizes, 2) == [5, 5]


@pytest.mark.parametrize("call", ["push", "pushpull"])
def test_a_key_twice_in_a_call_gets_one_owner(kv: DeviceStore, call: str) -> None:
    sizes = {"a": 2, "b": 2, "c": 2, "d": 2}
    initialised(kv, sizes)
    getattr(kv, call)(["a", "b", "c", "c", "d"], lists([2] * 5, 2))
    assert owned(kv, sizes, 2) == [4, 4]


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "states"), [("sgd", 1), ("adam", 2), ("adagrad", 1), ("rmsprop", 1), ("rprop", 2)])
@pytest.mark.usefixtures("only_what_the_test_makes")
def test_weights_and_state_move_to_the_owner(kv: DeviceStore, name: str, states: int) -> None:
    """The owner is a device without memory, on which arithmetic with tensors of the host is an error."""
    spec = (name, {"lr": 0.1} | ({"momentum": 0.9} if name == "sgd" else {}))
    initialised(kv, {"w": 4})
    kv.set_optimizer(spec)
    kv.push("w", torch.ones(4))
    state = kv.optimizer_state()
    with DeviceStore() as fresh:
        fresh.init("w", torch.zeros(4))
        fresh.set_optimizer(spec)
        fresh.load_optimizer_state(state)
        before = on("meta")
        fresh.push("w", [torch.ones(4, device="meta"), torch.ones(4, device="meta")])
        assert on("meta") - before == 2 + states  # the weight, the sum and the state


# -- by memory --------------------------------------------------------------------------------------------------------


def test_devices_of_unequal_memory_own_unequal_parts(kv: DeviceStore) -> None:
    sizes = dict.fromkeys("abcdefgh", 4)
    initialised(kv, sizes)
    kv.set_optimizer("adam", shard="optimizer", memory=[24, 0, 8])
    push(kv, sizes, 3)
    assert kv.owned_bytes == [6 * 16, 0, 2 * 16]
    assert sorted(owners(kv, sizes), key=str) == [0] * 6 + [2] * 2


def test_the_memory_of_devices_is_measured(kv: DeviceStore) -> None:
    sizes = dict.fromkeys("abcd", 4)
    initialised(kv, sizes)
    kv.set_optimizer("adam", shard="optimizer")
    push(kv, sizes, 2)
    assert kv.owned_bytes == [2 * 16, 2 * 16]  # both are parts of the host's memory


@pytest.mark.parametrize("memory", [[1], [1, -1], [0, 0], "all", [1, float("nan")]])
def test_memory_that_does_not_fit_the_devices_is_refused(kv: DeviceStore, memory: Any) -> None:
    initialised(kv, {"a": 4})
    kv.set_optimizer("sgd", shard="optimizer", memory=memory)
    with pytest.raises(ValueError, match=r"memory is .*; expected .* 2 devices"):
        push(kv, {"a": 4}, 2)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(0, 12),
    st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any) | st.integers(2, 5),
)
def test_parts_differ_from_the_shares_by_at_most_one_key(sizes: list[int], cut: int, memory: list[int] | int) -> None:
    """Devices have the memory that is given, or all the same."""
    named = list(enumerate(sizes))
    with DeviceStore() as kv:
        initialised(kv, dict(named))
        if isinstance(memory, int):
            memory = [1] * memory
        else:
            kv.set_optimizer("sgd", shard="optimizer", memory=memory)
        push(kv, dict(named[:cut]), len(memory))
        push(kv, dict(named[cut:]), len(memory))
        found = owned(kv, dict(named), len(memory))
    assert sum(found) == sum(sizes)
    for place, part in enumerate(memory):
        others = [(theirs + max(sizes)) / size for theirs, size in zip(found, memory, strict=True) if size]
        assert found[place] == 0 if not part else found[place] / part <= min(others) + 1e-9
