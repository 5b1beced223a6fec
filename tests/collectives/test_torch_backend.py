"""Backend "gangline" of torch.distributed: every call, between real processes, against closed forms."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from functools import partial, reduce
from itertools import product
from operator import and_, or_, xor
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceScatterOptions
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor.debug import CommDebugMode

from gangline import Communicator
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.compiled_core import has_collectives
from gangline.collectives.errors import MismatchError
from gangline.collectives.torch_backend import GanglineProcessGroup
from tests.collectives.grid import COLLECTIVES, IN_PLACE, MEMORIES, Cell, drawn, is_valid, ops_of, outs_of, roots_of
from tests.collectives.grid import check as grid_check
from tests.collectives.processes import Processes, Rank, join_group, run_until_one_fails

LARGE = 300_007  # elements: too many for slots
SIZES = (0, 1, 1_001, LARGE)
Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def given(count: int, rank: int, dtype: torch.dtype = torch.float32, stride: int = 3) -> Tensor:
    return (torch.arange(count) % 1_000 * stride + rank).to(dtype)


def summed(count: int, size: int, dtype: torch.dtype = torch.float32, stride: int = 3) -> Tensor:
    return (torch.arange(count) % 1_000 * stride * size + size * (size - 1) // 2).to(dtype)


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def group() -> GanglineProcessGroup:
    assert isinstance(dist.group.WORLD, GanglineProcessGroup)
    return dist.group.WORLD


@case
def bits_are_combined(rank: int, size: int) -> None:
    rows = [given(11, other, torch.int64) + 1 for other in range(size)]
    for op, function in ((ReduceOp.BAND, and_), (ReduceOp.BOR, or_), (ReduceOp.BXOR, xor)):
        want, tensor = reduce(function, rows), rows[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, want)
        tensor = rows[rank].clone()
        dist.reduce(tensor, size - 1, op)
        same(tensor, want if rank == size - 1 else rows[rank])
        out = torch.zeros(11, dtype=torch.int64)
        dist.reduce_scatter(out, [rows[rank] + place for place in range(size)], op)
        same(out, reduce(function, [row + rank for row in rows]))


@case
def comm_debug_mode_counts_as_with_gloo(rank: int, size: int) -> None:
    values, outs = torch.full((3,), float(rank)), [torch.zeros(3) for _ in range(size)]
    whole = torch.zeros(3 * size)
    with CommDebugMode() as counted:
        dist.all_reduce(values)
        dist.broadcast(values, 0, async_op=True).wait()
        dist.all_gather(outs, values)
        dist.reduce_scatter(values, outs)
        dist.all_to_all(outs, [values] * size)
        dist.all_to_all_single(whole, torch.full((3 * size,), float(rank)))
    operators = ("allreduce_", "broadcast_", "allgather_", "reduce_scatter_", "alltoall_", "alltoall_base_")
    assert {str(one): number for one, number in counted.get_comm_counts().items()} == {
        f"c10d.{n}": 1 for n in operators
    }
    total = size * (size - 1) // 2
    assert {values.unique().item(), *torch.stack(outs).unique().tolist()} == {float(total * size)}
    same(whole, torch.arange(float(size)).repeat_interleave(3))


@case
def a_message_to_itself_is_a_copy(rank: int, size: int) -> None:
    received = [torch.zeros(2) for _ in range(size)]
    calls = [(dist.isend, torch.full((2,), 10.0 * rank + peer), peer) for peer in range(size)]
    calls += [(dist.irecv, received[peer], peer) for peer in range(size)]
    for work in dist.batch_isend_irecv([dist.P2POp(*call) for call in calls]):
        work.wait()
    assert [one.unique().item() for one in received] == [10.0 * peer + rank for peer in range(size)]
    comm, sent = group().communicator, torch.ones(2)
    comm.send(sent, rank, 7)
    sent.zero_()
    same(comm.recv(torch.zeros(2), rank, 7), torch.ones(2))
    received = torch.zeros(2)
    work = comm.recv(received, rank, 7, async_op=True)
    with pytest.raises(ValueError, match=f"source is {rank}, this rank itself, which has sent itself no message with"):
        comm.recv(torch.zeros(2), rank, 7)
    comm.send(torch.ones(2), rank, 7)
    work.wait()
    same(received, torch.ones(2))


@case
def means_of_integers_do_not_wrap(rank: int, size: int) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        values = [limits.max - 1, limits.max, limits.min, limits.min + 1, limits.max if rank == 0 else limits.min]
        want = torch.tensor([*values[:4], math.trunc(Fraction(limits.max + (size - 1) * limits.min, size))])
        tensor = torch.tensor(values, dtype=dtype)
        dist.all_reduce(tensor, ReduceOp.AVG)
        same(tensor, want.to(dtype))
        tensor = torch.tensor(values, dtype=dtype)
        dist.reduce(tensor, 0, ReduceOp.AVG)
        same(tensor, want.to(dtype) if rank == 0 else torch.tensor(values, dtype=dtype))
        out = torch.zeros(5, dtype=dtype)
        reduce_scatter_single(out, torch.tensor(values * size, dtype=dtype), op=ReduceOp.AVG)
        same(out, want.to(dtype))


@case
def a_written_tensor_keeps_its_version(rank: int, size: int) -> None:
    """Check as with gloo that autograd can still use its older values."""
    tensor = torch.ones(LARGE)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    assert tensor._version == 0
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    dist.broadcast(weight.detach(), 0)
    loss.backward()
    same(weight.grad, torch.full((4,), 2.0))


@case
def outputs_may_share_memory(rank: int, size: int) -> None:
    """The output of the highest rank is written last, on every rank."""
    for count in (4, LARGE):
        out, last = torch.zeros(count), given(count, size - 1)
        dist.all_gather([out] * size, given(count, rank))
        same(out, last)
        dist.all_to_all([out] * size, [given(count, rank) + place for place in range(size)])
        same(out, last + rank)
        dist.gather(given(count, rank), [out] * size if rank == 0 else None, 0)
        same(out, last + (rank if rank else 0))
        joined = torch.zeros(count + size - 1)
        dist.all_gather([joined[place : place + count] for place in range(size)], given(count, rank))
        same(joined[size - 1 :], last)
        same(joined[: size - 1], torch.stack([given(count, place)[0] for place in range(size - 1)]))
        with pytest.raises(ValueError, match="share memory"):
            group().broadcast([torch.zeros(count + 1).unfold(0, count, 1)], root=(rank + 1) % size).wait()


@case
def what_cannot_be_reduced_says_so(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"ReduceOp\.PREMUL_SUM is not supported.*SUM, AVG"):
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0))
    with pytest.raises(TypeError, match="no bits to combine"):
        dist.all_reduce(torch.ones(3), ReduceOp.BAND)
    with pytest.raises(TypeError, match=r"torch\.complex64 has no order"):
        group().allreduce([torch.ones(3, dtype=torch.complex64)], ReduceOp.MIN).wait()
    with pytest.raises(TypeError, match=r"the mean of torch\.bool"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(TypeError, match="dense tensor on the CPU"):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    with pytest.raises(ValueError, match="2 tensors were given; expected 1"):
        group().allreduce([torch.ones(1), torch.ones(1)])


def all_gather_single(out: Tensor, tensor: Tensor, **options: Any) -> Any:
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, tensor, **options)


def reduce_scatter_single(out: Tensor, tensor: Tensor, **options: Any) -> Any:
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out, tensor, **options)


def flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1) if tensor.is_contiguous() else tensor


LIMIT = timedelta(seconds=30)
OPS = {"sum": ReduceOp.SUM, "mean": ReduceOp.AVG, "product": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX}
CALLS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "all_reduce": (
        lambda x: dist.all_reduce(x.tensor, x.op),
        lambda x: dist.all_reduce(x.tensor, x.op, async_op=True),
        lambda x: group().allreduce(x.tensor, x.op, LIMIT),
        lambda x: functional.all_reduce(x.tensor, x.op_name, group()),
    ),
    "reduce": (lambda x: dist.reduce(x.tensor, x.root, x.op), lambda x: group().reduce(x.tensor, x.root, x.op, LIMIT)),
    "broadcast": (
        lambda x: dist.broadcast(x.tensor, x.root),
        lambda x: dist.broadcast(x.tensor, x.root, async_op=True),
        lambda x: group().broadcast(x.tensor, x.root, LIMIT),
        lambda x: functional.broadcast(x.tensor, x.root, group()),
    ),
    "all_gather": (
        lambda x: dist.all_gather([*x.out], x.tensor),
        lambda x: group().allgather([*x.out], x.tensor, timeout=LIMIT),
        lambda x: all_gather_single(x.out, x.tensor),
        lambda x: all_gather_single(flat(x.out), x.tensor, async_op=True),
        lambda x: group()._allgather_base(x.out, x.tensor),
        lambda x: group().all_gather_single(x.out, x.tensor),
        lambda x: group().allgather_into_tensor_coalesced([x.out], [x.tensor]),
        lambda x: group().all_gather_single_coalesced([x.out], [x.tensor]),
        lambda x: functional.all_gather_tensor(x.tensor.contiguous(), 0, group()),
    ),
    "gather": (
        lambda x: dist.gather(x.tensor, [*x.out] if x.is_root else None, dst=x.root),
        lambda x: group().gather([*x.out] if x.is_root else [], x.tensor, x.root, LIMIT),
        lambda x: group().gather_single(x.out if x.is_root else x.tensor.new_empty(0), x.tensor, x.root, LIMIT),
    ),
    "scatter": (
        lambda x: dist.scatter(x.out, [*x.tensor] if x.is_root else None, src=x.root),
        lambda x: group().scatter(x.out, [*x.tensor] if x.is_root else [], x.root, LIMIT),
    ),
    "reduce_scatter": (
        lambda x: dist.reduce_scatter(x.out, [*x.tensor], x.op),
        lambda x: group().reduce_scatter(x.out, [*x.tensor], x.op, LIMIT),
        lambda x: reduce_scatter_single(x.out, x.tensor, op=x.op),
        lambda x: reduce_scatter_single(x.out, flat(x.tensor), op=x.op, async_op=True),
        lambda x: group()._reduce_scatter_base(x.out, x.tensor, x.options),
        lambda x: group().reduce_scatter_single(x.out, x.tensor, x.options),
        lambda x: group().reduce_scatter_tensor_coalesced([x.out], [x.tensor], x.options),
        lambda x: group().reduce_scatter_single_coalesced([x.out], [x.tensor], x.options),
        lambda x: functional.reduce_scatter_tensor(x.tensor.reshape(-1).contiguous(), x.op_name, 0, group()),
    ),
    "all_to_all": (
        lambda x: dist.all_to_all([*x.out], [*x.tensor]),
        lambda x: dist.all_to_all_single(x.out, x.tensor, async_op=True),
        lambda x: dist.all_to_all_single(x.out, x.tensor, [1] * len(x.out), None),
        lambda x: group().alltoall_base(x.out, x.tensor, [], []),
        lambda x: group().all_to_all_single(x.out, x.tensor, [], []),
        lambda x: functional.all_to_all_single(x.tensor.contiguous(), *[[1] * len(x.out)] * 2, group()),
    ),
}
"""Ways to call each collective; they write into the tensor or `out`, and may return a work or the result."""


def by(way: int) -> Callable[..., Any]:
    """Return a function that makes the call of a cell in one of the ways, and checks autograd's versions."""

    def make(comm: Communicator, cell: Cell, tensor: Tensor, out: Tensor | None) -> Tensor | None:
        is_root, op = comm.rank == cell.root or cell.call not in ("reduce", "gather"), OPS[cell.op]
        place = tensor if out is None else out
        x = SimpleNamespace(tensor=tensor, out=place, root=cell.root, is_root=comm.rank == cell.root, op=op)
        x.op_name, x.options = "avg" if cell.op == "mean" else cell.op, ReduceScatterOptions()
        x.options.reduceOp = op
        versions = tensor._version, place._version
        result = CALLS[cell.call][way](x)
        if result is not None and not isinstance(result, Tensor):
            assert result.wait()
            assert result.is_completed()
            assert result.is_success()
        assert (tensor._version, place._version) == versions, f"{cell}: autograd's versions"
        if isinstance(result, Tensor):
            place.data.copy_(result.detach().view(place.shape))
        return place if is_root else None

    return make


