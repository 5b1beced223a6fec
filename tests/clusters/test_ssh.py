"""`gangline launch --launcher ssh` with a real sshd on loopback that serves as two hosts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gangline.launcher.engines import ssh
from gangline.launcher.engines.hostfile import parse_hosts
from gangline.launcher.job import JobSpec
from tests.clusters import sshd
from tests.kvstore.test_launch import PYTHON, ROOT, Launch

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(sshd.missing() is not None, reason=str(sshd.missing()))]
HEAD = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"
READY = "print('ready', flush=True)\nwhile True: signal.pause()\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    with sshd.Sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def launch(
    server: sshd.Sshd, code: str, *words: str, hosts: str = "node1,node2", python: Sequence[str] = PYTHON
) -> Launch:
    """Launch workers that run ``code`` with their rank as ``rank``."""
    by = sshd.ssh_command(server.folder, {"node1": server, "node2": server})
    command = [sys.executable, "-m", "gangline", "launch", "--launcher", "ssh", "--ssh", by, "-H", hosts]
    return Launch([*command, "-s", "0", *words, "--", *python, HEAD + code], cwd=ROOT)


def test_workers_of_all_hosts_run_with_their_ranks_and_log_files(server: sshd.Sshd, tmp_path: Path) -> None:
    os.environ["GANGLINE_TEST_PASSED"] = "it's passed"
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    names += ("GANGLINE_TEST_PASSED",)
    code = f"print([os.environ[name] for name in {names}])"
    with launch(
        server, code, "--env", "GANGLINE_TEST_PASSED", "--log-dir", str(tmp_path / "log"), hosts="node1,node2:2"
    ) as run:
        status, out, errors = run.end()
    del os.environ["GANGLINE_TEST_PASSED"]
    assert (status, errors) == (0, [])
    places = [("0", "0", "1", "3", "0"), ("1", "0", "2", "3", "1"), ("2", "1", "2", "3", "1")]
    lines = [str([*place, "127.0.0.1", "it's passed"]) for place in places]
    assert sorted(out) == [f"[worker {rank}] {line}" for rank, line in enumerate(lines)]
    logs = {file.name: file.read_text() for file in (tmp_path / "log").iterdir()}
    assert logs == {f"worker-{rank}.log": f"{line}\n" for rank, line in enumerate(lines)}
    server.wait_until_empty()


@pytest.mark.slow
def test_the_first_failure_is_named_with_its_host_and_the_others_end(server: sshd.Sshd) -> None:
    with launch(server, "if rank == 1: sys.exit(3)\n" + READY) as run:
        code, _, errors = run.end()
    assert code == 3
    assert re.fullmatch(r"gangline: node2: worker 1 \(pid \d+\) exited with code 3", errors[0]), errors
    assert len(errors) == 1
    server.wait_until_empty()


@pytest.mark.slow
def test_a_failed_job_starts_again_on_all_hosts(server: sshd.Sshd) -> None:
    code = "restart = os.environ['GANGLINE_RESTART']; print('start', restart, os.environ['MASTER_PORT'], flush=True)\n"
    with launch(server, code + "if restart == '0':\n    sys.exit(4) if rank == 1 else signal.pause()\n",
                "--max-restarts", "1") as run:  # fmt: skip
        status, out, errors = run.end()
    assert status == 0
    assert errors[1:] == ["gangline: restart 1 of 1: all processes of the job start again"]
    assert [line.split()[3] for line in out[-2:]] == ["1", "1"]
    assert len({line.split()[4] for line in out}) == 2
    server.wait_until_empty()


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_on_any_host(server: sshd.Sshd) -> None:
    with launch(server, READY) as run:
        run.hear("[worker 0] ready", "[worker 1] ready")
        run.process.kill()
        run.process.wait()
        server.wait_until_empty()


def test_a_host_that_cannot_be_reached_is_named(server: sshd.Sshd) -> None:
    with launch(server, "", "--ssh", "ssh -p 1", hosts="127.0.0.1") as run:
        code, _, errors = run.end()
    assert code == 1
    assert "host 127.0.0.1: ssh: connect to host 127.0.0.1 port 1: Connection refused" in errors[0]


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="tests the interpreter of a virtual environment")
def test_python_is_that_of_the_virtual_environment_of_gangline(server: sshd.Sshd) -> None:
    with launch(server, "print(sys.prefix)", hosts="node1", python=["python", "-c"]) as run:
        assert run.end() == (0, [f"[worker 0] {sys.prefix}"], [])


def test_hosts_that_do_not_answer_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_ANSWER_SECONDS", 2.0)
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\ncase "$*" in *" node2 "*) echo "{}" ;; *) exec sleep 100 ;; esac\n')
    script.chmod(0o755)
    entries = parse_hosts("node1,node2,node3")
    with pytest.raises(RuntimeError, match=f"no answer over `{script}` within 2 s from node1, node3"):
        ssh.plan(JobSpec(("true",), workers=3, servers=0), entries, ssh.SshOptions(str(script)))


def test_a_setting_that_does_not_fit_a_host_is_no_question_of_its_ssh(server: sshd.Sshd) -> None:
    with launch(server, "", "--interface", "eth99", hosts="node1") as run:
        code, _, errors = run.end()
    assert code == 1
    assert len(errors) == 1
    assert errors[0].startswith("gangline: host node1: --interface eth99 is not on this host; there are ")
