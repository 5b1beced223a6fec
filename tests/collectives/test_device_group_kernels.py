"""Peer-to-peer kernels: arithmetic, compiled for the host; launches; and the trial of peer access."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gangline import gpu, num_gpus
from gangline.collectives.call_signature import DTYPES, OPS
from gangline.collectives.devices.backends import kernels, peer_to_peer, peers
from gangline.collectives.devices.backends.base import in_slices
from gangline.collectives.devices.backends.peer_to_peer import Launch, PeerToPeer, moves, one_shot
from gangline.collectives.devices.device_group import DeviceGroup
from gangline.collectives.engine import reduction
from tests.collectives.simulated_gpus import at, on_simulated_gpu, simulated_gpus

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
REAL = [dtype for dtype in DTYPES if not dtype.is_complex]  # complex numbers move by torch's copies
CASES = [(dtype, op) for dtype in REAL for op in OPS if op != "mean" or dtype.is_floating_point]
COUNTS = [(1, 1), (1, 3), (3, 1), (3, 3), (2, 2), (4, 4)]  # numbers of values and outs
SHIM = """
#define __device__
#define __global__
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
"""
RUN = """
extern "C" void run_{name}(void** p, long long count, unsigned blocks, unsigned threads) {{
  gridDim.x = blocks; blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) of_{name}::{kernel}({arguments}, count);
}}
"""

Run = Callable[[Launch, str], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compile the kernels for the host; return a function that runs a launch, one thread after another."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++: apt-get install g++")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "all.cpp").write_text(SHIM + "".join(_on_host(*case, *counts) for case in CASES for counts in COUNTS))
    subprocess.run(
        [compiler, "-O0", "-std=c++17", "-shared", "-fPIC", "-w", "-o", "all.so", "all.cpp"], cwd=folder, check=True
    )
    library = ctypes.CDLL(str(folder / "all.so"))

    def run(launch: Launch, op: str, blocks: int = 3) -> None:
        tensors = (*launch.values, *launch.outs)
        name = _name(launch.values[0].dtype, op, len(launch.values), len(launch.outs))
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        library[f"run_{name}"](pointers, ctypes.c_longlong(launch.values[0].numel()), blocks, 8)

    return run


def _name(dtype: torch.dtype, op: str, values: int, outs: int) -> str:
    return f"{NAMES[dtype]}_{op}_{values}_{outs}"


def _on_host(dtype: torch.dtype, op: str, values: int, outs: int) -> str:
    name = _name(dtype, op, values, outs)
    source = kernels.source(NAMES[dtype], op, values, outs).replace('extern "C"', "")
    arguments = [f"(const T*)p[{i}]" for i in range(values)] + [f"(T*)p[{values + i}]" for i in range(outs)]
    arguments = [one.replace("T*", f"of_{name}::T*") for one in arguments]
    return f"namespace of_{name} {{ {source} }}" + RUN.format(
        name=name, kernel=kernels.NAME, arguments=", ".join(arguments)
    )


def drawn(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Return arbitrary bits, including NaN, infinities and the limits of integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (count,), generator=generator).bool()
    octets = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return octets.view(dtype)


def combined(values: Iterable[Tensor], op: str) -> Tensor:
    values = list(values)
    out = torch.empty_like(values[0])
    reduction.combine(values, op, out, len(values) if op == "mean" else 1)
    return out


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if values are equal; any NaN equals any other."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


# -- the arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda one: str(one))
def test_a_kernel_combines_as_torch_does(run: Run, dtype: torch.dtype, op: str) -> None:
    for values, outs in COUNTS:
        for count in (1, 2, 7, 64, 1023):
            for offset in (0, 1):  # aligned for loads of 16 bytes, and not
                given = [drawn(dtype, count + offset, seed)[offset:] for seed in range(values)]
                before = [one.clone() for one in given]
                results = [torch.zeros_like(given[0]) for _ in range(outs)]
                run(Launch(0, tuple(given), tuple(results)), op)
                expected = combined(before, op)
                assert all(same(result, expected) for result in results), (values, outs, count, offset)
                assert all(same(one, kept) for one, kept in zip(given, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_is_widened_and_rounded_as_torch_does(run: Run, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    copied, halved = torch.empty_like(every), torch.empty_like(every)
    run(Launch(0, (every,), (copied,)), "sum")
    assert same(copied, every)
    other = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))].clone()
    run(Launch(0, (every, other), (halved, copied)), "mean")
    assert same(halved, combined([every, other], "mean"))


def test_an_out_may_be_a_value(run: Run) -> None:
    given = [drawn(torch.int32, 100, seed) for seed in range(3)]
    expected = combined([one.clone() for one in given], "sum")
    run(Launch(0, tuple(given), tuple(given)), "sum")
    assert all(torch.equal(one, expected) for one in given)


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    import nvidia.cuda_nvrtc

    return ctypes.CDLL(str(Path(next(iter(nvidia.cuda_nvrtc.__path__)), "lib", "libnvrtc.so.12")))


def compiled(nvrtc: ctypes.CDLL, source: str, architecture: int) -> str:
    """Return the PTX of a kernel, compiled with the options that cupy gives."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    options = [f"-arch=compute_{architecture}".encode(), b"-ftz=true"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    of = "PTX" if not code else "ProgramLog"
    getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{of}")(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not code, text.value.decode()
    return text.value.decode()


