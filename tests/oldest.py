"""The fast tests with the lowest version of each dependency that pyproject.toml allows: ``python -m tests.oldest``.

The environment is .peers/oldest. torch is the lowest version with a CPU build, or the one of ``--torch``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".peers" / "oldest"
NEEDED = (
    "expecttest",
    "nvidia-cuda-nvrtc-cu12",
    "tensorboard",
    "prometheus-client",
    "hypothesis",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "cloudpickle",
    "setuptools",
    "build",
)
NOT_NEWER = ("click<8.5",)
"""Packages of packages: newer ones deprecate what these old ones use, and warnings are errors in tests."""
WITH_OTHERS = ("tests/integrations", "tests/bench", "tests/doctor", "tests/test_docs.py", "tests/test_package.py")
"""Tests of other packages, of documentation and of packaging, which the newest environment runs."""


def lowest(requirements: list[str]) -> list[str]:
    """Return each requirement at its lowest version: fsspec==2024.2 for fsspec>=2024.2."""
    found = [re.match(r"([\w.-]+)>=([\w.]+)", one) for one in requirements]
    return [f"{one[1]}=={one[2]}" for one in found if one is not None]


def main() -> int:
    """Run the tests; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="version of torch")
    parser.add_argument("tests", nargs="*", help="files and folders of tests; default: all")
    given = parser.parse_args()
    pins = lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    if given.torch:
        pins = [pin for pin in pins if not pin.startswith("torch==")] + [f"torch=={given.torch}"]
    print("lowest versions:", *pins, flush=True)
    if not (FOLDER / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    pip, python = FOLDER / "bin" / "pip", FOLDER / "bin" / "python"
    subprocess.run([pip, "install", "--quiet", *pins, *NEEDED, *NOT_NEWER], check=True)
    subprocess.run([pip, "install", "--quiet", "--no-deps", "--editable", ROOT], check=True)
    left = [f"--ignore={name}" for name in WITH_OTHERS]
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", *left, *given.tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
