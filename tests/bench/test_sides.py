"""The driver and its processes: real ones, of a module that needs nothing but Python."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gangline.bench.sides import Candidate, Measured, Setting, Side, best_settings, measure_in_turn, ratio

from gangline.bench.peers import installed

PYTHON = Path(sys.executable)
TINY = """
import os, sys, time

def prepare(options):
    log = open(options["log"], "a")
    def step():
        print(options["name"], file=log, flush=True)
        end = time.perf_counter() + float(os.environ.get("WORK", options.get("work", 0)))
        while time.perf_counter() < end:  # a step that keeps its core busy for so many seconds
            pass
        if options.get("end"):
            print("the last words", file=sys.stderr, flush=True)
            os._exit(3)
    print("no answer")
    if options.get("refuse"):
        raise ValueError("no such store")
    return {"who": "tiny 1", "step": step, "wait": lambda: None, "check": lambda: 0.25}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, str]:
    """The environment in which `tiny` is a side's module."""
    (tmp_path / "tiny.py").write_text(TINY)
    return {"PYTHONPATH": str(tmp_path)}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_side_prepares_measures_and_checks(tiny: dict[str, str], tmp_path: Path) -> None:
    with Side("tiny", tiny, PYTHON) as side:
        options = {"name": "a", "log": str(tmp_path / "log"), "work": 0.001}
        assert side.prepare(options) == "tiny 1"
        assert side.measure(0.01) >= 0.001
        assert side.check() == 0.25
        assert side.prepare({**options, "name": "b"}) == "tiny 1"
        pid = side._process.pid
        assert alive(pid)
    assert not alive(pid)
    assert (tmp_path / "log").read_text().startswith("a\na\n")
    assert (tmp_path / "log").read_text().endswith("b\nb\n")


def test_a_sides_error_is_told_with_its_name_and_it_lives_on(tiny: dict[str, str], tmp_path: Path) -> None:
    options = {"name": "a", "log": str(tmp_path / "log")}
    with Side("tiny", tiny, PYTHON) as side:
        with pytest.raises(RuntimeError, match="side tiny failed: ValueError: no such store"):
            side.prepare({**options, "refuse": True})
        assert side.prepare(options) == "tiny 1"
    with (
        Side("nosuch", tiny, PYTHON) as side,
        pytest.raises(RuntimeError, match="nosuch failed: ModuleNotFoundError"),
    ):
        side.prepare(options)


def test_a_side_that_dies_leaves_its_last_words(tiny: dict[str, str], tmp_path: Path) -> None:
    with (
        Side("tiny", tiny, PYTHON) as side,
        pytest.raises(RuntimeError, match="side tiny ended with 3: the last words"),
    ):
        side.prepare({"name": "a", "log": str(tmp_path / "log"), "end": True})


def test_sides_end_when_the_driver_is_interrupted(tiny: dict[str, str], tmp_path: Path) -> None:
    pids = []

    def interrupted() -> None:
        with Side("tiny", tiny, PYTHON) as side:
            pids.append(side._process.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [alive(pid) for pid in pids] == [False]


def test_sides_end_when_the_driver_is_killed(tiny: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gangline.bench.sides import Side\n"
        f"side = Side('tiny', {tiny!r}, Path(sys.executable))\n"
        f"side.prepare({{'name': 'a', 'log': {str(tmp_path / 'log')!r}}})\n"
        "print(side._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    end = os.pidfd_open(pid)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert select.select([end], [], [], 30)[0]
    os.close(end)
    driver.stdin.close()
    driver.stdout.close()


def test_sides_are_measured_in_turn_at_the_quickest_setting(tiny: dict[str, str], tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    slow, quick = (Setting({**tiny, "WORK": work}) for work in ("0.02", "0.001"))
    candidates = [
        Candidate("tiny", {"name": "a", "log": log}, (slow, quick), PYTHON),
        Candidate("tiny", {"name": "b", "log": log}, (Setting(tiny),), PYTHON),
    ]
    settings = best_settings(candidates, 0.01)
    assert settings == [quick, Setting(tiny)]
    assert set(Path(log).read_text().split()) == {"a"}
    Path(log).write_text("")
    first, second = measure_in_turn(candidates, settings, 3, 0.002, check=True)
    assert (first.who, first.error, len(first.seconds), len(second.seconds)) == ("tiny 1", 0.25, 3, 3)
    steps = Path(log).read_text().split()
    turns = [name for place, name in enumerate(steps) if place == 0 or steps[place - 1] != name]
    assert turns == ["a", "b"] * 4  # once to prepare, then a turn a run


def test_the_ratio_is_the_median_of_neighbouring_runs() -> None:
    ours, theirs = (Measured("x", Setting(), seconds, None) for seconds in ([1.0, 2.0, 4.0], [3.0, 4.0, 40.0]))
    assert ratio(ours, theirs) == 3.0
    assert str(Setting({"OMP_NUM_THREADS": "1"}, {"store": "local"})) == "OMP_NUM_THREADS=1 store=local"


def test_a_peer_that_is_not_installed_is_skipped_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "_ROOT", tmp_path)
    assert installed.chosen("mxnet, torch,ddp,torch", "kvstore", on_gpus=False) == ["torch"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("skipping mxnet: ")
    assert printed[0].endswith("install it with `make peers`")
    assert printed[1] == "skipping ddp: it has no part in the kvstore bench"
    assert installed.chosen("", "training", on_gpus=False) == []
    assert installed.chosen("ddp,torch", "training", on_gpus=True) == ["torch"]
    with pytest.raises(ValueError, match="'horovod'; expected names out of mxnet, torch, ddp"):
        installed.chosen("torch,horovod", "training", on_gpus=False)


def test_an_installed_peer_runs_in_its_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_ROOT", tmp_path)
    python = installed.interpreter("mxnet")
    assert python is not None
    python.parent.mkdir(parents=True)
    python.touch()
    assert installed.chosen("mxnet", "training", on_gpus=False) == ["mxnet"]
    assert installed.interpreter("torch") is None


def test_settings_that_are_tried() -> None:
    threads = [setting.env["OMP_NUM_THREADS"] for setting in installed.settings("torch")]
    assert threads[0] == "1"
    assert int(threads[-1]) == os.cpu_count()
    assert len({str(setting) for setting in installed.settings("mxnet", ("local", "device"))}) == 12
    assert all(setting.env["OMP_NUM_THREADS"] for setting in installed.settings("ddp"))
