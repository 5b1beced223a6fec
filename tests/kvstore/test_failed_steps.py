"""Steps that fail on one worker: an error on all, equal weights, and the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gangline import Communicator, DistributedOptimizer, spawn
from gangline.kvstore import KVStore, Trainer, create
from gangline.kvstore.optimizer.keyed import KeyedOptimizer
from gangline.kvstore.reducer import reducer
from tests.collectives.situations import error_of
from tests.kvstore.keyed import Told, work
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(60)


def over(fast: list[Any], others: list[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by stores and what workers are to do: allreduce workers do all of it in one job."""
    slow = [pytest.param("dist_sync", one, marks=pytest.mark.slow) for one in others]
    return pytest.mark.parametrize(
        ("store", "chosen"), [("allreduce", [*fast, *others]), *(("dist_sync", one) for one in fast), *slow], ids=str
    )


class Fails(torch.autograd.Function):
    """Identity whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor) -> torch.Tensor:
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for 8 GiB")


class Layers(nn.Module):
    """Two layers; backward of the first can fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()

    def loss(self, step: int, rank: int, *, fails: bool = False) -> torch.Tensor:
        hidden = self.first(torch.full((2, 3), step + rank + 1.0, dtype=torch.float64)).sin()
        loss: torch.Tensor = self.last(Fails.apply(hidden) if fails else hidden).square().mean()  # type: ignore[no-untyped-call]
        return loss

    def backward_of(self, step: int, workers: int = 2) -> None:
        """Replace the gradients by those of the mean over all workers."""
        self.zero_grad()
        for rank in range(workers):
            (self.loss(step, rank) / workers).backward()  # type: ignore[no-untyped-call]

    def descend(self, step: int, workers: int = 2) -> torch.Tensor:
        """Make a step of plain SGD at rate 0.1 and return the weights."""
        self.backward_of(step, workers)
        for parameter in self.parameters():
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
        return self.values()

    def values(self) -> torch.Tensor:
        return parameters_to_vector(self.parameters()).detach().clone()


def run(store: str, play: Callable[..., Any], chosen: Any) -> list[tuple[Any, Any, Any]]:
    """Run ``play(store, one)`` on two workers for what was chosen, with a bucket for each layer.

    Returns:
        What was chosen, and the results of both workers.
    """
    if store == "allreduce":
        results = spawn(_over_collectives, 2, play, chosen, threads=1)
        return list(zip(chosen, *results, strict=True))
    return [(chosen, *run_job(_over_servers, 2, 1, play, chosen))]


def _over_collectives(comm: Communicator, play: Callable[..., Any], chosen: list[Any]) -> list[Any]:
    return [_play(create("allreduce", communicator=comm), play, one) for one in chosen]


def _over_servers(play: Callable[..., Any], one: Any) -> Any:
    return _play(create("dist_sync", timeout=20), play, one)


def _play(store: KVStore, play: Callable[..., Any], one: Any) -> Any:
    with store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "BUCKET_BYTES", 40)
        return play(store, one)


def said(call: Callable[[], Any]) -> str:
    """Return the class and the text of the error that a call raises; "" if it raises none."""
    return ": ".join(error_of(call) or ())


def failed(errors: list[str]) -> list[int]:
    """Return the steps with an error."""
    return [step for step, error in enumerate(errors) if error]


Trained = tuple[list[str], list[torch.Tensor]]
"""Errors and weights of each step."""


def trainer_step(store: KVStore, handling: str) -> Trained:
    """Train 5 steps; rank 0's backward of step 2 fails after it has sent the last layer. Return errors and weights."""
    model = Layers()
    clips = {"clip_global_norm": 1e9} if handling == "clipped" else {}
    trainer = Trainer(model, "sgd", {"learning_rate": 0.1, **clips}, store)
    errors, weights = [], []
    for step in range(5):
        fails = step == 2 and store.rank == 0
        trainer.zero_grad()
        error = said(lambda: trainer.backward(model.loss(step, store.rank, fails=fails), 2))  # noqa: B023
        if not error:
            error = said(lambda: trainer.step(2))
        elif handling == "half":
            error += " " + said(lambda: trainer.backward(model.loss(step, store.rank), 1))  # noqa: B023
        elif handling == "skip":
            error += " " + said(trainer.skip)
        elif handling == "step(0)":
            error += " " + said(lambda: trainer.step(0))
        errors.append(error)
        weights.append(model.values())
    return errors, weights


@over(["half"], ["clipped", "skip", "step(0)", "next"])
def test_a_backward_that_failed_after_it_sent_gradients_is_an_error_on_all(store: str, chosen: Any) -> None:
    for handling, first, second in run(store, trainer_step, chosen):
        check_handling(handling, first, second)


