"""The stores of several workers in real processes: results of rounds, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gangline.kvstore import KVStore, RowSparse
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.cases import check

pytestmark = pytest.mark.timeout(110)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SMALL, CUT = 37, 1_500_007
"""Elements of a key that shares a message with others, and of one that is split over all servers."""


def ramp(numel: int, rank: int, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers small enough that sums of them are exact in every dtype but the narrow ones."""
    return ((torch.arange(numel) * 7 + rank * 3 + number) % 61).to(dtype)


def total(numel: int, workers: int, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return sum((ramp(numel, rank, number, torch.float64) for rank in range(workers)), torch.zeros(numel)).to(dtype)


def same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected), f"{(got != expected).sum()} of {got.numel()} elements differ"


# Sums of rounds


def rounds_of_every_dtype(kv: KVStore) -> None:
    large, more = CUT, tuple[torch.dtype, ...]()
    if not isinstance(kv, DistStore):
        large, more = 100_003, (torch.int16, torch.complex64, torch.complex128)
    for dtype in (*FLOATS, torch.int8, torch.int32, torch.int64, torch.uint8, *more):
        for numel in (0, 1, SMALL, large):
            key = f"{dtype} {numel}"
            kv.init(key, torch.full((numel,), 5, dtype=dtype))
            out = torch.empty(numel, dtype=dtype)
            kv.pull(key, out)
            same(out, torch.full((numel,), 5, dtype=dtype))
            for number in range(2):
                kv.push(key, ramp(numel, kv.rank, number, dtype))
                kv.pull(key, out)
                same(out, total(numel, kv.num_workers, number, dtype))


def sums_are_made_in_rank_order_and_rounded_once(kv: KVStore) -> None:
    for dtype, numel in ((torch.float32, CUT), (torch.float16, SMALL), (torch.bfloat16, SMALL)):
        seeds = [torch.Generator().manual_seed(9 + rank) for rank in range(kv.num_workers)]
        values = [torch.rand(numel, generator=seed).to(dtype) for seed in seeds]
        kv.init(f"order {dtype}", torch.zeros(numel, dtype=dtype))
        out = torch.empty(numel, dtype=dtype)
        kv.pushpull(f"order {dtype}", values[kv.rank], out=out)
        expected = values[0].float().clone()
        for value in values[1:]:
            expected += value.float()
        same(out, expected.to(dtype))


def values_of_rank_0_are_used(kv: KVStore) -> None:
    kv.init("first", torch.full((CUT,), float(kv.rank + 1)))
    kv.init(3, torch.full((2, 3), float(kv.rank + 1)))
    kv.init("3", torch.full((3,), float(-kv.rank - 1)))
    for key, shape, value in (("first", (CUT,), 1.0), (3, (2, 3), 1.0), ("3", (3,), -1.0)):
        out = torch.empty(shape)
        kv.pull(key, out)
        same(out, torch.full(shape, value))
    kv.broadcast("sent", torch.full((3,), float(kv.rank + 1)), out)
    same(out, torch.ones(3))
    kv.init("later", out, async_op=True)
    kv.push("later", torch.full((3,), kv.rank + 1.0), async_op=True)
    kv.pull("later", out)
    same(out, torch.full((3,), kv.num_workers * (kv.num_workers + 1) / 2))


def lists_of_keys_and_devices(kv: KVStore) -> None:
    keys = [f"list {index}" for index in range(20)]
    sizes = [1 + 997 * index for index in range(20)]
    kv.init(keys, [torch.zeros(size) for size in sizes])
    values = [[ramp(size, kv.rank, 1), ramp(size, kv.rank, 2)] for size in sizes]
    outs = [[torch.empty(size), torch.empty(size, dtype=torch.float32)] for size in sizes]
    kv.pushpull(keys, values, out=outs)
    for size, pair in zip(sizes, outs, strict=True):
        expected = total(size, kv.num_workers, 1) + total(size, kv.num_workers, 2)
        for out in pair:
            same(out, expected)
    twice = [ramp(sizes[1], kv.rank), ramp(sizes[2], kv.rank), ramp(sizes[1], kv.rank, 3)]
    kv.push([keys[1], keys[2], keys[1]], twice)
    kv.pull(keys[1:3], [pair[0] for pair in outs[1:3]])
    same(outs[1][0], total(sizes[1], kv.num_workers) + total(sizes[1], kv.num_workers, 3))
    same(outs[2][0], total(sizes[2], kv.num_workers))


