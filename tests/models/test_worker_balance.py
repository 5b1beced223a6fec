"""GANGLINE_WORK_LOAD_LIST=auto: workers of a job get parts of each batch that follow their measured speeds.

A layer sleeps for each sample, so that speeds do not depend on the machine.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import distance, gangline_lines
from simulated_time import simulated_time
from torch import nn
from torch.utils.data import TensorDataset

from gangline import Module, cpu, spawn
from gangline.bench.unequal.waiting_network import WaitingNetwork, slow_down
from gangline.callback import Checkpoint
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import MismatchError
from gangline.kvstore import KVStore, create
from gangline.kvstore.group.worker_group import WorkerGroup
from gangline.models.balance import speed_model
from gangline.models.balance.worker_balance import WorkerBalance
from gangline.models.checkpoint import checkpoint
from gangline.models.elapsed_time import ElapsedTime
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.reports.page import TrainingProgress, read_progress
from gangline.models.workers import Workers
from tests.kvstore.parameter_server.processes import run_job

speed_model._MIN_SECONDS = 0.0  # in processes of jobs

FEATURES, CLASSES, SAMPLES, BATCH = 6, 3, 189, 32
"""Six batches per epoch, the last one of 29 samples."""
RATE = {"learning_rate": 0.05, "momentum": 0.9}
EQUAL, UNEQUAL = ([5e-4], [5e-4]), ([5e-4], [2e-3])
"""Seconds per sample of the contexts of each worker."""
FAST = UNEQUAL[0]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples whose first feature is the sample's number."""
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    data[:, 0] = torch.arange(SAMPLES) / SAMPLES
    return data, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def module(seconds: Sequence[float], loads: Any = None, context: Any = None) -> Module:
    torch.manual_seed(1)
    network = WaitingNetwork(FEATURES, CLASSES).double()
    made = Module(network, nn.CrossEntropyLoss(), context or [cpu(index) for index in range(len(seconds))], loads)
    slow_down(made, seconds)
    return made


class Seen:
    """Batch callback that records the loads of the workers and the samples of this one."""

    def __init__(self) -> None:
        self.loads: list[tuple[float, ...]] = []
        self.own: list[list[int]] = []

    def __call__(self, param: BatchEndParam) -> None:
        data = param.locals["data"]
        self.loads.append(tuple(param.locals["module"].workers.loads))
        self.own.append([] if data is None else (data[:, 0] * SAMPLES).round().int().tolist())


@contextmanager
def variable(words: str | None) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        if words is not None:
            patch.setenv("GANGLINE_WORK_LOAD_LIST", words)
        yield patch


