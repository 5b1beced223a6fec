"""Calls in which ranks may lose another one; each checks what it received."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gangline import Communicator
from tests.collectives.grid import Cell, check


def ramp(count: int, rank: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32).remainder(1000) * 4 + rank


def expect(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected), f"received {found}, expected {expected}"


def all_reduce(count: int, comm: Communicator, _victim: int) -> None:
    values = ramp(count, comm.rank)
    comm.all_reduce(values)
    expect(values, ramp(count, 0) * comm.size + comm.size * (comm.size - 1) // 2)


def _all_reduce_in_the_background(count: int, comm: Communicator, _victim: int) -> None:
    first, second = ramp(count, comm.rank), ramp(count, 2 * comm.rank)
    works = [comm.all_reduce(values, async_op=True) for values in (first, second)]
    for work in works:
        work.wait()
    expect(second, ramp(count, 0) * comm.size + comm.size * (comm.size - 1))


def _broadcast(step: int, comm: Communicator, victim: int) -> None:
    check(comm, Cell("broadcast", 1 << 19, root=(victim + step) % comm.size))


def _receive_from_it(count: int, comm: Communicator, victim: int) -> None:
    comm.recv(torch.empty(count), victim if comm.rank != victim else (victim + 1) % comm.size)


def _send_to_it(count: int, comm: Communicator, victim: int) -> None:
    comm.send(ramp(count, comm.rank), victim if comm.rank != victim else (victim + 1) % comm.size)


def _receive_from_each_other(count: int, comm: Communicator, victim: int) -> None:
    others = [rank for rank in range(comm.size) if rank != victim]
    index = others.index(comm.rank) if comm.rank != victim else 0
    comm.recv(torch.empty(count), others[(index + 1) % len(others)])


class Situation(NamedTuple):
    call: Callable[[Communicator, int], object]
    text: str
    """Name of the call in error texts."""
    needs_all: bool = True
    """True if no rank can complete it without the lost one."""


SITUATIONS = {
    "small all_reduce": Situation(partial(all_reduce, 100), "all_reduce(100 x float32, sum)"),
    "large all_reduce": Situation(partial(all_reduce, 1 << 20), "all_reduce(1048576 x float32, sum)"),
    "begun all_reduce": Situation(partial(_all_reduce_in_the_background, 1000), "all_reduce(1000 x float32, sum)"),
    "async all_reduce": Situation(partial(_all_reduce_in_the_background, 1 << 19), "all_reduce(524288 x float32, sum)"),
    "broadcast from it": Situation(partial(_broadcast, 0), "broadcast(524288 x float32, root {victim})"),
    "broadcast to it": Situation(partial(_broadcast, 1), "broadcast(524288 x float32, root {next})", False),
    "all_to_all": Situation(lambda comm, _: check(comm, Cell("all_to_all", 1 << 18)), "all_to_all(262144 x float32)"),
    "barrier": Situation(lambda comm, _: check(comm, Cell("barrier", 0)), "barrier()"),
    "recv from it": Situation(partial(_receive_from_it, 1 << 14), "recv(16384 x float32)"),
    "send to it": Situation(partial(_send_to_it, 1 << 20), "send(1048576 x float32)", False),
    "recv from each other": Situation(partial(_receive_from_each_other, 100), "recv(100 x float32)"),
}


EVERY_CALL: tuple[Callable[[Communicator], object], ...] = (
    lambda comm: comm.all_reduce(ramp(100, comm.rank)),
    lambda comm: comm.all_reduce(ramp(1 << 19, comm.rank)),
    lambda comm: comm.broadcast(ramp(10, comm.rank)),
    lambda comm: comm.all_gather(ramp(10, comm.rank), async_op=True),
    lambda comm: comm.barrier(),
    lambda comm: comm.split(0),
    lambda comm: comm.send(ramp(10, comm.rank), (comm.rank + 1) % comm.size),
    lambda comm: comm.recv(ramp(10, comm.rank), (comm.rank + 1) % comm.size),
)
"""Calls of each kind, which succeed only together with all ranks or with the next one."""


class Said(NamedTuple):
    """Error that a rank caught."""

    kind: str
    text: str


def error_of(call: Callable[[], object]) -> Said | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return Said(type(error).__name__, str(error))
    return None
