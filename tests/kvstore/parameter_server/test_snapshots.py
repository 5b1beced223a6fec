"""Snapshots of servers: a job that is killed as a whole resumes at a round, with the weights of an undisturbed one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gangline import MismatchError
from gangline.kvstore.parameter_server.server.optimizer_shards import Definition
from gangline.kvstore.parameter_server.server.shards import Shard
from gangline.kvstore.parameter_server.server.snapshots import Snapshots
from tests.full_disk import needs_mount, small_disk
from tests.kvstore.test_launch import launch

pytestmark = pytest.mark.timeout(110)

LOOP = """\
import hashlib, sys, time, torch, gangline
torch.set_num_threads(1)
steps, key, spec = int(sys.argv[1]), sys.argv[2], sys.argv[3]
spec = (spec, {"learning_rate": 0.1} | ({"momentum": 0.9} if spec == "sgd" else {}))
with gangline.create(sys.argv[4]) as kv:
    outs = {key: torch.ones(10), "large": torch.ones(1_300_000), "never pushed": torch.ones(5)}
    kv.init(list(outs), list(outs.values()))
    kv.set_optimizer(spec)
    kv.pull(list(outs), list(outs.values()))
    pushed = [name for name in outs if name != "never pushed"]
    if not kv.rank:
        print("first step", kv.first_step)
    for step in range(kv.first_step, steps):
        kv.set_learning_rate(0.1 / (step + 1))
        gradients = [torch.cos(outs[name] + kv.rank + step) for name in pushed]
        kv.pushpull(pushed, gradients, [outs[name] for name in pushed])
        time.sleep(0.1)  # a snapshot is written meanwhile
    kv.pull(list(outs), list(outs.values()))
    print("weights", hashlib.sha256(b"".join(out.numpy().tobytes() for out in outs.values())).hexdigest())
