"""`gangline bench faults`: its cases are valid scripts, and a row says what a job ended in."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.bench import bench
from tests.bench.faults.cases import PHASES, cases
from tests.hosts import obstacle
from tests.scripted_faults import parse

HOSTS = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def test_the_cases_are_valid_and_differ() -> None:
    rows = list(cases())
    assert len(rows) == len({case[:3] for case in rows}) >= 60
    assert {case.when for case in rows} == set(PHASES)
    for case in rows:
        assert not case.watched or parse(f"{case.watched} stop at {case.point}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ("server 0 killed push", "DeadNodeError: server 0 was killed or left: "),
        ("scheduler junk pull", "goes on, digits exact, weights equal"),
        ("worker 1 killed barrier", "DeadNodeError: worker 1 was killed or left: "),
        pytest.param("worker 1 - server 0 cut 5 s push", "goes on, digits exact, weights equal", marks=HOSTS),
        pytest.param(
            "worker 1 - server 0 cut for good push",
            "DeadNodeError: worker 1 has had no connection to server 0 for 10 s, though both reach the scheduler",
            marks=HOSTS,
        ),
    ],
)
def test_a_row_tells_the_outcome(row: str, outcome: str) -> None:
    done = CliRunner().invoke(bench, ["faults", "--only", row])
    assert done.exit_code == 0, done.output
    assert outcome in done.output
    assert "nothing" in done.output


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a full disk needs root")
def test_rows_of_a_full_disk_are_those_of_the_docs() -> None:
    """They name no folder of the run and no number of bytes, so that the table differs only where an outcome does."""
    done = CliRunner().invoke(bench, ["faults", "--only", "worker 0 disk full .*", "--markdown"])
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\| worker 0 \| disk full .*$", done.output, re.MULTILINE)
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    assert rows == re.findall(r"^\| worker 0 \| disk full .*$", page.read_text(), re.MULTILINE)
    assert len(rows) == 2
