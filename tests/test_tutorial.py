"""docs/tutorial.md: its commands print what it shows."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import printed
from tests.programs import ROOT, python, run

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
TWO_MACHINES = {"pip", "scp", "export"}
"""Commands that need another machine, or an installation."""


def commands() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each command, and the lines of output that follow it."""
    for block in printed.blocks(PAGE):
        if block.language == "text":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                line, *output = part.splitlines()
                yield shlex.split(line), output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    for block in printed.blocks(PAGE):
        if block.language == "py":
            name = block.text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(block.text)
    ran = []
    for words, lines in commands():
        if words[0] in TWO_MACHINES or "--nnodes" in words:
            continue
        bin_folder = Path(python("-c", "import sys; print(sys.prefix)").stdout.strip()) / "bin"
        done = run([bin_folder / words[0], *words[1:]], cwd=tmp_path, code=0, PATH=f"{bin_folder}:{os.environ['PATH']}")
        ran.append(words[0])
        for line in lines:
            pattern = ".*".join(re.escape(part) for part in line.split("..."))
            assert re.search(f"^{pattern}$", done.stdout + done.stderr, re.MULTILINE), (line, done.stdout, done.stderr)
    assert ran == ["torchrun", "torchrun", "torchrun", "python", "gangline", "gangline", "gangline"]