def check_ways(random: Random, collective: str, count: int, **fixed: Any) -> None:
    for way in range(len(CALLS[collective])):
        cell = drawn(random, collective, count, dist.get_world_size(), kind="exact", async_op=False, **fixed)
        grid_check(group().communicator, cell, f"way {way}", make=by(way))


@case
def every_way_to_call_with_every_memory_and_root(rank: int, size: int) -> None:
    random = Random(size)
    for collective in CALLS:
        outs = (
            ["none"]
            if collective in IN_PLACE
            else [out for out in outs_of(collective) if out not in ("none", "itself")]
        )
        for out, memory, root in product(outs, MEMORIES, roots_of(collective, size)):
            if is_valid(Cell(collective, 6, out=out, memory=memory)):
                check_ways(random, collective, 6, out=out, memory=memory, root=root, dtype=torch.float32)
        for count in (0, 1_001, LARGE):
            check_ways(random, collective, count, out=random.choice(outs), memory="plain", dtype=torch.float32)


@case
def every_way_to_call_with_every_dtype_and_operation(rank: int, size: int) -> None:
    random = Random(size)
    for collective, dtype in product(COLLECTIVES, DTYPES):
        for op in ops_of(collective, dtype):
            if op != "product" or not dtype.is_complex:  # which torch.distributed refuses
                out = "none" if collective in IN_PLACE else "out"
                check_ways(random, collective, 9, out=out, memory="plain", dtype=dtype, op=op)


