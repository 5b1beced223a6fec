"""Batches: nesting, size, slicing and concatenation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gangline.models.data.batches import as_batch, concat, map_tensors, move, num_samples, take, tensors_of

HOST = torch.device("cpu")


def nested() -> dict[str, Any]:
    """Six samples in three tensors; sample i holds i in the first, 10 i and 100 i in the others."""
    count = torch.arange(6)
    return {"image": count, "pair": (count.unsqueeze(1) * 10, {"deep": count.reshape(6, 1, 1).double() * 100})}


def same(left: Any, right: Any) -> bool:
    """Return True if nesting, dtypes, shapes and values are equal."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return (
        isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right) and all(map(same, left, right))
    )


def test_a_function_is_applied_to_each_tensor_in_order_and_the_nesting_stays() -> None:
    batch = nested()
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert torch.equal(doubled["image"], torch.arange(6) * 2)
    assert torch.equal(doubled["pair"][1]["deep"], torch.arange(6).reshape(6, 1, 1).double() * 200)
    assert same(map_tensors(lambda tensor: tensor, batch), batch)
    assert same(map_tensors(torch.neg, [torch.ones(2), [torch.zeros(1)]]), (-torch.ones(2), (-torch.zeros(1),)))
    own = [id(tensor) for tensor in (batch["image"], batch["pair"][0], batch["pair"][1]["deep"])]
    for found in (batch, move(batch, HOST)):  # tensors on the device already are not copied
        assert [id(tensor) for tensor in tensors_of(found)] == own


@pytest.mark.parametrize("batch", [3, None, "text", (torch.ones(1), 2.0), {"a": [None]}])
def test_values_other_than_tensors_are_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"a batch holds a (int|NoneType|str|float)"):
        map_tensors(torch.neg, batch)


# -- from arrays ----------------------------------------------------------------------------------------------------


def test_arrays_become_tensors_that_share_their_memory_if_torch_can_write_it() -> None:
    array, tensor, fixed = np.arange(6.0).reshape(3, 2), torch.ones(2), np.arange(4)
    fixed.flags.writeable = False
    batch = as_batch({"a": (array, tensor), "fixed": fixed, "backwards": np.arange(4)[::-1]}, "data")
    assert isinstance(batch["a"], tuple)
    assert batch["a"][1] is tensor
    array[1, 1] = 50
    assert batch["a"][0].dtype == torch.float64
    assert batch["a"][0][1, 1] == 50
    batch["fixed"][0] = 9
    assert fixed[0] == 0
    assert torch.equal(batch["backwards"], torch.tensor([3, 2, 1, 0]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "data is a int"),
        (None, "data is a NoneType"),
        ((), "data is a tuple.* non-empty"),
        ([], "data is a list.* non-empty"),
        ({}, "data is a dict.* non-empty"),
        ((torch.ones(1), "text"), r"data\[1\] is a str"),
        ({"a": [torch.ones(1), {"b": 2.0}]}, r"data\['a'\]\[1\]\['b'\] is a float"),
        (np.float64(3), "data is a float64"),
        (np.array(["text"]), "data"),
        ({"a": np.array([None])}, r"data\['a'\]"),
    ],
)
def test_wrong_values_are_refused_by_their_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_batch(value, "data")


# -- how many samples -----------------------------------------------------------------------------------------------


def test_the_first_axis_counts_samples() -> None:
    assert num_samples(nested(), "data") == 6
    assert num_samples(torch.zeros(1, 0), "data") == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.tensor(1.0), "data has a tensor without axes"),
        ((torch.ones(3), torch.tensor(1.0)), "data has a tensor without axes"),
        ((torch.ones(3, 2), torch.ones(2, 3)), r"shapes \[\(3, 2\), \(2, 3\)\]; expected one batch size"),
        ({"a": torch.ones(3), "b": (torch.ones(4),)}, r"shapes \[\(3,\), \(4,\)\]"),
        (torch.ones(0, 5), "data has no samples"),
        ({}, "data has"),
    ],
)
def test_a_batch_without_one_size_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_samples(batch, "data")


# -- parts ----------------------------------------------------------------------------------------------------------


def test_a_slice_is_a_view() -> None:
    batch = nested()
    part = take(batch, slice(2, 4))
    assert torch.equal(part["pair"][0], torch.tensor([[20], [30]]))
    part["image"][0] = -1
    part["pair"][1]["deep"][1] = -2
    assert batch["image"].tolist() == [0, 1, -1, 3, 4, 5]
    assert batch["pair"][1]["deep"].flatten().tolist() == [0, 100, 200, -2, 400, 500]


def test_indices_pick_samples_in_their_order_into_memory_of_their_own() -> None:
    batch = nested()
    part = take(batch, torch.tensor([5, 0, 0]))
    assert part["image"].tolist() == [5, 0, 0]
    assert part["pair"][1]["deep"].flatten().tolist() == [500, 0, 0]
    part["image"][1] = 7
    assert batch["image"][0] == 0


@pytest.mark.parametrize("cuts", [[6], [1, 5], [2, 1, 3]])
def test_parts_are_joined_to_the_whole(cuts: list[int]) -> None:
    whole, parts, start = nested(), [], 0
    for size in cuts:
        parts.append(take(whole, slice(start, start + size)))
        start += size
    assert same(concat(parts, HOST), whole)


def test_numbers_without_axes_are_stacked() -> None:
    parts = [{"loss": torch.tensor(float(i)), "out": (torch.full((i + 1,), i),)} for i in range(3)]
    joined = concat(parts, HOST)
    assert torch.equal(joined["loss"], torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(joined["out"][0], torch.tensor([0, 1, 1, 2, 2, 2]))
    assert torch.equal(concat([torch.tensor(4.0)], HOST), torch.tensor([4.0]))
