"""`gangline bench simulate`: rows, the best segments, and clusters that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gangline.bench.algorithms.cluster import Cluster, measure
from gangline.bench.algorithms.simulate import simulate
from gangline.bench.report.compare import ratios
from gangline.collectives import algorithms

CLUSTER = Cluster(24, 3, alpha_inside=2, alpha_between=8, beta_inside=50, beta_between=10, gamma=100)


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    app = typer.Typer()
    app.command()(simulate)
    done = CliRunner().invoke(app, [*words, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_rows_are_as_the_specification_has_them_the_quickest_first(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.json", "--ranks", "16", "--size", "1M", "--hosts", "4")
    assert {row["algorithm"] for row in rows} == set(algorithms.names("all_reduce"))
    for row in rows:
        assert (row["who"], row["collective"], row["ranks"], row["hosts"]) == ("gangline", "all_reduce", 16, 4)
        assert (row["size"], row["runs"]) == (2**20, 1)
        assert row["seconds"] == row["p50"] == row["p99"] == row["max"] > 0
        assert row["algbw_gbs"] == pytest.approx(2**20 / row["seconds"] / 1e9)
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 2 * 15 / 16)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


def test_units_are_microseconds_and_gigabytes_a_second() -> None:
    cluster = Cluster(8, 1, alpha_inside=2, alpha_between=1e9, beta_inside=50, beta_between=1e-9, gamma=100)
    nbytes = 8 * 1000
    by_name = {row["algorithm"]: row for row in measure(cluster, "all_reduce", nbytes)}
    expected = 14 * (2e-6 + 1000 / 50e9) + 7 * 1000 / 100e9
    assert by_name["ring"]["seconds"] == pytest.approx(expected)
    assert (by_name["ring"]["steps"], by_name["ring"]["bytes_a_rank"], by_name["ring"]["segments"]) == (14, 14_000, 1)


def test_links_between_hosts_cost_what_they_are_said_to() -> None:
    slower = replace(CLUSTER, alpha_between=80, beta_between=1)
    pairs, _ = ratios(measure(slower, "all_gather", 2**20), measure(CLUSTER, "all_gather", 2**20))
    assert len(pairs) == len(algorithms.names("all_gather"))
    assert all(pair["times_as_fast"] > 1 for pair in pairs)
    one_host = replace(CLUSTER, hosts=1)
    assert measure(one_host, "all_gather", 2**20) == measure(replace(slower, hosts=1), "all_gather", 2**20)


def test_on_slow_links_between_hosts_hierarchical_is_quickest() -> None:
    assert measure(CLUSTER, "all_reduce", 2**26)[0]["algorithm"] == "hierarchical"


@pytest.mark.parametrize("collective", list(algorithms.REGISTRY))
def test_no_power_of_two_of_segments_is_better_than_the_chosen_one(collective: str) -> None:
    root = 0 if collective in ("reduce", "broadcast", "gather", "scatter") else None
    rows = measure(CLUSTER, collective, 2**24)
    assert {row["algorithm"] for row in rows} == set(algorithms.names(collective))
    for row in rows:
        for segments in (1, 2, 4, 8, 16, 32, 64, 128):
            schedule = algorithms.build(
                collective, row["algorithm"], 24, root=root, segments=segments, hosts=CLUSTER.host_of_rank
            )
            assert CLUSTER.seconds(schedule, 2**24) >= row["seconds"]


def test_ranks_are_spread_over_hosts_as_equally_as_can_be() -> None:
    assert replace(CLUSTER, ranks=7).host_of_rank == (0, 0, 0, 1, 1, 2, 2)


def test_one_rank_has_nothing_to_do() -> None:
    rows = measure(replace(CLUSTER, ranks=1, hosts=1), "all_reduce", 2**20)
    assert {(row["seconds"], row["bytes_a_rank"], row["algbw_gbs"]) for row in rows} == {(0.0, 0, 0.0)}


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_4096_ranks_on_512_hosts(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.json", "--ranks", "4096", "--size", "100M", "--hosts", "512")
    steps = {row["algorithm"]: row["steps"] for row in rows}
    assert (steps["ring"], steps["halving_doubling"], steps["hierarchical"]) == (8190, 24, 20)
    assert rows[0]["algorithm"] == "hierarchical"
