"""The benches' driver, with real processes of programs that need nothing but Python and numpy, and their reports."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from gangline.bench.driver import installed
from gangline.bench.driver.harness import Entry, fastest_candidates, measure_in_turn
from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.bench.report.compare import ratios
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import spread
from gangline.cli.bench import bench

ROOT = Path(installed.__file__).resolve().parents[2]
TINY = """
import os, signal, sys, time

def join():
    print("the last words", file=sys.stderr, flush=True)
    if os.environ.get("REFUSE"):
        raise OSError("nobody is here")
    if os.environ.get("END"):
        os._exit(3)
    return {"who": "tiny 1", "prepare": prepare}

def prepare(options):
    log = open(options["log"], "a")
    def step():
        print(options["name"], file=log, flush=True)
        end = time.perf_counter() + float(os.environ.get("WORK", options.get("work", 0)))
        while time.perf_counter() < end:  # a step that keeps its core busy for so many seconds
            pass
        if options.get("end"):
            os._exit(3)
        if options.get("hang"):
            open(options["hang"], "w").close()
            signal.pause()
    return {"step": step, "check": lambda: 0.25}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """The path of a program of one process."""
    (tmp_path / "tiny.py").write_text(TINY)
    return str(tmp_path / "tiny")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_prepares_measures_and_checks(tiny: str, log: Path) -> None:
    with RankGroup(Candidate(tiny)) as group:
        options = {"name": "a", "log": str(log), "work": 0.001}
        assert group.prepare(options) >= 0.001
        assert (group.who, group.transport) == ("tiny 1", None)
        assert group.seconds(group.steps_in(0.01)) >= 0.001
        assert group.error() == 0.25
        group.prepare({**options, "name": "b"})
        (pid,) = group._processes.pids.values()
        assert alive(pid)
    assert not alive(pid)
    assert log.read_text().startswith("a\na\n")
    assert log.read_text().endswith("b\nb\n")


def test_a_process_that_exits_leaves_its_last_words(tiny: str, log: Path) -> None:
    with RankGroup(Candidate(tiny)) as group, pytest.raises(GroupError, match=r"tiny[:,] rank 0 ended: the last words"):
        group.prepare({"name": "a", "log": str(log), "end": True})
    with pytest.raises(GroupError, match="tiny did not start: OSError: nobody is here"):
        RankGroup(Candidate(tiny, env={"REFUSE": "1"}))
    with pytest.raises(GroupError, match=r"tiny.*: the last words"):
        RankGroup(Candidate(tiny, env={"END": "1"}))
    with pytest.raises(GroupError, match="nosuch did not start: FileNotFoundError"):
        RankGroup(Candidate(str(Path(tiny).with_name("nosuch"))))


