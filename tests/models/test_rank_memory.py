"""Limits of the ranks' memory: what a GPU has room for, and splits that caps shape."""

from __future__ import annotations

import pytest
import torch

from gangline.collectives.workload import split_within
from gangline.models.balance.balancer import samples_that_fit
from gangline.models.balance.rank_balance import RankBalance

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
        (64, [3, 1], [None, None], [48, 16]),
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


@pytest.mark.parametrize(
    ("samples", "loads", "counts"),
    [
        (4, [3, 1], [2, 2]),
        (3, [3, 1], [3, 0]),
        (1, [1, 1], [1, 0]),
        (5, [1, 1, 1], [3, 2, 0]),
        (64, [100, 1], [62, 2]),
        (64, [1, 0], [64, 0]),
    ],
)
def test_no_share_is_smaller_than_the_minimum(samples: int, loads: list[float], counts: list[int]) -> None:
    assert split_within(samples, loads, minimum=2) == counts
    if all(loads):
        assert RankBalance(0, loads, lambda row: [row], horizon=3, minimum=2).counts(0, samples) == counts


def test_caps_after_out_of_memory_are_proportions_where_they_do_not_hold_the_batch() -> None:
    balance = RankBalance(0, [1, 1], lambda row: [row, row], horizon=2)
    balance.discard_batch(3, {1: 32})
    assert balance.caps == [None, 16]
    assert balance.counts(5, 64) == [32, 32]  # drawn already
    assert balance.counts(6, 64) == [48, 16]
    balance.discard_batch(7, {0: 48})
    assert balance.counts(10, 64) == [38, 26]