"""
SERVERS = ("-s", "2")
SNAPSHOTS = (*SERVERS, "--snapshot-every", "5", "--snapshot-dir")


@pytest.fixture(autouse=True)
def no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGLINE_FAULT", raising=False)


def run(
    *options: str, steps: int = 17, key: str = "small", optimizer: str = "sgd", store: str = "dist_sync"
) -> tuple[int, set[str], str]:
    """Run the loop; return the exit code, the distinct lines of the output, and standard error."""
    with launch("-n", "2", *options, "--", sys.executable, "-c", LOOP, str(steps), key, optimizer, store) as job:
        status, out, errors = job.end(100)
    return status, {line.partition("] ")[2] for line in out}, "\n".join(errors)


def weights(lines: set[str]) -> set[str]:
    return {line for line in lines if line.startswith("weights")}


def killed(monkeypatch: pytest.MonkeyPatch, script: str, *options: str, **arguments: str) -> None:
    """Run the loop until a fault ends the job."""
    monkeypatch.setenv("GANGLINE_FAULT", script)
    status, _, errors = run(*options, **arguments)
    monkeypatch.delenv("GANGLINE_FAULT")
    assert status, errors


def rounds(folder: Path) -> list[set[int]]:
    """Return the rounds in the folder of each server."""
    return [
        {int(path.stem.removeprefix("round-")) for path in one.iterdir()} for one in sorted(folder.glob("server-*"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "script", ["server 1 kill at update 63", "server 0 kill at close 40", "worker 1 kill at push-sent 29"]
)
def test_a_killed_job_resumes_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, script: str
) -> None:
    _, undisturbed, _ = run(*SERVERS, optimizer=optimizer)
    killed(monkeypatch, script, *SNAPSHOTS, str(tmp_path), optimizer=optimizer)
    status, lines, errors = run(*SNAPSHOTS, str(tmp_path), optimizer=optimizer)
    assert status == 0, errors
    assert lines & {"first step 5", "first step 10"}
    assert weights(lines) == weights(undisturbed)
    assert all({10, 15} <= found <= {5, 10, 15} for found in rounds(tmp_path))


@pytest.mark.slow
def test_the_launcher_starts_the_job_again_from_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, undisturbed, _ = run(*SERVERS)
    monkeypatch.setenv("GANGLINE_FAULT", "server 1 kill at update 63")
    status, lines, errors = run(*SNAPSHOTS, str(tmp_path), "--max-restarts", "1")
    assert status == 0, errors
    assert "first step 0" in lines
    assert lines & {"first step 5", "first step 10"}
    assert weights(lines) == weights(undisturbed)


@pytest.mark.slow
def test_a_server_that_starts_again_alone_keeps_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, undisturbed, _ = run(*SERVERS, steps=23)
    killed(monkeypatch, "worker 0 kill at push-sent 29", *SNAPSHOTS, str(tmp_path))
    monkeypatch.setenv("GANGLINE_FAULT", "server 1 kill at update 12")
    status, lines, errors = run(*SNAPSHOTS, str(tmp_path), "--restart-processes", "1", steps=23)
    assert status == 0, errors
    assert "it starts again" in errors
    assert weights(lines) == weights(undisturbed)


@pytest.mark.slow
def test_a_damaged_snapshot_is_left_out_and_named(tmp_path: Path) -> None:
    _, undisturbed, _ = run(*SERVERS)
    run(*SNAPSHOTS, str(tmp_path), steps=12)
    damaged = tmp_path / "server-1" / "round-10.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1000] ^= 1
    damaged.write_bytes(content)
    status, lines, errors = run(*SNAPSHOTS, str(tmp_path))
    assert status == 0, errors
    assert "first step 5" in lines
    assert (
        f"leaves out the snapshot of round 10: {damaged} is damaged or not a safetensors file: its checksum is wrong"
        in errors
    )
    assert weights(lines) == weights(undisturbed)


@needs_mount
@pytest.mark.slow
def test_a_full_disk_costs_the_snapshot_only(tmp_path: Path) -> None:
    _, undisturbed, _ = run(*SERVERS)
    with small_disk(tmp_path, 14_000) as disk:
        status, lines, errors = run(*SNAPSHOTS, str(disk))
        kept = rounds(disk)
    assert status == 0, errors
    assert weights(lines) == weights(undisturbed)
    assert "has no snapshot of round" in errors
    assert "bytes free (No space left on device)" in errors
    assert kept


@pytest.mark.slow
def test_another_program_cannot_resume(tmp_path: Path) -> None:
    run(*SNAPSHOTS, str(tmp_path), steps=6)
    for text, arguments in {
        "of key 'small' from element 0 on, torch.float32 of shape (10,), and this job shard": {"key": "other"},
        "has optimizer 'sgd', and this job sets 'adam'": {"optimizer": "adam"},
    }.items():
        status, _, errors = run(*SNAPSHOTS, str(tmp_path), **arguments)
        assert status
        assert text in errors
    status, _, errors = run("-s", "1", "--snapshot-dir", str(tmp_path))
    assert status
    assert "is of a job with 2 servers, and this one has 1" in errors
    status, _, errors = run(*SNAPSHOTS, str(tmp_path), store="dist_async")
    assert status
    assert "snapshots of servers need a sync store" in errors
    status, lines, errors = run(*SNAPSHOTS, str(tmp_path))
    assert status == 0, errors
    assert "first step 5" in lines


def shard(number: int, closed: int = 0) -> Shard:
    value = torch.full((2, 3), float(10 * number + closed))
    return Shard(number, f"key {number}", 0, 3, value, True, 0, 0, closed)


def close_round(snapshots: Snapshots, shards: dict[int, Shard], *numbers: int) -> None:
    """Close the next round of some shards."""
    for number in numbers:
        one = shards[number]
        one.stored.fill_(10 * number + one.closed + 1)
        if snapshots.is_due(one.closed + 1):
            snapshots.copy(one, one.closed + 1, None)
        one.closed += 1
        snapshots.write_complete(shards.values(), None)
    snapshots.close()


def test_only_rounds_that_all_servers_have_are_resumed(tmp_path: Path) -> None:
    first, second = (Snapshots(tmp_path, 2, rank, 2) for rank in (0, 1))
    of_first, of_second = {0: shard(0), 1: shard(1)}, {2: shard(2)}
    first.announce()
    second.announce()
    for _ in range(6):
        close_round(first, of_first, 0, 1)
    for _ in range(5):
        close_round(second, of_second, 2)
    assert rounds(tmp_path) == [{2, 4, 6}, {2, 4}]
    again = Snapshots(tmp_path, 2, 0, 2)
    assert again.round == 4
    assert rounds(tmp_path) == [{2, 4}, {2, 4}]  # round 6 is taken again
    with pytest.raises(MismatchError, match="has keys that this job did not initialise: key 0, key 1"):
        again.check_resumed()
    for number in (0, 1):
        value, closed = again.take_value(definition(of_first[number])) or (None, 0)
        assert closed == 4
        assert torch.equal(value, torch.full((2, 3), 10.0 * number + 4))
    again.check_resumed()
    assert again.take_value(definition(shard(5))) is None


def test_a_shard_that_is_never_pushed_is_copied_once_others_have_gone_on(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, 2, 0, 1)
    shards = {0: shard(0), 1: shard(1)}
    snapshots.announce()
    close_round(snapshots, shards, 0)
    close_round(snapshots, shards, 0)
    assert rounds(tmp_path) == [set()]
    close_round(snapshots, shards, 0)
    assert rounds(tmp_path) == [{2}]
    close_round(snapshots, shards, 0)
    snapshots.write_complete(shards.values(), None, is_end=True)
    snapshots.close()
    assert rounds(tmp_path) == [{2, 4}]
    again = Snapshots(tmp_path, 2, 0, 1)
    assert [(again.take_value(definition(one)) or (None, None))[1] for one in shards.values()] == [4, 0]


def test_a_shard_waits_for_those_that_were_pushed_before(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, 2, 0, 1)
    shards = {0: shard(0), 1: shard(1)}
    snapshots.announce()
    close_round(snapshots, shards, 0, 1, 0, 0)
    assert rounds(tmp_path) == [set()]
    close_round(snapshots, shards, 1)
    assert rounds(tmp_path) == [{2}]


def test_the_newest_two_snapshots_are_kept_and_interrupted_writes_removed(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, 1, 0, 1)
    shards = {0: shard(0)}
    snapshots.announce()
    for _ in range(5):
        close_round(snapshots, shards, 0)
    assert rounds(tmp_path) == [{4, 5}]
    (tmp_path / "server-0" / "round-6.safetensors.123.tmp").touch()
    assert Snapshots(tmp_path, 1, 0, 1).round == 5
    assert rounds(tmp_path) == [{4, 5}]


def test_a_round_during_a_write_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = Snapshots(tmp_path, 1, 0, 1)
    large = Shard(0, "large", 0, 1, torch.zeros(20_000_000), True, 0, 0)
    snapshots.announce()
    for number in (1, 2):
        snapshots.copy(large, number, None)
        large.closed = number
        snapshots.write_complete([large], None)
    snapshots.close()
    assert rounds(tmp_path) == [{1}]
    assert "leaves out the snapshot of round 2: the one before is still being written" in caplog.text


def definition(one: Shard) -> Definition:
    return Definition(one.number, one.flat.dtype, tuple(one.stored.shape), one.width, one.key, one.begin, one.is_whole)
