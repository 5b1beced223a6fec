"""On one host a job listens at no TCP port, and other users cannot connect to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gangline.collectives.errors import ProtocolError, StallError
from gangline.collectives.transports import unix_sockets
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.scheduler.scheduler import Scheduler
from gangline.launcher.job import free_ports
from tests.kvstore.test_launch import launch

pytestmark = pytest.mark.timeout(110)
LISTENS = 0x10000
NOBODY = 65534

WORKER = """
import pathlib, sys, torch
from gangline import kvstore
torch.set_num_threads(1)
ready, go = map(pathlib.Path, sys.argv[1:])
stores = [kvstore.create(name) for name in ("dist_sync", "allreduce")]
def rounds(digits):
    for kv in stores:
        for digit in digits:
            kv.pushpull("key", torch.full((1000,), 4.0 ** (kv.rank + 2 * digit)), out=sums[kv])
            assert sums[kv].tolist() == [5 * 16.0 ** digit] * 1000, (kv, digit, sums[kv])
sums = {}
for kv in stores:
    kv.init("key", torch.zeros(1000))
    sums[kv] = torch.empty(1000)
rounds(range(3))
ready.with_name(f"ready{stores[0].rank}").touch()
is_over = torch.zeros(1000)
while not is_over.any():
    rounds(range(3))
    stores[1].pushpull("key", torch.full((1000,), float(go.exists())), out=is_over)
print("exact")
for kv in stores:
    kv.close()
"""

CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for name in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20)
        try:
            stranger.connect(name.replace("@", "\\0", 1) if name.startswith("@") else name)
            stranger.sendall(b"glu1" + bytes(4))
            answer = stranger.recv(1)
        except (ConnectionError, PermissionError, FileNotFoundError):
            answer = b""
        print(name, "admitted" if answer else "refused")
"""


def inodes_of(pids: set[int]) -> set[str]:
    """Return the inodes of the sockets of processes."""
    targets = [os.readlink(entry) for pid in pids for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def tcp_listeners(inodes: set[str]) -> list[str]:
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return [words[1] for words in lines if words[3] == "0A" and words[9] in inodes]


def unix_listeners(inodes: set[str]) -> list[str]:
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [words[7] for words in lines if words[6] in inodes and int(words[3], 16) & LISTENS]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_launched_job_listens_at_no_port_and_refuses_other_users(tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = ("-n", "2", "-s", "1", "--", sys.executable, "-c", WORKER, str(tmp_path / "ready"), str(go))
    with launch(*words) as job:
        while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
            assert job.process.poll() is None, job.end()
            time.sleep(0.05)
        inodes = inodes_of(job.running())
        assert tcp_listeners(inodes) == []
        names = unix_listeners(inodes)
        abstract = [name for name in names if name.startswith("@")]
        assert sorted(name.split("-")[1] for name in abstract) == [
            *("scheduler", "server"),
            *["status"] * 4,  # each process answers `gangline status`
            "store",
        ]
        assert not [name for name in names if Path(name).exists()]  # removed once the ranks were connected
        told = subprocess.run([sys.executable, "-c", CONNECT, *names], capture_output=True, text=True, check=True)
        assert told.stdout.splitlines() == [f"{name} refused" for name in names]
        assert len(names) > len(abstract)
        go.touch()
        code, out, errors = job.end(60)
    assert (code, sorted(out)) == (0, [f"[worker {rank}] exact" for rank in (0, 1)]), errors


SQUAT = f"""
import os, socket, sys
os.setuid({NOBODY})
squatter = socket.socket(socket.AF_UNIX)
squatter.bind("\\0" + sys.argv[1])
squatter.listen(0)
own = socket.socket(socket.AF_UNIX)
own.connect("\\0" + sys.argv[1])  # the queue of the listener is full
print(flush=True)
input()
"""


@contextmanager
def squatted(name: str, *, is_busy: bool) -> Iterator[None]:
    """Listen at a name as another user, with or without room in the queue of the listener."""
    script = SQUAT if is_busy else SQUAT.replace("own.connect", "# ")
    command = [sys.executable, "-c", script, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as squatter:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        yield
        squatter.communicate(b"\n")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_uses_no_name_of_another_user_and_says_so() -> None:
    port = unix_sockets.free_port("scheduler")
    name = unix_sockets.name_of("scheduler", port)
    with squatted(name, is_busy=False):
        with pytest.raises(PermissionError, match=f"belongs to another user, {NOBODY}"):
            unix_sockets.connect(name)
        with pytest.raises(OSError, match="Address already in use") as caught:
            Scheduler(1, 1, port=port)
        assert caught.value.filename == name
    with squatted(name, is_busy=True), pytest.raises(StallError, match="worker waits for the job to begin"):
        SchedulerClient("worker", f"tcp://127.0.0.1:{port}", timeout=1)
    with (
        squatted(name, is_busy=False),
        pytest.raises(ProtocolError, match=f"@{name}: the peer .* belongs to another user, {NOBODY}"),
    ):
        SchedulerClient("worker", f"tcp://127.0.0.1:{port}", timeout=20)


def test_names_that_are_all_taken_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "is_free", lambda purpose, port: False)
    with pytest.raises(OSError, match=r"1000 random names such as @gangline-store-\d+-\d+ are in use"):
        unix_sockets.free_port("store")
    with pytest.raises(OSError, match="the Unix sockets of 100 free ports such as"):
        free_ports(2)
