"""shard="optimizer": each worker holds the optimizer's state of the keys that it owns, by memory."""

from __future__ import annotations

import copy
import ctypes
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import distance, mlp, plain_loop
from torch import nn

from gangline import DistributedOptimizer, KVStore, OptimizerSpec, Trainer, create, spawn
from gangline.kvstore.local import LocalStore

STEPS = 20
ADAM = ("adam", {"learning_rate": 0.01, "wd": 0.01})
network = partial(mlp, 10, 40, 30, 20, 4, seed=3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 10, generator=generator).double(), torch.randint(0, 4, (12,), generator=generator)


def part(rank: int, data: torch.Tensor) -> torch.Tensor:
    """Return a worker's samples, of unequal number."""
    return data[:8] if rank == 0 else data[8:]


def state_bytes(store: Any) -> int:
    """Return the bytes of this worker's own state."""
    (group,) = store._groups.all.values()
    state = LocalStore._state_of(store, group)
    return sum(tensor.nbytes for tensor in state.tensors.values())


def train(communicator: Any, memory: Any, folder: str, resumed: bool = False) -> Any:
    """Train by a Trainer; return the weights, the bytes of own state, and the owned bytes."""
    store = create("allreduce", communicator=communicator)
    model = network()
    shard = None if memory is None else "optimizer"
    trainer = Trainer(model, *ADAM, kvstore=store, shard=shard, memory=memory or "auto")
    first = 0
    if resumed:
        model.load_state_dict(torch.load(f"{folder}/weights.pt"))
        trainer.load_states(f"{folder}/state.safetensors")
        first = STEPS // 2
    for step in range(first, STEPS):
        data, label = (part(store.rank, one) for one in batch(step))
        trainer.zero_grad()
        nn.functional.cross_entropy(model(data), label).backward()
        trainer.step(len(data))
        if not resumed and step + 1 == STEPS // 2:
            trainer.save_states(f"{folder}/state.safetensors")
            if not store.rank:
                torch.save(model.state_dict(), f"{folder}/weights.pt")
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    result = found, state_bytes(store), store.owned_bytes
    store.close()
    return result


def alone() -> dict[str, torch.Tensor]:
    """Train as one process, by torch's Adam."""
    batches = [batch(step) for step in range(STEPS)]
    return plain_loop(network(), batches, optimizer=torch.optim.Adam, lr=0.01, weight_decay=0.01)


