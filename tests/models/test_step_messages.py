"""Messages between the workers of a job in a training step: buckets, the calls behind each, and nothing beside them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from measure import Branches, step_of
from torch import nn
from torch.utils.data import DataLoader

from gangline import Communicator, Module, cpu, spawn
from gangline.collectives.work import WorkQueue
from gangline.kvstore import KVStore, create, local
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


# The way of a gradient from its hook to the store's sum: Python frames and thread hand-overs, counted


MOST_FRAMES = 13
MOST_FRAMES_TO_WORKERS = 15
"""To the sum over the workers of an `allreduce` store, one call behind the sum over its own devices."""
BUCKETS = 4
WIDTH = 6


def depth(until: str) -> list[int]:
    """Return the number of frames from the caller's to the next one of a function of this name; [] if there is none."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code.co_name != until:
        frame, count = frame.f_back, count + 1
    return [] if frame is None else [count]


def frames(store: KVStore, contexts: int, summing: Any, name: str) -> tuple[list[int], list[int]]:
    """Return the frames of each bucket of a step: from its hook to the hand-over, and from there to the sum.

    Args:
        store: A store.
        contexts: Number of contexts.
        summing: Module or object with the function that sums.
        name: Name of the function.
    """
    network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BUCKETS)])
    in_hook: list[int] = []
    in_store: list[int] = []
    submit, inner = WorkQueue.submit, getattr(summing, name)

    def submitted(self: WorkQueue, *arguments: Any) -> None:
        in_hook.extend(depth("_on_gradient"))  # a pull is submitted too if the queue is busy
        submit(self, *arguments)

    def summed(values: Any) -> Any:
        if summing is not local or (values and values[0][0]):  # values to sum, not weights to copy
            in_store.extend(depth("_serve"))
        return inner(values)

    data, label = torch.ones(6, WIDTH), torch.ones(6, WIDTH)
    with (
        pytest.MonkeyPatch.context() as patch,
        store,
        Module(network, nn.MSELoss(), [cpu(index) for index in range(contexts)]) as module,
    ):
        patch.setattr(reducer, "BUCKET_BYTES", 260)  # a layer of WIDTH
        module.init_optimizer(store, "sgd", {"lr": 0.1})
        for _ in range(2):
            module.forward_backward_update(data, label)
        threads = threading.active_count()
        patch.setattr(WorkQueue, "submit", submitted)
        patch.setattr(summing, name, summed)
        module.forward_backward_update(data, label)
        assert threading.active_count() == threads
    assert len(in_hook) == len(in_store) == BUCKETS  # one hand-over and one call that sums for each
    return in_hook, in_store


@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_bucket_takes_few_frames_and_one_hand_over_to_its_sum(store: str, count: int) -> None:
    in_hook, in_store = frames(create(store), count, local, "move")
    assert max(in_hook) + max(in_store) <= MOST_FRAMES


def frames_to_the_workers(comm: Communicator) -> tuple[list[int], list[int]]:
    return frames(create("allreduce", communicator=comm), 2, comm, "all_reduce")


def test_a_bucket_takes_few_frames_to_the_sum_over_the_workers() -> None:
    for in_hook, in_store in spawn(frames_to_the_workers, 2):
        assert max(in_hook) + max(in_store) <= MOST_FRAMES_TO_WORKERS
