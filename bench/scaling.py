"""`gangline bench training --workers 1,2,4`: samples per second of several workers, beside torch's DDP over gloo.

Each worker is a process of one thread, and its share of a batch does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.workload.networks import images

if TYPE_CHECKING:
    from gangline.bench.driver.processes import Candidate
    from gangline.bench.driver.rank_group import RankGroup

STORES = ("dist_sync", "allreduce", "apart")
"""The stores measured by default. "apart" is no store: workers that share nothing but the machine."""
SAMPLES = 128
"""Default samples of a worker's step: with them resnet18 computes much longer than it communicates."""
_PEER = "ddp"
_APART = "apart"


def measure(
    network: str,
    samples: int,
    workers: Sequence[int],
    stores: Sequence[str],
    peers: Sequence[str],
    runs: int,
    run_seconds: float,
) -> list[Row]:
    """Measure gangline's stores and the peers with each number of workers, all in turn.

    Args:
        network: network of the zoo.
        samples: samples of a worker's step.
        workers: numbers of workers.
        stores: kinds of store; those that begin with ``dist_`` have one server. "ddp" is torch's DDP over backend
            "gangline", "apart" is no store.
        peers: names out of "ddp".
        runs: number of runs of each candidate.
        run_seconds: approximate length of a run.

    Raises:
        ValueError: if the network is unknown.
        GroupError: if a job fails.
    """
    from gangline.bench.driver.harness import in_turn, say
    from gangline.bench.driver.rank_group import RankGroup

    shape = images(network)
    options = {"network": network, "image_shape": shape.shape, "classes": shape.classes, "samples": samples}
    with ExitStack() as stack:
        steps: dict[RankGroup, int] = {}
        for store in [*stores, *(None for _ in peers)]:
            for count in workers:
                say(f"starting {store or _PEER}, {count} workers")
                job = stack.enter_context(RankGroup(_candidate(store, count)))
                job.prepare({**options, "batch_size": count * samples, "contexts": "cpu(0)"})
                steps[job] = job.steps_in(run_seconds, least=2)
        say(f"measuring, {runs} runs each, in turn")
        seconds = in_turn({job: partial(job.seconds, count) for job, count in steps.items()}, runs)
        return [_row(job, seconds, network, samples) for job in steps]


def speedups(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each candidate and number of workers that was also measured with one worker."""
    for row in rows:
        if row["workers"] > 1 and row["efficiency"] is not None:
            name = ", ".join(filter(None, [row["who"], row["store"]]))
            speedup = row["efficiency"] * row["workers"]
            yield f"{name}: {row['workers']} workers are {speedup:.2f} times as fast as one"


def _candidate(store: str | None, workers: int) -> Candidate:
    from gangline.bench.driver.processes import SERVER, Candidate

    env = {"OMP_NUM_THREADS": "1"}
    if store is not None:
        env["BENCH_STORE"] = store
    if store == _PEER:  # DDP over gangline's backend
        env["BENCH_BACKEND"] = "gangline"
    file = "training/ddp" if store in (None, _PEER) else "training/gangline"
    servers = int(store is not None and store.startswith("dist"))
    return Candidate(file, workers, servers, env=env, server_code=SERVER if servers else "")


def _row(job: RankGroup, seconds: Mapping[RankGroup, Sequence[float]], network: str, samples: int) -> Row:
    count = job.candidate.ranks
    figures = spread([count * samples / each for each in seconds[job]])
    others = {(_store(other), other.candidate.ranks): other for other in seconds}
    row: Row = {
        "who": job.who,
        "store": _store(job),
        "network": network,
        "workers": count,
        "servers": job.candidate.servers or None,
        "batch_size": count * samples,
        "samples_per_s": figures["p50"],
        "efficiency": _ratio(job, others.get((_store(job), 1)), seconds),
    }
    if any(_store(other) is None for other in seconds):
        row[f"ratio_to_{_PEER}"] = _ratio(job, others.get((None, count)), seconds)
    apart = others.get((_APART, count))
    if apart is not None and apart is not job:
        row[f"ratio_to_{_APART}"] = _ratio(job, apart, seconds)
    return {**row, **figures}


def _store(job: RankGroup) -> str | None:
    """Return the kind of store; None: the peer, which has none."""
    return job.candidate.env.get("BENCH_STORE")


def _ratio(job: RankGroup, other: RankGroup | None, seconds: Mapping[RankGroup, Sequence[float]]) -> float | None:
    """Return a worker's samples/s over those of the other job: the batch of a worker is the same in both."""
    return None if other is None else times_as_fast(seconds[job], seconds[other])
