"""Signals to `gangline train`: training ends after a step, with a checkpoint and an exit code that schedulers know."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = [sys.executable, "-m", "gangline", "train", "--network", "mlp", "--cpus", "1", "--num-epochs", "100000"]


def stopped(number: signal.Signals, folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a training that gets a signal in its second epoch."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*TRAIN, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "Epoch[0] Validation-accuracy" in line:
                process.send_signal(number)
                break
        out, err = process.communicate(timeout=60)
    return process.returncode, out, "".join(seen) + err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_and_exit_code_75_without_scoring(number: signal.Signals, tmp_path: Path) -> None:
    code, out, err = stopped(number, tmp_path, "--model-prefix", "net")
    assert (code, out) == (75, ""), err
    assert f"training was stopped by {number.name}" in err
    assert "--load-epoch auto resumes from it" in err
    assert list(tmp_path.glob("net-*.safetensors"))


@pytest.mark.slow
def test_a_signal_without_a_prefix_is_reported_as_a_signal(tmp_path: Path) -> None:
    code, out, err = stopped(signal.SIGTERM, tmp_path)
    assert (code, out) == (128 + signal.SIGTERM, ""), err
    assert "no checkpoint was written" in err
