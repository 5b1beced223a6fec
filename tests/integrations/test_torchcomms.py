"""Example torchcomms_backend.py, on a stand-in for torchcomms: every call between processes, against closed forms."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gangline.collectives.errors import MismatchError
from tests.collectives.processes import Rank, in_processes
from tests.integrations.torchcomms_standin import install

CALLS: list[Callable[[Any, Any, int, int, bool], list[tuple[Tensor, Tensor]]]] = []
Results = list[tuple[Tensor, Tensor]]
Run = Callable[..., None]


def call(function: Callable[..., Results]) -> Callable[..., Results]:
    CALLS.append(function)
    return function


def own(rank: int, count: int = 5) -> Tensor:
    return torch.arange(count, dtype=torch.float64) * 3 + rank


@call
def all_reduce(run: Run, ops: Any, rank: int, size: int) -> Results:
    values = [own(rank) for _ in range(3)]
    for value, op in zip(values, (ops.SUM, ops.AVG, ops.MAX), strict=True):
        run("all_reduce", value, op)
    bits = own(rank).long()
    run("all_reduce", bits, ops.BXOR)
    xor = own(0).long()
    for other in range(1, size):
        xor = xor ^ own(other).long()
    total = sum(own(other) for other in range(size))
    assert isinstance(total, Tensor)
    return [*zip(values, (total, total / size, own(size - 1)), strict=True), (bits, xor)]


@call
def reduce_and_broadcast(run: Run, ops: Any, rank: int, size: int) -> Results:
    summed, copied, root = own(rank), own(rank), size - 1
    run("reduce", summed, root, ops.SUM)
    run("broadcast", copied, root)
    total = own(0) * size + size * (size - 1) / 2
    return [(summed, total if rank == root else own(rank)), (copied, own(root))]


@call
def gathers(run: Run, ops: Any, rank: int, size: int) -> Results:
    rows = [torch.zeros(5, dtype=torch.float64) for _ in range(size)]
    uneven = [torch.zeros(other + 1, dtype=torch.float64) for other in range(size)]
    single = torch.zeros(5 * size, dtype=torch.float64)
    at_root = [torch.zeros(5, dtype=torch.float64) for _ in range(size if rank == 1 else 0)]
    run("all_gather", rows, own(rank))
    run("all_gather_v", uneven, own(rank, rank + 1))
    run("all_gather_single", single, own(rank))
    run("gather", at_root, own(rank), 1)
    everybody = [own(other) for other in range(size)]
    return [
        *zip(rows, everybody, strict=True),
        *zip(uneven, [own(other, other + 1) for other in range(size)], strict=True),
        (single, torch.cat(everybody)),
        *zip(at_root, everybody if rank == 1 else [], strict=True),
    ]


@call
def scatters(run: Run, ops: Any, rank: int, size: int) -> Results:
    even, uneven, single, mine = (torch.zeros(n, dtype=torch.float64) for n in (5, rank + 1, 5, 5))
    run("reduce_scatter", even, [own(rank) + place for place in range(size)], ops.SUM)
    run("reduce_scatter_v", uneven, [own(rank, place + 1) for place in range(size)], ops.SUM)
    run("reduce_scatter_single", single, own(rank, 5 * size), ops.SUM)
    run("scatter", mine, [own(place) for place in range(size)] if rank == 0 else [], 0)
    ranks = size * (size - 1) / 2
    return [
        (even, own(rank) * size + ranks - rank * size + rank * size),
        (uneven, own(0, rank + 1) * size + ranks),
        (single, own(0, 5 * size)[5 * rank : 5 * rank + 5] * size + ranks),
        (mine, own(rank)),
    ]


@call
def all_to_alls(run: Run, ops: Any, rank: int, size: int) -> Results:
    given = [own(rank) + 100 * place for place in range(size)]
    got = [torch.zeros(5, dtype=torch.float64) for _ in range(size)]
    single = torch.zeros(5 * size, dtype=torch.float64)
    uneven = torch.zeros((rank + 1) * size, dtype=torch.float64)
    run("all_to_all", got, given)
    run("all_to_all_single", single, torch.cat(given))
    sent = [own(rank, place + 1) for place in range(size)]
    run("all_to_all_v_single", uneven, torch.cat(sent), [rank + 1] * size, [place + 1 for place in range(size)])
    expected = [own(other) + 100 * rank for other in range(size)]
    return [
        *zip(got, expected, strict=True),
        (single, torch.cat(expected)),
        (uneven, torch.cat([own(other, rank + 1) for other in range(size)])),
    ]


@call
def messages(run: Run, ops: Any, rank: int, size: int) -> Results:
    got = torch.zeros(5, dtype=torch.float64)
    if rank == 0:
        run("send", own(7), 1)
    elif rank == 1:
        run("recv", got, 0)
    run("barrier")
    return [(got, own(7))] if rank == 1 else []


def check_calls(rank: Rank, path: str) -> None:
    comms = install()
    os.environ |= {"TORCHCOMM_RANK": str(rank.rank), "TORCHCOMM_SIZE": str(rank.size)}
    try:
        store = dist.FileStore(path, rank.size)
        comm = comms.new_comm("gangline", torch.device("cpu"), "main", store, timedelta(seconds=50))
        assert (comm.get_rank(), comm.get_size()) == (rank.rank, rank.size)
        assert (comm.get_backend_name(), comm.get_comm_name()) == ("gangline", "main")
        _check(comm, comms.ReduceOp, async_op=False)
        _check(comm, comms.ReduceOp, async_op=True)
        order = [rank.size - 1, 0]
        part = comm.split(order if rank.rank in order else [], "ends")
        assert (part is None) == (rank.rank not in order)
        if part is not None:
            assert (part.get_rank(), part.get_size()) == (order.index(rank.rank), 2)
            _check(part, comms.ReduceOp, async_op=False)
            part.finalize()
        with pytest.raises(ValueError, match=r"PREMUL_SUM is not supported by backend gangline; scale the tensor"):
            comm.all_reduce(torch.ones(1), comms.ReduceOp.PREMUL_SUM(0.5), async_op=False)
        work = comm.all_reduce(torch.ones(2 + rank.rank), comms.ReduceOp.SUM, async_op=True)
        with pytest.raises(MismatchError, match=r"rank 0"):
            work.wait()
        comm.finalize()
        comm.finalize()
        with pytest.raises(RuntimeError, match=r"'main' is not open"):
            comm.barrier(async_op=False)
    except BaseException:  # noqa: BLE001  the test shows it
        rank.tell(traceback.format_exc())
    else:
        rank.tell("")


def _check(comm: Any, ops: Any, *, async_op: bool) -> None:
    def run(name: str, *arguments: Any) -> None:
        work = getattr(comm, name)(*arguments, async_op=async_op)
        assert work.is_completed() != async_op
        work.wait()

    for function in CALLS:
        for got, expected in function(run, ops, comm.get_rank(), comm.get_size()):
            assert torch.equal(got, expected), f"{function.__name__}: {got} instead of {expected}"


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_gives_the_closed_form(size: int, tmp_path: Path) -> None:
    assert in_processes(check_calls, size, str(tmp_path / "store")) == [""] * size


def test_ranks_of_a_launcher_meet_at_its_address() -> None:
    assert in_processes(check_environment, 2) == ["3.0", "3.0"]


def check_environment(rank: Rank) -> None:
    port = rank.exchange(str(_free_port()).encode() if rank.rank == 0 else b"")[0].decode()
    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    comms = install()
    first = comms.new_comm("gangline", torch.device("cpu"), "first")
    second = comms.new_comm("gangline", torch.device("cpu"), "second")
    value = torch.tensor([1.0 + rank.rank])
    first.all_reduce(value, comms.ReduceOp.SUM, async_op=False)
    second.barrier(async_op=False)
    rank.tell(str(value.item()))
    first.finalize()
    second.finalize()


def _free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


def test_a_gpu_and_a_process_without_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    comms = install()
    monkeypatch.delenv("TORCHCOMM_RANK", raising=False)
    for name in ("torchcomms", "torchcomms._comms"):  # dropped from sys.modules at the end
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    with pytest.raises(ValueError, match=r"got device cuda:0; expected cpu"):
        comms.new_comm("gangline", torch.device("cuda", 0), "main")
    with pytest.raises(RuntimeError, match=r"no launcher has set a rank; expected TORCHCOMM_RANK"):
        comms.new_comm("gangline", torch.device("cpu"), "main")
