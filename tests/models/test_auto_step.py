"""A step: forward and backward in one task, errors and interrupts; exact restarts when memory runs out."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from measure import Watch, distance, in_backward, labelled, plain_loop
from torch import nn

from gangline import Module, cpu, spawn
from gangline.collectives.communicator import Communicator
from gangline.kvstore import create
from gangline.models.executor.device_threads import DeviceThreads

FEATURES, CLASSES, BATCH = 6, 3, 12
RATE = {"lr": 0.05, "momentum": 0.9}
LIMIT = 20.0
"""Seconds after which a test that waits has failed."""


class Net(nn.Module):
    """Four linear layers; ``before`` is called in the middle of forward, and may return an error for backward."""

    detaches = False

    def __init__(self, *, batchnorm: bool = False) -> None:
        super().__init__()
        sizes = [FEATURES, 8, 8, 8, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.before: Callable[[torch.Tensor], Exception | None] = lambda _: None

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layers[1](self.layers[0](data).tanh()).tanh())
        error = self.before(hidden)

        def fail() -> None:
            if error is not None:
                raise error

        hidden = in_backward(hidden, fail)
        output: torch.Tensor = self.layers[3](self.layers[2](hidden).tanh())
        return output.detach() if self.detaches else output


def network(**options: bool) -> Net:
    torch.manual_seed(1)
    return Net(**options).double()


def module_of(loads: Any, store: Any = "device", **options: bool) -> Module:
    module = Module(network(**options), nn.CrossEntropyLoss(), [cpu(0), cpu(1)], loads)
    module.init_optimizer(store, "sgd", dict(RATE))
    return module


def batch(step: int, samples: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled(samples, FEATURES, CLASSES, seed=step, dtype=torch.float64)


def plain(steps: int, samples: int = BATCH) -> dict[str, torch.Tensor]:
    return plain_loop(network(), [batch(step, samples) for step in range(steps)], **RATE)


@pytest.fixture(autouse=True)
def _a_bucket_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.kvstore.reducer.reducer.BUCKET_BYTES", 1)


def out_of_memory(limit: int, times: int = 1) -> Callable[[torch.Tensor], Exception | None]:
    """Return a function for `Net.before`: in backward memory suffices for ``limit`` samples, the first times."""
    left = Counter(errors=times)

    def before(hidden: torch.Tensor) -> Exception | None:
        if not hidden.requires_grad or len(hidden) <= limit or not left["errors"]:
            return None
        left["errors"] -= 1
        return torch.OutOfMemoryError("no memory left")

    return before


@contextmanager
def counting(module: Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count thread tasks, clones, and early and late pushes of the block."""
    counts: Counter[str] = Counter()
    run, store = DeviceThreads.run, module._optimizer.store
    push = store.push_bucket  # type: ignore[union-attr]

    def counted_run(self: DeviceThreads, calls: Any, **options: Any) -> Any:
        counts["tasks"] += len(calls)
        return run(self, calls, **options)

    def counted_push(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        counts["early" if async_op else "late"] += 1
        return push(*arguments, async_op=async_op, **options)

    def count_clone(func: Any, *_: Any) -> None:
        counts["clones"] += func is torch.ops.aten.clone.default

    with monkeypatch.context() as patch, Watch(count_clone):
        patch.setattr(DeviceThreads, "run", counted_run)
        patch.setattr(store, "push_bucket", counted_push)
        yield counts


@pytest.mark.parametrize("loads", ["auto", [1, 1]])
def test_a_step_takes_one_task_per_replica_pushes_early_and_clones_nothing(
    loads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with module_of(loads, batchnorm=True) as module:
        for step in range(2):
            module.forward_backward_update(*batch(step))
        with counting(module, monkeypatch) as counts:
            module.forward_backward_update(*batch(2))
    assert counts == {"tasks": 2, "early": 10, "clones": 0}  # a bucket for each parameter


def test_gradients_that_were_pushed_before_memory_ran_out_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with module_of("auto") as module:
        for step in range(2):
            module.forward_backward_update(*batch(step))
        module.bound.replicas.all[1].network.before = out_of_memory(4)  # type: ignore[assignment]
        with counting(module, monkeypatch) as counts:
            module.forward_backward_update(*batch(2))
        assert (counts["early"], counts["late"]) == (4, 4)  # of two layers each, after and before the error
        module.forward_backward_update(*batch(3))
        assert module.load_balancer.limits.max_samples == [None, 3]  # type: ignore[union-attr]
        assert distance(module.get_params(), plain(4)) <= 1e-12


def test_a_restart_while_gradients_accumulate_keeps_the_weights_of_one_device() -> None:
    with module_of("auto") as module:
        module.grad_req = "add"
        for step in range(4):
            if step == 2:
                module.bound.replicas.all[1].network.before = out_of_memory(2, times=2)  # type: ignore[assignment]
            data, label = batch(step)
            for part in range(2):
                module.forward_backward(data[part::2], label[part::2])
            module.update()
        assert distance(module.get_params(), plain(4)) <= 1e-12


def test_a_step_that_fails_leaves_the_running_statistics() -> None:
    with module_of("auto", batchnorm=True) as module:
        module.forward_backward_update(*batch(0))
        before = module.bound.replicas.own_buffers()
        module.bound.replicas.all[1].network.before = lambda _: ValueError("no such luck")  # type: ignore[assignment]
        with pytest.raises(ValueError, match="no such luck"):
            module.forward_backward_update(*batch(1))
        for name, values in module.bound.replicas.own_buffers().items():
            assert all(torch.equal(now, value) for now, value in zip(values, before[name], strict=True)), name


def restarts_in_a_job(comm: Communicator) -> dict[str, torch.Tensor]:
    with (
        pytest.MonkeyPatch.context() as patch,
        create("allreduce", communicator=comm) as store,
        module_of("auto", store) as module,
    ):
        patch.setattr("gangline.kvstore.reducer.reducer.BUCKET_BYTES", 1)
        for step in range(6):
            data, label = batch(step, 20)
            own = slice(0, 8) if comm.rank == 0 else slice(8, 20)  # unequal parts
            if step == 2 + comm.rank:  # one after the other
                module.bound.replicas.all[1].network.before = out_of_memory(2)  # type: ignore[assignment]
            module.forward_backward_update(data[own], label[own])
        assert module.load_balancer is not None
        assert module.load_balancer.limits.max_samples[1] is not None
        return module.get_params()


def test_a_worker_that_restarts_keeps_the_step_of_all_workers_exact() -> None:
    expected = plain(6, 20)
    for params in spawn(restarts_in_a_job, 2, threads=1):
        assert distance(params, expected) <= 1e-12


@pytest.mark.parametrize("loads", ["auto", [1, 1]])
def test_a_replica_begins_backward_while_another_is_in_forward(loads: Any) -> None:
    came = threading.Event()
    with module_of(loads) as module:
        module.forward_backward_update(*batch(0))  # the first step shows that the network draws no random numbers
        first, second = (replica.network for replica in module.bound.replicas.all)
        first.layers[3].bias.register_post_accumulate_grad_hook(lambda _: came.set())  # type: ignore[index, union-attr]
        second.before = lambda _: None if came.wait(LIMIT) else ValueError("no gradient came")  # type: ignore[assignment]
        module.forward_backward_update(*batch(1))
    assert came.is_set()


def test_after_a_failed_forward_or_a_loss_of_no_parameter_gradients_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("no such luck")

    with module_of([1, 1]) as module:
        for step in range(2):
            module.forward_backward_update(*batch(step))
        second, before = module.bound.replicas.all[1].network, module.get_params()
        second.before = fail  # type: ignore[assignment]
        with pytest.raises(ValueError, match="no such luck") as caught:
            module.forward_backward_update(*batch(7))
        assert any("cpu(1)" in note for note in caught.value.__notes__)
        second.before = lambda _: None  # type: ignore[assignment]
        assert distance(module.get_params(), before) == 0
        with pytest.raises(RuntimeError, match="came before backward"):
            module.update()
        monkeypatch.setattr(Net, "detaches", True)
        with pytest.raises(RuntimeError, match="depends on no parameter"):
            module.forward_backward_update(*batch(7))
        monkeypatch.setattr(Net, "detaches", False)
        module.forward_backward_update(*batch(2))
        assert module.step == 3
        assert distance(module.get_params(), plain(3)) <= 1e-12


@pytest.mark.parametrize("loads", ["auto", [1, 1]])
def test_after_ctrl_c_all_contexts_have_ended_and_the_next_step_has_its_own_gradients(loads: Any) -> None:
    received, has_left, left_early = threading.Event(), threading.Event(), list[bool]()

    def handler(*_: object) -> None:
        received.set()
        raise KeyboardInterrupt

    def before(hidden: torch.Tensor) -> None:
        if hidden.requires_grad and not received.is_set():
            until = time.monotonic() + LIMIT
            while not received.is_set() and time.monotonic() < until:  # one that comes just before a wait wakes nobody
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                received.wait(0.1)
            for _ in range(100):  # work that goes on while the main thread could leave the step
                torch.ones(100, 100) @ torch.ones(100, 100)
            left_early.append(has_left.is_set())

    previous = signal.signal(signal.SIGINT, handler)
    try:
        with module_of(loads) as module:
            for step in range(2):
                module.forward_backward_update(*batch(step))
            module.bound.replicas.all[1].network.before = before  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                module.forward_backward_update(*batch(7))
            has_left.set()
            reference = network()
            reference.load_state_dict(module.get_params())
            data, label = batch(2)
            module.forward_backward_update(data, label)
            nn.functional.cross_entropy(reference(data), label).backward()
            for name, parameter in reference.named_parameters():
                summed = sum(dict(r.network.named_parameters())[name].grad for r in module.bound.replicas.all)  # type: ignore[misc]
                torch.testing.assert_close(summed, parameter.grad, rtol=0, atol=1e-12)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert left_early == [False]
