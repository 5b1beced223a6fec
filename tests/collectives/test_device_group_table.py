"""Every collective of a `DeviceGroup`, by every implementation of this machine, against one reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline import Context, cpu, gpu, num_gpus
from gangline.collectives.call_signature import DTYPES, OPS
from gangline.collectives.devices.backends import selection, staged
from gangline.collectives.devices.backends.copies import Copies
from gangline.collectives.devices.device_group import DeviceGroup, move
from tests.collectives.grid import Cell, combined, equal, inputs_of, ops_of
from tests.collectives.grid import reference as result_of
from tests.collectives.simulated_gpus import simulated_gpus

SIMULATED = "simulated GPUs"
ON_HOST = [("copies", "cpu"), ("staged", "cpu"), ("nccl", SIMULATED)]
ON_GPUS = [(name, "gpu") for name in ("copies", "staged", "peer_to_peer", "nccl")]
SIZES = [0, 1, 2, 3, 64, 1001]
CALLS: dict[str, Callable[[DeviceGroup, Cell, list[Tensor], Any], Any]] = {
    "all_reduce": lambda group, cell, tensors, _: group.all_reduce(tensors, cell.op),
    "reduce": lambda group, cell, tensors, outs: group.reduce(tensors, cell.root, cell.op, outs and outs[cell.root]),
    "broadcast": lambda group, cell, tensors, _: group.broadcast(tensors, cell.root),
    "all_gather": lambda group, _, tensors, outs: group.all_gather(tensors, outs),
    "reduce_scatter": lambda group, cell, tensors, outs: group.reduce_scatter(tensors, cell.op, outs),
}


@pytest.fixture(params=[*ON_HOST, *(pytest.param(one, marks=pytest.mark.gpu) for one in ON_GPUS)], ids="-".join)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], DeviceGroup]]:
    """Return a function that creates a group of a number of positions by one implementation."""
    name, kind = request.param
    if kind == "cpu":
        monkeypatch.setattr(staged, "PIECE", 256)  # so that small tensors have many pieces
        yield lambda count: DeviceGroup([cpu(position) for position in range(count)], name)
    elif kind == SIMULATED:
        with simulated_gpus():
            yield lambda count: DeviceGroup([gpu(position) for position in range(count)], name)
    elif num_gpus():
        yield lambda count: _on_gpus(name, count)
    else:
        pytest.skip("there is no GPU")


def _on_gpus(name: str, count: int) -> DeviceGroup:
    contexts: Sequence[Context] = [gpu(position % num_gpus()) for position in range(count)]
    try:
        selection.check(name, [one.torch_device for one in contexts], "the test")
    except (ValueError, RuntimeError) as error:
        pytest.skip(str(error))
    return DeviceGroup(contexts, name)


def given(position: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(size) * 7 + position).to(dtype)


def on(group: DeviceGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device, copy=True) for tensor, device in zip(tensors, group.devices, strict=True)]


def agree(tensors: Sequence[Tensor], expected: Tensor) -> bool:
    return all(torch.equal(tensor.cpu(), expected) for tensor in tensors)


def inside(value: Tensor, is_apart: bool) -> tuple[Tensor, Tensor]:
    """Return memory and a view of it with the values; the view is contiguous, or has gaps and its axes reversed."""
    if is_apart:
        memory = value.new_ones([*reversed(value.shape), 2])
        return memory, memory[..., 0].permute([*reversed(range(value.dim()))]).copy_(value)
    memory = value.new_ones(value.numel() + 11)
    return memory, memory[3 : 3 + value.numel()].view(value.shape).copy_(value)


def check(group: DeviceGroup, cell: Cell, is_apart: bool) -> None:
    """Make a call, and compare all memory that it may write or read with what it must be."""
    inputs = inputs_of(cell, group.size)
    wanted = [result_of(cell, inputs, position) for position in range(group.size)]
    own = [inside(tensor, is_apart) for tensor in on(group, inputs)]
    empty = on(
        group, [torch.zeros_like(own if want is None else want) for own, want in zip(inputs, wanted, strict=True)]
    )
    outs = [inside(one, is_apart) for one in empty] if cell.out == "out" else []
    made = CALLS[cell.call](group, cell, [view for _, view in own], [view for _, view in outs] or None)
    for position, (tensor, want) in enumerate(zip(inputs, wanted, strict=True)):
        name, is_written = f"{group}, position {position}: {cell}", cell.call in ("all_reduce", "broadcast")
        is_written = is_written or (cell.call == "reduce" and not outs)
        if want is not None:
            got = made if cell.call == "reduce" else made[position]
            if is_written or outs:
                memory, view = (own if is_written else outs)[position]
                assert got is view, name
                got, want = memory, inside(want, is_apart)[0]
            if cell.op == "mean" and group.implementation == "nccl":  # which divides before it adds
                largest = max([0.0, *torch.stack([*inputs]).abs().nan_to_num(0, 0, 0).flatten().tolist()])
                bound = 4 * torch.finfo(cell.dtype).eps * largest
                torch.testing.assert_close(got.cpu(), want, rtol=0, atol=bound, equal_nan=True)
            else:
                equal(got.cpu(), want, name)
        if want is None or not is_written:
            equal(own[position][0].cpu(), inside(tensor, is_apart)[0], f"{name}: its input")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_every_collective(make: Callable[[int], DeviceGroup], call: str, dtype: torch.dtype) -> None:
    for count in (1, 2, 3, 4):
        group = make(count)
        for op, (number, size) in product(ops_of(call, dtype), enumerate(SIZES, count)):
            kind = "special" if number % 3 == 0 and not (dtype.is_complex and op == "product") else "exact"
            cell = Cell(call, size, dtype, op, size % count, ("none", "out")[number // 2 % 2], kind=kind)
            check(group, cell, is_apart=number % 2 == 0)


def test_many_transfers_in_one_call(make: Callable[[int], DeviceGroup]) -> None:
    group, count = make(3), 3
    values = [[given(position, size) for position in range(count)] for size in SIZES * 4]
    summed = [on(group, of_key) for of_key in values]
    outs = [[torch.zeros_like(value) for value in of_key] for of_key in summed]
    own = [of_key[number % count] for number, of_key in enumerate(summed)]
    totals = [one if number % 2 else torch.zeros_like(one) for number, one in enumerate(own)]  # some are values
    group.move([(of_key, total, out) for of_key, total, out in zip(summed, totals, outs, strict=True)])
    for of_key, total, out in zip(values, totals, outs, strict=True):
        assert agree([total, *out], combined(of_key, "sum"))
    for total in totals:
        total.add_(1)
    group.move([((), total, out) for total, out in zip(totals, outs, strict=True)])
    for of_key, out in zip(values, outs, strict=True):
        assert agree(out, combined(of_key, "sum") + 1)


def test_sums_are_made_in_the_order_of_the_positions(make: Callable[[int], DeviceGroup]) -> None:
    group = make(4)
    if group.implementation == "nccl":
        pytest.skip("NCCL chooses the order")
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(999, generator=generator) * 10.0**position for position in (3, 0, -3, 2)]
    tensors = on(group, values)
    group.all_reduce(tensors)
    assert agree(tensors, reduce(torch.add, values))
    assert not torch.equal(tensors[0].cpu(), reduce(torch.add, values[::-1]))


def test_autograd_sees_writes_but_records_nothing(make: Callable[[int], DeviceGroup]) -> None:
    group = make(2)
    leaves = [given(position, 5).to(group.devices[position]).requires_grad_() for position in range(2)]
    kept = [(leaf * leaf).sum() for leaf in leaves]
    versions = [leaf._version for leaf in leaves]
    group.all_reduce(leaves)
    assert agree([leaf.detach() for leaf in leaves], torch.arange(5) * 14.0 + 1)
    assert all(leaf.is_leaf and leaf._version > version for leaf, version in zip(leaves, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept[1].backward()


@pytest.mark.parametrize("root", [0, 1, 2])
def test_large_host_sums_run_chunk_by_chunk(root: int) -> None:
    """Tensors are large enough for threads; the sum may overwrite any of its values."""
    group, size = DeviceGroup([cpu(position) for position in range(3)], "copies"), (9 << 20) // 4 + 5
    values = [given(position, size) % 1000 for position in range(3)]
    expected, tensors = combined(values, "sum"), on(group, values)
    group.reduce(tensors, root)
    assert agree([tensors[root]], expected)
    assert all(agree([tensors[position]], values[position]) for position in range(3) if position != root)
    group.broadcast(tensors, root)
    assert agree(tensors, expected)
    versions = [tensor._version for tensor in tensors]
    group.all_reduce(tensors)
    assert all(tensor._version > version for tensor, version in zip(tensors, versions, strict=True))
    assert agree(tensors, expected * 3)


@pytest.mark.parametrize("op", OPS)
def test_with_copies_each_device_combines_a_slice(op: str) -> None:
    backend = Copies([torch.device("cpu", index) for index in range(3)])  # the same memory by different names
    for size in SIZES:
        cell = Cell("all_reduce", size, op=op)
        tensors = [value.clone() for value in inputs_of(cell, 3)]
        backend.all_reduce(tensors, op)
        assert agree(tensors, combined(inputs_of(cell, 3), op)), size


@pytest.mark.gpu
def test_transfers_between_gpus_use_their_group() -> None:
    if not num_gpus():
        pytest.skip("there is no GPU")
    devices = [gpu(position % num_gpus()).torch_device for position in range(2)]
    values = [given(position, 1001) for position in range(2)]
    on_gpus = [value.to(device) for value, device in zip(values, devices, strict=True)]
    outs, total = [torch.zeros_like(one) for one in on_gpus], torch.zeros_like(on_gpus[1])
    host = torch.zeros(1001)
    move([(on_gpus, total, outs), (on_gpus, host, ())])  # the second one, to the host, by copies
    assert agree([total, *outs, host], combined(values, "sum"))
