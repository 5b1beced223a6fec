"""`gangline bench training --workers 1,2,4`: samples per second of several workers, beside torch's DDP over gloo.

Each worker is a process of one thread, and its share of a batch does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gangline.bench.driver.harness import Entry, Measured, measure_in_turn
from gangline.bench.driver.processes import SERVER, Candidate
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.workload.networks import images

STORES = ("dist_sync", "allreduce", "apart")
"""Stores measured by default. "apart" is no store: independent workers on the same machine.

"ddp" on request is torch's DDP over backend "gangline"; the peer "ddp" is the store None here.
"""
SAMPLES = 128
"""Default samples of a worker's step, with which resnet18 computes much longer than it communicates."""
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

    The arguments are options of `gangline bench training --workers`; the only peer is "ddp".
    """
    shape = images(network)
    options = {"network": network, "image_shape": shape.shape, "classes": shape.classes, "samples": samples}
    options["contexts"] = "cpu(0)"
    jobs = {
        (store, count): _candidate(store, count) for store in [*stores, *(None for _ in peers)] for count in workers
    }
    entries = {case: Entry([job], {**options, "batch_size": job.ranks * samples}) for case, job in jobs.items()}
    found = measure_in_turn(entries, jobs, runs, run_seconds)
    return [_row(case, found, network, samples) for case in jobs]


def speedups(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each candidate and number of workers that was also measured with one worker."""
    for row in rows:
        if row["workers"] > 1 and row["efficiency"] is not None:
            name = ", ".join(filter(None, [row["who"], row["store"]]))
            speedup = row["efficiency"] * row["workers"]
            yield f"{name}: {row['workers']} workers are {speedup:.2f} times as fast as one"


def _candidate(store: str | None, workers: int) -> Candidate:
    env = {"OMP_NUM_THREADS": "1"}
    if store is None or store == _PEER:
        env["BENCH_BACKEND"] = "gloo" if store is None else "gangline"
        return Candidate("training/torch", workers, env=env)
    code = SERVER if _servers(store) else ""
    return Candidate("training/gangline", workers, _servers(store), env={**env, "BENCH_STORE": store}, server_code=code)


def _servers(store: str | None) -> int:
    return int(store is not None and store.startswith("dist_"))


def _row(
    case: tuple[str | None, int], found: Mapping[tuple[str | None, int], Measured], network: str, samples: int
) -> Row:
    store, count = case
    own = found[case]

    def ratio(other: tuple[str | None, int]) -> float | None:
        """Return a worker's samples/s over those of another job: the batch of a worker is the same in both."""
        return times_as_fast(own.seconds, found[other].seconds) if other in found else None

    figures = spread([count * samples / each for each in own.seconds])
    row: Row = {
        "who": own.who,
        "store": store,
        "network": network,
        "workers": count,
        "servers": _servers(store) or None,
        "batch_size": count * samples,
        "samples_per_s": figures["p50"],
        "efficiency": ratio((store, 1)),
    }
    if (None, count) in found:
        row[f"ratio_to_{_PEER}"] = ratio((None, count))
    if store != _APART and (_APART, count) in found:
        row[f"ratio_to_{_APART}"] = ratio((_APART, count))
    return {**row, **figures}