def check_handling(handling: str, first: Trained, second: Trained) -> None:
    (errors, weights), (other_errors, other_weights) = first, second
    assert failed(errors) == failed(other_errors) == [2]
    assert errors[2].startswith("OutOfMemoryError: no memory for 8 GiB")
    assert ("RuntimeError: backward() sent a part" in errors[2]) == (handling not in ("next", "clipped"))
    assert torch.equal(weights[1], weights[2]) == (handling == "clipped")
    assert other_errors[2].startswith("MismatchError: ")
    text = "backward failed on rank 0 after 2 of 4 buckets of gradients had been sent: OutOfMemoryError: no memory"
    assert text in other_errors[2]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other_weights, strict=True))
    model = Layers()
    vector_to_parameters(weights[2], model.parameters())
    for step in (3, 4):
        assert (model.descend(step) - weights[step]).abs().max() < 1e-14


def optimizer_steps(store: KVStore, retries: bool) -> tuple[list[str], torch.Tensor]:
    """Train 5 steps; rank 0's backward of step 2 fails, and runs again if it ``retries``."""
    model = Layers()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), store)
    errors = []
    for step in range(5):
        for fails in (step == 2 and store.rank == 0, False):
            optimizer.zero_grad()
            errors.append(said(lambda: model.loss(step, store.rank, fails=fails).backward()))  # type: ignore[no-untyped-call]  # noqa: B023
            if not errors[-1]:
                optimizer.step()
            if not errors[-1] or not retries:
                break
    errors.append(said(optimizer.close))
    return errors, model.values()


@over([], [True, False])
def test_a_distributed_optimizer_goes_on_after_a_failed_backward(store: str, chosen: Any) -> None:
    for retries, (errors, weights), (other_errors, other_weights) in run(store, optimizer_steps, chosen):
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(5):
            if step != 2 or retries:
                model.backward_of(step)
                optimizer.step()
        assert [error for error in errors if error] == ["OutOfMemoryError: no memory for 8 GiB"]
        (found,) = [error for error in other_errors if error]
        assert found.startswith("MismatchError: ")
        assert "backward failed on rank 0 after 2 of 4 buckets" in found
        assert torch.equal(weights, other_weights)
        assert (model.values() - weights).abs().max() < 1e-14


def failed_update(kv: KVStore, call: Callable[[KVStore], Any]) -> list[str]:
    """Fail an update of rank 0, and return the errors of the pushes, a pull and ``call``."""
    kv.init("w", torch.zeros(2))
    kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    with pytest.MonkeyPatch.context() as patch:
        if kv.rank == 0:
            patch.setattr(KeyedOptimizer, "update", _out_of_memory)
        found = [said(lambda: _push(kv))]
    return [*found, said(lambda: kv.pull("w", torch.empty(2))), said(lambda: call(kv)), said(lambda: _push(kv))]


def _push(kv: KVStore) -> None:
    kv.push("w", torch.ones(2))


def _assign(kv: KVStore) -> None:
    kv.assign("w", torch.ones(2))


FAILED_UPDATES = [
    partial(failed_update, call=call) for call in (_push, methodcaller("barrier"), methodcaller("join"), _assign)
]


@pytest.fixture(scope="module")
def told() -> Told:
    return work(2, *FAILED_UPDATES, failed_inits, mixed_pushes, states_of_rank_0, rates)


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no memory for 1 GiB")


def test_an_update_that_fails_on_one_rank_is_an_error_on_all(told: Told) -> None:
    reason = "an update failed on rank 0, so its weights may differ from the others'"
    for update in FAILED_UPDATES:
        first, second = told[update]
        assert first[0] == "OutOfMemoryError: no memory for 1 GiB"
        assert second[:2] == ["", ""]  # it has the right weights
        assert first[1].startswith(f"RuntimeError: {reason}")
        assert first[2:] == second[2:]
        assert all(text.startswith("MismatchError: ") and reason in text and "no memory" in text for text in first[2:])


# Samples and keys after an error


def refused_step(store: KVStore, _: Any) -> Trained:
    """Train with a gradient that rank 0 cannot compress in step 1, clipped by the common norm."""
    model = Layers()
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    trainer = Trainer(model, "sgd", {"learning_rate": 0.1, "clip_global_norm": 1.0}, store)
    errors, weights = [], []
    for step in range(4):
        trainer.zero_grad()
        model.loss(step, store.rank).backward()  # type: ignore[no-untyped-call]
        if step == 1 and store.rank == 0:
            model.first.weight.grad.fill_(torch.nan)  # type: ignore[union-attr]
        errors.append(said(lambda: trainer.step(2)))
        weights.append(model.values())
    return errors, weights


@pytest.mark.parametrize("store", ["allreduce", pytest.param("dist_sync", marks=pytest.mark.slow)])
def test_a_refused_push_ends_no_training_that_clips_by_the_common_norm(store: str) -> None:
    ((_, (errors, weights), (other_errors, other_weights)),) = run(store, refused_step, [None])
    assert failed(errors) == failed(other_errors) == [1]
    assert "holds NaN" in errors[1], errors[1]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other_weights, strict=True))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_a_push_that_failed_is_not_pending() -> None:
    with create("local") as kv:
        kv.init("w", torch.zeros(2))
        kv.set_gradient_compression({"type": "fp16"})
        kv.set_optimizer(("sgd", {"learning_rate": 1.0, "clip_global_norm": 10.0}))
        for is_async in (False, True):
            work = []
            with suppress(ValueError):
                work.append(kv.push("w", torch.tensor([torch.nan, 1.0]), async_op=is_async))
                work[0].wait()
            kv.push("w", torch.ones(2))
            kv.update()
        kv.pull("w", out := torch.empty(2))
        assert out.tolist() == [-2, -2]


