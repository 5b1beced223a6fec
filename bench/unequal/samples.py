"""`gangline bench unequal-samples`: texts of unequal length under DistributedDataParallel and `gangline.balance`.

A run is an epoch, so that all candidates train on the same texts; only real tokens count, not padding. DDP runs in the
same processes as the balanced loaders and profits from the memory that these keep. Beside them is an estimate of what
they would reach "without padding and waiting": each rank trains alone, all at the same time, on its part of the batches
of all texts sorted by length. Its tokens per second, with the little padding of these batches, are added up over the
ranks.

Each rank has a core of its own, or a CPU quota of a cgroup if there are more ranks than cores. The last one is slowed
down by a quota or, where this user may set none, by processes that compete for its core.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from gangline.bench.driver.harness import in_turn, say
from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.plots import draw_step
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.unequal.slow_process import can_set_quota, slow_process
from gangline.bench.workload.options import Json, Plot, Runs
from gangline.bench.workload.sizes import counts as parse_counts
from gangline.bench.workload.sizes import factors as parse_factors
from gangline.usage_error import UsageError

_IDEAL = "without padding and waiting"
_DDP, _LENGTHS = "DDP", "balance, lengths"
_DDP_EQUAL, _LENGTHS_EQUAL = f"{_DDP}, equal lengths", f"{_LENGTHS}, equal lengths"
_LONGEST = 512  # tokens
_WAYS: dict[str, dict[str, Any]] = {
    _IDEAL: {"sampler": "sorted"},
    _DDP: {},
    "DDP, accumulate 4": {"accumulate": 4},
    "DDP, group_by_length": {"sampler": "group_by_length"},
    "DDP, batch_rebalance": {"sampler": "batch_rebalance"},
    "DDP, batch_rebalance, accumulate 4": {"sampler": "batch_rebalance", "accumulate": 4},
    "balance by speed": {"balanced": {}},
    _LENGTHS: {"balanced": {"lengths": True}},
    **{f"{_LENGTHS}, accumulate {n}": {"balanced": {"lengths": True}, "accumulate": n} for n in (2, 4)},
    **{f"{_LENGTHS}, pool {n}": {"balanced": {"lengths": True, "pool": n}} for n in (4, 16)},
    _DDP_EQUAL: {"equal": True},
    _LENGTHS_EQUAL: {"equal": True, "balanced": {"lengths": True}},
}
"""Differences from DDP with random batches, by row."""


def unequal_samples(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2",
    factors: Annotated[str, typer.Option(help="Factors by which the last rank is slower, with commas.")] = "1,3",
    batch_size: Annotated[int, typer.Option(help="Texts of each rank in an equal split.", min=1)] = 16,
    batches: Annotated[int, typer.Option(help="Global batches of an epoch.", min=4)] = 32,
    mean_length: Annotated[float, typer.Option(help="Mean tokens of a text.", min=8, max=_LONGEST)] = 55.0,
    only: Annotated[str, typer.Option(help="Regular expression of the rows to measure; DDP always has one.")] = "",
    runs: Runs = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure real tokens per second of DDP, transformers' samplers and balanced loaders, an epoch of each in turn.

    Texts have lognormal lengths of 8 to 512 tokens. --plot draws a step of the last case under DDP and with lengths.
    """
    check_outputs(json, plot)
    sizes, speeds = parse_counts(ranks, "--ranks"), parse_factors(factors, "--factors", 100)
    try:
        chosen = [who for who in _WAYS if who in (_IDEAL, _DDP, _DDP_EQUAL) or re.search(only, who)]
    except re.error as error:
        raise UsageError(
            f"--only is {only!r}: {error}; expected a regular expression, such as 'pool|accumulate'"
        ) from None
    cores = len(os.sched_getaffinity(0))
    if max(sizes) > cores and not can_set_quota():
        raise UsageError(
            f"--ranks is {ranks}, but this process may use {cores} cores; each rank needs one, because this user may "
            "not set CPU quotas of cgroups"
        )
    rows: list[Row] = []
    steps: dict[str, list[Row]] = {}
    for size in sizes:
        texts = {"samples": size * batch_size * batches, "mean_length": mean_length, "longest": _LONGEST}
        same = {"sampler": "random", "balanced": None, "accumulate": 1, "equal": False, "timed": False}
        options = {**same, **texts, "batch_size": batch_size}
        with ExitStack() as stack:
            candidate = Candidate("unequal/samples", size, env={"BENCH_BACKEND": "gloo"})
            group = stack.enter_context(RankGroup(candidate))
            slow_down, slowed_by = _slow_ranks(group, cores, stack)
            for factor in speeds:
                slow_down(factor)
                case = {
                    "ranks": size,
                    "slower_by": f"{factor:g}",
                    "slowed_by": slowed_by if factor > 1 else "nothing",
                    "batch_size": size * batch_size,
                    "batches": batches,
                    "mean_length": mean_length,
                    "ranks_on_a_core": math.ceil(size / cores),
                }
                is_equal = factor == 1  # `gangline bench unequal-ranks` has a slow rank and equal samples
                names = [who for who in chosen if is_equal or not _WAYS[who].get("equal")]
                say(f"{size} ranks, factor {factor:g}: settling")
                rows += [{"who": row["who"], **case, **row} for row in _measure(group, options, names, runs)]
            if plot is not None and size == sizes[-1]:
                steps = dict(_timed_steps(group, options))
    publish(rows, json)
    if plot is not None:
        names = [f"rank {rank}" for rank in range(sizes[-1])]
        if speeds[-1] > 1:
            names[-1] += f", {speeds[-1]:g} x slower"
        draw_step(f"A step of DistributedDataParallel with {sizes[-1] * batch_size} texts", steps, names, plot)


