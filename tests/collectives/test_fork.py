"""Processes forked after a communicator was opened."""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

from gangline.collectives import Communicator, spawn
from tests.collectives.situations import all_reduce, error_of

CALLS: tuple[Callable[[Communicator], object], ...] = (
    lambda comm: comm.all_reduce(torch.ones(10)),
    lambda comm: comm.all_reduce(torch.ones(1 << 19)),
    lambda comm: comm.all_gather(torch.ones(10), async_op=True),
    lambda comm: comm.barrier(),
    lambda comm: comm.split(0),
    lambda comm: comm.empty(8),
    lambda comm: comm.send(torch.ones(10), 1 - comm.rank),
    lambda comm: comm.recv(torch.ones(10), 1 - comm.rank, async_op=True),
)


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
    threading.Thread(target=hold).start()
    holding[0].wait()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        errors = [error_of(lambda call=call: call(comm)) for call in CALLS]  # type: ignore[misc]
        comm.close()
        del comm, work, running
        gc.collect()
        atexit._run_exitfuncs()
        os.write(writing, "\n".join(error.text if error else "no error" for error in errors).encode())
        os._exit(0)
    os.close(writing)
    holding[1].set()
    with open(reading) as pipe:
        texts = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    all_reduce(100, comm, 0)
    all_reduce(1 << 19, comm, 0)
    comm.send(torch.ones(10), 1 - comm.rank, 3)
    work.wait()
    comm.barrier()
    return os.getpid(), texts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_forked_process_gets_an_error_and_leaves_its_parents_sockets_alone(transport: str) -> None:
    for process, texts in spawn(_fork, 2, transport=transport, timeout=30):
        assert texts == [
            f"this communicator belongs to process {process}, from which this one was forked: open another one in the "
            "child, or start the child with multiprocessing's 'spawn' or 'forkserver' method"
        ] * len(CALLS)
