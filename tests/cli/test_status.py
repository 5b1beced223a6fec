"""`gangline status`: what each process of a running job does, and which one is late."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.collectives.liveness import status_socket
from gangline.status import query
from gangline.status.late import late_processes
from gangline.status.metrics import serve_metrics
from gangline.status.query import ProcessStatus, statuses
from gangline.usage_error import UsageError
from tests.programs import ROOT, environment, torchrun

pytestmark = pytest.mark.timeout(120)

SCRIPT = str(ROOT / "tests" / "cli" / "job_with_a_late_worker.py")


def status(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["status", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@contextmanager
def job(kind: str, until: Path, **variables: object) -> Iterator[None]:
    """Run a job whose second process is late until a file exists, and end it."""
    if kind == "servers":
        command = ["-m", "gangline", "launch", "-n", "2", "-s", "1", "--", sys.executable, SCRIPT, kind, str(until)]
    else:
        command = torchrun(SCRIPT, kind, until)
    process = subprocess.Popen(
        [sys.executable, *command], env=environment(**variables), stderr=subprocess.PIPE, text=True
    )
    try:
        yield
        until.touch()
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == 0, errors
    finally:
        until.touch()
        process.terminate()
        process.wait()


def late(job_of: str, is_there: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the late process of a job, and the status of all its processes, once the late one is as wanted."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        answer = json.loads(status("--json"))
        for one in answer["late"]:
            processes = {p["name"]: p for p in answer["processes"] if p["job"] == one["job"]}
            own = processes.get(one["name"])
            if own is not None and job_of in Path(f"/proc/{own['process']}/cmdline").read_text() and is_there(own):
                return one, processes
        time.sleep(0.2)
    raise AssertionError(answer)


def is_in_wait(process: dict[str, Any]) -> bool:
    return any(frame.endswith("in wait_for") for frame in process["stack"])


@pytest.mark.slow
def test_a_late_worker_is_named_with_the_line_that_it_is_at(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with job("servers", until):
        found, processes = late(str(until), is_in_wait)
        table = status()
    assert (found["name"], found["waiting"]) == ("worker 1", ["worker 0"])
    assert found["what"] == "round 6 of key 'w'"
    assert sorted(processes) == ["scheduler", "server 0", "worker 0", "worker 1"]
    (server,) = processes["server 0"]["parts"]
    assert server["counters"] == {"rounds": 5, "received_bytes": 11 * 4000, "sent_bytes": 10 * 4000}
    (scheduler,) = processes["scheduler"]["parts"]
    assert scheduler["members"] == dict.fromkeys(["worker 0", "worker 1", "server 0"], "takes part")
    assert f"{until}\nprocess " in table  # the command of the job
    assert "late: worker 1" in table
    assert "in wait_for" in table


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with job("ranks", until, GANGLINE_HEARTBEAT_LIMIT=60):
        _, processes = late(str(until), is_in_wait)
        stopped = processes["rank 1"]["process"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            found, processes = late(str(until), lambda process: process["state"] == "stopped")
            table = status()
        finally:
            os.kill(stopped, signal.SIGCONT)
    assert (found["name"], found["waiting"]) == ("rank 1", ["rank 0"])
    assert found["what"] == "all_reduce(1000 x float32, sum)"
    assert not processes["rank 1"]["answers"]
    assert processes["rank 1"]["host"] == processes["rank 0"]["host"] != ""
    (communicator,) = processes["rank 0"]["parts"]
    assert communicator["counters"]["bytes"] >= 6 * 4000
    assert f"is stopped: kill -CONT {stopped}" in table


@pytest.mark.slow
def test_metrics_are_served(tmp_path: Path) -> None:
    until = tmp_path / "until"
    with job("ranks", until):
        late(str(until), is_in_wait)
        port = serve_metrics("0")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    own = [line for line in text.splitlines() if line.startswith("gangline_communicator_calls_total")]
    assert any('process="rank 0"' in line for line in own), text
    awaited = [line for line in text.splitlines() if line.startswith("gangline_late_seconds")]
    assert any('process="rank 1"' in line and float(line.split()[-1]) > 0 for line in awaited), text


def test_a_port_in_use_for_metrics_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=f"metrics cannot be served at {port}: Address already in use; choose"):
            serve_metrics(str(port))


@pytest.mark.slow
def test_processes_of_other_users_get_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to become another user")
    until = tmp_path / "until"
    with job("ranks", until):
        late(str(until), is_in_wait)
        names = [one for one in query._sockets() if "rank_0" in one]
        program = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
            "s.connect('\\0' + sys.argv[1]); print(s.recv(100))"
        )
        for name in names:
            done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True)
            assert done.stdout == "b''\n"
    assert names


def test_a_forked_process_does_not_answer_for_its_parent() -> None:
    program = """
