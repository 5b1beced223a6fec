"""Calls by a signal handler inside a call of the same thread: refused at once, and the interrupted call goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import GanglineError, NestedCallError, StallError
from gangline.collectives.processes.spawning import spawn
from gangline.kvstore import KVStore, create
from gangline.kvstore.allreduce.store import AllReduceStore
from tests.collectives.grid import Cell, check
from tests.collectives.processes import Processes, Rank, join_group
from tests.kvstore.parameter_server.processes import run_job

LARGE = 300_007  # elements: too many for slots
Call = Callable[[], object]


def in_next_call(comm: Communicator) -> Callable[[], bool]:
    """Return a function that tells whether this rank waits in a collective begun after now."""
    watchdog, before = comm._resources.watchdog, comm._engine.sequence
    return lambda: watchdog._sequence > before and bool(watchdog._since)


def interrupted(rank: int, is_waiting: Callable[[], bool], outer: Call, handle: Call, arrived: Path) -> None:
    """Run a call, in which rank 0 runs a signal handler while it waits for the other rank."""

    def interrupt() -> None:
        while not is_waiting():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    def handler(*_: object) -> None:
        try:
            handle()
        finally:
            arrived.touch()

    if rank == 0:
        signal.signal(signal.SIGUSR1, handler)
        threading.Thread(target=interrupt).start()
    while rank and not arrived.exists():
        time.sleep(0.001)
    outer()


def refused(call: Call) -> None:
    with pytest.raises(NestedCallError, match="called inside another call"):
        call()


def summed(comm: Communicator, count: int) -> None:
    values = torch.full((count,), comm.rank + 1.0)
    comm.all_reduce(values)
    assert values.unique().tolist() == [3.0]


def split(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    with part:
        summed(part, 4)


def _calls(comm: Communicator, folder: str) -> None:
    verbs: dict[str, Call] = {
        "small": partial(summed, comm, 4),
        "large": partial(summed, comm, LARGE),
        "barrier": comm.barrier,
        "uneven": partial(check, comm, Cell("all_to_all_uneven", 2, out="out")),
        "split": partial(split, comm),
        "row": lambda: comm.reduce_scatter(torch.ones(2, 3)),
    }
    for outer in ("small", "large", "barrier", "uneven", "split"):
        for name, nested in {**verbs, "close": comm.close}.items():
            interrupted(
                comm.rank, in_next_call(comm), verbs[outer], partial(refused, nested), Path(folder) / f"{outer} {name}"
            )
        for call in verbs.values():
            call()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_collective_in_a_handler_is_refused_and_the_interrupted_one_goes_on(transport: str, tmp_path: Path) -> None:
    spawn(_calls, 2, str(tmp_path), transport=transport, timeout=40)


def _propagating(comm: Communicator, count: int, folder: str) -> str:
    def twice() -> None:  # rank 1 may have all that it needs for the first one
        summed(comm, count)
        comm.barrier()

    with pytest.raises((NestedCallError, GanglineError)) as raised:
        interrupted(comm.rank, in_next_call(comm), twice, comm.barrier, Path(folder) / "arrived")
    with pytest.raises(GanglineError, match=r"rank 0 left all_reduce.* by NestedCallError"):
        comm.barrier()
    return raised.typename


@pytest.mark.parametrize(("count", "transport"), [(4, "shared_memory"), (LARGE, "shared_memory"), (4, "tcp")])
def test_an_error_that_a_handler_lets_pass_ends_the_call_on_all_ranks(
    count: int, transport: str, tmp_path: Path
) -> None:
    kinds = spawn(_propagating, 2, count, str(tmp_path), transport=transport, timeout=40)
    assert kinds == ["NestedCallError", "GanglineError"]


def _thread_in_handler(comm: Communicator, folder: str) -> None:
    watchdog = comm._resources.watchdog

    def in_thread() -> None:
        with pytest.raises(StallError, match="another of its threads"):
            comm.barrier()

    def handle() -> None:
        limit, watchdog.timeout = watchdog.timeout, 0.2
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        watchdog.timeout = limit

    interrupted(comm.rank, in_next_call(comm), comm.barrier, handle, Path(folder) / "arrived")
    summed(comm, 4)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_thread_for_which_a_handler_waits_ends_at_the_timeout(transport: str, tmp_path: Path) -> None:
    spawn(_thread_in_handler, 2, str(tmp_path), transport=transport, timeout=40)


def _closing(comm: Communicator) -> None:
    if comm.rank == 0:
        errors: list[GanglineError] = []

        def wait() -> None:
            try:
                comm.all_reduce(torch.ones(4))
            except GanglineError as error:
                errors.append(error)

        is_waiting = in_next_call(comm)
        thread = threading.Thread(target=wait)
        thread.start()
        while not is_waiting():
            time.sleep(0.001)
        comm.close()
        thread.join(20)
        assert [str(error) for error in errors] == ["the communicator is closed"]
    else:
        while 0 not in comm._resources.membership.gone:
            time.sleep(0.001)
            comm.dead_ranks()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_close_in_another_thread_ends_a_wait(transport: str) -> None:
    spawn(_closing, 2, transport=transport, timeout=40)


def _group_calls(rank: Rank, folder: str) -> None:
    join_group(rank, f"{folder}/group")
    group: Any = dist.group.WORLD

    def all_reduced(count: int, async_op: bool = False) -> None:
        values = torch.full((count,), rank.rank + 1.0)
        work = dist.all_reduce(values, async_op=async_op)
        if async_op:
            work.wait()
        assert values.unique().tolist() == [3.0]

    def lists() -> None:
        rows = [torch.zeros(size + 1) for size in range(2)]
        dist.all_gather(rows, torch.ones(rank.rank + 1))
        assert torch.cat(rows).tolist() == [1.0] * 3

    verbs: dict[str, Call] = {
        "small": partial(all_reduced, 4),
        "large": partial(all_reduced, LARGE),
        "barrier": dist.barrier,
        "lists": lists,
    }
    verbs["async"] = partial(all_reduced, 4, True)
    for outer in verbs:
        for name, nested in verbs.items():
            arrived = Path(folder) / f"{outer} {name}"
            interrupted(rank.rank, in_next_call(group.communicator), verbs[outer], partial(refused, nested), arrived)
        for call in verbs.values():
            call()
    rank.tell("ended")
    dist.destroy_process_group()


def test_a_call_on_a_process_group_in_a_handler_is_refused(tmp_path: Path) -> None:
    with Processes(_group_calls, 2, str(tmp_path)) as ranks:
        assert ranks.all_heard() == ["ended"] * 2


def _store_calls(store: KVStore, comm: Communicator | None, folder: str) -> None:
    store.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
    pushed = 0

    def push_pull(key: str) -> None:
        nonlocal pushed
        pushed += 1
        out = torch.zeros(4)
        store.pushpull(key, torch.full((4,), store.rank + float(pushed)), out)
        assert out.unique().tolist() == [2.0 * pushed + 1]

    def pull() -> None:
        store.pull("b", torch.zeros(4))

    nested = {
        "pull": pull,
        "push": lambda: store.push("b", torch.ones(4)),
        "same": lambda: store.push("a", torch.ones(4)),
        "init": lambda: store.init("c", torch.ones(4)),
        "barrier": store.barrier,
        "close": store.close,
    }
    outers: dict[str, Call] = {"pushpull": partial(push_pull, "a")}
    if comm is not None:
        outers["barrier"] = store.barrier
    for outer, call in outers.items():
        for name, handle in nested.items():
            is_waiting = in_next_call(comm) if comm is not None else lambda: bool(store._servers.waiting)  # type: ignore[attr-defined]
            interrupted(store.rank, is_waiting, call, partial(refused, handle), Path(folder) / f"{outer} {name}")
            push_pull("b")
    store.init("c", torch.ones(4))
    store.close()


def _allreduce(comm: Communicator, folder: str) -> None:
    _store_calls(AllReduceStore(communicator=comm), comm, folder)


def test_a_call_on_an_allreduce_store_in_a_handler_is_refused(tmp_path: Path) -> None:
    spawn(_allreduce, 2, str(tmp_path), timeout=40)


def _dist(folder: str) -> None:
    _store_calls(create("dist_sync"), None, folder)


def test_a_call_on_a_dist_store_in_a_handler_is_refused(tmp_path: Path) -> None:
    run_job(_dist, 2, 1, str(tmp_path))
