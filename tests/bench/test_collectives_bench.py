"""The benches of collectives and servers: groups of real ranks and jobs, what they compute, and the commands."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gangline.bench.collectives import Sweep
from gangline.bench.driver import installed
from gangline.bench.driver.hosts import obstacle
from gangline.bench.driver.processes import SERVER, Candidate
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.bench.parameter_server import Case, measure
from gangline.bench.peers.checks import pushed_value
from gangline.bench.peers.serve import Server
from gangline.bench.workload.collective_shapes import COLLECTIVES, IN_PLACE, bus_factor
from gangline.bench.workload.options import Compression, DataType, ReduceOp, ServerTransport
from gangline.cli.bench import bench
from tests.bench.test_benches import rows_of

ROW = {
    *("who", "collective", "transport", "ranks", "size", "count", "dtype", "redop", "in_place"),
    *("time_us", "algbw_gbs", "busbw_gbs", "wrong", "p50", "p99", "max", "runs"),
}
ALONE = """
import os
import numpy as np

def join():
    return {"who": "alone 1", "prepare": prepare}

def prepare(options):
    if options["dtype"] == "bfloat16":
        raise ValueError("no bfloat16")
    if options["op"] == os.environ.get("NO_OP"):
        raise ValueError("no " + options["op"])
    given = np.zeros(options["inputs"])
    out = np.zeros(options["outputs"])
    def step():
        out[:] = given
        out[options.get("damaged", [])] += 1
    def write(start, values):
        given[start:start + len(values)] = values
    return {"step": step, "write": write, "read": lambda start, stop: out[start:stop]}