@case
def scalars_moved_dtypes_and_barriers(rank: int, size: int) -> None:
    scalar = torch.tensor(rank)
    dist.all_reduce(scalar)
    same(scalar, torch.tensor(size * (size - 1) // 2))
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        tensor = (torch.arange(8) % 3).to(dtype) if rank == 1 else torch.zeros(8).to(dtype)
        dist.broadcast(tensor, 1)
        same(tensor.float(), (torch.arange(8) % 3).float())
    group().barrier(timeout=LIMIT).wait()
    group().monitored_barrier(LIMIT, wait_all_ranks=True)


@case
def lists_of_unequal_tensors(rank: int, size: int) -> None:
    outs = [torch.zeros(2 * other + 1, 3) for other in range(size)]
    dist.all_gather(outs, given(6 * rank + 3, rank).view(-1, 3))
    for other, out in enumerate(outs):
        same(out, given(6 * other + 3, other).view(-1, 3))
    unequal = torch.zeros(rank + 1)
    dist.reduce_scatter(unequal, [given(place + 1, rank) for place in range(size)])
    same(unequal, summed(rank + 1, size))


@case
def lists_that_do_not_fit(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"{size + 1} output tensors were given; expected one for each of {size}"):
        dist.all_gather([torch.zeros(2)] * (size + 1), torch.zeros(2))
    with pytest.raises(ValueError, match=rf"expected {size} times \(2,\)"):
        all_gather_single(torch.zeros(2 * size + 1), torch.zeros(2))
    with pytest.raises(ValueError, match="expected one size for all ranks"):
        group().scatter([torch.zeros(1)], [[torch.zeros(n) for n in range(size)]], root=rank).wait()
    with pytest.raises(ValueError, match="split sizes"):
        group().alltoall_base(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size).wait()


@case
def all_to_all_of_unequal_parts(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.int64, torch.complex64):
        # rank r gives rank j r + 2 j elements, so that rank 0 gives itself none
        splits, taken = [rank + 2 * j for j in range(size)], [i + 2 * rank for i in range(size)]
        outs = [torch.zeros(count, dtype=dtype) for count in taken]
        dist.all_to_all(outs, [given(count, rank, dtype) + 100 * j for j, count in enumerate(splits)])
        for other, out in enumerate(outs):
            same(out, given(other + 2 * rank, other, dtype) + 100 * rank)
        joined = torch.zeros(sum(taken), 2, dtype=dtype)
        parts = [given(2 * count, rank, dtype).view(-1, 2) + 100 * j for j, count in enumerate(splits)]
        dist.all_to_all_single(joined, torch.cat(parts), taken, splits)
        want = [given(2 * count, i, dtype).view(-1, 2) + 100 * rank for i, count in enumerate(taken)]
        same(joined, torch.cat(want))


@case
def messages(rank: int, size: int) -> None:
    following, before = (rank + 1) % size, (rank - 1) % size
    for count in SIZES:
        out = torch.zeros(count, 3)[:, 1]
        works = [dist.isend(given(count, rank), following, tag=5), dist.irecv(out, before, tag=5)]
        for work in works:
            assert work.wait()
        same(out, given(count, before))
    outs = [torch.zeros(4, dtype=torch.complex64), torch.zeros(4)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, given(4, rank, torch.complex64) * 1j, following),
            dist.P2POp(dist.isend, given(4, rank) + 50, following, tag=9),
            dist.P2POp(dist.irecv, outs[1], before, tag=9),
            dist.P2POp(dist.irecv, outs[0], before),
        ]
    )
    for work in works:
        work.wait()
    same(outs[0], given(4, before, torch.complex64) * 1j)
    same(outs[1], given(4, before) + 50)
    if rank == 0:
        dist.send(given(3, 0), 1)
        future = dist.irecv(out := torch.zeros(3), 1).get_future()
        same(future.then(lambda done: done.value()[0] + 1).wait(), given(3, 1) + 1)
        assert out[1] == 4
    elif rank == 1:
        tensor = torch.zeros(3)
        assert dist.recv(tensor, 0) == 0
        same(tensor, given(3, 0))
        dist.send(given(3, 1), 0)
    if rank == 0:
        tensor = torch.zeros(2)
        found = {dist.recv(tensor): tensor.tolist() for _ in range(size - 1)}
        assert found == {other: [other, other] for other in range(1, size)}
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()
    with pytest.raises(MismatchError, match=r"sent 2 x float32 with tag 3, and this rank's recv expects 3 x float32"):
        exchange_unequal(following, before)
    dist.barrier()


