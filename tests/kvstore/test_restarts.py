"""Restart of a whole job by the launcher: how often, after which ends, and what the processes get."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from gangline import launch as launch_function
from gangline.collectives.environments.job_name import RUN_ID
from gangline.kvstore import restart_variables
from gangline.launcher.restarts import Outcome, run_with_restarts
from tests.kvstore.test_launch import DAEMON, PYTHON, READY, Launch, launch

pytestmark = pytest.mark.timeout(60)
AGAIN = "gangline: restart {} of {}: all processes of the job start again"


def workers(code: str, *words: str) -> Launch:
    head = (
        "import os, signal, sys, time; rank = int(os.environ['RANK']); restart = int(os.environ['GANGLINE_RESTART'])\n"
    )
    return launch("-n", "2", "-s", "0", *words, "--", *PYTHON, head + code)


def test_a_failed_job_starts_again_with_new_ports_a_new_id_and_the_same_name(tmp_path: Path) -> None:
    names = ("GANGLINE_RESTART", "GANGLINE_RUN_ID", "GANGLINE_JOB_ID", "MASTER_PORT", "DMLC_PS_ROOT_PORT")
    code = (
        f"import json; print(json.dumps([os.environ[name] for name in {names}]), flush=True)\n"
        "if rank == 1 and restart < 2: os.kill(os.getpid(), 9)\n"
        "if restart < 2: signal.pause()\n"
    )
    with workers(DAEMON + code, "--max-restarts", "5", "--log-dir", str(tmp_path)) as run:
        status, out, errors = run.end()
    assert status == 0
    failed = r"gangline: worker 1 \(pid \d+\) was killed by SIGKILL; stopping the other processes"
    assert re.fullmatch(failed, errors[0])
    assert errors[1] == AGAIN.format(1, 5)
    assert re.fullmatch(failed, errors[2])
    assert errors[3:] == [AGAIN.format(2, 5)]
    found = [json.loads(line.partition("] ")[2]) for line in out if "daemon" not in line]
    numbers, runs, jobs, *ports = ({line[index] for line in found} for index in range(len(names)))
    assert (numbers, len(runs), len(jobs)) == ({"0", "1", "2"}, 1, 3)
    assert [len(port) for port in ports] == [3, 3]
    logged = (tmp_path / "worker-1.log").read_text().splitlines()  # of all starts
    assert [json.loads(line)[0] for line in logged if line != "daemon"] == ["0", "1", "2"]


def test_when_the_restarts_are_used_up_the_code_is_that_of_the_last_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_restarts(lambda number: Outcome(10 + number), 2) == 12
    assert capsys.readouterr().err.splitlines() == [
        AGAIN.format(1, 2),
        AGAIN.format(2, 2),
        "gangline: the job is not started again: all 2 restarts are used up",
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (2, "wrong usage"),
        (3, "training diverged"),
        (75, "stopped by a signal, with a checkpoint written"),
        (127, "the command was not found"),
    ],
)
def test_an_end_that_would_come_again_restarts_nothing(
    code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[int] = []

    def attempt(number: int) -> Outcome:
        starts.append(number)
        return Outcome(code)

    assert run_with_restarts(attempt, 3) == code
    assert starts == [0]
    assert capsys.readouterr().err == f"gangline: the job is not started again: code {code} means {reason}\n"


def test_a_signal_to_the_launcher_restarts_nothing() -> None:
    with workers(READY, "--max-restarts", "3") as run:
        run.hear("[worker 0] ready", "[worker 1] ready")
        run.process.send_signal(signal.SIGTERM)
        status, _, errors = run.end()
    assert (status, errors) == (128 + signal.SIGTERM, ["gangline: SIGTERM; stopping the other processes"])


def fail_at_first(what: str) -> int:
    """Return the number of this start; fail in the first one."""
    found = restart_variables.restart_number()
    if found == 0 or what == "always":
        raise ValueError(f"failure {found}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_function_is_called_again_in_a_new_job(caplog: pytest.LogCaptureFixture) -> None:
    assert launch_function(fail_at_first, "once", workers=2, servers=0, max_restarts=1) == [1, 1]
    assert caplog.messages == ["the job failed: ValueError: failure 0; restart 1 of 1"]
    with pytest.raises(ValueError, match="failure 1"):
        launch_function(fail_at_first, "always", workers=1, servers=0, max_restarts=1)


def test_the_number_and_the_name_come_from_the_launcher_or_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (restart_variables.RESTART, RUN_ID, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert (restart_variables.restart_number(), restart_variables.run_id()) == (0, None)
    monkeypatch.setenv(restart_variables.RESTART, "2")
    monkeypatch.setenv(RUN_ID, "job")
    assert (restart_variables.restart_number(), restart_variables.run_id()) == (2, "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_a/none_b/attempt_3/0/error.json")
    assert (restart_variables.restart_number(), restart_variables.run_id()) == (3, "/tmp/torchelastic_a/none_b")
    monkeypatch.setenv(restart_variables.RESTART, "once")
    with pytest.raises(ValueError, match="GANGLINE_RESTART is 'once'; expected a number"):
        restart_variables.restart_number()
