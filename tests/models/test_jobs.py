"""`gangline train` as one of several workers: its default store, late updates, and who ends with which error."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import Run

from gangline import Communicator, spawn
from gangline.launcher.job import free_ports
from gangline.models.checkpoint.checkpoint import epochs
from tests.models.test_checkpoint_lock import start_holder

Result = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def _train(comm: Communicator, port: int, words: list[str]) -> Result:
    os.environ |= {
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(comm.rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # `gangline launch -s 0` sets these.
        "DMLC_ROLE": "worker",
        "DMLC_NUM_SERVER": "0",
        "DMLC_NUM_WORKER": str(comm.size),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "9",
    }
    from gangline.cli.main import main

    sys.argv = ["gangline", "train", *words]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def job(workers: int, *words: object) -> list[Result]:
    """Run `gangline train` as the workers of a job without servers."""
    results: list[Result] = spawn(_train, workers, free_ports(1)[0], [str(word) for word in words], threads=1)
    return results


def accuracy(result: Result) -> float:
    code, out, err = result
    assert code == 0, err
    return float(out.strip().splitlines()[-1].removeprefix("Validation-accuracy="))


def test_workers_of_a_job_train_one_network(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    first, second = job(2, "--network", "mlp", "--num-epochs", "1", "--model-prefix", prefix)
    assert "mlp on 2 workers by loads 1, 1, each on cpu(0), store allreduce" in first[2]
    assert 0.2 < accuracy(first) <= 1
    assert (second[0], second[1]) == (0, "")
    assert epochs(prefix) == [1]


@pytest.mark.slow
def test_what_is_asked_for_stays_and_divergence_is_reported() -> None:
    words = ["--kv-store", "dist_async:6", "--network", "mlp", "--mom", "0.99", "--lr", "2", "--num-epochs", "3"]
    first, _ = job(2, *words)
    assert "momentum is 0" not in first[2]
    warning = r"the training loss went from 2\.\d+ to \S+: training diverges with learning rate 2, momentum 0.99, "
    warning += r"late updates of 2 workers, max_staleness 6; lower the learning rate or set a smaller momentum or"
    assert re.search(warning, first[2]), first[2]
    assert first[2].count("the training loss went from") == 1  # beside the error at the end


def test_a_prefix_in_use_ends_the_command_with_one_line(tmp_path: Path, run: Run) -> None:
    words = ["train", "--network", "mlp", "--num-epochs", "1", "--cpus", "1", "--model-prefix", tmp_path / "net"]
    with start_holder(tmp_path / "net") as holder:
        out, err = run(*words, code=1)
        assert err.splitlines()[-1].startswith(f"gangline: process {holder.pids[0]} on ")
    assert out == ""
    assert "--kv-store allreduce" in err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [2, 8])
def test_dist_async_learns_the_digits_with_its_defaults(workers: int) -> None:
    words = [sys.executable, "-m", "gangline", "launch", "-n", str(workers), "--"]
    run = subprocess.run([*words, "gangline", "train", "--kv-store", "dist_async"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"dist_async: momentum is 0, because updates of {workers} workers come late" in run.stderr
    assert "diverges" not in run.stderr
    assert float(run.stdout.partition("Validation-accuracy=")[2]) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_the_survivor_of_a_killed_worker_names_it(store: str) -> None:
    words = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", str(int(store == "dist_sync")), "--"]
    train = 'echo "pid $$ $RANK"; exec gangline train --network mlp --num-epochs 100000 --kv-store $0'
    words += ["sh", "-c", train, store]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        found = [process.stdout.readline().split() for _ in range(2)]
        pid = next(int(line[-2]) for line in found if line[-1] == "1")
        for line in process.stderr:
            if "Epoch[1]" in line:
                os.kill(pid, signal.SIGKILL)
                break
        rest = process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGKILL
    assert re.search(r"\[worker 0\] gangline: .*(worker|rank) 1", rest), rest
