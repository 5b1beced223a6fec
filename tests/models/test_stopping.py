"""Stopping by a callback, patience, a signal or values that are not finite; on all workers after the same step."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Run
from measure import Told, labelled, same_bits
from torch import nn

from gangline import Module, cpu, spawn
from gangline.callback import Checkpoint
from gangline.collectives.communicator import Communicator
from gangline.kvstore import create
from gangline.models.balance.worker_balance import WorkerBalance
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.loop.stopping import EarlyStopping, received_signal, stop_on
from gangline.models.workers import Workers
from tests.kvstore.parameter_server.processes import run_job

SAMPLES, BATCHES, EPOCHS = 24, 4, 3
Params = dict[str, torch.Tensor]
arrays = partial(labelled, SAMPLES, 4, 3, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)).double()


class At:
    """Batch callback that records each update and calls a function after one of them."""

    def __init__(self, step: int, what: Any = lambda: True) -> None:
        self.step, self.what = step, what
        self.seen: list[tuple[int, int]] = []

    def __call__(self, param: BatchEndParam) -> Any:
        self.seen.append((param.epoch, param.nbatch))
        return self.what() if len(self.seen) == self.step else None


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fitted(prefix: Path | None, callback: Any = None, **options: Any) -> tuple[str, Params]:
    """Return why training ended, and the weights. Checkpoints are written after the second epoch and on a stop."""
    settings: dict[str, Any] = {"num_epoch": EPOCHS, "batch_size": 6, "eval_metric": "loss"}
    settings |= {"optimizer_params": {"learning_rate": 0.5, "momentum": 0.9}, "batch_end_callback": callback}
    settings |= {"epoch_end_callback": Checkpoint(None, prefix, period=2) if prefix else None}
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        reason = module.fit(arrays(), **settings | options)
        return reason, module.get_params()


@pytest.mark.parametrize("step", [1, 6, 8])
@pytest.mark.parametrize("what", [lambda: True, lambda: torch.ones(1).numpy().all()], ids=["bool", "numpy"])
def test_a_callback_that_returns_true_ends_training_after_that_update(tmp_path: Path, step: int, what: Any) -> None:
    stop, rest, whole = At(step, what), At(0), At(0)
    assert fitted(tmp_path / "net", stop)[0] == "callback"
    assert len(stop.seen) == step
    saved = checkpoint.read(tmp_path / "net", step // BATCHES)
    assert (saved.position["epoch"], saved.position["batch"]) == divmod(step, BATCHES)
    again, resumed = fitted(tmp_path / "net", rest, resume="auto")
    assert again == "epochs"
    _, weights = fitted(None, whole)
    assert stop.seen + rest.seen == whole.seen
    assert same_bits(weights, resumed)


def test_a_callback_that_returns_other_than_true_does_not_stop_training() -> None:
    assert fitted(None, At(2, lambda: 1))[0] == "epochs"
    assert fitted(None, At(2, lambda: "yes"))[0] == "epochs"


def test_an_epoch_callback_may_end_training(tmp_path: Path) -> None:
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        saves = Checkpoint(module, tmp_path / "net", period=5)
        ends = lambda epoch, *_: epoch == 1  # noqa: E731
        reason = module.fit(arrays(), num_epoch=9, batch_size=6, epoch_end_callback=[saves, ends])
        assert (reason, module.step) == ("callback", 2 * BATCHES)
    saved = checkpoint.read(tmp_path / "net", 2)
    assert (saved.position["epoch"], saved.position["batch"]) == (2, 0)


def test_a_stop_within_a_window_of_several_batches_waits_for_its_update(tmp_path: Path) -> None:
    stop = At(1)
    reason, _ = fitted(tmp_path / "net", stop, accumulate=3)
    assert (reason, stop.seen) == ("callback", [(0, 2)])
    rest = At(0)
    _, resumed = fitted(tmp_path / "net", rest, accumulate=3, resume="auto")
    assert rest.seen == [(0, 3), (1, 2), (1, 3), (2, 2), (2, 3)]
    assert same_bits(fitted(None, accumulate=3)[1], resumed)


def test_a_signal_ends_training_after_the_step_that_runs(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = At(6, terminate)
    with stop_on(signal.SIGTERM):
        reason, _ = fitted(tmp_path / "net", stop)
        assert received_signal() == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is before  # a second one kills
    assert (reason, len(stop.seen)) == ("SIGTERM", 6)
    assert (received_signal(), signal.getsignal(signal.SIGTERM)) == (None, before)
    _, resumed = fitted(tmp_path / "net", resume="auto")
    assert same_bits(fitted(None)[1], resumed)


def test_a_signal_before_training_ends_it_before_the_first_step() -> None:
    stop = At(0)
    with stop_on(signal.SIGUSR1):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert fitted(None, stop)[0] == "SIGUSR1"
    assert not stop.seen


def test_handlers_are_restored_and_another_thread_sets_none_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on(signal.SIGTERM, signal.SIGUSR1):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    inside: list[Any] = []

    def enter() -> None:
        with stop_on(signal.SIGTERM):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]
    assert "outside the main thread" in caplog.text


def validated(values: list[float], stopping: EarlyStopping, **options: Any) -> tuple[str, int]:
    """Train epochs of one batch with these validation values; return why training ended, and the number of updates."""
    settings: dict[str, Any] = {"eval_data": arrays(), "validation_metric": Told(values), "eval_end_callback": stopping}
    settings |= {"batch_size": SAMPLES, "num_epoch": len(values)}
    updates = At(0)
    return fitted(None, updates, **settings | options)[0], len(updates.seen)


@pytest.mark.parametrize(
    ("values", "arguments", "steps"),
    [
        ([0.1, 0.2, 0.2, 0.15, 0.9, 0.9], {"patience": 2}, 4),
        ([0.1, 0.2, 0.15, 0.3, 0.1, 0.1], {"patience": 2}, 6),
        ([0.1, 0.2, 0.3, 0.4, 0.9], {"patience": 2, "min_delta": 0.15}, 5),
        ([0.1, 0.2, 0.3, 0.9], {"patience": 1, "min_delta": 0.15}, 2),
        ([0.3, 0.2, 0.25, 0.1, 0.1], {"patience": 1, "mode": "min"}, 3),
        ([float("nan"), float("nan"), 0.5], {"patience": 2}, 2),
    ],
)
def test_patience_counts_validations_without_an_improvement(
    values: list[float], arguments: dict[str, Any], steps: int
) -> None:
    found = validated(values, EarlyStopping(metric="custom", **arguments))
    assert found == ("patience" if steps < len(values) else "epochs", steps)


def test_patience_continues_from_a_checkpoint(tmp_path: Path) -> None:
    saves = Checkpoint(None, tmp_path / "net", keep_best="custom")
    ends = [saves, lambda epoch, *_: epoch == 1]
    begun = validated([0.5, 0.4], EarlyStopping(2, "custom"), num_epoch=8, epoch_end_callback=ends)
    assert begun[0] == "callback"
    stopping, saves = EarlyStopping(2, "custom"), Checkpoint(None, tmp_path / "net", keep_best="custom")
    then = validated([0.45], stopping, num_epoch=8, epoch_end_callback=saves, resume="auto")
    assert (then[0], stopping.best, stopping.waited) == ("patience", 0.5, 2)
    assert checkpoint.read(tmp_path / "net", "best").position["epoch"] == 1


def test_a_metric_that_validation_lacks_is_refused_before_training() -> None:
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        for data, message in ((arrays(), r"'mae', but .* computes \['accuracy'\]"), (None, "there is no eval_data")):
            with pytest.raises(ValueError, match=message):
                module.fit(arrays(), data, num_epoch=1, batch_size=6, eval_end_callback=EarlyStopping(1, "mae"))
        assert module.step == 0


@pytest.mark.parametrize(
    ("frequency", "after"), [(1, [4, 8, 12]), ((2, "epochs"), [8, 12]), ((5, "batches"), [5, 10, 12])]
)
@pytest.mark.parametrize("cut", [None, 5, 7])
def test_validation_runs_at_its_interval_of_epochs_or_batches_and_at_the_end(
    tmp_path: Path, frequency: Any, after: list[int], cut: int | None
) -> None:
    seen: list[int] = []
    validation: dict[str, Any] = {"eval_data": arrays(), "eval_frequency": frequency}
    validation |= {"eval_end_callback": lambda param: seen.append(param.locals["module"].step)}
    fitted(tmp_path / "net", At(cut or 0), **validation)
    if cut:
        fitted(tmp_path / "net", resume="auto", **validation)
    assert seen == after


def test_validation_in_an_epochs_middle_changes_nothing_of_the_run() -> None:
    (_, without), (_, with_it) = (
        fitted(None, eval_data=data, eval_frequency=(3, "batches")) for data in (None, arrays())
    )
    assert same_bits(without, with_it)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(0), "patience is 0"),
        (lambda: EarlyStopping(1, "acc", "up"), "mode is 'up'"),
        (lambda: EarlyStopping(1, "acc", "max", -1.0), "min_delta is -1.0"),
        *(
            (lambda given=given: fitted(None, eval_frequency=given), "eval_frequency is")
            for given in (0, -1, (3, "steps"))
        ),
    ],
)
def test_patience_and_frequencies_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def stopped(rank: int, store: Any, folder: str, how: str, resume: Any = None) -> Any:
    """Stop on one worker only; return why training ended, the updates seen, and the weights."""
    what = {"callback": lambda: rank == 1, "signal": lambda: terminate() if rank == 1 else None, "": lambda: None}[how]
    stop = At(6, what)
    with stop_on(signal.SIGTERM):
        reason, params = fitted(Path(folder) / how / "net", stop, kvstore=store, resume=resume)
    return reason, stop.seen, params


def stopped_in_a_job(comm: Communicator, folder: str) -> Any:
    found = []
    for how in ("callback", "signal"):
        for resume in (None, "auto"):
            with create("allreduce", communicator=comm) as store:
                found.append(stopped(comm.rank, store, folder, how, resume))
    with create("allreduce", communicator=comm) as store:
        found.append(stopped(comm.rank, store, folder, ""))
    return found


@pytest.mark.slow
def test_one_workers_word_ends_all_workers_after_one_common_step(tmp_path: Path) -> None:
    everybody = spawn(stopped_in_a_job, 2, str(tmp_path))
    (whole_reason, whole_seen, weights), _ = (found[-1] for found in everybody)
    assert (whole_reason, len(whole_seen)) == ("epochs", EPOCHS * BATCHES)
    for found in everybody:
        for place, reason in ((0, "callback"), (2, "SIGTERM")):
            last = len(found[place][1])
            assert 6 <= last <= 8, "updates until the next exchange of stop requests"
            assert found[place][:2] == everybody[0][place][:2] == (reason, whole_seen[:last])
            assert found[place + 1][:2] == ("epochs", whole_seen[last:])
            assert same_bits(weights, found[place + 1][2])


class Exchanges(Workers):
    """Workers in step whose rank 0 takes some seconds per update."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.update, self.exchanged = seconds, 0, list[int]()
        super().__init__()
        self.count, self.in_step = 2, True

    def all_gather(self, value: Any, name: str) -> list[Any]:
        if name == "step of fit":
            self.exchanged.append(self.update)
        return [value]

    @property
    def clock(self) -> float:
        return self.update * self.seconds


