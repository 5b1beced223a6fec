"""Loops that leave epochs of `gangline.balance` early, in scripts as people write them."""

from __future__ import annotations

from pathlib import Path

from tests.programs import python, torchrun

SCRIPT = """
import os
import threading
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import gangline

def resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(1, 1))
data = [torch.tensor([float(number)]) for number in range(64)]
seen, held = [], []
for trial in range(3):
    with gangline.balance(model, DataLoader(data, batch_size=2, shuffle=True)) as loader:
        for epoch in range(4):
            for batch in loader:
                model(batch).sum().backward()
                seen += batch.flatten().tolist()
                break
        state = loader.state_dict()
    held.append(resources())
assert len(set(seen)) > len(seen) / 2, seen
assert len(set(held)) == 1, held
assert (state["epoch"], state["samples"]) == (3, 4), state
loader = gangline.balance(model, DataLoader(data, batch_size=2))
loader.load_state_dict(state)
batches = iter(loader)
next(batches)
assert loader.epoch == 3
"""


def test_epochs_that_are_left_early_count_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(SCRIPT)
    done = python(*torchrun(tmp_path / "left.py"), code=0)
    assert "Traceback" not in done.stderr
