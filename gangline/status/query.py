"""Ask the processes of this user on this host for their status."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gangline.collectives.environments.job_name import job_name
from gangline.collectives.liveness.status_socket import PREFIX, Part
from gangline.collectives.transports import unix_sockets

_MOST_THREADS = 16
_PLACE_SECONDS = 0.3
_MOST_PLACES = 4
_STATES = {"T": "stopped", "t": "stopped", "Z": "ended", "D": "waits for a disk", "R": "runs", "S": "sleeps"}
_LISTENING = re.compile(
    rf"^\S+ \S+ \S+ 00010000 \S+ \S+ +(\d+) @({re.escape(PREFIX)}\d+-[\x21-\x7e]*)$".encode(), re.MULTILINE
)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", str(Path(__file__).parents[1]), "<frozen ")


@dataclass(frozen=True)
class ProcessStatus:
    """Status of one process."""

    name: str
    """Name, such as "worker 1"."""
    process: int
    """Process id."""
    state: str
    """"runs", "sleeps", "stopped", "waits for a disk" or "ended"."""
    answers: bool
    """False if it did not answer in time: it is stopped, or a library holds its interpreter."""
    cpu_seconds: float
    """CPU time of its threads in seconds."""
    memory_bytes: int
    """Resident memory in bytes."""
    job: str = ""
    """Text that is equal for all processes of a job."""
    command: str = ""
    """Command line, with the name of its program in place of the path."""
    host: str = ""
    since: float = 0.0
    """Time of its start, in seconds since the epoch."""
    parts: Sequence[Part] = ()
    stack: Sequence[str] = ()
    """Functions of its main thread, the outermost first."""

    @property
    def doing(self) -> str:
        """Return the position of its main thread: "is at FILE:LINE in FUNCTION", without frames of libraries."""
        own = [frame for frame in self.stack if not any(name in frame for name in _LIBRARIES)]
        if own or self.stack:
            return f"is at {(own or self.stack)[-1]}"
        return "is stopped" if self.state == "stopped" else "does not answer"

    def as_json(self) -> dict[str, Any]:
        """Return the status for json.dumps."""
        return asdict(self)


def statuses(
    seconds: float = 1.0, is_wanted: Callable[[str, int], bool] = lambda _name, _process: True
) -> list[ProcessStatus]:
    """Return the status of this user's gangline processes in this network namespace, by job and name.

    Args:
        seconds: time for a process to answer.
        is_wanted: returns whether to ask a process, given its name, such as "worker 1", and its process id.
    """
    found = {one: inode for one, inode in _sockets().items() if is_wanted(_name_of(one), _process_of(one))}
    if not found:
        return []
    with ThreadPoolExecutor(min(len(found), _MOST_THREADS)) as threads:
        asked = threads.map(lambda one: _ask(one[0], one[1], seconds), found.items())
        answers = [status for status in asked if status is not None]
    return sorted(answers, key=lambda one: (one.job, one.name.rstrip("0123456789"), len(one.name), one.name))


def places(workers: Collection[int], processes: Collection[int]) -> str:
    """Return positions of this job's workers and of processes on this host, for an error; "" if unknown."""
    names, job = {f"worker {rank}" for rank in workers}, job_name()
    found = statuses(_PLACE_SECONDS, lambda name, process: name in names or process in processes)
    shown = [status for status in found if status.process in processes or status.job == job]
    texts = [f"{status.name} {status.doing}" for status in shown[:_MOST_PLACES]]
    return f" ({'; '.join(texts)})" if texts else ""


def _sockets() -> dict[str, int]:
    """Return the names that look like those of this user's processes, which anyone may take, and their inodes."""
    listed = Path("/proc/net/unix").read_bytes()  # names of other programs' sockets are any bytes
    return {name.decode(): int(inode) for inode, name in _LISTENING.findall(listed)}


def _name_of(socket_name: str) -> str:
    return socket_name.removeprefix(PREFIX).partition("-")[2].rpartition("-")[0].replace("_", " ")


def _process_of(socket_name: str) -> int:
    return int(socket_name.removeprefix(PREFIX).partition("-")[0])


def _ask(socket_name: str, inode: int, seconds: float) -> ProcessStatus | None:
    """Return the status of the process with a socket; None if it has ended, or another process has the socket."""
    process = _process_of(socket_name)
    try:
        found = psutil.Process(process)
        with found.oneshot():
            letter = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
            times, memory = found.cpu_times(), found.memory_info().rss
            job = job_name(found.environ(), found.ppid())
            words = found.cmdline() or [found.name()]
    except (psutil.Error, OSError):
        return None
    answer: dict[str, Any] = {"job": job, "host": os.uname().nodename}
    answers = False
    if letter not in "Tt":
        with suppress(OSError, ValueError):
            answer, answers = _printable(_answer(socket_name, seconds)), True
    if not answers and not _holds(process, inode):
        return None
    known = {name: answer[name] for name in ("job", "host", "since", "parts", "stack") if name in answer}
    return ProcessStatus(
        name=answer.get("name") or _name_of(socket_name) or f"process {process}",
        process=process,
        state=_STATES.get(letter, letter),
        answers=answers,
        cpu_seconds=times.user + times.system,
        memory_bytes=memory,
        command=_printable(shlex.join([Path(words[0]).name, *words[1:]])),
        **known,
    )


def _holds(process: int, inode: int) -> bool:
    """Return whether a process of this user has a socket."""
    with suppress(OSError):
        folder = f"/proc/{process}/fd"
        return any(os.readlink(f"{folder}/{one}") == f"socket:[{inode}]" for one in os.listdir(folder))
    return False


def _printable(value: Any) -> Any:
    """Return a value as JSON has it, with control characters of its texts escaped, which could command a terminal."""
    match value:
        case str():
            return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in value)
        case list():
            return [_printable(one) for one in value]
        case dict():
            return {_printable(name): _printable(one) for name, one in value.items()}
    return value


def _answer(socket_name: str, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    with unix_sockets.connect(socket_name, seconds) as connection:
        chunks = []
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
    answer: dict[str, Any] = json.loads(b"".join(chunks))
    return answer