@pytest.mark.parametrize(
    ("seconds", "updates"),
    [
        (10.0, [1, 2, 3, 4, 5, 6]),
        (0.2, [1, 2, 4, 6, 8, 10]),
        (1e-4, [1, 2, 4, 8, 16, 32, 64, 128, 228, 328]),
    ],
)
def test_stop_requests_are_exchanged_about_twice_a_second(seconds: float, updates: list[int]) -> None:
    workers = Exchanges(seconds)
    balance = WorkerBalance(workers, logging.getLogger("gangline"), best_split=False)
    while len(workers.exchanged) < len(updates):
        workers.update += 1
        balance.after_update(1)
    assert workers.exchanged == updates


def stopped_by_servers(kvstore: str, folder: str) -> Any:
    rank = int(os.environ["DMLC_WORKER_ID"])
    return stopped(rank, kvstore, folder, "signal")


def test_workers_out_of_step_end_together_at_an_epochs_end(tmp_path: Path) -> None:
    first, second = run_job(stopped_by_servers, 2, 1, "dist_async", str(tmp_path))
    assert first[:2] == second[:2]
    assert (first[0], len(first[1])) == ("SIGTERM", 8)
    assert checkpoint.read(tmp_path / "signal" / "net", 2).position["batch"] == 0


# Losses and weights that are not finite: training stops, and the newest checkpoint is a finite one


