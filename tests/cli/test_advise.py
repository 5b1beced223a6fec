"""`gangline advise`: causes that are built into a training job, and the verdict."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.driver.hosts import obstacle
from gangline.advise.advice import Advice, Finding, Remedy, advise
from gangline.advise.steps import COLUMNS, JobSteps, ProcessSteps, Step
from gangline.cli.main import app
from gangline.collectives.errors import UsageError
from tests.cli.advise_causes import CAUSES, SMALL
from tests.programs import python

AVERAGES = ("bytes", "compress_seconds", "uncompressed_bytes", "compressed_bytes")
pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_verdict_names_the_cause_and_the_process(cause: str) -> None:
    if cause == "a slow link" and (why := obstacle()) is not None:
        pytest.skip(why)
    run, expected = CAUSES[cause]
    assert run() in expected


def advice(*remedies: Remedy) -> Advice:
    findings = tuple(Finding("compute", "", remedy.gain, "", (remedy,)) for remedy in remedies)
    return Advice(step_seconds=0.1, samples=100, findings=findings, table=())


def test_the_first_remedy_that_can_be_applied_to_a_command_is_verified() -> None:
    looked_for = Remedy("look for other programs", "gangline check", 0.5)
    larger = Remedy("larger batches", "four times --batch-size", 0.3, batches=4)
    assert advice().remedy() is None
    assert advice(looked_for).remedy() is None
    assert advice(looked_for, larger).remedy() is larger


@pytest.mark.parametrize(("threads", "has_remedy"), [("", True), ("4", True), ("1", False)])
def test_one_thread_is_not_recommended_to_processes_that_have_one(threads: str, has_remedy: bool) -> None:
    step = Step(0.0, 1.0, {name: float(name == "forward") for name in COLUMNS}, 8, {})
    process = ProcessSteps("worker 0", "host", 2, threads, [step], 0.5, dict.fromkeys(AVERAGES, 0.0))
    text = str(advise(JobSteps([process], {})))
    assert "the cores of host are oversubscribed" in text
    assert "fewer processes on this host" in text
    assert ("OMP_NUM_THREADS=1" in text) == has_remedy


@pytest.mark.slow
def test_verify_runs_the_command_again_and_prints_what_it_had_predicted() -> None:
    command = ["-m", "gangline", "advise", "--verify", "--"]
    command += [sys.executable, "-m", "gangline", "train", *SMALL]
    done = python(*command, code=0)
    assert re.search(r"Verify: .+: \d+ samples/s before, at most \d+ predicted, \d+ measured", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["--verify", "trace.json"], UsageError, "expected -- CMD"),
        (["--", "true"], UsageError, "wrote no timeline"),
        (["other.json"], ValueError, "is no timeline"),
    ],
)
def test_what_cannot_be_advised_on_is_an_error(
    words: list[str], error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["advise", *words])
    assert type(done.exception) is error, done.output
    assert text in str(done.exception)