def exchange_unequal(following: int, before: int) -> None:
    sent = dist.isend(torch.zeros(2), following, tag=3)
    try:
        dist.recv(torch.zeros(3), before, tag=3)
    finally:
        dist.recv(torch.zeros(2), before, tag=3)
        sent.wait()


@case
def sparse_tensors(rank: int, size: int) -> None:
    tensor = torch.sparse_coo_tensor([[rank, size, size]], [1.0, 2.0, 3.0], (size + 2,), dtype=torch.float64)
    dist.all_reduce(tensor)
    same(tensor.to_dense(), torch.tensor([1.0] * size + [5.0 * size, 0], dtype=torch.float64))
    rows = torch.sparse_coo_tensor([list(range(rank))], torch.ones(rank, 3), (size, 3))  # of rank 0 none
    dist.all_reduce(rows)
    same(rows.to_dense(), (size - 1 - torch.arange(size)).clamp(min=0)[:, None].expand(size, 3).float())
    with pytest.raises(TypeError, match="expected SUM"):
        dist.all_reduce(rows, ReduceOp.MAX)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(size + 1, 2, sparse=True))
    model(torch.tensor([rank, size])).sum().backward()
    gradient = model.module.weight.grad
    same(gradient.to_dense(), torch.tensor([[1 / size] * 2] * size + [[1.0, 1.0]]))


