"""What a side's process runs: `python serve.py MODULE` prepares MODULE once and then answers requests for runs.

It needs no more than Python's own library, so that any interpreter can run it. Requests come on stdin and answers
go to stdout, a line of JSON each:

    {"prepare": options}   -> {"who": "mxnet 1.9.1"}
    {"measure": seconds}   -> {"seconds": of one step}, after steps for about so many seconds
    {"check": true}        -> {"error": largest absolute error of the last step's results}

and {"failed": text} in place of any of them. Between requests the process sleeps in a read, so that it takes nothing
from the side whose turn it is; it ends with stdin, even if the driver was killed.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    side = Served(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = side.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  whatever went wrong is told to the driver
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Served:
    """A side's module, and its clock: the same for all sides."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._side: dict[str, Any] = {}
        self._step_seconds = 0.0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks."""
        if "prepare" in request:
            self._side.clear()  # what was prepared before goes first, for memory
            self._side.update(importlib.import_module(self._module).prepare(request["prepare"]))
            _seconds(self._side["step"], self._side["wait"], 1)  # the first step allocates
            self._step_seconds = _seconds(self._side["step"], self._side["wait"], 1)
            return {"who": self._side["who"]}
        if "measure" in request:
            return {"seconds": self._measure(request["measure"])}
        return {"error": self._side["check"]()}

    def _measure(self, budget: float) -> float:
        """Seconds of a step, over about ``budget`` seconds; a tenth as many steps go before, unmeasured."""
        steps = max(2, math.ceil(budget / self._step_seconds))
        _seconds(self._side["step"], self._side["wait"], math.ceil(steps / 10))
        self._step_seconds = _seconds(self._side["step"], self._side["wait"], steps)
        return self._step_seconds


def _seconds(step: Callable[[], None], wait: Callable[[], None], steps: int) -> float:
    """Seconds of a step, ``steps`` of them begun one after another and waited for together."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()
