"""`gangline run`: programs that name gloo themselves run on backend gangline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from gangline.usage_error import UsageError
from tests.programs import python, torchrun

SCRIPT = """\
import sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
alone = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
dist.init_process_group("gloo", **({} if len(sys.argv) > 1 else alone))
groups = [None, dist.new_group(backend="gloo"), dist.new_group(backend="cpu:gloo")]
sums = [torch.ones(1), torch.ones(1), torch.ones(1)]
for tensor, group in zip(sums, groups):
    dist.all_reduce(tensor, group=group)
words = [__name__, sys.argv[1:], *map(dist.get_backend, groups), *(one.item() for one in sums)]
sys.stdout.write(" ".join(map(str, words)) + "\\n")
dist.destroy_process_group()
"""
SAID = "process groups of backend 'gloo' are created as 'gangline' (GANGLINE_REPLACE_GLOO=1)"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "named_gloo.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_names_gloo_runs_on_gangline(script: Path) -> None:
    done = python("-m", "gangline", "run", script)
    assert done.stdout == "__main__ [] gangline gangline cpu:gangline 1.0 1.0 1.0\n", done.stderr
    assert done.stderr.count(SAID) == 1


@pytest.mark.slow
def test_ranks_of_torchrun_do_so_too_and_arguments_reach_the_script(script: Path) -> None:
    done = python(*torchrun("-m", "gangline", "run", script, "--epochs", "3"))
    line = "__main__ ['--epochs', '3'] gangline gangline cpu:gangline 2.0 2.0 2.0\n"
    assert done.stdout == 2 * line, done.stderr
    assert done.stderr.count(SAID) == 1


@pytest.mark.slow
def test_a_module_runs_by_its_name(script: Path) -> None:
    done = python("-m", "gangline", "run", "-m", "named_gloo", cwd=script.parent)
    assert done.stdout == "__main__ [] gangline gangline cpu:gangline 1.0 1.0 1.0\n", done.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f():\n    raise ValueError('wrong')\n\n\nf()\n", 1),
        pytest.param("import nosuch_module\n", 1, marks=pytest.mark.slow),
        pytest.param("f(\n", 1, marks=pytest.mark.slow),
        pytest.param("raise KeyboardInterrupt\n", 130, marks=pytest.mark.slow),  # Python ends by the signal
    ],
)
def test_the_traceback_of_a_script_is_that_of_python(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "fails.py").write_text(text)
    alone = python(tmp_path / "fails.py")
    done = python("-m", "gangline", "run", tmp_path / "fails.py", code=code)
    assert done.stderr.replace(SAID, "").strip() == alone.stderr.strip()


ENDED = """\
import signal
import torch
import torch.distributed as dist

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, when rank 1 has ended
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
def test_other_ranks_name_the_error_that_has_ended_one(tmp_path: Path) -> None:
    (tmp_path / "ended.py").write_text(ENDED)
    done = python(*torchrun("-m", "gangline", "run", tmp_path / "ended.py"), code=1)
    assert (
        "[rank0]: gangline.collectives.errors.DeadNodeError: rank 1 closed its communicator after OutOfMemoryError: "
        "CUDA out of memory. Tried to allocate 2.00 GiB (rank 0 waited in all_reduce(3 x float32, sum))\n"
    ) in done.stderr


def test_a_missing_script_is_named() -> None:
    done = CliRunner().invoke(app, ["run", "missing.py"])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "missing.py is not a file; expected a Python file, or -m and the name of a module"


INSTALLED = """\
import sys
import torch.distributed as dist
assert "gangline.collectives.torch_backend" not in sys.modules
dist.init_process_group("gangline", rank=0, world_size=1, store=dist.HashStore())
print(type(dist.distributed_c10d._world.default_pg).__name__)
"""


@pytest.mark.slow
def test_torch_finds_the_backend_of_an_installed_gangline_without_an_import(script: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target, root],
        check=True,
        capture_output=True,
    )
    done = python("-c", INSTALLED, PYTHONPATH=str(target))
    assert done.stdout == "GanglineProcessGroup\n", done.stderr
    done = python(script, PYTHONPATH=str(target), GANGLINE_REPLACE_GLOO="1")
    assert done.stdout == "__main__ [] gangline gangline cpu:gangline 1.0 1.0 1.0\n", done.stderr
