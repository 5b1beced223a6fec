"""The benches themselves, small: their options, and the rows they give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.bench.report.output import command_line
from gangline.bench.training import measure
from gangline.bench.workload.networks import bytes_of, context_words, distinct_devices, images, parameter_shapes
from gangline.cli.bench import bench
from gangline.cli.main import main

KVSTORE = {"who", "contexts", "store", "seconds", "gb_per_s_per_device", "error", "p50", "p99", "max", "runs"}
TRAINING = {"who", "contexts", "network", "batch_size", "samples_per_s", "efficiency", "p50", "p99", "max", "runs"}


@pytest.mark.slow
def test_kvstore_writes_the_specified_fields(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.json"
    words = ["kvstore", "--network", "mlp", "--stores", "local", "--contexts", "3", "--runs", "2", "--run-seconds", "0"]
    done = CliRunner().invoke(bench, [*words, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert [(row["who"], row["call"]) for row in rows] == [("gangline", "push+pull"), ("gangline", "pushpull")]
    for row in rows:
        assert set(row) >= KVSTORE
        assert (row["store"], row["contexts"], row["runs"]) == ("local", 3, 2)
        assert row["seconds"] == row["p50"]
        assert row["gb_per_s_per_device"] == pytest.approx(bytes_of(parameter_shapes("mlp")) / row["seconds"] / 1e9)
        assert 0 < row["error"] < 1e-5


@pytest.mark.slow
def test_training_writes_rows_and_ratios_for_each_candidate() -> None:
    words = context_words(None, None, default=(1, 2))
    rows = measure("mlp", 8, words, "device", ["torch", "ddp"], runs=2, run_seconds=0.0)
    assert [(row["who"].split()[0], row["contexts"]) for row in rows] == [
        ("gangline", 1),
        ("gangline", 2),
        ("torch", 1),
        ("ddp,", 2),
    ]
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
        (["kvstore", "--contexts", "2,none"], "--contexts is '2,none'"),
        (["training", "--peers", "horovod"], "--peers has 'horovod'"),
        (["training", "--network", "nosuch"], "network 'nosuch' is unknown"),
        (["kvstore", "--gpus", "77"], "not on this machine"),
        (["ps", "--plot", "rows.gif"], "ends in .png"),
        (["kvstore", "--peers", "tensorflow"], "--peers has 'tensorflow'; expected names out of"),
        (["all_to_all", "--algo", "ring"], "all_to_all has no algorithm 'ring'"),
        (["broadcast", "--root", "2"], "--root is 2; expected a rank below 2"),
        (["reduce", "-b", "1K", "-e", "8"], "-b 1K is above -e 8"),
        (["all_reduce", "--hosts", "3"], "--hosts is 3; expected at most one for each of 2 ranks"),
        (["all_gather", "--ranks", "2,x"], "--ranks is '2,x'; expected numbers above 0 with commas"),
        (["tune", "--transports", "pigeon"], "--transports has 'pigeon'"),
        (["ps", "--rate", "1mbit"], "expected --hosts 2 with it"),
        (["ps", "-b", "4K", "-e", "1K"], "-b 4K is above -e 1K"),
        (["ps", "-b", "3", "-e", "1K"], "-b is 3; expected 4 bytes or more"),
        (["unequal-ranks", "--factors", "0.5"], "--factors is '0.5'; expected numbers from 1 to 100"),
        (["unequal-ranks", "--ranks", "999"], "--ranks is 999, but this process may use"),
        (["simulate", "--ranks", "4", "--hosts", "5"], "--hosts is 5 for 4 ranks; expected 1 to 4"),
        (["simulate", "--beta-between", "0"], "--beta-between is 0.0; expected more than 0 GB/s"),
        (["simulate", "--size", "ten"], "--size is 'ten'; expected a number of bytes above 0"),
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


def test_contexts_are_cpus_or_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_words(None, None, default=(2, 4)) == {2: "cpu(0),cpu(1)", 4: "cpu(0),cpu(1),cpu(2),cpu(3)"}
    assert context_words("3,1,3", None, default=(2,)) == {3: "cpu(0),cpu(1),cpu(2)", 1: "cpu(0)"}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert context_words(None, "1,1,0", default=(2, 4)) == {3: "gpu(1),gpu(1),gpu(0)"}
    assert context_words(None, "1,0", default=(1, 2)) == {1: "gpu(1)", 2: "gpu(1),gpu(0)"}
    assert context_words("2", "1,1,0", default=(1, 2)) == {2: "gpu(1),gpu(1)"}
    with pytest.raises(ValueError, match="asks for 3, but --gpus 0,1 names 2"):
        context_words("3", "0,1", default=(1, 2))
    assert [distinct_devices(words) for words in ("cpu(0),cpu(1)", "gpu(1),gpu(1)", "gpu(0),gpu(1),cpu(0)")] == [
        1,
        1,
        3,
    ]


def test_keys_are_the_parameters_of_the_network() -> None:
    keys = parameter_shapes("resnet50")
    assert len(keys) == 161
    assert keys[0] == ("conv1.weight", (64, 3, 7, 7))
    assert bytes_of(keys) == 4 * 25_557_032
    assert images("resnet18").shape == (3, 64, 64)
    assert (images("lenet").shape, images("lenet").classes) == ((1, 28, 28), 10)


def test_the_recorded_command_leaves_output_files_out(monkeypatch: pytest.MonkeyPatch) -> None:
    line = [
        "gangline",
        "bench",
        "kvstore",
        "--json",
        "a.json",
        "--peers",
        "mxnet, torch",
        "--plot=b.png",
        "--runs",
        "3",
    ]
    monkeypatch.setattr("sys.argv", line)
    assert command_line() == "gangline bench kvstore --peers 'mxnet, torch' --runs 3"


@pytest.mark.parametrize(
    "words",
    [
        ["all_reduce", "--datatype", "float31"],
        ["all_reduce", "-o", "xor"],
        ["ps", "--store", "device"],
        ["ps", "--compression", "1bit"],
        ["simulate", "--collective", "sum"],
    ],
)
def test_a_wrong_choice_exits_with_2_and_lists_the_choices(words: list[str]) -> None:
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 2
    assert f"{words[2]!r} is not one of" in " ".join(done.output.replace("│", " ").split())


def test_choices_are_those_of_the_communicator() -> None:
    from gangline.bench.workload.options import Collective, DataType, ReduceOp, Transport
    from gangline.collectives.call_signature import DTYPES, OPS
    from gangline.collectives.tuner import TRANSPORTS, TUNED

    assert [dtype.value for dtype in DataType] == [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    assert [op.value for op in ReduceOp] == list(OPS)
    assert [transport.value for transport in Transport] == ["auto", *TRANSPORTS[:-1]]
    assert [collective.value for collective in Collective] == list(TUNED)


def test_a_wrong_list_ends_the_command_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gangline", "bench", "balance", "--factors", "1,x"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--factors is '1,x'; expected numbers with commas" in capsys.readouterr().err


@pytest.mark.slow
def test_unequal_ranks_writes_a_row_for_each_rank_their_sum_ddp_and_the_balanced_run(tmp_path: Path) -> None:
    path = tmp_path / "unequal.json"
    words = ["unequal-ranks", "--factors", "4", "--batch-size", "16", "--runs", "2", "--run-seconds", "0"]
    done = CliRunner().invoke(bench, [*words, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    at_shares = ["the same, at balanced shares", "the same, each step as long as its slowest"]
    names = ["rank 0 alone", "rank 1 alone", "sum of ranks alone", *at_shares, "DDP", "balanced"]
    assert [row["who"] for row in rows] == names
    assert [row["split"] for row in rows[:-1]] == [*[None] * 5, "16:16"]
    assert rows[4]["samples_per_s"] <= rows[3]["max"]
    first, last = map(int, rows[-1]["split"].split(":"))
    assert first + last == 32
    assert last < first
    assert rows[2]["of_the_sum"] == rows[3]["of_the_sum_at_shares"] == rows[5]["ratio_to_ddp"] == 1
