"""Tests of `Trainer` over every store, with one and with several worker processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gangline import Communicator, DistributedOptimizer, spawn
from gangline.kvstore import Trainer, create
from tests.collectives.ranks import in_threads


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batches(steps: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randn(size, 5, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (size,), generator=generator),
        )


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest ||a - b|| / ||b|| over all parameters."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)) for a, b in pairs)


# Alone


@pytest.mark.parametrize("store", ["local", "device"])
def test_with_one_worker_a_step_updates_the_stores_weights_and_nothing_is_pulled(store: str) -> None:
    model = network()
    with create(store) as kv:
        trainer = Trainer(model, "adam", {"lr": 0.1, "weight_decay": 0.01}, kv)
        for x, y in batches(5, 8):
            trainer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            trainer.step(8)
            for name, parameter in model.named_parameters():
                assert kv._entries[name].stored.data_ptr() == parameter.data_ptr()  # type: ignore[attr-defined]
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_way_to_name_parameters() -> None:
    for give, keys in (
        (lambda model: model, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (lambda model: model.named_parameters(), ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (lambda model: dict(model.named_parameters()), ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (lambda model: model.parameters(), [0, 1, 2, 3]),
    ):
        trainer = Trainer(give(network()), "sgd")
        assert all(key in trainer.kvstore for key in keys)
        assert 4 not in trainer.kvstore
        assert trainer.kvstore.type == "device"


def test_a_step_without_any_gradient_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    trainer = Trainer(model, "sgd", {"learning_rate": 0.1})
    trainer.step(0)
    assert not caplog.messages
    for _ in range(2):
        trainer.step(4)
    (message,) = caplog.messages
    assert message.startswith("step(4) found no gradient, so it changes nothing:")


def test_wrong_arguments_are_named_and_a_trainer_can_then_be_made_on_the_store() -> None:
    model, kv = network(), create("local")
    for arguments, error, words in (
        ((model[0].weight, "sgd"), TypeError, "params is a single tensor"),
        (([3], "sgd"), TypeError, "parameter 0 is a int"),
        (([], "sgd"), ValueError, "params has no parameters"),
        (([model[0].bias, model[0].bias * 2], "sgd", {}, kv), ValueError, "is the result of a computation"),
        (([model[0].bias, model[0].bias], "sgd", {}, kv), ValueError, "parameter 1 occurs twice"),
        ((model, "sgd", {}, None), TypeError, "kvstore is None"),
        ((model, "nonsense"), ValueError, "optimizer 'nonsense' is unknown"),
        ((model, "sgd", {"lr_mult": {"nobody": 2.0}}), ValueError, "lr_mult names"),
    ):
        with pytest.raises(error, match=words):
            Trainer(*arguments)
    with pytest.raises(ValueError, match="loss_reduction is 'max'; expected one of mean, sum"):
        Trainer(model, "sgd", loss_reduction="max")
    trainer = Trainer(model, "sgd", {}, kv)
    with pytest.raises(ValueError, match="holds keys"):
        Trainer(model, "sgd", {}, kv)
    with pytest.raises(ValueError, match="weight is -3"):
        trainer.step(-3)


# Several workers


def trained_by_torch(steps: int, size: int, **arguments: float) -> list[torch.Tensor]:
    """Return the weights after steps of torch's SGD on whole batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **arguments)
    for x, y in batches(steps, size):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


def _joined(comm: Communicator, steps: list[int]) -> Any:
    model = network()
    with create("allreduce", communicator=comm) as kv:
        trainer = Trainer(model, "sgd", {"learning_rate": 0.1}, kv)
        for x, y in batches(steps[comm.rank], 4):
            trainer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            trainer.step(4)
        last = trainer.join()
        return last, weights(model)


def test_a_joined_worker_pulls_the_final_weights() -> None:
    expected = trained_by_torch(5, 4, lr=0.1)
    for last, found in spawn(_joined, 2, [5, 3], threads=1):
        assert last == 0
        assert distance(found, expected) <= 1e-13


# When gradients leave


