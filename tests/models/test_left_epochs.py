"""Loops that leave epochs of `gangline.balance` early, in scripts as people write them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gangline.launcher.job import free_ports
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


FAILING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import gangline

folder, rank, way = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
model = DistributedDataParallel(nn.Linear(1, 1))
data = DataLoader([torch.tensor([float(number)]) for number in range(64)], batch_size=2)

loader = gangline.balance(model, data) if way == "named" else None
for number, batch in enumerate(loader or gangline.balance(model, data)):
    if rank == "1" and number == 3:
        raise ValueError("label 7 is out of range")
    model(batch).sum().backward()
"""


@pytest.mark.parametrize("way", ["named", "unnamed"])
def test_the_other_ranks_name_the_error_that_ended_a_loop(way: str, tmp_path: Path) -> None:
    """Also of a loader to which the program has no reference, so that it is gone when the process ends."""
    (tmp_path / "failing.py").write_text(FAILING)
    with ThreadPoolExecutor() as threads:
        ranks = [threads.submit(python, tmp_path / "failing.py", tmp_path, rank, way, code=1) for rank in range(2)]
    first, second = (rank.result().stderr.strip().splitlines()[-1] for rank in ranks)
    assert second == "[rank1]: ValueError: label 7 is out of range"
    assert first == (
        "[rank0]: RuntimeError: balance: rank 1 ended with an error in global batch 3: ValueError: label 7 is out of "
        "range; see its output"
    )


STORED = """
import sys
import weakref
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import gangline

dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1)
store = weakref.ref(dist.distributed_c10d._get_default_store())
for _ in gangline.balance(DistributedDataParallel(nn.Linear(1, 1)), DataLoader(torch.ones(8, 1))):
    break
dist.destroy_process_group()
assert store() is None  # else the next group on this port would read its keys
"""


def test_a_loop_that_was_left_does_not_hold_the_store_of_the_group(tmp_path: Path) -> None:
    (tmp_path / "stored.py").write_text(STORED)
    python(tmp_path / "stored.py", *free_ports(1), code=0)
