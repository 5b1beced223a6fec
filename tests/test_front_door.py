"""The front door: lazy names, the command line, and what it says when another package hides ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gangline

ROOT = Path(gangline.__file__).parent


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_every_public_name_is_there() -> None:
    for name in gangline.__all__:
        assert getattr(gangline, name) is not None
    assert set(gangline.__all__) == {name for names in gangline._HOMES.values() for name in names}
    with pytest.raises(AttributeError, match="'gangline' has no attribute 'modul'"):
        gangline.modul  # noqa: B018


def test_help_and_the_front_door_import_no_torch() -> None:
    code = (
        "import sys, gangline, models, kvstore, collectives, bench\n"
        "sys.argv = ['gangline', *sys.argv[1:]]\n"
        "try: gangline.main()\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "print([name for name in ('torch', 'numpy', 'sklearn', 'torchmetrics') if name in sys.modules])\n"
    )
    for arguments in (["--help"], ["train", "--help"]):
        done = python("-c", code, *arguments)
        assert done.stdout.endswith("exit 0\n[]\n"), done.stdout + done.stderr
    assert "--work-load-list" in done.stdout


@pytest.mark.parametrize("name", ["models", "kvstore", "collectives"])
def test_a_package_of_the_users_that_hides_ours_is_named_with_both_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import gangline"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert str(tmp_path / name / "__init__.py") in last
    assert str(ROOT / name / "__init__.py") in last


def test_devices_prints_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    rows = json.loads(python("-m", "gangline", "devices", "--json").stdout)
    assert rows[0]["context"] == "cpu(0)"
    assert 0 < rows[0]["memory_free"] <= rows[0]["memory_total"]
    monkeypatch.setattr(sys, "argv", ["gangline", "devices"])
    with pytest.raises(SystemExit) as end:
        gangline.main()
    assert not end.value.code
    table = capsys.readouterr().out
    assert "cpu(0)" in table
    assert "memory" in table


def test_wrong_usage_ends_with_2() -> None:
    for arguments in (["nosuch"], ["train", "--nosuch"], ["train", "--batch-size", "many"], ["train", "--cpus", "0"]):
        assert python("-m", "gangline", *arguments).returncode == 2
