"""Ranks that tell the test where they are and wait for its word: a test can act while they are inside a call."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from gangline.collectives import Communicator
from gangline.collectives.communicator import open_communicator
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.processes import process_pool
from gangline.collectives.processes.spawning import Outcome, Ranks

LIMIT = 60.0
"""Seconds after which what a test waits for has failed to happen."""

_SHARED = "/dev/shm"

WAITS = "waits"
"""What a rank tells that waits for others inside a call."""


class Actor:
    """A rank's line to the test, in the rank's process."""

    def __init__(self, rank: int, path: str) -> None:
        """Say hello to the stage that listens at ``path``; now the rank holds what it will hold."""
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(path)
        self._due = 0
        self._watch_waits()
        self._stacks = open(_stacks_of(Path(path), rank), "w")  # noqa: SIM115  open as long as the rank lives
        faulthandler.register(signal.SIGUSR1, self._stacks)
        self.tell({"rank": rank, "pid": os.getpid(), "holds": _holdings()})

    def tell(self, what: Any) -> None:
        self._line.send(json.dumps(what).encode())

    def hear(self) -> Any:
        return json.loads(self._line.recv(1 << 16))

    def announce_waits(self, times: int = 1) -> None:
        """Tell `WAITS` the next so many times that this rank finds itself waiting for others."""
        self._due = times

    def _watch_waits(self) -> None:
        check = Watchdog.check

        def noticed(watchdog: Watchdog, missing: Iterable[int]) -> None:
            check(watchdog, missing)
            if self._due:  # what is told after a check is known to the others as well
                self._due -= 1
                self.tell(WAITS)

        Watchdog.check = noticed  # type: ignore[method-assign]


class Audience:
    """The test's end of the lines; a context manager that sees, if all went well, that nothing of the ranks is left."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stage-"))  # a short path for the socket
        self.path = str(Path(folder, "line"))
        self._files = Path(folder, "files")
        self._files.mkdir()
        self.environment = {"TMPDIR": str(self._files), "XDG_CACHE_HOME": str(self._files)}
        """Variables for the ranks: where their temporary files go, and no table of this machine's user."""
        self._left: set[str] = set()
        self._stack.callback(self._see_what_is_left)  # when all that is entered below has ended
        self._server = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._server.bind(self.path)
        self._server.listen()
        self._server.settimeout(0.1)
        self._resources: dict[int, socket.socket] = {}
        self._processes: dict[int, int] = {}  # descriptors that name the processes whatever becomes of their numbers
        self._pids: dict[int, int] = {}
        self._held: set[str] = set()

    def admit(self, size: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Take the lines of so many ranks."""
        deadline = time.monotonic() + LIMIT
        while len(self._resources) < size:
            assert time.monotonic() < deadline, f"ranks {sorted(self._resources)} came to the stage, expected {size}"
            assert not is_over(), f"the ranks ended when {sorted(self._resources)} of {size} had come to the stage"
            with suppress(TimeoutError):
                line, _ = self._server.accept()
                self._stack.enter_context(line).settimeout(LIMIT)
                hello = json.loads(line.recv(1 << 16))
                self._resources[hello["rank"]] = line
                self._know(hello["rank"], hello["pid"])
                self._held.update(hello["holds"])

    def parent(self, rank: int) -> int:
        """A descriptor of the process that started a rank, to be closed by the caller."""
        return os.pidfd_open(int(Path(f"/proc/{self._pids[rank]}/stat").read_text().rpartition(")")[2].split()[1]))

    def heard(self, rank: int) -> Any:
        """The next thing that a rank tells."""
        with self._in_time(f"rank {rank} told nothing"):
            packed = self._resources[rank].recv(1 << 16)
        assert packed, f"rank {rank} ended without a further word: {self._last_words()}"
        return json.loads(packed)

    def say(self, rank: int, what: Any = None) -> None:
        self._resources[rank].send(json.dumps(what).encode())

    def signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._processes[rank], number)

    def kill(self, rank: int) -> None:
        """Kill a rank, and return when it is dead."""
        self.signal(rank, signal.SIGKILL)
        self.wait_for_end(rank)

    def stop(self, rank: int) -> None:
        """Stop a rank, and return when it has stopped."""
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

    def _see_what_is_left(self) -> None:
        self._left = (self._held & _all_holdings()) | {str(file) for file in self._files.iterdir()}

    def _last_words(self) -> str:
        return "see its output"

    @contextmanager
    def _in_time(self, problem: str) -> Iterator[None]:
        """Around a wait of up to `LIMIT`: where it ends in vain, say where each rank is."""
        try:
            yield
        except TimeoutError:
            stacks = "\n".join(f"rank {rank}:\n{self._stack_of(rank)}" for rank in sorted(self._resources))
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
    """Ranks of a `spawn` that run ``play(comm, path, *arguments)`` and come to the stage."""

    def __init__(self, play: Callable[..., Any], size: int, *arguments: Any, transport: str) -> None:
        super().__init__()
        process_pool.start()  # with this program's folders, not the stage's, which is gone before the server is
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

    def outcomes(self) -> list[Outcome]:
        """How the ranks ended, when all have."""
        with self._in_time("the ranks have not ended"):
            return self._ending.result(LIMIT)

    def _last_words(self) -> str:
        for rank in self._processes:
            self.signal(rank, signal.SIGKILL)
        return "; ".join(str(outcome.error) for outcome in self.outcomes())


def _open(*arguments: Any, **options: Any) -> Communicator:
    tempfile.tempdir = None  # what the fork server has found for itself, not the stage's folder
    return open_communicator(*arguments, **options)


def _stacks_of(path: Path, rank: int) -> Path:
    return path.with_name(f"rank-{rank}.stacks")


def _holdings() -> list[str]:
    """What this process has that would stay behind if it were anybody's: shared memory, sockets, files with names."""
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.lexists(file)]
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    kept = {file for file in [*files, *maps] if file.startswith(("socket:", f"{_SHARED}/"))}
    return sorted({*kept, *_memory("self")})


def _all_holdings() -> set[str]:
    """The same of everybody."""
    memory = {name for process in os.listdir("/proc") if process.isdecimal() for name in _memory(process)}
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("unix", "tcp", "tcp6")]
    unix, *internet = tables
    sockets = {f"socket:[{line.split()[6]}]" for line in unix}
    sockets |= {f"socket:[{line.split()[9]}]" for table in internet for line in table}
    return memory | sockets | {str(path) for path in Path(_SHARED).iterdir()}


def _memory(process: str) -> list[str]:
    """Pieces of gangline's memory that a process has mapped, or open."""
    with suppress(OSError):  # it has ended meanwhile
        maps = Path(f"/proc/{process}/maps").read_text()
        mapped = re.findall(r"\S+ (\d+) +/memfd:gangline", maps)
        files = Path(f"/proc/{process}/fd").iterdir()
        opened = [file.stat().st_ino for file in files if os.readlink(file).startswith("/memfd:gangline")]
        return [f"memory {number}" for number in (*mapped, *opened)]
    return []
