"""Examples of docs/examples: two loops that differ in three lines give the same weights, alone and in a job; sweeps."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
from language_model import main as train_language_model
from sweep_options import DEVICES, sweep

from gangline import Communicator, spawn
from gangline.launcher.job import free_ports
from tests.printed import blocks
from tests.programs import environment

ROOT = Path(__file__).parent.parent
PLAIN, TRAINER = (ROOT / "docs" / "examples" / name for name in ("plain_loop.py", "with_trainer.py"))

Weights = list[torch.Tensor]


def trained(path: str) -> Weights:
    """Run a script in this process and return the weights of its ``model``."""
    model = runpy.run_path(path, run_name="__main__")["model"]
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(_: Communicator, path: str) -> tuple[Weights, str]:
    """Run the script in one process; return the weights and its output."""
    with redirect_stdout(io.StringIO()) as printed:
        return trained(path), printed.getvalue()


def in_job(comm: Communicator, path: str, port: int) -> Weights:
    os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return trained(path)


@pytest.fixture(scope="module")
def one() -> tuple[Weights, str]:
    """Return the weights and the output of the plain loop."""
    [outcome] = spawn(alone, 1, str(PLAIN), threads=1)
    return outcome


def distance(found: Weights, expected: Weights) -> float:
    """Return the largest ||a - b|| / ||b|| over all parameters."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def changed_lines() -> list[tuple[str, str]]:
    before, after = PLAIN.read_text().splitlines(), TRAINER.read_text().splitlines()
    return [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]


def test_three_lines_are_changed_and_none_is_added() -> None:
    changed = changed_lines()
    assert len(changed) == 3
    assert "import" in changed[0][1]
    assert "Trainer(" in changed[1][1]
    assert ".step(" in changed[2][1]


def test_the_page_shows_these_lines() -> None:
    page = (ROOT / "docs" / "own-network.md").read_text()
    shown = "\n\n".join(f"< {before}\n> {after}" for before, after in changed_lines())
    assert f"```text\n{shown}\n```" in page


def test_alone_both_give_the_same_weights(one: tuple[Weights, str]) -> None:
    [(weights, printed)] = spawn(alone, 1, str(TRAINER), threads=1)
    assert weights[0].dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(weights, one[0], strict=True))
    assert printed == one[1]
    assert float(printed.removeprefix("Validation-accuracy=")) > 0.8


def test_workers_over_collectives_give_the_weights_of_one(one: tuple[Weights, str]) -> None:
    [port] = free_ports(1)
    for weights in spawn(in_job, 3, str(TRAINER), port, threads=1):
        assert distance(weights, one[0]) < 1e-11


def test_scalars_of_a_run_are_written_for_tensorboard(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
    )
    from with_tensorboard import main

    main(tmp_path)
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [10, 20, 30, 40]
    assert [one.step for one in events.Scalars("validation/accuracy")] == [23, 46]
    assert events.Scalars("validation/accuracy")[-1].value > 0.5
    assert all(0 <= one.value < 1 for one in events.Scalars("waiting"))


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("unequal-samples.md", ["unequal_texts.py", "unequal_graphs.py"]),
        ("muon.md", ["muon.py"]),
        ("readers.md", ["publisher.py", "evaluator.py", "rollouts.py"]),
    ],
)
def test_a_page_shows_lines_of_the_examples(page: str, names: list[str]) -> None:
    shown = [block.text for block in blocks((ROOT / "docs" / page).read_text()) if block.language == "py"]
    programs = [(ROOT / "docs" / "examples" / name).read_text() for name in names]
    assert all(text in program for text, program in zip(shown, programs, strict=False))  # further ones: other tests


@pytest.mark.parametrize("name", ["unequal_texts.py", "unequal_graphs.py", "muon.py"])
def test_two_ranks_whose_shares_are_unequal_give_the_weights_of_one(name: str) -> None:
    path, ports = str(ROOT / "docs" / "examples" / name), free_ports(2)
    [expected] = spawn(in_job, 1, path, ports[0], threads=1)
    for weights in spawn(in_job, 2, path, ports[1], threads=1):
        assert distance(weights, expected) < 1e-11


@pytest.mark.slow
def test_the_language_model_learns() -> None:
    assert train_language_model(steps=30) < 3.2  # it begins near the logarithm of 98 characters, 4.6


@pytest.mark.slow
def test_a_sweep_trains_with_each_combination_of_options_and_a_second_one_with_those_that_failed(
    tmp_path: Path,
) -> None:
    grid = {"network": ["mlp"], "num-epochs": [2], "lr": [0.1, 0.0001, "none"]}
    found = sweep(grid, DEVICES, str(tmp_path))
    good, bad, refused = found.values()
    assert (good or 0) > 0.8 > (bad or 0)
    assert refused is None
    folders = [tmp_path / name for name in found]
    assert "lr" in (folders[2] / "log.txt").read_text()
    log = (folders[0] / "log.txt").read_text()
    assert "Epoch[1] Validation-accuracy" in log
    assert {"net-best", "net.html"} <= {path.name for path in folders[0].iterdir()}
    (folders[1] / "accuracy.txt").unlink()  # as if it had been stopped after its last checkpoint
    assert sweep(grid, DEVICES, str(tmp_path)) == found
    assert (folders[0] / "log.txt").read_text() == log
    assert "Epoch[2]" not in (folders[1] / "log.txt").read_text()


@pytest.mark.slow
def test_optuna_finds_a_learning_rate_that_learns() -> None:
    pytest.importorskip("optuna", reason="needs optuna: pip install optuna")
    from sweep_optuna import main

    study = main(num_trials=8, num_epochs=2)
    assert len(study.trials) == 8
    assert study.best_value > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("program", ["publisher.py", "policy.py"])
def test_readers_follow_a_job_to_its_last_version(program: str, tmp_path: Path) -> None:
    examples, players = ROOT / "docs" / "examples", 2 if program == "policy.py" else 0
    folder = [str(tmp_path)] if players else []
    words = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--"]
    pipes = {"stderr": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen([*words, sys.executable, str(examples / program), *folder], **pipes) as job:
        assert job.stderr is not None
        while (found := re.search(r"readers attach at (\S+)", job.stderr.readline())) is None:
            assert job.poll() is None
        start = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, env=environment(), cwd=examples)
        commands = [["rollouts.py", found[1], *folder, str(player)] for player in range(players)]
        readers = [start([sys.executable, *command]) for command in commands or [["evaluator.py", found[1]]]]
        outputs = [one.communicate(timeout=60)[0].splitlines() for one in readers]
        assert job.wait(30) == 0
    for *lines, end in outputs:
        versions = [int(re.match(r"version (\d+): ", line)[1]) for line in lines]
        assert versions == sorted(versions)
        last = 40 if players else 60
        assert end.startswith(f"the job has ended; its last version is {last} ")
        assert versions[-1] == last or (players and versions[-1] > 20)  # a player may have played enough
        results = [float(re.search(r": \D*([\d.]+)", line)[1]) for line in lines[-4:]]
        assert sum(results) / 4 < 9 if players else results[-1] > 0.9  # steps, accuracy
