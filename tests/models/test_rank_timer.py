"""The compute time of a rank: which parts of a step count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from gangline.models.load_balance.speed_model import totals
from gangline.models.unequal_ranks.rank_timer import RankTimer, inner_module


class Clock:
    """A clock that advances by 1 whenever it is read, and by 100 in `wait`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("gangline.models.unequal_ranks.rank_timer.time.perf_counter", self.read)

    def read(self) -> float:
        self.now += 1
        return self.now

    def wait(self, *_: object) -> None:
        self.now += 100


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("backward failed")


X = torch.ones(2, 3)


def test_forward_and_backward_count_and_what_is_between_does_not(clock: Clock) -> None:
    model = nn.Linear(3, 1)
    timer = RankTimer(model)
    for _ in range(2):
        loss = model(X).sum()
        clock.wait()
        loss.backward()
        clock.wait()
    assert timer.take().seconds() == 4
    assert timer.take().seconds() is None


def test_evaluation_does_not_count(clock: Clock) -> None:
    model = nn.Linear(3, 1)
    timer = RankTimer(model)
    with torch.no_grad():
        model(X)
    model.eval()
    model(X)
    assert timer.take().seconds() is None
    assert clock.now == 0


def test_backward_of_an_unknown_wrapper_counts_as_twice_its_forward(clock: Clock) -> None:
    model = Wrapper(Wrapper(nn.Linear(3, 1)))
    assert inner_module(model) is model.module.module
    timer = RankTimer(model)
    model(X).sum().register_hook(clock.wait)
    model(X).sum().backward()
    assert timer.take().seconds() == 6


def test_layers_that_backward_computes_again_count_once(clock: Clock) -> None:
    model = nn.Linear(3, 1)
    timer = RankTimer(model)
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert timer.take().seconds() == 2
    assert clock.now == 4


def test_time_is_measured_again_after_a_backward_that_failed(clock: Clock) -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    hook = model.register_forward_pre_hook(lambda _, inputs: (Failing.apply(inputs[0]),))  # type: ignore[no-untyped-call]
    timer = RankTimer(model)
    with pytest.raises(ArithmeticError):
        model(X.clone().requires_grad_()).sum().backward()
    hook.remove()
    timer.take()
    model(X).sum().backward()
    assert timer.take().seconds() == 2
    assert clock.now == 7


def test_a_closed_timer_leaves_no_hooks(clock: Clock) -> None:
    model = nn.Linear(3, 1)
    RankTimer(model).close()
    model(X).sum().backward()
    assert clock.now == 0


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], (0, 0.0)),
        ([(2, 1.0), (2, 9.0)], (4, 10.0)),
        ([(2, 1.0), (2, 1.0), (2, 1.0), (2, 9.0)], (8, 4.0)),  # one stall does not count
        ([(2, 1.0), (2, 9.0), (2, 1.0), (2, 9.0)], (8, 20.0)),  # pauses that repeat do
        ([(2, 1.0), (4, 2.0), (2, 1.0), (4, 40.0)], (12, 6.0)),
    ],
)
def test_sums_of_a_look(measured: list[tuple[int, float]], expected: tuple[int, float]) -> None:
    assert totals(measured) == pytest.approx(expected)


def test_the_time_of_an_fsdp_rank_leaves_out_its_gathers(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather = getattr(dist, name)

    def slow_gather(*args: Any, **options: Any) -> Any:
        clock.wait()
        return gather(*args, **options)

    monkeypatch.setattr(dist, name, slow_gather)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # its gathers take no time
    try:
        units: list[nn.Module] = [fully_shard(nn.Linear(3, 4)), fully_shard(nn.Linear(4, 1))]
        model = nn.Sequential(*units)
        timer = RankTimer(model)
        for _ in range(3):
            model(X).sum().backward()
    finally:
        dist.destroy_process_group()
    found = timer.take()
    assert found.waits.on_host == 3 * 2 * (100 + 1)  # a wait ends with one more reading of the clock
    assert found.seconds() == 3 * (1 + 2) * 3  # backward counts as twice of what is left of forward