@pytest.mark.parametrize(
    ("architecture", "all_counts", "step"),
    [
        (70, [(3, 3)], 3),
        *(
            pytest.param(*case, 1, marks=pytest.mark.slow)
            for case in ((70, [(3, 3)]), (80, [(3, 3)]), (90, COUNTS), (120, [(3, 3)]))
        ),
    ],
)
def test_kernels_compile_for_gpus_and_keep_subnormal_numbers(
    nvrtc: ctypes.CDLL, architecture: int, all_counts: list[tuple[int, int]], step: int
) -> None:
    for dtype, op in CASES[::step]:
        for counts in all_counts:
            ptx = compiled(nvrtc, kernels.source(NAMES[dtype], op, *counts), architecture)
            assert kernels.NAME in ptx
            assert set(re.findall(r"\S+\.ftz\S*", ptx)) <= {"setp.nan.ftz.f32", "setp.num.ftz.f32"}  # is it NaN?


# -- what is launched -----------------------------------------------------------------------------------------------


def spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("positions", [2, 3, 4])
def test_two_shot_combines_each_element_once_and_writes_it_everywhere(run: Run, positions: int, count: int) -> None:
    tensors = [torch.arange(count, dtype=torch.float32) * 7 + position for position in range(positions)]
    launches = moves(in_slices(tensors, range(positions), positions), {tensors[0].device: 0})
    assert sum(len(launch.values[0]) for launch in launches) == count
    for number, launch in enumerate(launches):  # no launch reads what another writes, so they need no order
        assert launch.outs[0]._base is tensors[number]  # which is the owner's
        assert spans(launch.values) == spans(launch.outs)
        assert (launch.values[0].data_ptr() - tensors[0].data_ptr()) % 64 == 0
    ordered = spans(tensor for launch in launches for tensor in launch.outs)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
    for launch in reversed(launches):
        run(launch, "sum")
    expected = torch.arange(count) * 7.0 * positions + positions * (positions - 1) / 2
    assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_one_shot_writes_no_tensor_that_it_reads(run: Run) -> None:
    tensors = [torch.arange(100, dtype=torch.float32) * 7 + position for position in range(3)]
    results = [torch.zeros(100) for _ in range(3)]
    launches = one_shot(tensors, results)
    assert [launch.position for launch in launches] == [0, 1, 2]
    assert all(launch.values == tuple(tensors) for launch in launches)
    for launch in launches:
        run(launch, "max")
    assert all(torch.equal(result, tensors[2]) for result in results)


def test_a_transfer_is_one_launch_at_its_owner(run: Run) -> None:
    values = [torch.arange(50, dtype=torch.float32) * 7 + position for position in range(3)]
    total, outs = torch.zeros(50), [torch.zeros(50) for _ in range(2)]
    launches = moves([(values, total, outs), ((), total, outs), ((), total, [total])], {total.device: 2})
    assert [launch.position for launch in launches] == [2, 2]  # a copy onto itself is omitted
    run(launches[0], "sum")
    assert all(torch.equal(one, torch.arange(50) * 21.0 + 3) for one in (total, *outs))


