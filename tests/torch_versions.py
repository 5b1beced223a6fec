"""Tests of what uses private names of torch, with versions of torch: ``python -m tests.torch_versions 2.12.1 2.13.0``.

Each version runs in a virtual environment of its own below .peers/, as its CPU build if the package index has one, or
else as the index's build for GPUs, which is gigabytes; once as it is and once with the setting by which torch sends
process groups through torchcomms, where that is installed. A version that pip does not find is left out, with a line
that says so. The exit code is 1 if a version fails, or if none could be installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/collectives/test_torch_backend.py",
    "tests/collectives/test_torch_interface.py",
    "tests/collectives/test_reconfigure.py",  # skipped before torch 2.14
    "tests/collectives/test_modes.py",  # collectives/eager.py
    "tests/models/test_unequal_ranks.py",  # models/balance/gradient_weights.py
    "tests/models/test_micro_batches.py",  # models/balance/micro_batches.py
    "tests/integrations/test_torchcomms.py",
)
SETTINGS = ({}, {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"})
NEEDED = ("expecttest", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


def install(version: str) -> Path | None:
    """Return the Python of an environment with a version of torch; None if pip does not find it."""
    folder = ROOT / ".peers" / f"torch-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    builds = (f"torch=={version}+cpu", f"torch=={version}")
    if all(subprocess.run([*pip, build], check=False).returncode for build in builds):
        return None
    subprocess.run([*pip, *NEEDED, "-e", ROOT], check=True)
    return python


def main(versions: list[str]) -> int:
    """Test the versions; return the exit code."""
    outcomes = {}
    for version in versions:
        python = install(version)
        if python is None:
            outcomes[version] = "pip finds no build of it"
            continue
        for setting in SETTINGS:
            done = subprocess.run(
                [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *TESTS],
                cwd=ROOT,
                env=os.environ | setting,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            sys.stdout.write(done.stdout)
            name = " ".join([version, *(f"{key}={value}" for key, value in setting.items())])
            outcomes[name] = f"exit code {done.returncode}: {done.stdout.strip().splitlines()[-1]}"
    for version, outcome in outcomes.items():
        print(f"torch {version}: {outcome}")
    ran = [outcome for outcome in outcomes.values() if outcome.startswith("exit code")]
    return 0 if ran and all(outcome.startswith("exit code 0") for outcome in ran) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
