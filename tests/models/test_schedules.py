"""Schedules and torch's schedulers set the learning rate of each update, also after a resume."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Cut, labelled, mlp, same_bits
from torch import nn
from torch.optim import lr_scheduler

from gangline import MismatchError, Module, cpu
from gangline.callback import Checkpoint
from gangline.collectives.communicator import Communicator
from gangline.collectives.processes.spawning import spawn
from gangline.kvstore import create
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.loop.schedules import Schedule, TorchScheduler, schedule

SAMPLES = 24
arrays = partial(labelled, SAMPLES, 4, 3, dtype=torch.float64)
network = partial(mlp, 4, 6, 3, seed=1)


def rates_of(found: Schedule, epochs: int, batches: int) -> list[float]:
    return [found(epoch, batch) for epoch in range(epochs) for batch in range(batches)]


def made(spec: Any, epochs: int = 10, batches: int | None = 4, base: float = 0.8) -> Schedule:
    return schedule(spec, base, epochs, batches)


@pytest.mark.parametrize(
    ("spec", "per_epoch", "make"),
    [
        (("piecewise", {"epochs": [2, 5], "factor": 0.5}), False, lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5)),
        ("cosine", True, lambda o: lr_scheduler.CosineAnnealingLR(o, 40)),
        (("cosine", {"min_rate": 0.1}), True, lambda o: lr_scheduler.CosineAnnealingLR(o, 40, 0.1)),
        (("poly", {"power": 3}), True, lambda o: lr_scheduler.PolynomialLR(o, 40, 3)),
        (("constant", {"warmup_epochs": 2}), True, lambda o: lr_scheduler.LinearLR(o, 1 / 8, 1, 7)),
    ],
)
def test_rates_are_those_of_torchs_schedulers(spec: Any, per_epoch: bool, make: Any) -> None:
    found = rates_of(schedule(spec, 0.5, 10, 4), 10, 4)
    assert found[:: 1 if per_epoch else 4] == pytest.approx(rates_by_torch(make, 40 if per_epoch else 10), rel=1e-9)


@pytest.mark.parametrize("name", ["constant", "cosine", "poly"])
def test_a_warm_up_rises_in_equal_steps_to_the_initial_rate(name: str) -> None:
    found = rates_of(made((name, {"warmup_epochs": 2})), 10, 4)
    assert found[:8] == pytest.approx([0.1 * (t + 1) for t in range(8)], rel=1e-12)
    without = rates_of(made(name, epochs=8), 8, 4)
    assert found[8:] == pytest.approx(without, rel=1e-12)


def test_a_warm_up_does_not_shift_the_epochs_of_piecewise() -> None:
    found = made(("piecewise", {"epochs": [4], "warmup_epochs": 0.5}))
    assert [found(0, batch) for batch in range(4)] == [pytest.approx(0.4), pytest.approx(0.8), 0.8, 0.8]
    assert (found(3, 3), found(4, 0)) == (0.8, pytest.approx(0.08))


def test_without_a_batch_count_the_rate_changes_between_epochs() -> None:
    found = made(("cosine", {"warmup_epochs": 2}), batches=None)
    assert found(5, 0) == found(5, 77)
    assert [found(0), found(1), found(2)] == [0.4, 0.8, 0.8]


REFUSED: list[Any] = [
    ("step", ValueError, "schedule 'step' is unknown; expected one of"),
    ("cosin", ValueError, "did you mean 'cosine'"),
    (("cosine", {"factor": 2}), ValueError, r"has no option \['factor'\]"),
    ("piecewise", TypeError, "epochs is None; expected a list of numbers"),
    (("piecewise", {"every": 3}), ValueError, r"has no option \['every'\]"),
    (("piecewise", {"epochs": [1], "warmup_epochs": 3}), ValueError, "drops at epoch 1, within the warm-up of 3"),
    (("piecewise", {"epochs": [3, 3]}), ValueError, "with a duplicate"),
    (("constant", {"warmup_epochs": 10}), ValueError, "10 epochs of 10"),
    (("poly", {"power": 0}), ValueError, "power is 0"),
    (("cosine", {"min_rate": 0.9}), ValueError, "min_rate is 0.9, above the base rate 0.8"),
    (("cosine", {"min_rate": float("nan")}), ValueError, "learning rate is nan"),
    *((spec, TypeError, ".") for spec in (3, ("piecewise", {"epochs": "5,8"}), ("poly", {"power": "2"}), None)),
]


def test_wrong_values_are_refused() -> None:
    for spec, error, message in REFUSED:
        with pytest.raises(error, match=message):
            made(spec)


def test_a_scheduler_that_steps_by_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="every is 'step'"):
        TorchScheduler(one_cycle, "step")


def fitted(lr_scheduler: Any, *, store: Any = "local", contexts: int = 1, **options: Any) -> tuple[list[float], Any]:
    """Return the rate after each update of 3 epochs of 4 batches, and the weights."""
    rates: list[float] = []
    settings: dict[str, Any] = {"num_epoch": 3, "batch_size": 6, "kvstore": store, "lr_scheduler": lr_scheduler}
    settings |= {"optimizer_params": {"learning_rate": 0.5, "momentum": 0.9}}
    settings |= {"batch_end_callback": lambda _: rates.append(module.learning_rate)}
    with Module(network(), nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]) as module:
        module.fit(arrays(), **settings | options)
        return rates, module.get_params()


def by_torch(rates: list[float]) -> dict[str, torch.Tensor]:
    """Run a plain torch loop with the given rate for each update."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    data, label = arrays()
    for step, rate in enumerate(rates):
        part = slice(step % 4 * 6, step % 4 * 6 + 6)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data[part]), label[part]).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize(("store", "contexts"), [("local", 1), ("device", 2)])
