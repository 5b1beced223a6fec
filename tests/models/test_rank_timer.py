"""The time of a rank's steps: which parts of a step count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from gangline import Communicator, DistributedOptimizer, create, spawn
from gangline.kvstore.allreduce.store import AllReduceStore, CopyResult
from gangline.kvstore.reducer.waits import timers, waiting_for_ranks
from gangline.models.rank_timer import RankTimer, inner_module

X = torch.ones(2, 3)
FORWARD, BACKWARD, WAIT = 2.0, 8.0, 100.0


class Clock:
    """A clock that moves only where a test spends time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, *_: object) -> None:
        self.now += WAIT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def removed_hooks() -> Iterator[None]:
    """Remove the hooks of a test's timers, of which those on optimizers are global."""
    before = set(timers)
    yield
    for timer in set(timers) - before:
        for hook in cast(RankTimer, timer).hooks:
            hook.remove()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # its collectives take no time
    yield
    dist.destroy_process_group()


class _Spending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, fails: bool) -> Tensor:
        ctx.clock, ctx.fails = clock, fails
        clock.spend(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.spend(BACKWARD)
        if ctx.fails:
            raise ArithmeticError("backward failed")
        return gradients[0], None, None


class Spend(nn.Module):
    """A linear layer that takes time in forward and, before the gradient of its weight, in backward."""

    def __init__(self, clock: Clock, features: int = 1) -> None:
        super().__init__()
        self.linear, self.clock, self.fails = nn.Linear(3, features), clock, False

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Spending.apply(self.linear(x), self.clock, self.fails)  # type: ignore[no-untyped-call]
        return output


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def seconds_of(timer: RankTimer, step: Callable[[], object]) -> float | None:
    """Return what counts of a step between the hand-out of its batch and the request of the next one."""
    timer.start()
    step()
    timer.pause()
    time = timer.take()
    assert time is not None
    return time.seconds()


def sgd(*networks: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for network in networks for parameter in network.parameters()], lr=0.1)


@pytest.mark.parametrize("training", [True, False])
def test_a_whole_step_counts_but_from_the_end_of_backward_to_the_optimizer(clock: Clock, training: bool) -> None:
    network = Spend(clock).train(training)
    optimizer, timer = sgd(network), RankTimer([network])

    def step() -> None:
        clock.spend(1)  # such as decoding
        loss = network(X).sum()
        clock.spend(16)
        loss.backward()
        clock.wait()  # all-reduce by hand, clipping
        optimizer.step()
        clock.spend(32)

    for _ in range(2):
        assert seconds_of(timer, step) == 1 + FORWARD + 16 + BACKWARD + 32
    assert timer.take().seconds() is None  # type: ignore[union-attr]


def test_without_an_optimizers_step_only_the_all_reduce_is_left_out(clock: Clock) -> None:
    network = Spend(clock)
    timer = RankTimer([network])
    for parameter in network.parameters():  # as DistributedDataParallel waits for its all-reduce
        parameter.register_hook(lambda _: Variable._execution_engine.queue_callback(clock.wait))  # type: ignore

    def step() -> None:
        network(X).sum().backward()
        clock.spend(32)

    assert seconds_of(timer, step) == FORWARD + BACKWARD + 32


