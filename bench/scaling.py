"""`gangline bench training --scaling 1,2,4`: samples per second of so many workers, beside torch's DDP over gloo.

Each worker is a process of one thread, and its share of a batch stays the same however many there are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gangline.bench.report import Row, spread
from gangline.bench.workload import images

if TYPE_CHECKING:
    from gangline.bench.job_processes import Plan
    from gangline.bench.jobs import Job

STORES = ("dist_sync", "allreduce", "apart")
"""What is measured unless others are asked for. "apart" is no store: workers that share nothing but the machine."""

SAMPLES = 128
"""Of a worker's step, unless others are asked for: then resnet18 computes for much longer than it talks."""
_PEER = "ddp"
_APART = "apart"
_NAME = "training"  # under which all jobs are prepared


def measure(
    network: str,
    samples: int,
    workers: Sequence[int],
    stores: Sequence[str],
    peers: Sequence[str],
    runs: int,
    run_seconds: float,
) -> list[Row]:
    """Rows of gangline's stores and of the peers, for each number of workers, all measured in turn.

    Args:
        network: of the zoo.
        samples: of a worker's step.
        workers: how many there are, in turn.
        stores: kinds of store; the ``dist_`` ones have one server. "ddp" is torch's DDP over backend "gangline",
            "apart" no store at all.
        peers: names out of "ddp".
        runs: of each side.
        run_seconds: about how long a run takes.

    Raises:
        ValueError: an unknown network.
        JobError: a job failed.
    """
    from gangline.bench.jobs import Job

    given = images(network)
    options = {"network": network, "image_shape": given.shape, "classes": given.classes, "samples": samples}
    sides: list[str | None] = [*stores, *(None for _ in peers)]
    with ExitStack() as stack:
        jobs: dict[Job, int] = {}
        for side in sides:
            for count in workers:
                _say(f"starting {side or _PEER}, {count} workers")
                job = stack.enter_context(Job(_plan(side, count)))
                answers = job.ask({"prepare": options, "as": _NAME})
                jobs[job] = max(2, math.ceil(run_seconds / max(answer["seconds"] for answer in answers)))
        rates: dict[Job, list[float]] = {job: [] for job in jobs}
        _say(f"measuring, {runs} runs each, in turn")
        for _ in range(runs):
            for job, steps in jobs.items():
                rates[job].append(job.plan.workers * samples / job.seconds(_NAME, steps))
        return [_row(job, rates, network, samples) for job in jobs]


def counts(words: str) -> list[int]:
    """The numbers of ``--scaling``.

    Raises:
        ValueError: a word is no number above 0.
    """
    found = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in found):
        raise ValueError(f"--scaling is {words!r}; expected numbers of workers above 0 with commas, such as 1,2,4")
    return list(dict.fromkeys(int(word) for word in found))


def speedups(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each side and number of workers that stands beside one worker alone."""
    for row in rows:
        if row["workers"] > 1 and row["efficiency"] is not None:
            side = ", ".join(filter(None, [row["who"], row["store"]]))
            speedup = row["efficiency"] * row["workers"]
            yield f"{side}: {row['workers']} workers are {speedup:.2f} times as fast as one"


def _plan(store: str | None, workers: int) -> Plan:
    from gangline.bench.job_processes import Plan

    threads = {"OMP_NUM_THREADS": "1"}
    if store is None:
        return Plan(f"{_PEER}_scaling", workers, env=threads)
    if store == _PEER:  # the peer's way, over our backend
        return Plan(f"{_PEER}_scaling", workers, env={**threads, "BENCH_STORE": store, "BENCH_BACKEND": "gangline"})
    servers = int(store.startswith("dist"))
    return Plan("gangline_scaling", workers, servers, env={**threads, "BENCH_STORE": store})


def _row(job: Job, rates: Mapping[Job, Sequence[float]], network: str, samples: int) -> Row:
    plan, figures = job.plan, spread(rates[job])
    alone = next((other for other in rates if _side(other) == _side(job) and other.plan.workers == 1), None)
    beside = {_side(other): other for other in rates if other.plan.workers == plan.workers}
    peer, apart = beside.get(None), beside.get(_APART)
    row: Row = {
        "who": job.who,
        "store": _side(job),
        "network": network,
        "workers": plan.workers,
        "servers": plan.servers or None,
        "batch_size": plan.workers * samples,
        "samples_per_s": figures["p50"],
        "efficiency": _ratio(rates[job], rates[alone]) / plan.workers if alone else None,
    }
    if any(_side(other) is None for other in rates):
        row[f"ratio_to_{_PEER}"] = _ratio(rates[job], rates[peer]) if peer else None
    if apart is not None and apart is not job:
        row[f"ratio_to_{_APART}"] = _ratio(rates[job], rates[apart])
    return {**row, **figures}


def _side(job: Job) -> str | None:
    """The kind of store; None: the peer, which has none."""
    return job.plan.env.get("BENCH_STORE")


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the runs, each beside its neighbour."""
    return float(spread([own / other for own, other in zip(ours, theirs, strict=True)])["p50"])


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
