"""`gangline bench unequal-ranks`: `gangline.balance` beside plain DistributedDataParallel on ranks of unequal speed.

Each rank has a core of its own. The last one is slowed down by a CPU quota of a cgroup or, where this user may set
none, by processes that compete for its core.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from typing import Annotated

import typer

from gangline.bench.driver.harness import in_turn, say
from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import RankGroup
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.unequal.slow_process import SlowProcess, slow_process
from gangline.bench.workload.options import Json, Runs, RunSeconds
from gangline.bench.workload.sizes import factors as parse_factors
from gangline.usage_error import UsageError

_AT_SHARES = "the same, at balanced shares"  # a rank's speed depends on the size of its batches
_IN_STEP = "the same, each step as long as its slowest"  # unavoidable if times vary
_SUM = "sum of ranks alone"
_SETTLE_STEPS = 40  # of the balanced run, before it is measured


def unequal_ranks(
    factors: Annotated[str, typer.Option(help="Factors by which the last rank is slower, with commas.")] = "1,1.5,3,10",
    batch_size: Annotated[int, typer.Option(help="Samples of each rank in the equal split.", min=2)] = 128,
    ranks: Annotated[int, typer.Option(help="Number of ranks, with a core each.", min=2)] = 2,
    backend: Annotated[str, typer.Option(help="Backend of torch.distributed: gloo or gangline.")] = "gloo",
    run_seconds: RunSeconds = 2.0,
    runs: Runs = 5,
    json: Json = None,
) -> None:
    """Measure samples per second of each rank alone, of DistributedDataParallel, and of a balanced loader, in turn."""
    check_outputs(json)
    speeds = parse_factors(factors, "--factors", 100)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise UsageError(f"--ranks is {ranks}, but this process may use {len(cores)} cores; each rank needs one")
    rows: list[Row] = []
    with ExitStack() as stack:
        group = stack.enter_context(RankGroup(Candidate("unequal/rank", ranks, env={"BENCH_BACKEND": backend})))
        slow = slow_process(group.rank_pids()[-1], cores[ranks - 1])
        stack.callback(slow.close)
        for factor in speeds:
            rows += _measure(group, slow, factor, batch_size, run_seconds, runs, backend)
    publish(rows, json)


def _measure(
    group: RankGroup, slow: SlowProcess, factor: float, batch_size: int, run_seconds: float, runs: int, backend: str
) -> list[Row]:
    """Measure with the last rank slower by ``factor``."""
    size = group.candidate.ranks
    slow.slow_down(factor)
    say(f"factor {factor:g}: settling")
    options = {"batch_size": batch_size, "seconds": run_seconds}
    for call in ("balanced", "ddp"):
        group.prepare({**options, "call": call}, call)
    group.seconds(_SETTLE_STEPS, "balanced", 0)
    for call in ("alone", "share alone"):
        group.prepare({**options, "call": call}, call)
    alone: dict[str, list[float]] = {f"rank {rank} alone": [] for rank in range(size)}
    in_step: list[float] = []

    def together(call: str) -> float:
        return size * batch_size / group.seconds(group.steps_in(run_seconds, call, least=2), call, 0)

    def each_alone(call: str) -> float:
        """Train all ranks at once without communication: cores may share caches, memory and a clock."""
        group.seconds(1, call, 0)
        seconds: list[list[float]] = [report["seconds"] for report in group.report(call)]
        shares = _shares(group) if call == "share alone" else [batch_size] * size
        rates = [share * len(own) / sum(own) for share, own in zip(shares, seconds, strict=True)]
        if call == "share alone":
            in_step.append(sum(shares) / statistics.mean(map(max, zip(*seconds, strict=False))))
        else:
            for own, rate in zip(alone.values(), rates, strict=True):
                own.append(rate)
        return sum(rates)

    say(f"factor {factor:g}: measuring")
    found = in_turn(
        {
            _SUM: lambda: each_alone("alone"),
            _AT_SHARES: lambda: each_alone("share alone"),
            "DDP": lambda: together("ddp"),
            "balanced": lambda: together("balanced"),
        },
        runs,
    )
    split = {"DDP": ":".join([str(batch_size)] * size), "balanced": ":".join(map(str, _shares(group)))}
    return [
        {
            "who": who,
            "slower_by": f"{factor:g}",
            "slowed_by": slow.name if factor > 1 else "nothing",
            "ranks": size,
            "batch_size": size * batch_size,
            "backend": backend,
            "split": split.get(who),
            "samples_per_s": statistics.median(rates),
            "of_the_sum": times_as_fast(found[_SUM], rates),
            "of_the_sum_at_shares": times_as_fast(found[_AT_SHARES], rates),
            "ratio_to_ddp": times_as_fast(found["DDP"], rates),
            **spread(rates),
        }
        for who, rates in {
            **alone,
            _SUM: found[_SUM],
            _AT_SHARES: found[_AT_SHARES],
            _IN_STEP: in_step,
            "DDP": found["DDP"],
            "balanced": found["balanced"],
        }.items()
    ]


def _shares(group: RankGroup) -> list[int]:
    """Return the samples of each rank in the last balanced batch."""
    shares: list[int] = group.report("balanced")[0]["shares"]
    return shares