def test_each_update_is_done_by_its_rate(store: str, contexts: int) -> None:
    spec = ("cosine", {"warmup_epochs": 0.75})
    rates, params = fitted(spec, store=store, contexts=contexts, shuffle=False)
    assert rates == rates_of(schedule(spec, 0.5, 3, 4), 3, 4)
    torch.testing.assert_close(params, by_torch(rates), rtol=1e-11, atol=1e-12)


def test_a_schedule_counts_batches_if_updates_use_several() -> None:
    rates, _ = fitted("poly", accumulate=3)
    whole = rates_of(schedule("poly", 0.5, 3, 4), 3, 4)
    assert rates == [whole[t] for t in (0, 3, 4, 7, 8, 11)]


def trained_by_workers(comm: Communicator) -> Any:
    with create("allreduce", communicator=comm) as store:
        first = fitted(("cosine", {"warmup_epochs": 0.75}), store=store, shuffle=False)
    with create("allreduce", communicator=comm) as store, pytest.raises(MismatchError, match="lr_scheduler is"):
        fitted("poly" if comm.rank else "cosine", store=store)
    return first


def test_workers_all_have_the_rate_and_must_have_one_schedule() -> None:
    for rates, params in spawn(trained_by_workers, 2):
        assert rates == rates_of(schedule(("cosine", {"warmup_epochs": 0.75}), 0.5, 3, 4), 3, 4)
        torch.testing.assert_close(params, by_torch(rates), rtol=1e-11, atol=1e-12)


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=12, cycle_momentum=False)


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, patience=0, threshold=10)


def rates_by_torch(make: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("make", [one_cycle, sequence])
def test_a_scheduler_of_torchs_steps_after_each_update_or_epoch(make: Any) -> None:
    assert fitted(TorchScheduler(make, "batch"))[0] == rates_by_torch(make, 12)
    assert fitted(make)[0] == [rate for rate in rates_by_torch(make, 3) for _ in range(4)]


def test_reduce_on_plateau_steps_after_validations() -> None:
    """The first value counts as an improvement; no later one is ten times as large."""
    rates, _ = fitted(plateau, eval_data=arrays())
    assert rates == [0.5] * 8 + [0.25] * 4
    rates, _ = fitted(TorchScheduler(plateau, metric="accuracy"), eval_data=arrays(), eval_frequency=(2, "batches"))
    assert rates == [0.5] * 4 + [0.25] * 2 + [0.125] * 2 + [0.0625] * 2 + [0.03125] * 2


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, 9), {}, ValueError, "cycle_momentum=False"),
        (lambda _: 3, {}, TypeError, "returned a int"),
        (plateau, {}, ValueError, "ReduceLROnPlateau needs 'a metric'.*no eval_data"),
        (TorchScheduler(plateau, metric="mae"), {"eval_data": True}, ValueError, r"needs 'mae'.*\['accuracy'\]"),
        (3, {}, TypeError, "expected a name"),
    ],
)
def test_a_scheduler_that_cannot_work_is_refused_before_training(
    spec: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    seen: list[Any] = []
    data = {name: arrays() for name in options}
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module, pytest.raises(error, match=message):
        module.fit(arrays(), num_epoch=1, batch_size=6, lr_scheduler=spec, batch_end_callback=seen.append, **data)
    assert not seen


SPECS: dict[str, Any] = {
    "cosine": ("cosine", {"warmup_epochs": 1}),
    "piecewise": ("piecewise", {"epochs": [1, 2], "warmup_epochs": 0.5}),
    "poly": ("poly", {"warmup_epochs": 0.75, "min_rate": 0.01}),
    "one-cycle": TorchScheduler(one_cycle, "batch"),
    "sequence": TorchScheduler(sequence, "batch"),
    "plateau": plateau,
}


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cut", [3, 9])
def test_a_resumed_run_has_the_rates_and_weights_of_an_uninterrupted_one(tmp_path: Path, spec: str, cut: int) -> None:
    def run(prefix: Path, cut: int | None, resume: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        rates: list[float] = []
        saves = Checkpoint(None, prefix)

        def count(param: BatchEndParam) -> None:
            rates.append(param.locals["module"].learning_rate)
            if len(rates) == cut:
                raise Cut

        callbacks = {"batch_end_callback": [saves, count], "epoch_end_callback": saves}
        with contextlib.suppress(Cut):
            options = {"eval_data": arrays(), "resume": resume, **callbacks}
            return rates, fitted(SPECS[spec], store="device", contexts=2, **options)[1]
        return rates, {}

    whole, weights = run(tmp_path / "whole", None, None)
    before, _ = run(tmp_path / "cut", cut, None)
    after, resumed = run(tmp_path / "cut", None, "auto")
    assert before + after == whole
    assert same_bits(weights, resumed)


def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(arrays(), num_epoch=1, batch_size=6, lr_scheduler=TorchScheduler(one_cycle, "batch"))
        module.save_checkpoint(tmp_path / "net", 1, save_optimizer_states=True)
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        with pytest.raises(ValueError, match="has scheduler SequentialLR, but the checkpoint's had OneCycleLR"):
            module.fit(arrays(), num_epoch=2, batch_size=6, lr_scheduler=sequence, resume=tmp_path / "net")
        assert module.step == 4
