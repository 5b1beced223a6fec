"""work_load_list="auto": contexts of known speeds get their shares, and contexts with little memory micro-steps.

A layer waits for each sample in simulated time, so that speeds do not depend on the machine.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import distance, in_backward, labelled, plain_loop, replicas_are_equal, same_bits
from simulated_time import simulated_time
from torch import nn

from gangline import Module, cpu
from gangline.bench.unequal.waiting_network import WaitingNetwork, slow_down
from gangline.kvstore.workload import split_batch
from gangline.models.checkpoint import checkpoint

FEATURES, CLASSES = 6, 3
UNLIMITED = 1000
PAIR = [cpu(0), cpu(1)]
RATE = {"lr": 0.05, "momentum": 0.9}


@pytest.fixture(autouse=True)
def _simulated_time() -> Iterator[None]:
    with simulated_time():
        yield


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [labelled(size, FEATURES, CLASSES, seed=number, dtype=torch.float64) for number in range(count)]


def waiting(seconds: Sequence[float], loads: Any = "auto") -> Module:
    torch.manual_seed(1)
    network = WaitingNetwork(FEATURES, CLASSES).double()
    module = Module(network, nn.CrossEntropyLoss(), [cpu(index) for index in range(len(seconds))], loads)
    slow_down(module, seconds)
    module.init_optimizer("device", "sgd", dict(RATE))
    return module


def share_of_first(module: Module, size: int = 32) -> int:
    return split_batch(size, module.work_load_list)[0].stop


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ((3e-3, 1e-3), [8, 24]),
        ((5e-4, 5e-3), [29, 3]),
        ((5e-4, 1e-3, 2e-3), [20, 10, 5]),
    ],
)
def test_shares_follow_the_speeds(seconds: Sequence[float], shares: list[int]) -> None:
    size = sum(shares)
    with waiting(seconds) as module:
        assert len(set(module.work_load_list)) == 1
        module.fit(batches(6, size), num_epoch=3)
        assert [part.stop - part.start for part in split_batch(size, module.work_load_list)] == shares


@pytest.mark.parametrize("loads", [[3, 1], "auto"])
def test_no_context_gets_a_single_sample_if_the_network_normalizes_batches(loads: Any) -> None:
    network = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)).double()
    with Module(network, nn.CrossEntropyLoss(), PAIR, loads) as module:
        module.fit([*batches(2, 8), *batches(1, 4), *batches(1, 3)], num_epoch=2, optimizer_params=dict(RATE))
        assert all(value.isfinite().all() for value in module.get_params().values())


def test_loops_of_the_users_own_are_balanced_too() -> None:
    with waiting([1e-3, 3e-3]) as module:
        for data, label in batches(10, 32):
            module.forward(data, label, is_train=True)
            module.backward()
            module.update()
        assert share_of_first(module) == 24


def test_the_split_is_logged_and_scoring_does_not_move_it(caplog: pytest.LogCaptureFixture) -> None:
    with waiting([5e-4, 5e-4]) as module, caplog.at_level(logging.INFO, "gangline"):
        module.fit(batches(6, 8), num_epoch=2)
        slow_down(module, [0.0, 1e-3])
        module.score(batches(6, 8))
        assert module.work_load_list == [0.5, 0.5]
    lines = [line for line in caplog.messages if line.startswith("work_load_list auto: cpu(0) ")]
    assert lines
    assert all(line.endswith("contexts on one device stay equal unless one is much slower") for line in lines)


def test_weights_are_those_of_one_device_though_the_split_changes() -> None:
    data = [*batches(8, 24), *batches(1, 7)]
    with waiting([2e-4, 2e-3]) as module:
        reference = copy.deepcopy(module.network)
        splits = set()
        module.fit(data, num_epoch=3, batch_end_callback=lambda _: splits.add(tuple(module.work_load_list)))
        assert len(splits) > 1
        assert distance(module.get_params(), plain_loop(reference, data * 3, **RATE)) <= 1e-9
        replicas_are_equal(module)


@pytest.mark.parametrize(("saved", "resumed"), [([3, 1], "auto"), ("auto", [3, 1]), ("auto", "auto")])
def test_a_checkpoint_holds_the_split_unless_loads_are_fixed_before_or_after(
    tmp_path: Path, saved: Any, resumed: Any
) -> None:
    with waiting([5e-4, 2e-3], saved) as module:
        module.fit(batches(6, 32), num_epoch=2)
        module.save_checkpoint(tmp_path / "net", 2, save_optimizer_states=True)
        weights, loads = module.get_params(), module.work_load_list
        assert loads[0] > loads[1]
    with waiting([5e-4, 2e-3], resumed) as module:
        module.resume(checkpoint.read(tmp_path / "net", 2))
        assert module.work_load_list == (loads if saved == resumed else [0.5, 0.5] if resumed == "auto" else [3, 1])
        assert same_bits(weights, module.get_params())
        if saved == resumed:
            module.fit(batches(6, 32), num_epoch=3, begin_epoch=2)
            assert share_of_first(module) == 26


class Small(nn.Module):
    """Network with batch statistics, two linear layers, and between them a layer with a limit on samples.

    An error in backward leaves the last layer's gradients, one in forward leaves changed statistics.
    """

    def __init__(self, *, statistics: bool, dropout: bool) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(FEATURES, affine=False) if statistics else None
        self.first = nn.Linear(FEATURES, 5)
        self.dropout = nn.Dropout(0.4 if dropout else 0.0)
        self.last = nn.Linear(5, CLASSES)
        self.limit = UNLIMITED
        self.strikes_in = "forward"
        self.ran: list[int] = []
        """Numbers of samples for which forward succeeded."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden = data if self.statistics is None else self.statistics(data)
        hidden = self.dropout(self.first(hidden))
        too_many = self.training and len(data) > self.limit

        def strike() -> None:
            if too_many:
                raise torch.OutOfMemoryError("no memory left")

        if self.strikes_in == "forward":
            strike()
        hidden = in_backward(hidden, strike)
        if self.training and not too_many:
            self.ran.append(len(data))
        output: torch.Tensor = self.last(hidden)
        return output


