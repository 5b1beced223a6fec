"""Batches: nesting, size, slicing and concatenation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gangline.models.data.batches import as_batch, concat, map_tensors, move, num_samples, tensors_of

HOST = torch.device("cpu")


def test_a_function_is_applied_to_each_nested_tensor_and_a_move_to_their_own_device_copies_none() -> None:
    batch = {"image": torch.arange(6), "pair": (torch.ones(6, 1), {"deep": torch.zeros(6, 1, 1)})}
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert list(doubled) == ["image", "pair"]
    assert torch.equal(doubled["image"], torch.arange(6) * 2)
    assert torch.equal(doubled["pair"][0], torch.full((6, 1), 2.0))
    assert torch.equal(doubled["pair"][1]["deep"], torch.zeros(6, 1, 1))
    assert [id(one) for one in tensors_of(move(batch, HOST))] == [id(one) for one in tensors_of(batch)]


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
    ("call", "value", "error", "message"),
    [
        (as_batch, 3, TypeError, "data is a int"),
        (as_batch, None, TypeError, "data is a NoneType"),
        (as_batch, (), TypeError, "data is a tuple.* non-empty"),
        (as_batch, {}, TypeError, "data is a dict.* non-empty"),
        (as_batch, (torch.ones(1), "text"), TypeError, r"data\[1\] is a str"),
        (as_batch, {"a": [torch.ones(1), {"b": 2.0}]}, TypeError, r"data\['a'\]\[1\]\['b'\] is a float"),
        (as_batch, np.float64(3), TypeError, "data is a float64"),
        (as_batch, np.array(["text"]), TypeError, "data"),
        (as_batch, {"a": np.array([None])}, TypeError, r"data\['a'\]"),
        (num_samples, torch.tensor(1.0), ValueError, "data has a tensor without axes"),
        (num_samples, (torch.ones(3), torch.tensor(1.0)), ValueError, "data has a tensor without axes"),
        (
            num_samples,
            (torch.ones(3, 2), torch.ones(2)),
            ValueError,
            r"shapes \[\(3, 2\), \(2,\)\]; expected one batch",
        ),
        (num_samples, {"a": torch.ones(3), "b": (torch.ones(4),)}, ValueError, r"shapes \[\(3,\), \(4,\)\]"),
        (num_samples, torch.ones(0, 5), ValueError, "data has no samples"),
        (num_samples, {}, ValueError, "data has"),
    ],
)
def test_what_is_no_batch_is_refused_by_its_place(
    call: Callable[[Any, str], object], value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(value, "data")


# -- parts ----------------------------------------------------------------------------------------------------------


def test_numbers_without_axes_are_stacked() -> None:
    parts = [{"loss": torch.tensor(float(i)), "out": (torch.full((i + 1,), i),)} for i in range(3)]
    joined = concat(parts, HOST)
    assert torch.equal(joined["loss"], torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(joined["out"][0], torch.tensor([0, 1, 1, 2, 2, 2]))
    assert torch.equal(concat([torch.tensor(4.0)], HOST), torch.tensor([4.0]))
