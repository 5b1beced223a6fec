"""Context "parallel": all processes of a job, by the store that the environment offers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from gangline import Communicator, Module, cpu, spawn
from tests.models.test_workers_together import as_launched, free_port


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    data = torch.randn(24, 5, dtype=torch.float64)
    return nn.Linear(5, 3).double(), (data, torch.arange(24) % 3)


def trained(context: str) -> tuple[str | None, int, dict[str, torch.Tensor]]:
    network, data = problem()
    module = Module(network, nn.CrossEntropyLoss(), context)
    module.fit(data, num_epoch=2, batch_size=8, optimizer_params={"learning_rate": 0.1})
    store, count, params = module.store_type, module.workers.count, module.get_params()
    module.close()
    return store, count, params


def worker(comm: Communicator, port: int) -> tuple[str | None, int, dict[str, torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        as_launched(patch, comm, port)
        return trained("parallel")


def test_all_processes_of_a_job_train_as_one_does() -> None:
    _, _, expected = trained("cpu")
    for store, count, params in spawn(worker, 2, free_port()):
        assert (store, count) == ("allreduce", 2)
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-11, atol=1e-11)


def test_without_a_job_it_is_an_error_before_anything_begins() -> None:
    network, _ = problem()
    with pytest.raises(RuntimeError, match="'parallel' means all processes of a job, and there is none"):
        Module(network, nn.CrossEntropyLoss(), "parallel")


def test_a_store_that_stays_in_the_process_contradicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    network, _ = problem()
    module = Module(network, nn.CrossEntropyLoss(), "parallel")
    with pytest.raises(ValueError, match=re.escape("kvstore is 'device', which does not leave this process")):
        module.init_optimizer("device")
    assert module.contexts == [cpu()] or torch.cuda.is_available()
