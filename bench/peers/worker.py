"""A worker of a job that a bench measures: it prepares steps and then answers requests for runs of them.

The file MODULE lies beside this one and has ``join()``, which gives a dict: ``who``, ``rank``, ``barrier``, ``leave``,
and ``prepare(options)``, which gives another: ``step`` (does once what is measured), and where results can be checked
``write(start, values)`` (puts float64 values into what is pushed), ``read(start, stop)`` (such values of what was
pulled) and ``settle`` (pulls, once all have come so far; None where a step's own results are to be checked).

Requests come through a socket, a line of JSON each, and answers go back:

    {"prepare": options, "as": name}               -> {"seconds": of a step}
    {"measure": name, "steps": n, "before": m}     -> {"seconds": of a step}, after m unmeasured ones
    {"check": name}                                -> {"error": largest deviation of a result from the exact sum}
    {"release": true}                              -> {}

and {"failed": text} in place of any of them. Any interpreter with numpy can run it:
`python -m gangline.bench.peers.worker MODULE PATH`.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import time
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

STEP_OF_CODES = 0.5
"""What compressed values are multiples of: a threshold of 2bit that leaves nothing over."""
_BLOCK = 1 << 20  # elements that are written or looked at at once


def main() -> None:
    """Be a worker of the job that the environment describes."""
    serve(importlib.import_module(f"gangline.bench.peers.{sys.argv[1]}").join(), sys.argv[2])


def serve(group: dict[str, Any], path: str) -> None:
    """Answer the driver that listens at ``path`` until it asks no more; then leave the job."""
    with socket.socket(socket.AF_UNIX) as driver:
        driver.connect(path)
        requests, answers = driver.makefile(), driver.makefile("w")
        worker = Worker(group)
        print(json.dumps({"who": group["who"], "rank": group["rank"]}), file=answers, flush=True)
        for line in requests:
            try:
                answer = worker.answer(json.loads(line))
            except Exception as error:  # noqa: BLE001  whatever went wrong is told to the driver
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
        group["leave"]()


class Worker:
    """A worker's part, and its clock: the same for all sides."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._prepared: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks."""
        if "prepare" in request:
            side = self._group["prepare"](request["prepare"])
            self._prepared[request["as"]] = request["prepare"], side
            self._seconds(side, 1)  # the first step allocates
            return {"seconds": self._seconds(side, 1)}
        if "measure" in request:
            _, side = self._prepared[request["measure"]]
            self._seconds(side, request["before"])
            return {"seconds": self._seconds(side, request["steps"])}
        if "check" in request:
            return {"error": self._error(*self._prepared[request["check"]])}
        self._prepared.clear()
        return {}

    def _seconds(self, side: dict[str, Any], steps: int) -> float:
        """Seconds of a step from the moment when all workers are there."""
        step = side["step"]
        self._group["barrier"]()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / max(steps, 1)

    def _error(self, options: dict[str, Any], side: dict[str, Any]) -> float:
        """Push values in closed form, pull once, and look at every element."""
        rank, workers, blocks = self._group["rank"], options["workers"], _blocks(options["count"])
        for start, stop in blocks:
            side["write"](start, value(options, rank, np.arange(start, stop)))
        self._group["barrier"]()
        side["step"]()
        if side["settle"] is not None:
            self._group["barrier"]()
            side["settle"]()
        worst = 0.0
        for start, stop in blocks:
            expected = sum(value(options, other, np.arange(start, stop)) for other in range(workers))
            worst = max(worst, float(np.abs(side["read"](start, stop) - expected).max()))
            side["write"](start, np.zeros(stop - start))
        return worst


def value(options: dict[str, Any], rank: int, index: Array) -> Array:
    """Elements that a worker pushes, in closed form, so that one of a wrong place or worker shows.

    Sums of them are exact in float32; compressed ones are such that 2bit and half precision leave nothing out.
    """
    if options["compression"]:
        return np.asarray(((index + rank) % 3 - 1) * STEP_OF_CODES)
    return np.asarray(index % 4093 * options["workers"] + rank, np.float64)


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


if __name__ == "__main__":
    main()
