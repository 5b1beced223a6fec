"""Sums and copies within one process: their bits, and their number of operations."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gangline.collectives.devices.device_group import broadcast, reduce


class Operations(TorchDispatchMode):
    """Counts torch's operations by name: "add", "copy", "clone", "to"."""

    NAMES: ClassVar = {"add": "add", "add_": "add", "sum": "add", "copy_": "copy", "clone": "copy", "_to_copy": "to"}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.counts[self.NAMES[name]] += 1
        return func(*args, **(kwargs or {}))


def ranked(rank: int, shape: tuple[int, ...] = (3, 4), stride: int = 10) -> torch.Tensor:
    """Element i of rank r holds i * stride + r."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) * stride + rank).reshape(shape)


def summed(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total


def of_many_sizes(count: int, dtype: torch.dtype, elements: int = 257) -> list[torch.Tensor]:
    """Return values with a sum that depends on the order of additions."""
    generator = torch.Generator().manual_seed(count)
    sizes = 10.0 ** torch.randint(-3, 4, (count, elements), generator=generator)
    values = torch.randn(count, elements, generator=generator, dtype=torch.float64) * sizes
    return list(values.to(dtype))


# -- the bits of a sum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_sum_over_ranks_has_its_closed_form(count: int) -> None:
    out = torch.full((3, 4), -1.0)
    reduce([ranked(rank) for rank in range(count)], out)
    assert torch.equal(out, ranked(0) * count + count * (count - 1) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_values_are_added_in_the_order_given(dtype: torch.dtype, count: int) -> None:
    values = of_many_sizes(count, dtype)
    out, backwards = torch.empty_like(values[0]), torch.empty_like(values[0])
    reduce(values, out)
    reduce(values[::-1], backwards)
    assert torch.equal(out, summed(values))
    assert torch.equal(backwards, summed(values[::-1]))
    assert torch.equal(out, backwards) is (count == 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_half_precision_is_added_in_float32_and_rounded_once(dtype: torch.dtype, count: int) -> None:
    values = of_many_sizes(count, dtype)
    out = torch.empty_like(values[0])
    reduce(values, out)
    assert out.dtype == dtype
    assert torch.equal(out, summed([value.float() for value in values]).to(dtype))
    assert torch.equal(out, summed(values)) is (count == 2)  # rounding at each step gives other bits


def test_half_precision_accumulates_in_float32() -> None:
    for dtype, large, small in ((torch.float16, 2048.0, 1.0), (torch.bfloat16, 256.0, 1.0)):
        values = [torch.full((2,), one, dtype=dtype) for one in (large, small, small)]
        out = torch.empty(2, dtype=dtype)
        reduce(values, out)
        assert out.tolist() == [large + 2 * small] * 2


def test_partial_sums_may_exceed_the_range_of_half_precision() -> None:
    values = [torch.tensor([one], dtype=torch.float16) for one in (60000.0, 60000.0, -60000.0)]
    out = torch.empty(1, dtype=torch.float16)
    reduce(values, out)
    assert out.item() == 60000.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_wrap(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = [torch.tensor([info.max, 1, 2], dtype=dtype) for _ in range(3)]
    expected = [(each - info.min) % (info.max - info.min + 1) + info.min for each in (3 * info.max, 3, 6)]
    out = torch.empty(3, dtype=dtype)
    reduce(values, out)
    assert out.tolist() == expected


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_sum_of_bools_is_or(count: int) -> None:
    values = [torch.tensor([False, rank == 0, rank == count - 1, True]) for rank in range(count)]
    out = torch.empty(4, dtype=torch.bool)
    reduce(values, out)
    assert out.dtype == torch.bool
    assert out.tolist() == [False, True, True, True]


def test_nan_and_infinity_are_kept() -> None:
    nan, inf = float("nan"), float("inf")
    out = torch.empty(4)
    reduce([torch.tensor([nan, inf, inf, 1.0]), torch.tensor([1.0, 1.0, -inf, 2.0])], out)
    assert torch.equal(out.isnan(), torch.tensor([True, False, True, False]))
    assert out[1].item() == inf
    assert out[3].item() == 3.0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 6),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32]),
)
def test_any_shape_and_type_sums_like_a_loop(count: int, shape: list[int], dtype: torch.dtype) -> None:
    values = [(ranked(rank, tuple(shape)) / 7).to(dtype) for rank in range(count)]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    out = torch.empty(shape, dtype=dtype)
    reduce(values, out)
    assert torch.equal(out, summed([value.to(wide) for value in values]).to(dtype))


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


@pytest.mark.parametrize("count", [1, 2, 4])
def test_values_of_any_strides_are_read(count: int) -> None:
    transposed = [ranked(rank, (4, 3)).t() for rank in range(count)]
    out = torch.empty(3, 4)
    reduce(transposed, out)
    assert torch.equal(out, (ranked(0, (4, 3)) * count + count * (count - 1) / 2).t())
    rows = [ranked(rank, (1, 4)).expand(3, 4) for rank in range(count)]
    reduce(rows, out)
    assert torch.equal(out, (ranked(0, (1, 4)) * count + count * (count - 1) / 2).expand(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_values_are_not_changed(count: int, dtype: torch.dtype) -> None:
    values = [ranked(rank).to(dtype) for rank in range(count)]
    reduce(values, torch.empty(3, 4, dtype=dtype))
    assert all(torch.equal(value, ranked(rank).to(dtype)) for rank, value in enumerate(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_sum_may_replace_the_first_value(count: int, dtype: torch.dtype) -> None:
    values = [ranked(rank).to(dtype) for rank in range(count)]
    reduce(values, values[0])
    assert torch.equal(values[0], (ranked(0) * count + count * (count - 1) / 2).to(dtype))


def test_a_value_listed_twice_counts_twice() -> None:
    value, out = ranked(1), torch.empty(3, 4)
    reduce([value, value, value], out)
    assert torch.equal(out, ranked(1) * 3)


# -- number of operations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_k_values_take_k_minus_1_adds_and_no_copy(count: int, dtype: torch.dtype) -> None:
    values, out = [ranked(rank).to(dtype) for rank in range(count)], torch.empty(3, 4, dtype=dtype)
    with Operations() as operations:
        reduce(values, out)
    assert operations.counts == {"add": count - 1}


def test_one_value_takes_one_copy() -> None:
    value, out = ranked(1), torch.empty(3, 4)
    with Operations() as operations:
        reduce([value], out)
    assert operations.counts == {"copy": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_values_of_half_precision_take_one_add_and_no_copy(dtype: torch.dtype) -> None:
    values, out = [ranked(rank).to(dtype) for rank in range(2)], torch.empty(3, 4, dtype=dtype)
    with Operations() as operations:
        reduce(values, out)
    assert operations.counts == {"add": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 5])
def test_more_values_of_half_precision_widen_the_first_and_round_the_sum(count: int, dtype: torch.dtype) -> None:
    values, out = [ranked(rank).to(dtype) for rank in range(count)], torch.empty(3, 4, dtype=dtype)
    with Operations() as operations:
        reduce(values, out)
    assert operations.counts == {"to": 1, "add": count - 1, "copy": 1}


# -- broadcast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_broadcast_copies_once_into_each_out(count: int) -> None:
    value, outs = ranked(5), [torch.empty(3, 4) for _ in range(count)]
    with Operations() as operations:
        broadcast(value, outs)
    assert operations.counts == ({"copy": count} if count else {})
    assert all(torch.equal(out, ranked(5)) for out in outs)
    assert torch.equal(value, ranked(5))


def test_broadcast_writes_outs_of_any_strides() -> None:
    wide, transposed = torch.full((6, 8), -1.0), torch.empty(4, 3)
    broadcast(ranked(2), [wide[1::2, ::2], transposed.t()])
    assert torch.equal(wide[1::2, ::2], ranked(2))
    assert torch.equal(transposed.t(), ranked(2))
    assert (wide[::2] == -1).all()


def test_broadcast_copies_do_not_share_memory() -> None:
    value, outs = ranked(0), [torch.empty(3, 4) for _ in range(2)]
    broadcast(value, outs)
    outs[0].fill_(7)
    value.fill_(8)
    assert torch.equal(outs[1], ranked(0))