@pytest.mark.parametrize("hanging", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_processes_end_when_the_driver_is_killed(tiny: str, log: Path, tmp_path: Path, hanging: bool) -> None:
    step = tmp_path / "step"
    os.mkfifo(step)
    options = {"name": "a", "log": str(log), "hang": str(step) if hanging else None}
    code = (
        "import sys; from gangline.bench.driver.processes import Candidate\n"
        "from gangline.bench.driver.rank_group import RankGroup\n"
        f"group = RankGroup(Candidate({tiny!r}))\n"
        "print(*group._processes.pids.values(), group._listener.getsockname(), flush=True)\n"
        f"group.prepare({options!r}); print('prepared', flush=True); sys.stdin.read()\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pid, path = driver.stdout.readline().split()
    end = os.pidfd_open(int(pid))
    if hanging:
        step.read_text()  # returns when the process is in its step
    else:
        driver.stdout.readline()
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert select.select([end], [], [], 30)[0]
    os.close(end)
    driver.stdin.close()
    driver.stdout.close()
    shutil.rmtree(Path(path).parent)


def test_candidates_are_measured_in_turn_at_the_fastest_setting(tiny: str, log: Path) -> None:
    slow, fast = (Candidate(tiny, env={"WORK": work}, setting=work) for work in ("0.02", "0.001"))
    entries = {
        1: Entry([slow, fast], {"name": "a", "log": str(log)}),
        2: Entry([Candidate(tiny)], {"name": "b", "log": str(log)}),
    }
    chosen = fastest_candidates(entries, 0.01)
    assert chosen == {1: fast, 2: Candidate(tiny)}
    assert set(log.read_text().split()) == {"a"}
    log.write_text("")
    first, second = measure_in_turn(entries, chosen, 3, 0.002, check=True).values()
    assert (first.who, first.error, first.setting) == ("tiny 1", 0.25, "0.001")
    assert (len(first.seconds), len(second.seconds)) == (3, 3)
    steps = log.read_text().split()
    turns = [name for number, name in enumerate(steps) if number == 0 or steps[number - 1] != name]
    assert turns == ["a", "b"] * 4  # once to prepare, then a turn per run


def test_a_peer_that_is_not_installed_is_skipped_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "_ROOT", tmp_path)
    assert installed.available_peers("mxnet, torch,ddp,torch", "kvstore") == ["torch"]
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("skipping mxnet: ")
    assert printed[0].endswith("install it with `make peers`")
    assert printed[1] == "skipping ddp: it does not take part in the kvstore bench"
    assert installed.available_peers("", "training") == []
    assert installed.available_peers("ddp,torch", "training", on_gpus=True) == ["torch"]
    assert installed.available_peers("ddp,torch", "training", among=("ddp",)) == ["ddp"]
    with pytest.raises(ValueError, match="'horovod'; expected names out of mxnet, torch, ddp"):
        installed.available_peers("torch,horovod", "training")


# Tables, JSON, comparison and plots of artificial rows


MACHINE = {"cpu": "x", "cores": 2}


def row(who: str, seconds: float, **description: Any) -> dict[str, Any]:
    return {
        "who": who,
        "setting": None,
        "store": "local",
        "contexts": 2,
        **description,
        "seconds": seconds,
        "gb_per_s_per_device": 0.1 / seconds,
        "error": 0.0,
        "p50": seconds,
        "min": seconds / 2,
        "p99": seconds * 2,
        "max": seconds * 2,
        "runs": 3,
    }


def rate(who: str, samples: float) -> dict[str, Any]:
    return {"who": who, "network": "lenet", "contexts": 1, "samples_per_s": samples, **spread([samples])}


def test_spread_is_median_and_ends() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == {"p50": 2.5, "min": 1.0, "p99": 10.0, "max": 10.0, "runs": 4}
    assert spread(range(1, 201))["p99"] == 198


def test_results_are_command_machine_and_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["gangline", "bench", "x"])
    publish([row("gangline", 0.5), row("mxnet 1.9.1", 1.0, setting="a=1")], path)
    result = json.loads(path.read_text())
    assert list(result) == ["command", "machine", "rows"]
    assert set(result["machine"]) == {"cpu", "cores", "memory_gb", "gpu", "python", "torch", "gangline"}
    assert result["rows"][1]["who"] == "mxnet 1.9.1"
    printed = capsys.readouterr().out
    assert "gangline bench x" in printed
    assert "a=1" in printed


def test_ratios_are_above_one_where_the_second_is_better() -> None:
    found, alone = ratios(
        [row("gangline", 1.0), row("gangline", 3.0, store="device"), rate("torch", 100.0)],
        [rate("torch", 150.0), row("gangline", 0.5, setting="other"), row("mxnet", 3.0)],
    )
    assert [(each["who"], each["figure"], each["times_as_fast"]) for each in found] == [
        ("torch", "samples_per_s", 1.5),
        ("gangline", "seconds", 2.0),
    ]
    assert [[each["who"], each["store"]] for (each,) in alone] == [["gangline", "device"], ["mxnet", "local"]]


def written(path: Path, rows: list[dict[str, Any]], **machine: Any) -> str:
    path.write_text(json.dumps({"command": "c", "machine": {**MACHINE, **machine}, "rows": rows}))
    return str(path)


def test_compare_prints_ratios_and_what_differs(tmp_path: Path) -> None:
    first = written(tmp_path / "A.json", [row("gangline", 1.0), row("mxnet", 2.0)])
    second = written(tmp_path / "B.json", [row("gangline", 0.25)], cores=4)
    done = CliRunner().invoke(bench, ["compare", first, second])
    assert done.exit_code == 0
    assert "times as fast" in done.output
    assert "who mxnet, store local, contexts 2" in done.output
    assert "different machines: cores differ" in done.output


def test_compare_rejects_files_of_no_bench_and_results_without_a_common_row(tmp_path: Path) -> None:
    good = written(tmp_path / "A.json", [row("gangline", 1.0)])
    bad = tmp_path / "B.json"
    written(bad, [rate("gangline", 1.0)])
    for text, message in (
        (bad.read_text(), "no row in common"),
        ("{", "B.json is not JSON"),
        ("[]", "no command, machine and rows"),
    ):
        bad.write_text(text)
        done = CliRunner().invoke(bench, ["compare", good, str(bad)])
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)


def test_unwritable_outputs_are_errors_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_outputs(None, None)
    check_outputs(tmp_path / "a.json", None)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check_outputs(tmp_path / "nowhere" / "a.json", None)
    with pytest.raises(ValueError, match=r"ends in \.png"):
        check_outputs(None, tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r'pip install "gangline\[bench\]"'):
        check_outputs(None, tmp_path / "a.png")