def _early(comm: Communicator, sizes: list[int]) -> Any:
    """Return the weights after steps whose gradients leave during backward, and the buckets pushed before `step`."""
    model = network(comm.rank)
    before_step = []
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as kv:
        patch.setattr("gangline.kvstore.reducer.reducer.BUCKET_BYTES", 200)
        trainer = Trainer(model, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kv)
        pushes = [0]
        push_bucket = kv.push_bucket

        def counted(*arguments: Any, **options: Any) -> Any:
            pushes[0] += 1
            return push_bucket(*arguments, **options)

        patch.setattr(kv, "push_bucket", counted)
        begin = sum(sizes[: comm.rank])
        own = slice(begin, begin + sizes[comm.rank])
        for x, y in batches(6, sum(sizes)):
            trainer.zero_grad()
            pushes[0] = 0
            trainer.backward(F.cross_entropy(model(x[own]), y[own]), sizes[comm.rank])
            before_step.append(pushes[0])
            trainer.step(sizes[comm.rank])
        trainer.zero_grad()
        trainer.backward(F.cross_entropy(model(x[own]), y[own]), sizes[comm.rank])
        with pytest.raises(ValueError, match=r"step\(\) got 99 samples, but backward\(\) got"):
            trainer.step(99)
    return weights(model), before_step


def test_gradients_leave_during_the_trainers_backward() -> None:
    sizes = [5, 2]
    expected = trained_by_torch(6, sum(sizes), lr=0.1, momentum=0.9)
    for found, before_step in spawn(_early, 2, sizes, threads=1):
        assert distance(found, expected) <= 1e-12
        assert before_step == [0, 3, 3, 3, 3, 3]  # buckets


def test_a_skipped_step_drops_what_a_failed_backward_left() -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    trainer = Trainer(model, "sgd", {"learning_rate": 1.0})
    weights = []
    for x, fails in ((1.0, False), (2.0, True), (3.0, False)):
        trainer.zero_grad()
        model(torch.full((1, 1), x).double()).sum().backward()
        trainer.skip() if fails else trainer.step(1)
        weights.append(float(model.weight.detach()))
    assert weights == [-1, -1, -4]


def _calls_of_a_step(layers: int) -> int:
    """Return the calls of functions, of Python and of C, in a step of a network with two parameters per layer."""
    network = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    trainer = Trainer(network, "sgd", {"lr": 0.1, "momentum": 0.9, "fused": True}, "device")
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for step in range(7):  # the first few sum the weights' bits
        trainer.zero_grad()
        network(torch.ones(1, 2)).sum().backward()
        if step == 6:
            sys.setprofile(count)
        trainer.step(1)
        sys.setprofile(None)
    return calls


def test_a_step_makes_few_calls_for_each_parameter() -> None:
    """29 when this was written; 55 before, when each key was checked and moved by functions of its own."""
    assert (_calls_of_a_step(24) - _calls_of_a_step(4)) / 40 <= 32


def _hooks_after_each_step(comm: Communicator, early_steps: Sequence[bool]) -> list[int]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    counts = []
    with create("allreduce", communicator=comm) as kv:
        trainer = Trainer(network, "sgd", {"lr": 0.1}, kv)
        for is_early in early_steps:
            trainer.zero_grad()
            loss = network(torch.ones(2, 4)).sum()
            if is_early:
                trainer.backward(loss, 2)
            else:
                loss.backward()
            trainer.step(2)
            counts.append(sum(bool(one._post_accumulate_grad_hooks) for one in network.parameters()))
    return counts


def test_hooks_of_gradients_exist_only_where_buckets_leave_during_backward() -> None:
    early_steps = [False, False, True, True, False, False, False]
    assert in_threads(2, _hooks_after_each_step, early_steps) == [[0, 0, 4, 4, 0, 0, 0]] * 2


def _hooks_after_accumulating(comm: Communicator) -> list[int]:
    network, hooks = nn.Linear(4, 2), []
    with create("allreduce", communicator=comm) as kv:
        optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), kv)
        for _ in range(2):
            for _ in range(3):
                with optimizer.no_sync():
                    network(torch.ones(2, 4)).sum().backward()
                hooks += [len(one._post_accumulate_grad_hooks) for one in network.parameters()]
            network(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.close()
    return hooks


def test_a_distributed_optimizer_keeps_its_hooks_while_gradients_are_accumulated() -> None:
    assert in_threads(2, _hooks_after_accumulating) == [[2] * 12] * 2  # its own, and the reducer's
