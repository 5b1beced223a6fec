"""A group of measured ranks in the driver: sends requests to all ranks and receives their answers."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gangline.bench.driver.hosts import Hosts
from gangline.bench.driver.processes import Address, Candidate, Processes

_ANSWER_TIMEOUT = 600.0  # seconds
_START_TIMEOUT = 120.0  # seconds until all ranks have joined
_AFTER_A_FAILURE = 5.0  # seconds for the other ranks' answers, which the failed rank may block
_LEAVE_TIMEOUT = 10.0  # seconds for the processes to end by themselves
_MOST_STEPS = 20_000


class GroupError(RuntimeError):
    """A rank group failed, ended or does not answer."""


class RankGroup:
    """Processes that answer as `bench/peers/serve.py` documents; a context manager that ends them.

    Between requests they block in a read, and use no CPU time while another group is measured.
    """

    def __init__(self, candidate: Candidate, hosts: Hosts | None = None) -> None:
        """Start the processes and wait until all ranks have joined.

        Args:
            candidate: what to run.
            hosts: network namespaces for the processes; None: this host.

        Raises:
            GroupError: if they do not join; the message has the reason, or the last printed line.
        """
        self.candidate = candidate
        self.who = ""
        """Name and version of the program."""
        self.transport: str | None = None
        """The transport, if the program reports it."""
        self._stack = ExitStack()
        self._ranks: list[socket.socket] = []
        self._exits: dict[int, str] = {}  # names of the processes by their pidfds
        self._step_seconds: dict[str, float] = {}
        self._joined = False
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-"))
            self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(Path(folder, "driver")))
            self._listener.listen(candidate.ranks + candidate.servers + 1)
            address = Address(hosts.addresses[0] if hosts else "127.0.0.1", _free_port(), str(Path(folder, "driver")))
            self._processes = Processes(candidate, address, hosts)
            self._stack.callback(self._processes.close)
            for name, pid in self._processes.pids.items():
                pidfd = os.pidfd_open(pid)
                self._stack.callback(os.close, pidfd)
                self._exits[pidfd] = name
            self._accept_all()
        except BaseException:
            self.close()
            raise

    def prepare(self, options: Mapping[str, Any], name: str = "bench") -> float:
        """Prepare work under ``name``; return the seconds of one step.

        Raises:
            GroupError: as `ask`.
        """
        answers = self.ask({"prepare": {**options, **self.candidate.options}, "as": name})
        self._step_seconds[name] = max(answer["seconds"] for answer in answers)
        return self._step_seconds[name]

    def steps_in(self, seconds: float, name: str = "bench", least: int = 3) -> int:
        """Return the number of steps that take about ``seconds``, by the last measurement."""
        return min(max(math.ceil(seconds / self._step_seconds[name]), least), _MOST_STEPS)

    def seconds(self, steps: int, name: str = "bench", warmup: int | None = None) -> float:
        """Return the mean seconds of a step, on the rank that took longest.

        Args:
            steps: measured steps.
            name: name of the prepared work.
            warmup: unmeasured steps before them; None: a fifth.
        """
        before = math.ceil(steps / 5) if warmup is None else warmup
        answers = self.ask({"measure": name, "steps": steps, "warmup": before})
        self._step_seconds[name] = max(answer["seconds"] for answer in answers)
        return self._step_seconds[name]

    def error(self, name: str = "bench") -> float:
        """Return the largest absolute error of a result on any rank."""
        return float(max(answer["error"] for answer in self.ask({"check": name})))

    def wrong(self, name: str = "bench") -> int:
        """Return the number of wrong elements on all ranks."""
        return sum(answer["wrong"] for answer in self.ask({"check": name}))

    def report(self, name: str = "bench") -> list[dict[str, Any]]:
        """Return the program's reports, by rank."""
        return self.ask({"report": name})

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks, including ranks that a launcher started."""
        size = struct.calcsize("3i")
        peers = (connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size) for connection in self._ranks)
        return [int(struct.unpack("3i", peer)[0]) for peer in peers]

    def release(self) -> None:
        """Free the memory of everything prepared."""
        self.ask({"release": True})

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a request to all ranks and return their answers in rank order.

        Raises:
            GroupError: if a rank reports an error or does not answer, or a process ends.
        """
        line = (json.dumps(request) + "\n").encode()
        for connection in self._ranks:
            with suppress(BrokenPipeError):  # the rank's end is reported below
                connection.sendall(line)
        answers = self._answers()
        for rank, answer in enumerate(answers):
            if answer is not None and "failed" in answer:
                raise GroupError(f"{self._name}, rank {rank} failed: {answer['failed']}")
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        """End the processes, and kill them after some seconds. A second call does nothing."""
        for connection in self._ranks:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._joined and self._ranks:  # ranks that have not joined cannot leave
            deadline = time.monotonic() + _LEAVE_TIMEOUT
            running = set(self._exits)
            while running and (ended := wait(running, max(0.0, deadline - time.monotonic()))):
                running.difference_update(ended)
        self._ranks = []
        self._stack.close()

    @property
    def _name(self) -> str:
        return self.candidate.path.stem if Path(self.candidate.file).is_absolute() else self.candidate.file

    def _accept_all(self) -> None:
        """Accept the connections of all ranks and sort them by rank."""
        joined: dict[int, socket.socket] = {}
        waiting = [self._listener]
        deadline = time.monotonic() + _START_TIMEOUT
        while len(joined) < self.candidate.ranks:
            ready = self._ready(waiting, deadline)
            if not ready:
                raise GroupError(
                    f"{self._name} did not start: {len(joined)} of {self.candidate.ranks} ranks joined within "
                    f"{_START_TIMEOUT:g} s: {self._processes.last_words()}"
                )
            for source in ready:
                if source is self._listener:
                    connection, _ = self._listener.accept()
                    self._ranks.append(connection)
                    waiting.append(connection)
                else:
                    waiting.remove(source)
                    hello = self._hello(source)
                    joined[hello["rank"]] = source
                    self.who, self.transport = hello["who"], hello["transport"]
        self._ranks = [joined[rank] for rank in range(self.candidate.ranks)]
        self._joined = True

    def _hello(self, connection: socket.socket) -> dict[str, Any]:
        hello: dict[str, Any] = json.loads(_line(connection) or b'{"failed": ""}')
        if "failed" in hello:
            raise GroupError(f"{self._name} did not start: {hello['failed'] or self._processes.last_words()}")
        return hello

    def _ready(self, sockets: Sequence[socket.socket], deadline: float) -> list[socket.socket]:
        """Wait until sockets are readable, and return these; none if the deadline has passed."""
        found = wait([*sockets, *self._exits], max(0.0, deadline - time.monotonic()))
        ready = [source for source in found if isinstance(source, socket.socket)]
        if found and not ready:
            names = ", ".join(name for pidfd, name in self._exits.items() if pidfd in found)
            raise GroupError(f"{self._name}: {names} ended: {self._processes.last_words()}")
        return ready

    def _answers(self) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * self.candidate.ranks
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        missing = dict(zip(self._ranks, range(self.candidate.ranks), strict=True))
        while missing and (ready := self._ready(list(missing), deadline)):
            for connection in ready:
                rank = missing.pop(connection)
                line = _line(connection)
                if not line:
                    raise GroupError(f"{self._name}, rank {rank} ended: {self._processes.last_words()}")
                found[rank] = answer = json.loads(line)
                if "failed" in answer:
                    deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        if missing and not any(answer is not None and "failed" in answer for answer in found):
            late = sorted(missing.values())
            raise GroupError(f"{self._name}: ranks {late} did not answer within {_ANSWER_TIMEOUT:g} s")
        return found

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(connection: socket.socket) -> bytes:
    """Read the single line that a rank sends in answer to a request."""
    with connection.makefile("rb") as stream:
        return stream.readline()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
