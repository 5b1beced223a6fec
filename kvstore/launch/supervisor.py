"""Running processes side by side: start, hear, name the first failure, stop."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO

from gangline.kvstore.launch.job import Process
from gangline.kvstore.launch.output import Output, Stream
from gangline.kvstore.launch.process_tree import descendants, die_with, send, send_group

_AGAIN = 0.1
"""Seconds from one round of SIGKILL to the next, for what was forked meanwhile."""
_READ = 1 << 16
"""Bytes taken at once, so that all are heard in turn."""
_PIPE = 1 << 20
"""The most bytes that a pipe holds."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for processes that should end."""

    servers: float = 10.0
    """Servers and scheduler, from the end of the last worker."""
    stop: float = 10.0
    """Any process, from SIGTERM to SIGKILL."""


@dataclass(eq=False, slots=True)
class _Child:
    """A process that runs, with the ends of the pipes that it writes into."""

    process: Process
    popen: subprocess.Popen[bytes]
    streams: dict[IO[bytes], Stream] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.process.label} (pid {self.popen.pid})"


class Supervisor:
    """Processes of one job and their output; for the main thread of a process that adopts orphans."""

    def __init__(self, patience: Patience, stops: Collection[int], mask: Collection[int]) -> None:
        """Hear the signals ``stops``, each of which ends the job, and set the signal mask ``mask``."""
        self._patience = patience
        self._output = Output()
        self._started: list[_Child] = []
        self._children: dict[int, _Child] = {}
        """Those that run, by process id."""
        self._code: int | None = None
        self._servers_stop_last = False  # workers that end cleanly on a signal need them until then
        """What the job's end was decided to be; None while it runs as it should."""
        self._alarm: tuple[float, Callable[[], None]] | None = None
        self._are_orphans_told = False
        self._is_mute = False
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        for number in (signal.SIGCHLD, *stops):
            signal.signal(number, lambda *_: None)  # without a handler the wakeup socket hears nothing
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, processes: Sequence[Process]) -> int:
        """Run the processes until none is left, nor what they started; returns the job's exit code."""
        for process in processes:
            if self._code is None:
                self._start(process)
        while self._children or self._has_orphans():
            self._wait()
        for child in self._started:
            self._drain(child)
            for stream in child.streams.values():
                self._write(partial(self._output.end, stream))
        self._write(self._output.close)
        return self._code or 0

    def _start(self, process: Process) -> None:
        try:
            popen = subprocess.Popen(  # noqa: S603 - the user's command
                process.command,
                env=process.full_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),  # no other thread holds a lock
            )
        except OSError as error:
            code = 127 if error.errno == errno.ENOENT else 126
            self._fail(f"{process.label} cannot be started: {process.command[0]!r}: {error.strerror}", code)
            return
        child = self._children[popen.pid] = _Child(process, popen)
        self._started.append(child)
        for pipe in (popen.stdout, popen.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            is_error = pipe is popen.stderr
            child.streams[pipe] = self._output.stream(process.label, process.rank or 0, is_error=is_error)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, child, pipe))

    def _wait(self) -> None:
        """Do what comes next: output, a signal, an end, or the end of a patience."""
        shows = None if self._is_mute else self._output.seconds_left()
        limits = [shows, self._alarm and self._alarm[0] - time.monotonic()]
        ready = self._selector.select(min((limit for limit in limits if limit is not None), default=None))
        for key, _ in ready:
            if key.data is not None:
                key.data()
        self._write(self._output.show_beginnings)
        with suppress(BlockingIOError):
            for number in self._signals.recv(4096):
                if number != signal.SIGCHLD:
                    self._asked_to_stop(number)
        self._reap()
        if self._alarm is not None and self._alarm[0] <= time.monotonic():
            self._alarm[1]()

    def _read(self, child: _Child, pipe: IO[bytes]) -> bool:
        """Take what one read gives; False if there is nothing more for now."""
        if pipe.closed:
            return False
        data = pipe.read(_READ)
        if data:
            self._write(partial(self._output.take, child.streams[pipe], data))
        elif data is not None:
            self._selector.unregister(pipe)
            pipe.close()
            self._write(partial(self._output.end, child.streams.pop(pipe)))
        return bool(data)

    def _drain(self, child: _Child) -> None:
        """Take what is in a child's pipes, as far as its own descendants do not fill them again and again."""
        for pipe in list(child.streams):
            for _ in range(_PIPE // _READ):
                if not self._read(child, pipe):
                    break

    def _write(self, action: Callable[[], None]) -> None:
        """Do something that writes; the job is stopped when that cannot be, and what comes then is dropped."""
        if not self._is_mute:
            try:
                action()
            except OSError as error:
                self._is_mute = True
                code = 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1
                self._fail(f"output cannot be written: {error.strerror}", code)

    def _say(self, text: str) -> None:
        with suppress(OSError):
            self._output.say(text)

    def _reap(self) -> None:
        ended: list[tuple[_Child, int]] = []
        with suppress(ChildProcessError):
            while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                child = self._children.get(info.si_pid)
                if child is None:
                    os.waitpid(info.si_pid, 0)  # an orphan that was adopted
                else:
                    ended.append((child, child.popen.wait()))
                    del self._children[info.si_pid]
        for child, code in sorted(ended, key=lambda one: one[1] >= 0):  # of a moment's ends a kill is rather the cause
            self._ended(child, code)

    def _ended(self, child: _Child, code: int) -> None:
        self._drain(child)  # its last words, before the verdict
        if code and self._code is None:
            self._fail(f"{child} {_how(code)}", 128 - code if code < 0 else code)
        if self._servers_stop_last and not self._workers():
            self._servers_stop_last = False
            self._terminate(self._children)
        if self._code is None and child.process.role == "worker" and not self._workers() and self._children:
            self._alarm = time.monotonic() + self._patience.servers, self._servers_are_late

    def _workers(self) -> list[_Child]:
        return [child for child in self._children.values() if child.process.role == "worker"]

    def _servers_are_late(self) -> None:
        names = ", ".join(map(str, self._children.values()))
        self._say(
            f"all workers ended well, but {names} did not end within {self._patience.servers:g} s after them; "
            "stopping them (-s 0 starts none, for workers that use no dist_* store)"
        )
        self._stop(0)

    def _asked_to_stop(self, number: int) -> None:
        if self._code is None:
            self._servers_stop_last = bool(self._workers())
            self._fail(signal.Signals(number).name, 128 + number)
        else:
            self._kill()

    def _fail(self, reason: str, code: int) -> None:
        """Stop the job for a reason; only the first counts."""
        if self._code is None:
            self._code = code
            self._say(f"{reason}; stopping what still runs" if self._children else reason)
            self._stop(code)

    def _stop(self, code: int) -> None:
        self._code = code
        first = [pid for pid, child in self._children.items() if child.process.role == "worker"]
        self._terminate(first if self._servers_stop_last else self._children)
        self._alarm = time.monotonic() + self._patience.stop, self._lose_patience

    def _terminate(self, leaders: Iterable[int]) -> None:
        for leader in leaders:
            send_group(leader, signal.SIGTERM)

    def _lose_patience(self) -> None:
        names = ", ".join(map(str, self._children.values())) or "what the processes started"
        self._say(f"{names} did not end within {self._patience.stop:g} s of SIGTERM: killed")
        self._kill()

    def _kill(self) -> None:
        for leader in self._children:
            send_group(leader, signal.SIGKILL)
        for pid in descendants():
            send(pid, signal.SIGKILL)
        self._alarm = time.monotonic() + _AGAIN, self._kill

    def _has_orphans(self) -> bool:
        """Whether something that the ended processes started still runs; it is told to end."""
        orphans = descendants()
        if orphans and not self._are_orphans_told:
            self._are_orphans_told = True
            for pid in orphans:
                send(pid, signal.SIGTERM)
            if self._code is None or self._alarm is None:
                self._code = self._code or 0
                self._alarm = time.monotonic() + self._patience.stop, self._lose_patience
        return bool(orphans)


def _how(code: int) -> str:
    """How a process ended, from its exit code as of subprocess."""
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
