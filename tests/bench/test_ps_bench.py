"""`gangline bench ps`, small: real jobs."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gangline.bench.driver import installed
from gangline.bench.driver.hosts import obstacle
from gangline.bench.driver.processes import SERVER, Candidate
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.bench.parameter_server import Case, measure
from gangline.bench.peers.checks import pushed_value
from gangline.bench.peers.serve import Server
from gangline.bench.workload.options import Compression, ServerTransport
from gangline.cli.bench import bench

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
