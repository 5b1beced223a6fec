"""The installed package: contents of wheel and sdist, name clashes with a user's folders, and linted files."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import gangline
from tests.programs import ROOT

OURS = ("bench", "collectives", "kvstore", "models")
UNTYPED = {"tests": "tests are read by ruff alone", "docs": "examples are programs of users, who need no types"}
"""Folders that mypy does not check, with the reason."""

SCRIPT = """
from gangline import Module, Trainer, cpu, create, gpu
from torch import nn

contexts = [cpu(0), cpu(1)] if True else [gpu(0), gpu(2)]
module: Module = Module(nn.Linear(4, 2), nn.CrossEntropyLoss(), context=contexts, work_load_list=[3, 1])
parameters = list(module.get_params())
trainer: Trainer = Trainer(nn.Linear(4, 2).parameters(), "sgd", {"learning_rate": 0.1}, "local")
with create("device") as kv:
    print(parameters, kv.type)
"""

SUMS = """import gangline
import torch


def main(comm):
    return comm.all_reduce(torch.ones(3)).tolist()


if __name__ == "__main__":
    print(gangline.spawn(main, 2))
"""

NOT_EDITABLE = """import sys

sys.meta_path[:] = [one for one in sys.meta_path if getattr(one, "__name__", "") != "_EditableFinder"]
"""
"""Keeps Python from finding the core of this checkout, which is installed in editable mode."""


class Installed(NamedTuple):
    """A wheel installed into its own folder, and a user's project."""

    python: list[str]
    project: Path
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*self.python, *words], cwd=self.project, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def build(source: Path, target: Path, *what: str) -> list[Path]:
    command = [sys.executable, "-m", "build", "--no-isolation", "-o", str(target), *what, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(target.iterdir())


def install(wheel: Path, target: Path) -> dict[str, str]:
    """Install a wheel into a folder of its own; return the environment in which Python finds it there."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    return {**os.environ, "PYTHONPATH": str(target)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of which packages are built."""
    folder = tmp_path_factory.mktemp("package") / "source"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "site", "out", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    [built] = build(source, source.parent / "wheel", "--wheel")
    return built


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a user's project with folders named like ours; importing one of them by mistake fails."""
    folder = tmp_path / "project"
    for name in OURS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('a folder of the user was imported')\n")
    (folder / "script.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def installed(wheel: Path, project: Path, tmp_path: Path) -> Installed:
    return Installed([sys.executable], project, install(wheel, tmp_path / "site"))


def python_files(folder: Path, *names: str) -> set[str]:
    return {str(file.relative_to(folder)) for name in names for file in (folder / name).rglob("*.py")}


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"gangline/{file}" for file in python_files(ROOT, *OURS)}
    expected |= {f"gangline/{file}" for file in python_files(ROOT / "gangline", ".") if file.split("/")[0] not in OURS}
    assert {name for name in names if name.endswith(".py")} == expected
    rest = {name for name in names if not name.endswith(".py")}
    assert rest == {
        *(["gangline/_core.abi3.so"] if shutil.which("gcc") else []),
        "gangline/_core.pyi",
        "gangline/py.typed",
        "gangline/models/reports/chart.html",
        "gangline/models/data/digits.md",
        "gangline/models/data/digits.npz",
    }


@pytest.mark.slow
def test_the_sdist_holds_docs_and_tests_and_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    [sdist] = build(source, tmp_path / "sdist", "--sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "again", filter="data")
    [unpacked] = (tmp_path / "again").iterdir()
    assert python_files(unpacked, "tests") == python_files(ROOT, "tests")
    assert {page.name for page in unpacked.glob("docs/*.md")} == {page.name for page in ROOT.glob("docs/*.md")}
    [again] = build(unpacked, tmp_path / "dist", "--wheel")
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    contents = [{name: file.read(name) for name in file.namelist() if "RECORD" not in name} for file in (first, second)]
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_a_wheel_is_built_without_a_compiler_and_works(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    bare = shutil.copytree(source, tmp_path / "bare", symlinks=True, ignore=shutil.ignore_patterns("build", "*.so"))
    [wheel] = build(Path(bare), tmp_path / "wheel", "--wheel")
    assert "gangline/_core.abi3.so" not in zipfile.ZipFile(wheel).namelist()
    one = Installed([sys.executable], tmp_path, install(wheel, tmp_path / "site"))
    (tmp_path / "site" / "sitecustomize.py").write_text(NOT_EDITABLE)
    assert "compiled core: not used: No module named 'gangline._core'" in one.run("-m", "gangline", "env")
    (tmp_path / "sums.py").write_text(SUMS)
    assert one.run("sums.py") == "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]\n"


@pytest.mark.slow
def test_an_installed_gangline_runs_beside_a_users_own_folders(installed: Installed) -> None:
    out = installed.run("-m", "gangline", "train", "--network", "mlp", "--cpus", "2", "--num-epochs", "1")
    assert out.startswith("Validation-accuracy=")
    assert installed.run("script.py") == "['weight', 'bias'] device\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clean_environment_trains_launches_and_measures(wheel: Path, project: Path) -> None:
    venv.create(project / ".venv", with_pip=True)
    python = str(project / ".venv" / "bin" / "python")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *constraints, str(wheel), "mypy"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = str(project / ".venv" / "bin" / "gangline")
    one = Installed([command], project, environment)
    train = ["train", "--network", "mlp"]
    assert one.run("train", "--cpus", "2", "--num-epochs", "2").startswith("Validation-accuracy=")
    launched = one.run("launch", "-n", "2", "-s", "1", "--", "gangline", *train, "--kv-store", "dist_sync")
    assert "Validation-accuracy=" in launched
    assert "busbw" in one.run("bench", "all_reduce", "--ranks", "2", "-b", "4", "-e", "4K", "-f", "16")
    assert "Success" in Installed([python], project, environment).run("-m", "mypy", "--strict", "script.py")


def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so there is no list of tracked files")
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_an_extra_for_gpus_brings_no_nccl_beside_that_of_torch(extra: str, wheel: Path, tmp_path: Path) -> None:
    """Two packages with the file libnccl.so.2 overwrite each other's, and torch cannot be imported with the wrong one.

    The installed torch is pinned, so pip fetches what the extra adds: 130 MB where an index has no metadata files.
    """
    report, pinned = tmp_path / "report.json", tmp_path / "constraints.txt"
    pinned.write_text(f"torch=={version('torch')}\n")
    words = ["--dry-run", "--report", str(report), "--constraint", str(pinned), "--retries", "1", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "install", *words, f"gangline[{extra}] @ {wheel.as_uri()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "WARNING: Retrying" in done.stderr and "(from versions: none)" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    names = {one["metadata"]["name"].lower() for one in json.loads(report.read_text())["install"]}
    assert f"cupy-{extra}x" in names
    assert not {name for name in names if name == "torch" or name.startswith("nvidia-nccl")}, names


def test_ruff_reads_every_file() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    read = {str(Path(line).relative_to(ROOT)) for line in done.stdout.split("\n") if line.endswith(".py")}
    assert read >= tracked()


def test_mypy_reads_every_file_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", SOURCES_OF_MYPY], cwd=ROOT, capture_output=True, text=True, check=True)
    read = {
        str(Path(line).resolve().relative_to(ROOT.resolve())) for line in done.stdout.split() if line.endswith(".py")
    }
    assert read == {file for file in tracked() if file.split("/")[0] not in UNTYPED}


SOURCES_OF_MYPY = """
from mypy.main import process_options
sources, _ = process_options([])
print("\\n".join(source.path for source in sources))
"""


def test_help_of_balance_shows_its_arguments() -> None:
    text = pydoc.render_doc(gangline.balance, renderer=pydoc.plaintext)
    assert "balance(model: " in text
    assert all(f"{name}: " in text for name in inspect.signature(gangline.BalancedLoader).parameters)
