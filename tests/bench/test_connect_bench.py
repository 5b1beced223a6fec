"""`gangline bench connect`, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.bench.driver import installed
from gangline.bench.driver.rank_group import RankGroup
from gangline.cli.bench import bench


@pytest.mark.slow
def test_connect_writes_a_row_for_each_call_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "connect.json"
    words = ["connect", "--ranks", "2", "--peers", "gloo", "--runs", "1", "--json", str(path)]
    done = CliRunner().invoke(bench, words, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["who"].partition(",")[0], row["call"]) for row in rows] == [
        (who, call) for call in ("connect", "split", "barrier") for who in ("gangline", "gloo")
    ]
    for row in rows:
        assert (row["ranks"], row["runs"]) == (2, 1)
        assert row["time_us"] == row["p50"] > 0
        assert ("ratio_to_gloo" in row) == (row["who"] == "gangline")


@pytest.mark.skipif(not installed.available_peers("mpi", "ranks"), reason="no MPI: run `make peers`")
def test_each_mpi_splits_and_waits_in_barriers() -> None:
    for candidate in installed.collective_ranks("mpi", 2, "ranks"):
        if "none" in candidate.setting or "PIN=0" in candidate.setting:
            with RankGroup(candidate) as group:
                for call in ("split", "barrier"):
                    assert group.prepare({"call": call}, call) > 0
                    assert group.seconds(3, call) > 0
