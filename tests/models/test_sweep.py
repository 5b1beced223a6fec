"""Sweeps: many trials over all devices."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gangline import cpu
from gangline.trials import Trial, _folder_name, sweep
from tests.programs import environment

SCRIPT = """
import time
from gangline import cpu
from gangline.trials import sweep

def train(trial):
    with open("begun.txt", "a") as file:
        file.write(f"{trial.parameters['x']}\\n")
    time.sleep(0.2)
    return trial.parameters["x"]

if __name__ == "__main__":
    print(max(trial.value for trial in sweep(train, {"x": list(range(12))}, [cpu(0), cpu(1)])))
"""


def adds(trial: Trial) -> float:
    (trial.folder / "context").write_text(",".join(map(str, trial.contexts)))
    return float(trial.parameters["x"] + trial.parameters["y"])


def fails_from_2(trial: Trial) -> Any:
    if trial.parameters["x"] == 2:
        raise ValueError("two is not trained")
    if trial.parameters["x"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {4: float("nan"), 5: "good", 6: None}.get(trial.parameters["x"], 1)


def counts(trial: Trial) -> float:
    with (trial.folder.parent / "runs").open("a") as file:
        file.write(f"{trial.parameters['x']}\n")
    if trial.parameters["x"] == 1 and not (trial.folder.parent / "mended").exists():
        raise ValueError("not mended")
    return float(trial.parameters["x"])


@pytest.mark.slow
def test_a_trial_that_fails_or_is_killed_ends_alone(tmp_path: Path) -> None:
    found = sweep(fails_from_2, {"x": [1, 2, 3, 4, 5, 6, 7]}, cpu(), folder=tmp_path)
    assert [trial.value for trial in found] == [1, None, None, None, None, None, 1]
    assert found[1].error.endswith("ValueError: two is not trained\n")
    assert found[2].error == "its process ended with exit code -9"
    assert found[3].error.endswith("ValueError: the metric is nan\n")
    assert all("Error: " in found[place].error for place in (4, 5))


@pytest.mark.slow
def test_a_second_run_runs_only_trials_without_a_metric(tmp_path: Path) -> None:
    sweep(counts, {"x": [0, 1]}, cpu(), folder=tmp_path)
    with pytest.raises(ValueError, match="has trials of counts, not of 'adds'; expected another folder"):
        sweep(adds, {"x": [0, 1]}, cpu(), folder=tmp_path)
    (tmp_path / "mended").touch()
    for _ in range(2):
        found = sweep(counts, {"x": [0, 1, 2]}, cpu(), folder=tmp_path)
        assert [trial.value for trial in found] == [0, 1, 2]
    assert (tmp_path / "runs").read_text().split() == ["0", "1", "1", "2"]


def test_contexts_per_trial_gives_each_trial_its_own_group(tmp_path: Path) -> None:
    """Every combination runs once, and has a folder and a line."""
    contexts = [cpu(0), cpu(1), cpu(2), cpu(3)]
    found = sweep(adds, {"x": [1, 2], "y": [0.5]}, contexts, folder=tmp_path, contexts_per_trial=2)
    assert [trial.value for trial in found] == [1.5, 2.5]
    assert [dict(trial.parameters) for trial in found] == [{"x": 1, "y": 0.5}, {"x": 2, "y": 0.5}]
    assert {trial.contexts for trial in found} == {(cpu(0), cpu(1)), (cpu(2), cpu(3))}
    for trial in found:
        folder = tmp_path / f"x={trial.parameters['x']},y={trial.parameters['y']}"
        assert (folder / "context").read_text() == ",".join(map(str, trial.contexts))
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert sorted(line["value"] for line in lines) == [1.5, 2.5]


def run_script(folder: Path, text: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_is_killed_or_interrupted_goes_on_without_doing_any_trial_twice(
    tmp_path: Path, stop: signal.Signals
) -> None:
    results = tmp_path / "sweep" / "trials.jsonl"
    with run_script(tmp_path, SCRIPT) as first:
        while not results.exists() or len(results.read_text().splitlines()) < 4:
            assert first.poll() is None
            time.sleep(0.01)
        children = psutil.Process(first.pid).children(recursive=True)
        os.kill(first.pid, stop)
        first.communicate(timeout=60)
    assert not psutil.wait_procs(children, timeout=60)[1]
    ended = {json.loads(line)["parameters"]["x"] for line in results.read_text().splitlines()}
    with run_script(tmp_path, SCRIPT) as second:
        assert second.communicate(timeout=60)[0].strip() == "11.0"
    begun = [int(line) for line in (tmp_path / "begun.txt").read_text().split()]
    assert set(begun) == set(range(12))
    twice = {number for number in begun if begun.count(number) > 1}
    assert not twice & ended
    assert len(twice) <= 2  # those that ran when the sweep ended


@pytest.mark.slow
def test_a_script_without_a_main_part_is_told_so_and_no_trial_is_recorded(tmp_path: Path) -> None:
    imports = "from gangline import cpu; from gangline.trials import sweep"
    text = f"{imports}\ndef f(trial): return 1.0\nsweep(f, {{'x': [1]}}, cpu())\n"
    with run_script(tmp_path, text) as script:
        errors = script.communicate(timeout=60)[1]
    assert script.returncode == 1
    assert 'expected sweep() in the main part of a script: if __name__ == "__main__":' in errors.splitlines()[-1]
    assert not (tmp_path / "sweep" / "trials.jsonl").read_text()


def test_folders_are_named_by_parameters() -> None:
    assert _folder_name({"lr": 0.1, "network": "mlp"}) == "lr=0.1,network=mlp"
    names = {_folder_name({"path": path}) for path in ("a/b", "a b", "a" * 200, "a" * 201)}
    assert len(names) == 4
    assert all("/" not in name and len(name) < 100 for name in names)


REFUSALS: list[tuple[dict[str, Any], int, type[Exception], str]] = [
    ({}, 1, ValueError, "one value or more"),
    ({"x": []}, 1, ValueError, "one value or more"),
    ({"x": [1, 1]}, 1, ValueError, "none twice"),
    ({"x": [object()]}, 1, TypeError, "not JSON serializable"),
    ({"x": 0.1}, 1, TypeError, "not iterable"),
    ({"x": [1]}, 2, ValueError, "contexts_per_trial is 2; expected 1 to 1"),
]


def test_a_bad_grid_and_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    for grid, size, error, message in REFUSALS:
        with pytest.raises(error, match=message):
            sweep(counts, grid, cpu(), folder=tmp_path, contexts_per_trial=size)
    with (tmp_path / "trials.jsonl").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another sweep runs in"):
            sweep(counts, {"x": [1]}, cpu(), folder=tmp_path)