@case
def sub_groups(rank: int, size: int) -> None:
    members = list(range(1, size))
    made = dist.new_group(members)
    if rank in members:
        assert isinstance(made, GanglineProcessGroup)
        assert (made.rank(), made.size()) == (rank - 1, size - 1)
        tensor = given(7, rank)
        dist.all_reduce(tensor, group=made)
        same(tensor, sum(given(7, other) for other in members))
        dist.broadcast(tensor, 1, group=made)
        split = made.split_group([made.size() - 1])
        assert (split is not None) == (rank == size - 1)
        if split is not None:
            split.allreduce(torch.ones(1)).wait()
            split.shutdown()
        with pytest.raises(ValueError, match="expected some of 0 to"):
            made.split_group([size])
        dist.destroy_process_group(made)
        with pytest.raises(RuntimeError, match=r"was called after close\(\)"):
            made.allreduce(torch.ones(1))
    dist.barrier()


@case
def coalesced_calls(rank: int, size: int) -> None:
    manager = dist.distributed_c10d._coalescing_manager
    tensors = [given(5, rank), given(8, rank) + 1]
    with manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    same(tensors[0], summed(5, size))
    same(tensors[1], summed(8, size) + size)
    outs, parts = [torch.zeros(3 * size), torch.zeros(2 * size)], [torch.zeros(3), torch.zeros(2)]
    with manager(async_ops=True) as gathering:
        all_gather_single(outs[0], given(3, rank))
        all_gather_single(outs[1], given(2, rank))
    gathering.wait()
    with manager() as _:
        reduce_scatter_single(parts[0], given(3 * size, rank))
        reduce_scatter_single(parts[1], given(2 * size, rank))
    same(outs[0], torch.cat([given(3, other) for other in range(size)]))
    same(outs[1], torch.cat([given(2, other) for other in range(size)]))
    same(parts[0], summed(3 * size, size).view(size, 3)[rank])
    same(parts[1], summed(2 * size, size).view(size, 2)[rank])
    tensor, other = given(5, rank), given(6, rank)
    with manager(device=torch.device("cpu"), async_ops=True) as reducing:
        dist.broadcast(tensor, 1, async_op=True)
        dist.broadcast(other, 0, async_op=True)
    (work,) = reducing.works
    assert [len(one) for one in work.get_future().wait()] == [5, 6]
    assert work.wait()
    assert work.is_success()
    same(tensor, given(5, 1))
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    group().allgather_coalesced(lists, [given(2, rank), given(3, rank)]).wait()
    for place, (two, three) in enumerate(lists):
        same(two, given(2, place))
        same(three, given(3, place))


