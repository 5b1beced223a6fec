"""Means, complex numbers, aliased and large tensors: one right value on all ranks by every algorithm and transport."""

from __future__ import annotations

import psutil
import pytest
import torch

from gangline.collectives import algorithms
from gangline.collectives.communicator import Communicator
from gangline.collectives.processes.spawning import spawn
from tests.collectives.ranks import LARGE, in_ranks, in_threads, same


def _mean_of_halves(comm: Communicator, value: float) -> None:
    """Check means of tensors whose sum exceeds float16."""
    for count in (5, 100_003, LARGE):
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
    in_threads(8, _mean_of_halves, 10_000.0)


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
    ("transport", "size"), [("in_process", 2), ("in_process", 3), ("shared_memory", 4), ("ipc", 4), ("tcp", 4)]
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
