"""Calls that fail, time out, are closed, refused or aborted on one rank: all get an error, never other bytes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from gangline import Communicator, spawn
from gangline.collectives import communicator
from gangline.collectives.communicator import in_process
from gangline.collectives.errors import GanglineError, MismatchError, StallError
from gangline.collectives.liveness.status_socket import stack_of
from gangline.collectives.torch_backend.process_group import GanglineProcessGroup
from gangline.collectives.transports.base import MessageTag
from tests.collectives.processes import Processes, Rank, join_group
from tests.collectives.ranks import LARGE, in_ranks
from tests.collectives.situations import Said, error_of
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


@pytest.mark.parametrize(
    "medium",
    ["shared_memory", *(pytest.param(one, marks=pytest.mark.slow) for one in ("in_process", "registered memory"))],
)
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


@pytest.mark.parametrize("transport", [pytest.param("ipc", marks=pytest.mark.slow), "tcp"])
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


# Aborted calls


TEXT = "rank 0 has had enough"
_OURS = Path(communicator.__file__).parent


def _in_the_background(comm: Communicator) -> None:
    first = comm.all_reduce(torch.ones(3), async_op=True)
    second = comm.all_reduce(torch.ones(LARGE), async_op=True)
    second.wait()
    first.wait()


def _abort_when_it_waits(comm: Communicator, waiter: int) -> None:
    """Abort once a thread of this process waits."""
    is_wait = re.compile(rf"{re.escape(str(_OURS))}/.* in .*(wait|until)").match
    while not any(map(is_wait, stack_of(waiter))):
        time.sleep(0.001)
    comm.abort(StallError(TEXT))


WAITS: dict[str, Callable[[Communicator], object]] = {
    "small all_reduce": lambda comm: comm.all_reduce(torch.ones(3)),
    "large all_reduce": lambda comm: comm.all_reduce(torch.ones(LARGE)),
    "in the background": _in_the_background,
    "broadcast": lambda comm: comm.broadcast(torch.ones(LARGE), 1),
    "barrier": lambda comm: comm.barrier(),
    "recv": lambda comm: comm.recv(torch.ones(3), 1 if comm.rank != 1 else 0),
    "recv in the background": lambda comm: comm.recv(torch.ones(3), 1 if comm.rank != 1 else 0, async_op=True).wait(),
    "settling": lambda comm: [comm.barrier(async_op=True), comm.all_gather(torch.ones(2))],
}
"""Calls that wait for rank 1, which never makes them."""


def give_up(comm: Communicator, name: str) -> list[Said | None]:
    """Rank 0 waits, and another thread of it aborts; rank 2 waits; rank 1 calls when both have their errors."""
    group = comm.split(0)
    if comm.rank == 1:
        comm.barrier()
    thread = threading.Thread(target=_abort_when_it_waits, args=(group, threading.get_ident()))
    if comm.rank == 0:
        thread.start()
    errors = [error_of(lambda: WAITS[name](group))]
    if comm.rank == 0:
        thread.join()
    if comm.rank != 1:
        comm.barrier()
    later = (lambda: group.all_reduce(torch.ones(3)), lambda: group.recv(torch.ones(3), (comm.rank + 1) % 3))
    errors += [error_of(call) for call in later]
    comm.barrier()
    group.close()
    return errors


def give_everything_up(comm: Communicator) -> list[list[Said | None]]:
    return [give_up(comm, name) for name in WAITS]


@pytest.mark.parametrize(
    "transport", ["in_process", "shared_memory", pytest.param("ipc", marks=pytest.mark.slow), "tcp"]
)
def test_all_ranks_get_the_error_of_an_abort(transport: str) -> None:
    for rank, of_rank in enumerate(in_ranks(transport, 3, give_everything_up)):
        for name, errors in zip(WAITS, of_rank, strict=True):
            if rank == 1 and errors[0] is None:  # it received what the others sent before their errors
                del errors[0]
            for number, error in enumerate(errors):
                assert error is not None, (rank, name, number)
                assert tuple(error) == ("StallError", TEXT), (rank, name, number)


def test_the_first_error_stays_and_must_be_one_that_can_be_sent() -> None:
    comm, other = in_process(2)
    with pytest.raises(TypeError, match=r"error is ValueError\('x'\); expected a GanglineError"):
        comm.abort(ValueError("x"))
    comm.abort(MismatchError("first"))
    comm.abort(StallError("second"))
    for one in (comm, other):
        with pytest.raises(MismatchError, match="first"):
            one.barrier()
        one.close()
    comm.abort(StallError("third"))
    with pytest.raises(MismatchError, match="first"):
        comm.barrier()
    (alone,) = in_process(1)
    alone.close()
    alone.abort(StallError("too late"))
    with pytest.raises(GanglineError, match="the communicator is closed"):
        alone.barrier()


# Aborted process groups of torch


def _in_a_group(comm: Communicator, path: str, way: str) -> list[Said | None]:
    group = GanglineProcessGroup(dist.FileStore(path, comm.size), comm.rank, comm.size, timedelta(seconds=50))
    if comm.rank == 0:
        options = AllreduceOptions()
        if way == "timeout":
            options.timeout = timedelta(seconds=0.05)
        work = group.allreduce([torch.ones(3)], options)
        if way == "abort":
            group.abort()
        errors = [error_of(work.wait)]
        if way == "timeout":
            errors.append(error_of(lambda: group.broadcast([torch.ones(3)], 1).wait()))
        comm.barrier()
        group.shutdown()
        return errors
    comm.barrier()
    error_of(lambda: group.allreduce([torch.ones(3)]).wait())  # succeeds if all was sent before
    errors = [error_of(lambda: group.broadcast([torch.ones(3)], 0).wait())]
    group.shutdown()
    return errors


@pytest.mark.parametrize(
    ("way", "text"),
    [("abort", "rank 0 aborted its process group"), ("timeout", "all_reduce is still running after 0.05 s")],
)
def test_a_process_group_ends_by_abort_and_by_a_calls_own_timeout(way: str, text: str, tmp_path: Path) -> None:
    kind = "GanglineError" if way == "abort" else "StallError"
    for errors in spawn(_in_a_group, 2, str(tmp_path / "meet"), way, timeout=60):
        assert [error and tuple(error) for error in errors] == [(kind, text)] * len(errors)


# At the limits of a process, and interrupts without the core


def _without_threads(comm: Communicator, kind: str) -> str:
    """Return the error of an asynchronous call whose thread rank 0 cannot start."""

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("gangline-") or type(thread).__name__ == "GarbageCollectorThread":
            raise RuntimeError("can't start new thread")
        really_start(thread)

    values, really_start = torch.full((COUNT,), float(comm.rank)), threading.Thread.start
    if comm.rank == 0:
        threading.Thread.start = start  # type: ignore[method-assign]
    try:
        if kind == "copied":
            comm.send(values, 1) if comm.rank == 0 else comm.recv(values, 0)
            return str(values.sum().item())
        if kind == "collective":
            comm.all_reduce(values, async_op=True).wait()  # type: ignore[union-attr]
        else:
            comm.recv(values, 1 - comm.rank, async_op=True).wait()  # type: ignore[union-attr]
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        threading.Thread.start = really_start  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize("kind", ["copied", "collective", "message"])
def test_a_process_at_its_limit_of_threads_is_named_on_all_ranks(kind: str) -> None:
    own, other = spawn(_without_threads, 2, kind, transport="tcp", timeout=30)
    if kind == "copied":
        assert own == other == "0.0"
    else:
        assert re.search("NoThreadError: process .* can't start new thread; .*ulimit -u", own)
        assert re.search("Error: .*rank 0.*can't start new thread", other)


def test_an_interrupt_before_a_call_without_the_core_stays_an_interrupt() -> None:
    [comm] = in_process(1)

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    comm._run_core = interrupt
    with comm, pytest.raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(2))
