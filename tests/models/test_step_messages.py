"""Messages between the workers of a job in a training step: buckets, and nothing beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Branches, step_of
from torch import nn
from torch.utils.data import DataLoader

from gangline import Communicator, Module, cpu, spawn
from gangline.kvstore import KVStore, create
from gangline.kvstore.allreduce.negotiation import Negotiator
from gangline.kvstore.group.worker_group import WorkerGroup
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.reducer import reducer
from tests.kvstore.parameter_server.processes import run_job
from tests.models.unequal_jobs import Stream

FEATURES, CLASSES = 6, 3


def batches(rank: int) -> list[Any]:
    """Return this worker's batches: of its own size, one without samples, some without a sample for the branch."""
    generator = torch.Generator().manual_seed(rank)
    made: list[Any] = []
    for step in range(6):
        data = torch.randn(3 + rank + step, FEATURES, generator=generator)
        data[:, 0] = data[:, 0].abs() * (-1 if (step + rank) % 2 else 1)
        made.append((data, torch.randint(CLASSES, (len(data),), generator=generator)))
    made[3 + rank] = (None, None)
    return made


def counting(calls: Counter[str], owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return original(*arguments, **options)

    patch.setattr(owner, name, counted)


def steps(store: KVStore, rank: int, calls: Counter[str]) -> tuple[list[dict[str, int]], int]:
    """Return the calls of each step after the first, and the number of buckets."""
    torch.manual_seed(2)
    with Module(Branches(FEATURES, CLASSES), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer(store, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        found = []
        for number, (data, label) in enumerate(batches(rank)):
            calls.clear()
            step_of(module, bool(number % 2), data, label)
            found.append(dict(calls))
        return found[1:], len(module._step.optimizer._reducer._buckets)  # type: ignore[attr-defined]


def allreduce_steps(comm: Communicator) -> Any:
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
        patch.setattr(reducer, "BUCKET_BYTES", 200)
        counting(calls, Negotiator, "all_gather", patch)
        for name in ("all_reduce", "broadcast"):
            counting(calls, Communicator, name, patch)
        return steps(store, comm.rank, calls)


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return spawn(steps_and_epochs, 2, threads=1)


def test_a_step_of_allreduce_gathers_one_header_and_reduces_one_tensor_per_bucket(two: list[Any]) -> None:
    for (found, buckets), _ in two:
        assert buckets > 3
        for calls in found:
            assert calls.keys() <= {"all_gather", "all_reduce"}
            assert calls["all_gather"] == buckets
            assert 0 < calls["all_reduce"] < buckets  # the unused layer's has no gradients


def server_steps(name: str) -> Any:
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, create(name) as store:
        counting(calls, SchedulerClient, "_send", patch)
        return steps(store, store.rank, calls)[0]


def test_a_step_of_dist_sync_sends_the_scheduler_nothing() -> None:
    for found in run_job(server_steps, 2, 1, "dist_sync"):
        assert found == [{}] * 5


def own_batches(rank: int, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(2 + rank, FEATURES, generator=generator).double(), torch.randint(CLASSES, (2 + rank,)))
        for _ in range(count)
    ]


def epochs_in_a_job(comm: Communicator) -> Any:
    """Return the exchanges of an epoch, and the batches seen in it, for each kind of loader and length."""
    found = []
    for kind in ("loader", "list", "stream"):
        for count in (4, 12):
            data: Any = own_batches(comm.rank, count - 3 * comm.rank)
            if kind != "list":
                data = Stream(range(len(data)), data.__getitem__) if kind == "stream" else data
                data = DataLoader(data, batch_size=None)
            calls: Counter[str] = Counter()
            seen: list[int] = []
            with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
                counting(calls, WorkerGroup, "all_gather", patch)
                patch.setattr("gangline.models.loop.stopping._SECONDS", 100.0)
                with Module(nn.Linear(FEATURES, CLASSES).double(), nn.CrossEntropyLoss(), cpu()) as module:
                    module.fit(
                        data,
                        num_epoch=1,
                        kvstore=store,
                        eval_metric="loss",
                        batch_end_callback=lambda param, seen=seen: seen.append(param.nbatch),
                    )
            found.append((kind, count, calls["all_gather"], seen))
    return found


def steps_and_epochs(comm: Communicator) -> Any:
    return allreduce_steps(comm), epochs_in_a_job(comm)


def test_loaders_that_end_at_different_steps_exchange_their_lengths_and_not_each_step(two: list[Any]) -> None:
    first, second = (epochs for _, epochs in two)
    assert first == second
    assert all(seen == list(range(count)) for _, count, _, seen in first)
    exchanges = {(kind, count): calls for kind, count, calls, _ in first}
    for kind in ("loader", "list"):
        assert exchanges[kind, 12] - exchanges[kind, 4] == 2  # of stop requests, after the fourth and eighth update
    assert exchanges["stream", 12] - exchanges["stream", 4] == 1 + 2  # the eighth update; every four batches


ROWS, INPUTS, HIDDEN = 2_000, 8, 5_000


def received(folder: str) -> tuple[int, int, int]:
    """Return the bytes that the scheduler sent during predict and save_checkpoint, and the number of outputs."""
    total = 0
    receive = SchedulerClient._receive

    def counted(self: SchedulerClient, frame: bytes) -> None:
        nonlocal total
        total += len(frame)
        receive(self, frame)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 2))
    data, label = torch.rand(ROWS, INPUTS), torch.zeros(ROWS, dtype=torch.int64)
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
    outputs, residuals = 4 * 2 * ROWS, 4 * (INPUTS + 1 + 2) * HIDDEN
    assert first[0] > outputs
    assert first[1] > 2 * residuals
    assert second[0] < outputs / 10
    assert second[1] < residuals / 10
    assert (first[2], second[2]) == (ROWS, 0)
