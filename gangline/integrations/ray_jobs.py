"""`gangline launch --launcher ray`: the processes of a job on a Ray cluster, with their output here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from gangline.collectives.environments.job_key import JobKey
from gangline.integrations.ray_members import Job, Placement, in_cluster
from gangline.launcher.job import JobSpec
from gangline.launcher.output import Output, Stream
from gangline.launcher.restarts import CHECKPOINTED, Outcome, run_with_restarts

_POLL_SECONDS = 0.2
"""Time within which a signal is noticed."""


def run(
    job: JobSpec,
    *,
    grace: float = 10.0,
    max_restarts: int = 0,
    placement: Placement = Placement(),  # noqa: B008 - it is frozen
    address: str | None = None,
) -> int:
    """Run the processes of a job as children of actors in one placement group until all have ended.

    If a process fails, the others are stopped. SIGINT, SIGTERM and SIGHUP stop all processes; a second signal kills
    them at once. Call it from the main thread.

    Returns:
        The exit code, as of the launcher of this machine: 0, or that of the first failure of the last start.
    """
    is_own = in_cluster(address)

    def attempt(restart: int) -> Outcome:
        actors = Job(replace(job, restart=restart), placement, is_function=False, env={}, key=JobKey.new())
        try:
            return Outcome(_Relay(actors, grace, received).run(), bool(received))
        finally:
            actors.close()

    try:
        with _signals() as received:
            return run_with_restarts(attempt, max_restarts)
    finally:
        if is_own:
            ray.shutdown()


class _Relay:
    """Writes the output of all actors' processes and stops them when one fails or a signal comes."""

    def __init__(self, job: Job, grace: float, received: list[int]) -> None:
        self._received = received
        self._actors = {f"worker {rank}": one for rank, one in enumerate(job.workers)}
        self._actors |= {f"server {rank}": one for rank, one in enumerate(job.servers)}
        ray.get([
            one.start.remote(table, job.key, grace, True)
            for one, table in zip(self._actors.values(), job.tables, strict=True)
        ])  # fmt: skip
        self._streams = {
            one.output.options(num_returns="streaming").remote(): name for name, one in self._actors.items()
        }
        self._output = Output()
        self._pipes = {(name, fd): Stream(b"", is_error=fd == 2) for name in self._actors for fd in (1, 2)}
        self._codes: dict[str, int] = {}
        self._code = self._stops = 0

    def run(self) -> int:
        while self._streams:
            ready, _ = ray.wait([*self._streams], timeout=_POLL_SECONDS, fetch_local=False)
            for stream in ready:
                self._read(stream, self._streams[stream])
            if len(self._received) > self._stops:
                self._report(f"{signal.Signals(self._received[0]).name}; stopping all processes")
                self._fail(128 + self._received[0])
        workers = {code for name, code in self._codes.items() if name.startswith("worker")}
        if self._received and CHECKPOINTED in workers and workers <= {0, CHECKPOINTED}:
            return CHECKPOINTED
        return self._code

    def _read(self, stream: Any, name: str) -> None:
        try:
            number, data = ray.get(next(stream))
        except (StopIteration, RayError) as error:
            del self._streams[stream]
            if isinstance(error, RayError):
                self._report(f"the actor of {name} ended: {str(error).strip().splitlines()[0]}")
                self._ended(name, 128 + signal.SIGKILL)
            return
        if number:
            with suppress(BrokenPipeError):  # the reader is gone; the job goes on
                self._output.write(self._pipes[name, number], data)
        else:
            self._ended(name, int(data))

    def _ended(self, name: str, code: int) -> None:
        for fd in (1, 2):
            with suppress(BrokenPipeError):
                self._output.end(self._pipes[name, fd])
        self._codes[name] = code
        if code and not self._code:
            self._fail(code)

    def _fail(self, code: int) -> None:
        """Stop all processes; the second time, kill them."""
        self._code = self._code or code
        self._stops += 1
        for name, actor in self._actors.items():
            if name not in self._codes:
                actor.stop.remote()

    def _report(self, text: str) -> None:
        with suppress(BrokenPipeError):
            self._output.report(text)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of signals that stop a job; signals that were ignored stay so."""
    received: list[int] = []
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: received.append(number)) for one in numbers}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
