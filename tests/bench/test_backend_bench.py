"""`gangline bench backend`, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.bench.driver import installed
from gangline.cli.bench import bench


@pytest.mark.slow
def test_backend_writes_a_row_for_each_case_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "backend.json"
    calls = ["all_reduce", "all_gather", "broadcast", "barrier", "ddp", "fsdp2", "embeddings", "in_flight", "groups"]
    words = ["backend", "--ranks", "2", "--calls", ",".join(calls), "--sizes", "64,1M", "--peers", "gloo"]
    done = CliRunner().invoke(bench, [*words, "--runs", "1", "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    cases = [(call, size) for call in calls for size in ((64, 1 << 20) if call in calls[:3] else (0,))]
    assert [(row["who"].partition(",")[0], row["call"], row["size"]) for row in rows] == [
        (who, *case) for case in cases for who in ("gangline", "gloo")
    ]
    for row in rows:
        assert (row["ranks"], row["runs"]) == (2, 1)
        assert row["time_us"] > 0
        assert ("ratio_to_gloo" in row) == (row["who"] == "gangline")


@pytest.mark.slow
@pytest.mark.skipif(not installed.available_peers("mpi", "backend"), reason="no MPI: run `make peers`")
def test_an_mpi_runs_each_collective(tmp_path: Path) -> None:
    path = tmp_path / "backend.json"
    words = ["backend", "--ranks", "2", "--sizes", "4096", "--peers", "mpi", "--runs", "1", "--json", str(path)]
    done = CliRunner().invoke(bench, words, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["call"] for row in rows] == [
        call for call in ("all_reduce", "all_gather", "broadcast", "barrier") for _ in range(2)
    ]
