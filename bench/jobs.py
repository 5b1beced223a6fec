"""The driver's end of a bench of jobs: workers, and servers if any, which sleep while another job is measured."""

from __future__ import annotations

import json
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gangline.bench.job_processes import Forked, Place, Plan, Processes, Programs

if TYPE_CHECKING:
    from gangline.bench.hosts import Hosts

_PATIENCE = 600.0  # seconds for one answer: what takes longer hangs
_STARTING = 120.0  # seconds for all workers to be there
_AFTER_A_FAILURE = 5.0  # seconds for the other workers' answers, which may wait for the one that failed
_LEAVING = 10.0  # seconds for a job to end by itself


class JobError(RuntimeError):
    """A job failed, ended or hangs."""


class Job:
    """Workers that answer as `bench/peers/worker.py` says, and their servers; a context manager that ends them."""

    def __init__(self, plan: Plan, hosts: Hosts | None = None) -> None:
        """Start the processes, and wait until all workers are there.

        Args:
            plan: what they run.
            hosts: two: scheduler and servers run on the first, the workers on the second.

        Raises:
            JobError: they did not come; the message says why, or has their last words.
        """
        self.plan = plan
        self.who = ""
        """The side's name and version."""
        self._stack = ExitStack()
        self._workers: list[socket.socket] = []
        self._ends: dict[int, str] = {}
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-"))
            path = str(Path(folder, "job"))
            self._server = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            self._server.bind(path)
            self._server.listen(plan.workers)
            start = Forked if plan.interpreter is None else Programs
            self._processes: Processes = start(plan, Place.on(hosts), path)
            self._stack.callback(self._processes.close)
            for label, pid in self._processes.pids.items():
                end = os.pidfd_open(pid)
                self._stack.callback(os.close, end)
                self._ends[end] = label
            self._gather()
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of all workers, by rank, to a request.

        Raises:
            JobError: a process failed or ended, or a worker gave none.
        """
        line = (json.dumps(request) + "\n").encode()
        for connection in self._workers:
            with suppress(BrokenPipeError):  # that it died shows below
                connection.sendall(line)
        answers = self._answers()
        for rank, answer in enumerate(answers):
            if answer is not None and "failed" in answer:
                raise JobError(f"{self.plan.module}, worker {rank} failed: {answer['failed']}")
        return [answer for answer in answers if answer is not None]

    def seconds(self, name: str, steps: int) -> float:
        """Seconds of a step of what was prepared under a name, of the worker that took longest."""
        answers = self.ask({"measure": name, "steps": steps, "before": steps // 5})
        return float(max(answer["seconds"] for answer in answers))

    def close(self) -> None:
        """End the processes, which leave by themselves where they can; a second call does nothing."""
        for connection in self._workers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._workers:
            deadline = time.monotonic() + _LEAVING
            with selectors.DefaultSelector() as selector:
                for end in self._ends:
                    selector.register(end, selectors.EVENT_READ)
                while selector.get_map() and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                    for key, _ in ready:
                        selector.unregister(key.fileobj)
        self._workers = []
        self._stack.close()

    def _gather(self) -> None:
        """Take the connections of all workers, in rank order."""
        come: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _STARTING
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            for end in self._ends:
                selector.register(end, selectors.EVENT_READ)
            while len(come) < self.plan.workers:
                ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                if not ready:
                    raise JobError(f"{len(come)} of {self.plan.workers} {self.plan.module} came in {_STARTING:g} s")
                connection, said = self._hello_or_raise(ready)
                self._workers.append(connection)
                come[said["rank"]] = connection
                self.who = said["who"]
        self._workers = [come[rank] for rank in range(self.plan.workers)]

    def _hello_or_raise(self, ready: Sequence[object]) -> tuple[socket.socket, dict[str, Any]]:
        """A worker that has come; what failed says so in its place, and what only ended says nothing."""
        if self._server in ready:
            connection, _ = self._server.accept()
            said = json.loads(_line(connection))
            if "failed" not in said:
                return connection, said
            connection.close()
            raise JobError(f"{self.plan.module}: {said['failed']}")
        ended = ", ".join(self._ends[end] for end in ready if isinstance(end, int))
        raise JobError(f"{self.plan.module}: {ended} ended: {self._processes.last_words()}")

    def _answers(self) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * self.plan.workers
        missing = set(range(self.plan.workers))
        deadline = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as selector:
            others: list[socket.socket | int] = [self._server, *self._ends]
            for other in others:
                selector.register(other, selectors.EVENT_READ)
            for rank, connection in enumerate(self._workers):
                selector.register(connection, selectors.EVENT_READ, rank)
            while missing and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                ranks = [key.data for key, _ in ready if key.data is not None]
                if not ranks:
                    self._hello_or_raise([key.fileobj for key, _ in ready])
                for rank in ranks:
                    selector.unregister(self._workers[rank])
                    line = _line(self._workers[rank])
                    if not line:
                        raise JobError(f"{self.plan.module}, worker {rank} ended: {self._processes.last_words()}")
                    found[rank] = answer = json.loads(line)
                    missing.discard(rank)
                    if "failed" in answer:
                        deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        if missing and not any(answer is not None and "failed" in answer for answer in found):
            raise JobError(f"{self.plan.module}: workers {sorted(missing)} gave no answer for {_PATIENCE:g} s")
        return found

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(connection: socket.socket) -> bytes:
    """The one line that a process says before it is asked again."""
    with connection.makefile("rb") as stream:
        return stream.readline()
