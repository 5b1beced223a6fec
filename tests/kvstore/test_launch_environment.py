"""Tests of the environments of a job's processes; nothing is started but for the job's key."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.collectives.environments.job_key import JobKey, job_key
from gangline.kvstore.parameter_server.environment import parse_bytes
from gangline.launcher.binding import Cpu, Gpu, Host
from gangline.launcher.job import JobSpec, Process, process_table
from tests.kvstore.test_launch import launch

CPUS = tuple(Cpu(number, number) for number in range(8))


def table(
    launchers: dict[str, str] | None = None, hosts: Sequence[Host] = (Host(cpus=CPUS),), **job: Any
) -> list[Process]:
    asked = JobSpec(**{"command": ("train",), "workers": 2, "servers": 1, **job})
    return process_table(asked, launchers or {}, root_port=9100, master_port=9200, hosts=hosts)


def values(processes: list[Process], name: str) -> list[str | None]:
    return [process.environment.get(name) for process in processes if process.role == "worker"]


def test_commands_of_this_environment_are_appended_to_path() -> None:
    own = str(Path(sys.executable).parent)
    assert {one.environment["PATH"] for one in table({"PATH": "/first:/second"})} == {f"/first:/second:{own}"}
    assert not any("PATH" in one.environment for one in table({"PATH": f"/first:{own}"}))


def test_variables_of_the_user_are_kept() -> None:
    mine = {"OMP_NUM_THREADS": "5", "PYTHONUNBUFFERED": "x", "HOME": "/there"}
    for process in table(mine)[2:]:
        assert mine.items() <= process.full_environment(mine).items()
    assert table()[0].environment["PYTHONUNBUFFERED"] == "1"


def test_variables_of_an_outer_torchrun_agent_are_removed() -> None:
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7", "HOME": "/root"}
    process = table(outer)[-1]
    inner = process.full_environment(outer)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in inner
    assert (inner["RANK"], inner["HOME"]) == ("1", "/root")
    assert process.shell_line().startswith("env -u TORCHELASTIC_USE_AGENT_STORE ")


def test_a_launcher_inside_a_worker_does_not_pass_on_its_rank() -> None:
    outer = {"DMLC_WORKER_ID": "3", "GANGLINE_WORK_LOAD_LIST": "1,2,3,4", "DMLC_ROLE": "worker"}
    scheduler, server, *workers = [process.full_environment(outer) for process in table(outer)]
    assert not {"DMLC_WORKER_ID", "GANGLINE_WORK_LOAD_LIST"} & (scheduler.keys() | server.keys())
    assert [worker["DMLC_WORKER_ID"] for worker in workers] == ["0", "1"]
    assert not any("GANGLINE_WORK_LOAD_LIST" in worker for worker in workers)
    users_own = {"GANGLINE_WORK_LOAD_LIST": "3,1"}
    assert table(users_own)[-1].full_environment(users_own)["GANGLINE_WORK_LOAD_LIST"] == "3,1"
    measured = {"GANGLINE_WORK_LOAD_LIST": "auto"}
    assert table(measured)[-1].full_environment(measured)["GANGLINE_WORK_LOAD_LIST"] == "auto"


def test_scheduler_and_servers_wait_for_workers_as_long_as_the_launcher() -> None:
    scheduler, server, *workers = table()
    assert all(process.environment["GANGLINE_SUPERVISED"] == "1" for process in (scheduler, server))
    assert not any("GANGLINE_SUPERVISED" in worker.environment for worker in workers)


def test_servers_get_their_memory_and_rank() -> None:
    scheduler, *servers, worker, _ = table(servers=2, server_memory=(8 << 30, 24 << 30))
    assert [one.environment["GANGLINE_SERVER_MEMORY"] for one in servers] == ["8589934592", "25769803776"]
    assert [one.environment["DMLC_SERVER_ID"] for one in servers] == ["0", "1"]
    assert not any("GANGLINE_SERVER_MEMORY" in one.environment for one in (scheduler, worker, *table()))


@pytest.mark.parametrize(
    ("words", "nbytes"), [("8G", 8 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("64kb", 64 << 10), ("1000", 1000)]
)
def test_sizes_are_read(words: str, nbytes: int) -> None:
    assert parse_bytes(words, "size") == nbytes
    for wrong in ("", "-1", "0", "8X", "8 G G", "inf", f"x{words}"):
        with pytest.raises(ValueError, match=r"size is .*; expected bytes above 0, such as 8G, 512M or 1000000"):
            parse_bytes(wrong, "size")


def test_workers_get_their_binding_and_servers_none() -> None:
    host = Host(cpus=CPUS, gpus=(Gpu("0"), Gpu("GPU-77")))
    processes = table(hosts=[host])
    assert values(processes, "CUDA_VISIBLE_DEVICES") == ["0", "GPU-77"]
    assert [process.cpus for process in processes] == [(), (), (0, 1, 2, 3), (4, 5, 6, 7)]
    assert "CUDA_VISIBLE_DEVICES" not in processes[1].environment
    assert "taskset -c 4,5,6,7 train" in processes[-1].shell_line()
    assert not any(process.cpus for process in table(hosts=[host], binds_cores=False))
    assert values(table(hosts=[Host()]), "OMP_NUM_THREADS") == [None] * 2  # its CPUs are unknown


def test_a_job_of_several_hosts_has_its_addresses_on_the_first_and_servers_on_all() -> None:
    hosts = [Host("n1", slots=1), Host("n2", slots=2)]
    processes = table(hosts=hosts, workers=3, servers=3)
    assert [process.host for process in processes] == [0, 0, 1, 0, 0, 1, 1]
    assert {process.environment["DMLC_PS_ROOT_URI"] for process in processes} == {"n1"}
    assert values(processes, "MASTER_ADDR") == ["n1"] * 3
    assert values(processes, "LOCAL_RANK") == ["0", "0", "1"]
    assert values(processes, "LOCAL_WORLD_SIZE") == ["1", "2", "2"]
    assert values(processes, "GROUP_RANK") == ["0", "1", "1"]


# The key of a job: every process gets it, and it appears nowhere


_WORKER = """
import os, sys, time
import gangline
from gangline.collectives.environments.job_key import job_key

