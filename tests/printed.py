"""Pages of documentation: parse their code blocks and run them as printed.

Blocks run in order, in one folder, those of Python with one namespace. A Python block whose first line is a comment
with a file name, such as `# train.py`, is written to that file. Console blocks hold commands: gangline, python and
torchrun, after settings of variables as a shell takes them.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from gangline.collectives.communicator import Communicator

RUN = ("python", "console")
"""Languages of blocks that run."""
SHOWN = ("text", "py", "diff", "toml")
"""Languages of blocks that are only read."""
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.py)\n")
_SETTING = re.compile(r"(\w+)=(.*)", re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Line of the page where the block's text begins."""


def blocks(page: str) -> list[Block]:
    """Return all fenced blocks of a page; ValueError if a fence is not closed."""
    found = [Block(match[1], match[2], page.count("\n", 0, match.start()) + 2) for match in _FENCE.finditer(page)]
    fences = len(re.findall(r"^\s*```", page, re.MULTILINE))
    if fences != 2 * len(found):
        raise ValueError(f"{fences} fences make no {len(found)} blocks; expected each at the beginning of its line")
    return found


def file_name(block: Block) -> str | None:
    """Return the name of the file to which a Python block is written, or None."""
    named = _FILE.match(block.text)
    return named[1] if block.language == "python" and named else None


def commands(block: Block) -> list[list[str]]:
    """Return the arguments of each command of a console block, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def is_launch(words: list[str]) -> bool:
    """Return True if a command starts other programs, which takes seconds for each."""
    _, rest = _settings(words)
    starts = rest[:2] in (["gangline", "launch"], ["gangline", "advise"])
    return rest[0] == "torchrun" or (starts and "--dry-run" not in rest)


def links(page: str) -> list[str]:
    """Return the files that a page links to."""
    return [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page) if "://" not in target]


def run_page(_: Communicator, path: str, folder: str, with_launches: bool) -> list[str]:
    """Run a page's blocks in a folder, in this process and for good; what each block or command printed on stdout.

    Raises:
        RuntimeError: one failed; the message names the line of the page and has the output.
    """
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.path.append(str(Path(path).parent / "examples"))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    page = Path(path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: list[str] = []
    for block in blocks(page.read_text()):
        where = f"{page.name}, line {block.line}"
        if block.language == "console":
            asked = [words for words in commands(block) if with_launches or not is_launch(words)]
            printed += [_run_command(words, f"{where}, {shlex.join(words)}") for words in asked]
        elif name := file_name(block):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(block.text)
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, page.name, "exec")
            with _output(where) as out:
                exec(code, namespace)
            printed.append(out.getvalue())
    return printed


def _run_command(words: list[str], where: str) -> str:
    settings, words = _settings(words)
    if is_launch(words):
        return _run_program(words, settings, where)
    before, arguments = dict(os.environ), sys.argv
    os.environ.update(settings)
    try:
        with _output(where) as out:
            if words[0] == "gangline":
                from gangline.cli.main import main

                sys.argv = words
                main()
            elif words[0] == "python" and words[1].endswith(".py"):
                sys.argv = words[1:]
                runpy.run_path(os.path.abspath(words[1]), run_name="__main__")
            else:
                raise ValueError(f"{words[0]!r} is no command that pages may print; expected gangline, python FILE.py")
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.argv = arguments
    return out.getvalue()


def _run_program(words: list[str], settings: dict[str, str], where: str) -> str:
    ours = os.path.dirname(sys.executable)
    path = f"{ours}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    words = [os.path.join(ours, words[0]), *words[1:]]
    ran = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": path, **settings})
    if ran.returncode:
        raise RuntimeError(f"{where} left with exit code {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


@contextmanager
def _output(where: str) -> Iterator[io.StringIO]:
    """Capture what is printed within the block; add it to the message of an error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield out
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{where} left with {end.code}:\n{out.getvalue()}{err.getvalue()}") from end
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        raise RuntimeError(f"{where} failed:\n{out.getvalue()}{err.getvalue()}{trace}") from error


def _settings(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command into the variables that precede it and the command."""
    count = 0
    while count < len(words) and _SETTING.fullmatch(words[count]):
        count += 1
    pairs = [word.split("=", 1) for word in words[:count]]
    return dict(pairs), words[count:] or ["nothing"]