def host_kernel(dtype: str, op: str, values: int, outs: int) -> Callable[..., None]:
    """Return a kernel whose launch puts its work on the stream that `stream_of` has noted."""

    def launch(grid: object, block: object, arguments: Sequence[np.integer[Any]]) -> None:
        *pointers, count = map(int, arguments)
        tensors = [at(pointer, count, 7) for pointer in pointers]

        def work() -> bool:
            total = combined(tensors[:values], op)
            return all(out.copy_(total) is not None for out in tensors[values:])

        noted.pop().put(work)

    return launch


noted: list[Any] = []


@pytest.mark.parametrize("gpus", [[0, 1], [0, 1, 2, 3], [0, 1, 0], [2, 2]], ids=str)
def test_launches_wait_for_the_work_of_all_gpus(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads what earlier ones write on other GPUs, which has not ended."""
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=nullcontext))
    monkeypatch.setattr(peer_to_peer, "import_module", lambda name: cupy)
    monkeypatch.setattr(peer_to_peer, "_stream_of", lambda cupy, stream: nullcontext(noted.append(stream)))
    monkeypatch.setattr(peer_to_peer, "_kernel", host_kernel)
    monkeypatch.setattr(peer_to_peer, "_MAX_ONE_SHOT", 400)
    monkeypatch.setattr(peers, "reach", lambda one, other: None)
    with simulated_gpus():
        group, made, wanted = PeerToPeer([torch.device("cuda", index) for index in gpus]), [], []
        for count in (200, 50):  # two-shot, and one-shot between several GPUs
            values = [torch.arange(count, dtype=torch.float32) + position for position in range(len(gpus))]
            tensors = [on_simulated_gpu(value, index) for value, index in zip(values, gpus, strict=True)]
            outs = [torch.zeros_like(tensor) for tensor in tensors]
            group.all_reduce(tensors, "sum")
            group.move([(tensors, outs[1], outs)])
            group.all_gather(outs, rows := [torch.zeros(len(gpus), count, device=one.device) for one in tensors])
            made += [*tensors, *outs, *rows]
            total = combined(values, "sum")
            wanted += [total] * len(gpus) + [total * len(gpus)] * len(gpus)
            wanted += [torch.stack([total * len(gpus)] * len(gpus))] * len(gpus)
        assert all(torch.equal(one.host(), want) for one, want in zip(made, wanted, strict=True))


# -- the trial of peers ---------------------------------------------------------------------------------------------

CHILD = """
for pair in "$@"; do
  case "$pair" in
    0,2) exec sleep 1000 ;;
    1,2) exit 3 ;;
    2,1) echo "what is read there is not what should be" ;;
    *) echo ok ;;
  esac
done
"""


def test_pairs_that_hang_or_kill_their_child_are_named_and_the_others_are_tried() -> None:
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    found = peers.prove(pairs, ["sh", "-c", CHILD, "child"], deadline=1.0)
    assert found == {
        (0, 1): "",
        (0, 2): "no answer within 1 s",
        (1, 0): "",
        (1, 2): "the process that tried it ended with 3",
        (2, 0): "",
        (2, 1): "what is read there is not what should be",
    }


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_gpu_three_times_agrees_with_the_host(dtype: torch.dtype) -> None:
    if not num_gpus():
        pytest.skip("there is no GPU")
    lack = PeerToPeer.unavailable_reason([gpu(0).torch_device] * 3)
    if lack:
        pytest.skip(lack)
    group = DeviceGroup([gpu(0)] * 3, "peer_to_peer")
    for op in OPS:
        if (dtype, op) in CASES:
            for count in (1, 1023, 1 << 20):
                given = [drawn(dtype, count, seed) for seed in range(3)]
                tensors = [one.cuda(0) for one in given]
                group.all_reduce(tensors, op)
                assert all(same(tensor.cpu(), combined(given, op)) for tensor in tensors), (op, count)
