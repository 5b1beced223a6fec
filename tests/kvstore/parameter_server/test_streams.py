"""GPU streams: pushes read what the caller wrote before, pulls write what it reads afterwards; copies of buckets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gangline.kvstore import create
from gangline.kvstore.buckets import plan
from gangline.kvstore.parameter_server.store import DistStore
from tests.collectives.simulated_gpus import Event, Stream, counted, current_stream, on_simulated_gpu, simulated_gpus
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(110)


CARD = torch.device("cuda", 0)
NUMEL = 20_000


@pytest.fixture
def kv(stream_order: None) -> Iterator[DistStore]:
    with simulated_gpus(), Job(1) as job, job.stores()[0] as store:
        store.init("a", torch.full((NUMEL,), 5.0))
        yield store


@pytest.mark.parametrize("async_op", [True, False])
def test_a_push_reads_the_gradient_after_the_callers_stream_has_written_it(kv: DistStore, async_op: bool) -> None:
    with torch.cuda.stream(Stream(CARD)):  # type: ignore[arg-type]
        gradient = on_simulated_gpu(torch.full((NUMEL,), 3.0))  # its kernel has not run yet
        kv.push("a", gradient, async_op=async_op).wait()
    out = torch.empty(NUMEL)
    kv.pull("a", out)
    assert out.unique().tolist() == [3.0]


@pytest.mark.parametrize("async_op", [True, False])
def test_a_pull_writes_the_weights_between_the_callers_kernels(kv: DistStore, async_op: bool) -> None:
    with torch.cuda.stream(Stream(CARD)):  # type: ignore[arg-type]
        weights = on_simulated_gpu(torch.full((NUMEL,), 1.0))
        before, after = on_simulated_gpu(torch.zeros(NUMEL)), on_simulated_gpu(torch.zeros(NUMEL))
        before.copy_(weights)  # a kernel that has not run yet
        kv.pull("a", weights, async_op=async_op).wait()
        after.copy_(weights)
        assert current_stream(CARD) is not kv._streams._streams[CARD]
        assert before.host().unique().tolist() == [1.0]
        assert after.host().unique().tolist() == [5.0]


@pytest.mark.parametrize("shape", [(NUMEL,), (4, 5)])
def test_the_host_waits_once_for_a_push_of_several_keys_and_never_for_a_pull(
    kv: DistStore, shape: tuple[int, ...]
) -> None:
    keys, begun = ["b", "c", "d"], Event.waits
    kv.init(keys, [torch.zeros(shape) for _ in keys])
    kv.push(keys, [on_simulated_gpu(torch.full(shape, number + 1.0)) for number in range(3)])
    assert Event.waits == begun + 1
    outs = [on_simulated_gpu(torch.zeros(shape)) for _ in keys]
    transposed = on_simulated_gpu(torch.zeros(shape[::-1]))
    kv.pull(keys, outs)
    kv.pull("d", transposed.t() if len(shape) > 1 else transposed)
    assert Event.waits == begun + 1
    kv.push(keys, [torch.full(shape, 9.0) for _ in keys])  # the GPU has not read the pulled values yet
    assert [out.host().unique().tolist() for out in outs] == [[1.0], [2.0], [3.0]]
    assert transposed.host().unique().tolist() == [3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here")
def test_kernels_of_a_side_stream_are_ordered_with_pushes_and_pulls() -> None:
    with Job(1) as job, job.stores()[0] as kv, torch.cuda.stream(torch.cuda.Stream()):
        kv.init("a", torch.full((NUMEL,), 5.0))
        gradient, weights = torch.zeros(NUMEL, device="cuda"), torch.ones(NUMEL, device="cuda")
        for step in range(1, 6):
            torch.cuda._sleep(50_000_000)
            gradient.fill_(step)
            kv.push("a", gradient, async_op=True).wait()
            torch.cuda._sleep(50_000_000)
            before = weights.clone()
            kv.pull("a", weights, async_op=True).wait()
            assert before.unique().tolist() == [step - 1.0 if step > 1 else 1.0]
            assert weights.unique().tolist() == [float(step)]


# Buckets


KEYS = 7


def pushed() -> None:
    with create("dist_sync") as kv:
        tensors = [(f"key {number}", torch.zeros(5, 3)) for number in range(KEYS)]
        (bucket,) = plan(tensors, 1 << 20)
        kv.init([key for key, _ in tensors], [tensor for _, tensor in tensors])
        kv.fuse(bucket)
        flat = torch.full((bucket.numel,), kv.rank + 1.0)
        for devices in (1, 2):
            with simulated_gpus(), counted(0) as first, counted(1) as second:
                kv.push_bucket(bucket, [on_simulated_gpu(flat, index) for index in range(devices)], weight=1.0)
                outs = [torch.empty(5, 3) for _ in tensors]
                kv.pull(bucket.keys, outs)
            assert first.to_host + second.to_host == [bucket.numel] * devices
            assert torch.cat(outs).unique().tolist() == [1.5 * devices]


def test_a_bucket_is_copied_to_the_host_once_per_gpu() -> None:
    run_job(pushed, 2, 1)
