"""Memory limits: micro-steps that fit each context, learnt from out-of-memory errors."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.collectives.workload import split_batch
from gangline.models.balance.balancer import MemoryLimits
from gangline.models.executor.executor import is_out_of_memory


def limits(*most: int | None) -> MemoryLimits:
    return MemoryLimits([f"cpu({index})" for index in range(len(most))], logging.getLogger("gangline"), most)


def sizes(parts: list[slice]) -> list[int]:
    return [part.stop - part.start for part in parts]


# -- micro-steps ----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(1, 40)), min_size=1, max_size=5).filter(
        lambda contexts: any(load for load, _ in contexts)
    ),
)
def test_the_parts_cover_each_slice_in_order_and_fit_in_as_few_rounds_as_can_be(
    samples: int, contexts: list[tuple[int, int | None]]
) -> None:
    slices = split_batch(samples, [load for load, _ in contexts])
    rounds = limits(*(most for _, most in contexts)).micro_steps(slices)
    needed = []
    for number, (whole, (_, most)) in enumerate(zip(slices, contexts, strict=True)):
        parts = [parts[number] for parts in rounds]
        held = [part for part in parts if part.stop > part.start]
        assert [index for part in held for index in range(part.start, part.stop)] == list(
            range(whole.start, whole.stop)
        )
        assert parts[: len(held)] == held  # a context that finishes early idles in the remaining micro-steps
        if held:
            assert max(sizes(held)) <= (most or samples)
            assert max(sizes(held)) - min(sizes(held)) <= 1
            needed.append(math.ceil(sum(sizes(held)) / (most or samples)))
            assert len(held) == needed[-1]
    assert len(rounds) == max(needed)
    assert all(len(parts) == len(contexts) for parts in rounds)


@pytest.mark.parametrize(
    ("slices", "most", "expected"),
    [
        ([slice(0, 10)], [None], [[10]]),
        ([slice(0, 10)], [10], [[10]]),
        ([slice(0, 10)], [9], [[5], [5]]),
        ([slice(0, 10)], [4], [[3], [3], [4]]),
        ([slice(0, 3)], [1], [[1], [1], [1]]),
        ([slice(0, 6), slice(6, 16)], [None, 4], [[6, 3], [0, 3], [0, 4]]),
        ([slice(0, 4), slice(4, 4)], [2, 3], [[2, 0], [2, 0]]),
        ([slice(0, 0), slice(0, 4)], [1, None], [[0, 4]]),
    ],
)
def test_micro_steps(slices: list[slice], most: list[int | None], expected: list[list[int]]) -> None:
    assert [sizes(parts) for parts in limits(*most).micro_steps(slices)] == expected


# -- lower ----------------------------------------------------------------------------------------------------------


def test_contexts_that_ran_out_of_memory_get_half_as_many_samples(caplog: pytest.LogCaptureFixture) -> None:
    made = limits(None, None, 7)
    slices = [slice(0, 9), slice(9, 14), slice(14, 30)]
    with caplog.at_level(logging.WARNING, "gangline"):
        assert made.lower([0, 2], made.micro_steps(slices))  # tried 9 at once, and 16 as 5, 5 and 6
    assert made.max_samples == [4, None, 3]
    assert caplog.messages == [
        "cpu(0) ran out of memory with 9 samples; the batch is run again, and from now on its share runs in "
        "micro-steps of at most 4 samples",
        "cpu(2) ran out of memory with 6 samples; the batch is run again, and from now on its share runs in "
        "micro-steps of at most 3 samples",
    ]


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_halving_ends_at_a_fitting_size_or_one_sample(samples: int, fits: int) -> None:
    made = MemoryLimits(["cpu(0)"])
    tries = 0
    while max(sizes([parts[0] for parts in made.micro_steps([slice(0, samples)])])) > fits:
        assert made.lower([0], made.micro_steps([slice(0, samples)]))
        tries += 1
    assert tries <= math.log2(samples) + 1
    assert made.max_samples[0] is None or 2 * made.max_samples[0] + 1 >= min(fits, samples)


def test_a_single_sample_cannot_be_halved() -> None:
    made = limits(1, None)
    assert not made.lower([0], [[slice(0, 1), slice(1, 9)], [slice(1, 2), slice(0, 0)]])
    assert made.max_samples == [1, None]


def test_without_a_context_that_ran_out_nothing_is_lowered() -> None:
    made = limits(None, 8)
    assert not made.lower([], made.micro_steps([slice(0, 4), slice(4, 8)]))
    assert made.max_samples == [None, 8]


def test_beside_one_that_can_take_less_a_single_sample_stays_one() -> None:
    made = limits(None, None)
    assert made.lower([0, 1], [[slice(0, 1), slice(1, 9)]])
    assert made.max_samples == [1, 4]


# -- errors that count as out of memory -----------------------------------------------------------------------------


def test_out_of_memory_errors_of_torch_numpy_and_python_are_recognised() -> None:
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(1 << 50, np.uint8)
    errors = [by_torch.value, by_numpy.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]
    assert all(is_out_of_memory(error) for error in errors)


def test_other_errors_are_not() -> None:
    errors = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
    ]
    assert not any(is_out_of_memory(error) for error in errors)
