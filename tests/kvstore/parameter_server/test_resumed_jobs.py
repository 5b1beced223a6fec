"""A job of servers that starts again from a worker's checkpoint, by the script of docs/reliability.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kvstore.test_launch import launch
from tests.scripted_faults import script_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]
PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"


def weights(folder: Path) -> tuple[set[str], list[str]]:
    """Run the script in a folder of its own; return the lines that workers print, and standard error."""
    found = re.search(r"```python\n# resumes.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    folder.mkdir()
    program = f"import os\nos.chdir({str(folder)!r})\n{found[1]}"
    with launch("-n", "2", "-s", "2", "--max-restarts", "1", "--", sys.executable, "-c", program) as job:
        status, out, errors = job.end(100)
    assert status == 0, "\n".join(errors)
    return {line.partition("] ")[2] for line in out}, errors


@pytest.mark.parametrize(
    "script", ["server 1 kill at update 13", "server 0 kill at close 16", "worker 1 kill at push-sent 29"]
)
def test_a_killed_job_resumes_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    undisturbed, _ = weights(tmp_path / "undisturbed")
    script_processes(monkeypatch, script)
    killed, errors = weights(tmp_path / "killed")
    assert any("restart 1 of 1" in line for line in errors), errors
    assert len(undisturbed) == 1
    assert killed == undisturbed
