"""DistributedOptimizer(shard="weights"): each worker holds the weights, gradients and state that it owns, by memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline import Communicator, DistributedOptimizer, KVStore, Trainer, Work, create, spawn
from gangline.collectives.errors import DeadNodeError, MismatchError
from gangline.kvstore.allreduce.store import AllReduceStore
from tests.collectives.ranks import in_threads, outcomes_in_threads
from tests.kvstore.keyed import Told, work

STEPS = 12
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


def mlp() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, WORDS)]
    return nn.Sequential(*layers).double()


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return TiedLanguageModel().double()


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
    trained = network.parameters()
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
        with optimizer.no_sync():
            (nn.functional.cross_entropy(network(data), label) * 0.25).backward()
        (nn.functional.cross_entropy(network(data), label) * 0.5).backward()
        (nn.functional.cross_entropy(network(data), label) * 0.25).backward()
        optimizer.step()
        if step + 1 == STEPS // 2:
            middle = optimizer.model_state_dict(), optimizer.state_dict()
    held = held_bytes(network, inner)
    found = optimizer.model_state_dict()
    with torch.no_grad():
        evaluated = network(batch(make, 99)[0])
    store.close()
    return found, middle, held, evaluated


def alone(make: Callable[[], nn.Module]) -> nn.Module:
    network = make()
    optimizer = optimizer_of(network)
    for step in range(STEPS):
        data, label = batch(make, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(data), label).backward()
        optimizer.step()
    return network


def check_state(found: dict[str, Any], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        assert torch.allclose(torch.as_tensor(found[name]), torch.as_tensor(value), rtol=0, atol=1e-11), name


def check(found: Any, expected: nn.Module, make: Callable[[], nn.Module]) -> None:
    assert found[0][0].keys() == expected.state_dict().keys()
    assert all(not weights for weights, *_ in found[1:])
    check_state(found[0][0], expected)
    for *_, evaluated in found:
        assert torch.allclose(evaluated, expected(batch(make, 99)[0]), rtol=0, atol=1e-9)


def test_workers_of_unequal_memory_train_as_one_process() -> None:
    check(spawn(train, 3, language_model, [1, 0, 2], threads=1), alone(language_model), language_model)


def test_a_worker_holds_what_it_owns_and_a_run_resumes_with_other_owners() -> None:
    found = spawn(train, 2, mlp, [3, 1], threads=1)
    state = found[0][1][0], found[1][1][1]  # weights of rank 0, optimizer state of rank 1
    check(spawn(train, 2, mlp, [0, 1], state, threads=1), alone(mlp), mlp)
    first, second = (held for _, _, held, _ in found)
    whole = sum(one.nbytes for one in mlp().parameters())
    placeholders = 8 * 2 * 6
    assert whole <= first[0] + second[0] <= whole + placeholders
    assert whole <= first[1] + second[1] <= whole + placeholders
    assert 2 * second[0] < first[0]
    assert 2 * second[2] < first[2]


@pytest.fixture(scope="module")
def told() -> Told:
    return work(2, misused, changes_in_place, joins, used_unusually, clips_a_part)


def wrapped(store: Any, network: nn.Module, memory: Any = (1, 1)) -> DistributedOptimizer:
    return DistributedOptimizer(optimizer_of(network), store, shard="weights", memory=list(memory), network=network)


def loss_of(network: nn.Module, step: int = 0) -> torch.Tensor:
    data, label = batch(mlp, step)
    return nn.functional.cross_entropy(network(data), label)


def misused(store: KVStore) -> None:
    network = mlp()
    optimizer = wrapped(store, network)
    for error, words, call in (
        (RuntimeError, r"call model_state_dict\(\)", network.state_dict),
        (RuntimeError, r"call model_state_dict\(\)", lambda: network.load_state_dict({})),
        (ValueError, "the state does not fit the network; .*'0.bias'", lambda: optimizer.load_model_state_dict({})),
        (ValueError, "another optimizer divides", lambda: wrapped(store, network)),
        (TypeError, "it cannot be copied or pickled; copy model_state_dict", lambda: copy.deepcopy(network)),
    ):
        with pytest.raises(error, match=words):
            call()
    others = [one for one in network.parameters() if one.untyped_storage().nbytes() == 8]
    assert others
    assert all(one.isnan().all() for one in others)
    loss_of(network).backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        nn.utils.clip_grad_norm_(others, 1.0)  # gradients that others have: an error, and no wrong norm
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(one.isnan().all() for one in others)
    optimizer.zero_grad()
    for one in network.parameters():
        one.grad = torch.zeros(one.shape).double()
    with pytest.raises(RuntimeError, match=r"worker 0 has gradients of 0.bias, 0.weight, 2.bias that were assigned"):
        optimizer.step()
    optimizer.zero_grad()
    first = loss_of(network)
    loss_of(network).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"which backward needs, was updated by step\(\)"):
        first.backward()
    optimizer.close()
    with pytest.raises(ValueError, match=r"another optimizer divides, or has divided"):
        wrapped(store, network)


class Changed(nn.Module):
    """Changes a tensor in place that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, WORDS).double()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found = self.layer(data).exp()
        product = found * found
        found += 1
        return product


