"""`gangline advise`: causes that are built into a training job, and the verdict; step times over sizes and devices."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.driver.hosts import obstacle
from gangline.advise.advice import Advice, Finding, Remedy, advise
from gangline.advise.job_scaling import BATCH_SIZES, PROCESSES, _replaced, _value
from gangline.advise.scaling import Scaling, StepTimes, fitted_sizes, refined
from gangline.advise.steps import COLUMNS, JobSteps, ProcessSteps, Step
from gangline.cli.main import app
from gangline.usage_error import UsageError
from tests.cli.advise_causes import CAUSES, SMALL
from tests.programs import python, torchrun

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


# `gangline advise --scale`: step times over batch size and number of devices


SCRIPT = """
import argparse, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
size = parser.parse_args().batch_size
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
while True:
    model(torch.randn(size, 64)).sum().backward()
"""


def times(count: int, fixed: float, per_sample: float) -> StepTimes:
    return StepTimes(count, tuple((size, fixed + per_sample * size) for size in (8, 64)))


ONE, TWO = times(1, 0.001, 0.0001), times(2, 0.003, 0.00005)  # they meet at 40 samples


def gangline(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return python("-m", "gangline", *arguments, code=code)


def test_devices_with_a_larger_fixed_cost_win_from_where_the_lines_meet() -> None:
    few = Scaling("context", 16, (ONE, TWO))
    assert (few.best, few.wins_from) == (ONE, {1: 1, 2: 41})
    assert few.verdict.endswith("from 41 samples on they win: use a batch size of 128")
    many = Scaling("process", 256, (ONE, TWO))
    assert many.best is TWO
    assert many.verdict == "with batches of 256, 2 processes are 1.68 times as fast as 1: keep them"
    shared = Scaling("context", 64, (ONE, times(2, 0.003, 0.0001)))  # of the same cores
    assert shared.wins_from[2] is None
    assert shared.verdict.endswith("no batch size makes them faster: train on 1")


def test_times_between_the_measured_sizes_lie_on_lines_and_beyond_them_the_line_goes_on() -> None:
    found = StepTimes(1, ((10, 0.1), (20, 0.1), (40, 0.3)))
    assert [found.seconds(size) for size in (5, 15, 30, 50)] == pytest.approx([0.1, 0.1, 0.2, 0.4])
    steep = StepTimes(1, ((10, 0.1), (20, 0.9)))
    assert steep.seconds(5) == pytest.approx(0.05)  # no less than in proportion


def seconds(count: int, size: int) -> float:
    """Seconds of a step whose samples cost less as the batch grows; two devices win from about 400 samples on."""
    return 0.001 * count + 1e-5 * math.pow(size, 0.9) / count


def test_the_batch_size_from_which_devices_win_is_measured_and_not_only_extrapolated() -> None:
    measured: list[int] = []

    def measure(count: int, size: int) -> tuple[float, float]:
        measured.append(size)
        return size, seconds(count, size)

    fits = [StepTimes(count, tuple((size, seconds(count, size)) for size in (8, 22, 64))) for count in (1, 2)]
    meets = next(size for size in range(1, 2048) if seconds(2, size) < seconds(1, size))
    extrapolated = fits[1].wins_from(fits[:1])
    times = refined(fits, measure, 2048)
    found = times[1].wins_from(times[:1])
    assert extrapolated is not None
    assert found is not None
    assert abs(found / meets - 1) < 0.02 < abs(extrapolated / meets - 1)
    assert measured
    assert max(measured) <= 2048


@pytest.mark.parametrize(("size", "least"), [(1, 1), (2, 4), (64, 2)])
def test_a_prediction_is_made_from_two_sizes_or_more_that_give_each_device_a_sample(size: int, least: int) -> None:
    sizes = fitted_sizes(size, least)
    assert len(set(sizes)) >= 2
    assert min(sizes) >= least


def test_a_batch_size_that_does_not_fit_ends_the_refinement() -> None:
    def measure(count: int, size: int) -> tuple[float, float]:
        raise UsageError("out of memory")

    assert refined([ONE, TWO], measure, 2048) == [ONE, TWO]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_number_of_contexts_is_measured() -> None:
    train = ("gangline", "train", "--network", "mlp", "--cpus", "2", "--batch-size", "16")
    done = gangline("advise", "--scale", "--seconds", "1", "--json", "--", sys.executable, "-m", *train)
    found = json.loads(done.stdout)
    assert [one["count"] for one in found["times"]] == [1, 2]
    assert all({8, 22, 64} <= {size for size, _ in one["points"]} for one in found["times"])
    assert found["verdict"].startswith("with batches of 16, 2 contexts are ")


def test_the_number_of_processes_is_the_launchers_and_the_batch_size_the_scripts() -> None:
    command = ["torchrun", "--nproc-per-node=4", "train.py", "-n", "7", "--batch-size", "64", "--batch-size=32"]
    assert (_value(command, PROCESSES), _value(command, BATCH_SIZES)) == (4, 32)
    assert _replaced(command, BATCH_SIZES, 8)[-1] == "--batch-size=8"
    assert _replaced(["mpirun", "-np", "4", "x"], PROCESSES, 2) == ["mpirun", "-np", "2", "x"]
    contexts = ["gangline", "train", "--context", "0,2,3"]
    assert (_value(contexts, PROCESSES), _replaced(contexts, PROCESSES, 2)[-1]) == (3, "0,2")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun train.py --batch-size 8", "the command has no such option"),
        ("torchrun --nproc-per-node gpu train.py --batch-size 8", "is 'gpu'; expected a number"),
        (f"{sys.executable} -c print(7) -n 2 --batch-size 8", r"wrote no timeline \(exit code 0\)(.|\n)*It printed: 7"),
    ],
)
def test_a_command_that_cannot_be_scaled_is_refused(command: str, message: str) -> None:
    done = CliRunner().invoke(app, ["advise", "--scale", "--", *command.split()])
    assert isinstance(done.exception, UsageError), done.output
    assert re.search(message, str(done.exception))


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_script_that_ignores_its_batch_size_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("size = parser.parse_args().batch_size", "parser.parse_args(); size = 8"))
    command = (sys.executable, *torchrun("-m", "gangline", "run", script, ranks=1))
    done = gangline("advise", "--scale", "--seconds", "1", "--", *command, "--batch-size", "8", code=2)
    assert "process count 1: a step has [8, 8, 8] samples at the batch sizes [4, 11, 32]" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_is_run_with_fewer_processes_and_other_batch_sizes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = (sys.executable, *torchrun("-m", "gangline", "run", script))
    done = gangline("advise", "--scale", "--json", "--seconds", "1", "--", *command, "--batch-size", "8")
    found = json.loads(done.stdout)
    assert found["batch_size"] == 16  # of both ranks
    assert [one["count"] for one in found["times"]] == [1, 2]
    assert all(len(one["points"]) >= 3 for one in found["times"])
