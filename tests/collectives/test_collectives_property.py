"""Whatever the algorithm, dtype, size and memory: all ranks hold the same bits, and sums are off by few roundings."""

from __future__ import annotations

import os
from functools import partial

import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gangline.collectives import algorithms, tuner
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator
from gangline.collectives.processes.spawning import spawn
from tests.collectives.ranks import LARGE, REDUCING, check, in_ranks, in_threads, open_again, ops_for, same

ALGORITHMS = sorted({name for collective in tuner.TUNED for name in tuner.names(collective)})


def _values(op: str, stride: int, count: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return values by index * stride + rank; factors are near 1, so that no order of products overflows."""
    numbers = torch.arange(count, dtype=torch.int64) * stride + rank * 7
    if dtype.is_complex:
        return (numbers % 2003).to(dtype)  # whole numbers whose sums are exact
    if not dtype.is_floating_point:
        return numbers % 3 == 0 if dtype == torch.bool else (numbers * numbers).to(dtype)
    if op == "product":
        return (1 + (numbers % 17 - 8).double() / 16).to(dtype)
    return ((numbers % 2003 - 1001).double() / 3 / 10 ** (rank % 3)).to(dtype)


def _checked(
    comm: Communicator, collective: str, count: int, dtype: torch.dtype, op: str, root: int, stride: int
) -> Tensor | None:
    make = partial(_values, op, stride)
    return check(comm, collective, count, dtype, op, root, make=make, is_inexact=dtype.is_floating_point)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[str, str, int, int, torch.dtype, str, int, int]:
    collective = draw(st.sampled_from(tuner.TUNED))
    algorithm = draw(st.sampled_from(tuner.names(collective)))
    if algorithm == "ring":
        algorithm += f":{draw(st.integers(1, 5))}"
    size = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from(ops_for(dtype))) if collective in REDUCING else "sum"
    counts = st.one_of(
        st.integers(0, 40), st.integers(0, 3_000), st.sampled_from([16_383, 16_384, 16_385, 65_537, 100_003])
    )
    return (
        collective,
        algorithm,
        size,
        draw(counts),
        dtype,
        op,
        draw(st.integers(0, size - 1)),
        draw(st.integers(1, 99)),
    )


@given(_calls())
@example(("reduce_scatter", "halving_doubling", 3, 5, torch.float32, "sum", 0, 3))  # a row summed in two rounds
@example(("all_reduce", "one_shot", 5, 100_003, torch.bfloat16, "mean", 0, 37))
@example(("all_reduce", "ring:5", 5, 3, torch.float16, "sum", 0, 37))  # more segments than elements
def test_every_algorithm_leaves_the_same_bits_on_all_ranks(
    case: tuple[str, str, int, int, torch.dtype, str, int, int],
) -> None:
    collective, algorithm, size, count, dtype, op, root, stride = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_ALGO", f"{collective}={algorithm}")
        results = in_threads(size, _checked, collective, count, dtype, op, root, stride)
    if collective == "all_reduce":
        for rank, got in enumerate(results):
            same(got, results[0], f"rank {rank} against rank 0, {case}")


def _sweep(comm: Communicator, transport: str, counts: list[int]) -> int:
    number = 0
    for algorithm in ALGORITHMS:
        os.environ["GANGLINE_ALGO"] = f"{algorithm}:3" if algorithm == "ring" else algorithm
        collectives = [collective for collective in tuner.TUNED if algorithm in tuner.names(collective)]
        with open_again(comm, transport) as forced:
            for collective in collectives:
                for count in counts:
                    number += 1
                    dtype = DTYPES[number % len(DTYPES)]
                    ops = ops_for(dtype)
                    op = ops[number % len(ops)] if collective in REDUCING else "sum"
                    root = number % comm.size
                    got = _checked(forced, collective, count, dtype, op, root, 13)
                    if collective == "all_reduce":
                        rows = comm.all_gather(got)
                        for row in rows:
                            same(row, rows[0], f"rank {comm.rank} against the others")
    return number


def _counts(size: int) -> list[int]:
    return [0, 1, size - 1, size, size + 1, 17, 16_384, 16_385, 32_769, 65_536, 100_003, 262_145]


@pytest.mark.parametrize(
    ("transport", "size", "counts", "timeout"),
    [
        ("shared_memory", 2, [0, 5, 100_003], 60),
        ("shared_memory", 4, [20_001], 60),
        *(
            pytest.param(transport, size, _counts(size), 300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for transport in ("shared_memory", "ipc", "tcp")
            for size in (2, 3, 4)
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, int)) else f"{len(value)} sizes",
)
def test_every_algorithm_leaves_the_same_bits_in_all_processes(
    transport: str, size: int, counts: list[int], timeout: int
) -> None:
    ran = spawn(_sweep, size, transport, counts, transport=transport, timeout=timeout)
    assert ran == [len(counts) * sum(len(tuner.names(collective)) for collective in tuner.TUNED)] * size


# Means, complex numbers, tensors that overlap, and large ones


def _mean_of_halves(comm: Communicator, value: float) -> None:
    """Check means of tensors whose sum exceeds float16."""
    for count in (5, LARGE):
        own = torch.full((count,), value, dtype=torch.float16)
        means = [comm.all_reduce(own, "mean", out=torch.empty_like(own))]
        means.append(comm.reduce_scatter(own.expand(comm.size, -1), "mean"))
        means += [comm.reduce(own, root, "mean", out=own * 0) for root in range(comm.size)]
        assert [mean is None for mean in means[2:]] == [rank != comm.rank for rank in range(comm.size)]
        assert all(mean is None or bool((mean == value).all()) for mean in (*means, own))


@pytest.mark.parametrize("algorithm", sorted({*algorithms.names("all_reduce"), *algorithms.names("reduce"), "shared"}))
def test_mean_of_float16_does_not_overflow(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [
        f"{collective}={algorithm}"
        for collective in ("all_reduce", "reduce", "reduce_scatter")
        if algorithm in (*algorithms.names(collective), "shared")
    ]
    monkeypatch.setenv("GANGLINE_ALGO", ",".join(choices))
    in_threads(5, _mean_of_halves, 20_000.0)


def _aliased(comm: Communicator) -> None:
    for count in (3, LARGE):
        rows = [torch.arange(comm.size * count).view(comm.size, count) + 7 * rank for rank in range(comm.size)]
        tensor = rows[comm.rank].clone()
        comm.all_to_all(tensor, out=tensor)
        same(tensor, torch.stack([of_rank[comm.rank] for of_rank in rows]), "all_to_all in place")
        for place in range(comm.size):
            tensor = rows[comm.rank].clone()
            comm.reduce_scatter(tensor, out=tensor[place])
            same(tensor[place], sum(of_rank[comm.rank] for of_rank in rows), f"reduce_scatter into row {place}")
        shifted = rows[comm.rank].view(-1).clone()
        comm.all_reduce(shifted[:-1], out=shifted[1:])
        want = sum(of_rank.view(-1)[:-1] for of_rank in rows)
        same(shifted[1:], want, "all_reduce into a tensor that overlaps")
        shifted = rows[comm.rank].view(-1).clone()
        comm.reduce(shifted[1:], 0, out=shifted[:-1])
        if comm.rank == 0:
            same(shifted[:-1], sum(of_rank.view(-1)[1:] for of_rank in rows), "reduce into a tensor that overlaps")


def _complex(comm: Communicator) -> None:
    for dtype in (torch.complex64, torch.complex128):
        for count in (3, LARGE):
            rows = [
                torch.polar(torch.ones(count), torch.arange(count) + float(rank)).to(dtype) for rank in range(comm.size)
            ]
            product = comm.all_reduce(rows[comm.rank].clone(), "product")
            torch.testing.assert_close(product, torch.stack(rows).prod(0))
            total = comm.all_reduce(rows[comm.rank].conj(), out=torch.empty(count, dtype=dtype))
            torch.testing.assert_close(total, torch.stack(rows).sum(0).conj().resolve_conj())
            out = torch.zeros(count, dtype=dtype)
            comm.broadcast(out.conj() if comm.rank else rows[0], root=0)
            if comm.rank:
                same(out, rows[0].conj().resolve_conj(), "broadcast into a conjugate")
    for op in ("min", "max"):
        with pytest.raises(TypeError, match=f"op is '{op}', but torch.complex64 has no order"):
            comm.all_reduce(torch.zeros(2, dtype=torch.complex64), op)


def _all_kinds(comm: Communicator) -> None:
    _mean_of_halves(comm, 40_000.0)
    _aliased(comm)
    _complex(comm)


@pytest.mark.parametrize(
    ("transport", "size"), [("in_process", 3), ("shared_memory", 4), pytest.param("tcp", 4, marks=pytest.mark.slow)]
)
def test_means_complex_numbers_and_results_that_overlap_inputs_are_right(transport: str, size: int) -> None:
    in_ranks(transport, size, _all_kinds)


_MANY = (1 << 31) + 8
"""Elements of a tensor whose bytes and indices exceed 32 bits."""


def _large(comm: Communicator) -> None:
    tensor = torch.full((_MANY,), comm.rank + 1, dtype=torch.uint8)
    tensor[-1] = 7
    comm.all_reduce(tensor)
    assert tensor[[0, _MANY // 2, -2, -1]].tolist() == [3, 3, 3, 14]
    assert int(tensor[::1021].max()) == int(tensor[::1021].min()) == 3
    rows = tensor.view(2, -1)
    rows[0], rows[1] = 10 * comm.rank, 10 * comm.rank + 1
    rows[:, -1] += 5
    taken = torch.empty_like(rows)
    comm.all_to_all(rows, out=taken)
    for source in range(2):
        value = 10 * source + comm.rank
        assert int(taken[source, :-1:1021].max()) == int(taken[source, :-1:1021].min()) == value
        assert int(taken[source, -1]) == value + 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_tensors_above_2_gib(transport: str) -> None:
    if psutil.virtual_memory().available < 12 << 30:
        pytest.skip("less than 12 GiB of memory are free")
    spawn(_large, 2, transport=transport, timeout=300)