kv = gangline.create("dist_sync")
key = job_key()
with open(os.open(f"{sys.argv[1]}/key{kv.rank}", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
    file.write(key.hex())
print("job", os.environ["GANGLINE_JOB_ID"], "key", key, flush=True)
os.system("sleep 300 &")
while not os.path.exists(f"{sys.argv[1]}/end"):
    time.sleep(0.05)
raise RuntimeError(f"the test ends {kv.rank} with {key!r}")
"""


def _shown(pid: int) -> bytes:
    """Return what `ps` shows of a process."""
    with suppress(OSError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _descriptors(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(entry))
    return found


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_all_processes_of_a_job_have_its_key_and_it_shows_nowhere(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    with launch("-n", "2", "-s", "1", "--", sys.executable, str(script), str(tmp_path)) as job:
        files = [tmp_path / f"key{rank}" for rank in range(2)]
        while not all(file.exists() and file.stat().st_size == 64 for file in files):
            assert job.process.poll() is None, job.end()
            time.sleep(0.05)
        key, other = (JobKey.from_hex(file.read_text()) for file in files)
        assert key == other
        job.hear(f"[worker 0] job {key.job_id()} key JobKey(...)", f"[worker 1] job {key.job_id()} key JobKey(...)")
        running = job.running()
        assert len(running) >= 2 + 4 + 2  # the launcher, scheduler, server and workers, and children of these
        forms = (key.hex().encode(), key.hex().upper().encode(), bytes.fromhex(key.hex()))
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            assert not any(form in _shown(pid) for form in forms), pid
        assert not [pid for pid in running if any("gangline-job-key" in one for one in _descriptors(pid))]
        (tmp_path / "end").touch()
        code, out, errors = job.end()
    assert code == 1
    text = "\n".join(out + errors)
    assert "Traceback" in text
    assert "with JobKey(...)" in text
    assert not any(key.hex()[begin : begin + 8] in text for begin in range(56))


def test_a_dry_run_shows_no_key() -> None:
    done = CliRunner().invoke(app, ["launch", "-n", "1", "--dry-run", "--", "true"])
    assert done.exit_code == 0
    assert "scheduler" in done.output
    assert "JOB_KEY" not in done.output
    assert job_key() is None
