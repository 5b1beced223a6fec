"""The proof for GPUs, without one: its steps run in small, so that it works where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = ("versions", "late_owners", "interfaces", "balance", "lengths", "no_waits", "capture", "speed", "benches")
STEPS += ("sanitizer",)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_steps_run_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_proof", "--simulate", "--only", ",".join(STEPS)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "proof.json")], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == f"{len(STEPS)} passed, 0 failed", done.stdout[-3000:] + done.stderr
    found = json.loads((tmp_path / "proof.json").read_text())
    assert list(found) == list(STEPS)
    assert found["balance"]["figures"]["shares"][0] == [256, 256]
    assert list(found["lengths"]["figures"]["tokens_per_s"]) == ["random batches", "pool 1", "pool 4", "pool 16"]
