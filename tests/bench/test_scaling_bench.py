"""`gangline bench training --workers`, small: real workers, from the fork server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.bench.scaling import measure, speedups
from gangline.cli.bench import bench

FIELDS = {"who", "network", "batch_size", "samples_per_s", "efficiency", "workers", "p50", "p99", "max", "runs"}


@pytest.mark.slow
def test_each_side_has_a_row_for_each_number_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    words = ["training", "--scaling", "1,2", "--network", "mlp", "--batch-size", "5", "--runs", "1"]
    done = CliRunner().invoke(bench, [*words, "--run-seconds", "0", "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["who"].split()[0], row["store"], row["workers"], row["servers"]) for row in rows] == [
        ("gangline", "dist_sync", 1, 1),
        ("gangline", "dist_sync", 2, 1),
        ("gangline", "allreduce", 1, None),
        ("gangline", "allreduce", 2, None),
        ("gangline", "apart", 1, None),
        ("gangline", "apart", 2, None),
        ("ddp,", None, 1, None),
        ("ddp,", None, 2, None),
    ]
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        for row in (alone, both):
            assert set(row) >= FIELDS
            assert (row["network"], row["batch_size"], row["runs"]) == ("mlp", 5 * row["workers"], 1)
            assert row["samples_per_s"] == row["p50"] > 0
        assert alone["efficiency"] == 1
        assert both["efficiency"] == pytest.approx(both["p50"] / alone["p50"] / 2)
    for row, peer in zip(rows[:6], rows[6:] * 3, strict=True):
        assert row["ratio_to_ddp"] == pytest.approx(row["p50"] / peer["p50"])
    for row, apart in zip(rows[:4] + rows[6:], rows[4:6] * 3, strict=True):
        assert row["ratio_to_apart"] == pytest.approx(row["p50"] / apart["p50"])
    assert not any("ratio_to_apart" in row for row in rows[4:6])
    assert "gangline, allreduce: 2 workers are " in done.output
    assert "# times as fast" in done.output


@pytest.mark.slow
def test_without_peers_and_without_one_worker_there_is_nothing_to_compare_with() -> None:
    (row,) = measure("mlp", 3, [2], ["allreduce"], [], runs=2, run_seconds=0.0)
    assert (row["batch_size"], row["runs"], row["efficiency"]) == (6, 2, None)
    assert "ratio_to_ddp" not in row
    assert list(speedups([row])) == []


def test_speedups_are_efficiencies_of_all_workers() -> None:
    row = {"who": "gangline", "store": "dist_sync", "workers": 4, "efficiency": 0.75}
    peer = {"who": "ddp, torch 2", "store": None, "workers": 2, "efficiency": 0.9}
    one = {**row, "workers": 1, "efficiency": 1.0}
    assert list(speedups([one, row, peer])) == [
        "gangline, dist_sync: 4 workers are 3.00 times as fast as one",
        "ddp, torch 2: 2 workers are 1.80 times as fast as one",
    ]
