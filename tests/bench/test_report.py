"""Tables, JSON, comparison and plot, on made-up rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gangline.bench.compare import ratios
from gangline.bench.figures import describing, figure
from typer.testing import CliRunner

from gangline.bench import plot
from gangline.bench.report import check_outputs, publish, spread
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


def test_results_are_command_machine_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    publish("gangline bench x", [row("gangline", 0.5), row("mxnet 1.9.1", 1.0, setting="a=1")], path)
    result = json.loads(path.read_text())
    assert list(result) == ["command", "machine", "rows"]
    assert set(result["machine"]) == {"cpu", "cores", "memory_gb", "gpu", "python", "torch", "gangline"}
    assert result["rows"][1]["who"] == "mxnet 1.9.1"
    printed = capsys.readouterr().out
    assert "gangline bench x" in printed
    assert "a=1" in printed


def test_rows_are_described_by_what_no_run_changes() -> None:
    assert describing(row("gangline", 0.5, call="pushpull")) == {
        "who": "gangline",
        "store": "local",
        "contexts": 2,
        "call": "pushpull",
    }
    assert figure(row("gangline", 0.5)) == ("seconds", False)
    assert figure(rate("gangline", 100.0)) == ("samples_per_s", True)
    assert figure({"who": "gangline --help", "p50": 0.4}) == ("p50", False)


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
    assert "times_as_fast" in done.output
    assert "who mxnet, store local, contexts 2" in done.output
    assert "unlike machines: cores differ" in done.output


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("[]", "no command, machine and rows"), ("{}", "no command")]
)
def test_compare_refuses_what_no_bench_wrote(tmp_path: Path, text: str, message: str) -> None:
    good = written(tmp_path / "A.json", [row("gangline", 1.0)])
    bad = tmp_path / "B.json"
    bad.write_text(text)
    done = CliRunner().invoke(bench, ["compare", good, str(bad)])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert "B.json" in str(done.exception)


def test_compare_refuses_results_that_share_no_row(tmp_path: Path) -> None:
    first = written(tmp_path / "A.json", [row("gangline", 1.0)])
    second = written(tmp_path / "B.json", [rate("gangline", 1.0)])
    done = CliRunner().invoke(bench, ["compare", first, second])
    assert isinstance(done.exception, ValueError)
    assert "no row in common" in str(done.exception)


def test_plot_is_a_png_with_a_label_for_what_differs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "gangline[bench]"')
    path = tmp_path / "rows.png"
    rows = [row("gangline", 1.0), row("mxnet 1.9.1", 2.0), row("gangline", 1.5, contexts=4)]
    plot.draw("gangline bench x " + "--option value " * 30, rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot._labels(rows) == ["gangline, contexts 2", "mxnet 1.9.1, contexts 2", "gangline, contexts 4"]
    with pytest.raises(ValueError, match="no rows"):
        plot.draw("x", [], path)


def test_what_cannot_be_written_is_known_before_anything_is_measured(
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