def run(
    store: KVStore,
    seconds: Sequence[Sequence[float]],
    words: str | None = "auto",
    *,
    loads: Any = None,
    data: Any = None,
    epochs: int = 4,
    is_simulated: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train as one worker of a job; return what it saw."""
    torch.set_num_threads(1)
    seen = Seen()
    times = simulated_time() if is_simulated else nullcontext()
    with times, variable(words), gangline_lines() as lines, module(seconds[store.rank], loads) as made:
        settings = {"batch_size": BATCH, "kvstore": store, "optimizer_params": RATE, "eval_metric": "loss"}
        settings |= {"batch_end_callback": [seen, *options.pop("callbacks", ())]}
        made.fit(data or samples(), num_epoch=epochs, **{**settings, **options})
        found = {"loads": seen.loads, "own": seen.own, "lines": lines, "params": made.get_params()}
        return found | {"final": made.workers.loads, "contexts": made.work_load_list}


def in_a_job(comm: Communicator, *arguments: Any, **options: Any) -> dict[str, Any]:
    with create("allreduce", communicator=comm) as store:
        return run(store, *arguments, **options)


def on_servers(name: str, *arguments: Any) -> dict[str, Any]:
    with create(name) as store:
        return run(store, *arguments)


def alone(epochs: int, **options: Any) -> Any:
    with module([0.0]) as made:
        made.fit(samples(), num_epoch=epochs, batch_size=BATCH, optimizer_params=RATE, kvstore=None, **options)
        return made.get_params()


def check_samples(found: Sequence[dict[str, Any]], epochs: int) -> None:
    """Check that all workers had the same loads at each batch, and that every sample was read once in each epoch."""
    assert all(each["loads"] == found[0]["loads"] for each in found)
    batches = [list(itertools.chain(*parts)) for parts in zip(*(each["own"] for each in found), strict=True)]
    assert [len(batch) for batch in batches] == ([BATCH] * 5 + [SAMPLES - 5 * BATCH]) * epochs
    for epoch in range(epochs):
        assert sorted(itertools.chain(*batches[6 * epoch : 6 * epoch + 6])) == list(range(SAMPLES))


def of_two_workers(comm: Communicator, folder: str) -> dict[str, Any]:
    """Train in many ways as one of two workers; return what each showed."""
    data, label = samples()
    batches = [(data[start : start + 4], label[start : start + 4]) for start in range(0, 40, 4)]
    return {
        "both levels": in_a_job(comm, ([1e-3, 1e-3], [1e-3, 4e-3]), loads="auto", epochs=5),
        "accumulated": in_a_job(comm, UNEQUAL, data=TensorDataset(*samples()), epochs=6, accumulate=2),
        "real time": in_a_job(comm, UNEQUAL, is_simulated=False),
        "own batches": in_a_job(comm, EQUAL, data=batches, epochs=1, batch_size=None),
        "own loop": own_loop(comm),
        "small batches": small_batches(comm),
        "messages": [counted(comm, words) for words in (None, "auto")],
        "refused": [refused(comm, words) for words, _ in REFUSED],
        "page": page_in_a_job(comm, folder),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(of_two_workers, 2, str(tmp_path_factory.mktemp("pages")))


def of_both(two: list[dict[str, Any]], what: str) -> list[Any]:
    return [each[what] for each in two]


def test_a_worker_is_as_fast_as_the_best_split_over_its_contexts(two: list[dict[str, Any]]) -> None:
    found = of_both(two, "both levels")
    check_samples(found, 5)
    assert 0.5 < found[0]["final"][0] < 0.75  # 2 and 1/1 + 1/4 samples per millisecond: 0.62
    assert found[1]["contexts"][0] > 0.65
    assert distance(found[1]["params"], alone(5)) <= 1e-11


def test_updates_of_several_batches_stay_exact_while_loads_change(two: list[dict[str, Any]]) -> None:
    for each in of_both(two, "accumulated"):
        assert each["final"][0] > 0.6
        assert distance(each["params"], alone(6, accumulate=2)) <= 1e-11


def beside_a_snail(comm: Communicator) -> tuple[dict[str, Any], list[int]]:
    """Return what a worker saw, and the numbers of batches between messages."""
    exchanged: list[int] = []
    exchange = WorkerBalance._exchange

    def note(balance: WorkerBalance, ahead: int = 0) -> int:
        exchanged.append(balance.rhythm[0])
        return exchange(balance, ahead)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerBalance, "_exchange", note)
        patch.setattr("gangline.models.balance.speed_model._TRIAL_COST", 100.0)
        patch.setattr("gangline.models.balance.worker_balance._SECONDS", 100.0)  # after 1, 2, 4, ... updates
        return in_a_job(comm, ([5e-4], [4e-2]), epochs=8), exchanged


def test_a_worker_on_which_one_sample_would_delay_the_others_is_left_idle_after_a_short_trial() -> None:
    found, exchanges = zip(*spawn(beside_a_snail, 2), strict=True)
    check_samples(found, 8)
    loads = found[0]["loads"]
    for begin in (36, 42):  # of epochs
        assert [load > 0 for _, load in loads[begin : begin + 6]] == [True] * 3 + [False] * 3
    assert exchanges[0] == exchanges[1]
    assert exchanges[0].count(3) >= 2  # at the end of each trial
    assert distance(found[1]["params"], alone(8)) <= 1e-11


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_workers_with_servers_are_balanced_too(store: str) -> None:
    found = run_job(on_servers, 2, 1, store, UNEQUAL)
    check_samples(found, 4)
    assert 0.7 < found[0]["final"][0] < 0.9
    if store == "dist_sync":
        assert distance(found[0]["params"], alone(4)) <= 1e-11


class ReadAhead(TensorDataset):
    """Dataset that a process reads ahead."""

    num_workers = 1


def reads_ahead(comm: Communicator) -> dict[str, Any]:
    return in_a_job(comm, UNEQUAL, data=ReadAhead(*samples()))


@pytest.mark.slow
def test_a_changed_split_begins_at_a_batch_that_no_worker_has_begun_to_read() -> None:
    found = spawn(reads_ahead, 2)
    check_samples(found, 4)
    assert found[0]["final"][0] > 0.7
    assert distance(found[0]["params"], alone(4)) <= 1e-11


@pytest.mark.parametrize(("best_split", "expected"), [(False, 3.0), (True, 1.5)])
def test_the_time_of_a_worker_is_that_of_its_contexts_together(
    best_split: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    workers.count, workers.is_auto = 2, True
    sent: list[Any] = []
    monkeypatch.setattr(workers, "all_gather", lambda message, _: [sent.append(message) or message] * 2)
    balance = WorkerBalance(workers, logging.getLogger("gangline"), best_split=best_split)
    balance.record([2, 2, 0], [ElapsedTime(seconds, []) for seconds in (1.0, 3.0, 0.0)])
    assert balance.report(10.0, 9.0) == (3.0, 7.0)
    workers.share_cost = 100.0  # of a share that is cut by lengths
    balance.record([2, 2, 0], [ElapsedTime(seconds, []) for seconds in (1.0, 3.0, 0.0)])
    assert sent == []
    balance.begin_epoch()
    balance.begin_epoch()
    assert sent == [[[(expected, 4, 0), (expected, 100, 0)], 0], [[], 0]]
    assert workers.share_cost is None


def counted(comm: Communicator, words: str | None) -> int:
    calls = 0
    original = WorkerGroup.all_gather

    def count(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*arguments)

    with variable(words) as patch:
        patch.setattr(WorkerGroup, "all_gather", count)
        patch.setattr("gangline.models.balance.worker_balance._SECONDS", 100.0)
        in_a_job(comm, EQUAL, words, epochs=3)
    return calls


def test_measuring_costs_one_message_at_each_epochs_start(two: list[dict[str, Any]]) -> None:
    fixed, auto = two[0]["messages"]
    assert fixed < auto <= fixed + 3


def test_the_split_and_the_times_of_all_workers_are_logged_by_rank_0(two: list[dict[str, Any]]) -> None:
    first, second = (each["lines"] for each in of_both(two, "real time"))
    assert not [line for line in second if "worker" in line]
    moved = [line for line in first if line.startswith("work_load_list auto: worker 0 0.")]
    assert moved
    assert all(re.search(r", worker 1 0\.\d+ \(\d+ and \d+ samples/s\)$", line) for line in moved)
    pattern = r"worker {}: load (0\.\d+), computed (\d+\.\d+) s, waited (\d+\.\d+) s"
    epochs = [line for line in first if "computed" in line]
    for number, line in enumerate(epochs):
        match = re.fullmatch(rf"Epoch\[{number}\] {pattern.format(0)}; {pattern.format(1)}", line)
        assert match, line
        if not number:  # the fast worker waits for the other one
            assert float(match[3]) > float(match[6])
            assert float(match[5]) > float(match[2])
    assert len(epochs) == 4


@contextmanager
def unequal_worker(comm: Communicator) -> Iterator[tuple[KVStore, Module]]:
    with (
        simulated_time(),
        variable("auto"),
        create("allreduce", communicator=comm) as store,
        module(UNEQUAL[comm.rank]) as made,
    ):
        yield store, made


def page_in_a_job(comm: Communicator, path: str) -> Path:
    with unequal_worker(comm) as (store, made):
        progress = TrainingProgress(made, f"{path}/{comm.rank}.html")
        options = {"batch_end_callback": progress, "epoch_end_callback": progress, "optimizer_params": RATE}
        made.fit(samples(), num_epoch=4, batch_size=BATCH, kvstore=store, **options)
    return Path(f"{path}/{comm.rank}.html")


def test_the_page_shows_the_split_and_how_it_moved(two: list[dict[str, Any]]) -> None:
    data = read_progress(two[0]["page"])
    splits = data["splits"]
    assert splits[0] == {"step": 0, "workers": [0.5, 0.5], "contexts": [1.0]}
    assert 8 <= splits[1]["step"] < 12
    assert splits[-1]["workers"][0] > 0.7
    shown = re.fullmatch(r"(\S+), (\S+) \(auto\)", data["settings"]["loads of the workers"])
    assert shown
    assert float(shown[1]) == pytest.approx(splits[-1]["workers"][0], abs=2e-3)
    for rank in range(2):
        assert re.fullmatch(r"computed \S+ s, waited \S+ s", data["settings"][f"worker {rank}, last epoch"])


def checkpointed(comm: Communicator, prefix: str, epochs: int, resumes: bool, stop_at: int | None) -> dict[str, Any]:
    def stop(param: BatchEndParam) -> bool:
        return (param.epoch, param.nbatch) == (epochs - 1, stop_at)

    saver = Checkpoint(None, prefix)
    options = {"callbacks": [stop], "epoch_end_callback": saver, "resume": "auto" if resumes else None}
    seconds = UNEQUAL if comm.size == 2 else (FAST, FAST, FAST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gangline.models.balance.worker_balance._SECONDS", 0.0)  # an exchange after each update
        return in_a_job(comm, seconds, epochs=epochs, **options)


@pytest.mark.parametrize("stop_at", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_checkpoint_holds_the_loads_and_resumes_with_any_number_of_workers(
    tmp_path: Path, stop_at: int | None
) -> None:
    prefix = str(tmp_path / "net")
    found = spawn(checkpointed, 2, prefix, 3, False, stop_at)
    number = 3 if stop_at is None else 2
    saved = checkpoint.read(prefix, number)
    assert saved.worker_balance is not None
    assert saved.worker_balance["loads"] == found[0]["final"]
    assert saved.of_worker(1, 2).worker_balance == saved.worker_balance
    for count in (2, 3, 1):
        for path in tmp_path.iterdir():  # each resumes from the first run's checkpoint
            if not path.name.startswith(f"net-000{number}"):
                shutil.rmtree(path)
        resumed = spawn(checkpointed, count, prefix, 5, True, None)
        assert distance(resumed[0]["params"], alone(5)) <= 1e-11
        warned = [line for line in resumed[0]["lines"] if "the saved loads are those of worker 0, worker 1;" in line]
        assert len(warned) == (count == 3)
        if count == 2:
            assert resumed[0]["loads"][0][0] > 0.6
        if count == 3:
            assert max(resumed[0]["loads"][0]) < 0.5


def refused(comm: Communicator, words: list[str]) -> str:
    with variable(words[comm.rank]), create("allreduce", communicator=comm) as store:
        try:
            Workers(store)
        except (ValueError, MismatchError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


REFUSED: list[tuple[list[str], str]] = [
    (["automatic"] * 2, "ValueError: GANGLINE_WORK_LOAD_LIST is 'automatic'; expected one number per worker, "),
    (["AUTO"] * 2, "such as 3,1, or auto"),
    (["3,1,1"] * 2, "ValueError: GANGLINE_WORK_LOAD_LIST is '3,1,1', which has 3 entries for 2 workers"),
    (["3,1", "auto"], "MismatchError: init_optimizer: GANGLINE_WORK_LOAD_LIST is 3,1 on rank 0, but auto on rank 1"),
]


def test_wrong_words_are_refused_on_all_workers(two: list[dict[str, Any]]) -> None:
    for (_, expected), *errors in zip(REFUSED, *of_both(two, "refused"), strict=True):
        for error in errors:
            assert expected in error


def test_batches_of_a_workers_own_are_not_split_which_is_said_once(two: list[dict[str, Any]]) -> None:
    first, second = of_both(two, "own batches")
    assert set(first["loads"]) == {(0.5, 0.5)}
    assert len([line for line in first["lines"] if "which are not split" in line]) == 1
    assert not [line for line in second["lines"] if "which are not split" in line]


def own_loop(comm: Communicator) -> Any:
    data, label = samples()
    with unequal_worker(comm) as (store, made):
        made.init_optimizer(store, "sgd", RATE)
        for _ in range(4):
            made.begin_epoch()
            for start in range(0, SAMPLES, BATCH):
                batch = slice(start, min(start + BATCH, SAMPLES))
                mine = made.workers.share(batch.stop - batch.start)
                made.forward_backward_update(data[batch][mine], label[batch][mine])
        return made.workers.loads, made.get_params()


def test_a_loop_of_the_users_own_is_balanced_at_begin_epoch(two: list[dict[str, Any]]) -> None:
    [(loads, params), (same, _)] = of_both(two, "own loop")
    assert loads == same
    assert loads[0] > 0.7
    assert distance(params, alone(4, shuffle=False)) <= 1e-11


def small_batches(comm: Communicator) -> Any:
    data, label = samples()
    with unequal_worker(comm) as (store, made):
        made.init_optimizer(store, "sgd", RATE)
        for batch in (data.split(1), label.split(1)), (data.split(3), label.split(3)):
            for part, labels in zip(batch[0][:4], batch[1][:4], strict=True):
                mine = made.workers.share(len(part))
                made.forward_backward_update(part[mine], labels[mine])
        return made.get_params()


def test_a_share_without_samples_takes_part_in_the_step(two: list[dict[str, Any]]) -> None:
    data, label = samples()
    with module([0.0]) as plain:
        network = plain.network
    optimizer = torch.optim.SGD(network.parameters(), RATE["learning_rate"], RATE["momentum"])
    for size in (1, 3):
        for part, labels in zip(data.split(size)[:4], label.split(size)[:4], strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(part), labels).backward()
            optimizer.step()
    for params in of_both(two, "small batches"):
        assert distance(params, network.state_dict()) <= 1e-11
