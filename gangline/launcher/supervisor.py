"""Supervisor of a job: starts the processes, relays their output, reports the first failure, stops the others.

A job on several hosts has a supervisor on each host, and one on the launcher's host that runs the ssh commands. They
exchange lines: on standard input "stop" and "workers ended" (on all hosts), on standard error "failed CODE" and
"workers ended" (on one host). The end of standard input stops a host's processes.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO

from gangline.collectives.environments.job_key import JobKey, inherited_key
from gangline.collectives.host_files import opener
from gangline.collectives.processes.parent_death import die_with_parent
from gangline.collectives.transports import unix_sockets
from gangline.kvstore.restart_variables import (
    ANSWERS_FD,
    ASKED,
    CAME,
    DIED,
    ENTERED,
    IF_POSSIBLE,
    INCARNATION,
    KEPT_MEMORY,
    LAUNCHER_FD,
    LEAVING,
    LOST,
    RESTART,
)
from gangline.launcher.job import Process
from gangline.launcher.output import Output, Stream, write_what_fits
from gangline.launcher.process_tree import descendants, send, send_group, send_programs
from gangline.launcher.restarts import CHECKPOINTED, FINAL

_KILL_INTERVAL = 0.1
"""Seconds between rounds of SIGKILL; each round reaches processes forked since the last."""
_READ = 1 << 16  # bytes per read, so that all pipes get their turn
_PIPE = 1 << 20  # maximum capacity of a pipe in bytes
_HOST_DELAY = 5.0
"""Seconds for supervisors on other hosts to report and end, after they killed their processes."""
_LEFT_SECONDS = 2.0
"""Seconds for a worker that has left the job to end, if another worker fails meanwhile."""
_PIPE_TO_END_SECONDS = 1.0
"""Seconds from the end of the scheduler's pipe to that of its process, which is killed or exits at that time."""
_STOP = "stop"
_WORKERS_ENDED = "workers ended"
_FAILED = "failed"
_OF_GUESTS = ("DMLC_", "GANGLINE_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
"""Beginnings of the names of variables that a worker of another host gets."""
_REQUEST = 64  # maximum bytes of a request for another number of workers
ERROR = "error: "
"""Prefix of the answer to a refused request."""


@dataclass(frozen=True, slots=True)
class Reports:
    """Outputs of a supervisor in addition to standard output and error."""

    log_dir: Path | None = None
    """Folder for a log file of each process, such as worker-0.log."""
    host: str = ""
    """Name of this host, if the launcher is on another host and sends messages on standard input."""
    on_failure: Callable[[str], None] | None = None
    """Called in the supervisor's process with the text that names the first failure."""


@dataclass(frozen=True, slots=True)
class StopTimeouts:
    """Time limits for processes that should end, in seconds."""

    servers: float = 10.0
    """Time for servers and scheduler to end after the last worker."""
    stop: float = 10.0
    """Time between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ElasticWorkers:
    """Bounds of the number of workers of an elastic job, and the socket that changes it."""

    least: int
    most: int
    control: str
    """Name of the Unix socket to which `gangline resize` sends a number."""


@dataclass(eq=False, slots=True)
class _Child:
    """A started process and the pipes that it writes to."""

    process: Process
    popen: subprocess.Popen[bytes]
    streams: dict[IO[bytes], Stream] = field(default_factory=dict)
    log: IO[bytes] | None = None
    unsent: bytearray = field(default_factory=bytearray)
    """Bytes not yet written to its standard input."""
    is_stopping: bool = False
    """True for a supervisor on another host that has begun to stop its processes."""
    have_workers_ended: bool = False
    """True for a supervisor on another host whose workers have ended."""
    is_leaving: bool = False
    """True for a worker of an elastic job that was asked to leave."""

    def __str__(self) -> str:
        return f"{self.process.label} (pid {self.popen.pid})"


class Supervisor:
    """Runs the processes of one job; needs the main thread of a process that adopts orphans."""

    def __init__(self, timeouts: StopTimeouts, stops: Collection[int], mask: Collection[int], reports: Reports) -> None:
        """Install signal handlers; then set this signal mask."""
        self._timeouts = timeouts
        self._reports = reports
        self._output = Output(host=reports.host)
        self._other_hosts = bool(reports.host)
        """True while workers on other hosts may use servers on this host."""
        self._messages = bytearray()  # incomplete line of the launcher
        self._started: list[_Child] = []
        self._children: dict[int, _Child] = {}  # running processes by process id
        self._code: int | None = None  # exit code of the job; None until it fails or is stopped
        self._is_interrupted = False
        self._key: JobKey | None = None
        self._elastic: ElasticWorkers | None = None
        self._slots: list[Process] = []
        """Workers of an elastic job from `process_table`, one per slot."""
        self._next_rank = self._first_workers = 0
        """Rank of the next worker of an elastic job to be added, and number of those at the start."""
        self._is_job_over = False
        """True once the scheduler has succeeded: processes that still run have left the job, or came too late."""
        self._restarts_left = 0  # number of remaining restarts of single processes
        self._restarts = 0
        self._kept_memory: dict[str, int] = {}
        """Descriptors, by label, of memory where a restarted process finds its state."""
        self._from_scheduler: int | None = None
        """Pipe of the scheduler (`LAUNCHER_FD`); None if it has ended."""
        self._to_scheduler: int | None = None
        """Pipe to the scheduler of an elastic job (`ANSWERS_FD`)."""
        self._scheduler_line = b""  # beginning of an incomplete line of the scheduler
        self._left: list[str] = []
        """Labels of the processes that have left the job, in order; they are not restarted."""
        self._entered: set[str] = set()
        """Labels of the workers of an elastic job that have begun to take part: the others need them."""
        self._guests: set[str] = set()
        """Labels of the workers of an elastic job that run on other hosts."""
        self._failed_later: list[tuple[_Child, int]] = []
        """Workers that failed while a worker that had left the job was still ending: its exit may be the cause."""
        self._is_lost = False  # True if the scheduler has reported that restarts are useless
        self._late_code = 0
        """Exit code of the first process that failed after it had left the job, or after the job was over."""
        self._worker_codes: set[int] = set()  # exit codes of the workers that have ended
        self._servers_stop_last = False
        """True while workers end: they need servers for a clean end, or to learn which worker died."""
        self._alarm: tuple[float, Callable[[], None]] | None = None
        """Monotonic time of a callback, and the callback."""
        self._terminated: set[int] = set()  # orphans that were sent SIGTERM
        self._cannot_write = False
        self._lost_of_logs = 0  # number of bytes that did not fit on the disk of the log files
        self._is_full_disk_known = False
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        if reports.host:
            os.set_blocking(0, False)
            self._selector.register(0, selectors.EVENT_READ, self._receive)
        if reports.log_dir is not None:
            reports.log_dir.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGCHLD, *stops):
            signal.signal(number, lambda *_: None)  # the wakeup socket needs a handler
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(
        self,
        processes: Sequence[Process],
        key: JobKey | None = None,
        restart_processes: int = 0,
        elastic: ElasticWorkers | None = None,
    ) -> int:
        """Run the processes until they and all their descendants have ended; return the job's exit code.

        Up to ``restart_processes`` workers and servers are restarted alone.
        """
        self._key, self._restarts_left = key, restart_processes
        if elastic is not None:
            self._elastic = elastic
            self._slots = [process for process in processes if process.role == "worker"]
            self._next_rank = self._first_workers = sum(not process.is_spare for process in self._slots)
            listener = unix_sockets.listen(elastic.control)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._start_all([process for process in processes if not process.is_spare])
        while self._children or self._has_orphans():
            self._wait()
        for child in self._started:
            self._drain(child)
            for stream in child.streams.values():
                self._write(partial(self._output.end, stream))
            if child.log is not None:
                child.log.close()
        for lost, where in self._lost():
            self._report(f"{lost} bytes of output did not fit on the disk of {where}")
        if self._is_interrupted and CHECKPOINTED in self._worker_codes and self._worker_codes <= {0, CHECKPOINTED}:
            return CHECKPOINTED
        return self._code or self._late_code

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection from `gangline resize`."""
        with suppress(OSError):
            connection, _ = listener.accept()
            try:
                unix_sockets.check_user(connection)
            except PermissionError:
                connection.close()
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._answer, connection))

    def _answer(self, connection: socket.socket) -> None:
        """Change the number of workers as `gangline resize` requests, and answer with the result."""
        self._selector.unregister(connection)
        with connection, suppress(OSError):
            words = connection.recv(_REQUEST).decode(errors="replace").strip()
            connection.send(self._resize(words).encode())

    def _resize(self, words: str) -> str:
        """Start workers, or ask some to leave, to reach the number in ``words``; return the answer."""
        assert self._elastic is not None
        least, most = self._elastic.least, self._elastic.most - len(self._guests)
        running = sorted(self._workers(), key=lambda child: child.process.rank or 0)
        staying = [child for child in running if not child.is_leaving]
        if not words.isdecimal() or not least <= int(words) <= most:
            guests = f" beside {len(self._guests)} on other hosts" if self._guests else ""
            return f"{ERROR}{words!r} workers; expected {least} to {most}{guests}"
        if self._code is not None or not running:
            return f"{ERROR}the job ends"
        count = int(words)
        free = self._free_slots()
        if count - len(staying) > len(free):
            return f"{ERROR}{len(running) - len(staying)} workers are leaving; add others when they have ended"
        for child in staying[count:]:
            child.is_leaving = True
            send_programs({child.popen.pid: signal.SIGTERM})
        added = []
        for process in free[: max(count - len(staying), 0)]:
            added.append(_of_rank(process, self._next_rank))
            self._next_rank += 1
        self._start_all(added)
        changes = [f"{process.label} starts" for process in added]
        changes += [f"{child.process.label} is asked to leave" for child in staying[count:]]
        done = f"{len(staying)} to {count} workers: {', '.join(changes) or 'nothing changes'}"
        self._report(done)
        return done

    def _free_slots(self) -> list[Process]:
        used = {child.process.environment["LOCAL_RANK"] for child in self._workers()}
        return [process for process in self._slots if process.environment["LOCAL_RANK"] not in used]

    def _grant_rank(self, asking: str) -> None:
        """Answer the scheduler with the rank and variables of a worker of another host."""
        if self._to_scheduler is None or self._code is not None:
            return
        process = _of_rank(self._slots[0], self._next_rank)
        places = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables = [
            f"{name}={places.get(name, value)}"
            for name, value in process.environment.items()
            if value is not None and name.startswith(_OF_GUESTS)
        ]
        with suppress(OSError):
            os.write(self._to_scheduler, json.dumps([asking, self._next_rank, variables]).encode() + b"\n")
            self._next_rank += 1

    def _replace_guest(self, label: str) -> None:
        """Start a worker in the place of one on another host that has died, to repeat its round and leave."""
        self._guests.discard(label)
        if not self._is_lost and label not in {child.process.label for child in self._workers()}:
            self._report(f"{label} on another host has died; another process repeats its round here, and leaves")
            process = _of_rank((self._free_slots() or self._slots)[0], int(label.split()[1]))
            changed = {INCARNATION: "1", LEAVING: IF_POSSIBLE}
            self._start_all([replace(process, environment={**process.environment, **changed})])
        self._end_servers()

    def _start_all(self, processes: Sequence[Process]) -> None:
        with inherited_key(self._key) as (environment, descriptors):
            if self._key is not None:
                environment["GANGLINE_JOB_ID"] = self._key.job_id()
            for process in processes:
                if self._code is not None:
                    return
                own: dict[str, int] = {}
                if (self._restarts_left or self._restarts) and process.role in ("scheduler", "server", "worker"):
                    if process.label not in self._kept_memory:
                        memory = os.memfd_create("gangline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                        self._kept_memory[process.label] = memory
                    own[KEPT_MEMORY] = self._kept_memory[process.label]
                if process.role == "scheduler":
                    self._from_scheduler, own[LAUNCHER_FD] = os.pipe()
                    os.set_blocking(self._from_scheduler, False)
                    self._selector.register(self._from_scheduler, selectors.EVENT_READ, self._hear_scheduler)
                    if self._elastic is not None:
                        own[ANSWERS_FD], self._to_scheduler = os.pipe()
                        os.set_blocking(self._to_scheduler, False)
                more = {**environment, **{name: str(descriptor) for name, descriptor in own.items()}}
                self._start(process, more, [*descriptors, *own.values()])
                for name in own.keys() & {LAUNCHER_FD, ANSWERS_FD}:
                    os.close(own[name])

    def _may_restart(self, child: _Child, code: int) -> bool:
        """Return whether a failed process is restarted alone: others need it, and the job can continue."""
        if not self._restarts_left or code in FINAL or child.process.role not in ("worker", "server", "scheduler"):
            return False
        return not self._is_lost and (self._from_scheduler is not None or child.process.role == "scheduler")

    def _hear_scheduler(self) -> None:
        """Read the scheduler's messages about other processes, and detect its end; see `LAUNCHER_FD`."""
        while self._from_scheduler is not None:
            try:
                data = os.read(self._from_scheduler, _READ)
            except BlockingIOError:
                return
            *lines, self._scheduler_line = (self._scheduler_line + data).split(b"\n")
            if not data:
                self._selector.unregister(self._from_scheduler)
                os.close(self._from_scheduler)
                if self._to_scheduler is not None:
                    os.close(self._to_scheduler)
                self._from_scheduler = self._to_scheduler = None
            for line in lines:
                self._handle_line(line)
            if not data:
                self._end_scheduler()

    def _end_scheduler(self) -> None:
        """Handle the end of the scheduler, whose pipe has ended, before that of processes whose restart needs it."""
        for child in [one for one in self._children.values() if one.process.role == "scheduler"]:
            with suppress(subprocess.TimeoutExpired):  # it has closed the pipe, and runs on
                code = child.popen.wait(_PIPE_TO_END_SECONDS)
                del self._children[child.popen.pid]
                self._ended(child, code)

    def _handle_line(self, line: bytes) -> None:
        mark, text = line[:1], line[1:].decode()
        if mark == LOST:
            self._is_lost = True
        elif mark == ENTERED:
            self._entered.add(text)
        elif mark == CAME:
            self._guests.add(text)
        elif mark == DIED:
            self._replace_guest(text)
        elif mark == ASKED:
            self._grant_rank(text)
        else:
            self._left.append(line.decode())
            if self._left[-1] in self._guests:
                self._guests.remove(self._left[-1])
                self._end_servers()

    def _restart(self, child: _Child, code: int) -> None:
        """Restart a process with its role and rank."""
        self._restarts_left -= 1
        self._restarts += 1
        number = int(child.process.environment.get(INCARNATION) or 0) + 1
        total = self._restarts + self._restarts_left
        self._report(f"{child} {_how(code)}; it starts again (restart {self._restarts} of {total} of single processes)")
        send_group(child.popen.pid, signal.SIGKILL)  # its own children are useless now
        changed = {INCARNATION: str(number), **({LEAVING: "1"} if child.is_leaving else {})}
        self._start_all([replace(child.process, environment={**child.process.environment, **changed})])

    def _start(self, process: Process, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
        try:
            log = None if process.document is not None else self._open_log(process)
        except OSError as error:
            self._fail(f"the log {error.filename} cannot be written: {error.strerror}", 1)
            return
        try:
            popen = subprocess.Popen(  # noqa: S603 - the user's command
                process.command,
                env=process.full_environment({**os.environ, **environment}),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL if process.document is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=partial(_prepare, os.getpid(), process.cpus),  # safe: this process has no other threads
            )
        except OSError as error:
            if log is not None:
                log.close()
            code = 127 if error.errno == errno.ENOENT else 126
            self._fail(f"{process.label} cannot be started: {process.command[0]!r}: {error.strerror}", code)
            return
        child = self._children[popen.pid] = _Child(process, popen, log=log, is_leaving=LEAVING in process.environment)
        self._started.append(child)
        if process.document is not None:
            assert popen.stdin is not None
            os.set_blocking(popen.stdin.fileno(), False)
            self._tell(child, process.document)
        for pipe in (popen.stdout, popen.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            is_error = pipe is popen.stderr
            child.streams[pipe] = (
                self._output.stream(process.label, is_error=is_error)
                if process.document is None
                else Stream(b"", is_error, partial(self._hear, child) if is_error else None)
            )
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, child, pipe))

    def _open_log(self, process: Process) -> IO[bytes] | None:
        if self._reports.log_dir is None:
            return None
        path = self._reports.log_dir / f"{process.label.replace(' ', '-')}.log"
        is_first_start = all(process.environment.get(name) in (None, "0") for name in (RESTART, INCARNATION))
        return open(path, "wb" if is_first_start else "ab", buffering=0, opener=opener)

    def _wait(self) -> None:
        """Wait for output, a signal, the end of a process or the alarm, and handle it."""
        for key, _ in self._selector.select(self._alarm and self._alarm[0] - time.monotonic()):
            if key.data is not None:
                key.data()
        with suppress(BlockingIOError):
            for number in self._signals.recv(4096):
                if number != signal.SIGCHLD:
                    self._stop_by_signal(number)
        self._reap()
        if self._alarm is not None and self._alarm[0] <= time.monotonic():
            self._alarm[1]()

    def _read(self, child: _Child, pipe: IO[bytes]) -> bool:
        """Read once and write the output; return False if the pipe is empty."""
        if pipe.closed:
            return False
        data = pipe.read(_READ)
        if data:
            if child.log is not None:
                self._write(partial(self._write_log, child.log, data))
            self._write(partial(self._output.write, child.streams[pipe], data))
            self._warn_of_full_disk()
        elif data is not None:
            self._selector.unregister(pipe)
            pipe.close()
            self._write(partial(self._output.end, child.streams.pop(pipe)))
        return bool(data)

    def _drain(self, child: _Child) -> None:
        """Read a child's pipes, at most one capacity each: its descendants may keep writing."""
        for pipe in list(child.streams):
            for _ in range(_PIPE // _READ):
                if not self._read(child, pipe):
                    break

    def _write(self, action: Callable[[], object]) -> None:
        """Run an action that writes output; if that fails, stop the job and discard all further output."""
        if not self._cannot_write:
            try:
                action()
            except OSError as error:
                self._cannot_write = True
                code = 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1
                self._fail(f"output cannot be written: {error.strerror}", code)

    def _write_log(self, log: IO[bytes], data: bytes) -> None:
        self._lost_of_logs += write_what_fits(log.fileno(), data)

    def _lost(self) -> list[tuple[int, str]]:
        """Return the number of bytes lost to full disks, and their destinations."""
        found = (self._output.lost, "the launcher's output"), (self._lost_of_logs, str(self._reports.log_dir))
        return [(lost, where) for lost, where in found if lost]

    def _warn_of_full_disk(self) -> None:
        if not self._is_full_disk_known and (lost := self._lost()):
            self._is_full_disk_known = True
            self._report(f"the disk of {lost[0][1]} is full: the job goes on, and output that does not fit is lost")

    def _report(self, text: str) -> None:
        with suppress(OSError):
            self._output.report(text)

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
        if ended:
            self._hear_scheduler()

        def order(one: tuple[_Child, int]) -> tuple[bool, bool, int]:
            """Sort likely causes first: killed processes, then the first to leave."""
            (child, code), left = one, [*self._left, one[0].process.label]
            return code >= 0, child.process.role != "scheduler", left.index(child.process.label)

        for child, code in sorted(ended, key=order):
            self._ended(child, code)

    def _ended(self, child: _Child, code: int, *, may_wait: bool = True) -> None:
        self._drain(child)  # write its last output before the report
        self._hear_scheduler()
        is_absent = self._elastic is not None and child.process.is_worker and child.process.label not in self._entered
        is_first = (child.process.rank or 0) < self._first_workers
        if is_absent and is_first and code == -signal.SIGTERM and self._code is None:
            self._report(f"{child} was asked to leave before the job began: it starts again, and leaves after a round")
            environment = {**child.process.environment, LEAVING: "1"}
            self._start_all([replace(child.process, environment=environment)])
            return
        if child.is_leaving and code == -signal.SIGTERM:  # it had not joined, or the scheduler notifies the others
            code = 0
        self._is_job_over |= child.process.role == "scheduler" and not code
        has_left = child.process.label in self._left or (self._is_job_over and not self._is_lost)
        if code and self._code is None and has_left and (self._restarts_left or self._restarts):
            self._report(f"{child} {_how(code)} after it had left the job; the others go on")
            if code > 0 or child.process.is_worker:  # a server killed now has lost nothing
                self._late_code = self._late_code or _exit_code(code)
            code = 0
        if code and self._code is None and self._may_restart(child, code):
            self._restart(child, code)
            return
        if code and self._code is None and is_absent and not is_first:
            self._report(f"{child} {_how(code)} before it took part; the others go on")
            self._late_code = self._late_code or max(code, 0)
            code = 0
        ending = {one.process.label for one in self._workers()} & {*takewhile(child.process.label.__ne__, self._left)}
        if code > 0 and self._code is None and child.process.is_worker and ending and may_wait:
            self._failed_later.append((child, code))
            self._alarm = self._alarm or (
                time.monotonic() + _LEFT_SECONDS,
                partial(self._end_failed_later, may_wait=False),
            )
            return
        if child.process.is_worker:
            self._worker_codes.add(code)
        if code and self._code is None:
            self._servers_stop_last = child.process.is_worker and self._has_workers()
            self._fail(f"{child} {_how(code)}", _exit_code(code))
        if self._reports.host and child.process.is_worker and not self._workers():
            self._write(partial(self._output.send, _WORKERS_ENDED))
        self._end_servers()
        self._tell_workers_ended()
        self._end_failed_later()

    def _end_failed_later(self, *, may_wait: bool = True) -> None:
        failed, self._failed_later = self._failed_later, []
        if failed and self._code is None:
            self._alarm = None
        for child, code in failed:
            self._ended(child, code, may_wait=may_wait)

    def _end_servers(self) -> None:
        """If no worker is left on any host, stop the servers, or set the deadline for their end."""
        has_workers = self._has_workers() or (bool(self._guests) and self._code is None)
        if (has_workers and not (self._elastic and self._is_job_over)) or not self._children:
            return
        if self._servers_stop_last:
            self._servers_stop_last = False
            self._terminate(self._children)
        elif self._code is None and self._alarm is None:
            self._alarm = time.monotonic() + self._timeouts.servers, self._stop_late_servers

    def _workers(self) -> list[_Child]:
        return [child for child in self._children.values() if child.process.is_worker]

    def _has_workers(self) -> bool:
        return self._other_hosts or bool(self._workers())

    def _tell(self, child: _Child, line: str) -> None:
        """Send a line to the supervisor on another host; an unreachable supervisor ends with its connection."""
        child.unsent += f"{line}\n".encode()
        self._send_unsent(child)

    def _send_unsent(self, child: _Child) -> None:
        """Write what fits into a pipe; with many hosts, an ordinary user's pipes hold only a page."""
        assert child.popen.stdin is not None
        pipe = child.popen.stdin.fileno()
        try:
            del child.unsent[: os.write(pipe, child.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            child.unsent.clear()
        is_registered = pipe in self._selector.get_map()
        if child.unsent and not is_registered:
            self._selector.register(pipe, selectors.EVENT_WRITE, partial(self._send_unsent, child))
        elif is_registered and not child.unsent:
            self._selector.unregister(pipe)

    def _tell_workers_ended(self) -> None:
        """If the workers of all hosts have ended, notify the supervisors of these hosts."""
        hosts = [child for child in self._started if child.process.document is not None]
        running = [child for child in hosts if child.popen.pid in self._children]
        if running and all(child.have_workers_ended for child in running):
            for child in running:
                self._tell(child, _WORKERS_ENDED)

    def _hear(self, child: _Child, message: str) -> None:
        """Handle a message of the supervisor on another host."""
        word, _, code = message.rpartition(" ")
        if message == _WORKERS_ENDED:
            child.have_workers_ended = True
            self._tell_workers_ended()
        elif word == _FAILED and self._code is None:
            child.is_stopping = True
            self._stop(int(code))

    def _receive(self) -> None:
        """Handle lines of the launcher on another host, or the end of the connection."""
        data = os.read(0, _READ)
        *lines, rest = (bytes(self._messages) + data).split(b"\n")
        self._messages[:] = rest
        if _WORKERS_ENDED.encode() in lines:
            self._other_hosts = False
            self._end_servers()
        if not data:
            self._selector.unregister(0)
            self._other_hosts = False
        if not data and self._code is not None:
            self._kill()
        elif (not data or _STOP.encode() in lines) and self._code is None:
            self._is_interrupted = True
            self._servers_stop_last = bool(self._workers())
            self._stop(128 + signal.SIGTERM)

    def _stop_late_servers(self) -> None:
        names = ", ".join(map(str, self._children.values()))
        self._report(
            f"all workers succeeded, but {names} did not end within {self._timeouts.servers:g} s after them; "
            "stopping them (-s 0, or servers=0, starts none, for workers that use no dist_* store)"
        )
        self._stop(0)

    def _stop_by_signal(self, number: int) -> None:
        if self._code is None:
            self._is_interrupted = True
            self._servers_stop_last = self._has_workers()
            self._fail(signal.Signals(number).name, 128 + number)
        else:
            self._kill()

    def _fail(self, reason: str, code: int) -> None:
        """Report a failure and stop the job; later failures are ignored."""
        if self._code is None:
            self._code = code
            if self._reports.on_failure is not None:
                self._reports.on_failure(reason)
            self._report(f"{reason}; stopping the other processes" if self._children else reason)
            if self._reports.host:
                self._write(partial(self._output.send, f"{_FAILED} {code}"))
            self._stop(code)

    def _stop(self, code: int) -> None:
        self._code = code
        first = [pid for pid, child in self._children.items() if child.process.is_worker]
        self._terminate(first if self._servers_stop_last else self._children)
        delay = _HOST_DELAY if any(child.process.document is not None for child in self._children.values()) else 0
        self._alarm = time.monotonic() + self._timeouts.stop + delay, self._kill_late

    def _terminate(self, leaders: Iterable[int]) -> None:
        children = {leader: self._children[leader] for leader in leaders}
        here = {leader: child for leader, child in children.items() if child.process.document is None}
        send_programs({leader: child.process.stop_signal for leader, child in here.items()})
        for child in children.values():
            if child.process.document is not None and not child.is_stopping:
                child.is_stopping = True
                self._tell(child, _STOP)

    def _kill_late(self) -> None:
        names = ", ".join(map(str, self._children.values())) or "descendants of the processes"
        self._report(f"{names} did not end within {self._timeouts.stop:g} s of SIGTERM: killed")
        self._kill()

    def _kill(self) -> None:
        for leader in self._children:
            send_group(leader, signal.SIGKILL)
        for pid in descendants():
            send(pid, signal.SIGKILL)
        self._alarm = time.monotonic() + _KILL_INTERVAL, self._kill

    def _has_orphans(self) -> bool:
        """Return True if descendants of the ended processes still run; send each of them SIGTERM once."""
        orphans = descendants()
        is_first = bool(orphans) and not self._terminated
        for pid in set(orphans) - self._terminated:  # some were forked since the last check
            send(pid, signal.SIGTERM)
            self._terminated.add(pid)
        if is_first and (self._code is None or self._alarm is None):
            self._code = self._code or 0
            self._alarm = time.monotonic() + self._timeouts.stop, self._kill_late
        return bool(orphans)


def _of_rank(slot: Process, rank: int) -> Process:
    """Return the worker of a slot of an elastic job with a new rank."""
    return replace(slot, rank=rank, environment={**slot.environment, "DMLC_WORKER_ID": str(rank), "RANK": str(rank)})


def _prepare(parent: int, cpus: Collection[int]) -> None:
    """Prepare a child before it runs its command."""
    die_with_parent(parent)
    if cpus:
        os.sched_setaffinity(0, cpus)


def _exit_code(code: int) -> int:
    """Return an exit code of subprocess in the form of a shell."""
    return 128 - code if code < 0 else code


def _how(code: int) -> str:
    """Describe how a process ended, by its exit code in the form of subprocess."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