data_of_batches = partial(labelled, 32, 5, 3, seed=3)


class Network(nn.Module):
    """Linear layer that gives gradients of nan, and a finite loss, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spoils_gradients = nn.Linear(5, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(x)
        return scores + (scores * 0).sqrt() if self.spoils_gradients and self.training else scores


def fitted_until_nan(
    prefix: Path, data: Any, spoil: Callable[[Module], object], contexts: int = 1, **options: Any
) -> str:
    """Train up to 3 epochs of 4 batches, and spoil something after the first; return the reason for the end."""
    torch.manual_seed(1)
    with Module(Network(), nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]) as module:
        return module.fit(
            data,
            data_of_batches(),
            num_epoch=3,
            kvstore=options.pop("kvstore", "device"),
            optimizer_params={"learning_rate": 0.1},
            batch_end_callback=Checkpoint(None, prefix, 2, keep=1),
            epoch_end_callback=[lambda epoch, *_: spoil(module) if not epoch else None,
                                Checkpoint(None, prefix, keep=1, keep_best="accuracy")],
            batch_size=8,
            **options,
        )  # fmt: skip


def finite_checkpoints(prefix: Path) -> list[int]:
    """Return the numbers of a prefix's checkpoints, after checking that all and the best hold finite weights."""
    for number in (*epochs(prefix), "best"):
        saved = checkpoint.read(prefix, number)
        assert all(torch.isfinite(value).all() for value in saved.params.values()), number
    return epochs(prefix)


