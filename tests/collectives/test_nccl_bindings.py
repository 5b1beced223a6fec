"""NCCL: the calls that gangline makes, to a stand-in on the host; and the real bindings, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gangline import gpu, num_gpus
from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.devices.backends.nccl import Nccl
from gangline.collectives.devices.device_group import DeviceGroup
from tests.collectives.simulated_gpus import ELEMENTS, NcclCalls, at, reduced

ROOT = Path(__file__).parents[2]


class HostBinding(NcclCalls):
    """NCCL by its manual, in host memory: the calls of a group are matched by position and run at its end.

    It checks the rules: calls within groups only, and the same ones from each position.
    """

    name: ClassVar[str] = "host"

    def __init__(self, gpus: Sequence[int]) -> None:
        self.size = len(gpus)
        self.groups: list[list[str]] = []
        self._open: list[list[tuple[Any, ...]]] | None = None

    def start(self) -> None:
        assert self._open is None
        self._open = [[] for _ in range(self.size)]

    def end(self) -> None:
        assert self._open is not None
        of_places, self._open = self._open, None
        self.groups.append([call[0] for call in of_places[0]])
        for calls in zip(*of_places, strict=True):
            assert len({(call[0], *call[3:]) for call in calls}) == 1  # all but the addresses
            self._run(*calls[0][:1], [call[1] for call in calls], [call[2] for call in calls], *calls[0][3:])

    def _call(self, name: str, *arguments: int) -> None:
        assert self._open is not None, f"{name} outside a group"
        position, *rest, _ = arguments  # without the stream
        self._open[position].append((name, *rest))

    def _run(
        self, name: str, sources: list[int], targets: list[int], count: int, dtype: int, op: int, root: int
    ) -> None:
        rows = count * (self.size if name == "reduce_scatter" else 1)
        if name == "broadcast":
            result = at(sources[root], rows, dtype).clone()
        else:
            given = [at(source, rows, dtype).clone() for source in sources]
            result = torch.cat(given) if name == "all_gather" else reduced(given, op)
        for position, target in enumerate(targets):
            if name == "reduce_scatter":
                at(target, count, dtype).copy_(result[position * count : (position + 1) * count])
            elif name != "reduce" or position == root:
                at(target, len(result), dtype).copy_(result)


class OnHost(Nccl):
    def __init__(self, size: int) -> None:
        self.binding = HostBinding(range(size))
        super().__init__([torch.device("cpu")] * size, self.binding)

    def stream(self, position: int) -> int:
        return 0


def given(count: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(size) * 7 + position).to(dtype) for position in range(count)]


def summed(count: int, size: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(size) * 7 * count + count * (count - 1) // 2).to(dtype)


# -- the calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [one for one in ELEMENTS.values() if one != torch.uint8], ids=str)
def test_an_all_reduce_is_one_call_per_position(dtype: torch.dtype) -> None:
    backend, tensors = OnHost(3), given(3, 6, dtype)
    versions = [tensor._version for tensor in tensors]
    backend.all_reduce(tensors, "sum")
    assert all(tensor._version > version for tensor, version in zip(tensors, versions, strict=True))
    assert all(torch.equal(tensor, summed(3, 6, dtype)) for tensor in tensors)
    assert backend.binding.groups == [["all_reduce"]]


def test_a_mean_does_not_overflow() -> None:
    for dtype, value in ((torch.float32, 3e38), (torch.float16, 40_000.0)):
        backend, want = OnHost(4), torch.full((8,), value, dtype=dtype)
        backend.all_reduce(tensors := [want.clone() for _ in range(4)], "mean")
        assert all(torch.equal(tensor, want) for tensor in tensors)
        backend.move([([want.clone() for _ in range(4)], total := torch.zeros(8, dtype=dtype), ())], "mean")
        assert torch.equal(total, want)
        backend.reduce_scatter([want] * 4, outs := [torch.zeros(2, dtype=dtype) for _ in range(4)], "mean")
        assert torch.equal(torch.cat(outs), want)


def test_bools_are_bytes_whose_sum_is_their_maximum() -> None:
    patterns = [torch.tensor([False, position == 0, position == 2, True]) for position in range(3)]
    for op, expected in (
        ("sum", [0, 1, 1, 1]),
        ("max", [0, 1, 1, 1]),
        ("product", [0, 0, 0, 1]),
        ("min", [0, 0, 0, 1]),
    ):
        backend, tensors = OnHost(3), [pattern.clone() for pattern in patterns]
        backend.all_reduce(tensors, op)
        assert all(tensor.view(torch.uint8).tolist() == expected for tensor in tensors)
        assert backend.binding.groups == [["all_reduce"]]


def test_unsupported_dtypes_use_copies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gangline")
    backend, tensors = OnHost(2), given(2, 6, torch.int16)
    backend.all_reduce(tensors, "sum")
    assert all(torch.equal(tensor, summed(2, 6, torch.int16)) for tensor in tensors)
    backend.all_gather(tensors, outs := [torch.zeros(2, 6, dtype=torch.int16) for _ in range(2)])
    assert torch.equal(outs[1][1], summed(2, 6, torch.int16))
    backend.reduce_scatter(
        [one.reshape(2, 3) for one in given(2, 6, torch.int16)],
        outs := [torch.zeros(3, dtype=torch.int16) for _ in range(2)],
        "max",
    )
    assert not backend.binding.groups
    assert sum("torch.int16 move by torch's copies" in record.getMessage() for record in caplog.records) <= 1


def test_all_gather_and_reduce_scatter_are_one_call_per_position() -> None:
    backend, tensors = OnHost(3), given(3, 6, torch.float32)
    outs = [torch.zeros(3, 6) for _ in range(3)]
    backend.all_gather(tensors, outs)
    assert all(torch.equal(out, torch.stack(tensors)) for out in outs)
    rows = [torch.zeros(2) for _ in range(3)]
    backend.reduce_scatter([tensor.reshape(3, 2) for tensor in tensors], rows, "max")
    assert torch.equal(torch.cat(rows), tensors[2])
    assert backend.binding.groups == [["all_gather"], ["reduce_scatter"]]


def test_many_keys_are_one_group_of_sums_and_one_of_copies() -> None:
    """Copied values must be complete, and the calls of one group may run concurrently."""
    backend, sizes = OnHost(3), [1, 5, 0, 64]
    values = [given(3, size, torch.float32) for size in sizes]
    totals = [torch.zeros(size) for size in sizes]
    outs = [[torch.zeros(size) for _ in range(3)] for size in sizes]
    backend.move(list(zip(values, totals, outs, strict=True)))
    for size, total, out in zip(sizes, totals, outs, strict=True):
        assert all(torch.equal(one, summed(3, size, torch.float32)) for one in (total, *out))
    assert backend.binding.groups == [["reduce"] * 3, ["broadcast"] * 3]
    assert all(torch.equal(one, kept) for one, kept in zip(values[1], given(3, 5, torch.float32), strict=True))


def test_non_contiguous_tensors_are_copied_and_written_back() -> None:
    backend = OnHost(2)
    tensors = [one.reshape(4, 3).t().contiguous().t() for one in given(2, 12, torch.float32)]
    assert not tensors[0].is_contiguous()
    backend.all_reduce(tensors, "sum")
    assert all(torch.equal(tensor.reshape(-1), summed(2, 12, torch.float32)) for tensor in tensors)


def test_pynccl_refuses_counts_beyond_a_c_int() -> None:
    binding = object.__new__(nccl_bindings.PyncclBinding)
    with pytest.raises(ValueError, match=r"has 2147483648 elements, but pynccl .* expected GANGLINE_NCCL_BINDING=cupy"):
        binding.checked_count(2**31)
    assert binding.checked_count(2**31 - 1) == 2**31 - 1


# -- the bindings ---------------------------------------------------------------------------------------------------


class Recorder:
    """A library, or one of its communicators, that records its calls."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, function: str) -> Callable[..., None]:
        return lambda *arguments: self._calls.append((self._name, function, *arguments))


