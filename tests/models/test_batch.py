"""Batches: nesting, size, slicing and concatenation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gangline.models.data.batches import as_batch, concat, num_samples

HOST = torch.device("cpu")


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
