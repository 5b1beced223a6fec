"""DistributedOptimizer(shard="weights"): each worker holds the weights, gradients and state that it owns, by memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline import DistributedOptimizer, create, spawn

STEPS = 20
WORDS, WIDTH = 11, 16


class TiedLanguageModel(nn.Module):
    """Reads the weights of its own parts, as many networks do: a tied output, and attention's projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.embedding(words)
        found = found + self.attention(found, found, found, need_weights=False)[0] * self.scale
        _, (hidden, _) = self.lstm(found)
        return nn.functional.linear(hidden[-1], self.embedding.weight)


class Checkpointed(nn.Module):
    """Computes its middle layers again in backward; its first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 30)
        self.middle = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh())
        self.norm = nn.BatchNorm1d(30, affine=True, track_running_stats=True)
        self.last = nn.Linear(30, WORDS)
        self.norm.eval()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.middle, self.first(data), use_reentrant=False)
        return self.last(self.norm(found))


def mlp() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, WORDS)]
    return nn.Sequential(*layers).double()


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return TiedLanguageModel().double()


def checkpointed() -> nn.Module:
    torch.manual_seed(3)
    network = Checkpointed().double()
    network.first.requires_grad_(False)
    return network


def batch(make: Callable[[], nn.Module], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    label = torch.randint(0, WORDS, (12,), generator=generator)
    if make is language_model:
        return torch.randint(0, WORDS, (12, 5), generator=generator), label
    return torch.randn(12, 10, generator=generator).double(), label


def parts(rank: int, size: int, data: torch.Tensor) -> torch.Tensor:
    """Return a worker's samples, unequal ones."""
    ends = {1: [0, 12], 2: [0, 8, 12], 3: [0, 6, 11, 12]}[size]
    return data[ends[rank] : ends[rank + 1]]


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if isinstance(network, TiedLanguageModel):  # the gradient of attention's key bias is 0 but for rounding errors
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    return torch.optim.Adam(trained, lr=0.01, weight_decay=0.01)


def held_bytes(network: nn.Module, inner: torch.optim.Optimizer) -> list[int]:
    """Return the bytes of weights, gradients and state that are in memory between two steps."""
    weights = sum(one.untyped_storage().nbytes() for one in network.parameters())
    gradients = sum(one.grad.untyped_storage().nbytes() for one in network.parameters() if one.grad is not None)
    return [weights, gradients, sum(one.nbytes for values in inner.state.values() for one in values.values())]


