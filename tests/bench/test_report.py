"""Tables, JSON, comparison and plots of artificial rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.bench.report.compare import ratios
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import spread
from gangline.cli.bench import bench

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
