"""Processes forked after a communicator was opened."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gangline import Communicator, connect, in_process, spawn
from gangline.collectives.liveness import status_socket
from gangline.collectives.transports.addresses import reachable_address
from gangline.launcher.job import free_ports
from tests.collectives.processes import Processes, Rank, join_group
from tests.collectives.situations import EVERY_CALL, all_reduce, error_of


def texts_of(calls: Iterable[Callable[[], object]]) -> str:
    """Return the calls' errors, one a line."""
    return "\n".join(error.text if error else "no error" for error in map(error_of, calls))


def in_child(run: Callable[[], str]) -> tuple[int, list[str]]:
    """Fork; return the exit status of the child, and the lines that ``run`` returned in it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that hangs
        os.write(writing, run().encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        lines = pipe.read().splitlines()
    return os.waitpid(child, 0)[1], lines


def _fork(comm: Communicator) -> tuple[int, list[str]]:
    """Fork while this rank's threads hold the communicator's locks; return this process's id and the child's errors."""
    for _ in range(2):
        comm.all_reduce(torch.ones(10))
    work = comm.recv(torch.ones(10), 1 - comm.rank, 3, async_op=True)  # starts a thread
    running = comm.all_reduce(torch.ones(1 << 19), async_op=True)
    holding = threading.Event(), threading.Event()

    def hold() -> None:
        with comm._engine.lock, comm._messages._lock:
            holding[0].set()
            holding[1].wait()

    running.wait()

    def call_all_and_end() -> str:
        nonlocal comm, work, running
        texts = texts_of(partial(call, comm) for call in (*EVERY_CALL, Communicator.dead_ranks))
        comm.close()
        del comm, work, running
        gc.collect()
        atexit._run_exitfuncs()
        return texts

    threading.Thread(target=hold).start()
    holding[0].wait()
    status, lines = in_child(call_all_and_end)
    holding[1].set()
    assert status == 0
    all_reduce(100, comm, 0)
    all_reduce(1 << 19, comm, 0)
    comm.send(torch.ones(10), 1 - comm.rank, 3)
    work.wait()
    comm.barrier()
    return os.getpid(), lines


def _connect_in_child(rank: Rank, host: str, ports: list[int]) -> None:
    """Follow the advice of the error in a child; without it, the child's rank 0 says what to do."""
    os.environ["GANGLINE_INSECURE"] = "1"

    def use(port: int) -> str:
        with connect(rank.rank, 2, f"{host}:{port}", timeout=15) as comm:
            return str(comm.all_reduce(torch.ones(1)).item())

    def use_ports() -> str:
        refused = texts_of([partial(use, ports[0])]) if rank.rank == 0 else ""
        return f"{refused}\n{use(ports[1])}"

    use(ports[0])
    status, lines = in_child(use_ports)
    rank.tell([status, *lines, use(ports[0])])
    rank.hear()


@pytest.mark.parametrize("host", ["127.0.0.1", reachable_address()])
def test_a_forked_process_opens_another_communicator_at_another_port(host: str) -> None:
    with Processes(_connect_in_child, 2, host, free_ports(2, host)) as processes:
        (status, refused, *totals), others = processes.all_heard()
    assert (status, totals) == (0, ["2.0"] * 2)
    assert others == [0, "", "2.0", "2.0"]
    assert "the process does from which this one was forked; choose another port" in refused


def _fork_during_a_call_of_torch(rank: Rank, path: str) -> None:
    join_group(rank, path, seconds=30)
    sums = torch.ones(3)
    if rank.rank == 1:
        rank.hear()
        dist.all_reduce(sums)
        dist.all_reduce(torch.ones(3))
    else:
        running = dist.all_reduce(sums, async_op=True)
        queued = dist.all_reduce(torch.ones(3), async_op=True)
        calls: tuple[Callable[[], object], ...] = (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
            running.wait,
            queued.wait,
        )
        rank.tell([os.getpid(), *in_child(lambda: texts_of(calls))])
        rank.hear()
        running.wait()
    dist.all_reduce(torch.ones(3))
    rank.tell(sums.tolist())


@pytest.mark.timeout(60)
def test_a_process_forked_while_a_call_of_torch_runs_gets_errors(tmp_path: Path) -> None:
    with Processes(_fork_during_a_call_of_torch, 2, f"{tmp_path}/store") as processes:
        process, status, texts = processes.heard(0)
        for rank in (0, 1):
            processes.say(rank, "go on")
        assert processes.all_heard() == [[2, 2, 2]] * 2
    assert status == 0
    call, asynchronous, running, queued = texts
    for text in (call, asynchronous):
        assert text.startswith(f"this communicator belongs to process {process}, from which this one was forked")
    for text in (running, queued):
        assert text.startswith(f"all_reduce was running when this process was forked from {process}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("owner", ["status socket", "membership of threads"])
def test_a_finalizer_takes_no_lock_that_its_thread_holds(owner: str) -> None:
    comms = in_process(2)
    lock = status_socket._socket._lock if owner == "status socket" else comms[0]._resources.membership._lock

    def collect() -> None:
        with lock:  # garbage may be collected at any allocation
            comms.clear()
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", [pytest.param("shared_memory", marks=pytest.mark.slow), "tcp"])
def test_a_forked_process_gets_an_error_and_leaves_its_parents_sockets_alone(transport: str) -> None:
    for process, texts in spawn(_fork, 2, transport=transport, timeout=30):
        assert texts == [
            f"this communicator belongs to process {process}, from which this one was forked: open another one in the "
            "child, at another port, or start the child with multiprocessing's 'spawn' or 'forkserver' method"
        ] * (len(EVERY_CALL) + 1)


@pytest.mark.parametrize(
    ("module", "name"),
    [("thread_pool", "_lock"), ("devices.device_group", "_lock"), ("devices.backends.nccl", "_group_lock")],
)
def test_a_lock_that_a_thread_held_is_free_in_a_fork(module: str, name: str) -> None:
    owner = import_module(f"gangline.collectives.{module}")
    with getattr(owner, name):
        child = os.fork()
        if not child:
            os._exit(getattr(owner, name).locked())
    assert os.waitpid(child, 0)[1] == 0
