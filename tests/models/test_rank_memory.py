"""Limits of the ranks' memory: what a GPU has room for, and splits that caps shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.collectives.workload import split_batch, split_within
from gangline.models.balance.balancer import MemoryLimits, samples_that_fit
from gangline.models.balance.rank_balance import RankBalance
from gangline.models.executor.executor import is_out_of_memory

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("free", "samples", "fits"),
    [
        (1000, 10, 10 + int(0.9 * (1000 + 800 - 600) * 10 / 400)),
        (0, 10, 10 + int(0.9 * 200 * 10 / 400)),
        (-800, 10, 10),  # a share that ran fits
        (1000, 0, None),
    ],
)
def test_a_share_grows_as_far_as_the_peak_of_real_steps_predicts(
    free: int, samples: int, fits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = {"max_memory_allocated": 600, "memory_allocated": 200, "memory_reserved": 800, "mem_get_info": (free, 0)}
    for name, reading in readings.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, reading=reading: reading)
    assert samples_that_fit(GPU, samples) == fits
    assert samples_that_fit(torch.device("cpu"), 10) is None


@pytest.mark.parametrize(
    ("samples", "loads", "caps", "counts"),
    [
        (64, [3, 1], None, [48, 16]),
        (64, [3, 1], [40, None], [40, 24]),
        (64, [3, 1], [40, 24], [40, 24]),
        (60, [4, 2, 1], [20, None, None], [20, 27, 13]),
        (60, [4, 2, 1], [20, 25, None], [20, 25, 15]),
        (2, [1, 1, 1], [None, None, None], [1, 1, 0]),
        (10, [1000, 1], [None, 3], [9, 1]),
        (64, [3, 1], [8, 24], [16, 48]),  # caps that do not hold the batch are its proportions
    ],
)
def test_what_exceeds_a_cap_goes_to_the_others(
    samples: int, loads: list[float], caps: list[int | None] | None, counts: list[int]
) -> None:
    assert split_within(samples, loads, caps) == counts


def test_caps_after_out_of_memory_are_proportions_where_they_do_not_hold_the_batch() -> None:
    balance = RankBalance(0, [1, 1], lambda row: [row, row], horizon=2)
    balance.discard_batch(3, {1: 32})
    assert balance.caps == [None, 16]
    assert balance.counts(5, 64) == [32, 32]  # drawn already
    assert balance.counts(6, 64) == [48, 16]
    balance.discard_batch(7, {0: 48})
    assert balance.counts(10, 64) == [38, 26]


def sizes(parts: list[slice]) -> list[int]:
    return [part.stop - part.start for part in parts]


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
    rounds = MemoryLimits(["cpu"] * len(contexts), None, [most for _, most in contexts]).micro_steps(slices)
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


def test_only_out_of_memory_errors_of_torch_numpy_and_python_are_recognised() -> None:
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(1 << 50, np.uint8)
    for error in (by_torch.value, by_numpy.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        assert is_out_of_memory(error)
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
    ):
        assert not is_out_of_memory(error)