def changes_in_place(store: KVStore) -> None:
    network = Changed()
    wrapped(store, network)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(network).backward()


def joins(store: KVStore) -> None:
    trainer = Trainer(mlp(), *ADAM, store, shard="weights")
    with pytest.raises(RuntimeError, match=r"expected a backward on any data and step\(0\) in place of join\(\)"):
        trainer.join()


@pytest.mark.parametrize("worker", [misused, changes_in_place, joins])
def test_what_would_take_a_part_for_the_whole_is_refused(told: Told, worker: Callable[[KVStore], None]) -> None:
    assert told[worker] == [None, None]


class Prompted(nn.Module):
    """Returns parameters from a part, has an empty one, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = Prompt()
        self.layers = mlp()
        self.nothing = nn.Parameter(torch.empty(0).double())
        self.nothing_else = nn.Parameter(torch.empty(0).double())

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.layers(data + self.prompt())


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((10,), 0.1).double())

    def forward(self) -> torch.Tensor:
        return self.value


def unusual(network: nn.Module, optimizer: Any) -> None:
    """Use a network in ways that are not a plain loop; one process gets the same weights."""
    optimizer.zero_grad()
    loss_of(network).backward()
    first = next(network.parameters())
    torch.autograd.grad(loss_of(network, 1), [one for one in network.parameters() if one is first or one.numel()][1:2])
    optimizer.step()  # by the gradients of the backward
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        loss_of(network, step).backward()
        optimizer.step()
    optimizer.zero_grad()
    hidden = torch.ones(2, 10).double().requires_grad_()
    torch.autograd.grad(network(hidden).sum(), hidden)  # unpacks only some of the weights
    data, label = batch(mlp, 5)
    last = network.layers
    checkpointed = checkpoint(lambda: last[4](torch.tanh(last[2](torch.tanh(last[0](data))))), use_reentrant=False)
    nn.functional.cross_entropy(checkpointed, label).backward()
    optimizer.step()
    with torch.no_grad():
        for one in network.parameters():
            one.data = torch.full_like(one, 0.02)
    loss_of(network, 6).backward()
    optimizer.step()


def used_unusually(store: KVStore) -> Any:
    network = Prompted()
    optimizer = wrapped(store, network, (3, 1))
    unusual(network, optimizer)
    optimizer.load_model_state_dict(optimizer.model_state_dict())
    return optimizer.model_state_dict()


def test_what_one_process_can_do_gives_the_same_weights(told: Told) -> None:
    network = Prompted()
    unusual(network, optimizer_of(network))
    found, nothing = told[used_unusually]
    assert not nothing
    check_state(found, network)


def clips_a_part(store: KVStore) -> list[float]:
    network = mlp()
    inner = torch.optim.SGD(list(network.parameters())[2:], lr=0.1)
    optimizer = DistributedOptimizer(inner, store, shard="weights", memory=[1, 1], network=network)
    loss_of(network).backward()
    for one in network.parameters():
        one.grad = None if one.grad is None else one.grad * 2
    return [float(optimizer.clip_grad_norm_(0.1)), float(optimizer.clip_grad_norm_(0.1))]


def test_the_norm_is_that_of_the_optimizers_parameters_as_their_gradients_are_now(told: Told) -> None:
    network = mlp()
    loss_of(network).backward()
    norm = 2 * float(nn.utils.clip_grad_norm_(list(network.parameters())[2:], 1.0))
    for found in told[clips_a_part]:
        assert found == pytest.approx([norm, 0.1], rel=1e-4)


def skips(communicator: Any) -> None:
    store = create("allreduce", communicator=communicator)
    network = mlp()
    optimizer = wrapped(store, network)
    if store.rank:
        optimizer.step()
    else:
        network(batch(mlp, 0)[0])


def test_a_worker_that_runs_no_network_is_an_error() -> None:
    words = "rank 0 called copy of 0.weight, 0.bias from their owners, rank 1 called end of backward"
    with pytest.raises(RuntimeError, match=words):
        spawn(skips, 2, threads=1, timeout=30)


def test_the_module_of_the_weights_is_needed() -> None:
    with pytest.raises(TypeError, match=r"network is None; expected the torch.nn.Module whose weights to divide"):
        DistributedOptimizer(optimizer_of(mlp()), "local", shard="weights")
    with pytest.raises(RuntimeError, match="this call is for shard='weights'"):
        DistributedOptimizer(optimizer_of(mlp()), "local").model_state_dict()
    with pytest.raises(TypeError, match=r"params is a list; expected the torch\.nn\.Module whose weights to divide"):
        Trainer(list(mlp().parameters()), *ADAM, "local", shard="weights")


ADAM: Any = ("adam", {"learning_rate": 0.01, "wd": 0.01})


# Copies that begin before they are needed


class Recorded(AllReduceStore):
    """Records the calls that the workers make together, and whether they return before they are done."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__("allreduce", communicator)
        self.copies: list[tuple[str, bool]] = []
        self.calls: list[str] = []

    def copy_from_owners(self, names: str, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
        self.copies.append((names, async_op))
        self.calls.append(f"copy of {names}")
        return super().copy_from_owners(names, *arguments, async_op=async_op, **options)

    def reduce_to_owners(self, names: str, *arguments: Any, **options: Any) -> Work:
        self.calls.append(f"reduction of {names}")
        return super().reduce_to_owners(names, *arguments, **options)


class Branched(nn.Module):
    """Runs its layers in the order that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            data = self.layers[number](data).tanh()
        return data


ORDERS = [[0, 1, 2, 3]] * 3 + [[0, 2, 1, 3]] * 2 + [[0, 1]] + [[0, 1, 2, 3]] * 2
"""Layers of each step."""


def branched_steps(network: Branched, optimizer: Any, after_step: Callable[[], object] = int) -> None:
    data = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    for order in ORDERS:
        network.order = order
        optimizer.zero_grad()
        with torch.no_grad():
            network(data)
        network(data).square().mean().backward()
        optimizer.step()
        after_step()


def follows_branches(communicator: Communicator, networks: list[Branched]) -> Any:
    network = networks[communicator.rank]  # made before: the threads share a random generator
    with Recorded(communicator) as store:
        inner = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
        optimizer = DistributedOptimizer(inner, store, shard="weights", memory=[1, 1], network=network)
        store.copies.clear()
        begun_early: list[list[bool]] = []

        def after_step() -> None:
            begun_early.append([is_early for _, is_early in store.copies])
            store.copies.clear()

        branched_steps(network, optimizer, after_step)
        return optimizer.model_state_dict(), begun_early, store.calls


def test_the_next_modules_weights_are_copied_while_one_runs_and_other_branches_do_without() -> None:
    torch.manual_seed(0)
    alone = Branched()
    branched_steps(alone, torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9))
    (state, begun, calls), (_, other_begun, other_calls) = in_threads(2, follows_branches, [Branched(), Branched()])
    for name, value in alone.state_dict().items():
        assert torch.equal(state[name], value), name  # both workers have the same samples, so means are exact
    assert begun == other_begun
    assert calls == other_calls
    known = "-eee -eee -ee"  # of two forwards, and of a backward, which does not need the first layer's weights
    assert ["".join("-e"[is_early] for is_early in of_step) for of_step in begun] == [
        one.replace(" ", "")
        for one in (
            "---- ---- ---",
            known,
            known,
            "-e--- -e--- -e--",  # the second copy was in vain, and what follows is not known
            known,
            "-e- -e- -",
            "-e-- -e-- -e--",
            known,
        )
    ]


def takes_its_own_branch(communicator: Communicator, in_step: int) -> str:
    network = Branched()
    with Recorded(communicator) as store:
        optimizer = wrapped(store, network)
        for step in range(4):
            network.order = [0, 3, 1, 2] if step == in_step and store.rank else [0, 1, 2, 3]
            try:
                network(torch.ones(2, 6).double()).sum().backward()
                optimizer.step()
            except MismatchError as error:
                assert step == in_step
                return str(error)
    return ""


@pytest.mark.parametrize(("in_step", "layer"), [(0, 1), (3, 2)])  # later steps copy the next layer ahead
def test_workers_that_take_different_branches_all_get_an_error(in_step: int, layer: int) -> None:
    first, second = in_threads(2, takes_its_own_branch, in_step)
    assert first == second
    assert f"rank 0 called copy of layers.{layer}.weight" in first
    assert "rank 1 called copy of layers.3.weight" in first


def assigns_late(communicator: Communicator) -> None:
    network = Branched()
    weight = network.layers[1].weight  # read in a forward, it would be copied first
    with Recorded(communicator) as store:
        optimizer = wrapped(store, network, (1, 0))
        for step in range(2):
            if step:
                network.layers[0].register_forward_hook(lambda *_: setattr(weight, "data", torch.ones(6, 6).double()))
            network(torch.ones(2, 6).double()).sum().backward()
            optimizer.step()


class Assigning(nn.Module):
    """Assigns a weight in a forward that has read it, before or after the weight's own module has run."""

    def __init__(self, runs_after: bool) -> None:
        super().__init__()
        self.inner, self.runs_after = nn.Linear(3, 3).double(), runs_after

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        total = self.inner.weight.sum()
        self.inner.weight.data = torch.ones(3, 3).double()
        out: torch.Tensor = self.inner(data) if self.runs_after else data
        return out * total


def assigns_what_it_reads(communicator: Communicator, runs_after: bool) -> None:
    network = Assigning(runs_after)
    with create("allreduce", communicator=communicator) as store:
        wrapped(store, network, (1, 0))
        network(torch.ones(2, 3).double())


@pytest.mark.parametrize("runs_after", [False, True])
def test_a_weight_that_is_assigned_in_a_forward_that_has_read_it_is_an_error(runs_after: bool) -> None:
    for error in outcomes_in_threads(2, assigns_what_it_reads, runs_after):
        assert isinstance(error, RuntimeError)
        assert "inner.weight.data was assigned in a forward that had read it" in str(error)


def test_a_weight_that_its_owner_assigns_after_its_copy_has_begun_is_an_error() -> None:
    first, second = outcomes_in_threads(2, assigns_late)
    assert "layers.1.weight was assigned while the network ran" in str(first)
    assert isinstance(second, DeadNodeError)  # the owner has left
