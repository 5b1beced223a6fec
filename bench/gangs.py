"""The driver's end of a bench of collectives: a side is a gang of ranks, which sleep while another side is measured."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import gangline

if TYPE_CHECKING:
    from gangline.bench.hosts import Hosts

_ROOT = Path(gangline.__file__).resolve().parent.parent
_RANK = _ROOT / "gangline" / "bench" / "peers" / "rank.py"
_PATIENCE = 600.0  # seconds for one answer: what takes longer hangs
_STARTING = 120.0  # seconds for all ranks to be there
_AFTER_A_FAILURE = 5.0  # seconds for the other ranks' answers, which may wait for the one that failed
_LEAVING = 10.0  # seconds for ranks to end by themselves


@dataclass(frozen=True)
class Way:
    """How a gang is run: what a side varies in the search for its best setting."""

    module: str
    """A file of bench/peers, without its ``.py``."""
    setting: str = ""
    """What the table names."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    interpreter: Path | None = None
    """A Python of the side's own; None: this one."""
    launcher: Sequence[str] = ()
    """A command that starts ranks of what stands behind it, such as mpirun; "{size}" in it is their number. Empty: the
    ranks are started one by one, with RANK and the like in their environment."""


class GangError(RuntimeError):
    """A side failed, ended or hangs."""


class Gang:
    """The ranks of a side, which answer as `bench/peers/rank.py` says; a context manager that ends them."""

    def __init__(self, way: Way, size: int, hosts: Hosts | None = None) -> None:
        """Start the ranks, and wait until they have found each other.

        Args:
            way: what they run.
            size: how many there are.
            hosts: network namespaces to put them into, in blocks of neighbouring ranks.

        Raises:
            GangError: they did not come; the message has their last words.
        """
        self.way = way
        self.who = ""
        """The side's name and version."""
        self.transport: str | None = None
        """What it goes over, where it says so."""
        self._size = size
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[Any]] = []
        self._ends: list[int] = []
        self._ranks: list[socket.socket] = []
        try:
            self._log = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  closed by the stack
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-")))
            self._start(hosts)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order, to a request.

        Raises:
            GangError: a rank failed, ended or gave none.
        """
        line = (json.dumps(request) + "\n").encode()
        for connection in self._ranks:
            with suppress(BrokenPipeError):  # a rank that died says more by its log
                connection.sendall(line)
        answers = self._answers()
        for rank, answer in enumerate(answers):
            if answer is not None and "failed" in answer:
                raise GangError(f"{self.way.module}, rank {rank} failed: {answer['failed']}")
        return [answer for answer in answers if answer is not None]

    def seconds(self, name: str, steps: int, before: int) -> float:
        """Seconds of a step of what was prepared under a name, of the rank that took longest."""
        answers = self.ask({"measure": name, "steps": steps, "before": before})
        return float(max(answer["seconds"] for answer in answers))

    def close(self) -> None:
        """End the ranks, which leave by themselves where they can; a second call does nothing."""
        for connection in self._ranks:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        deadline = time.monotonic() + (_LEAVING if self._ranks else 0.0)
        for process, end in zip(self._processes, self._ends, strict=True):
            select.select([end], [], [], max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a launcher started goes with it
            process.wait()
        self._ranks, self._processes, self._ends = [], [], []
        self._stack.close()

    def _start(self, hosts: Hosts | None) -> None:
        path = self._folder / "ranks"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(self._size)
            argv = [str(self.way.interpreter or sys.executable), str(_RANK), self.way.module, str(path)]
            if self.way.launcher:
                launcher = [word.replace("{size}", str(self._size)) for word in self.way.launcher]
                self._run([*launcher, *argv], {}, hosts, 0)
            else:
                port = _free_port()
                for rank in range(self._size):
                    self._run(argv, self._named(rank, port, hosts), hosts, rank)
            self._gather(server)

    def _run(self, argv: Sequence[str], env: Mapping[str, str], hosts: Hosts | None, rank: int) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = {} if self.way.interpreter else {"PYTHONPATH": str(_ROOT)}  # another interpreter must not find ours
        process = subprocess.Popen(
            [*(_inside(hosts, rank * len(hosts.names) // self._size) if hosts else ()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**inherited, **path, **env, **self.way.env},
            start_new_session=True,  # Ctrl-C is the driver's; close() reaches what a launcher started
        )
        self._processes.append(process)
        self._ends.append(os.pidfd_open(process.pid))
        self._stack.callback(os.close, self._ends[-1])

    def _named(self, rank: int, port: int, hosts: Hosts | None) -> dict[str, str]:
        """What tells a rank who it is."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "MASTER_ADDR": hosts.addresses[0] if hosts else "127.0.0.1",
            "MASTER_PORT": str(port),
            "RENDEZVOUS": str(self._folder / "rendezvous"),
        }

    def _gather(self, server: socket.socket) -> None:
        """Take the connections of all ranks, in rank order."""
        come: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _STARTING
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            for end in self._ends:
                selector.register(end, selectors.EVENT_READ)
            while len(come) < self._size:
                ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                if server not in ready:
                    why = "a process ended" if ready else f"{len(come)} of {self._size} ranks came in {_STARTING:g} s"
                    raise GangError(f"{self.way.module} did not start: {why}: {self._last_words()}")
                connection, _ = server.accept()
                self._ranks.append(connection)
                hello = json.loads(_line(connection))
                come[hello["rank"]] = connection
                self.who, self.transport = hello["who"], hello["transport"]
        self._ranks = [come[rank] for rank in range(self._size)]

    def _answers(self) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * self._size
        deadline = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._ranks):
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    line = _line(self._ranks[key.data])
                    if not line:
                        raise GangError(f"{self.way.module}, rank {key.data} ended: {self._last_words()}")
                    found[key.data] = answer = json.loads(line)
                    selector.unregister(key.fileobj)
                    if "failed" in answer:
                        deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE)
        silent = [rank for rank, answer in enumerate(found) if answer is None]
        if silent and not any(answer is not None and "failed" in answer for answer in found):
            raise GangError(f"{self.way.module}: ranks {silent} gave no answer for {_PATIENCE:g} s")
        return found

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip(" \n-")]
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(connection: socket.socket) -> bytes:
    """The one line that a rank says before it is asked again."""
    with connection.makefile("rb") as stream:
        return stream.readline()


def _inside(hosts: Hosts, host: int) -> tuple[str, ...]:
    """What stands before a command that runs on a host."""
    return ("ip", "netns", "exec", hosts.names[host])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
