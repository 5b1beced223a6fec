"""Loads from synthetic timings, in which n samples take fixed + per_sample * n and noise, and from limits of memory."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.kvstore.workload import split_batch, split_within
from gangline.models.balance import speed_model
from gangline.models.balance.rank_balance import Measured, RankBalance, samples_that_fit
from gangline.models.balance.speed_model import SpeedModel
from gangline.models.data.shares import cut_by_cost, ranks_by_speed
from gangline.models.elapsed_time import ElapsedTime
from gangline.models.executor.context_balance import MemoryLimits
from gangline.models.executor.executor import is_out_of_memory
from tests.models.drifts import DRIFTS, simulate

LOGGER = logging.getLogger("gangline")
Costs = Sequence[tuple[float, float]]
"""(fixed, per sample) seconds of each context."""


def counts_of(loads: Sequence[float], size: int) -> list[int]:
    return [part.stop - part.start for part in split_batch(size, loads)]


def share_seconds(cost: tuple[float, float], samples: int) -> float:
    return cost[0] + cost[1] * samples if samples else 0.0


def step_seconds(counts: Sequence[int], costs: Costs) -> float:
    return max(share_seconds(cost, n) for cost, n in zip(costs, counts, strict=True))


def record(model: SpeedModel, size: int, seconds: Callable[[int, int], float | None], batches: int) -> list[list[int]]:
    """Record batches of contexts that take these seconds, by place and samples; return the samples of each."""
    found = []
    for _ in range(batches):
        found.append(counts_of(model.loads, size))
        model.record(found[-1], [seconds(place, n) for place, n in enumerate(found[-1])])
    return found


def splits(size: int, contexts: int) -> Iterator[tuple[int, ...]]:
    for counts in product(range(size + 1), repeat=contexts - 1):
        if sum(counts) <= size:
            yield (*counts, size - sum(counts))


def best_step(size: int, costs: Costs) -> float:
    return min(step_seconds(counts, costs) for counts in splits(size, len(costs)))


@dataclass
class Job:
    """Simulated training on contexts of these speeds; only loads and timings exist."""

    costs: Costs
    size: int
    noise: float = 0.0
    model: SpeedModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = SpeedModel([f"cpu({index})" for index in range(len(self.costs))], LOGGER)
        self.random = random.Random(len(self.costs) + self.size)
        self.changes = 0

    def batch(self, size: int) -> None:
        counts = counts_of(self.model.loads, size)
        seconds = [
            share_seconds(cost, n) * (1 + abs(self.random.gauss(0, self.noise))) if n else None
            for cost, n in zip(self.costs, counts, strict=True)
        ]
        self.changes += self.model.record(counts, seconds)

    def epochs(self, count: int, batches: int = 20, last: int | None = None) -> Job:
        for _ in range(count):
            before = self.model.loads
            self.model.begin_epoch()
            self.changes += self.model.loads != before
            for _ in range(batches):
                self.batch(self.size)
            if last:
                self.batch(last)
        return self

    @property
    def counts(self) -> list[int]:
        return counts_of(self.model.loads, self.size)

    @property
    def to_best(self) -> float:
        return step_seconds(self.counts, self.costs) / best_step(self.size, self.costs)


COSTS: dict[str, tuple[Costs, int]] = {
    "1:1": ([(0, 1e-3), (0, 1e-3)], 64),
    "3:1": ([(0, 1e-3), (0, 3e-3)], 64),
    "1:10": ([(0, 1e-2), (0, 1e-3)], 64),
    "10:1 with fixed costs": ([(0.02, 1e-3), (0.02, 1e-2)], 64),
    "equal but for fixed costs": ([(0.03, 1e-3), (0, 1e-3)], 50),
    "mostly fixed costs": ([(0.1, 1e-4), (0.08, 1e-3)], 128),
    "three": ([(0.001, 1e-3), (0.005, 2e-3), (0, 7e-3)], 60),
    "four": ([(0.01, 1e-3), (0, 1e-3), (0.002, 4e-3), (0.01, 3e-4)], 32),
    "five": ([(0, 1e-3), (0, 2e-3), (0, 3e-3), (0, 4e-3), (0.001, 5e-3)], 24),
    "100 times slower, a large batch": ([(0, 1e-3), (0, 0.1)], 256),
    "100 times slower, a small batch": ([(0, 0.1), (0, 1e-3)], 32),
    "one sample": ([(0, 1e-3), (0, 2e-3)], 1),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(("noise", "batches", "last"), [(0.0, 16, None), (0.05, 20, 7)])
def test_loads_end_within_a_twentieth_of_the_best_split(
    name: str, noise: float, batches: int, last: int | None
) -> None:
    costs, size = COSTS[name]
    assert Job(costs, size, noise).epochs(5, batches, last).to_best <= 1.05


@pytest.mark.parametrize("name", ["1:1", "3:1", "1:10", "10:1 with fixed costs", "mostly fixed costs", "three"])
def test_settled_loads_stay_though_timings_are_noisy(name: str) -> None:
    job = Job(*COSTS[name], noise=0.05).epochs(4)
    job.changes = 0
    assert job.epochs(20).changes <= 2
    assert job.to_best <= 1.05


NOISES: dict[str, Callable[[random.Random], float]] = {
    "30 %": lambda random: 1 + abs(random.gauss(0, 0.3)),
    "log-normal": lambda random: random.lognormvariate(0, 0.5),
    "heavy tail": lambda random: random.paretovariate(2),
    "stalls": lambda random: 50.0 if random.random() < 0.01 else 1 + abs(random.gauss(0, 0.05)),
}
KINDS = {"contexts": {"on_one_device": True}, "GPUs": {}, "ranks": {"may_idle": False}}


@pytest.mark.parametrize("fixed", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", KINDS)
def test_noise_costs_equal_members_at_most_a_fortieth(kind: str, noise: str, fixed: float) -> None:
    random_, took, equal = random.Random(f"{kind} {noise} {fixed}"), 0.0, 0.0
    for _ in range(5):
        model = SpeedModel(["first", "second"], None, **KINDS[kind])
        for _ in range(200):
            counts, slower = counts_of(model.loads, 64), [NOISES[noise](random_) for _ in range(2)]
            seconds = [(fixed + (1 - fixed) * n / 32) * factor for n, factor in zip(counts, slower, strict=True)]
            took, equal = took + max(seconds), equal + max(slower)
            model.record(counts, seconds)
    assert took <= 1.025 * equal


def test_shares_do_not_wander_if_times_do_not_follow_them() -> None:
    model = SpeedModel(["rank 0", "rank 1"], None, may_idle=False)
    record(model, 64, lambda place, _: [1.3, 1.0][place], 100)
    assert counts_of(model.loads, 64) == [28, 36]


def test_batches_of_any_size_are_measurements_and_the_slowest_of_a_window_does_not_count() -> None:
    model = SpeedModel(["rank 0", "rank 1"], None, may_idle=False)
    for size in (2, 8, 6, 4, 8, 2, 8):
        assert not model.record([size, size], [0.01 * size, 0.03 * size])
    assert model.record([8, 8], [100.0, 0.24])
    assert counts_of(model.loads, 16) == [12, 4]


@pytest.mark.parametrize(("slower", "share"), [(1.0, 32), (1.4, 32), (2.0, 32), (3.0, 16)])
def test_contexts_on_one_device_stay_equal_unless_one_is_much_slower(slower: float, share: int) -> None:
    model = SpeedModel(["cpu(0)", "cpu(1)"], None, on_one_device=True)
    record(model, 64, lambda place, n: n * [1, slower][place] * 1e-3, 20)
    assert counts_of(model.loads, 64)[1] == share


@pytest.mark.parametrize("factor", [1.5, 3, 10])
def test_a_change_of_speed_in_mid_training_is_followed(factor: float) -> None:
    job = Job([(0.002, 1e-3), (0.002, 1e-3 * factor)], 64, noise=0.05).epochs(4)
    job.costs = [(0.002, 1e-3 * factor), (0.002, 1e-3)]
    assert job.epochs(4).to_best <= 1.05


def test_trials_of_an_idle_context_cost_little_and_find_that_it_became_fast() -> None:
    job = Job([(0, 1e-3), (0, 0.1)], 32).epochs(1)
    taken = 0.0
    tried = 0
    for _ in range(60):
        job.model.begin_epoch()
        for _ in range(20):
            taken += step_seconds(job.counts, job.costs)
            tried += job.counts[1] > 0
            job.batch(job.size)
    assert tried > 0
    assert taken <= 1.05 * 60 * 20 * best_step(job.size, job.costs)
    job.costs = [(0, 1e-3), (0, 1e-3)]
    assert job.epochs(20).counts == [16, 16]


@pytest.mark.parametrize(("caps", "counts"), [([40, None], [40, 24]), ([None, 3], [61, 3]), ([32, 32], [32, 32])])
def test_no_share_exceeds_its_cap(caps: list[int | None], counts: list[int]) -> None:
    job = Job([(0, 1e-3), (0, 3e-3)], 64)
    job.model.caps = caps
    assert job.epochs(2).counts == counts


def test_a_new_cap_changes_the_split_without_a_gain() -> None:
    job = Job([(0, 1e-3), (0, 1e-3)], 64).epochs(2)
    job.model.caps = [30, None]
    assert job.epochs(1).counts == [30, 34]


@pytest.mark.parametrize("minimum", [1, 2])
def test_contexts_that_must_not_idle_keep_the_smallest_share(minimum: int) -> None:
    auto = SpeedModel(["rank 0", "rank 1"], None, minimum=minimum, may_idle=False)
    record(auto, 32, lambda place, n: [0.001, 0.1][place] * n, 20)
    assert counts_of(auto.loads, 32) == [32 - minimum, minimum]


def test_ranks_that_were_not_measured_count_as_average() -> None:
    auto = SpeedModel(["rank 0", "rank 1"], None, may_idle=False)
    for _ in range(10):
        assert not auto.record([32, 32], [0.032, None])
    assert auto.record([32, 32], [0.032, 0.096])
    assert counts_of(auto.loads, 64) == [48, 16]
    assert auto.speeds() == pytest.approx([1000, 333.3], rel=0.05)


def test_no_split_changes_before_a_second_of_batches_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_model, "_MIN_SECONDS", 0.125)
    job = Job([(0.0, 1e-4), (0.0, 1e-3)], size=16)  # 0.8 and 8 ms: a busy core can do that for so short a time
    job.epochs(1, batches=120)
    assert job.model.loads == [0.5, 0.5]
    job.epochs(1, batches=120)
    assert counts_of(job.model.loads, 16) == [15, 1]


# Limits of memory: what a GPU has room for, and splits that caps shape


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
    balance = RankBalance(0, [1, 1])
    read = balance.split
    balance.discard_batch({1: 32})
    assert balance.split.caps == [None, 16]
    assert read.counts(64) == [32, 32]
    assert balance.split.counts(64) == [48, 16]
    balance.discard_batch({0: 48})
    assert balance.split.counts(64) == [38, 26]


class Timed:
    """A timer that returns set times."""

    seconds = 0.0

    def take(self) -> ElapsedTime:
        return ElapsedTime(self.seconds)

    def close(self) -> None:
        pass


def test_measured_limits_of_memory_lower_the_caps_of_the_user_and_end() -> None:
    timer: Any = Timed()
    balance = RankBalance(0, [1, 1], timer, caps=[40, 48])
    balance.receive(0, [Measured(limit=50.0), Measured(limit=30.0)], 64)
    assert balance.split.caps == [40, 30]
    balance.receive(1, [Measured(), Measured()], 64)
    assert balance.split.caps == [40, 48]


def test_times_of_batches_that_were_read_before_a_change_do_not_count() -> None:
    timer: Any = Timed()
    balance, numbers = RankBalance(0, [1, 1], timer, horizon=8), itertools.count(1)

    def receive(batches: int, *per_sample: float) -> None:
        for _ in range(batches):
            rows = [Measured(n * seconds, n) for n, seconds in zip(balance.split.counts(64), per_sample, strict=True)]
            balance.receive(next(numbers), rows, 64)

    receive(speed_model.WINDOW, 0.01, 0.03)
    assert balance.split.counts(64) == [48, 16]
    receive(9, 0.09, 0.01)  # of equal shares that were read ahead
    assert balance.split.counts(64) == [48, 16]
    receive(speed_model.WINDOW, 0.01, 0.03)
    assert balance.split.counts(64) == [48, 16]
    receive(speed_model.WINDOW, 0.03, 0.01)
    assert balance.split.counts(64) == [16, 48]


@pytest.mark.parametrize(("follows", "lines"), [("samples", 1), ("cost", 0), ("neither", 0)])
def test_step_times_that_lengths_do_not_explain_are_logged_once(
    follows: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    timer: Any = Timed()
    balance, draw = RankBalance(0, [1, 1], timer, by_cost=True), random.Random(0)
    with caplog.at_level("INFO", "gangline"):
        for _ in range(100):
            samples, cost = draw.randint(2, 9), draw.uniform(80, 100)
            timer.seconds = {"samples": samples, "cost": cost, "neither": draw.uniform(5, 6)}[follows] * 1e-3
            balance.begin_batch(cost, samples)
            balance.measured()
    assert sum("number of samples more than lengths=" in record.message for record in caplog.records) == lines


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
    limits = MemoryLimits(["cpu"] * len(contexts), LOGGER)
    limits.max_samples = [most for _, most in contexts]
    rounds = limits.micro_steps(slices)
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


@pytest.mark.parametrize("by_lengths", [False, True])
@pytest.mark.parametrize("drift", DRIFTS)
def test_steps_take_little_longer_than_with_known_speeds_while_these_drift(drift: str, by_lengths: bool) -> None:
    cases = [(0, 0.05), (1, 0.15), (2, 0.3), (100, 0.05)]  # in the last one a rank changes just as its share does
    runs = [simulate(seed, drift, noise, 2, by_lengths=by_lengths) for seed, noise in cases]
    assert max(run.over_ideal for run in runs) <= 1.10
    if drift == "3 times slower":
        assert all(run.reaction is not None and run.reaction <= 16 for run in runs)


@pytest.mark.parametrize(("slower", "least", "most"), [(1.0, 0.45, 0.55), (3.0, 0.22, 0.28)])
def test_a_rank_gets_its_part_of_the_cost_within_64_batches(slower: float, least: float, most: float) -> None:
    for seed in range(10):
        random_, draw = random.Random(seed), np.random.default_rng(seed)
        model, order = SpeedModel(["rank 0", "rank 1"], None, may_idle=False, parts=4096), [0, 1]
        for _ in range(64):
            costs = draw.lognormal(0, 1, 32)
            parts = cut_by_cost(costs, [model.loads[rank] for rank in order])
            of_rank = [parts[order.index(rank)] for rank in range(2)]
            padded = [float(costs[part].max() * len(part)) for part in of_rank]
            times = [
                cost * slow * random_.lognormvariate(0, 0.05) for cost, slow in zip(padded, (1, slower), strict=True)
            ]
            if model.record(padded, times):
                order = ranks_by_speed(model.loads, order)
        assert least <= model.loads[1] <= most


def test_an_equal_split_says_what_a_change_needs() -> None:
    job = Job([(0, 1e-2), (0, 1.01e-2)], 64)
    job.epochs(1, batches=3)
    assert job.model.why_kept() == "3 of 8 measurements"
    job.epochs(1, batches=6)
    assert job.model.why_kept() == "no other gains more than 3%, the error of the measurements"
