"""Sweeps: many trials over all devices."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gangline import Trial, cpu, sweep
from gangline.sweeps.queue import Place, is_worse_than_median, takes_next
from gangline.sweeps.sweep import _folder_name
from gangline.sweeps.trial import State, TrialResult
from tests.kvstore.test_launch import ROOT

SCRIPT = """
import os, sys, time
from pathlib import Path
from gangline import cpu, sweep

def train(trial):
    with open("begun.txt", "a") as file:
        file.write(f"{trial.number}\\n")
    for step in range(1, 5):
        time.sleep(0.05)
        trial.report(step, trial.parameters["x"] * step)
    return trial.parameters["x"]

if __name__ == "__main__":
    print(sweep(train, {"x": list(range(12))}, [cpu(0), cpu(1)]).best.number)
"""


def reports(trial: Trial) -> float:
    (trial.folder / "context").write_text(",".join(map(str, trial.contexts)))
    for step in range(1, 4):
        trial.report(step, trial.parameters["x"] + step / 10)
    return float(trial.parameters["x"])


def fails_at_2(trial: Trial) -> float | None:
    if trial.parameters["x"] == 2:
        raise ValueError("two is not trained")
    if trial.parameters["x"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    trial.report(1, trial.parameters["x"])
    return None


def counts(trial: Trial) -> float:
    with (trial.folder.parent / "runs").open("a") as file:
        file.write(f"{trial.number}\n")
    if trial.parameters["x"] == 1 and not (trial.folder.parent / "mended").exists():
        raise ValueError("not mended")
    return float(trial.parameters["x"])


def diverges(trial: Trial) -> float:
    return 1.0 if trial.parameters["x"] == 1 else float("nan")


def slow_and_bad(trial: Trial) -> float:
    is_bad = not trial.parameters["x"]
    for steps in range(1, 2001 if is_bad else 31):
        while is_bad and len(list(trial.folder.parent.glob("*/ended"))) < 3:
            time.sleep(0.01)
        time.sleep(0.05 * is_bad)
        trial.report(steps, float(trial.parameters["x"]))
    (trial.folder / "ended").touch()
    return 30.0


def test_every_combination_runs_once_and_results_stand_in_table_csv_and_page(tmp_path: Path) -> None:
    found = sweep(reports, {"x": [1, 2], "y": ["a", "b"]}, [cpu(0), cpu(1)], folder=tmp_path)
    assert [trial.parameters for trial in found.trials] == [{"x": x, "y": y} for x in (1, 2) for y in ("a", "b")]
    assert [trial.value for trial in found.trials] == [1.0, 1.0, 2.0, 2.0]
    assert found.best.number == 2
    assert found.trials[3].curve == [(1, 2.1), (2, 2.2), (3, 2.3)]
    assert {trial.contexts for trial in found.trials} == {"cpu(0)", "cpu(1)"}
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [row["metric"] for row in rows] == ["1.0", "1.0", "2.0", "2.0"]
    page = (tmp_path / "sweep.html").read_text()
    assert page.count("<polyline") == 4
    assert "4 of 4 trials have ended: 4 done" in page
    assert "refresh" not in page
    assert str(found).splitlines()[1].split()[:4] == ["0", "1", "a", "done"]


def test_a_trial_that_fails_or_is_killed_ends_alone(tmp_path: Path) -> None:
    found = sweep(fails_at_2, [{"x": x} for x in range(5)], [cpu(0), cpu(1)], folder=tmp_path, mode="min")
    assert [trial.state for trial in found.trials] == ["done", "done", "failed", "failed", "done"]
    assert found.trials[2].error.endswith("ValueError: two is not trained\n")
    assert found.trials[3].error == "its process ended with exit code -9"
    assert found.best.number == 0
    assert found.trials[4].value == 4.0  # the best that it reported


def test_a_second_run_runs_only_what_has_not_ended_and_failed_ones_on_request(tmp_path: Path) -> None:
    sweep(counts, {"x": [0, 1]}, cpu(), folder=tmp_path)
    with pytest.raises(
        ValueError, match=r"holds trials of 'counts of .*test_sweep', not of 'diverges of .*test_sweep'"
    ):
        sweep(diverges, {"x": [0, 1]}, cpu(), folder=tmp_path)
    sweep(counts, {"x": [0, 1, 2]}, cpu(), folder=tmp_path)
    assert (tmp_path / "runs").read_text().split() == ["0", "1", "2"]
    (tmp_path / "mended").touch()
    found = sweep(counts, {"x": [0, 1, 2]}, cpu(), folder=tmp_path, retry_failed=True)
    assert (tmp_path / "runs").read_text().split() == ["0", "1", "2", "1"]
    assert [trial.state for trial in found.trials] == [State.DONE] * 3


def test_contexts_per_trial_gives_each_trial_its_own_group(tmp_path: Path) -> None:
    found = sweep(reports, {"x": [1, 2]}, [cpu(0), cpu(1), cpu(2), cpu(3)], folder=tmp_path, contexts_per_trial=2)
    assert {trial.contexts for trial in found.trials} == {"cpu(0), cpu(1)", "cpu(2), cpu(3)"}
    assert (tmp_path / "x=1" / "context").read_text() == found.trials[0].contexts.replace(" ", "")


def test_early_stopping_ends_the_trial_that_is_worse_than_the_median(tmp_path: Path) -> None:
    found = sweep(slow_and_bad, {"x": [0, 5, 6, 7]}, [cpu(i) for i in range(4)], folder=tmp_path, early_stopping=True)
    assert [trial.state for trial in found.trials] == ["stopped", "done", "done", "done"]
    assert 2 <= len(found.trials[0].curve) < 2000
    assert found.best.value == 30.0


@pytest.mark.slow
def test_a_killed_sweep_goes_on_without_doing_any_trial_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    results = tmp_path / "sweep" / "trials.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as first:
        while not results.exists() or len(results.read_text().splitlines()) < 4:
            assert first.poll() is None
            time.sleep(0.01)
        first.kill()
    ended = {json.loads(line)["number"] for line in results.read_text().splitlines()}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "11"
    begun = [int(line) for line in (tmp_path / "begun.txt").read_text().split()]
    assert set(begun) == set(range(12))
    twice = {number for number in begun if begun.count(number) > 1}
    assert not twice & ended
    assert len(twice) <= 2  # those that ran when the sweep was killed
    numbers = [json.loads(line)["number"] for line in results.read_text().splitlines()]
    assert sorted(numbers) == list(range(12))


def test_a_line_that_was_cut_off_is_run_again_and_spoils_no_other(tmp_path: Path) -> None:
    sweep(counts, {"x": [0, 2]}, cpu(), folder=tmp_path)
    results = tmp_path / "trials.jsonl"
    results.write_text(results.read_text()[:-20])
    for _ in range(2):
        found = sweep(counts, {"x": [0, 2]}, cpu(), folder=tmp_path)
        assert [trial.value for trial in found.trials] == [0.0, 2.0]
    assert (tmp_path / "runs").read_text().split() == ["0", "1", "1"]


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    found = sweep(diverges, {"x": [0, 1, 2]}, cpu(), folder=tmp_path)
    assert found.best.number == 1
    assert sweep(diverges, {"x": [0, 1, 2]}, cpu(), folder=tmp_path).best.number == 1
    with pytest.raises(ValueError, match="no trial has ended with a metric"):
        sweep(diverges, {"x": [0]}, cpu(), folder=tmp_path).best  # noqa: B018


def test_folders_are_named_by_parameters() -> None:
    assert _folder_name({"lr": 0.1, "network": "mlp"}) == "lr=0.1,network=mlp"
    names = {_folder_name({"path": path}) for path in ("a/b", "a b", "a" * 200, "a" * 201)}
    assert len(names) == 4
    assert all("/" not in name and len(name) < 100 for name in names)


def test_two_sweeps_in_one_folder_and_a_bad_grid_are_refused(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "trials.jsonl").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another sweep runs in"):
            sweep(counts, {"x": [1]}, cpu(), folder=tmp_path)
    grids: list[tuple[Any, type[Exception], str]] = [
        ({}, ValueError, "one value or more"),
        ({"x": []}, ValueError, "one value or more"),
        ([{"x": 1}, {"x": 1}], ValueError, "twice"),
        ({"x": [object()]}, ValueError, "not plain data"),
        ({"x": "ab"}, TypeError, r"grid\['x'\] is .*; expected a list of values"),
        ({"x": 0.1}, TypeError, r"grid\['x'\] is .*; expected a list of values"),
    ]
    for grid, error, message in grids:
        with pytest.raises(error, match=message):
            sweep(counts, grid, cpu(), folder=tmp_path)
    with pytest.raises(ValueError, match="contexts_per_trial is 2; expected 1 to 1"):
        sweep(counts, {"x": [1]}, cpu(), folder=tmp_path, contexts_per_trial=2)


@pytest.mark.parametrize(("waiting", "takes"), [(9, True), (4, True), (2, False), (1, False)])
def test_a_slow_place_leaves_the_last_trials_to_a_fast_one(waiting: int, takes: bool) -> None:
    fast, slow = Place("fast", [1.0, 1.0], busy_since=10.0), Place("slow", [4.0])
    assert takes_next(slow, [fast], waiting, 10.0) is takes  # the fast one ends in 1 s, and then one trial a second


def test_a_fast_place_and_one_without_a_trial_so_far_take_the_next() -> None:
    fast, slow, new = Place("fast", [1.0]), Place("slow", [4.0], busy_since=0.0), Place("new")
    assert takes_next(fast, [slow, new], 1, 0.0)
    assert takes_next(new, [fast, slow], 1, 0.0)


def test_the_median_rule_needs_two_reports_and_three_others() -> None:
    others = [TrialResult(number, {}, curve=[(1, value), (2, value)]) for number, value in enumerate((5.0, 6.0, 7.0))]
    bad = TrialResult(9, {}, curve=[(1, 1.0), (2, 2.0)])
    assert is_worse_than_median(bad, others, maximize=True)
    assert not is_worse_than_median(bad, others, maximize=False)
    assert not is_worse_than_median(bad, others[:2], maximize=True)
    assert not is_worse_than_median(TrialResult(9, {}, curve=[(1, 1.0)]), others, maximize=True)


def returns_no_metric(trial: Trial) -> float | None:
    return None if trial.parameters["x"] else "good"  # type: ignore[return-value]


def test_a_trial_without_a_metric_has_failed_and_says_so(tmp_path: Path) -> None:
    found = sweep(returns_no_metric, {"x": [0, 1]}, cpu(), folder=tmp_path)
    assert [trial.state for trial in found.trials] == ["failed", "failed"]
    assert found.trials[0].error.endswith("TypeError: the function returned 'good'; expected the metric, a number\n")
    assert found.trials[1].error.endswith("returned None and reported nothing; expected the metric\n")


def test_a_function_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to other processes.*__name__ == \"__main__\""):
        sweep(lambda _: 0.0, {"x": [1]}, cpu(), folder=tmp_path)


@pytest.mark.slow
def test_a_script_without_a_main_part_is_told_so_and_no_trial_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from gangline import cpu, sweep\ndef f(trial): return 1.0\nsweep(f, {'x': [1]}, cpu())\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'sweep() in its main part alone: if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert not (tmp_path / "sweep" / "trials.jsonl").read_text()
