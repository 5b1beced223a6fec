"""What a step frees on the host serves the next step."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS, MOST = 20, 100
_TRAIN = f"""
import resource

import torch

from gangline import Module, cpu
from models.zoo import registry

module = Module(registry.create("lenet"), torch.nn.CrossEntropyLoss(), [cpu(0), cpu(1)])
module.init_optimizer("device", "sgd", {{"lr": 0.1, "momentum": 0.9}})
data, label = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    module.forward_backward_update(data, label)
before = faults()
for _ in range({STEPS}):
    module.forward_backward_update(data, label)
print(faults() - before)
module.close()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's keep memory or not")
def test_a_step_has_no_memory_cleared_by_the_kernel() -> None:
    ran = subprocess.run([sys.executable, "-c", _TRAIN], check=True, capture_output=True, text=True, timeout=120)
    assert int(ran.stdout) < STEPS * MOST  # pages; where freed memory goes back, about 2,500 a step