def test_samples_of_no_sync_survive_a_step_that_failed() -> None:
    weights = []
    for fails in (False, True):
        model = Layers()
        trainer = Trainer(model, "sgd", {"learning_rate": 0.1}, "local", compression_params={"type": "fp16"})
        with trainer.no_sync():
            model.loss(0, 0).backward()  # type: ignore[no-untyped-call]
            trainer.step(2)
        if fails:
            model.loss(1, 0).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                parameter.grad.fill_(torch.nan)  # type: ignore[union-attr]
            with pytest.raises(ValueError, match="NaN"):
                trainer.step(2)
            trainer.zero_grad()
        model.loss(1, 0).backward()  # type: ignore[no-untyped-call]
        trainer.step(2)
        weights.append(model.values())
    assert torch.equal(*weights)


def failed_inits(kv: KVStore) -> list[str]:
    """Fail init on rank 1, by its shape or its memory, and repeat it."""
    other = torch.zeros(2 + kv.rank)
    found = [
        said(lambda: kv.init("a", other)),
        said(lambda: kv.init("a", other, async_op=True).wait()),
        said(lambda: kv.broadcast("a", other, other, async_op=True).wait()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        if kv.rank:
            patch.setattr(torch, "empty_like", _out_of_memory)
        found.append(said(lambda: kv.init("a", torch.zeros(2))))
    assert "a" not in kv
    kv.init("a", torch.full((2,), 3.0))
    kv.push("a", torch.ones(2))
    kv.pull("a", out := torch.empty(2))
    return [*found, str(out.tolist())]


def test_an_init_that_fails_on_one_rank_fails_on_all_and_leaves_no_key(told: Told) -> None:
    first, second = told[failed_inits]
    assert first == second
    assert all(text.startswith("MismatchError: init: key 'a' is (2,) of torch.float32 on rank 0") for text in first[:3])
    assert first[3].startswith("MismatchError: rank 1 of 2: init was refused: no memory for 1 GiB")
    assert first[4] == "[2.0, 2.0]"


def mixed_pushes(kv: KVStore) -> tuple[str, float]:
    kv.init("w", torch.zeros(1))
    ones = torch.ones(1)
    error = said(lambda: kv.push_weighted("w", ones, 2.0) if kv.rank else kv.push("w", ones))
    kv.push_weighted("w", ones, 1.0 + kv.rank)
    kv.pull("w", out := torch.zeros(1))
    return error, out.item()


def test_push_on_one_rank_and_push_weighted_on_another_is_an_error_on_both(told: Told) -> None:
    first, second = told[mixed_pushes]
    assert first == second
    assert "MismatchError: the workers' calls differ: rank 0 called push of ['w'], rank 1 called weighted" in first[0]
    assert first[1] == 1.0  # the next step is the weighted mean of ones


@pytest.mark.parametrize("name", ["local", "device"])
def test_an_init_without_memory_leaves_no_key(name: str) -> None:
    huge = torch.zeros(1).expand(1 << 45)
    with create(name) as kv:
        for is_async in (False, True):
            with pytest.raises(RuntimeError, match="memory"):
                kv.init(["a", "w"], [torch.zeros(2), huge], async_op=is_async).wait()
            assert "a" not in kv
            assert "w" not in kv
        kv.init("w", torch.ones(2))
        kv.push("w", torch.zeros(2))


def states_of_rank_0(kv: KVStore) -> list[str]:
    kv.init("w", torch.zeros(2))
    found = [] if kv.rank else [said(lambda: kv.save_optimizer_states("/nowhere/states"))]
    kv.push("w", torch.ones(2))
    return found


def test_rank_0_alone_learns_at_once_that_there_are_no_states_to_save(told: Told) -> None:
    (found,), nothing = told[states_of_rank_0]
    assert found == "RuntimeError: save_optimizer_states needs an optimizer; call set_optimizer first"
    assert nothing == []


def rates(kv: KVStore) -> list[Any]:
    kv.init("w", torch.zeros(1))
    kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        log = "gangline.kvstore.allreduce.store._log.warning"
        patch.setattr(log, lambda text, *rest: lines.append(text % rest))
        for rank_0, rank_1 in ((0.5, 0.5), (None, 0.25), (0.125, None)):
            rate = rank_1 if kv.rank else rank_0
            if rate is not None:
                kv.set_learning_rate(rate)
            kv.push("w", torch.ones(1))
    kv.pull("w", out := torch.empty(1))
    return [float(out), kv.learning_rate, lines]


def test_a_learning_rate_of_another_rank_than_0_is_a_warning(told: Told) -> None:
    first, second = told[rates]
    assert first == [-2.25, 0.125, []]
    assert second[:2] == first[:2]
    assert second[2] == [
        "set_learning_rate(0.25) on rank 1 has no effect: rank 0's learning rate 0.5 counts; set it there"
    ]
