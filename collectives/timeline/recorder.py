"""Record what this process does, and write it to a Chrome trace that all processes of a job append to."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

from gangline.collectives.environments.job_name import RUN_ID, job_name
from gangline.collectives.host_files import opener

VARIABLE = "GANGLINE_TIMELINE"
_JOB = "GANGLINE_TIMELINE_JOB"
_WRITE_SECONDS = 1.0
_MOST_PENDING = 1 << 20
"""Maximum events in memory; further events are counted and dropped until the next write."""
_END = b"\n]\n"
_PROCESSES = 1 << 23
"""More than any process id, so that processes of several hosts get different numbers."""


class _Event(NamedTuple):
    phase: str
    """"X": a span of a thread; "b": a span of its own, which may overlap others; "i": an instant."""
    name: str
    begin: int
    end: int
    thread: int
    arguments: dict[str, Any]


class Timeline:
    """Recorder of one process; replaces a file of another job. Its methods are thread-safe and do not block.

    Times are nanoseconds of `time.monotonic_ns`; the file has microseconds of the clock of rank 0's or the scheduler's
    host. Every process appends its events to the file each second and when it ends, so a killed job leaves a file too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events: list[_Event] = []
        self._names: dict[int, str] = {}  # of threads
        self._process_name = f"process {os.getpid()}"
        self._offset = self._error = 0  # nanoseconds to add to this process's clock
        self._host = 0  # number of this host if it is another one than that of the job's clock
        self._described: tuple[str, int, int] | None = None  # what the file says of this process
        self._dropped = 0
        self._asyncs = 0
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._problem = ""

    @contextmanager
    def span(self, name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Record this context as a span of the thread; yields the span's arguments, which may be extended."""
        begin = time.monotonic_ns()
        try:
            yield arguments
        finally:
            self.add(name, begin, **arguments)

    def add(self, name: str, begin: int, **arguments: Any) -> None:
        """Record a span of the current thread that ends now."""
        self._append("X", name, begin, arguments)

    def add_overlapping(self, name: str, begin: int, **arguments: Any) -> None:
        """Record a span that ends now and may overlap others of its thread, such as a request."""
        self._append("b", name, begin, arguments)

    def add_instant(self, name: str, **arguments: Any) -> None:
        """Record an instant: now."""
        self._append("i", name, time.monotonic_ns(), arguments)

    def _append(self, phase: str, name: str, begin: int, arguments: dict[str, Any]) -> None:
        name = name.replace("\\", "\\\\").replace('"', '\\"')
        if len(self._events) >= _MOST_PENDING:
            self._dropped += 1
            return
        thread = threading.get_native_id()
        if thread not in self._names:
            self._names[thread] = threading.current_thread().name
            self._start()
        self._events.append(_Event(phase, name, begin, time.monotonic_ns(), thread, arguments))

    def set_process(self, name: str) -> None:
        """Set the name of this process in the trace, such as "worker 0"."""
        self._process_name = name

    def set_offset(self, offset: int, error: int) -> None:
        """Set the offset from this clock to another host's clock, and its error, in nanoseconds."""
        self._offset, self._error = offset, error
        self._host = 1 + zlib.crc32(os.uname().nodename.encode()) % 255

    def write(self) -> None:
        """Append the events to the file. An error of the file system is reported once, and recording ends."""
        with self._writing:
            events, self._events = self._events, []
            if not events or self._problem:
                return
            try:
                self._append_to_file(self._lines(events))
            except OSError as error:
                self._problem = str(error)
                print(f"gangline: no more timeline is written: {error}", file=sys.stderr)

    def _lines(self, events: list[_Event]) -> str:
        process = os.getpid() + self._host * _PROCESSES
        offset = self._offset
        lines: list[str] = []

        def add(phase: str, name: str, thread: int, **members: Any) -> None:
            lines.append(json.dumps({"ph": phase, "name": name, "pid": process, "tid": thread, **members}))

        described = self._process_name, offset, self._error
        if described != self._described:
            self._described = described
            is_named = self._process_name != f"process {os.getpid()}"
            label = f"{os.uname().nodename}, process {os.getpid()}"
            add("M", "process_name", 0, args={"name": f"{self._process_name} ({label})" if is_named else label})
            own: dict[str, Any] = {"name": self._process_name, "host": os.uname().nodename}
            own |= {"offset_us": offset / 1e3, "error_us": self._error / 1e3, "cores": len(os.sched_getaffinity(0))}
            own["threads"] = os.environ.get("OMP_NUM_THREADS", "")
            add("M", "gangline_process", 0, args=own)
        for thread, name in list(self._names.items()):
            if name:
                add("M", "thread_name", thread, args={"name": name})
                self._names[thread] = ""
        add("C", "cores", 0, ts=(time.monotonic_ns() + offset) / 1e3, args=_core_use())
        for phase, name, begin, end, thread, arguments in events:  # json.dumps of whole events takes 5 times as long
            where = f'"name": "{name}", "pid": {process}, "tid": {thread}, "ts": '
            members = ", ".join([f'"{k}": {_json(v)}' for k, v in arguments.items()])
            args = f', "args": {{{members}}}' if members else ""
            ts, end_ts = f"{(begin + offset) / 1e3:.3f}", f"{(end + offset) / 1e3:.3f}"
            if phase == "b":
                self._asyncs += 1
                number = f'"cat": "gangline", "id2": {{"local": "{self._asyncs}"}}'  # of this process's tracks
                lines.append(f'{{"ph": "b", {where}{ts}, {number}{args}}}')
                lines.append(f'{{"ph": "e", {where}{end_ts}, {number}}}')
            elif phase == "i":
                lines.append(f'{{"ph": "i", {where}{ts}, "s": "t"{args}}}')
            else:
                lines.append(f'{{"ph": "X", {where}{ts}, "dur": {(end - begin) / 1e3:.3f}{args}}}')
        if self._dropped:
            add("i", f"{self._dropped} events were dropped", 0, ts=(time.monotonic_ns() + offset) / 1e3, s="p")
            self._dropped = 0
        return "".join(f",\n{line}" for line in lines)

    def _append_to_file(self, text: str) -> None:
        """Append to the array in the file, whose closing bracket moves to the new end.

        Viewers accept an array without its end, which a process that is killed here leaves.
        """
        header = json.dumps({"ph": "M", "name": "gangline_job", "pid": 0, "args": {"job": _job()}})
        beginning = f"[\n{header}".encode()
        descriptor = opener(self.path, os.O_RDWR | os.O_CREAT)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.pread(descriptor, len(beginning), 0) != beginning:
                file.truncate(0)
                file.write(beginning)
            else:
                size = os.fstat(descriptor).st_size
                if os.pread(descriptor, len(_END), size - len(_END)) == _END:
                    file.seek(size - len(_END))
                else:  # a process was killed while it wrote: drop the last event
                    file.seek(max(file.read().rfind(b",\n"), len(beginning)))
                    file.truncate()
            file.write(text.encode() + _END)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gangline-timeline", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            time.sleep(_WRITE_SECONDS)
            self.write()


def _job() -> str:
    """Return a text that is equal for all processes of a job and differs between jobs."""
    return os.environ.get(RUN_ID) or os.environ[_JOB]


def _json(value: object) -> str:
    return str(value) if type(value) is int else json.dumps(value)


def _core_use() -> dict[str, float]:
    """Return the seconds that all threads of this process have run, and have waited for a core."""
    ran = waited = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            own, delay, _ = (task / "schedstat").read_text().split()
            ran, waited = ran + int(own), waited + int(delay)
    return {"run_s": ran / 1e9, "wait_s": waited / 1e9}


current: Timeline | None = None
"""The recorder of this process; None: not recording."""


def start(path: Path) -> None:
    """Record from now on, in this process and in those that it starts."""
    global current
    os.environ[VARIABLE] = str(path.absolute())
    if _JOB not in os.environ:  # name the job for this process and those that it starts, by what started it
        os.environ[_JOB] = job_name() or f"process {os.getpid()} since {time.time():.3f}"
    current = Timeline(path.absolute())


def write() -> None:
    """Write what was recorded, at the end of the process."""
    if current is not None:
        current.write()


def _start_in_child() -> None:
    if current is not None:
        start(current.path)


if path := os.environ.get(VARIABLE):
    start(Path(path))
atexit.register(write)
util.Finalize(None, write, exitpriority=0)  # processes of multiprocessing end without atexit
os.register_at_fork(after_in_child=_start_in_child)
