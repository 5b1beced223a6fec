"""Host memory that a step frees is reused by the next step."""

from __future__ import annotations

import platform
import resource
from multiprocessing.connection import Connection

import pytest
import torch

from gangline import Module, cpu
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.models.zoo import registry

STEPS, MOST = 20, 100


def count_faults(connection: Connection) -> None:
    """Send the number of page faults of some steps; run it in a process of its own, with fresh memory."""
    with Module(registry.create("lenet"), torch.nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
        data, label = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
        for _ in range(10):
            module.forward_backward_update(data, label)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(STEPS):
            module.forward_backward_update(data, label)
        connection.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's keep memory or not")
@pytest.mark.slow
def test_a_step_has_no_memory_cleared_by_the_kernel() -> None:
    with ProcessPool(count_faults, 1) as family:
        faults = family.connections[0].recv()
    assert faults < STEPS * MOST  # pages; if freed memory is returned to the system, about 2,500 per step
