"""Scripts of other packages with one more line: the weights of two unequal ranks are those of one process."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from gangline.launcher.job import free_ports
from tests.collectives.processes import Processes, Rank
from tests.programs import python, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
ONE = ["--batch-size", "16"]
TWO = ["--batch-size", "8", "--loads", "3", "1"]
PACKAGES = {"accelerate_example": "accelerate", "lightning_boring": "lightning", "transformers_trainer": "transformers"}


def need(script: str) -> None:
    package = PACKAGES.get(script)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f'needs {package}: pip install ".[test]"')


def largest_difference(first: Path, second: Path) -> float:
    """Return the measure of the promise: the largest relative norm of a difference over all tensors."""
    left, right = torch.load(first), torch.load(second)
    assert left.keys() == right.keys()
    return max(
        float((left[name].double() - right[name].double()).norm() / max(float(right[name].double().norm()), 1e-12))
        for name in left
        if name != "losses"  # logged in float32
        and not name.endswith("key.bias")  # softmax does not depend on it: its gradient is rounding noise
    )


def train(script: str, ranks: int, output: Path, *arguments: str) -> None:
    """Run a script over gangline's backend: torch 2.13 over gloo aborts now and then when its processes end."""
    command = torchrun("-m", "gangline", "run", SCRIPTS / f"{script}.py", output, *arguments, ranks=ranks)
    python(*command, cwd=output.parent, code=0)


def run_script(rank: Rank, script: str, folder: str, ports: list[int]) -> None:
    """Run a script as rank 0 or 1 of two, or alone."""
    jobs = [(0, 2), (1, 2), (0, 1)]
    place, world = jobs[rank.rank]
    os.environ.update(
        RANK=str(place),
        LOCAL_RANK=str(place),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports[world - 1]),
        TORCHELASTIC_RUN_ID="none",
    )
    os.chdir(folder)
    sys.argv = [script, f"{folder}/{world}.pt", *(TWO if world == 2 else ONE)]
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    rank.tell("done")


def test_two_unequal_ranks_train_as_one_process(tmp_path: Path) -> None:
    """The scripts of the other packages take seconds longer to start; they run under torchrun."""
    need("accelerate_example")
    with Processes(run_script, 3, "accelerate_example", str(tmp_path), free_ports(2), limit=100) as processes:
        assert processes.all_heard() == ["done"] * 3
    assert largest_difference(tmp_path / "2.pt", tmp_path / "1.pt") < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "both", "two"),
    [
        ("accelerate_example", [], []),
        ("accelerate_example", [], ["--split-batches", "--batch-size", "16"]),
        ("accelerate_example", [], ["--resume"]),
        ("lightning_boring", [], []),
        ("lightning_boring", ["--find-rate"], []),
        ("transformers_trainer", ["--model", "llama"], []),
        ("transformers_trainer", ["--model", "bert"], []),
        ("transformers_trainer", ["--model", "own"], []),
    ],
    ids=lambda value: "-".join(value).strip("-") or "plain" if isinstance(value, list) else value,
)
def test_two_unequal_ranks_under_torchrun_train_as_one_process(
    script: str, both: list[str], two: list[str], tmp_path: Path
) -> None:
    need(script)
    train(script, 1, tmp_path / "1.pt", *ONE, *both)
    train(script, 2, tmp_path / "2.pt", *TWO, *both, *two)
    assert largest_difference(tmp_path / "2.pt", tmp_path / "1.pt") < 1e-11
    if script == "transformers_trainer":
        logged = [torch.load(tmp_path / name)["losses"] for name in ("2.pt", "1.pt")]
        assert torch.allclose(*logged, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is built from source")
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_two_unequal_ranks_of_deepspeed_train_as_one_process(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for ranks, arguments in ((1, ONE), (2, TWO)):
        train("deepspeed_zero", ranks, tmp_path / f"{ranks}.pt", *arguments, "--stage", stage)
    assert largest_difference(tmp_path / "2.pt", tmp_path / "1.pt") < 1e-6  # stage 0 refuses float64


@pytest.mark.slow
def test_a_trainer_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    need("transformers_trainer")
    train("transformers_trainer", 2, tmp_path / "whole.pt", *TWO, "--model", "own", "--max-steps", "4")
    resume = ["--resume", "trainer/checkpoint-3", "--folder", "resumed"]
    train("transformers_trainer", 2, tmp_path / "resumed.pt", *TWO, "--model", "own", "--max-steps", "4", *resume)
    assert largest_difference(tmp_path / "resumed.pt", tmp_path / "whole.pt") < 1e-11


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lightning_resumes_as_with_a_plain_loader(tmp_path: Path) -> None:
    need("lightning_boring")
    for ranks, arguments in ((1, ONE), (2, TWO)):
        begun = tmp_path / f"begun{ranks}.pt"
        train("lightning_boring", ranks, begun, *arguments, "--max-steps", "1")
        train("lightning_boring", ranks, tmp_path / f"{ranks}.pt", *arguments, "--resume", f"{begun}.ckpt")
    assert largest_difference(tmp_path / "2.pt", tmp_path / "1.pt") < 1e-11


# Packages that create their own process groups


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_layers_that_transformers_splits_over_ranks_give_what_one_rank_does() -> None:
    done = python(*torchrun("-m", "gangline", "run", SCRIPTS / "tensor_parallel.py"), code=0)
    assert done.stdout.count("gangline (32, 32) True") == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="needs torchrec: pip install torchrec fbgemm-gpu-cpu"
)
def test_tables_that_torchrec_splits_over_ranks_train_as_over_gloo() -> None:
    found = {}
    for backend, prefix in (("gloo", ()), ("gangline", ("-m", "gangline", "run"))):
        done = python(*torchrun(*prefix, SCRIPTS / "torchrec_embeddings.py"), code=0)
        name, loss = done.stdout.splitlines()[-1].split()
        found[name] = loss
        assert name == backend
    assert found["gloo"] == found["gangline"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_ray_train_takes_the_backend_by_its_name() -> None:
    if not any(one.name == "gangline" for one in entry_points(group="torch.backends")):
        pytest.skip("the installed gangline has no entry points; expected pip install -e .")
    done = python(SCRIPTS / "ray_train.py", code=0)
    assert "trained by DistributedDataParallel over gangline, equal: True" in done.stdout