@case
def functional_collectives_of_lists(rank: int, size: int) -> None:
    pair = [given(6, rank), given(2, rank)]
    for highest, count in zip(functional.all_reduce_coalesced(pair, "max", group()), (6, 2), strict=True):
        same(highest.clone(), given(count, size - 1))
    for joined, count in zip(functional.all_gather_into_tensor_coalesced(pair, group()), (6, 2), strict=True):
        same(joined.clone(), torch.cat([given(count, other) for other in range(size)]))


@case
def futures_are_chained(rank: int, size: int) -> None:
    tensors = [given(LARGE, rank) + place for place in range(4)]
    seen: list[int] = []

    def note(place: int) -> Callable[[Any], Tensor]:
        def noted(future: Any) -> Tensor:
            seen.append(place)
            (tensor,) = future.value()
            return tensor[:7] * 2

        return noted

    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(note(place)) for place, work in enumerate(works)]
    for place, future in enumerate(futures):
        same(future.wait(), 2 * (summed(7, size) + size * place))
    assert sorted(seen) == [0, 1, 2, 3]
    late = works[0].get_future().then(note(9))
    same(late.wait(), 2 * summed(7, size))


@case
def a_callback_makes_calls_and_waits_for_its_own(rank: int, size: int) -> None:
    tensor, second, third = given(LARGE, rank), given(5, rank), given(6, rank)
    work = dist.all_reduce(tensor, async_op=True)

    def more(future: Any) -> Tensor:
        work.wait()
        future.wait()
        dist.all_reduce(second)
        later = dist.all_reduce(third, async_op=True)
        later.wait()
        return second

    same(work.get_future().then(more).wait(), summed(5, size))
    same(third, summed(6, size))
    work.wait()
    same(tensor, summed(LARGE, size))