def adagrad(communicator: Any) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Update two keys, each owned by one worker, by Adagrad; return the state twice and the bytes of own state."""
    states = []
    with create("allreduce", communicator=communicator) as store:
        store.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
        store.set_optimizer(("adagrad", {"lr": 0.1}), shard="optimizer", memory=[1, 1])
        for _ in range(2):
            store.push(["a", "b"], [torch.ones(4), torch.ones(4)])
            states.append(store.optimizer_state().tensors)
        return states, state_bytes(store)


def of_two_workers(communicator: Any, folder: str) -> dict[str, Any]:
    """Train in many ways as one of two workers; return what each showed."""
    wrapped_first = wrapped(communicator, [3, 1])
    misuses(communicator)
    return {
        "first": train(communicator, [3, 1], folder),
        "resumed": [train(communicator, memory, folder, resumed=True) for memory in (None, [0, 1])],
        "wrapped": wrapped_first,
        "wrapped, resumed": wrapped(communicator, [1, 3], wrapped_first[2]),
        "adagrad": adagrad(communicator),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return spawn(of_two_workers, 2, str(folder), threads=1)


def test_the_state_of_each_worker_follows_its_memory_and_a_run_resumes_with_other_owners(
    two: list[dict[str, Any]],
) -> None:
    (_, first, owned), (_, second, same) = (each["first"] for each in two)
    assert owned == same
    assert owned[0] / sum(owned) == pytest.approx(0.75, abs=0.15)  # a key has one owner
    assert first / second == pytest.approx(owned[0] / owned[1], rel=0.02)
    for each in two:
        for weights, _, _ in each["resumed"]:
            assert distance(weights, alone()) <= 1e-11
    [(_, whole, _), (_, none, _)], [_, (_, all_of_it, _)] = (each["resumed"] for each in two)
    assert none == 0
    assert all_of_it == whole


def wrapped(communicator: Any, memory: Any, state: Any = None) -> Any:
    """Train by a DistributedOptimizer; return weights, bytes of own state, and the whole state of the middle."""
    store = create("allreduce", communicator=communicator)
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    optimizer = DistributedOptimizer(inner, store, shard="optimizer", memory=memory)
    first, middle = 0, None
    if state is not None:
        first = STEPS // 2
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in range(first, STEPS):
        data, label = (part(store.rank, one) for one in batch(step))
        optimizer.zero_grad()
        optimizer.weight = len(data)
        nn.functional.cross_entropy(model(data), label).backward()
        optimizer.step()
        if step + 1 == STEPS // 2:
            middle = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    own = sum(one.nbytes for values in inner.state.values() for one in values.values())
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    store.close()
    return found, own, middle


def test_a_distributed_optimizer_shards_and_resumes_with_other_owners(two: list[dict[str, Any]]) -> None:
    (_, first, _), (_, second, middle) = (each["wrapped"] for each in two)
    assert first > 2 * second > 0
    assert len(middle[1]["state"]) == 8
    for each in two:
        assert distance(each["wrapped"][0], alone()) <= 1e-11
        assert distance(each["wrapped, resumed"][0], alone()) <= 1e-11


def test_the_gathered_state_of_an_optimizer_that_begins_with_state_is_that_of_the_owners(
    two: list[dict[str, Any]],
) -> None:
    for states, nbytes in (worker["adagrad"] for worker in two):
        for updates, state in enumerate(states, 1):
            assert {name: tensor.mean().item() for name, tensor in state.items()} == {
                f'"{key}"/{name}': value for key in "ab" for name, value in (("step", updates), ("sum", 4 * updates))
            }
        assert nbytes == 20, "each worker holds the sum and the step of one key"


def misuses(communicator: Any) -> None:
    """Give memory that does not fit, and run a backward after the update of its weights."""
    store = create("allreduce", communicator=communicator)
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"memory is \[1\]; expected 'auto', or a number >= 0 for each of 2 workers"):
        DistributedOptimizer(inner, store, shard="optimizer", memory=[1])
    store.close()
    store = create("allreduce", communicator=communicator)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).double()  # large enough to be copied in place
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), store, shard="optimizer", memory=[1, 1]
    )
    data = torch.ones(3, 100).double().requires_grad_()
    first = model(data).sum()
    model(data).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    store.close()


_M_MMAP_THRESHOLD = -3
"""Of mallopt: larger blocks are mapped and unmapped, each by itself."""


def limited(communicator: Any, memory: list[float], left: int) -> str:
    """Train 24 MiB of weights, with so many MiB left on rank 1 for buckets, state, and what an update needs.

    Freed memory returns to the system at once: malloc would keep what earlier work has freed, beside the limit.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    store = create("allreduce", communicator=communicator)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12))).double()
    trainer = Trainer(model, "adam", {"learning_rate": 1e-4}, store, shard="optimizer", memory=memory)
    data = torch.randn(4, 512).double()
    model(data).square().mean().backward()
    trainer.step(0)  # forms the buckets, and updates nothing
    for _ in range(3):
        trainer.zero_grad()
        model(data).square().mean().backward()
        if store.rank == 1:
            resource.setrlimit(resource.RLIMIT_DATA, (own_data() + (left << 20), resource.RLIM_INFINITY))
        trainer.step(len(data))
    return "trained"


def own_data() -> int:
    """Return the bytes of private memory that RLIMIT_DATA counts."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_a_state_of_which_the_small_worker_cannot_hold_half_trains() -> None:
    """24 MiB of weights have 48 MiB of state: half of it is 24 MiB, a quarter 12."""
    with pytest.raises(RuntimeError, match="memory"):
        spawn(limited, 2, [1, 1], 28, threads=1, timeout=60)
    assert spawn(limited, 2, [3, 1], 28, threads=1, timeout=60) == ["trained", "trained"]


def test_another_word_is_refused_and_one_worker_needs_no_owners() -> None:
    with pytest.raises(ValueError, match="shard is 'state'; expected 'optimizer', 'weights' or None"):
        Trainer(network(), *ADAM, shard="state")
    with pytest.raises(ValueError, match="which is for Module, Trainer and DistributedOptimizer"):
        create("local").set_optimizer(OptimizerSpec.parse(ADAM), shard="weights")
    model = copy.deepcopy(network())
    store: KVStore = create("local")
    trainer = Trainer(model, *ADAM, kvstore=store, shard="optimizer")
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    trainer.step(12)
