"""Data for rank 0 alone, outputs of predict and parts of checkpoints, do not reach the other workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gangline import Module, cpu
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(110)
ROWS, FEATURES, HIDDEN = 2_000, 8, 5_000


def received(folder: str) -> tuple[int, int, int]:
    """Return the bytes that the scheduler sent during predict and save_checkpoint, and the number of outputs."""
    total = 0
    receive = SchedulerClient._receive

    def counted(self: SchedulerClient, frame: bytes) -> None:
        nonlocal total
        total += len(frame)
        receive(self, frame)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 2))
    data, label = torch.rand(ROWS, FEATURES), torch.zeros(ROWS, dtype=torch.int64)
    compression = {"type": "2bit", "threshold": 0.5}
    with Module(network, nn.CrossEntropyLoss(), cpu(), compression_params=compression) as module:
        module.init_optimizer("dist_sync")
        module.forward_backward_update(data[:4], label[:4])
        SchedulerClient._receive = counted  # type: ignore[method-assign]
        outputs = module.predict(data, batch_size=ROWS)
        of_predict, total = total, 0
        module.save_checkpoint(Path(folder, "net"), 1, save_optimizer_states=True)
        return of_predict, total, 0 if outputs is None else len(outputs)


def test_only_rank_0_receives_outputs_and_parts_of_checkpoints(tmp_path: Path) -> None:
    first, second = run_job(received, 2, 1, str(tmp_path))
    outputs, residuals = 4 * 2 * ROWS, 4 * (FEATURES + 1 + 2) * HIDDEN
    assert first[0] > outputs
    assert first[1] > 2 * residuals
    assert second[0] < outputs / 10
    assert second[1] < residuals / 10
    assert (first[2], second[2]) == (ROWS, 0)