def recorded(binding: nccl_bindings.Binding, calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    binding.start()
    binding.all_reduce(1, 16, 32, 5, 7, 0, 64)
    binding.reduce(0, 16, 32, 5, 7, 2, 1, 64)
    binding.broadcast(0, 16, 32, 5, 7, 1, 64)
    binding.all_gather(0, 16, 32, 5, 7, 64)
    binding.reduce_scatter(1, 16, 32, 5, 7, 3, 64)
    binding.send(16, 5, 2, 64)
    binding.receive(32, 5, 1, 64)
    binding.end()
    binding.abort()
    binding.destroy()
    return calls


def test_calls_of_cupy_are_methods_of_its_communicators() -> None:
    calls: list[tuple[Any, ...]] = []
    communicators = [Recorder("first", calls), Recorder("second", calls)]
    assert recorded(nccl_bindings.CupyBinding(Recorder("cupy", calls), communicators), calls) == [
        ("cupy", "groupStart"),
        ("second", "allReduce", 16, 32, 5, 7, 0, 64),
        ("first", "reduce", 16, 32, 5, 7, 2, 1, 64),
        ("first", "broadcast", 16, 32, 5, 7, 1, 64),
        ("first", "allGather", 16, 32, 5, 7, 64),
        ("second", "reduceScatter", 16, 32, 5, 7, 3, 64),
        ("first", "send", 16, 5, 1, 2, 64),
        ("first", "recv", 32, 5, 1, 1, 64),
        ("cupy", "groupEnd"),
        ("first", "abort"),
        ("first", "destroy"),
        ("second", "destroy"),
    ]


def test_calls_of_pynccl_are_functions_that_take_the_communicator_before_the_stream() -> None:
    calls: list[tuple[Any, ...]] = []
    binding = nccl_bindings.PyncclBinding(Recorder("pynccl", calls), [101, 102])
    assert [call[1:] for call in recorded(binding, calls)] == [
        ("group_start",),
        ("all_reduce", 16, 32, 5, 7, 0, 102, 64),
        ("reduce", 16, 32, 5, 7, 2, 1, 101, 64),
        ("broadcast", 16, 32, 5, 7, 1, 101, 64),
        ("all_gather", 16, 32, 5, 7, 101, 64),
        ("reduce_scatter", 16, 32, 5, 7, 3, 102, 64),
        ("pp_send", 16, 5, 1, 2, 101, 64),
        ("pp_recv", 32, 5, 1, 1, 101, 64),
        ("group_end",),
        ("comm_abort", 101),
        ("comm_destroy", 101),
        ("comm_destroy", 102),
    ]


AT_EXIT = """
import atexit
calls = []
atexit.register(lambda: print(calls))  # after what is registered later
import torch
from gangline.collectives.devices.backends.nccl import Nccl
from gangline.collectives.devices.backends.nccl_bindings import CupyBinding
from tests.collectives.test_nccl_bindings import Recorder
communicators = [Recorder("first", calls), Recorder("second", calls)]
backend = Nccl([torch.device("cpu")] * 2, CupyBinding(Recorder("cupy", calls), communicators))
"""


def test_communicators_are_destroyed_as_one_group_before_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True, cwd=ROOT)
    destroyed = [("cupy", "groupStart"), ("first", "destroy"), ("second", "destroy"), ("cupy", "groupEnd")]
    assert done.stdout.strip() == str(destroyed), done.stderr


# -- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=nccl_bindings.BINDINGS)
def _binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not num_gpus():
        pytest.skip("there is no GPU")
    lack = nccl_bindings.missing(request.param)
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
    tensors = [one.to(device) for one, device in zip(given(count, 1000, torch.float32), group.devices, strict=True)]
    group.all_reduce(tensors)
    assert all(torch.equal(tensor.cpu(), summed(count, 1000, torch.float32)) for tensor in tensors)
