"""Whatever the algorithm, dtype and size: all ranks hold the same bits, and sums are off by few roundings."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gangline.collectives import tuner
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator
from gangline.collectives.processes.spawning import spawn
from tests.collectives.ranks import REDUCING, check, in_threads, open_again, ops_for, same

ALGORITHMS = sorted({name for collective in tuner.TUNED for name in tuner.names(collective)})
PIPELINED = ("ring", "double_tree")


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
    if algorithm in PIPELINED:
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
@example(("all_reduce", "double_tree:5", 5, 3, torch.float16, "sum", 0, 37))  # more segments than elements
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
        os.environ["GANGLINE_ALGO"] = f"{algorithm}:3" if algorithm in PIPELINED else algorithm
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