def truth_values_are_ored(kv: KVStore) -> None:
    kv.init("switch", torch.zeros(3, dtype=torch.bool))
    kv.push("switch", torch.tensor([kv.rank == kv.num_workers - 1, False, kv.rank == 0]))
    out = torch.zeros(3, dtype=torch.bool)
    kv.pull("switch", out)
    assert out.tolist() == [True, False, True]


def shapes_and_strides(kv: KVStore) -> None:
    shape = (1031, 700)
    kv.init("strided", torch.zeros(shape))
    value = ramp(shape[0] * shape[1], kv.rank).view(shape)
    out = torch.empty(shape[1], shape[0]).t()
    kv.push("strided", value.t().contiguous().t())
    kv.pull("strided", out)
    same(out, total(shape[0] * shape[1], kv.num_workers).view(shape))
    array = np.empty(shape, dtype=np.float32)
    kv.pull("strided", array)
    same(torch.from_numpy(array), out)


def shared_memory_is_used_again(kv: KVStore) -> None:
    """Shared memory of a push is freed when the servers have summed it."""
    assert isinstance(kv, DistStore)
    kv.init("again", torch.zeros(CUT))
    for number in range(3):
        kv.push("again", ramp(CUT, kv.rank, number))
    out = torch.empty(CUT)
    kv.pull("again", out)
    pool = kv._pool
    if pool is not None:
        kv._servers.wait(lambda: pool.in_use == 0)


# Rows


def a_worker_may_have_no_rows(kv: KVStore) -> None:
    for rows, width in ((11, 3), (50_021, 48)):
        key = f"few rows {rows} {width}"
        kv.init(key, torch.ones(rows, width))
        ids = [] if kv.rank else [1, rows - 1]
        kv.push(key, RowSparse(ids, torch.full((len(ids), width), 5.0), (rows, width)))
        out = torch.empty(rows, width)
        kv.pull(key, out)
        assert out[[1, rows - 1]].eq(5).all()
        assert out.sum() == 2 * width * 5
        value = torch.full((rows, width), 2.0)
        kv.push(key, value if kv.rank else RowSparse([3], value[:1] * 2, (rows, width)))  # rows on rank 0 only
        kv.pull(key, out)
        value *= kv.num_workers - 1
        value[3] += 4.0
        same(out, value)


def weighted_rows_stay_rows(kv: KVStore) -> None:
    """Rows that no worker pushes are not updated, not even by momentum and weight decay."""
    rows, width, n = 50_021, 48, kv.num_workers
    kv.init("weighted rows", torch.ones(rows, width, dtype=torch.float64))
    kv.set_optimizer(("sgd", {"learning_rate": 0.5, "momentum": 0.5, "weight_decay": 0.25}))
    for _ in range(2):
        value = torch.full((2, width), 4.0 + kv.rank, dtype=torch.float64)
        kv.push_weighted("weighted rows", RowSparse([kv.rank, rows - 1], value, (rows, width)), 2.0 + kv.rank)
    out = torch.empty(rows, width, dtype=torch.float64)
    kv.pull("weighted rows", out)
    whole = sum(2.0 + rank for rank in range(n))
    means = [(4.0 + rank) * (2.0 + rank) / whole for rank in range(n)]
    for row, mean in [*enumerate(means), (rows - 1, sum(means))]:
        weight, momentum = 1.0, 0.0
        for _ in range(2):
            momentum = 0.5 * momentum + mean + 0.25 * weight
            weight -= 0.5 * momentum
        torch.testing.assert_close(out[row], torch.full((width,), weight, dtype=torch.float64), rtol=1e-13, atol=0)
    same(out[n : rows - 1], torch.ones(rows - 1 - n, width, dtype=torch.float64))


