"""Program that runs collectives through a build of core.c for a sanitizer, between processes or between threads.

AddressSanitizer and UndefinedBehaviorSanitizer watch each process. ThreadSanitizer sees the ranks' order of memory
accesses only if they are threads of one process that map the slots once: it checks that order by the rules of C and not
by those of this machine's processor.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gangline.collectives import compiled_core
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator, connect, open_communicator
from gangline.collectives.transports.base import SLOT_BYTES
from gangline.collectives.transports.shm import host_group
from gangline.kvstore import create
from gangline.launcher.job import free_ports
from tests.collectives.grid import COLLECTIVES, Cell, combined, drawn, ops_of, outs_of, values, walk
from tests.collectives.ranks import run_together, same, with_exchange

KIB = 1 << 10
LIMITS = (16 * KIB, 32 * KIB, 64 * KIB, 512 * KIB, SLOT_BYTES, 2 * SLOT_BYTES)  # bytes at which the core's ways differ


def cells(size: int) -> Iterator[Cell]:
    """Yield calls of all collectives, dtypes and operations, and of sizes around all limits, aligned and not."""
    random = Random(size)
    memories = ("plain", "odd")
    for name, dtype in product(COLLECTIVES, DTYPES):
        for number, op in enumerate(ops_of(name, dtype)):
            for memory in memories[: 1 if dtype.is_complex else 2]:
                kind = ("exact", "special")[number % 2 and op != "product" and dtype.is_floating_point]
                yield drawn(random, name, random.choice((0, 1, 37)), size, dtype=dtype, op=op, memory=memory, kind=kind)
    for name, limit in product(COLLECTIVES, LIMITS):
        for out in outs_of(name)[:2]:
            dtype = random.choice(DTYPES[:6])
            rows = size if name in ("reduce_scatter", "all_to_all", "scatter") else 1
            count = limit // dtype.itemsize // rows + random.choice((0, 3))
            yield drawn(random, name, count, size, dtype=dtype, out=out, memory=random.choice(memories), kind="exact")


def exercise(comm: Communicator) -> None:
    """Make calls whose results are checked, on tensors of exact sizes and on tensors with other memory beside them."""
    assert compiled_core.has_collectives
    rank, size = comm.rank, comm.size
    for count, dtype in product((*range(1, 20), 4099, 9001), (torch.uint8, torch.bfloat16, torch.float32)):
        ranks = [values(count, other, dtype) for other in range(size)]
        total = combined(ranks, "sum")
        tensors = [ranks[rank].clone() for _ in range(4)]
        works = [comm.all_reduce(one, async_op=True) for one in tensors[:2]]
        same(comm.all_reduce(tensors[2]), total, "all_reduce")
        for row, rows in ((None, None), (torch.empty(count, dtype=dtype), torch.empty(size, count, dtype=dtype))):
            same(comm.all_gather(ranks[rank], rows), torch.stack(ranks), "all_gather")
            same(comm.reduce_scatter(torch.stack([ranks[rank]] * size), out=row), total, "reduce_scatter")
        same(comm.broadcast(tensors[3], size - 1), ranks[-1], "broadcast")
        for work, tensor in zip(works, tensors, strict=False):
            work.wait()
            same(tensor, total, "asynchronous all_reduce")
    for call in range(40):  # of which some take the slower way of a copy
        tensor = torch.full((SLOT_BYTES // 4 + 4_000 * call,), rank + 1.0)
        assert comm.all_reduce(tensor).eq(size * (size + 1) // 2).all()
    comm.barrier()
    walk(comm, "core", cells(size))


def exercise_torch_backend(rank: int, size: int, port: int) -> None:
    """Make torch's calls, which may reach the core past `Communicator`."""
    from gangline import torch_backend

    assert torch_backend
    place: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gangline", init_method=f"tcp://127.0.0.1:{port}", **place)
    for count in (1, 1000, 5000):
        tensor, rows = torch.full((count,), rank + 1.0), torch.zeros(size, count)
        dist.all_gather([*rows], tensor)
        assert rows.eq(torch.arange(1, size + 1)[:, None]).all()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(tensor, size - 1)
        dist.reduce_scatter_tensor(tensor, tensor.expand(size, count).contiguous(), dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(rows.view(-1), tensor)
        dist.reduce(tensor, 0)
        dist.barrier()
        assert rows.eq(size * (size + 1) // 2).all()
    dist.destroy_process_group()


def between_processes(size: int) -> None:
    """Run `exercise` in forks of this process."""
    ports = free_ports(2)
    children = []
    for rank in range(size):
        children.append(os.fork())
        if not children[-1]:
            try:
                with connect(rank, size, f"127.0.0.1:{ports[0]}", transport="shared_memory", timeout=100) as comm:
                    exercise(comm)
                exercise_torch_backend(rank, size, ports[1])
            except BaseException:  # noqa: BLE001  the parent ends with an error
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * size


def between_threads(size: int) -> None:
    """Run `exercise` in threads of this process, which map each rank's memory once."""
    offered: dict[bytes, Any] = {}

    class Offer(host_group.Offer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            offered[self.handle] = self.segment

    host_group.Offer, host_group.open_offered = Offer, offered.__getitem__

    def run(rank: int, exchange: Any) -> None:
        os.sched_setaffinity(
            0, [*os.sched_getaffinity(0)][:1]
        )  # of this thread: on several cores threads wait longer for Python's lock
        with open_communicator(rank, size, exchange, transport="shared_memory", timeout=100) as comm:
            exercise(comm)

    for error in with_exchange(*[run] * size):
        if error is not None:
            raise error


def add_in_threads() -> None:
    """Add arrays in threads that share the spans of a table: one taken twice would be added twice."""
    torch.set_num_threads(3)
    counts = [200_000, 7, 3_000_001]
    keys = [*range(len(counts))]
    tensors = [[torch.full((count,), position + 1.0) for position in range(3)] for count in counts]
    with create("local") as kv:
        kv.init(keys, [torch.zeros(count) for count in counts])
        for _ in range(3):
            kv.pushpull(keys, tensors)
    assert all(tensor.eq(54).all() for of_key in tensors for tensor in of_key)
    torch.set_num_threads(1)


def use_words_and_checksums() -> None:
    core = compiled_core.core
    assert core is not None
    shared = torch.zeros(2, dtype=torch.int64)

    def count(own: int) -> None:
        for value in range(1, 2000):
            core.word(shared.data_ptr() + 8 * own, value)
            assert 0 <= core.word(shared.data_ptr() + 8 * (1 - own)) < 2000

    run_together(partial(count, own) for own in (0, 1))
    found = set()
    for nbytes, offset in product((*range(1, 200), 70_001), (0, 3)):
        memory: Tensor = torch.ones(nbytes + offset, dtype=torch.uint8)
        memory[-1] = 7
        found.add(core.checksum(memory.data_ptr() + offset, nbytes))
    assert len(found) == 200


def main(folder: str, ranks: str) -> None:
    """Use the build in a folder, which must be first on the path of package `gangline`, with ranks of one kind."""
    torch.set_num_threads(1)
    assert compiled_core.core is not None
    assert str(compiled_core.core.__file__).startswith(folder)
    for size in (2, 3):
        {"processes": between_processes, "threads": between_threads}[ranks](size)
    add_in_threads()
    use_words_and_checksums()
    print("equal")
