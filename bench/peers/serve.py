"""Main program of every measured process: `python serve.py FILE SOCKET` loads a peer's FILE and answers requests.

It needs only Python's standard library and numpy, so that any interpreter can run it. Requests and answers are lines of
JSON on the unix socket at the path SOCKET; all ranks of a group get the same requests:

    (unasked, once)                            -> {"who": "Open MPI 4.1.4", "rank": 0, "transport": null}
    {"prepare": options, "as": name}           -> {"seconds": of one step}
    {"measure": name, "steps": n, "warmup": w} -> {"seconds": of a step}, the mean over n steps after w unmeasured ones
    {"check": name}                            -> {"wrong": number of wrong elements} or {"error": largest deviation}
    {"report": name}                           -> what the program reports
    {"release": true}                          -> {}, after the memory of everything prepared is freed

and {"failed": text} in place of any of them. Between requests a process blocks in a read and uses no CPU time. It ends
when the socket closes, even in the middle of a collective.

FILE defines ``join()``, which returns a dict: ``who`` (name and version), ``prepare``, and, unless the process is
alone, ``rank``, ``size``, ``barrier`` and ``leave``; ``transport`` where it is known. ``prepare(options)`` returns
another dict: ``step`` (performs the measured work once), optionally ``wait`` (returns when all started steps are
complete), ``undo`` (reverts a step, given what it returned; then every step is timed by itself, after a barrier),
``report`` (returns a dict) and ``check`` (returns the largest absolute error). Without ``check``, `checks.py` checks by
``write(start, values)`` (stores a float64, int64 or bool array into the input), ``read(start, stop)`` (returns such an
array of the result) and optionally ``settle`` (fetches the result after all ranks have stepped).
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_GRACE = 5.0  # seconds that a process has to leave its group after the driver has closed the socket


def serve(file: str, path: str) -> None:
    """Answer the driver that listens at ``path`` until it closes the connection; then leave the group."""
    with socket.socket(socket.AF_UNIX) as driver:
        driver.connect(path)
        requests, answers = driver.makefile(), driver.makefile("w")

        def answer(content: dict[str, Any]) -> None:
            print(json.dumps(content), file=answers, flush=True)

        threading.Thread(target=_exit_with, args=(driver,), daemon=True).start()
        try:
            server = Server(load(Path(file)).join())
        except Exception as error:
            answer({"failed": f"{type(error).__name__}: {error}"})
            raise
        answer(server.hello())
        for line in requests:
            try:
                answer(server.answer(json.loads(line)))
            except Exception as error:  # noqa: BLE001  every failure is reported to the driver
                answer({"failed": f"{type(error).__name__}: {error}"})
        server.leave()


def load(path: Path) -> ModuleType:
    """Import a Python file from any folder."""
    spec = importlib.util.spec_from_file_location(f"bench_peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Server:
    """Answers to requests, and the clock: the same for gangline and for its peers."""

    def __init__(self, group: dict[str, Any]) -> None:
        """Serve a group that a peer's ``join()`` returned."""
        alone = {"rank": 0, "size": 1, "transport": None, "barrier": lambda: None, "leave": lambda: None}
        self._group = {**alone, **group}
        self._prepared: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def hello(self) -> dict[str, Any]:
        """Return the first message to the driver."""
        return {name: self._group[name] for name in ("who", "rank", "transport")}

    def leave(self) -> None:
        """Leave the group."""
        self._group["leave"]()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute one request and return its answer."""
        if "prepare" in request:
            return {"seconds": self._prepare(request["as"], request["prepare"])}
        if "measure" in request:
            _, prepared = self._prepared[request["measure"]]
            self._seconds(prepared, request["warmup"])
            return {"seconds": self._seconds(prepared, request["steps"])}
        if "check" in request:
            return self._check(*self._prepared[request["check"]])
        if "report" in request:
            _, prepared = self._prepared[request["report"]]
            return dict(prepared["report"]())
        self._prepared.clear()
        return {}

    def _prepare(self, name: str, options: dict[str, Any]) -> float:
        self._prepared.pop(name, None)  # frees memory before the next allocation
        prepared = self._group["prepare"](options)
        self._prepared[name] = options, prepared
        self._seconds(prepared, 2)  # the first steps allocate
        return self._seconds(prepared, 1)

    def _seconds(self, prepared: dict[str, Any], steps: int) -> float:
        """Return the mean seconds of a step; the clock starts when all ranks are ready."""
        step = prepared["step"]
        if "undo" in prepared:
            return sum(self._undone(prepared) for _ in range(steps)) / max(steps, 1)
        self._group["barrier"]()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        if "wait" in prepared:
            prepared["wait"]()
        return (time.perf_counter() - start) / max(steps, 1)

    def _undone(self, prepared: dict[str, Any]) -> float:
        """Return the seconds of one step, and revert it when all ranks have performed it."""
        self._group["barrier"]()
        start = time.perf_counter()
        opened = prepared["step"]()
        seconds = time.perf_counter() - start
        self._group["barrier"]()
        prepared["undo"](opened)
        return seconds

    def _check(self, options: dict[str, Any], prepared: dict[str, Any]) -> dict[str, Any]:
        if "check" in prepared:
            return {"error": prepared["check"]()}
        checks = load(Path(__file__).with_name("checks.py"))
        if "collective" in options:
            return {"wrong": checks.wrong_elements(self._group, options, prepared)}
        return {"error": checks.largest_error(self._group, options, prepared)}


def _exit_with(driver: socket.socket) -> None:
    """Wait until the driver closes the socket, and end this process if it does not end by itself."""
    watch = select.poll()
    watch.register(driver, select.POLLRDHUP | select.POLLHUP)
    watch.poll()
    time.sleep(_GRACE)
    os._exit(1)


if __name__ == "__main__":
    serve(*sys.argv[1:])
