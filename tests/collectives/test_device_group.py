"""Sums and copies within one process: their bits, and their number of operations."""

from __future__ import annotations

import pytest
import torch

from gangline.collectives.devices.device_group import broadcast, reduce
from tests.operations import Operations


def ranked(rank: int, shape: tuple[int, ...] = (3, 4), stride: int = 10) -> torch.Tensor:
    """Element i of rank r holds i * stride + r."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * stride + rank).reshape(shape)


# -- the bits of a sum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = [torch.tensor([info.max, 1, 2], dtype=dtype) for _ in range(3)]
    expected = [(each - info.min) % (info.max - info.min + 1) + info.min for each in (3 * info.max, 3, 6)]
    out = torch.empty(3, dtype=dtype)
    reduce(values, out)
    assert out.tolist() == expected


# -- the output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_outs_of_any_strides_are_written_and_memory_around_them_is_not(count: int, dtype: torch.dtype) -> None:
    expected = (ranked(0) * count + count * (count - 1) / 2).to(dtype)
    values = [ranked(rank).to(dtype) for rank in range(count)]
    transposed = torch.empty(4, 3, dtype=dtype).t()
    reduce(values, transposed)
    assert torch.equal(transposed, expected)
    wide = torch.full((6, 8), -1.0, dtype=dtype)
    reduce(values, wide[1::2, ::2])
    assert torch.equal(wide[1::2, ::2], expected)
    assert (wide[::2] == -1).all()
    assert (wide[:, 1::2] == -1).all()


# -- number of operations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "dtype", "operations"),
    [
        (1, torch.float32, {"copy": 1}),
        *(
            (count, dtype, {"add": count - 1})
            for dtype in (torch.float64, torch.float32, torch.int64, torch.bool)
            for count in (2, 3, 4, 8)
        ),
        *((2, dtype, {"add": 1}) for dtype in (torch.float16, torch.bfloat16)),
        *(  # the first one is widened, and the sum is rounded
            (count, dtype, {"to": 1, "add": count - 1, "copy": 1})
            for dtype in (torch.float16, torch.bfloat16)
            for count in (3, 5)
        ),
    ],
)
def test_k_values_take_k_minus_1_adds(count: int, dtype: torch.dtype, operations: dict[str, int]) -> None:
    values, out = [ranked(rank).to(dtype) for rank in range(count)], torch.empty(3, 4, dtype=dtype)
    with Operations() as counted:
        reduce(values, out)
    assert counted.counts == operations
    assert all(torch.equal(value, ranked(rank).to(dtype)) for rank, value in enumerate(values))  # are not changed


# -- broadcast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_broadcast_copies_once_into_each_out(count: int) -> None:
    value, outs = ranked(5), [torch.empty(3, 4) for _ in range(count)]
    with Operations() as operations:
        broadcast(value, outs)
    assert operations.counts == ({"copy": count} if count else {})
    assert all(torch.equal(out, ranked(5)) for out in outs)
    assert torch.equal(value, ranked(5))
