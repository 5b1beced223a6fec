"""The front door: lazy names, the command line, and what it says when another package hides ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gangline
from gangline.cli.main import main

ROOT = Path(gangline.__file__).resolve().parent.parent


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_every_public_name_is_there() -> None:
    for name in gangline.__all__:
        assert getattr(gangline, name) is not None
    assert set(gangline.__all__) == {name for names in gangline._PACKAGES.values() for name in names}
    with pytest.raises(AttributeError, match="'gangline' has no attribute 'modul'"):
        gangline.modul  # noqa: B018


def test_help_and_the_front_door_import_no_torch() -> None:
    code = (
        "import sys, gangline.models, gangline.kvstore, gangline.collectives, gangline.bench\n"
        "from gangline.cli.main import main\n"
        "sys.argv = ['gangline', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print([name for name in ('torch', 'numpy', 'sklearn', 'torchmetrics') if name in sys.modules])\n"
    )
    for arguments in (["--help"], ["train", "--help"]):
        done = python("-c", code, *arguments)
        assert done.stdout.endswith("exit 0\n[]\n"), done.stdout + done.stderr
    assert "--work-load-list" in done.stdout


@pytest.mark.parametrize("name", ["models", "kvstore", "collectives", "bench"])
def test_a_package_of_the_users_beside_a_script_does_not_matter(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user's own')")
    code = (
        "from gangline import Module, Trainer, cpu, create; import gangline.bench.report; print(create('local').type)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "local\n"), done.stderr


def test_devices_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    rows = json.loads(python("-m", "gangline", "devices", "--json").stdout)
    assert rows[0]["context"] == "cpu(0)"
    assert 0 < rows[0]["memory_free"] <= rows[0]["memory_total"]
    monkeypatch.setattr(sys, "argv", ["gangline", "devices"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    table = capsys.readouterr().out
    assert "cpu(0)" in table
    assert "memory" in table


def test_wrong_usage_ends_with_2() -> None:
    for arguments in (["nosuch"], ["train", "--nosuch"], ["train", "--batch-size", "many"], ["train", "--cpus", "0"]):
        assert python("-m", "gangline", *arguments).returncode == 2
