"""Calls that fail, time out, are closed or refused on one rank: the others get an error, never other bytes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gangline import Communicator, spawn
from gangline.collectives.communicator import in_process
from gangline.collectives.errors import GanglineError, StallError
from gangline.collectives.transports.base import MessageTag
from tests.collectives.processes import Processes, Rank, join_group
from tests.collectives.situations import error_of
from tests.collectives.stage import Actor, Stage

pytestmark = pytest.mark.timeout(60)

COUNT = 1 << 20  # float32 elements: too many for a slot
WRITTEN = 7.0  # what the sender writes after its call

# Messages of failed calls


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def _broadcast_too_early(comm: Communicator, tensor: Tensor) -> None:
    with pytest.raises(StallError):
        comm.broadcast(tensor)


def _close_with_a_pending_send(comm: Communicator, tensor: Tensor) -> None:
    comm.send(tensor, 1, async_op=True)
    comm.close()


def _abort_a_pending_send(comm: Communicator, tensor: Tensor) -> None:
    work = comm.send(tensor, 1, async_op=True)
    comm.abort(GanglineError("rank 0 has no time"))
    with pytest.raises(GanglineError):
        work.wait()


FAILURES: dict[str, tuple[Callable[[Communicator, Tensor], None], Callable[[Communicator, Tensor], object], str]] = {
    "broadcast that timed out": (
        _broadcast_too_early,
        lambda comm, tensor: comm.broadcast(tensor),
        r"broadcast\(1048576 x float32, root 0\), call \d, has waited \d.* s: rank 0 arrived, rank 1 did not.*; .*",
    ),
    "send that was closed": (
        _close_with_a_pending_send,
        lambda comm, tensor: comm.recv(tensor, 0),
        r"rank 0 closed its communicator \(rank 1 waited in recv\(1048576 x float32\)\)",
    ),
    "send that was aborted": (_abort_a_pending_send, lambda comm, tensor: comm.recv(tensor, 0), "rank 0 has no time"),
}


def _fail_and_write(comm: Communicator, folder: str, registered: bool) -> list[str | list[float]]:
    """Return what rank 1 receives, or its error, after rank 0's call has failed in each way and its tensor was written.

    Each way has a group of its own, whose calls wait for a second.
    """
    if comm.transport != "in_process":
        os.environ["GANGLINE_TIMEOUT"] = "1"
    found: list[str | list[float]] = []
    for number, (failing, receiving, _) in enumerate(FAILURES.values()):
        group = comm.split(0)
        written = Path(folder, f"written {number}")
        tensor = group.empty(COUNT) if registered else torch.empty(COUNT)
        tensor.fill_(comm.rank)
        if comm.rank == 0:
            failing(group, tensor)
            tensor.fill_(WRITTEN)
            written.touch()
        else:
            _wait_for(written)
            error = error_of(partial(receiving, group, tensor))
            found.append(tensor.unique().tolist() if error is None else error.text)
        group.close()
    return found


@pytest.mark.parametrize("medium", ["in_process", "shared_memory", "registered memory"])
def test_bytes_written_after_a_failed_call_reach_nobody(
    medium: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (str(tmp_path), medium == "registered memory")
    if medium == "in_process":
        comms = in_process(2)
        monkeypatch.setenv("GANGLINE_TIMEOUT", "1")
        with ThreadPoolExecutor(2) as threads:
            _, texts = threads.map(partial(_fail_and_write, folder=arguments[0], registered=False), comms)
        for comm in comms:
            comm.close()
    else:
        _, texts = spawn(_fail_and_write, 2, *arguments, transport="shared_memory")
    for text, (_, _, pattern) in zip(texts, FAILURES.values(), strict=True):
        assert isinstance(text, str), text
        assert re.fullmatch(pattern, text), text


def _withdraw_during_a_read(comm: Communicator, folder: str) -> str | list[float]:
    began, written = Path(folder, "began"), Path(folder, "written")
    transport = comm._resources.transport
    tensor = torch.full((COUNT,), float(comm.rank))
    if comm.rank == 0:
        comm._resources.watchdog.begin(1, 0)
        transport.send(1, tensor.view(torch.uint8), MessageTag(1, 0))
        _wait_for(began)
        transport.withdraw()
        comm._resources.membership.fail(GanglineError("rank 0 gives up"))
        tensor.fill_(WRITTEN)
        written.touch()
        return ""
    request = transport.receive(0)
    began.touch()
    _wait_for(written)
    try:
        request.into(tensor.view(torch.uint8))
    except GanglineError as error:
        return str(error)
    return tensor.unique().tolist()


def test_a_message_withdrawn_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    assert spawn(_withdraw_during_a_read, 2, str(tmp_path), transport="shared_memory", timeout=10)[1] == (
        "rank 0 gives up"
    )


def _broadcast_to_a_stopped_rank(comm: Communicator, path: str) -> str | list[float]:
    actor = Actor(comm.rank, path)
    tensor = torch.full((16 * COUNT,), float(comm.rank))  # more than the buffers of sockets take
    comm.barrier()
    actor.tell("ready")
    actor.hear()
    try:
        comm.broadcast(tensor)
    except GanglineError as error:
        tensor.fill_(WRITTEN)
        if comm.rank == 0:
            actor.tell("written")
        return str(error)
    return tensor.unique().tolist()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_bytes_written_after_a_failed_call_leave_no_socket(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TIMEOUT", "1")
    with Stage(_broadcast_to_a_stopped_rank, 2, transport=transport) as stage:
        assert [stage.heard(rank) for rank in (0, 1)] == ["ready"] * 2
        stage.stop(1)
        stage.say(0)
        assert stage.heard(0) == "written"
        stage.say(1)
        stage.signal(1, signal.SIGCONT)
        texts = [outcome.value for outcome in stage.outcomes()]
    assert texts[0] == texts[1]
    assert texts[0].startswith("broadcast(16777216 x float32, root 0), call 2, has waited 1"), texts


# Calls that one rank refuses


def _ones(count: int = 3) -> Tensor:
    return torch.ones(count)


Group = Any

REFUSED: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str]] = {
    "tensors": (
        lambda group: dist.all_reduce(_ones(), group=group),
        lambda group: group.allreduce([_ones(), _ones()]).wait(),
        "allreduce: ValueError: 2 tensors were given; expected 1",
    ),
    "operation": (
        lambda group: dist.all_reduce(_ones(), group=group),
        lambda group: dist.all_reduce(_ones(), dist.ReduceOp.BAND, group),
        "all_reduce: TypeError: a tensor of torch.float32 has no bits to combine",
    ),
    "output list": (
        lambda group: dist.all_gather([_ones(), _ones()], _ones(), group),
        lambda group: dist.all_gather([_ones()], _ones(), group),
        "all_gather: ValueError: 1 output tensors were given; expected one for each of 2 ranks",
    ),
    "in the background": (
        lambda group: _wait(dist.reduce_scatter_tensor(_ones(), _ones(6), group=group, async_op=True)),
        lambda group: _wait(dist.reduce_scatter_tensor(_ones(), _ones(5), group=group, async_op=True)),
        "reduce_scatter: ValueError: the input has shape (5,)",
    ),
}


def _wait(work: object) -> None:
    work.wait()


def _refuse(rank: Rank, path: str) -> None:
    join_group(rank, path, seconds=10)
    outcomes = []
    for valid, refused, _ in REFUSED.values():
        group = dist.new_group()
        dist.barrier(group)
        both = error_of(partial(refused, group))  # all ranks refuse it: the group stays usable
        sums = torch.ones(3)
        dist.all_reduce(sums, group=group)
        one = error_of(partial(valid if rank.rank == 0 else refused, group))
        later = error_of(partial(dist.all_reduce, _ones(), group=group))
        outcomes.append([both, sums.tolist(), one or ["", ""], later])
    dist.destroy_process_group()
    rank.tell(outcomes)


def test_a_call_that_one_rank_refuses_is_an_error_of_all(tmp_path: Path) -> None:
    with Processes(_refuse, 2, f"{tmp_path}/store") as processes:
        by_rank = processes.all_heard()
    for (_, _, text), waiting, refusing in zip(REFUSED.values(), *by_rank, strict=True):
        name, _, why = text.partition(": ")
        for both, sums, _, _ in (waiting, refusing):
            assert ": ".join(both).startswith(why)
            assert sums == [2, 2, 2]
        assert ": ".join(refusing[2]).startswith(why)
        assert waiting[2][0] == "MismatchError"
        assert waiting[2][1].startswith(f"rank 1 refused call 4, {name}: {why}"), waiting[2]
        assert waiting[3] == refusing[3] == waiting[2]