import os, sys, time
from gangline.collectives.liveness.status_socket import publish
class Source:
    def status(self):
        return {"part": "communicator", "counters": {}, "waits": []}
source = Source()
publish(source, "rank 7")
if os.fork() == 0:
    publish(source, "rank 8")
print("ready", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        found = statuses(is_wanted=lambda name, _: name in ("rank 7", "rank 8"))
        process.communicate(b"\n\n")
    by_name = {one.name: one for one in found if one.answers}
    assert by_name.keys() == {"rank 7", "rank 8"}
    assert by_name["rank 7"].process == process.pid != by_name["rank 8"].process


def wait(what: str, seconds: float, missing: list[str], waiting: list[str]) -> dict[str, Any]:
    return {"what": what, "seconds": seconds, "missing": missing, "waiting": waiting}


def process(name: str, *waits: dict[str, Any]) -> ProcessStatus:
    parts: Any = [{"part": "worker", "counters": {}, "waits": list(waits)}]
    return ProcessStatus(name, 1, "sleeps", answers=True, cpu_seconds=0, memory_bytes=0, parts=parts)


def test_the_last_one_in_a_chain_of_waits_is_late() -> None:
    processes = [
        process("worker 0", wait("pull of 'w'", 3, ["server 0"], ["worker 0"])),
        process("server 0", wait("round 6", 2.9, ["worker 1"], ["worker 0"])),
        process("worker 1", wait("all_reduce", 2.5, ["worker 2"], ["worker 1"])),
        process("worker 2"),
    ]
    (found,) = late_processes(processes)
    assert (found.name, found.seconds, found.waiting) == ("worker 2", 2.5, ["worker 1"])
    assert not late_processes(processes, least=5)


STRANGER = """
import os, socket, sys
os.setuid(65534)
kept = []
for name in sys.argv[1:3]:
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind("\\0" + name)
    kept[-1].listen(0)
for _ in range(3):  # no more fit into the queue of the second name
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].setblocking(False)
    kept[-1].connect_ex("\\0" + sys.argv[2])
for _ in range(300):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\\0" + sys.argv[3])
        assert client.recv(1) == b""
print("ready", flush=True)
sys.stdin.read()
"""


class _Waiting:
    def status(self) -> status_socket.Part:
        wait = status_socket.Wait(what="[/x] \x1b[31m", seconds=9.0, missing=["rank [red]1"], waiting=["worker 7"])
        return {"part": "communicator", "counters": {}, "waits": [wait]}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_names_neither_end_the_table_nor_fill_it_nor_the_log(caplog: pytest.LogCaptureFixture) -> None:
    own = _Waiting()
    status_socket.publish(own, "worker 7")
    (name,) = (one for one in query._sockets() if query._process_of(one) == os.getpid())
    names = [f"{status_socket.PREFIX}{os.getpid()}-{word}-a" for word in ("[/x]", "full")]
    command = [sys.executable, "-IS", "-c", STRANGER, *names, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        assert set(names) < set(query._sockets())
        table = status()
        found = [one for one in json.loads(status("--json"))["processes"] if one["process"] == os.getpid()]
        stranger.communicate()
    status_socket.withdraw(own)
    assert [one["name"] for one in found] == ["worker 7"]
    assert "9.0 s in [/x] \\x1b[31m for rank [red]1" in table
    assert "\x1b" not in table
    refused = [text for text in caplog.messages if "belongs to another user, 65534" in text]
    assert 1 < len(refused) < 50
