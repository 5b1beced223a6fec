"""Host memory that a step frees is reused by the next step."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Module, cpu
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.models.zoo import registry

STEPS, MOST = 20, 250


def train_module() -> Iterator[None]:
    with Module(registry.create("lenet"), torch.nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
        data, label = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
        while True:
            module.forward_backward_update(data, label)
            yield


def train_balanced() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 24, 3, padding=1), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    data = TensorDataset(torch.rand(1024, 3, 16, 16), torch.arange(1024) % 10)
    network(data[:2][0])
    model = DistributedDataParallel(network)
    loader = gangline.balance(model, DataLoader(data, 128))
    while True:
        for images, labels in loader:
            torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            yield


def count_faults(steps: Iterator[None], connection: Connection) -> None:
    """Send the number of page faults of some steps; run it in a process of its own, with fresh memory."""
    for _ in range(16):
        next(steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        next(steps)
    connection.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    os._exit(0)  # gloo of torch 2.13 aborts now and then in destroy_process_group


def module_faults(connection: Connection) -> None:
    count_faults(train_module(), connection)


def balanced_faults(connection: Connection) -> None:
    count_faults(train_balanced(), connection)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's keep memory or not")
@pytest.mark.slow
@pytest.mark.parametrize("job", [module_faults, balanced_faults])
def test_a_step_has_no_memory_cleared_by_the_kernel(job: Callable[[Connection], None]) -> None:
    with ProcessPool(job, 1) as family:
        faults = family.connections[0].recv()
    assert faults < STEPS * MOST  # pages; 2 to 100 a step of threads; if freed memory is returned, about 2,500