def small(
    limits: Sequence[int], strikes_in: str = "forward", *, statistics: bool = False, dropout: bool = False
) -> Module:
    torch.manual_seed(4)
    network = Small(statistics=statistics, dropout=dropout).double()
    module = Module(network, nn.CrossEntropyLoss(), [cpu(index) for index in range(len(limits))], "auto")
    for double, limit in zip(doubles(module), limits, strict=True):
        double.limit, double.strikes_in = limit, strikes_in
    module.init_optimizer("device", "sgd", dict(RATE))
    return module


def doubles(module: Module) -> Iterator[Small]:
    for replica in module.bound.replicas.all:
        assert isinstance(replica.network, Small)
        yield replica.network


@pytest.mark.parametrize("strikes_in", ["forward", "backward"])
@pytest.mark.parametrize("limits", [(UNLIMITED, 5), (3, UNLIMITED), (3, 2), (1, 1)])
def test_a_batch_that_does_not_fit_is_run_again_and_nothing_is_lost(strikes_in: str, limits: Sequence[int]) -> None:
    data = [*batches(5, 16), *batches(1, 7)]
    with small(limits, strikes_in) as module:
        reference = copy.deepcopy(module.network)
        reference.limit = UNLIMITED  # type: ignore[assignment]
        module.fit(data, num_epoch=2)
        assert distance(module.get_params(), plain_loop(reference, data * 2, **RATE)) <= 1e-9
        assert all(max(double.ran) <= double.limit for double in doubles(module) if double.ran)


@pytest.mark.parametrize("strikes_in", ["forward", "backward"])
def test_outputs_loss_and_gradients_of_a_batch_in_micro_steps_are_the_whole_batchs_which_is_logged_once(
    strikes_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    ((data, label),) = batches(1, 16)
    with small([UNLIMITED, 4], strikes_in) as module, caplog.at_level(logging.INFO, "gangline"):
        reference = copy.deepcopy(module.network)
        module.forward_backward(data, label)
        output = reference(data)
        loss = nn.functional.cross_entropy(output, label)
        loss.backward()
        torch.testing.assert_close(module.get_outputs(), output.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(module.get_loss(), loss.detach(), rtol=0, atol=1e-12)
        for name, parameter in reference.named_parameters():
            summed = sum(dict(double.named_parameters())[name].grad for double in doubles(module))  # type: ignore[misc]
            torch.testing.assert_close(summed, parameter.grad, rtol=0, atol=1e-12)
        module.update()
        module.forward_backward(data, label)
    lines = [line for line in caplog.messages if "micro-steps" in line]
    assert [("cpu(0)" in line, "cpu(1)" in line) for line in lines] == [(False, True)]


def test_a_sample_that_does_not_fit_alone_is_an_error_and_leaves_the_weights() -> None:
    ((data, label),) = batches(1, 8)
    with small([UNLIMITED, 0]) as module:
        before = copy.deepcopy(module.get_params())
        with pytest.raises(torch.OutOfMemoryError, match=r"(?s)no memory left.*in the replica on cpu\(1\)"):
            module.forward_backward_update(data, label)
        assert distance(module.get_params(), before) == 0


@pytest.mark.parametrize("strikes_in", ["forward", "backward"])
def test_running_statistics_know_nothing_of_attempts_that_failed(strikes_in: str) -> None:
    ((data, label),) = batches(1, 16)
    with small([8], strikes_in, statistics=True) as module:
        expected = nn.BatchNorm1d(FEATURES, affine=False).double()
        module.forward_backward_update(data, label)
        (double,) = doubles(module)
        assert sum(double.ran) == 16
        assert max(double.ran) <= 8
        for part in data.split(double.ran):
            expected(part)
        statistics = double.statistics
        assert statistics is not None
        assert statistics.num_batches_tracked == len(double.ran)
        torch.testing.assert_close(statistics.running_mean, expected.running_mean, rtol=0, atol=0)
        torch.testing.assert_close(statistics.running_var, expected.running_var, rtol=0, atol=0)
        assert module.bound.replicas.all[0].samples_seen == 16


@pytest.mark.parametrize("strikes_in", ["forward", "backward"])
def test_the_random_streams_know_nothing_of_attempts_that_failed(strikes_in: str) -> None:
    def run(fails: bool) -> dict[str, torch.Tensor]:
        with small([5 if fails else UNLIMITED], strikes_in, dropout=True) as module:
            if not fails:  # begin with the limits that the other run learns
                module.load_balancer.limits.max_samples = [4]
            module.run_state.seed = 3
            state = torch.get_rng_state()
            for data, label in batches(4, 16):
                module.forward_backward_update(data, label)
            assert torch.equal(torch.get_rng_state(), state)
            return module.get_params()

    failing = run(True)
    assert same_bits(failing, run(False))
    assert same_bits(failing, run(True))
