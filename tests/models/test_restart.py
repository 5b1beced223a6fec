"""Restart of a whole job by `gangline launch` and torchrun, and preemption: the weights are those of a whole run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from measure import same_bits

from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs
from tests.kvstore.test_launch import ROOT, Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).with_name("restarted_job.py"))
Weights = dict[str, torch.Tensor]
OWN_SHARED_MEMORY = (
    ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && "$@"; code=$?; ls -A /dev/shm; exit $code', "sh"]
    if os.geteuid() == 0 and shutil.which("unshare")
    else []
)


def trained(folder: Path, store: str, what: str, *words: str) -> tuple[int, list[str], list[str]]:
    """Run the script as a job of 2 workers (1 with the stores "local" and "loader"); check that nothing is left of it.

    Returns:
        The exit code and the lines of standard output and error.
    """
    servers, workers = str(int(store == "dist_sync")), str(1 + int(store in ("dist_sync", "allreduce")))
    launch = [sys.executable, "-m", "gangline", "launch", "-n", workers, "-s", servers, "--grace", "30", *words, "--"]
    return run([*launch, sys.executable, SCRIPT, store, str(folder / "net"), what], folder)


def run(command: Sequence[str], folder: Path) -> tuple[int, list[str], list[str]]:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(dir="/tmp") as temporary:  # short: for sockets
        patch.setenv("TMPDIR", temporary)
        with Launch([*OWN_SHARED_MEMORY, *command], cwd=ROOT) as job:
            code, out, errors = job.end(240)
        left = [path.name for path in Path(temporary).iterdir()]
    assert [line for line in out if not line.startswith(("[", "step", "ended"))] == [], "left in /dev/shm"
    assert [name for name in left if not name.startswith("torchelastic_")] == []  # torchrun's own logs
    assert not list(folder.glob("*.aside"))
    return code, out, errors


@cache
def undisturbed(store: str) -> Weights:
    with TemporaryDirectory() as folder:
        code, out, errors = trained(Path(folder), store, "none")
        assert code == 0, errors
        assert out[-1].endswith("ended by epochs after 40 steps")
        return weights(Path(folder))


def weights(folder: Path) -> Weights:
    found: Weights = torch.load(folder / "net.pt")
    return found


def steps(out: Sequence[str]) -> list[int]:
    return [int(line.split()[-1]) for line in out if "step " in line]


@pytest.mark.parametrize(
    ("store", "victim"),
    [
        *(("dist_sync", victim) for victim in ("worker 0", "worker 1", "server", "scheduler")),
        *(("allreduce", victim) for victim in ("worker 0", "worker 1")),
    ],
)
def test_a_job_with_a_killed_process_starts_again_and_ends_with_the_same_bits(
    store: str, victim: str, tmp_path: Path
) -> None:
    code, out, errors = trained(tmp_path, store, victim, "--max-restarts", "2")
    assert code == 0, errors
    (failure,) = (line for line in errors if line.startswith("gangline: ") and "stopping the other processes" in line)
    assert re.match(rf"gangline: {victim}( 0)? \(pid \d+\) was killed by SIGKILL; ", failure)
    assert [line for line in errors if line.startswith("gangline: restart")] == [
        "gangline: restart 1 of 2: all processes of the job start again"
    ]
    assert any(
        line.endswith(f"resuming from {tmp_path}/net-0000.json: 0 of 4 epochs and 5 batches of the next are done")
        for line in errors
    )
    begun = 10 if victim == "scheduler" else 7  # rank 0 may die in step 7; without a scheduler it goes on for a moment
    assert steps(out) in [[*range(1, last + 1), *range(6, 41)] for last in range(6, begun + 1)]
    assert same_bits(weights(tmp_path), undisturbed(store))


@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_torchrun_starts_a_job_again_which_resumes(store: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    code, out, errors = run([*torchrun, SCRIPT, store, str(tmp_path / "net"), "worker 1"], tmp_path)
    assert code == 0, errors
    assert any("resuming from" in line and "5 batches of the next" in line for line in errors), errors
    assert steps(out) in ([*range(1, 8), *range(6, 41)], [*range(1, 7), *range(6, 41)])
    assert same_bits(weights(tmp_path), undisturbed(store))


@pytest.mark.parametrize("store", ["local", "loader", "dist_sync", "allreduce"])
def test_sigterm_writes_a_checkpoint_of_the_last_step_and_ends_with_75(store: str, tmp_path: Path) -> None:
    code, out, errors = trained(tmp_path, store, "stop", "--max-restarts", "3")
    assert code == 75, errors
    assert not any("start again" in line for line in errors)
    last = steps(out)[-1]
    assert 7 <= last < 40
    assert checkpoint.read(tmp_path / "net", epochs(tmp_path / "net")[-1]).step == last
    code, out, errors = trained(tmp_path, store, "stop")
    assert code == 0, errors
    assert steps(out) == [*range(last + 1, 41)]
    assert same_bits(weights(tmp_path), undisturbed(store))