@case
def small_calls_in_flight_end_in_any_order(rank: int, size: int) -> None:
    tensors = [given(5, rank) + place for place in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:4]]
    dist.all_reduce(tensors[4])
    for place in (3, 0, 2, 1):
        assert works[place].wait(LIMIT if place == 2 else timedelta(0))
        assert works[place].is_success()
    for place, tensor in enumerate(tensors[:5]):
        same(tensor, summed(5, size) + size * place)
    work = dist.all_reduce(tensors[5], async_op=True)
    while not work.is_completed():
        time.sleep(0)
    same(tensors[5], summed(5, size) + size * 5)
    dropped, second = given(5, rank), given(6, rank)
    dist.all_reduce(dropped, async_op=True)

    def more(future: Any) -> Tensor:
        work.wait()
        dist.all_reduce(second)
        return future.value()[0] + 1

    work = dist.all_reduce(tensors[5], async_op=True)
    same(work.get_future().then(more).wait(), size * (summed(5, size) + size * 5) + 1)
    work.wait()
    same(dropped, summed(5, size))
    same(second, summed(6, size))
    assert [one is tensors[5] for one in work.result()] == [True]


@case
def small_calls_do_not_overtake_queued_ones(rank: int, size: int) -> None:
    tensor = given(LARGE, rank)
    work = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor[:5], ReduceOp.MAX)
    work.wait()
    dist.all_reduce(tensor[5:9], ReduceOp.MAX, async_op=True).wait()
    same(tensor, summed(LARGE, size))


@case
def handles_of_calls_that_are_over_keep_their_tensors(rank: int, size: int) -> None:
    options, tensors = AllreduceOptions(), [given(5, rank) for _ in range(3)]
    options.asyncOp = False
    works = [group().allreduce([tensor], options) for tensor in tensors]
    for work, tensor in zip(works, tensors, strict=True):
        assert [one is tensor for one in work.result()] == [True]
        assert work.get_future().wait()[0] is tensor
        same(tensor, summed(5, size))
    for tensor in tensors:
        assert group().allreduce([tensor], options).get_future().wait()[0] is tensor


@case
def a_group_keeps_no_tensors_of_a_call_that_is_over(rank: int, size: int) -> None:
    weights = torch.ones(4, requires_grad=True)
    for made in (partial(torch.ones, 4), partial(torch.ones, LARGE), lambda: (weights * 2).sum()):
        tensor = made()
        outs = [torch.ones_like(tensor.detach()) for _ in range(size)]
        references = [weakref.ref(tensor), weakref.ref(outs[0])]
        dist.all_gather(outs, tensor.detach())
        outs.clear()
        dist.all_reduce(tensor)
        del tensor
        assert [reference() for reference in references] == [None, None]


@case
def a_small_all_reduce_takes_few_python_calls(rank: int, size: int) -> None:
    tensor, counts, gathers = torch.ones(5), [], gc.isenabled()
    calls: list[str] = []
    gc.disable()  # other packages' callbacks are Python functions
    for _ in range(20):  # in one of them no other rank is late, so that nothing is called while this one waits
        dist.barrier()
        calls.clear()
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None)
        dist.all_reduce(tensor)
        sys.setprofile(None)
        counts.append(len(calls))
    if gathers:
        gc.enable()
    assert min(counts) <= 14 or not has_collectives


