"""Every collective of a `DeviceGroup`, by every implementation of this machine, against one reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import pytest
import torch
from torch import Tensor

from gangline import Context, cpu, gpu, num_gpus
from gangline.collectives.call_signature import DTYPES, OPS
from gangline.collectives.devices.backends import selection, staged
from gangline.collectives.devices.backends.copies import Copies
from gangline.collectives.devices.device_group import DeviceGroup, move
from tests.collectives.simulated_gpus import simulated_gpus

SIMULATED = "simulated GPUs"
ON_HOST = [("copies", "cpu"), ("staged", "cpu"), ("nccl", SIMULATED)]
ON_GPUS = [(name, "gpu") for name in ("copies", "staged", "peer_to_peer", "nccl")]
SIZES = [0, 1, 2, 3, 64, 1001]
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@pytest.fixture(params=[*ON_HOST, *(pytest.param(one, marks=pytest.mark.gpu) for one in ON_GPUS)], ids="-".join)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], DeviceGroup]]:
    """Return a function that creates a group of a number of positions by one implementation."""
    name, kind = request.param
    if kind == "cpu":
        monkeypatch.setattr(staged, "PIECE", 256)  # so that small tensors have many pieces
        yield lambda count: DeviceGroup([cpu(position) for position in range(count)], name)
    elif kind == SIMULATED:
        monkeypatch.setattr(f"{__name__}.SIZES", SIZES[:4])  # sums of larger ones are rounded at each hop
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


def given(position: int, shape: Sequence[int], dtype: torch.dtype, op: str = "sum") -> Tensor:
    """Return values: i * 7 + position; for a product, values that do not overflow with four positions."""
    elements = torch.arange(torch.Size(shape).numel()).reshape(tuple(shape)) * 7 + position
    if op == "product":
        elements = elements % 3 + 1
    return elements % 3 == 0 if dtype == torch.bool else elements.to(dtype)


def reference(values: Sequence[Tensor], op: str) -> Tensor:
    """Return the result in float64 or int64, rounded once; a mean is divided in the documented precision."""
    dtype = values[0].dtype
    if dtype == torch.bool:
        return reduce(torch.logical_and if op in ("product", "min") else torch.logical_or, values)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    result = reduce(FUNCTIONS[op], [value.to(wide) for value in values])
    if op != "mean":
        return result.to(dtype)
    return (result.to(torch.promote_types(dtype, torch.float32)) / len(values)).to(dtype)


def is_there(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op not in ("min", "max")
    return op != "mean" or dtype.is_floating_point


def on(group: DeviceGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device, copy=True) for tensor, device in zip(tensors, group.devices, strict=True)]


def apart(tensor: Tensor) -> Tensor:
    """Return the same values with gaps in memory and swapped axes."""
    wide = tensor.new_zeros(tensor.shape[1] * 2, tensor.shape[0] + 1)
    return wide[::2, 1:].t().copy_(tensor)


def agree(tensors: Sequence[Tensor], expected: Tensor) -> bool:
    return all(torch.equal(tensor.cpu(), expected) for tensor in tensors)


def groups_and_sizes(make: Callable[[int], DeviceGroup]) -> Iterator[tuple[DeviceGroup, int, int]]:
    """Yield groups of each number of positions, that number, and each size of a tensor."""
    for count in (1, 2, 3, 4):
        group = make(count)
        yield from ((group, count, size) for size in SIZES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(make: Callable[[int], DeviceGroup], op: str, dtype: torch.dtype) -> None:
    if not is_there(op, dtype):
        group = make(1)
        with pytest.raises(TypeError, match=r"mean of|has no order"):
            group.all_reduce(on(group, [torch.ones(1, dtype=dtype)]), op)
        return
    for group, count, size in groups_and_sizes(make):
        values = [given(position, (size,), dtype, op) for position in range(count)]
        tensors = on(group, values)
        assert group.all_reduce(tensors, op) == tensors
        if op == "mean" and count == 3 and group.implementation == "nccl":  # which divides before it adds
            for tensor in tensors:
                torch.testing.assert_close(tensor.cpu(), reference(values, op))
        else:
            assert agree(tensors, reference(values, op)), (count, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reduce(make: Callable[[int], DeviceGroup], op: str, dtype: torch.dtype) -> None:
    if not is_there(op, dtype):
        return
    for group, count, size in groups_and_sizes(make):
        values = [given(position, (size,), dtype) for position in range(count)]
        expected, root = reference(values, op), size % count
        tensors = on(group, values)
        out = torch.empty_like(tensors[root])
        assert group.reduce(tensors, root, op, out) is out
        assert agree([out], expected)
        assert all(agree([tensor], value) for tensor, value in zip(tensors, values, strict=True))
        assert group.reduce(tensors, root, op) is tensors[root]
        assert agree([tensors[root]], expected), (count, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(make: Callable[[int], DeviceGroup], dtype: torch.dtype) -> None:
    for group, count, size in groups_and_sizes(make):
        values = [given(position, (size,), dtype) for position in range(count)]
        tensors, root = on(group, values), size % count
        assert group.broadcast(tensors, root) == tensors
        assert agree(tensors, values[root]), (count, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather(make: Callable[[int], DeviceGroup], dtype: torch.dtype) -> None:
    for count in (1, 2, 3, 4):
        group = make(count)
        for shape in [(size,) for size in SIZES] + [(3, 5), ()]:
            values = [given(position, shape, dtype) for position in range(count)]
            made = group.all_gather(on(group, values))
            outs = [torch.zeros_like(one) for one in made]
            assert group.all_gather(on(group, values), outs) == outs
            assert agree([*made, *outs], torch.stack(values)), (count, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "min"])
def test_reduce_scatter(make: Callable[[int], DeviceGroup], op: str, dtype: torch.dtype) -> None:
    if not is_there(op, dtype):
        return
    for group, count, size in groups_and_sizes(make):
        values = [given(position, (count, size), dtype) for position in range(count)]
        expected, tensors = reference(values, op), on(group, values)
        made = group.reduce_scatter(tensors, op)
        outs = [torch.zeros_like(one) for one in made]
        assert group.reduce_scatter(tensors, op, outs) == outs
        for position in range(count):
            assert agree([made[position], outs[position]], expected[position]), (count, size)
            assert agree([tensors[position]], values[position])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_tensors_of_any_strides(make: Callable[[int], DeviceGroup], dtype: torch.dtype) -> None:
    for count in (2, 3):
        group = make(count)
        if group.implementation == "nccl" and dtype == torch.bfloat16:
            pytest.skip("NCCL rounds at each hop")
        values = [given(position, (count, 37), dtype) for position in range(count)]
        expected = reference(values, "sum")
        tensors = [apart(tensor) for tensor in on(group, values)]
        outs = [apart(tensor[0].zero_().unsqueeze(0))[0] for tensor in on(group, values)]
        group.reduce_scatter(tensors, "sum", outs)
        assert all(agree([out], expected[position]) for position, out in enumerate(outs))
        gathered = [
            apart(torch.zeros(count * count, 37, dtype=dtype, device=device)).unflatten(0, (count, count))
            for device in group.devices
        ]
        group.all_gather(tensors, gathered)
        assert agree(gathered, torch.stack(values))
        group.reduce(tensors, 1, out=gathered[1][0])
        assert agree([gathered[1][0]], expected)
        assert agree([gathered[1][1]], values[1])
        group.all_reduce(tensors)
        assert agree(tensors, expected)
        group.broadcast(tensors := [apart(tensor) for tensor in on(group, values)], 1)
        assert agree(tensors, values[1])


def test_many_transfers_in_one_call(make: Callable[[int], DeviceGroup]) -> None:
    group, count = make(3), 3
    values = [[given(position, (size,), torch.float32) for position in range(count)] for size in SIZES]
    summed = [on(group, of_key) for of_key in values]
    outs = [[torch.zeros_like(value) for value in of_key] for of_key in summed]
    totals = [torch.zeros_like(of_key[number % count]) for number, of_key in enumerate(summed)]
    group.move([(of_key, total, out) for of_key, total, out in zip(summed, totals, outs, strict=True)])
    for of_key, total, out in zip(values, totals, outs, strict=True):
        assert agree([total, *out], reference(of_key, "sum"))
    for total in totals:
        total.add_(1)
    group.move([((), total, out) for total, out in zip(totals, outs, strict=True)])
    for of_key, out in zip(values, outs, strict=True):
        assert agree(out, reference(of_key, "sum") + 1)


@pytest.mark.parametrize("op", ["min", "max", "sum", "product"])
def test_nan_and_infinity_are_kept(make: Callable[[int], DeviceGroup], op: str) -> None:
    nan, inf = float("nan"), float("inf")
    group = make(3)
    values = [torch.tensor([nan, 1.0, 2.0, inf]), torch.tensor([1.0, nan, 2.0, inf]), torch.tensor([1.0, 1.0, nan, 1])]
    tensors = on(group, values)
    group.all_reduce(tensors, op)
    for tensor in tensors:
        assert tensor.isnan().tolist() == [True, True, True, False]
        assert tensor[3].item() == (1.0 if op == "min" else inf)


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
    leaves = [
        given(position, (5,), torch.float32).to(group.devices[position]).requires_grad_() for position in range(2)
    ]
    kept = [(leaf * leaf).sum() for leaf in leaves]
    versions = [leaf._version for leaf in leaves]
    group.all_reduce(leaves)
    assert agree([leaf.detach() for leaf in leaves], torch.arange(5) * 14.0 + 1)
    assert all(leaf.is_leaf and leaf._version > version for leaf, version in zip(leaves, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept[1].backward()


def test_memory_around_a_tensor_is_not_written(make: Callable[[int], DeviceGroup]) -> None:
    group = make(3)
    wide = on(group, [torch.full((101,), -1.0)] * 3)
    values = [given(position, (90,), torch.float32) for position in range(3)]
    for one, value in zip(wide, values, strict=True):
        one[3:93] = value.to(one.device)
    group.all_reduce([one[3:93] for one in wide])
    assert agree([one[3:93] for one in wide], reference(values, "sum"))
    assert all((one[:3] == -1).all() and (one[93:] == -1).all() for one in wide)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_large_host_sums_run_chunk_by_chunk(root: int) -> None:
    """Tensors are large enough for threads; the sum may overwrite any of its values."""
    group, size = DeviceGroup([cpu(position) for position in range(3)], "copies"), (9 << 20) // 4 + 5
    values = [given(position, (size,), torch.float32) % 1000 for position in range(3)]
    expected, tensors = reference(values, "sum"), on(group, values)
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
        values = [given(position, (size,), torch.float32, op) for position in range(3)]
        tensors = [value.clone() for value in values]
        backend.all_reduce(tensors, op)
        assert agree(tensors, reference(values, op)), size


@pytest.mark.gpu
def test_transfers_between_gpus_use_their_group() -> None:
    if not num_gpus():
        pytest.skip("there is no GPU")
    devices = [gpu(position % num_gpus()).torch_device for position in range(2)]
    values = [given(position, (1001,), torch.float32) for position in range(2)]
    on_gpus = [value.to(device) for value, device in zip(values, devices, strict=True)]
    outs, total = [torch.zeros_like(one) for one in on_gpus], torch.zeros_like(on_gpus[1])
    host = torch.zeros(1001)
    move([(on_gpus, total, outs), (on_gpus, host, ())])  # the second one, to the host, by copies
    assert agree([total, *outs, host], reference(values, "sum"))
