"""Batches: nesting, size, slicing and concatenation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gangline.models.data.batches import as_batch, concat, map_tensors, move, num_samples, tensors_of

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


def test_numbers_without_axes_are_stacked() -> None:
    parts = [{"loss": torch.tensor(float(i)), "out": (torch.full((i + 1,), i),)} for i in range(3)]
    joined = concat(parts, HOST)
    assert torch.equal(joined["loss"], torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(joined["out"][0], torch.tensor([0, 1, 1, 2, 2, 2]))
    assert torch.equal(concat([torch.tensor(4.0)], HOST), torch.tensor([4.0]))
