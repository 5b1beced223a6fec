"""Cost of many workers and keys: `python -m tests.kvstore.parameter_server.growth 64,1 2,1000` (workers, keys).

Workers are processes of this machine that push and pull keys of 8 elements. Each line has the time of a round, and the
CPU time that it costs each worker, the server and the scheduler.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

import psutil
import torch

import gangline
from tests.kvstore.parameter_server.processes import run_job

CASES = ["2,1", "8,1", "32,1", "64,1", "2,100", "2,1000", "2,8000", "64,100"]


def play(keys: int, rounds: int) -> tuple[float, float, list[float]]:
    """Return seconds of a round, and its CPU seconds of this worker, and of scheduler and server at rank 0."""
    torch.set_num_threads(1)
    with gangline.create("dist_sync") as store:
        names = list(range(keys))
        values, outs = [torch.ones(8) for _ in names], [torch.empty(8) for _ in names]
        store.init(names, values)

        def step() -> None:
            store.push(names, values)
            store.pull(names, outs)

        siblings = sorted(psutil.Process(os.getppid()).children(), key=lambda one: (one.create_time(), one.pid))
        others = siblings[:2] if store.rank == 0 else []
        for _ in range(2):
            step()
        store.barrier()
        before = [sum(one.cpu_times()[:2]) for one in others]
        began, own = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            step()
        seconds, own = (time.perf_counter() - began) / rounds, (time.process_time() - own) / rounds
        store.barrier()
        costs = [(sum(one.cpu_times()[:2]) - since) / rounds for one, since in zip(others, before, strict=True)]
        assert all(float(out[0]) == store.num_workers for out in outs)
    return seconds, own, costs


def main() -> None:
    for case in sys.argv[1:] or CASES:
        workers, keys = map(int, case.split(","))
        results = run_job(play, workers, 1, keys, max(2000 // (workers * keys), 5))
        seconds, own = median(one[0] for one in results), median(one[1] for one in results)
        scheduler, server = results[0][2]
        print(
            f"{workers} workers, {keys} keys: round {seconds * 1e3:.2f} ms; CPU of a worker {own * 1e3:.2f} ms, "
            f"of the server {server * 1e3:.2f} ms, of the scheduler {scheduler * 1e3:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
