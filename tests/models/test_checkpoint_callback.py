"""Checkpoints of a run: when they are written, which are kept, corrupt files, a full disk, and locks of prefixes."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Cut, Told, labelled, same_bits
from torch import nn

from gangline import Communicator, Module, cpu, create, spawn
from gangline.callback import Checkpoint, module_checkpoint
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.kvstore.errors import DiskFullError
from gangline.kvstore.optimizer import files
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs, remove_older, writing
from gangline.models.workers import Workers
from tests.full_disk import fill, make_space, needs_mount, small_disk

SAMPLES = 12
arrays = partial(labelled, SAMPLES, 4, 3)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


OF_FIT = {"batch_end_callback", "batch_size", "eval_data", "resume", "validation_metric"}


def fitted(
    prefix: Path, num_epoch: int, *, store: Any = "local", by_batches: bool = False, values: Any = None, **options: Any
) -> tuple[Module, Checkpoint]:
    """Train with 3 batches per epoch and a Checkpoint with these options, which keeps the best of such values."""
    fit = {name: options.pop(name) for name in OF_FIT & options.keys()}
    if values is not None:
        fit |= {"eval_data": arrays(), "validation_metric": Told(values, batches=3)}
        options |= {"keep_best": "custom"}
    fit = {"batch_size": 4} | fit
    fit |= {"optimizer_params": {"learning_rate": 0.1, "momentum": 0.9}, "eval_metric": "loss", "kvstore": store}
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        saves = Checkpoint(module, prefix, **options)
        where = "batch_end_callback" if by_batches else "epoch_end_callback"
        module.fit(arrays(), num_epoch=num_epoch, **{where: saves}, **fit)
        return module, saves


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def clock() -> Callable[[], float]:
    """Return what replaces the time: each call advances it by one second."""
    return partial(next, count(1001.0))


def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the module's step and the checkpoint's number at each save."""
    found: list[Any] = []
    save = checkpoint.save

    def record(saved: checkpoint.TrainingState, prefix: Path, epoch: Any, workers: Workers, state: Any) -> None:
        found.append((saved.step, epoch))
        save(saved, prefix, epoch, workers, state)

    monkeypatch.setattr(checkpoint, "save", record)
    return found


@pytest.mark.parametrize(
    ("num_epoch", "period", "expected"), [(3, {}, [(4, 1), (7, 2)]), (2, {"period": 2}, [(2, 0), (5, 1)])]
)
def test_with_minutes_time_decides_alone_or_beside_a_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_epoch: int, period: dict[str, int], expected: Any
) -> None:
    """The clock is read once per batch, and again at each save, which begins the next interval."""
    found = written(monkeypatch)
    monkeypatch.setattr("gangline.models.workers.time.monotonic", clock())
    fitted(tmp_path / "net", num_epoch, by_batches=True, minutes=3 / 60, **period)
    assert found == expected


def with_clocks_of_their_own(comm: Communicator, prefix: str) -> Any:
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
        patch.setattr("gangline.models.workers.time.monotonic", clock() if comm.rank == 0 else lambda: 0.0)
        found = written(patch)
        fitted(Path(prefix), 3, store=store, by_batches=True, minutes=3 / 60)
    return found


def test_in_a_job_rank_0s_clock_decides_for_all(tmp_path: Path) -> None:
    first, second = spawn(with_clocks_of_their_own, 2, str(tmp_path / "net"))
    assert first == second
    assert first


@pytest.mark.parametrize("options", [{}, {"save_optimizer_states": True}])
def test_mxnets_module_checkpoint_saves_states_if_requested(tmp_path: Path, options: dict[str, bool]) -> None:
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        saves = module_checkpoint(module, tmp_path / "net", 2, **options)
        module.fit(arrays(), batch_size=5, num_epoch=3, epoch_end_callback=saves)
    assert saved(tmp_path) == ["net-0002"]
    assert (checkpoint.read(tmp_path / "net", 2).optimizer_state is not None) == bool(options)


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    _, saves = fitted(prefix, 6, keep=2, values=[0.2, 0.9, 0.5, 0.9, 0.1, 0.3])
    assert epochs(prefix) == [5, 6]
    assert saved(tmp_path) == ["net-0005", "net-0006", "net-best"]
    assert saves.best == pytest.approx(0.9)
    assert checkpoint.read(prefix, "best").position["epoch"] == 2  # the fourth was no better


