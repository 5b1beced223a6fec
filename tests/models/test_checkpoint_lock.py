"""Locks of checkpoint prefixes: one process writes the files of a prefix at a time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Communicator, Module, cpu, spawn
from gangline.callback import Checkpoint
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.kvstore.optimizer import files
from gangline.models.checkpoint.checkpoint import epochs, writing


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


def trained(prefix: Path, **options: Any) -> None:
    data = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    with Module(nn.Linear(2, 2), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(data, num_epoch=1, batch_size=2, epoch_end_callback=Checkpoint(module, prefix), **options)


def test_a_prefix_that_another_process_writes_is_refused_and_names_it(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with start_holder(prefix) as holder:
        message = f"process {holder.pids[0]} on .* is writing checkpoints {re.escape(str(prefix))}-"
        with pytest.raises(RuntimeError, match=message):
            trained(prefix)
        with Module(nn.Linear(2, 2), context=cpu()) as module, pytest.raises(RuntimeError, match=message):
            module.save_checkpoint(prefix, 1)
        assert epochs(prefix) == []
        trained(tmp_path / "other")
        holder.connections[0].send("end")
        assert holder.connections[0].recv() == "released"
    trained(prefix)
    assert epochs(prefix) == [1]
    assert not list(tmp_path.glob("*.lock"))


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with start_holder(prefix) as holder:
        pid = holder.pids[0]
    assert f"process {pid} " in Path(f"{prefix}.lock").read_text()
    trained(prefix)
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


SAVE = """
import sys, torch; from pathlib import Path
from gangline.kvstore.optimizer import files
print(flush=True)
input()
for _ in range(40): files.save(Path(sys.argv[1]), {"w": torch.zeros(1 << 16)}, {})
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and the command unshare")
def test_processes_of_one_id_in_two_containers_save_to_one_path(tmp_path: Path) -> None:
    command = ["unshare", "-pf", "--mount-proc", sys.executable, "-c", SAVE, str(tmp_path / "states")]
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