def _slow_ranks(group: RankGroup, cores: int, stack: ExitStack) -> tuple[Callable[[float], None], str]:
    """Return a function that slows the last rank down by a factor, and what it slows it down by.

    With quotas, ranks that share a core get equal parts of it.
    """
    pids = group.rank_pids()
    on_a_core = math.ceil(len(pids) / cores)
    own = sorted(os.sched_getaffinity(0))
    slowed = pids if can_set_quota() else pids[-1:]
    processes = [slow_process(pid, own[(len(pids) - 1) % cores]) for pid in slowed]
    for process in processes:
        stack.callback(process.close)

    def slow_down(factor: float) -> None:
        for process in processes:
            process.slow_down(on_a_core * (factor if process is processes[-1] else 1.0))

    return slow_down, processes[-1].name


def _measure(group: RankGroup, options: Row, names: list[str], runs: int) -> list[Row]:
    """Measure ways in turn; those with equal lengths stand beside DDP with equal lengths."""
    ways = _prepared(group, options, names)
    say(f"measuring {len(ways)} ways, {runs} epochs each, in turn")
    reports: dict[str, list[list[Row]]] = {}

    def rate(who: str) -> float:
        seconds = group.seconds(1, who, 0)
        reports[who] = [report["steps"] for report in group.report(who)]
        if who == _IDEAL:
            return sum(_total(steps, "padded") / _total(steps, "seconds") for steps in reports[who])
        return sum(_total(steps, "real") for steps in reports[who]) / seconds

    found = in_turn({who: lambda who=who: rate(who) for who in ways}, runs)  # type: ignore[misc]
    rows: list[Row] = []
    for who, rates in found.items():
        is_equal = "equal" in _WAYS[who]
        loads = group.report(who)[0]["loads"]
        both = [sum(_total(steps, name) for steps in reports[who]) for name in ("padded", "real")]
        rows.append(
            {
                "who": who,
                "split": ":".join(f"{100 * load / sum(loads):.0f}" for load in loads) if loads else None,
                "padded_to_real": None if who == _IDEAL else both[0] / both[1],
                "tokens_per_s": statistics.median(rates),
                "times_ddp": times_as_fast(found[_DDP_EQUAL if is_equal else _DDP], rates),
                "of_the_ideal": None if is_equal else times_as_fast(found[_IDEAL], rates),
                **spread(rates),
            }
        )
    return rows


def _prepared(group: RankGroup, options: Row, names: list[str]) -> list[str]:
    """Prepare ways to train, which trains three epochs of each; leave those out that miss a package."""
    found = []
    for who in names:
        try:
            group.prepare({**options, **_WAYS[who]}, who)
            found.append(who)
        except GroupError as error:
            if "ImportError" not in str(error):
                raise
            say(f"leaving {who!r} out: {error}")
    return found


def _timed_steps(group: RankGroup, options: Row) -> Iterator[tuple[str, list[Row]]]:
    """Return the same step of each rank under DDP, of median time, and with lengths."""
    steps: dict[str, list[list[Row]]] = {}
    for who in (_DDP, _LENGTHS):
        group.prepare({**options, **_WAYS[who], "timed": True}, "timed")
        steps[who] = [report["steps"] for report in group.report("timed")]
    first = steps[_DDP][0]
    number = sorted(range(len(first)), key=lambda step: float(first[step]["seconds"]))[len(first) // 2]
    for who, of_ranks in steps.items():
        yield who, [of_rank[number] for of_rank in of_ranks]


def _total(steps: list[Row], name: str) -> float:
    return sum(float(step[name]) for step in steps)