@case
def a_mismatch_ends_its_group_alone(rank: int, size: int) -> None:
    for odd_one in (lambda: torch.ones(4), lambda: torch.ones(3, dtype=torch.float64)):
        made = dist.new_group()
        tensor = odd_one() if rank == 0 else torch.ones(3)
        with pytest.raises(MismatchError, match="ranks are at different calls: rank 0: all_reduce"):
            dist.all_reduce(tensor, group=made)
        with pytest.raises(MismatchError, match="ranks are at different calls"):
            dist.barrier(group=made)
        dist.destroy_process_group(made)
    made = dist.new_group()
    work = dist.all_reduce(torch.ones(3 + (rank == 0)), group=made, async_op=True)
    with pytest.raises(RuntimeError, match="MismatchError: ranks are at different calls"):
        work.get_future().wait()
    with pytest.raises(MismatchError, match="ranks are at different calls"):
        work.wait()
    assert isinstance(work.exception(), MismatchError)
    assert not work.is_success()
    dist.destroy_process_group(made)
    dist.barrier()


def run_cases(rank: Rank, path: str) -> None:
    warnings.simplefilter("ignore")  # of torch's functional collectives
    join_group(rank, path)
    calls = ((name, partial(function, rank.rank, rank.size)) for name, function in CASES.items())
    outcomes = run_until_one_fails(calls)
    if not any(outcomes.values()):
        dist.destroy_process_group()
        outcomes["end"] = ", ".join(thread.name for thread in threading.enumerate() if "gangline" in thread.name)
    rank.tell(outcomes)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the outcomes of all cases on each rank of a job."""
    store = tmp_path_factory.mktemp("torch_backend") / "store"
    with Processes(run_cases, request.param, str(store), limit=100) as processes:
        return processes.all_heard()


@pytest.mark.parametrize("name", [*CASES, "end"])
def test_case(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert of_rank.get(name, "not reached") == "", f"rank {rank} of {len(outcomes)}"


NOT_CALLS = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_add_ephemeral_timeout"),
    *("_backend_id", "_id", "_pybind11_conduit_v1_", "_register_backend", "_set_default_backend"),
    *("_set_group_desc", "_set_group_name", "bound_device_id", "boxed", "group_desc"),
    *("group_name", "new_window", "rank", "register_abort_hook", "register_post_hook"),
    *("register_pre_hook", "size", "supports_window", "unbox", "unregister_abort_hook"),
    *("unregister_post_hook", "unregister_pre_hook", "use_pg_for_symm_mem_rendezvous"),
}
"""Attributes that torch handles itself and never asks of a backend."""


def test_no_method_is_inherited_from_torch_s_backend() -> None:
    names = {name for name in dir(ProcessGroup) if not (name.startswith("__") and name.endswith("__"))} - NOT_CALLS
    inherited = {name for name in names if getattr(GanglineProcessGroup, name) is getattr(ProcessGroup, name)}
    assert not inherited


def test_calls_that_reach_torch_s_backend_are_errors() -> None:
    store = dist.HashStore()
    made = GanglineProcessGroup(store, 0, 1, timedelta(seconds=30))
    backend = dist.ProcessGroup._get_backend(made, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="error_on_collective"):
        backend.allreduce([torch.ones(1)])
    try:  # a method that is not overridden: an error, or since torch 2.14 the call of the Python group
        ProcessGroup.reduce(made, [torch.ones(1)])
    except RuntimeError as error:
        assert "error_on_collective" in str(error)  # noqa: PT017
    made.shutdown()
    made.shutdown()


def test_a_call_is_queued_if_another_thread_has_queued_one_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = GanglineProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))
    monkeypatch.setattr(alone._queue, "run_now", lambda *_: False)
    before, options = alone.communicator._engine.sequence, ReduceScatterOptions()
    options.asyncOp = False
    alone.reduce_scatter([torch.ones(4)], [[torch.ones(4)]], options)  # lists of tensors take the queue
    assert alone.communicator._engine.sequence == before + 1
    alone.shutdown()
