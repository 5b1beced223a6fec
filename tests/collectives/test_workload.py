"""Shares of a batch by work loads."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gangline.collectives import split_batch
from gangline.collectives.workload import check_work_load_list

modest = settings(max_examples=60, deadline=None, derandomize=True)


def counts(batch_size: int, loads: list[Any]) -> list[int]:
    return [part.stop - part.start for part in split_batch(batch_size, loads)]


batches = st.integers(1, 300)
weights = st.one_of(st.integers(0, 50), st.floats(0, 50, allow_subnormal=False), st.just(0))
loads_lists = st.lists(weights, min_size=1, max_size=8).filter(any)
whole_loads = st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any)


# -- by example -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "loads", "expected"),
    [
        (32, [3, 1], [24, 8]),
        (10, [3, 1], [8, 2]),
        (7, [3, 1], [5, 2]),
        (10, [1, 1, 1, 1], [3, 3, 2, 2]),
        (5, [9, 1], [4, 1]),
        (6, [1, 1, 1, 1], [2, 2, 1, 1]),
        (2, [3, 1], [1, 1]),
        (10, [1, 0], [10, 0]),
        (10, [5, 5, 0.1], [5, 4, 1]),
        (2, [1, 10, 1], [1, 1, 0]),
    ],
)
def test_the_examples_of_the_design(batch_size: int, loads: list[float], expected: list[int]) -> None:
    assert counts(batch_size, loads) == expected


@pytest.mark.parametrize(
    ("batch_size", "loads", "expected"),
    [
        (1, [1], [1]),
        (1, [1, 1], [1, 0]),
        (1, [1, 2], [0, 1]),
        (3, [1, 1, 1, 1], [1, 1, 1, 0]),
        (10, [0, 1], [0, 10]),
        (10, [0, 3, 0, 1, 0], [0, 8, 0, 2, 0]),
        (10, [1, 3], [2, 8]),  # the larger load wins a tie, at any position
        (3, [1, 1], [2, 1]),  # then to the lower index
        (4, [1, 100, 100], [1, 2, 1]),  # of two fullest with equal loads, the one with the higher index gives a sample
        (4, [0.1, 10, 11], [1, 1, 2]),  # of two fullest, the one with the smaller load gives a sample
        (3, [100, 1, 1], [1, 1, 1]),
        (2, [1, 10, 2], [0, 1, 1]),  # one sample for the larger of the empty ones
        (3, [2, 50, 1, 2], [1, 1, 0, 1]),
        (5, (9, 1), [4, 1]),
        (5, [9.0, 1.0], [4, 1]),
    ],
)
def test_ties_empty_contexts_and_small_batches(batch_size: int, loads: list[float], expected: list[int]) -> None:
    assert counts(batch_size, loads) == expected


def test_slices_follow_each_other_and_idle_contexts_keep_their_place() -> None:
    assert split_batch(10, [0, 3, 0, 1, 0]) == [slice(0, 0), slice(0, 8), slice(8, 8), slice(8, 10), slice(10, 10)]
    assert split_batch(32, [3, 1]) == [slice(0, 24), slice(24, 32)]


def test_decimals_are_exact() -> None:
    assert Fraction(0.1) * 3 != Fraction(0.3)  # binary fractions would break the tie of 2.5 and 7.5
    assert counts(10, [0.1, 0.3]) == counts(10, [1, 3]) == [2, 8]
    assert counts(10, [0.3, 0.1]) == [8, 2]
    assert counts(6, [0.1, 0.2, 0.3]) == [1, 2, 3]
    assert counts(10, [0.7, 0.1, 0.2]) == [7, 1, 2]
    assert counts(30, [1e-3, 2e-3]) == [10, 20]


def test_extreme_loads_are_exact_too() -> None:
    assert counts(10, [5e-324, 5e-324]) == [5, 5]
    assert counts(10, [1e308, 1e308]) == [5, 5]
    assert counts(10, [1e308, 5e-324]) == [9, 1]
    assert counts(10, [2**70, 2**70 + 1]) == [5, 5]
    assert counts(9, [2**70, 2**70 + 1]) == [4, 5]


# -- by property ------------------------------------------------------------------------------------------------------


@modest
@given(batches, loads_lists)
def test_slices_cover_the_batch_in_order_without_gaps(batch_size: int, loads: list[float]) -> None:
    parts = split_batch(batch_size, loads)
    assert len(parts) == len(loads)
    assert parts[0].start == 0
    assert parts[-1].stop == batch_size
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.start <= part.stop and part.step is None for part in parts)
    samples = list(range(batch_size))
    assert [sample for part in parts for sample in samples[part]] == samples


@modest
@given(batches, loads_lists)
def test_a_context_without_load_gets_nothing(batch_size: int, loads: list[float]) -> None:
    shares = counts(batch_size, loads)
    assert all(share == 0 for share, load in zip(shares, loads, strict=True) if load == 0)


@modest
@given(batches, loads_lists)
def test_each_context_with_a_load_gets_a_sample_when_there_are_enough(batch_size: int, loads: list[float]) -> None:
    loaded = sum(load > 0 for load in loads)
    served = sum(share > 0 for share in counts(batch_size, loads))
    assert served == min(batch_size, loaded)


@modest
@given(batches, loads_lists)
def test_shares_are_within_one_sample_of_their_quota(batch_size: int, loads: list[float]) -> None:
    exact = [Fraction(repr(load)) for load in loads]
    quotas = [batch_size * load / sum(exact) for load in exact]
    assume(all(quota >= 1 for quota in quotas if quota))
    assert all(abs(share - quota) < 1 for share, quota in zip(counts(batch_size, loads), quotas, strict=True))


@modest
@given(batches, loads_lists)
def test_a_larger_load_never_gets_less(batch_size: int, loads: list[float]) -> None:
    by_load = sorted(zip(loads, counts(batch_size, loads), strict=True))
    assert all(few <= many for (low, few), (high, many) in pairwise(by_load) if low < high)


@modest
@given(st.integers(1, 20), whole_loads)
def test_a_batch_that_divides_is_divided_exactly(times: int, loads: list[int]) -> None:
    assert counts(times * sum(loads), loads) == [times * load for load in loads]


@modest
@given(batches, whole_loads, st.integers(1, 10**9))
def test_scaling_all_loads_changes_nothing(batch_size: int, loads: list[int], factor: int) -> None:
    assert counts(batch_size, [load * factor for load in loads]) == counts(batch_size, loads)


@modest
@given(batches, whole_loads, st.integers(1, 12))
def test_decimal_loads_are_exact_fractions(batch_size: int, loads: list[int], digits: int) -> None:
    decimals = [float(f"{load}e-{digits}") for load in loads]
    assert split_batch(batch_size, decimals) == split_batch(batch_size, loads)


@modest
@given(batches, whole_loads)
def test_idle_contexts_change_nothing_for_the_others(batch_size: int, loads: list[int]) -> None:
    with_idle = [load for one in loads for load in (0, one)]
    assert counts(batch_size, with_idle)[1::2] == counts(batch_size, loads)


@modest
@given(batches, st.integers(1, 12))
def test_equal_loads_differ_by_one_sample_at_most_and_the_first_get_more(batch_size: int, contexts: int) -> None:
    whole, rest = divmod(batch_size, contexts)
    assert counts(batch_size, [2.5] * contexts) == [whole + 1] * rest + [whole] * (contexts - rest)


# -- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [0, -1, -32])
def test_a_batch_without_samples_is_refused(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size is {batch_size}; expected 1 or more"):
        split_batch(batch_size, [1, 1])


@pytest.mark.parametrize("batch_size", [True, 8.0, "8", None])
def test_a_batch_size_that_is_no_int_is_refused(batch_size: Any) -> None:
    with pytest.raises(TypeError, match=f"batch_size is {batch_size!r}; expected an int"):
        split_batch(batch_size, [1, 1])


@pytest.mark.parametrize("load", [-1, -0.5, float("nan"), float("inf"), float("-inf")])
def test_a_load_that_is_negative_or_not_finite_is_refused(load: float) -> None:
    with pytest.raises(ValueError, match=rf"work_load_list\[1\] is {load!r}; expected a finite number, 0 or more"):
        split_batch(8, [1, load, 1])


@pytest.mark.parametrize("load", [True, False, "1", None, [1], 1j, Fraction(1, 3)])
def test_a_load_that_is_no_number_is_refused(load: Any) -> None:
    with pytest.raises(TypeError, match=r"work_load_list\[2\] is .*; expected a number") as caught:
        split_batch(8, [1, 1, load])
    assert repr(load) in str(caught.value)


@pytest.mark.parametrize("loads", [[0], [0, 0], [0.0, 0], []])
def test_loads_without_one_above_zero_are_refused(loads: list[float]) -> None:
    with pytest.raises(ValueError, match="expected at least one load above 0") as caught:
        split_batch(8, loads)
    assert str(loads) in str(caught.value)


@pytest.mark.parametrize("loads", ["31", b"31", {3: 1}, {3, 1}, np.array([3, 1])], ids=repr)
def test_loads_that_are_no_sequence_are_refused(loads: Any) -> None:
    with pytest.raises(TypeError, match=r"work_load_list is .*; expected one number per context"):
        split_batch(8, loads)


@pytest.mark.parametrize("loads", [3, None, 2.5, True])
def test_loads_without_a_length_are_refused_by_name(loads: Any) -> None:
    with pytest.raises(TypeError, match=f"work_load_list is {loads!r}"):
        split_batch(8, loads)


# -- check_work_load_list ---------------------------------------------------------------------------------------------


def test_no_loads_are_equal_loads() -> None:
    assert check_work_load_list(None, 3) == [1, 1, 1]


def test_valid_loads_are_returned_as_a_new_list() -> None:
    given_loads = (3, 0.5, 0)
    assert check_work_load_list(given_loads, 3) == [3, 0.5, 0]


@pytest.mark.parametrize(("loads", "count"), [([1, 1, 1], 2), ([1], 2), ([], 1)])
def test_a_wrong_number_of_loads_is_refused(loads: list[float], count: int) -> None:
    with pytest.raises(ValueError, match=f"work_load_list has {len(loads)} entr.* for {count} context"):
        check_work_load_list(loads, count)
