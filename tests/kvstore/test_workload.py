"""Shares of a batch by work loads."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline import split_batch
from gangline.kvstore.workload import check_work_load_list

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
        (5, [9, 1], [4, 1]),
        (10, [5, 5, 0.1], [5, 4, 1]),
        (2, [1, 10, 1], [1, 1, 0]),
        (1, [1, 2], [0, 1]),
        (10, [1, 3], [2, 8]),  # the larger load wins a tie, at any position
        (3, [1, 1], [2, 1]),  # then to the lower index
        (4, [1, 100, 100], [1, 2, 1]),  # of two fullest with equal loads, the one with the higher index gives a sample
        (4, [0.1, 10, 11], [1, 1, 2]),  # of two fullest, the one with the smaller load gives a sample
        (3, [100, 1, 1], [1, 1, 1]),
        (2, [1, 10, 2], [0, 1, 1]),  # one sample for the larger of the empty ones
        (3, [2, 50, 1, 2], [1, 1, 0, 1]),
        (5, (9.0, 1.0), [4, 1]),
        (10, [0.1, 0.3], [2, 8]),  # binary fractions would break the tie of 2.5 and 7.5
        (6, [0.1, 0.2, 0.3], [1, 2, 3]),
        (10, [5e-324, 5e-324], [5, 5]),
        (10, [1e308, 1e308], [5, 5]),
        (10, [1e308, 5e-324], [9, 1]),
        (9, [2**70, 2**70 + 1], [4, 5]),
    ],
)
def test_ties_empty_contexts_small_batches_and_exact_decimals(
    batch_size: int, loads: list[float], expected: list[int]
) -> None:
    assert counts(batch_size, loads) == expected


def test_slices_follow_each_other_and_idle_contexts_keep_their_place() -> None:
    assert split_batch(10, [0, 3, 0, 1, 0]) == [slice(0, 0), slice(0, 8), slice(8, 8), slice(8, 10), slice(10, 10)]
    assert split_batch(32, [3, 1]) == [slice(0, 24), slice(24, 32)]


# -- by property ------------------------------------------------------------------------------------------------------


@settings(modest, max_examples=200)
@given(batches, loads_lists)
def test_slices_cover_the_batch_by_shares_next_to_their_quotas(batch_size: int, loads: list[float]) -> None:
    parts = split_batch(batch_size, loads)
    assert len(parts) == len(loads)
    assert (parts[0].start, parts[-1].stop) == (0, batch_size)
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.start <= part.stop and part.step is None for part in parts)
    samples = list(range(batch_size))
    assert [sample for part in parts for sample in samples[part]] == samples
    shares = counts(batch_size, loads)
    assert all(share == 0 for share, load in zip(shares, loads, strict=True) if load == 0)
    assert sum(share > 0 for share in shares) == min(batch_size, sum(load > 0 for load in loads))
    by_load = sorted(zip(loads, shares, strict=True))  # a larger load never gets less
    assert all(few <= many for (low, few), (high, many) in pairwise(by_load) if low < high)
    exact = [Fraction(repr(load)) for load in loads]
    quotas = [batch_size * load / sum(exact) for load in exact]
    if all(quota >= 1 for quota in quotas if quota):
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))


@settings(modest, max_examples=100)
@given(batches, whole_loads, st.integers(1, 20), st.integers(1, 10**9), st.integers(1, 12))
def test_equal_loads_and_multiples_and_decimals_of_whole_ones_have_exact_shares(
    batch_size: int, loads: list[int], times: int, factor: int, digits: int
) -> None:
    shares = counts(batch_size, loads)
    whole, rest = divmod(batch_size, times)
    assert counts(batch_size, [2.5] * times) == [whole + 1] * rest + [whole] * (times - rest)
    assert counts(times * sum(loads), loads) == [times * load for load in loads]
    assert counts(batch_size, [load * factor for load in loads]) == shares
    assert counts(batch_size, [float(f"{load}e-{digits}") for load in loads]) == shares
    assert counts(batch_size, [load for one in loads for load in (0, one)])[1::2] == shares  # beside idle contexts


# -- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "loads", "error", "text"),
    [
        *((size, [1, 1], ValueError, f"batch_size is {size}; expected 1 or more") for size in (0, -1)),
        *((size, [1, 1], TypeError, f"batch_size is {size!r}; expected an int") for size in (True, 8.0, None)),
        *(
            (8, [1, load, 1], ValueError, f"work_load_list[1] is {load!r}; expected a finite number, 0 or more")
            for load in (-0.5, float("nan"), float("inf"))
        ),
        *(
            (8, [1, 1, load], TypeError, rf"work_load_list[2] is {load!r}")
            for load in (True, "1", None, 1j, Fraction(1, 3))
        ),
        *((8, loads, ValueError, f"{loads}") for loads in ([0.0, 0], [])),
        *((8, loads, TypeError, "expected one number per context") for loads in ("31", {3: 1}, {3, 1})),
        (8, np.array([3, 1]), TypeError, "expected one number per context"),
        *((8, loads, TypeError, f"work_load_list is {loads!r}") for loads in (3, None)),
    ],
    ids=repr,
)
def test_wrong_batches_and_loads_are_refused(batch_size: Any, loads: Any, error: type[Exception], text: str) -> None:
    more = {ValueError: "expected 1 or more|expected a finite|at least one load above 0"}.get(error, "expected")
    with pytest.raises(error, match=more) as caught:
        split_batch(batch_size, loads)
    assert text in str(caught.value)


# -- check_work_load_list ---------------------------------------------------------------------------------------------


def test_no_loads_are_equal_loads_and_valid_ones_a_new_list() -> None:
    assert check_work_load_list(None, 3) == [1, 1, 1]
    assert check_work_load_list((3, 0.5, 0), 3) == [3, 0.5, 0]


@pytest.mark.parametrize(("loads", "count"), [([1, 1, 1], 2), ([1], 2), ([], 1)])
def test_a_wrong_number_of_loads_is_refused(loads: list[float], count: int) -> None:
    with pytest.raises(ValueError, match=f"work_load_list has {len(loads)} entr.* for {count} context"):
        check_work_load_list(loads, count)