def train(
    communicator: Any,
    make: Callable[[], nn.Module],
    memory: Any,
    clip: float | None = None,
    accumulates: bool = False,
    state: Any = None,
) -> Any:
    """Train by sharded weights; return the state of network and optimizer at half and at the end, and bytes held."""
    store = create("allreduce", communicator=communicator)
    network = make()
    if store.rank:
        for parameter in network.parameters():
            nn.init.zeros_(parameter)  # rank 0's count
    inner = optimizer_of(network)
    optimizer = DistributedOptimizer(inner, store, shard="weights", memory=memory, network=network)
    if state is not None:
        optimizer.load_model_state_dict(state[0] if not store.rank else {})
        optimizer.load_state_dict(state[1])
    middle = None
    for step in range(0 if state is None else STEPS // 2, STEPS):
        data, label = (parts(store.rank, store.num_workers, one) for one in batch(make, step))
        optimizer.zero_grad()
        optimizer.weight = len(data)
        loss = nn.functional.cross_entropy(network(data), label)
        if accumulates:
            with optimizer.no_sync():
                (loss * 0.25).backward()
            (nn.functional.cross_entropy(network(data), label) * 0.5).backward()
            (nn.functional.cross_entropy(network(data), label) * 0.25).backward()
        else:
            loss.backward()
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        if step + 1 == STEPS // 2:
            middle = optimizer.model_state_dict(), optimizer.state_dict()
    held = held_bytes(network, inner)
    found = optimizer.model_state_dict()
    with torch.no_grad():
        evaluated = network(batch(make, 99)[0])
    store.close()
    return found, middle, held, evaluated


def alone(make: Callable[[], nn.Module], clip: float | None = None) -> nn.Module:
    network = make()
    optimizer = optimizer_of(network)
    for step in range(STEPS):
        data, label = batch(make, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(data), label).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return network


def check(found: Any, expected: nn.Module, make: Callable[[], nn.Module]) -> None:
    state = expected.state_dict()
    assert found[0][0].keys() == state.keys()
    assert all(not weights for weights, *_ in found[1:])
    for name, value in state.items():
        assert torch.allclose(found[0][0][name], value, rtol=0, atol=1e-11), name
    for *_, evaluated in found:
        assert torch.allclose(evaluated, expected(batch(make, 99)[0]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [mlp, language_model, checkpointed])
@pytest.mark.parametrize(("size", "memory"), [(2, [3, 1]), (2, "auto"), (3, [1, 0, 2]), (3, [1, 1, 1])])
def test_workers_of_unequal_memory_train_as_one_process(size: int, memory: Any, make: Callable[[], nn.Module]) -> None:
    check(spawn(train, size, make, memory, threads=1), alone(make), make)


def test_a_worker_holds_the_weights_gradients_and_state_that_it_owns() -> None:
    found = spawn(train, 2, mlp, [3, 1], threads=1)
    first, second = (held for _, _, held, _ in found)
    whole = sum(one.nbytes for one in mlp().parameters())
    print("bytes of weights, gradients and state by worker:", first, second)
    placeholders = 8 * 2 * 6
    assert whole <= first[0] + second[0] <= whole + placeholders
    assert whole <= first[1] + second[1] <= whole + placeholders
    assert 2 * second[0] < first[0]
    assert 2 * second[2] < first[2]


def test_gradients_are_clipped_by_their_common_norm() -> None:
    check(spawn(train, 2, mlp, [3, 1], 0.05, threads=1), alone(mlp, 0.05), mlp)


@pytest.mark.parametrize("make", [mlp, checkpointed])
def test_gradients_of_several_backwards_add_up(make: Callable[[], nn.Module]) -> None:
    check(spawn(train, 2, make, [1, 1], None, True, threads=1), alone(make), make)


@pytest.mark.parametrize("memory", [[1, 3], [0, 1]])
def test_a_run_resumes_with_other_owners(memory: Any) -> None:
    _, (weights, _), _, _ = spawn(train, 2, mlp, [3, 1], threads=1)[0]
    state = weights, spawn(train, 2, mlp, [3, 1], threads=1)[1][1][1]
    check(spawn(train, 2, mlp, memory, None, False, state, threads=1), alone(mlp), mlp)


def misused(communicator: Any) -> None:
    store = create("allreduce", communicator=communicator)
    network = mlp()
    optimizer = DistributedOptimizer(optimizer_of(network), store, shard="weights", memory=[1, 1], network=network)
    with pytest.raises(RuntimeError, match=r"call the DistributedOptimizer's model_state_dict\(\)"):
        network.state_dict()
    with pytest.raises(RuntimeError, match=r"call the DistributedOptimizer's model_state_dict\(\)"):
        network.load_state_dict({})
    with pytest.raises(ValueError, match=r"the state does not fit the network; .*'0.bias'"):
        optimizer.load_model_state_dict({})
    others = [one for one in network.parameters() if not one.untyped_storage().nbytes() > 8]
    assert others
    assert all(one.isnan().all() for one in others)
    nn.functional.cross_entropy(network(batch(mlp, 0)[0]), batch(mlp, 0)[1]).backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        nn.utils.clip_grad_norm_(others, 1.0)  # gradients that others have: an error, and no wrong norm
    optimizer.step()
    optimizer.close()
    network.state_dict()
    store.close()


def test_what_would_take_a_part_for_the_whole_is_refused() -> None:
    spawn(misused, 2, threads=1)


def skips(communicator: Any) -> None:
    store = create("allreduce", communicator=communicator)
    network = mlp()
    optimizer = DistributedOptimizer(optimizer_of(network), store, shard="weights", memory=[1, 1], network=network)
    if store.rank:
        optimizer.step()
    else:
        network(batch(mlp, 0)[0])


def test_a_worker_that_leaves_a_forward_out_gets_an_error_as_the_others_do() -> None:
    with pytest.raises(RuntimeError, match=r"copy of 2 parameters from their owners"):
        spawn(skips, 2, threads=1, timeout=30)


def test_the_same_script_runs_with_one_worker() -> None:
    network = mlp()
    optimizer = DistributedOptimizer(optimizer_of(network), "local", shard="weights", network=network)
    state = optimizer.model_state_dict()
    optimizer.load_model_state_dict(state)
    nn.functional.cross_entropy(network(batch(mlp, 0)[0]), batch(mlp, 0)[1]).backward()
    assert optimizer.clip_grad_norm_(1.0) > 0
    optimizer.step()


def test_the_network_is_needed_and_must_have_the_parameters() -> None:
    with pytest.raises(TypeError, match=r"network is None; expected the torch.nn.Module whose weights to divide"):
        DistributedOptimizer(optimizer_of(mlp()), "local", shard="weights")
    with pytest.raises(RuntimeError, match=r"model_state_dict\(\) is for shard='weights'"):
        DistributedOptimizer(optimizer_of(mlp()), "local").model_state_dict()