def test_the_best_is_loaded_and_gone_on_from_by_its_name(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    fitted(prefix, 3, values=[0.2, 0.9, 0.5])
    best = Module.load(prefix, "best", network=network())
    assert same_bits(best.get_params(), checkpoint.read(prefix, 2).params)
    module, _ = fitted(prefix, 3, resume=(prefix, "best"))
    assert module.position.epoch == 3
    assert same_bits(module.get_params(), checkpoint.read(prefix, 3).params)


def test_the_best_may_be_the_smallest(tmp_path: Path) -> None:
    fitted(tmp_path / "net", 4, values=[0.2, 0.1, float("nan"), 0.5], mode="min")
    assert checkpoint.read(tmp_path / "net", "best").position["epoch"] == 2


def test_the_best_stays_with_its_callback_when_a_run_is_resumed_with_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The values of the second run are below 0.9, though it resumes before that and saves by minutes, too."""
    prefix = tmp_path / "net"

    def run(num_epoch: int, values: list[float], before: list[Any], resume: Any, **options: Any) -> Checkpoint:
        return fitted(prefix, num_epoch, values=values, batch_end_callback=before, resume=resume, **options)[1]

    run(2, [0.2, 0.9], [], None)
    for resume in ("auto", (prefix, 1)):
        assert run(3, [0.5, 0.6], [Checkpoint(None, prefix, minutes=100)], resume).best == pytest.approx(0.9)
        assert checkpoint.read(prefix, "best").position["epoch"] == 2
    assert "dropped" not in caplog.text
    assert run(4, [0.1], [], "auto", mode="min").best == pytest.approx(0.1)
    assert "has the state of ['Checkpoint net custom max'], which this run does not have" in caplog.text


def test_later_checkpoints_of_another_run_are_kept(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    fitted(prefix, 5)
    fitted(prefix, 2, keep=1)
    assert epochs(prefix) == [2, 3, 4, 5]


@pytest.mark.parametrize("step", range(6))
def test_a_removal_cut_off_anywhere_leaves_the_newest_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    prefix = tmp_path / "net"
    fitted(prefix, 3)
    calls, unlink = count(), os.unlink

    def cut(*path: Any, **options: Any) -> None:
        if next(calls) == step:
            raise Cut
        unlink(*path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", cut)
        with pytest.raises(Cut):
            remove_older(prefix, 3, 1)
    for number in epochs(prefix):
        checkpoint.read(prefix, number)
    assert epochs(prefix)[-1] == 3
    fitted(prefix, 4, resume=prefix, keep=1)
    assert saved(tmp_path) == ["net-0004"]


def test_a_checkpoint_that_cannot_be_removed_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "net-0001.json")

    monkeypatch.setattr("gangline.models.loop.callbacks.remove_older", refuse)
    with caplog.at_level(logging.WARNING, "gangline"):
        fitted(tmp_path / "net", 2, keep=1)
    assert epochs(tmp_path / "net") == [1, 2]
    assert "net-0001.json" in caplog.text


def test_invalid_options_are_refused_before_training(tmp_path: Path) -> None:
    options: dict[str, Any]
    for options, message in (
        ({"period": 0}, "period is 0; expected 1 or more"),
        ({"keep": 0}, "keep is 0"),
        ({"minutes": 0}, "minutes is 0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"keep_best": "acc", "mode": "least"}, "mode is 'least'"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoint(Module(network(), nn.CrossEntropyLoss()), "net", **options)
    with pytest.raises(ValueError, match=r"Checkpoint needs 'accuracy', but validation computes \['loss'\]"):
        fitted(tmp_path / "net", 1, keep_best="accuracy", eval_data=arrays())
    assert not list(tmp_path.iterdir())


def damage(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "torn":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "other-form":
        content = json.loads(path.read_text())
        del content["position"], content["checksum"]
        path.write_text(json.dumps(content | {"checksum": checkpoint._checksum(content)}))
    elif how == "nested":
        path.write_text("[" * 200_000)
    elif how == "foreign":
        path.write_bytes((path.parent.with_name("net-0001") / path.name).read_bytes())
    else:  # change one byte
        content = bytearray(path.read_bytes())
        content[{"last-byte": -1, "state": content.find(b"momentum"), "step": content.find(b'"step": ') + 8}[how]] ^= 1
        path.write_bytes(content)


CORRUPT = [
    *(("checkpoint.json", how) for how in ("torn", "other-form", "nested", "step", "gone")),
    *(("weights.safetensors", how) for how in ("foreign", "last-byte", "torn", "gone")),
    *(("state.safetensors", how) for how in ("foreign", "last-byte", "state", "torn")),
]


def test_a_corrupt_newest_checkpoint_is_an_error_before_training(tmp_path: Path) -> None:
    fitted(tmp_path / "net", 2)
    whole = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    for name, how in CORRUPT:
        damage(tmp_path / "net-0002" / name, how)
        before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
        message = f"net-0002/{name}".replace(".", r"\.") + (" does not belong to" if how == "foreign" else "")
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            fitted(tmp_path / "net", 3, resume="auto")
        assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before, (name, how)
        for path, content in whole.items():
            path.write_bytes(content)


SAVE = """
import os, signal, sys
from gangline.kvstore.optimizer import files
import torch
from torch import nn
from gangline import Module, cpu
path = sys.argv[1]
fsync = os.fsync
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # when the first file is written
if len(sys.argv) > 2:
    files.save(files.Path(path), {"a": torch.ones(1000)}, {})
with Module(nn.Linear(4, 3), nn.CrossEntropyLoss(), cpu()) as module:
    module.save_checkpoint(path, 7)
"""


@pytest.mark.slow
def test_files_of_a_killed_save_are_removed_by_the_next(tmp_path: Path) -> None:
    for more in ((), ("states",)):
        killed = subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / "net"), *more], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3, list(tmp_path.iterdir())  # a lock, a folder and a file
    fitted(tmp_path / "net", 1)  # of another epoch
    files.save(tmp_path / "net", {"a": torch.ones(3)}, {})
    assert saved(tmp_path) == ["net", "net-0001"]


# A full disk: a warning, the previous checkpoint stays, training goes on; the last one is an error


FEATURES = 200
WEIGHTS = 4 * (FEATURES * FEATURES + FEATURES)
"""Bytes of the weights, and of their momentum."""


def fitted_wide(prefix: Path, store: Any, after_epoch: Callable[[int], object]) -> Module:
    """Train 4 epochs with a checkpoint after each, and this call before each."""
    torch.manual_seed(0)
    with Module(nn.Linear(FEATURES, FEATURES), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(
            (torch.randn(8, FEATURES), torch.randint(FEATURES, (8,))),
            num_epoch=4,
            batch_size=4,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            epoch_end_callback=[lambda epoch, *_: after_epoch(epoch), Checkpoint(module, prefix)],
        )
        return module


@needs_mount
def test_a_full_disk_is_a_warning_and_a_later_checkpoint_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path, 2000) as disk:
        actions = {1: fill, 3: make_space}
        module = fitted_wide(disk / "net", "local", lambda epoch: actions.get(epoch, lambda _: None)(disk))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 2
        for number, text in zip((2, 3), warnings, strict=True):
            assert re.fullmatch(
                rf"{disk}/net-{number:04d} cannot be written: its data have \d+ bytes, and the disk "
                r"has \d+ bytes free \(No space left on device\); training goes on, and checkpoint 1 stays",
                text,
            )
        assert epochs(disk / "net") == [1, 4]
        assert torch.equal(checkpoint.read(disk / "net", 4).params["weight"], module.get_params()["weight"])


@needs_mount
def test_the_last_checkpoint_that_does_not_fit_is_an_error_and_the_previous_one_stays(tmp_path: Path) -> None:
    """Two checkpoints fit; the state of the third does not."""
    with small_disk(tmp_path, (5 * WEIGHTS >> 10) + 200) as disk:
        with pytest.raises(DiskFullError, match=r"net-0004 cannot be written: its data have"):
            fitted_wide(disk / "net", "local", lambda _: None)
        assert epochs(disk / "net") == [1, 2]
        assert checkpoint.read(disk / "net", 2).step == 4
        assert saved(disk) == ["net-0001", "net-0002"]


def fitted_by_two(comm: Communicator, disk: str) -> str:
    def fill_on_first(epoch: int) -> None:
        if (comm.rank, epoch) == (0, 1):
            fill(Path(disk))

    with create("allreduce", communicator=comm) as store:
        try:
            fitted_wide(Path(disk) / "net", store, fill_on_first)
        except DiskFullError as error:
            return str(error)
    return ""


@pytest.mark.slow
@needs_mount
def test_all_workers_go_on_and_all_get_the_error_at_the_end(tmp_path: Path) -> None:
    with small_disk(tmp_path, 2000) as disk:
        first, second = spawn(fitted_by_two, 2, str(disk), threads=1)
        assert first == second
        assert first.startswith(f"{disk}/net-0004 cannot be written")
        assert epochs(disk / "net") == [1]


# Locks: one process writes the files of a prefix at a time


def _hold(connection: Connection) -> None:
    with writing(connection.recv()):
        connection.send("held")
        connection.recv()
    connection.send("released")


def start_holder(prefix: Path) -> ProcessPool:
    """Start a process that holds the prefix until it gets a message or is killed."""
    pool = ProcessPool(_hold, 1)
    pool.connections[0].send(str(prefix))
    assert pool.connections[0].recv() == "held"
    return pool


def test_a_prefix_that_another_process_writes_is_refused_and_names_it(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with start_holder(prefix) as holder:
        message = f"process {holder.pids[0]} on .* is writing checkpoints {re.escape(str(prefix))}-"
        with pytest.raises(RuntimeError, match=message):
            fitted(prefix, 1)
        with Module(nn.Linear(2, 2), context=cpu()) as module, pytest.raises(RuntimeError, match=message):
            module.save_checkpoint(prefix, 1)
        assert epochs(prefix) == []
        fitted(tmp_path / "other", 1)
        holder.connections[0].send("end")
        assert holder.connections[0].recv() == "released"
    fitted(prefix, 1)
    assert epochs(prefix) == [1]
    assert not list(tmp_path.glob("*.lock"))


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with start_holder(prefix) as holder:
        pid = holder.pids[0]
    assert f"process {pid} " in Path(f"{prefix}.lock").read_text()
    fitted(prefix, 1)
    assert epochs(prefix) == [1]


def test_blocks_of_one_process_overlap(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with writing(prefix):
        with writing(prefix):
            pass
        with pytest.raises(RuntimeError, match=f"process {os.getpid()} on"):
            spawn(_holds, 1, str(prefix))
    assert spawn(_holds, 1, str(prefix)) == [True]


def _holds(_: Communicator, prefix: str) -> bool:
    with writing(prefix):
        return True


def test_of_many_that_begin_at_once_one_holds(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    for round_of_all in zip(*spawn(_try, 3, str(prefix)), strict=True):
        assert sum(round_of_all) == 1
    assert not Path(f"{prefix}.lock").exists()


def _try(comm: Communicator, prefix: str) -> list[bool]:
    held = []
    for _ in range(8):
        comm.barrier()
        try:
            with writing(prefix):
                comm.barrier()
                held.append(True)
        except RuntimeError:
            comm.barrier()
            held.append(False)
    return held


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("link", "a symbolic link in a folder that other users may write is not followed"),
        ("pipe", "a file that is not a regular one in a folder that other users may write is not opened"),
        pytest.param(
            "file",
            "a file of user 65534 in a folder that other users may write is not opened",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user"),
        ),
    ],
)
def test_a_file_of_another_user_in_a_folder_that_others_may_write_is_not_used(
    kind: str, text: str, tmp_path: Path
) -> None:
    shared, precious = tmp_path / "shared", tmp_path / "precious"
    shared.mkdir()
    precious.write_text("precious")
    placed = [shared / "net.lock", shared / f"states.{os.getpid()}.tmp"]
    for path in placed:
        if kind == "link":
            path.symlink_to(precious)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.touch(0o666)
            os.chown(path, 65534, 65534)
    shared.chmod(0o1777)
    with pytest.raises(OSError, match=re.escape(f"{text}; remove it: '{placed[0]}'")), writing(shared / "net"):
        pass
    assert precious.read_text() == "precious"
    placed[0].unlink()
    with writing(shared / "net"):
        files.save(shared / "states", {"a": torch.ones(3)}, {})
    assert sorted(path.name for path in shared.iterdir()) == sorted([placed[1].name, "states"])


SAVE_OFTEN = """
import sys, torch; from pathlib import Path
from gangline.kvstore.optimizer import files
print(flush=True)
input()
for _ in range(40): files.save(Path(sys.argv[1]), {"w": torch.zeros(1 << 16)}, {})
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and the command unshare")
def test_processes_of_one_id_in_two_containers_save_to_one_path(tmp_path: Path) -> None:
    command = ["unshare", "-pf", "--mount-proc", sys.executable, "-c", SAVE_OFTEN, str(tmp_path / "states")]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        both = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            for _ in range(2)
        ]
        for one in both:
            assert one.stdout is not None
            one.stdout.readline()
        for one in both:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        assert [(*one.communicate(timeout=60), one.returncode) for one in both] == [("", "", 0)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["states"]