HERE, SAMPLE = r"in batch \d of epoch 1", r"sample \d of 8 in the batch, number 21 of the data; remove or repair it"
CAUSES = {
    "data": rf"loss is nan {HERE}: data of that sample holds nan at \[2\], {SAMPLE}",
    "dict": rf"{HERE}: data\['x'\] of that sample holds nan at \[2\], {SAMPLE}",
    "label": rf"{HERE}: label of that sample holds nan at \[2\], {SAMPLE}",
    "rate": rf"{HERE}: its inputs are finite, so training diverges with learning rate 1e\+38; lower the learning rate",
    "gradient": rf"parameter 'linear.weight' is not finite {HERE}: training diverges|loss is nan {HERE}",
}


@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("case", CAUSES)
def test_training_stops_and_names_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, contexts: int
) -> None:
    data, label = data_of_batches()
    soft = nn.functional.one_hot(label, 3).float()
    given: Any = ({"x": data} if case == "dict" else data, soft if case == "label" else label)

    def spoil(module: Module) -> None:
        if case == "rate":
            module.set_learning_rate(1e38)
        elif case == "gradient":
            for replica in module.bound.replicas.all:
                replica.network.spoils_gradients = True  # type: ignore[assignment]
        else:
            (soft if case == "label" else data)[21, 2] = torch.nan

    prefix = tmp_path / "net"
    assert fitted_until_nan(prefix, given, spoil, contexts) == "diverged"
    assert finite_checkpoints(prefix) == [1]
    assert checkpoint.read(prefix, 1).position["epoch"] == 1
    (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(CAUSES[case], line), line


def test_on_nan_continue_goes_on_and_keeps_the_last_finite_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, label = data_of_batches()
    spoil = lambda _: data[21].fill_(torch.nan)  # noqa: E731
    assert fitted_until_nan(tmp_path / "net", (data, label), spoil, on_nan="continue") == "epochs"
    assert finite_checkpoints(tmp_path / "net") == [1]
    assert caplog.text.count("the training loss is nan in batch") == 1
    assert "-3 is not saved: parameter 'linear.weight' is not finite" in caplog.text
    with pytest.raises(ValueError, match="on_nan is 'go'; expected 'stop' or 'continue'"):
        fitted_until_nan(tmp_path / "net", (data, label), spoil, on_nan="go")


def worker_with_nan(comm: Communicator, prefix: Path, shared: bool) -> tuple[str, int]:
    """Train with one sample of nan, in the data of all or in those of rank 1 alone; return the end and the step."""
    data, label = data_of_batches()
    with create("allreduce", communicator=comm) as store, Module(Network(), nn.CrossEntropyLoss(), cpu()) as module:
        if shared or comm.rank == 1:
            data[29, 3] = torch.nan
        given: Any = (data, label) if shared else list(zip(data.split(8), label.split(8), strict=True))
        reason = module.fit(
            given,
            num_epoch=3,
            batch_size=8 if shared else None,
            shuffle=False,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1},
            batch_end_callback=Checkpoint(None, prefix, 1, keep=1),
        )
        return reason, module.step