def sparse_rows(kv: KVStore) -> None:
    for rows, width in ((11, 3), (50_021, 48), (70_001, 10)):
        key = f"table {rows} {width}"
        kv.init(key, torch.ones(rows, width))
        ids = torch.tensor([rows - 1, 0, kv.rank + 1, rows // 2, 0])
        values = torch.arange(5.0)[:, None] + torch.arange(width) + kv.rank
        kv.push(key, RowSparse(ids, values, (rows, width)))
        expected = torch.zeros(rows, width)
        for rank in range(kv.num_workers):
            theirs = torch.tensor([rows - 1, 0, rank + 1, rows // 2, 0])
            expected.index_add_(0, theirs, torch.arange(5.0)[:, None] + torch.arange(width) + rank)
        out = torch.empty(rows, width)
        kv.pull(key, out)
        same(out, expected)
        wanted = torch.tensor([[rows - 1, 0], [0, 2]])
        given = RowSparse([], torch.empty(0, width), (rows, width))
        into = torch.full((rows, width), -1.0)
        kv.row_sparse_pull(key, [given, into], row_ids=wanted)
        same(given.indices, torch.tensor([0, 2, rows - 1]))
        same(given.values, expected[[0, 2, rows - 1]])
        same(into[[0, 2, rows - 1]], expected[[0, 2, rows - 1]])
        same(into[1], torch.full((width,), -1.0))


# Compression


def compressed_pushes(kv: KVStore) -> None:
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    for numel in (SMALL, CUT):
        key = f"coded {numel}"
        kv.init(key, torch.zeros(numel))
        out = torch.empty(numel)
        kv.pushpull(key, torch.full((numel,), 0.3), out=out)
        same(out, torch.zeros(numel))
        kv.pushpull(key, torch.full((numel,), 0.3), out=out)  # plus the residual of 0.3
        same(out, torch.full((numel,), 0.5 * kv.num_workers))
    left = kv.compression_residuals()
    assert set(left) == {f'"coded {SMALL}"/0', f'"coded {CUT}"/0'}
    torch.testing.assert_close(left[f'"coded {SMALL}"/0'], torch.full((SMALL,), 0.1))
    with pytest.raises(ValueError, match="coded 37"):
        kv.push(f"coded {SMALL}", torch.full((SMALL,), torch.nan))
    kv.set_gradient_compression({"type": "fp16", "pull_type": "fp16"})
    value = torch.full((SMALL,), 1 / 3)
    kv.pushpull(f"coded {SMALL}", value, out=value)
    same(value, (torch.full((SMALL,), 1 / 3).half().float() * kv.num_workers).half().float())
    kv.set_gradient_compression(None)


def a_threshold_is_in_the_unit_of_a_workers_part_of_the_mean(kv: KVStore) -> None:
    kv.init("coded", torch.zeros(4))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.push_weighted("coded", torch.tensor([1.25, -1.5, 0.5, 0.0]), 3.0)
    out = torch.empty(4)
    kv.pull("coded", out)
    assert out.tolist() == [1.0, -1.0, 0.0, 0.0]
    assert kv.compression_residuals()['"coded"/0'].tolist() == [0.125, -0.25, 0.25, 0.0]
    kv.set_gradient_compression(None)


ALL = [
    rounds_of_every_dtype,
    truth_values_are_ored,
    sums_are_made_in_rank_order_and_rounded_once,
    values_of_rank_0_are_used,
    lists_of_keys_and_devices,
    shapes_and_strides,
    sparse_rows,
    a_worker_may_have_no_rows,
]
"""Cases of each store."""
SYNC = [*ALL, shared_memory_is_used_again, compressed_pushes]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (3, 2), (7, 7)])
def test_rounds(workers: int, servers: int) -> None:
    check("dist_sync", workers, servers, SYNC)


def test_weighted_pushes() -> None:
    check("dist_sync", 2, 2, [a_threshold_is_in_the_unit_of_a_workers_part_of_the_mean, weighted_rows_stay_rows])


def test_rounds_over_collectives() -> None:
    check("allreduce", 3, 0, [*ALL, weighted_rows_stay_rows])


@pytest.mark.slow
def test_rounds_over_sockets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", "tcp")
    check("dist_device_sync", 2, 2, SYNC)
