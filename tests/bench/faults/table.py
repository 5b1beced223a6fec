"""`gangline bench faults`: run a job for each fault and print what it ends in."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from gangline.bench.report.output import check_outputs, write_json
from gangline.bench.report.rows import Row
from gangline.bench.workload.options import Json
from gangline.collectives.processes import process_pool
from gangline.collectives.processes.spawning import Outcome, Ranks
from tests.bench.faults.cases import PHASES, Case, cases
from tests.bench.faults.job import ROLES, STEPS, Told, play
from tests.collectives.processes import Bare
from tests.hosts import Hosts, obstacle

_DIGITS = "1" * 12
_CUT_SECONDS = 5.0
_LEAVE_SECONDS = 30.0
"""Time for processes to end after the last worker has."""
_WRONG = "02:00:00:00:00:99"
_JUNK = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48) + b"\4\x19\5READY\13Socket-Type\0\0\0\6DEALER\0\x20" + b"\x91" * 32,
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48) + b"\2\x7f\xff\xff\xff\xff\xff\xff\xff",
    os.urandom(1 << 16),
)
"""Bytes for a port: of another protocol, a message of nested arrays, a frame of 2^63 bytes, noise."""
_FILLER = "filler"
_starting = threading.Lock()


def faults(
    only: Annotated[str, typer.Option(help="Regular expression for the rows, such as 'server 0 killed.*'.")] = ".*",
    jobs: Annotated[int, typer.Option(help="Jobs at the same time.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="GANGLINE_TIMEOUT of the jobs, in seconds.", min=1)] = 30.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/reliability.md.")] = False,
    json: Json = None,
) -> None:
    """Run a job of a server and two workers for each fault, and print outcome, seconds and what is left.

    A process or link suffers the fault when a process has reached the n-th event of a point (GANGLINE_FAULT). Links are
    those between network namespaces, which need root; their packets are lost and nothing is closed. Seconds are those
    from the fault until the other workers finish a step, or raise an error.
    """
    check_outputs(json)
    chosen = [case for case in cases() if re.fullmatch(only, " ".join(case[:3]))]
    if (why := obstacle()) is not None:
        chosen = [case for case in chosen if " - " not in case.where]
        print(f"without links: {why}", file=sys.stderr)
    process_pool.PRELOAD += ("tests.bench.faults.job", "torch._dynamo")  # optimizers import the latter for seconds
    undisturbed = _Run(Case("none", "none", "none", "", ""), timeout).run()["weights"]
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda case: _Run(case, timeout).run(), chosen):
            rows.append(_judged(row, str(undisturbed)))
            if not markdown:
                print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    if markdown:
        print("| where | fault | when | outcome | s | left |\n| --- | --- | --- | --- | --- | --- |")
        for row in sorted(rows, key=_order):
            print(f"| {' | '.join(str(value) for value in row.values())} |")
    if json is not None:
        write_json(rows, json)


def _order(row: Row) -> tuple[str, str, int]:
    return str(row["where"]), str(row["fault"]), PHASES.index(str(row["when"]))


def _judged(row: Row, undisturbed: str) -> Row:
    """Return the row with its weights compared with those of an undisturbed job."""
    weights = row.pop("weights")
    if weights:
        row["outcome"] = "goes on, digits exact, weights equal" if weights == undisturbed else "WRONG WEIGHTS"
    return row


class _Run:
    """One job and its fault."""

    def __init__(self, case: Case, timeout: float) -> None:
        self._case = case
        self._timeout = timeout
        self._is_link = " - " in case.where
        self._began = 0.0
        self._pids: dict[str, int] = {}

    def run(self) -> Row:
        """Run the job; return its row of the table."""
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-faults-"))
            disk = stack.enter_context(_full_disk()) if self._case.what == "disk full" else ""
            self._hosts = stack.enter_context(Hosts(3)) if self._is_link else None
            with _starting:
                ranks = stack.enter_context(Ranks(play, 4, self._arguments(folder, disk), opener=Bare))
            self._pids = dict(zip(ROLES, ranks.pids, strict=True))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            ending = pool.submit(ranks.outcomes)
            stack.callback(self._kill_all)
            if self._case.watched:
                self._suffer(ending.done)
            survivors = self._survivors()
            deadline = time.monotonic() + self._timeout + 60
            running = self._wait_for_ends([role for role in survivors if role.startswith("worker")], deadline)
            left = self._wait_for_ends(survivors, time.monotonic() + _LEAVE_SECONDS)
            self._kill_all()
            outcomes = dict(zip(ROLES, ending.result(), strict=True))
            files = [one.name for one in Path(folder).iterdir() if not one.name.startswith("torchinductor")]
            files += [one.name for one in Path(disk).iterdir() if one.name != _FILLER] if disk else []
        return self._row(outcomes, running, [*left, *files])

    def _arguments(self, folder: str, disk: str) -> tuple[Any, ...]:
        case = self._case
        variables = {
            "TMPDIR": folder,
            "GANGLINE_TIMEOUT": str(self._timeout),
            "GANGLINE_INSECURE": "1",
            "GANGLINE_FAULT": f"{case.watched} stop at {case.point}" if case.watched else "",
        }
        places = (0, 2, 0, 1)
        names = [self._hosts.names[place] for place in places] if self._hosts else []
        addresses = [self._hosts.addresses[place] for place in places] if self._hosts else ["127.0.0.1"] * 4
        states = {STEPS - 1 if case.when == "end" else 2: str(Path(disk, "states"))} if disk else {}
        return names, addresses, variables, states

    def _survivors(self) -> list[str]:
        return [role for role in ROLES if role != self._case.where or self._case.what not in ("killed", "stopped")]

    # The fault

    def _suffer(self, is_over: Any) -> None:
        """Wait until the watched process has reached its point, do what the case says, and let it continue."""
        case = self._case
        deadline = time.monotonic() + 60
        while not _is_stopped(self._pids[case.watched]) and not is_over() and time.monotonic() < deadline:
            time.sleep(0.002)
        self._began = time.monotonic()
        if case.what == "killed":
            self._signal(case.where, signal.SIGKILL)
        elif case.what == "stopped":
            self._signal(case.where, signal.SIGSTOP)
        elif case.what == "junk":
            self._send_junk()
        elif self._is_link:
            self._cut("replace")
        if (case.where, case.what) != (case.watched, "stopped"):
            self._signal(case.watched, signal.SIGCONT)
        if case.what == "cut 5 s":
            time.sleep(_CUT_SECONDS)
            self._cut("delete")

    def _signal(self, role: str, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pids[role], number)

    def _cut(self, verb: str) -> None:
        """Lose all packets between two hosts, in both directions, or none any more."""
        assert self._hosts is not None
        other = 2 if "server" in self._case.where else 0
        for here, there in ((1, other), (other, 1)):
            words = ["ip", "neigh", verb, self._hosts.addresses[there], "dev", "eth0"]
            more = ["lladdr", _WRONG, "nud", "permanent"] if verb == "replace" else []
            self._hosts.run(here, [*words, *more])

    def _send_junk(self) -> None:
        """Send junk to all TCP ports and Unix sockets at which the process listens."""
        pid = self._pids[self._case.where]
        for address in _listening(pid):
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            for data in _JUNK * 4:
                with socket.socket(family) as one, suppress(OSError):
                    one.settimeout(2)
                    one.connect(address)
                    one.sendall(data)

    # The outcome

    def _wait_for_ends(self, roles: Sequence[str], deadline: float) -> list[str]:
        """Wait for processes to end; return those that still run."""
        while running := [role for role in roles if _state(self._pids[role]) not in ("", "Z")]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return running

    def _kill_all(self) -> None:
        for role in self._pids:
            self._signal(role, signal.SIGKILL)

    def _row(self, outcomes: dict[str, Outcome], running: Sequence[str], left: Sequence[str]) -> Row:
        case = self._case
        workers = [role for role in self._survivors() if role.startswith("worker")]
        told = {role: outcomes[role].value for role in workers if isinstance(outcomes[role].value, Told)}
        errors = {role: one.error for role, one in told.items() if one.error}
        weights = ""
        if running:
            outcome = f"HANGS: {', '.join(running)}"
        elif len(told) < len(workers):
            outcome = f"DIES: {', '.join(str(outcomes[role].error) for role in workers if role not in told)}"
        elif errors:
            done = [f"{role} is done" for role in workers if role not in errors]
            outcome = "; ".join([*dict.fromkeys(_short(text) for text in errors.values()), *done])
        elif {one.digits for one in told.values()} != {_DIGITS}:
            outcome = f"WRONG DIGITS: {', '.join(one.digits for one in told.values())}"
        else:
            outcome = ""
            found = {one.weights for one in told.values()}
            weights = found.pop() if len(found) == 1 else "different"
        ends = [self._end(one) for one in told.values()]
        seconds = f"{max(0.0, max(ends) - self._began):.1f}" if ends and self._began else ""
        return {
            "where": case.where,
            "fault": case.what,
            "when": case.when,
            "outcome": outcome,
            "seconds": seconds,
            "left": ", ".join(left) or "nothing",
            "weights": weights,
        }

    def _end(self, told: Told) -> float:
        """Return when a worker went on after the fault, or raised its error."""
        if told.error:
            return told.times[-1]
        return next((one for one in told.times if one > self._began), told.times[-1])


def _short(text: str) -> str:
    """Return the error's class and the cause in its text, without what differs by run: call, key, address, sizes."""
    cause = re.sub(r" \([^()]*\)| at tcp://\S+|/\S+/gangline-full-[^/]+/", "", text.split("; ")[0])
    return re.sub(r"\d+ bytes", "N bytes", cause)


def _state(pid: int) -> str:
    """Return the state of a process as in /proc/PID/stat, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        return all(state == "T" for state in states)
    return False


def _listening(pid: int) -> Iterator[tuple[str, int] | str]:
    """Yield the addresses at which a process listens, and those of its other Unix sockets, which refuse connections."""
    process = psutil.Process(pid)
    yield from (tuple(one.laddr) for one in process.net_connections("tcp4") if one.status == psutil.CONN_LISTEN)
    yield from (one.laddr.replace("@", "\0", 1) for one in process.net_connections("unix") if one.laddr)


@contextmanager
def _full_disk() -> Iterator[str]:
    """Mount a file system that is full; needs root."""
    with tempfile.TemporaryDirectory(prefix="gangline-full-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "full", folder], check=True)
        try:
            with suppress(OSError):
                Path(folder, _FILLER).write_bytes(bytes(8192))
            yield folder
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
