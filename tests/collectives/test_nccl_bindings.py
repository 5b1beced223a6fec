"""NCCL: the calls that gangline makes, to simulated GPUs; and the real bindings, on a GPU."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor

from gangline import gpu, num_gpus
from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.devices.backends.nccl import Nccl
from gangline.collectives.devices.device_group import DeviceGroup
from tests.collectives.grid import Cell, combined, inputs_of
from tests.collectives.simulated_gpus import HostGpus, on_simulated_gpu, simulated_gpus
from tests.collectives.test_fork import in_child

# -- the calls, by simulated GPUs; test_device_group_table has their values -------------------------------------------


@pytest.fixture
def group() -> Iterator[DeviceGroup]:
    HostGpus.groups.clear()
    with simulated_gpus():
        yield DeviceGroup([gpu(position) for position in range(4)], "nccl")


def on_gpus(values: Iterable[Tensor]) -> list[Tensor]:
    return [on_simulated_gpu(value, position) for position, value in enumerate(values)]


def test_a_collective_is_a_group_of_a_call_per_position(group: DeviceGroup) -> None:
    """Many keys are one group of sums and one of copies, because the calls of one group may run concurrently."""
    tensors = on_gpus(inputs_of(Cell("all_reduce", 8), 4))
    group.all_reduce(tensors)
    group.all_gather(tensors)
    group.reduce_scatter([tensor.view(4, 2) for tensor in tensors])
    values = [on_gpus(inputs_of(Cell("all_reduce", size), 4)) for size in (1, 5, 0, 64)]
    outs = [[torch.zeros_like(value) for value in of_key] for of_key in values]
    group.move([(of_key, torch.zeros_like(of_key[0]), out) for of_key, out in zip(values, outs, strict=True)])
    names = (("all_reduce", 1), ("all_gather", 1), ("reduce_scatter", 1), ("reduce", 3), ("broadcast", 3))
    assert HostGpus.groups == [[name] * keys * 4 for name, keys in names]


def test_a_mean_does_not_overflow(group: DeviceGroup) -> None:
    for dtype, value in ((torch.float32, 3e38), (torch.float16, 40_000.0)):
        want = torch.full((8,), value, dtype=dtype)
        reduced = group.all_reduce(on_gpus([want] * 4), "mean")
        total = group.reduce(on_gpus([want] * 4), op="mean")
        rows = group.reduce_scatter([tensor.view(4, 2) for tensor in on_gpus([want] * 4)], "mean")
        assert all(torch.equal(tensor.cpu(), want[: tensor.numel()]) for tensor in (*reduced, total, *rows))


def test_pynccl_refuses_counts_beyond_a_c_int() -> None:
    binding = object.__new__(nccl_bindings.PyncclBinding)
    with pytest.raises(ValueError, match=r"has 2147483648 elements, but pynccl .* expected GANGLINE_NCCL_BINDING=cupy"):
        binding.check_count(2**31)
    binding.check_count(2**31 - 1)


# -- the bindings ---------------------------------------------------------------------------------------------------


def make_each_call(binding: nccl_bindings.Binding) -> None:
    binding.start()
    binding.call("all_reduce", 1, 16, 32, 5, 7, 0, 64)
    binding.call("reduce", 0, 16, 32, 5, 7, 2, 1, 64)
    binding.call("broadcast", 0, 16, 32, 5, 7, 1, 64)
    binding.call("all_gather", 0, 16, 32, 5, 7, 64)
    binding.call("reduce_scatter", 1, 16, 32, 5, 7, 3, 64)
    binding.send(16, 5, 2, 64)
    binding.receive(32, 5, 1, 64)
    binding.end()
    binding.abort()
    binding.destroy()


def test_calls_of_cupy_are_methods_of_its_communicators() -> None:
    library = Mock()
    make_each_call(nccl_bindings.CupyBinding(library, [library.first, library.second]))
    assert library.mock_calls == [
        call.groupStart(),
        call.second.allReduce(16, 32, 5, 7, 0, 64),
        call.first.reduce(16, 32, 5, 7, 2, 1, 64),
        call.first.broadcast(16, 32, 5, 7, 1, 64),
        call.first.allGather(16, 32, 5, 7, 64),
        call.second.reduceScatter(16, 32, 5, 7, 3, 64),
        call.first.send(16, 5, 1, 2, 64),
        call.first.recv(32, 5, 1, 1, 64),
        call.groupEnd(),
        call.first.abort(),
        call.first.destroy(),
        call.second.destroy(),
    ]


def test_calls_of_pynccl_are_functions_that_take_the_communicator_before_the_stream() -> None:
    library = Mock()
    make_each_call(nccl_bindings.PyncclBinding(library, [101, 102]))
    assert library.mock_calls == [
        call.group_start(),
        call.all_reduce(16, 32, 5, 7, 0, 102, 64),
        call.reduce(16, 32, 5, 7, 2, 1, 101, 64),
        call.broadcast(16, 32, 5, 7, 1, 101, 64),
        call.all_gather(16, 32, 5, 7, 101, 64),
        call.reduce_scatter(16, 32, 5, 7, 3, 102, 64),
        call.pp_send(16, 5, 1, 2, 101, 64),
        call.pp_recv(32, 5, 1, 1, 101, 64),
        call.group_end(),
        call.comm_abort(101),
        call.comm_destroy(101),
        call.comm_destroy(102),
    ]


def test_communicators_are_destroyed_as_one_group_before_the_interpreter_ends() -> None:
    library = Mock()

    def end_the_interpreter() -> str:
        backend = Nccl([torch.device("cpu")] * 2, nccl_bindings.CupyBinding(library, [library.first, library.second]))
        atexit._run_exitfuncs()
        del backend
        return str([*library.mock_calls])

    destroyed = [call.groupStart(), call.first.destroy(), call.second.destroy(), call.groupEnd()]
    assert in_child(end_the_interpreter) == (0, [str(destroyed)])


# -- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=nccl_bindings.BINDINGS)
def _binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not num_gpus():
        pytest.skip("there is no GPU")
    lack = nccl_bindings.unavailable_reason(request.param)
    if lack:
        pytest.skip(lack)
    monkeypatch.setenv("GANGLINE_NCCL_BINDING", request.param)


@pytest.mark.gpu
@pytest.mark.usefixtures("_binding")
def test_one_rank_through_each_binding() -> None:
    backend = Nccl([gpu(0).torch_device])
    value = torch.arange(1000, dtype=torch.float32, device="cuda:0") * 7
    total, outs, rows, row = (torch.zeros(shape, device="cuda:0") for shape in (1000, 1000, (1, 1000), 1000))
    backend.move([([value], total, [outs])])
    backend.all_gather([value], [rows])
    backend.reduce_scatter([value.unsqueeze(0)], [row], "sum")
    backend.all_reduce([value], "sum")
    assert all(
        torch.equal(one.flatten(), torch.arange(1000, device="cuda:0") * 7.0) for one in (total, outs, rows, row, value)
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("_binding")
def test_all_gpus_through_each_binding() -> None:
    count = num_gpus()
    if count < 2:
        pytest.skip(f"there are {count} GPUs; expected 2")
    group = DeviceGroup([gpu(position) for position in range(count)], "nccl")
    values = inputs_of(Cell("all_reduce", 1000), count)
    tensors = [one.to(device) for one, device in zip(values, group.devices, strict=True)]
    group.all_reduce(tensors)
    assert all(torch.equal(tensor.cpu(), combined(values, "sum")) for tensor in tensors)
