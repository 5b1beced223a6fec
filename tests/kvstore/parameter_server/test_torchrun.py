"""Scheduler and servers as children of workers: they end with the job or with the worker, and not before."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.collectives.processes.spawning import Ranks
from gangline.kvstore.parameter_server import torchrun
from gangline.kvstore.parameter_server.torchrun import ChildServers
from tests.collectives.processes import Bare
from tests.kvstore.parameter_server.in_process import LIMIT

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def children() -> Iterator[ChildServers]:
    children = ChildServers()
    yield children
    children.kill()


def test_a_stopped_child_is_killed_some_time_after_the_end_of_the_job(
    children: ChildServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "_END_SECONDS", 0.2)
    children.start_scheduler(1, 1, "127.0.0.1")
    (child,) = children._children
    child.send_signal(signal.SIGSTOP)
    asked: list[int] = []

    def is_job_over() -> bool:  # other workers go on for a while
        asked.append(len(asked))
        return len(asked) > 20

    closing = threading.Thread(target=children.close, args=(is_job_over,), daemon=True)
    closing.start()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert len(asked) == 21
    assert child.returncode == -signal.SIGKILL


def test_children_outlive_the_thread_that_asked_for_them(children: ChildServers) -> None:
    starting = threading.Thread(target=children.start_scheduler, args=(1, 1, "127.0.0.1"))
    starting.start()
    starting.join(LIMIT)
    (child,) = children._children  # it has announced its port, so it has asked for the signal
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)


def start_and_wait(place: Bare, pipe: str) -> None:
    """Start a scheduler, write its process id to a pipe and wait to be killed."""
    children = ChildServers()
    children.start_scheduler(1, 1, "127.0.0.1")
    Path(pipe).write_text(str(children._children[0].pid))
    signal.pause()


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ranks = Ranks(start_and_wait, 1, (str(pipe),), opener=Bare)
    try:
        child = os.pidfd_open(int(pipe.read_text()))
        os.kill(ranks.pids[0], signal.SIGKILL)
        readable, _, _ = select.select([child], [], [], LIMIT)
        os.close(child)
        assert readable
    finally:
        ranks.close()
