"""The number of samples that fit into this rank's memory, under real limits of the kernel."""

from __future__ import annotations

import os
import resource
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gangline.models.executor.executor import is_out_of_memory
from gangline.models.unequal_ranks.rank_memory import (
    MemoryLimit,
    RankMemory,
    call_with_batch,
    samples_of,
    tightest_limit,
)
from gangline.models.unequal_ranks.split_controller import check_room, split_within
from tests.collectives.processes import Processes, Rank

SAMPLES = 48
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
Pair = namedtuple("Pair", "x y")


class Wide(nn.Module):
    """A module with activations of 4 MiB a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1 << 18))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x) * self.weight
        for _ in range(2):
            hidden = (hidden * self.weight).sin()
        return hidden.mean(1)


def status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def limit_address_space(spare: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + spare, resource.RLIM_INFINITY))


def limit_data(spare: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + spare, resource.RLIM_INFINITY))


def step(model: nn.Module, samples: int) -> str:
    """Train one step; return "out of memory" if it raises that."""
    try:
        model(torch.rand(samples, 1)).sum().backward()
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else str(error)
    return ""


def measure(rank: Rank, limit: str, spare: int) -> None:
    torch.manual_seed(3)
    model = Wide()
    step(model, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model.weight.grad
    assert gradient is not None
    was = gradient.clone()
    if limit == "cgroup":
        rank.tell("ready")
        rank.hear()
    else:
        {"address space": limit_address_space, "data": limit_data}[limit](spare)
    memory = RankMemory(model)
    memory.try_batch(lambda: (torch.rand(SAMPLES, 1), torch.zeros(SAMPLES)), SAMPLES)
    unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    unchanged &= model.weight.grad is gradient and torch.equal(gradient, was)
    fits = memory.max_samples()
    assert fits is not None
    assert memory.memory is not None
    rank.tell([memory.memory.name, fits, unchanged, step(model, fits), limit == "cgroup" or step(model, SAMPLES)])


@pytest.mark.parametrize(("limit", "name"), [("address space", "RLIMIT_AS"), ("data", "RLIMIT_DATA")])
def test_the_trial_finds_how_many_samples_fit_under_a_limit(limit: str, name: str) -> None:
    with Processes(measure, 1, limit, 128 << 20) as processes:
        found, fits, unchanged, at_limit, above = processes.heard(0)
    assert found == name
    assert unchanged
    assert 5 <= fits <= 32  # 128 MiB hold at most 32 samples of 4 MiB
    assert at_limit == ""
    assert above == "out of memory"


@pytest.mark.skipif(not os.access(MEMORY_CGROUP / "cgroup.procs", os.W_OK), reason="needs a writable memory cgroup")
def test_the_trial_stays_below_the_limit_of_a_cgroup_that_kills() -> None:
    group = MEMORY_CGROUP / f"gangline-test-{os.getpid()}"
    group.mkdir()
    try:
        with Processes(measure, 1, "cgroup", 0) as processes:
            assert processes.heard(0) == "ready"
            pid = processes._pool.pids[0]
            (group / "memory.limit_in_bytes").write_text(str(400 << 20))
            (group / "cgroup.procs").write_text(str(pid))
            processes.say(0, "go")
            found, fits, unchanged, at_limit, _ = processes.heard(0)
    finally:
        group.rmdir()
    assert found == str(group)
    assert unchanged
    assert fits > 0
    assert at_limit == ""


def test_without_a_limit_nothing_is_tried() -> None:
    if tightest_limit(torch.device("cpu")) is not None:
        pytest.skip("this machine limits the memory of tests")
    calls: list[int] = []
    memory = RankMemory(Wide(), lambda _, batch: calls.append(len(batch)))
    memory.try_batch(lambda: torch.rand(4, 1), 4)
    memory.record_step(4)
    assert calls == []
    assert memory.max_samples() is None


# -- peaks of steps ---------------------------------------------------------------------------------------------------


def with_peaks(limit: int, *peaks: int) -> RankMemory:
    """Return a memory of a process that uses 100 bytes, and then has these peaks."""
    memory = RankMemory(nn.Linear(1, 1))
    left = list(peaks)
    memory.memory = MemoryLimit("test", limit, lambda: 100, lambda: left.pop(0))
    memory._fixed, memory._margin = 100, 45
    return memory


def test_peaks_of_two_shares_give_the_line() -> None:
    memory = with_peaks(1000, 300, 400)
    memory.record_step(10)
    assert memory.max_samples() == 10 + int(0.9 * (955 - 300) / 20)
    memory.record_step(20)
    assert memory.max_samples() == 20 + int(0.9 * (955 - 400) / 10)


def test_what_appears_after_the_first_step_lowers_the_limit() -> None:
    memory = with_peaks(1000, 300, 500)
    memory.record_step(10)
    memory.record_step(10)
    assert memory.max_samples() == 10 + int(0.9 * (955 - 500) / 20)


def test_a_share_that_ran_is_never_above_the_limit() -> None:
    memory = with_peaks(1000, 999)
    memory.record_step(50)
    assert memory.max_samples() == 50


# -- room for the global batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "text"),
    [
        ([10, 20], r"batch of 64 samples does not fit .*: rank 0 10, rank 1 20, together 30; pass global_batch=30 or"),
        ([None, 0], "not even one sample fits into the memory of rank 1; use a smaller model"),
    ],
)
def test_a_global_batch_that_fits_nowhere_is_an_error(caps: list[int | None], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_room(64, caps)


@pytest.mark.parametrize("caps", [[None, 1], [32, 32], [None, None]])
def test_a_global_batch_that_fits_is_none(caps: list[int | None]) -> None:
    check_room(64, caps)


@pytest.mark.parametrize(
    ("samples", "loads", "caps", "counts"),
    [
        (64, [3, 1], [None, None], [48, 16]),
        (64, [3, 1], [40, None], [40, 24]),
        (64, [3, 1], [40, 24], [40, 24]),
        (60, [4, 2, 1], [20, None, None], [20, 27, 13]),
        (60, [4, 2, 1], [20, 25, None], [20, 25, 15]),
        (2, [1, 1, 1], [None, None, None], [1, 1, 0]),
        (10, [1000, 1], [None, 3], [9, 1]),
    ],
)
def test_what_exceeds_a_cap_goes_to_the_others(
    samples: int, loads: list[float], caps: list[int | None], counts: list[int]
) -> None:
    assert split_within(samples, loads, caps) == counts


# -- calls of the module ----------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return x * mask * scale


class Named(nn.Module):
    def forward(self, x: Tensor, **more: Tensor) -> int:
        return len(x) + len(more)


X, Y = torch.ones(4, 2), torch.zeros(4)


@pytest.mark.parametrize(
    ("model", "batch", "want"),
    [
        (nn.Identity(), X, X),
        (nn.Identity(), (X, Y), X),
        (nn.Identity(), [X, Y, Y], X),
        (Two(), (X, X, Y), X),
        (Two(), {"x": X, "mask": X, "labels": Y}, X),
        (Named(), {"x": X, "labels": Y}, 5),
    ],
)
def test_the_call_is_derived_from_the_batch_and_the_signature(model: nn.Module, batch: Any, want: Any) -> None:
    got = call_with_batch(model, batch)
    assert got is want or (torch.equal(got, want) if isinstance(want, Tensor) else got == want)


def test_samples_of_nested_batches() -> None:
    batch = {"x": X, "pair": Pair(X, Y), "names": ["a", "b", "c", "d"], "weight": torch.ones(3), "kind": "train"}
    part = samples_of(batch, 3, 4, torch.device("cpu"))
    assert {name: len(part[name]) for name in ("x", "names", "weight")} == {"x": 3, "names": 3, "weight": 3}
    assert isinstance(part["pair"], Pair)
    assert [len(tensor) for tensor in part["pair"]] == [3, 3]
    assert part["kind"] == "train"


def test_a_call_that_fails_leaves_the_limit_open_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(model: nn.Module, batch: Any) -> Any:
        raise KeyError("pixels")

    limit = MemoryLimit("test", 1 << 30, lambda: 100, lambda: 300)
    monkeypatch.setattr("gangline.models.unequal_ranks.rank_memory.tightest_limit", lambda _: limit)
    memory = RankMemory(nn.Identity(), fails)
    memory.try_batch(lambda: X, 4)
    assert "calling the model with a batch failed with KeyError: 'pixels'; pass call=" in caplog.text
    assert memory.max_samples() is None
