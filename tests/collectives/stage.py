"""Ranks that report their progress to the test and wait for its messages, so that a test can act during a call."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from gangline import Communicator
from gangline.collectives.communicator import open_communicator
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.processes import process_pool
from gangline.collectives.processes.spawning import Outcome, Ranks

LIMIT = 60.0
"""Seconds that a test waits for any event before it fails."""

_SHARED = "/dev/shm"

WAITS = "waits"
"""Message of a rank that waits for others inside a call."""


class Actor:
    """Rank's side of the socket between a rank and the test."""

    def __init__(self, rank: int, path: str) -> None:
        """Connect to the `Audience` that listens at ``path`` and report this process's resources."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._due = 0
        self._watch_waits()
        self._stacks = open(_stacks_of(Path(path), rank), "w")  # noqa: SIM115  open as long as the rank lives
        faulthandler.register(signal.SIGUSR1, self._stacks)
        self.tell({"rank": rank, "pid": os.getpid(), "holds": _holdings()})

    def tell(self, what: Any) -> None:
        self._socket.send(json.dumps(what).encode())

    def hear(self) -> Any:
        return json.loads(self._socket.recv(1 << 16))

    def announce_waits(self, times: int = 1) -> None:
        """Send `WAITS` the next ``times`` times that this rank waits for others."""
        self._due = times

    def _watch_waits(self) -> None:
        check = Watchdog.check

        def noticed(watchdog: Watchdog, missing: Iterable[int]) -> None:
            check(watchdog, missing)
            if self._due:  # after the check, which has announced the call to the other ranks
                self._due -= 1
                self.tell(WAITS)

        Watchdog.check = noticed


class Audience:
    """Test's side of the sockets to the ranks. Leaving the context without an error checks that no resource is left."""

    _ending: Future[list[Outcome]]
    """Outcomes of the ranks, which a subclass starts."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stage-"))  # a short path for the socket
        self.path = str(Path(folder, "socket"))
        self._files = Path(folder, "files")
        self._files.mkdir()
        self.environment = {"TMPDIR": str(self._files), "XDG_CACHE_HOME": str(self._files)}
        """Environment variables for the ranks: directories for temporary files and caches, away from the user's."""
        self._left: set[str] = set()
        self._stack.callback(self._find_leftovers)  # runs after everything entered below has been closed
        self._server = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._server.bind(self.path)
        self._server.listen()
        self._server.settimeout(0.1)
        self._sockets: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}  # pidfds, which stay valid if a pid is reused
        self._pids: dict[int, int] = {}
        self._held: set[str] = set()

    def admit(self, size: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Accept the connections of ``size`` ranks."""
        deadline = time.monotonic() + LIMIT
        while len(self._sockets) < size:
            assert time.monotonic() < deadline, f"ranks {sorted(self._sockets)} connected, expected {size}"
            assert not is_over(), f"the ranks ended when {sorted(self._sockets)} of {size} had connected"
            with suppress(TimeoutError):
                connection, _ = self._server.accept()
                self._stack.enter_context(connection).settimeout(LIMIT)
                hello = json.loads(connection.recv(1 << 16))
                self._sockets[hello["rank"]] = connection
                self._know(hello["rank"], hello["pid"])
                self._held.update(hello["holds"])

    def heard(self, rank: int) -> Any:
        """Return a rank's next message."""
        with self._in_time(f"rank {rank} sent nothing"):
            packed = self._sockets[rank].recv(1 << 16)
        assert packed, f"rank {rank} ended without another message: {self._last_words()}"
        return json.loads(packed)

    def say(self, rank: int, what: Any = None) -> None:
        self._sockets[rank].send(json.dumps(what).encode())

    def signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._processes[rank], number)

    def kill(self, rank: int) -> None:
        """Kill a rank and wait until it is dead."""
        self.signal(rank, signal.SIGKILL)
        self.wait_for_end(rank)

    def stop(self, rank: int) -> None:
        """Stop a rank and wait until it has stopped."""
        self.signal(rank, signal.SIGSTOP)
        self.wait_for_stop(rank)

    def wait_for_stop(self, rank: int) -> None:
        deadline = time.monotonic() + LIMIT
        tasks = Path(f"/proc/{self._pids[rank]}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            assert time.monotonic() < deadline, f"rank {rank} does not stop"

    def wait_for_end(self, rank: int) -> None:
        with self._in_time(f"rank {rank} has not ended"):
            if not select.select([self._processes[rank]], [], [], LIMIT)[0]:
                raise TimeoutError

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            assert not self._left, f"the ranks left behind {sorted(self._left)}"

    def _find_leftovers(self) -> None:
        self._left = (self._held & _all_holdings()) | {str(file) for file in self._files.iterdir()}

    def outcomes(self) -> list[Outcome]:
        """Wait for all ranks and return their outcomes."""
        with self._in_time("the ranks have not ended"):
            return self._ending.result(LIMIT)

    def _last_words(self) -> str:
        for rank in self._processes:
            self.signal(rank, signal.SIGKILL)
        return "; ".join(str(outcome.error) for outcome in self.outcomes())

    @contextmanager
    def _in_time(self, problem: str) -> Iterator[None]:
        """Turn a TimeoutError into a failure with the stack of each rank."""
        try:
            yield
        except TimeoutError:
            stacks = "\n".join(f"rank {rank}:\n{self._stack_of(rank)}" for rank in sorted(self._sockets))
            raise AssertionError(f"{problem} within {LIMIT:g} s. {stacks}") from None

    def _stack_of(self, rank: int) -> str:
        if select.select([self._processes[rank]], [], [], 0)[0]:
            return "ended\n"
        file = _stacks_of(Path(self.path), rank)
        self.signal(rank, signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while "(most recent call first)" not in (text := file.read_text()) and time.monotonic() < deadline:
            select.select([self._processes[rank]], [], [], 0.1)
        return text

    def _know(self, rank: int, pid: int) -> None:
        if rank not in self._processes:
            self._pids[rank] = pid
            self._processes[rank] = os.pidfd_open(pid)
            self._stack.callback(os.close, self._processes[rank])


class Stage(Audience):
    """Ranks of a `spawn` that run ``play(comm, path, *arguments)``, each of which creates an `Actor`."""

    def __init__(self, play: Callable[..., Any], size: int, *arguments: Any, transport: str) -> None:
        super().__init__()
        process_pool.start()  # the server outlives this test, so it must not inherit its directories
        try:
            with patch.dict(os.environ, self.environment):
                group = Ranks(play, size, (self.path, *arguments), transport=transport, opener=_open)
            self._group = self._stack.enter_context(group)
            self._ending = self._stack.enter_context(ThreadPoolExecutor(1)).submit(self._group.outcomes)
            for rank, pid in enumerate(self._group.pids):
                self._know(rank, pid)
                self._stack.callback(self.signal, rank, signal.SIGKILL)
            self.admit(size, self._ending.done)
        except BaseException:
            self.close()
            raise


def _open(*arguments: Any, **options: Any) -> Communicator:
    tempfile.tempdir = None  # the fork server's; the environment now names another
    return open_communicator(*arguments, **options)


def _stacks_of(path: Path, rank: int) -> Path:
    return path.with_name(f"rank-{rank}.stacks")


def _holdings() -> list[str]:
    """Return names of this process's sockets and shared memory."""
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.lexists(file)]
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    kept = {file for file in [*files, *maps] if file.startswith(("socket:", f"{_SHARED}/"))}
    return sorted({*kept, *_memory("self")})


def _all_holdings() -> set[str]:
    """Return names of all processes' sockets and shared memory."""
    memory = {name for process in os.listdir("/proc") if process.isdecimal() for name in _memory(process)}
    tables = [Path("/proc/net", name).read_text(errors="replace").splitlines()[1:] for name in ("unix", "tcp", "tcp6")]
    unix, *internet = tables
    sockets = {f"socket:[{line.split()[6]}]" for line in unix}
    sockets |= {f"socket:[{line.split()[9]}]" for table in internet for line in table}
    return memory | sockets | {str(path) for path in Path(_SHARED).iterdir()}


def _memory(process: str) -> list[str]:
    """Return names of gangline's segments that a process has mapped or open."""
    with suppress(OSError):  # it has ended meanwhile
        maps = Path(f"/proc/{process}/maps").read_text()
        mapped = re.findall(r"\S+ (\d+) +/memfd:gangline", maps)
        files = Path(f"/proc/{process}/fd").iterdir()
        opened = [file.stat().st_ino for file in files if os.readlink(file).startswith("/memfd:gangline")]
        return [f"memory {number}" for number in (*mapped, *opened)]
    return []
