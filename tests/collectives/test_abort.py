"""`Communicator.abort`: ends the calls of all ranks with the same error."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from gangline import Communicator, spawn
from gangline.collectives import communicator
from gangline.collectives.communicator import in_process
from gangline.collectives.errors import GanglineError, MismatchError, StallError
from gangline.collectives.liveness.status_socket import stack_of
from gangline.collectives.torch_backend.process_group import GanglineProcessGroup
from tests.collectives.ranks import LARGE, in_ranks
from tests.collectives.situations import Said, error_of

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


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "ipc", "tcp"])
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


# The process group of torch


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