"""


def options(collective: str = "all_reduce", ranks: int = 1, size: int = 4000, **more: Any) -> dict[str, Any]:
    """Return the options that ranks prepare."""
    places = IN_PLACE.get(collective, (False,))
    sweep = Sweep(dtype=DataType(more.get("dtype", "float32")), op=ReduceOp(more.get("op", "sum")))
    return {**sweep.of_rank(collective, ranks, size, in_place=more.get("in_place", places[0])), **more}


def wrong(group: RankGroup, prepared: dict[str, Any]) -> list[int]:
    """The wrong elements of each rank."""
    group.prepare(prepared)
    return [answer["wrong"] for answer in group.ask({"check": "bench"})]


@pytest.fixture
def alone(tmp_path: Path) -> Candidate:
    """A program of one rank that needs nothing but numpy."""
    (tmp_path / "alone.py").write_text(ALONE)
    return Candidate(str(tmp_path / "alone"))


@pytest.fixture(scope="module")
def gloo() -> Iterator[RankGroup]:
    with RankGroup(Candidate("ranks/gloo", 3, env={"OMP_NUM_THREADS": "1"})) as group:
        yield group


def test_each_damaged_element_is_counted(alone: Candidate) -> None:
    with RankGroup(alone) as group:
        assert wrong(group, options(damaged=[0, 17, 999])) == [3]
        assert wrong(group, options(size=8 * 2_000_001, dtype="float64", damaged=[5, 1_048_576, 2_000_000])) == [3]
        assert wrong(group, options(op="product", damaged=[5])) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gloo_computes_what_is_expected_of_every_collective(gloo: RankGroup, collective: str) -> None:
    assert (gloo.who.split(",")[0], gloo.transport) == ("gloo", "tcp")
    for in_place in IN_PLACE.get(collective, (False,)):
        for dtype in ("float32", "bfloat16", "int8"):
            assert wrong(gloo, options(collective, 3, dtype=dtype, in_place=in_place, root=1)) == [0, 0, 0]


@pytest.mark.slow
def test_gloo_computes_what_is_expected_of_every_op(gloo: RankGroup) -> None:
    for op in ("product", "min", "max"):
        for dtype in ("float32", "int64", "uint8"):
            assert wrong(gloo, options("all_reduce", 3, dtype=dtype, op=op)) == [0, 0, 0]


def test_bus_bandwidth_is_nccl_tests() -> None:
    assert [bus_factor(collective, 4) for collective in COLLECTIVES] == [1.5, 0.75, 0.75, 1, 1, 0.75, 1]


@pytest.mark.slow
def test_all_reduce_gives_rows_as_the_specification_has_them(tmp_path: Path) -> None:
    words = ("all_reduce", "-b", "8", "-e", "1K", "-f", "128", "-n", "3", "-w", "1", "--runs", "2", "--peers", "gloo")
    rows, printed = rows_of(tmp_path / "rows.json", *words)
    who = ["gangline", f"gloo, torch {__import__('torch').__version__.partition('+')[0]}"]
    assert [row["who"] for row in rows] == who * 4
    assert [(row["size"], row["in_place"]) for row in rows[::2]] == [(8, False), (8, True), (1024, False), (1024, True)]
    for row in rows:
        assert set(row) >= ROW
        assert (row["wrong"], row["runs"], row["ranks"], row["redop"], row["root"]) == (0, 2, 2, "sum", None)
        assert row["count"] == row["size"] / 4
        assert row["time_us"] == row["p50"] > 0
        assert row["busbw_gbs"] == row["algbw_gbs"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
        assert ("ratio_to_gloo" in row) == (row["who"] == "gangline")
    lines = printed.splitlines()
    assert "# all_reduce: 2 ranks over shared_memory, float32, sum, 2 runs" in lines
    assert [line.split()[-1] for line in lines if line.startswith("    1 KiB")] == ["gangline", "gloo"]
    assert "# Out of bounds values : 0 OK" in lines
    assert any(line.startswith("# Avg bus bandwidth    : ") for line in lines)
    ratios = next(number for number, line in enumerate(lines) if line.startswith("# times as fast as gloo"))
    assert [len(line.split()) for line in lines[ratios + 2 :]] == [4, 4]  # a line a size: two cases
    assert max(map(len, lines)) <= 80


def test_a_peer_that_fails_is_left_out(alone: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = {"gangline": alone, "gloo": replace(alone, env={"NO_OP": "max"})}
    monkeypatch.setattr(installed, "collective_ranks", lambda who, *_: [candidates[who]])
    words = ["all_reduce", "-b", "8", "-e", "16", "-n", "2", "--runs", "1", "--op", "max"]
    done = CliRunner().invoke(bench, [*words, "--ranks", "1", "--peers", "gloo"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.count("skipping gloo: alone, rank 0 failed: ValueError: no max") == 1
    assert "measuring all_reduce at 2 sizes: 1 runs of 2 steps" in done.output.partition("# all_reduce")[0]
    rows = [line.split() for line in done.output.splitlines() if line.split()[:1] in (["8"], ["16"])]
    assert [(row[0], row[-1]) for row in rows] == [(size, "alone") for size in ("8", "16")]


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_runs_and_is_right(collective: str, tmp_path: Path) -> None:
    words = (collective, "-b", "4000", "-e", "400000", "-f", "100", "-n", "2", "--runs", "1", "--ranks", "3")
    rows, _ = rows_of(tmp_path / "rows.json", *words, "--root", "1")
    assert len(rows) == 2 * len(IN_PLACE.get(collective, (False,)))
    assert {(row["who"], row["wrong"]) for row in rows} == {("gangline", 0)}


# `gangline bench ps`, small: real jobs


FIELDS = {"who", "mode", "transport", "size", "time_us", "gb_per_s", "workers", "servers", "call", "error"}
FIELDS |= {"p50", "p99", "max", "runs"}
NAMESPACES = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
MXNET = installed.interpreter("mxnet")


@pytest.mark.slow
def test_rows_are_as_the_specification_has_them_and_exact(tmp_path: Path) -> None:
    path, plot = tmp_path / "ps.json", tmp_path / "ps.png"
    words = ["ps", "-b", "20", "-e", "300K", "-f", "4096", "-s", "2", "--pushpull", "--runs", "2"]
    done = CliRunner().invoke(bench, [*words, "--json", str(path), "--plot", str(plot)], catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(path.read_text())
    rows: list[dict[str, Any]] = result["rows"]
    assert [(row["size"], row["call"]) for row in rows] == [
        (size, call) for size in (20, 4096 * 20, 300 * 1024) for call in ("push+pull", "pushpull")
    ]
    for row in rows:
        assert set(row) >= FIELDS
        assert (row["who"], row["mode"], row["transport"]) == ("gangline", "dist_sync", "auto")
        assert (row["workers"], row["servers"], row["runs"]) == (2, 2, 2)
        assert row["error"] == 0
        assert row["time_us"] == row["p50"] > 0
        assert row["gb_per_s"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
    assert {"cpu", "cores", "memory_gb", "gpu", "python", "torch", "gangline"} <= set(result["machine"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compressed_pushes_stand_beside_plain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure(Case("4096", "4096", transport=ServerTransport.tcp, compression=Compression["2bit"], runs=1))
    assert [(row["call"], row["compression"]) for row in rows] == [
        ("push", None),
        ("push+pull", None),
        ("push", "2bit"),
        ("push+pull", "2bit, pulls fp16"),
    ]
    for row in rows:
        assert (row["error"], row["transport"]) == (0, "tcp")
    push, push_pull, coded, both_coded = rows
    assert coded["ratio_to_float32"] == pytest.approx(push["p50"] / coded["p50"])
    assert both_coded["ratio_to_float32"] == pytest.approx(push_pull["p50"] / both_coded["p50"])
    assert "ratio_to_float32" not in push


@pytest.mark.slow
@NAMESPACES
def test_jobs_over_two_hosts_have_a_row_and_the_hosts_are_removed() -> None:
    (row,) = measure(Case("4096", "4096", workers=1, hosts=2, rate="100mbit", runs=1))
    assert (row["transport"], row["hosts"], row["rate"], row["error"]) == ("tcp", 2, "100mbit", 0)
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"gangline-{os.getpid()}-")]


def job(workers: int, store: str = "dist_sync") -> RankGroup:
    env = {"BENCH_STORE": store, "OMP_NUM_THREADS": "1"}
    return RankGroup(Candidate("parameter_server/gangline", workers, 1, env=env, server_code=SERVER))


@pytest.mark.slow
def test_a_failed_request_names_the_worker_a_killed_server_is_reported_and_nothing_is_left() -> None:
    with job(1) as group:
        with pytest.raises(GroupError, match="rank 0 failed: KeyError: 'nothing'"):
            group.seconds(1, "nothing")
        group.prepare({"count": 10, "call": "pushpull", "workers": 1, "compression": None})
        assert group.error() == 0.0
        assert group.seconds(2) > 0
        pids = group._processes.pids
        ends = [os.pidfd_open(pid) for pid in pids.values()]
        os.kill(pids["server 0"], signal.SIGKILL)
        with pytest.raises(GroupError, match="server 0"):
            group.prepare({"count": 10, "call": "push+pull"})
    for end in ends:
        assert select.select([end], [], [], 0)[0]
        os.close(end)


def test_a_wrong_sum_shows_with_its_deviation() -> None:
    """A store that loses worker 2 in one element."""
    options = {"count": 5000, "workers": 3, "compression": None}
    pulled = sum(pushed_value(options, rank, np.arange(5000)) for rank in range(3))
    pulled[4999] -= pushed_value(options, 2, np.array([4999]))[0]
    prepared = {
        "step": lambda: None,
        "settle": None,
        "write": lambda *_: None,
        "read": lambda start, stop: pulled[start:stop],
    }
    server = Server({"who": "x", "prepare": lambda _: prepared})
    server.answer({"prepare": options, "as": "it"})
    assert server.answer({"check": "it"}) == {"error": (4999 - 4093) * 3 + 2}


@pytest.mark.slow
@pytest.mark.skipif(MXNET is None or not MXNET.exists(), reason="MXNet is not there; `make peers` installs it")
def test_mxnet_is_measured_in_the_same_turns_and_leaves_nothing() -> None:
    rows = measure(Case("4096", "4096", pushpull=True, peers="mxnet", runs=2))
    sides = [(who, call) for who in ("gangline", "mxnet 1.9.1") for call in ("push+pull", "pushpull")]
    assert [(row["who"], row["call"]) for row in rows] == sides
    assert {row["error"] for row in rows} == {0}
    assert {row["setting"] for row in rows[2:]} <= {"OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"}
    assert rows[0]["ratio_to_mxnet"] > 0
    assert set(rows[1]) > {"ratio_to_mxnet", "ratio_to_mxnet_push+pull"}
    programs = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdecimal()]
    assert not [path for path in programs if path.exists() and b"parameter_server/mxnet.py" in path.read_bytes()]
