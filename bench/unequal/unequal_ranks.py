"""`gangline bench unequal-ranks`: `gangline.balance` beside plain DistributedDataParallel on ranks of unequal speed.

Each rank has a core of its own. The last one is slowed down by a CPU quota of a cgroup or, where this user may set
none, by processes that compete for its core.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.unequal.slow_process import SlowProcess, slow_process
from gangline.bench.workload.options import Json, Runs, RunSeconds
from gangline.collectives.errors import UsageError

if TYPE_CHECKING:
    from gangline.collectives.processes.process_pool import ProcessPool

_TRACED_STEPS = 4  # drawn in a timeline
_AT_SHARES = "the same, at balanced shares"  # a rank's speed depends on the size of its batches
_IN_STEP = "the same, each step as long as its slowest"  # what no split can avoid where times vary
_SETTLE_STEPS = 40  # of the balanced run, before it is measured


def unequal_ranks(
    factors: Annotated[str, typer.Option(help="Factors by which the last rank is slower, with commas.")] = "1,1.5,3,10",
    batch_size: Annotated[int, typer.Option(help="Samples of each rank in the equal split.", min=2)] = 128,
    ranks: Annotated[int, typer.Option(help="Number of ranks, with a core each.", min=2)] = 2,
    backend: Annotated[str, typer.Option(help="Backend of torch.distributed: gloo or gangline.")] = "gloo",
    run_seconds: RunSeconds = 2.0,
    runs: Runs = 5,
    json: Json = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a few steps of the largest factor into this .png file.")
    ] = None,
) -> None:
    """Measure samples per second of each rank alone, of DistributedDataParallel, and of a balanced loader, in turn."""
    check_outputs(json)
    speeds = _parsed(factors)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        raise UsageError(f"--ranks is {ranks}, but this process may use {len(cores)} cores; each rank needs one")
    rows: list[Row] = []
    for factor in speeds:
        drawn = timeline if factor == max(speeds) else None
        rows += measure(factor, cores[:ranks], batch_size, backend, run_seconds, runs, drawn)
    publish(command_line(), rows, json)


def measure(
    factor: float,
    cores: Sequence[int],
    batch_size: int,
    backend: str,
    run_seconds: float,
    runs: int,
    timeline: Path | None,
) -> list[Row]:
    """Measure one factor.

    Args:
        factor: by which the last rank is slower.
        cores: one per rank.
        batch_size: samples of each rank in the equal split.
        backend: of torch.distributed.
        run_seconds: approximate length of a run.
        runs: number of runs of each candidate, in turn.
        timeline: file to draw some steps into; None: nothing is drawn.
    """
    from gangline.bench.driver.candidates import in_turn, say

    size = len(cores)
    with _ranks(cores, batch_size, backend) as (pool, slow):
        slow.slow_down(factor)
        ask = partial(_ask, pool)
        everybody = range(size)
        ask("renew", 1, everybody)
        say(f"factor {factor:g}: settling")
        ask("balanced", _SETTLE_STEPS, everybody)
        alone: dict[int, list[float]] = {rank: [] for rank in everybody}
        in_step: list[float] = []

        def each_alone(request: str) -> float:
            """Train all ranks at once without communication: cores may share caches, memory and a clock."""
            answers = _answers(pool, request, run_seconds, everybody)
            seconds: list[list[float]] = [answers[rank][0] for rank in everybody]
            shares = answers[0][2] or [batch_size] * size
            rates: list[float] = [share * len(own) / sum(own) for share, own in zip(shares, seconds, strict=True)]
            if request == "alone":
                for rank, rate in enumerate(rates):
                    alone[rank].append(rate)
            else:
                in_step.append(sum(shares) / statistics.mean(map(max, zip(*seconds, strict=False))))
            return sum(rates)

        measurements: dict[str, Callable[[], float]] = {
            "sum of ranks alone": partial(each_alone, "alone"),
            _AT_SHARES: partial(each_alone, "share alone"),
            **{
                name: partial(_samples_per_second, ask, request, everybody, size * batch_size, run_seconds)
                for name, request in (("DDP", "ddp"), ("balanced", "balanced"))
            },
        }
        say(f"factor {factor:g}: measuring")
        found = in_turn(measurements, runs)
        _, shares = ask("balanced", 1, everybody)
        if timeline is not None:
            _draw(timeline, pool, factor, [batch_size] * size, shares)
        together = found["sum of ranks alone"]
        found.update({f"rank {rank} alone": of_rank for rank, of_rank in alone.items()})
        found[_IN_STEP] = in_step
        ranks_alone = [f"rank {rank} alone" for rank in everybody]
        order = [*ranks_alone, "sum of ranks alone", _AT_SHARES, _IN_STEP, "DDP", "balanced"]
        return [
            {
                "who": who,
                "slower_by": f"{factor:g}",
                "slowed_by": slow.name if factor > 1 else "nothing",
                "ranks": size,
                "batch_size": size * batch_size,
                "backend": backend,
                "split": _split(who, shares, size, batch_size),
                "samples_per_s": statistics.median(found[who]),
                "of_the_sum": _ratio(found[who], together),
                "of_the_sum_at_shares": _ratio(found[who], found[_AT_SHARES]),
                "ratio_to_ddp": _ratio(found[who], found["DDP"]),
                **spread(found[who]),
            }
            for who in order
        ]


@contextmanager
def _ranks(cores: Sequence[int], batch_size: int, backend: str) -> Iterator[tuple[ProcessPool, SlowProcess]]:
    from gangline.bench.unequal.rank_program import RankOptions, serve
    from gangline.collectives.processes.process_pool import ProcessPool

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-"))
        pool = ProcessPool(serve, len(cores))
        stack.callback(pool.close)
        for rank, core in enumerate(cores):
            options = RankOptions(rank, len(cores), core, str(Path(folder, "store")), batch_size, backend)
            pool.connections[rank].send(options)
        slow = slow_process(pool.pids[-1], cores[-1])
        stack.callback(slow.close)
        yield pool, slow


def _draw(path: Path, pool: ProcessPool, factor: float, equal: Sequence[int], shares: Sequence[int]) -> None:
    from gangline.bench.unequal.timeline import draw_timelines

    panels = {}
    for name, counts, request in (("equal batches", equal, "trace ddp"), ("balanced", shares, "trace balanced")):
        answers = _answers(pool, request, _TRACED_STEPS, range(len(equal)))
        first = min(steps[0][0] for steps, *_ in answers.values())
        panels[f"{name}: {' and '.join(map(str, counts))} samples"] = [
            [(begin - first, computed - first, end - first) for begin, computed, end in answers[rank][0]]
            for rank in sorted(answers)
        ]
    labels = [*(f"rank {rank}" for rank in range(len(equal) - 1)), f"rank {len(equal) - 1}, {factor:g} x slower"]
    draw_timelines(f"Steps of DistributedDataParallel with {sum(equal)} samples each", panels, labels, path)


def _ask(pool: ProcessPool, name: str, steps: int, ranks: Sequence[int]) -> tuple[float, list[int]]:
    """Ask ranks to train; return the longest time and the split of the last batch."""
    answers = _answers(pool, name, steps, ranks)
    return max(seconds for seconds, *_ in answers.values()), answers[ranks[0]][2]


def _answers(pool: ProcessPool, name: str, steps: float, ranks: Sequence[int]) -> dict[int, Any]:
    """Ask ranks to train so many steps, or seconds if alone; return seconds, steps and split of each."""
    for rank in ranks:
        pool.connections[rank].send((name, steps))
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        ready, ended = pool.wait()
        for rank in ready:
            try:
                answers[rank] = pool.connections[rank].recv()
            except EOFError:
                ended[rank] = None
        if ended:
            raise RuntimeError(f"rank {min(ended)} ended while it ran {name!r}; its error is above")
    return answers


def _steps_in(seconds: float, ask: Any, request: str, ranks: Sequence[int]) -> int:
    took: float = ask(request, 2, ranks)[0]
    return max(2, round(2 * seconds / took))


def _samples_per_second(ask: Any, request: str, ranks: Sequence[int], samples: int, run_seconds: float) -> float:
    steps = _steps_in(run_seconds, ask, request, ranks)
    took, _ = ask(request, steps, ranks)
    return float(steps * samples / took)


def _split(who: str, shares: Sequence[int], size: int, batch_size: int) -> str | None:
    if who == "balanced":
        return ":".join(map(str, shares))
    return ":".join([str(batch_size)] * size) if who == "DDP" else None


def _ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(own, other, strict=True))


def _parsed(factors: str) -> list[float]:
    try:
        found = [float(word) for word in factors.split(",")]
    except ValueError:
        raise UsageError(f"--factors is {factors!r}; expected numbers with commas, such as 1,1.5,3,10") from None
    if not all(1 <= factor <= 100 for factor in found):
        raise UsageError(f"--factors is {factors!r}; expected numbers from 1 to 100")
    return found
