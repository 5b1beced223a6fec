"""The benches themselves, small: their options, and the rows they give; real workers come from the fork server."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.bench.device_group import run
from gangline.bench.driver import installed
from gangline.bench.report.output import command_line
from gangline.bench.training import measure
from gangline.bench.unequal.samples import _WAYS
from gangline.bench.workload.networks import bytes_of, context_words, parameter_shapes
from gangline.cli.bench import bench
from tests.bench.faults.cases import PHASES, cases
from tests.hosts import obstacle
from tests.scripted_faults import parse

SPREAD = {"who", "p50", "p99", "max", "runs"}
KVSTORE = SPREAD | {"contexts", "store", "seconds", "gb_per_s_per_device", "error"}
TRAINING = SPREAD | {"contexts", "network", "batch_size", "samples_per_s", "efficiency"}
DEVICE_GROUP = SPREAD | {"collective", "transport", "size", "count", "dtype", "redop", "in_place"}
DEVICE_GROUP |= {"time_us", "algbw_gbs", "busbw_gbs", "wrong", "contexts", "memory_gbs", "ratio_to_copy"}
WORKERS = (TRAINING | {"workers"}) - {"contexts"}
TRANSFER = WORKERS | {"store", "learning_rate", "seconds", "accuracy"}
NO_MPI = "no MPI: run `make peers`"


def rows_of(path: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Run a bench, which writes its rows to a file; return them and what it printed."""
    done = CliRunner().invoke(bench, [*words, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(path.read_text())["rows"], done.output


def who(row: dict[str, Any]) -> str:
    """Return the name of a row's side, without its version."""
    return row["who"].partition(",")[0].split()[0]


@pytest.mark.slow
def test_kvstore_writes_the_specified_fields(tmp_path: Path) -> None:
    words = ("kvstore", "--network", "mlp", "--stores", "local", "--contexts", "3", "--runs", "2", "--run-seconds", "0")
    rows, _ = rows_of(tmp_path / "kvstore.json", *words)
    assert [(row["who"], row["call"]) for row in rows] == [("gangline", "push+pull"), ("gangline", "pushpull")]
    for row in rows:
        assert set(row) >= KVSTORE
        assert (row["store"], row["contexts"], row["runs"]) == ("local", 3, 2)
        assert row["seconds"] == row["p50"]
        assert row["gb_per_s_per_device"] == pytest.approx(bytes_of(parameter_shapes("mlp")) / row["seconds"] / 1e9)
        assert 0 < row["error"] < 1e-5


BACKEND = ("all_reduce", "all_gather", "broadcast", "barrier", "ddp", "fsdp2", "embeddings", "in_flight", "groups")
SIZED = BACKEND[:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "cases"),
    [
        (
            ("backend", "--calls", ",".join(BACKEND), "--sizes", "64,1M"),
            [(call, size) for call in BACKEND for size in ((64, 1 << 20) if call in SIZED else (0,))],
        ),
        (("connect",), [(call, None) for call in ("connect", "split", "barrier")]),
    ],
    ids=["backend", "connect"],
)
def test_each_call_has_a_row_beside_gloo(
    words: tuple[str, ...], cases: list[tuple[str, int | None]], tmp_path: Path
) -> None:
    rows, _ = rows_of(tmp_path / "rows.json", *words, "--ranks", "2", "--peers", "gloo", "--runs", "1")
    found = [(who(row), row["call"], row.get("size")) for row in rows]
    assert found == [(side, *case) for case in cases for side in ("gangline", "gloo")]
    for row in rows:
        assert (row["ranks"], row["runs"]) == (2, 1)
        assert row["time_us"] == row["p50"] > 0
        assert ("ratio_to_gloo" in row) == (row["who"] == "gangline")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_local_steps_train_over_slow_links_beside_ddp(tmp_path: Path) -> None:
    words = ("local-steps", "--tasks", "digits", "-n", "2", "--steps", "20", "--every", "6", "--slower", "2")
    rows, _ = rows_of(tmp_path / "rows.json", *words, "--only", "2bit|dist_sync")
    assert [(row["every"], row["samples"]) for row in rows] == [(every, 320) for every in ("1:1", "6:6", "6:6")]
    for row in rows:
        assert row["samples_per_s"] > 0
        assert 0 <= row["score"] <= 1
    assert rows[0]["times_ddp"] is None


@pytest.mark.slow
@pytest.mark.skipif(not installed.available_peers("mpi", "backend"), reason=NO_MPI)
def test_an_mpi_runs_each_collective(tmp_path: Path) -> None:
    words = ("backend", "--ranks", "2", "--sizes", "4096", "--peers", "mpi", "--runs", "1")
    rows, _ = rows_of(tmp_path / "backend.json", *words)
    assert [row["call"] for row in rows] == [call for call in BACKEND[:4] for _ in range(2)]


@pytest.mark.slow
def test_training_writes_rows_and_ratios_for_each_candidate() -> None:
    words = context_words(None, None, default=(1, 2))
    rows = measure("mlp", 8, words, "device", ["torch", "ddp"], runs=2, run_seconds=0.0)
    found = [(who(row), row["contexts"]) for row in rows]
    assert found == [("gangline", 1), ("gangline", 2), ("torch", 1), ("ddp", 2)]
    for row in rows:
        assert set(row) >= TRAINING
        assert row["samples_per_s"] == row["p50"] > 0
        assert (row["batch_size"], row["network"], row["runs"]) == (8, "mlp", 2)
    assert rows[0]["efficiency"] == rows[2]["efficiency"] == rows[2]["ratio_to_plain"] == 1.0
    assert rows[1]["ratio_to_ddp"] > 0
    assert rows[0]["ratio_to_ddp"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["balance", "--factors", "1,x"], "--factors is '1,x'; expected numbers with commas"),
        (["kvstore", "--contexts", "2,none"], "--contexts is '2,none'"),
        (["training", "--peers", "horovod"], "--peers has 'horovod'"),
        (["training", "--network", "nosuch"], "network 'nosuch' is unknown"),
        (["kvstore", "--gpus", "77"], "not on this machine"),
        (["ps", "--plot", "rows.gif"], "ends in .png"),
        (["kvstore", "--peers", "tensorflow"], "--peers has 'tensorflow'; expected names out of"),
        (["all_to_all", "--algo", "ring"], "all_to_all has no algorithm 'ring'"),
        (["broadcast", "--root", "2"], "--root is 2; expected a rank below 2"),
        (["reduce", "-b", "1K", "-e", "8"], "-b 1K is above -e 8"),
        (["reduce", "-b", "0"], "-b is '0'"),
        (["reduce", "-e", "4X"], "-e is '4X'"),
        (["all_reduce", "--hosts", "3"], "--hosts is 3; expected at most one for each of 2 ranks"),
        (["all_gather", "--ranks", "2,x"], "--ranks is '2,x'; expected numbers above 0 with commas"),
        (["tune", "--transports", "pigeon"], "--transports has 'pigeon'"),
        (["ps", "--rate", "1mbit"], "expected --hosts 2 with it"),
        (["ps", "-b", "4K", "-e", "1K"], "-b 4K is above -e 1K"),
        (["ps", "-b", "3", "-e", "1K"], "-b is 3; expected 4 bytes or more"),
        (["unequal-ranks", "--factors", "0.5"], "--factors is '0.5'; expected numbers from 1 to 100"),
        (["unequal-ranks", "--ranks", "999"], "--ranks is 999, but this process may use"),
        (["unequal-samples", "--ranks", "2,x"], "--ranks is '2,x'; expected numbers above 0 with commas"),
        (["unequal-samples", "--only", "("], "--only is '('"),
        (["unequal-samples", "--factors", "0.5"], "--factors is '0.5'; expected numbers from 1 to 100"),
        (["simulate", "--ranks", "4", "--hosts", "5"], "--hosts is 5 for 4 ranks; expected 1 to 4"),
        (["simulate", "--beta-between", "0"], "--beta-between is 0.0; expected more than 0 GB/s"),
        (["simulate", "--size", "ten"], "--size is 'ten'; expected a number of bytes above 0"),
        (["simulate", "--network", "many/4"], "expected PARAMETERS/LAYERS"),
        (["connect", "--calls", "connect,allgather"], "'allgather'; expected names out of connect, split, barrier"),
        (
            ["backend", "--calls", "ddp,fsdp"],
            "--calls has 'fsdp'; expected names out of all_reduce, all_gather, broadcast, barrier, ddp",
        ),
        (["training", "-n", "1,none"], "--workers is '1,none'; expected numbers above 0"),
        (["training", "--scaling", "2", "--contexts", "2"], "leave --contexts and --gpus out"),
        (["training", "--transfer", "--network", "mlp"], "the network has no layer 'classifier.6'"),
        (["training", "--transfer", "--lr", "-1"], "learning rate is -1.0"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_measured(words: list[str], message: str) -> None:
    done = CliRunner().invoke(bench, words)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


def test_the_recorded_command_leaves_output_files_out(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--json", "a.json", "--peers", "mxnet, torch", "--plot=b.png", "--runs", "3")
    monkeypatch.setattr("sys.argv", ["gangline", "bench", "kvstore", *words])
    assert command_line() == "gangline bench kvstore --peers 'mxnet, torch' --runs 3"


def test_choices_are_those_of_the_communicator() -> None:
    from gangline.bench.workload.options import Collective, DataType, ReduceOp, Transport
    from gangline.collectives.call_signature import DTYPES, OPS
    from gangline.collectives.tuner import TRANSPORTS, TUNED

    assert [dtype.value for dtype in DataType] == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    assert [op.value for op in ReduceOp] == list(OPS)
    assert [transport.value for transport in Transport] == ["auto", *TRANSPORTS[:-1]]
    assert [collective.value for collective in Collective] == list(TUNED)


@pytest.mark.slow
def test_unequal_ranks_writes_a_row_for_each_rank_their_sum_ddp_and_the_balanced_run(tmp_path: Path) -> None:
    words = ("unequal-ranks", "--factors", "4", "--batch-size", "64", "--runs", "2", "--run-seconds", "0")
    rows, _ = rows_of(tmp_path / "unequal.json", *words)
    at_shares = ["the same, at balanced shares", "the same, each step as long as its slowest"]
    names = ["rank 0 alone", "rank 1 alone", "sum of ranks alone", *at_shares, "DDP", "balanced"]
    assert [row["who"] for row in rows] == names
    assert [row["split"] for row in rows[:-1]] == [*[None] * 5, "64:64"]
    assert rows[4]["samples_per_s"] <= rows[3]["max"]
    first, last = map(int, rows[-1]["split"].split(":"))
    assert first + last == 128
    assert last <= first  # equal, while other processes disturb the times of so few steps
    assert rows[2]["of_the_sum"] == rows[3]["of_the_sum_at_shares"] == rows[5]["ratio_to_ddp"] == 1


@pytest.mark.slow
def test_unequal_samples_writes_a_row_for_each_way_and_draws_a_step(tmp_path: Path) -> None:
    words = ("unequal-samples", "--factors", "1,2", "--batch-size", "4", "--batches", "16", "--mean-length", "20")
    plot = tmp_path / "step.png"
    rows, _ = rows_of(tmp_path / "samples.json", *words, "--runs", "1", "--plot", str(plot))
    first = [row["who"] for row in rows if row["slower_by"] == "1"]
    assert first == list(_WAYS)
    assert [row["who"] for row in rows[len(first) :]] == first[:-2]  # lengths are equal only between equal ranks
    for row in rows:
        assert row["tokens_per_s"] == row["p50"] > 0
        assert (row["split"] is not None) == ("balance" in row["who"].split(",")[0].split())
        assert (row["ranks"], row["batch_size"], row["batches"], row["runs"]) == (2, 8, 16, 1)
    by_name = {row["who"]: row for row in rows[: len(first)]}
    assert by_name["DDP"]["times_ddp"] == by_name["DDP, equal lengths"]["times_ddp"] == 1
    assert by_name["without padding and waiting"]["of_the_ideal"] == 1
    padded = [by_name[f"balance, lengths{more}"]["padded_to_real"] for more in (", pool 16", ", pool 4", "")]
    assert 1 < padded[0] < padded[1] < padded[2] < by_name["balance by speed"]["padded_to_real"]
    assert by_name["DDP, equal lengths"]["padded_to_real"] == 1
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
def test_unequal_samples_leaves_rows_out_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('there is no transformers here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ("unequal-samples", "--factors", "2", "--batch-size", "2", "--batches", "4", "--mean-length", "8")
    run = ("--runs", "1", "--only", "group_by_length|batch_rebalance$")
    done = CliRunner().invoke(bench, [*words, *run, "--json", str(tmp_path / "rows.json")], catch_exceptions=False)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["without padding and waiting", "DDP"]
    for who in ("DDP, group_by_length", "DDP, batch_rebalance"):
        assert f"leaving {who!r} out: " in done.stderr
    assert 'there is no transformers here; install it with: pip install "transformers>=5.23"' in done.stderr


def test_each_way_on_the_host_stands_beside_copies_of_torch() -> None:
    rows = run({3: "cpu(0),cpu(1),cpu(2)"}, [4096, 8192], runs=2, run_seconds=0.0)
    assert [(row["transport"], row["collective"], row["size"]) for row in rows] == [
        (transport, collective, size)
        for size in (4096, 8192)
        for transport, collective in (
            ("torch", "copy_"),
            ("staged", "all_reduce"),
            ("staged", "broadcast"),
            ("copies", "all_reduce"),
            ("copies", "broadcast"),
            ("add_, copy_", "all_reduce"),
        )
    ]
    for row in rows:
        assert set(row) >= DEVICE_GROUP
        assert (row["contexts"], row["devices"], row["count"], row["wrong"]) == (3, 1, row["size"] // 4, 0)
        assert row["time_us"] == row["p50"]
        assert row["algbw_gbs"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
    for row in rows[1::6]:
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * 4 / 3)
        assert row["memory_gbs"] == pytest.approx(row["algbw_gbs"] * 6)
    assert {row["ratio_to_copy"] for row in rows[::6]} == {1.0}


@pytest.mark.slow
def test_each_side_has_a_row_for_each_number_of_workers(tmp_path: Path) -> None:
    words = ("training", "--scaling", "1,2", "--network", "mlp", "--batch-size", "5", "--runs", "1")
    rows, printed = rows_of(tmp_path / "scaling.json", *words, "--run-seconds", "0")
    stores = [("dist_sync", 1), ("allreduce", None), ("apart", None)]
    sides = [*(("gangline", *store) for store in stores), ("ddp", None, None)]
    assert [(who(row), row["store"], row["servers"], row["workers"]) for row in rows] == [
        (*side, workers) for side in sides for workers in (1, 2)
    ]
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        for row in (alone, both):
            assert set(row) >= WORKERS
            assert (row["network"], row["batch_size"], row["runs"]) == ("mlp", 5 * row["workers"], 1)
            assert row["samples_per_s"] == row["p50"] > 0
        assert alone["efficiency"] == 1
        assert both["efficiency"] == pytest.approx(both["p50"] / alone["p50"] / 2)
    for row, peer in zip(rows[:6], rows[6:] * 3, strict=True):
        assert row["ratio_to_ddp"] == pytest.approx(row["p50"] / peer["p50"])
    for row, apart in zip(rows[:4] + rows[6:], rows[4:6] * 3, strict=True):
        assert row["ratio_to_apart"] == pytest.approx(row["p50"] / apart["p50"])
    assert not any("ratio_to_apart" in row for row in rows[4:6])
    times = 2 * rows[3]["efficiency"]
    assert f"gangline, allreduce: 2 workers are {times:.2f} times as fast as one" in printed
    assert "# times as fast" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_alexnet_moves_to_ten_classes(tmp_path: Path) -> None:
    words = ("training", "--transfer", "--workers", "1,2", "--epochs", "3", "--batch-size", "16", "--same-batch")
    rows, _ = rows_of(tmp_path / "rows.json", *words)
    assert {row["network"] for row in rows} == {"alexnet"}
    assert all(set(row) >= TRANSFER for row in rows)
    assert rows[0]["accuracy"] > 0.5
    assert rows[1]["accuracy"] == pytest.approx(rows[0]["accuracy"], abs=0.02)


# `gangline bench faults`: its cases are valid scripts, and a row says what a job ended in


HOSTS = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))


def test_the_cases_are_valid_and_differ() -> None:
    rows = list(cases())
    assert len(rows) == len({case[:3] for case in rows}) >= 60
    assert {case.when for case in rows} == set(PHASES)
    for case in rows:
        assert not case.watched or parse(f"{case.watched} stop at {case.point}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ("server 0 killed push", "DeadNodeError: server 0 was killed or left: "),
        ("scheduler junk pull", "goes on, digits exact, weights equal"),
        ("worker 1 killed barrier", "DeadNodeError: worker 1 was killed or left: "),
        pytest.param("worker 1 - server 0 cut 5 s push", "goes on, digits exact, weights equal", marks=HOSTS),
        pytest.param(
            "worker 1 - server 0 cut for good push",
            "DeadNodeError: worker 1 has had no connection to server 0 for 10 s, though both reach the scheduler",
            marks=HOSTS,
        ),
    ],
)
def test_a_row_tells_the_outcome(row: str, outcome: str) -> None:
    done = CliRunner().invoke(bench, ["faults", "--only", row])
    assert done.exit_code == 0, done.output
    assert outcome in done.output
    assert "nothing" in done.output


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a full disk needs root")
def test_rows_of_a_full_disk_are_those_of_the_docs() -> None:
    """They name no folder of the run and no number of bytes, so that the table differs only where an outcome does."""
    done = CliRunner().invoke(bench, ["faults", "--only", "worker 0 disk full .*", "--markdown"])
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\| worker 0 \| disk full .*$", done.output, re.MULTILINE)
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    assert rows == re.findall(r"^\| worker 0 \| disk full .*$", page.read_text(), re.MULTILINE)
    assert len(rows) == 2
