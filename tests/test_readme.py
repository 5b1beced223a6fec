"""The README's code runs as printed, and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.printed import blocks

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = [block.text for block in blocks(README) if block.language == "python"]
CONSOLE = [line for block in blocks(README) if block.language == "console" for line in block.text.splitlines()]


@pytest.mark.parametrize("code", PYTHON, ids=[f"block{number}" for number in range(len(PYTHON))])
def test_code_blocks_run_as_printed(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    if "print" in code:
        accuracy = re.fullmatch(r"\[\('accuracy', (0\.\d+)\)\]\n", capsys.readouterr().out)
        assert accuracy is not None
        assert float(accuracy[1]) > 0.9


def test_the_readme_fits_on_a_few_screens_and_its_first_block_is_ten_lines_at_most() -> None:
    assert len(README.splitlines()) <= 150
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 10


def test_the_two_commands_are_first_and_equal_the_makefiles() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert [line.split()[:2] for line in CONSOLE[:2]] == [["make", "train"], ["make", "test"]]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in ("train", "test", "test-all"))


def test_its_flags_exist() -> None:
    from typer.main import get_command

    from gangline.cli.main import app

    commands = get_command(app).commands
    known = {flag for parameter in commands["train"].params for flag in parameter.opts}
    named = [shlex.split(line, comments=True) for line in CONSOLE if line.startswith("gangline train")]
    flags = {word for words in named for word in words if word.startswith("--")}
    assert flags
    assert flags <= known
