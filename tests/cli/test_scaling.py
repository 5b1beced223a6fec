"""`gangline train --advise`: fits of step times, and what they advise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.cli.training.scaling import Check, ContextCount, Scaling, _pays_from
from gangline.models.load_balance.speed_model import LinearFit
from tests.kvstore.test_launch import ROOT

ONE, TWO = LinearFit(0.001, 0.0001), LinearFit(0.003, 0.00005)  # they meet at 40 samples


def gangline(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangline", *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def scaling(batch_size: int, *fits: LinearFit) -> Scaling:
    counts = [ContextCount(number, fit, _pays_from(fit, fits[: number - 1])) for number, fit in enumerate(fits, 1)]
    return Scaling(batch_size, tuple(counts))


def test_two_contexts_with_a_larger_fixed_cost_win_from_where_the_lines_meet() -> None:
    found = scaling(16, ONE, TWO)
    assert [one.pays_from for one in found.counts] == [1, 41]
    assert found.best.contexts == 1
    assert found.verdict.endswith("from 41 samples on they win: --batch-size 128")


def test_all_contexts_are_kept_where_they_win() -> None:
    found = scaling(256, ONE, TWO)
    assert found.best.contexts == 2
    assert "1.68 times as fast as one at batch size 256: keep them" in found.verdict


def test_contexts_that_share_the_same_cores_never_win() -> None:
    found = scaling(64, ONE, LinearFit(0.003, 0.0001))
    assert found.counts[1].pays_from is None
    assert found.verdict.endswith("no batch size makes them faster: train on 1")


def test_the_error_of_a_prediction_is_relative_to_what_was_measured() -> None:
    assert Check(1, 64, 0.011, 0.010).error == pytest.approx(0.1)


def test_train_advise_measures_every_number_of_contexts_and_trains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    done = gangline("train", "--network", "mlp", "--cpus", "2", "--batch-size", "16", "--verify", "--json", str(path))
    found = json.loads(path.read_text())
    assert [one["contexts"] for one in found["counts"]] == [1, 2]
    assert {(one["contexts"], one["batch_size"]) for one in found["checks"]} >= {(1, 16), (2, 16), (1, 32), (2, 32)}
    assert f"Verdict: {found['verdict']}" in done.stdout
    assert "Validation-accuracy" not in done.stdout


def test_train_advise_in_a_job_names_gangline_advise() -> None:
    done = gangline("train", "--advise", "--kv-store", "allreduce", code=2)
    assert "see gangline advise" in done.stderr