def workers_with_nan(comm: Communicator, folder: Path) -> list[tuple[str, int]]:
    return [worker_with_nan(comm, folder / str(shared), shared) for shared in (True, False)]


def test_all_workers_stop_in_the_same_step(tmp_path: Path) -> None:
    first, second = spawn(workers_with_nan, 2, tmp_path)
    assert first == second == [("diverged", 4)] * 2
    for shared in (True, False):
        saved = checkpoint.read(tmp_path / str(shared), 0)
        assert saved.position["batch"] == 3
        assert all(torch.isfinite(value).all() for value in saved.params.values())


def test_a_rise_of_the_loss_is_seen_in_a_short_epoch(caplog: pytest.LogCaptureFixture) -> None:
    with Module(Network(), nn.CrossEntropyLoss(), cpu()) as module:
        assert (
            module.fit(data_of_batches(), num_epoch=2, batch_size=8, optimizer_params={"learning_rate": 30.0})
            == "epochs"
        )
    assert re.findall(r"the training loss went from .*: training diverges with learning rate 30; lower", caplog.text)


def test_the_command_ends_with_code_3_and_the_newest_checkpoint_is_finite(tmp_path: Path, run: Run) -> None:
    train = ["train", "--network", "mlp", "--cpus", "1", "--model-prefix", tmp_path / "n", "--keep", "2"]
    run(*train, "--num-epochs", "2", "--lr", "0.1")
    more = ["--num-epochs", "6", "--load-epoch", "auto", "--lr", "1e30"]
    out, err = run(*train, *more, code=3)
    assert out == ""
    assert (
        f"training diverged after 2 of 6 epochs and 2 batches of the next; the checkpoint is {tmp_path}/n-0002" in err
    )
    assert "its inputs are finite, so training diverges with learning rate 1e+30, momentum 0.9; lower the" in err
    assert finite_checkpoints(tmp_path / "n") == [1, 2]
    run(*train, "--num-epochs", "3", "--load-epoch", "auto", "--lr", "0.1")
