"""Simulate ranks whose speeds drift, under the measured split: `python -m tests.models.drifts --runs 200`.

A step takes as long as its slowest rank. The ideal knows all speeds at once, and has the same noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from gangline.kvstore.workload import split_within
from gangline.models.balance import speed_model
from gangline.models.balance.speed_model import SpeedModel
from gangline.models.data.shares import cut_by_cost, ranks_by_speed

STEPS, CHANGE, BATCH = 600, 200, 64
"""Steps of a run, the step of a change, and samples of all ranks."""


def _ramp(step: int) -> float:
    return min(1.0, max(0, step - CHANGE) / 200)


DRIFTS: dict[str, Callable[[int], tuple[float, float]]] = {
    "none": lambda _: (1, 1),
    "3 times slower": lambda step: (1, 3 if step >= CHANGE else 1),
    "1.2 times slower": lambda step: (1, 1.2 if step >= CHANGE else 1),
    "3 times faster": lambda step: (1, 1 if step >= CHANGE else 3),
    "slows to 4": lambda step: (1, 1 + 3 * _ramp(step)),
    "recovers from 4": lambda step: (1, 4 - 3 * _ramp(step)),
    "two at once": lambda step: (1.5, 2) if step >= CHANGE else (1, 1),
    "40 steps on, 40 off": lambda step: (1, 2 if step // 40 % 2 else 1),
    "spikes": lambda _: (1, 1),
}
"""Slowness of the first and the last rank at a step."""


class Run(NamedTuple):
    """Result of a simulated run."""

    over_ideal: float
    """Time over that of the best splits."""
    reaction: int | None
    """Steps from the change of speed to the first new split."""
    changes: int


def simulate(seed: int, drift: str, noise: float, ranks: int, *, by_lengths: bool) -> Run:
    """Simulate a run in which times have lognormal noise, of samples of equal or of lognormal lengths."""
    rng = random.Random(seed)
    draw = np.random.default_rng(seed)
    model = SpeedModel(list(map(str, range(ranks))), None, may_idle=False, parts=4096 if by_lengths else None)
    order, ideal_order = list(range(ranks)), list(range(ranks))
    took = ideal = 0.0
    reaction, changes = None, 0
    for step in range(STEPS):
        first, last = DRIFTS[drift](step)
        slowness = [first, *[1.0] * (ranks - 2), last]
        factors = [rng.lognormvariate(0, noise) for _ in slowness]
        if drift == "spikes":
            factors = [5 * factor if rng.random() < 0.02 else factor for factor in factors]
        speeds = [1 / slow for slow in slowness]
        if by_lengths:
            lengths = draw.lognormal(0, 1, BATCH)
            ideal_order = ranks_by_speed(speeds, ideal_order)
            costs, best = (_costs(lengths, *split) for split in ((model.loads, order), (speeds, ideal_order)))
        else:
            costs, best = (list(map(float, split_within(BATCH, loads))) for loads in (model.loads, speeds))
        seconds, ideal_seconds = (
            [cost * slow * factor for cost, slow, factor in zip(each, slowness, factors, strict=True)]
            for each in (costs, best)
        )
        took, ideal = took + max(seconds), ideal + max(ideal_seconds)
        if model.record(costs, seconds):
            order = ranks_by_speed(model.loads, order)
            changes += 1
            reaction = step - CHANGE if reaction is None and step >= CHANGE else reaction
    return Run(took / ideal, reaction, changes)


def _costs(lengths: np.ndarray, speeds: Sequence[float], order: Sequence[int]) -> list[float]:  # type: ignore[type-arg]
    """Return the padded cost of each rank's part."""
    parts = cut_by_cost(lengths, [speeds[rank] for rank in order])
    of_rank = dict(zip(order, parts, strict=True))
    return [float(lengths[of_rank[rank]].max() * len(of_rank[rank])) for rank in range(len(order))]


def _row(case: tuple[str, float, int, bool], runs: int) -> str:
    speed_model._MIN_SECONDS = 0.0  # each step is a measurement
    drift, noise, ranks, by_lengths = case
    found = [simulate(seed, drift, noise, ranks, by_lengths=by_lengths) for seed in range(runs)]
    reactions = [run.reaction for run in found if run.reaction is not None]
    reaction = f"{statistics.median(reactions):.0f}" if reactions else "-"
    over = sorted(run.over_ideal for run in found)
    lengths = "lognormal" if by_lengths else "equal"
    changes = statistics.mean(run.changes for run in found)
    return (
        f"{drift:20} {noise:5.0%} {ranks:5} {lengths:9} {statistics.median(over):7.3f} {over[-1]:6.2f} "
        f"{reaction:>8} {changes:7.1f}"
    )


def main() -> None:
    """Print a row for each drift, noise, number of ranks and kind of lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="Runs of each row.")
    runs = parser.parse_args().runs
    noises, kinds = (0.05, 0.15, 0.3), (False, True)
    cases = [(drift, noise, ranks, kind) for ranks in (2, 4) for kind in kinds for noise in noises for drift in DRIFTS]
    print("drift                noise ranks lengths    median  worst reaction changes")
    with ProcessPoolExecutor() as pool:
        for row in pool.map(partial(_row, runs=runs), cases):
            print(row, flush=True)


if __name__ == "__main__":
    main()
