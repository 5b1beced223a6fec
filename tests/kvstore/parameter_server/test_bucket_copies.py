"""A bucket on a GPU is copied to the host once, however many keys it has."""

from __future__ import annotations

import torch

from gangline.kvstore import create
from gangline.kvstore.buckets import plan
from tests.collectives.simulated_gpus import counted, on_simulated_gpu, simulated_gpus
from tests.kvstore.parameter_server.processes import run_job

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
