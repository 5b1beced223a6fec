"""Programs that tests start: with this checkout as gangline, and one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gangline.launcher.job import free_ports

ROOT = Path(__file__).parents[1]


class RunsCode:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def product_files(*folders: str) -> Iterator[Path]:
    """Yield the modules in folders at the top of the repository, without those behind links."""
    for folder in folders:
        yield from (file for file in (ROOT / folder).rglob("*.py") if not any(one.is_symlink() for one in file.parents))


def environment(**variables: object) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **{name: str(value) for name, value in variables.items()}}


def run(
    command: Sequence[object], *, cwd: Path | None = None, code: int | None = None, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run a command with more environment variables; check its exit code if one is given."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment(**variables), capture_output=True, text=True, check=False)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def python(
    *arguments: object, cwd: Path | None = None, code: int | None = None, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run Python as `run` does."""
    return run([sys.executable, *arguments], cwd=cwd, code=code, **variables)


def torchrun(*arguments: object, ranks: int = 2) -> list[str]:
    """Return the arguments of Python that start a script by torchrun."""
    words = ("-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", *free_ports(1), *arguments)
    return [str(word) for word in words]