def test_every_backward_of_every_network_counts_with_what_is_between(clock: Clock) -> None:
    first, second, frozen = Spend(clock), Spend(clock), Spend(clock).requires_grad_(False)
    optimizers, timer = [sgd(first), sgd(second)], RankTimer([first, second, frozen])

    def step() -> None:
        for network, optimizer in zip((first, second), optimizers, strict=True):
            (network(X) + frozen(X)).sum().backward()
            clock.spend(1)
            checkpoint(network, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
            clock.wait()
            optimizer.step()

    assert seconds_of(timer, step) == 2 * (3 * FORWARD + 2 * BACKWARD + 1)


def test_time_of_loading_counts_and_time_between_steps_or_of_a_step_that_is_left_does_not(clock: Clock) -> None:
    timer = RankTimer([Spend(clock)])
    clock.wait()
    timer.resume()
    clock.spend(3)
    timer.pause()
    clock.wait()
    assert seconds_of(timer, lambda: clock.spend(4)) == 7
    timer.start()
    clock.wait()
    assert timer.take() is None
    assert seconds_of(timer, lambda: clock.spend(4)) == 4


def test_waits_that_are_marked_do_not_count(clock: Clock) -> None:
    timer = RankTimer([Spend(clock)])

    def step() -> None:
        clock.spend(1)
        with waiting_for_ranks(), waiting_for_ranks():
            clock.wait()
        clock.spend(2)

    assert seconds_of(timer, step) == 3
    with waiting_for_ranks():
        clock.wait()
    assert seconds_of(timer, lambda: None) is None


def test_the_broadcast_of_buffers_does_not_count(clock: Clock, two_ranks: None) -> None:
    network = nn.Sequential(nn.BatchNorm1d(3), Spend(clock))
    model = DistributedDataParallel(network)
    optimizer, timer = sgd(network), RankTimer([model])
    model.register_forward_pre_hook(clock.wait)

    def step() -> None:
        with model.no_sync():
            model(X).sum().backward()
        clock.wait()
        optimizer.step()

    assert seconds_of(timer, step) == FORWARD + BACKWARD


def test_an_unknown_wrapper_counts_three_times_its_forward(clock: Clock) -> None:
    network = Spend(clock)
    model = Wrapper(Wrapper(network))
    assert inner_module(model) is network
    optimizer, timer = sgd(network), RankTimer([model])

    def step() -> None:
        clock.spend(1)
        model(X).sum().backward()
        optimizer.step()
        clock.spend(16)

    for _ in range(2):
        assert seconds_of(timer, step) == 1 + 3 * FORWARD + 16


def test_the_time_of_an_fsdp_rank_leaves_out_its_gathers(
    clock: Clock, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather = getattr(dist, name)

    def slow_gather(*args: Any, **options: Any) -> Any:
        clock.wait()
        return gather(*args, **options)

    monkeypatch.setattr(dist, name, slow_gather)
    units: list[nn.Module] = [fully_shard(Spend(clock, 3)), fully_shard(Spend(clock))]
    model = nn.Sequential(*units)
    timer, optimizer = RankTimer([model]), sgd(model)

    def step() -> None:
        clock.spend(1)
        model(X).sum().backward()
        optimizer.step()
        clock.spend(16)

    for _ in range(3):
        assert seconds_of(timer, step) == 1 + 3 * 2 * FORWARD + 16


def sharded_steps(communicator: Communicator, shard: str) -> tuple[list[float | None], int]:
    """Return what counts of steps whose copies from owners make this rank wait, and the number of these."""
    clock = Clock(pytest.MonkeyPatch())
    store = cast(AllReduceStore, create("allreduce", communicator=communicator))
    network = nn.Sequential(Spend(clock, 3), Spend(clock))
    optimizer = DistributedOptimizer(sgd(network), store, shard=shard, memory=[1, 1], network=network)
    timer, copy, waits = RankTimer([network]), store.copy_from_owners, 0

    def slow_copy(*args: Any, async_op: bool = False, **options: Any) -> Callable[[], CopyResult]:
        wait = copy(*args, async_op=async_op, **options)

        def slow_wait() -> CopyResult:
            nonlocal waits
            waits += 1
            clock.wait()
            return wait()

        if not async_op:
            slow_wait()
        return slow_wait if async_op else wait

    store.copy_from_owners = slow_copy  # type: ignore[method-assign]

    def step() -> None:
        clock.spend(1)
        optimizer.zero_grad()
        network(X).sum().backward()
        optimizer.step()
        clock.spend(16)

    return [seconds_of(timer, step) for _ in range(3)], waits


@pytest.mark.parametrize(("shard", "waits"), [("weights", 3 * 3), ("optimizer", 3)])
def test_copies_from_the_ranks_that_own_weights_do_not_count(shard: str, waits: int) -> None:
    assert spawn(sharded_steps, 2, shard, threads=1) == [([1 + 2 * (FORWARD + BACKWARD) + 16] * 3, waits)] * 2


def test_time_is_measured_again_after_a_backward_that_failed(clock: Clock) -> None:
    first, last = Spend(clock), nn.Linear(1, 1)
    network = nn.Sequential(first, last)
    timer, first.fails = RankTimer([network]), True
    timer.start()
    with pytest.raises(ArithmeticError):
        network(X).sum().backward()
    timer.take()
    first.fails = False
    assert seconds_of(timer, lambda: network(X).sum().backward()) == FORWARD + BACKWARD


def test_a_batch_that_cannot_be_read_pauses_the_timer() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("unreadable")

    timer = RankTimer([nn.Linear(1, 1)])
    batches = timer.timed(broken())
    assert next(batches) == 1
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    assert not timer.pause()


def test_hooks_do_not_break_the_graph_of_a_compiled_network(clock: Clock) -> None:
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = torch.compile(Wrapper(network), backend="eager", fullgraph=True)
    timer = RankTimer([model])
    assert seconds_of(timer, lambda: (clock.spend(1), model(X).sum().backward())) == 1
