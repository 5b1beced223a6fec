"""Checks that the replicas of ranks are equal: how they drift apart, which rank is odd, and flipped bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gangline
from gangline import Communicator, DistributedOptimizer, Module, Trainer, cpu, spawn
from gangline.kvstore.allreduce.store import AllReduceStore
from gangline.kvstore.replica_check import check_interval, compare_weights, number_of_weights
from tests.models.unequal_jobs import join

WAYS = {"bypass": 1, "no_sync": 2, "in_backward": 1}
"""Global batch before which a loop is refused, by the way in which it leaves out the average of gradients."""
ODD = 1
"""Rank whose batches, or weights, are not those of the others."""


def network_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).double()


def flip(tensor: Tensor) -> None:
    """Flip the lowest bit of the last value."""
    tensor.detach().view(-1)[-1:].view(torch.uint8)[0] ^= 1


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def drift(way: str) -> str:
    """Return the error of a loop in which the batches of two ranks are alike."""
    network = network_of()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    if way == "in_backward":
        for one in network.parameters():
            one.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    data = torch.tensor([2.0, 5.0, 2.0] * 4).double()[:, None]

    def train() -> None:
        for step, batch in enumerate(gangline.balance(model, DataLoader(data, 1), loads=[1, 1, 1])):
            with model.no_sync() if way == "no_sync" and step % 2 else nullcontext():
                (network if way == "bypass" else model)(batch).mean().backward()
            if way == "bypass" or (way == "no_sync" and step % 2):
                optimizer.step()
                optimizer.zero_grad()

    return error_of(train)


def two_epochs(rank: int, damage: Callable[[Tensor], None]) -> str:
    """Return the error of an epoch that follows damage to a weight of a rank."""
    model = DistributedDataParallel(network_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = gangline.balance(model, DataLoader(torch.ones(6, 1).double(), 1), loads=[1, 1, 1])

    def train() -> None:
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
            if rank == ODD:
                damage(model.module[1].weight)

    return error_of(train)


def train_by(front: str, comm: Communicator) -> str:
    """Return the error of a loop over a store, in which a weight of a rank is damaged after a step."""
    network, store = network_of(), AllReduceStore("allreduce", comm)
    inner = torch.optim.SGD(network.parameters(), lr=0.01)
    of_trainer = front == "Trainer"
    optimizer = Trainer(network, "sgd", kvstore=store) if of_trainer else DistributedOptimizer(inner, kvstore=store)

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            with nullcontext() if of_trainer or step != 1 else optimizer.no_sync():
                network(torch.full((2, 1), 5.0 if comm.rank == ODD else 2.0).double()).mean().backward()
            if of_trainer:
                optimizer.step(2)
                if step == 1 and comm.rank == ODD:
                    flip(store._entries["1.weight"].stored)
            else:
                (inner if step == 1 else optimizer).step()  # past the wrapper

    return error_of(train)


def fit(comm: Communicator, where: str) -> str:
    """Return the error of a Module, of which a rank flips a bit in the store, or in the network after the last step."""
    store = AllReduceStore("allreduce", comm)
    module = Module(network_of(), nn.MSELoss(), context=cpu())

    def damage(param: Any) -> None:
        if comm.rank == ODD and param.nbatch == (1 if where == "store" else 3):
            flip(store._entries["1.weight"].stored if where == "store" else module.bound.network[1].weight)

    data = torch.ones(12, 1).double()
    return error_of(
        lambda: module.fit((data, data), num_epoch=1, batch_size=3, kvstore=store, batch_end_callback=damage)
    )


def run(comm: Communicator, path: str) -> dict[str, Any]:
    join(comm, path, "gangline")
    try:
        found = {way: drift(way) for way in WAYS}
        found |= {"flip": two_epochs(comm.rank, flip), "none": two_epochs(comm.rank, lambda _: None)}
        found |= {front: train_by(front, comm) for front in ("Trainer", "DistributedOptimizer")}
        found |= {f"Module, {where}": fit(comm, where) for where in ("store", "network")}
        os.environ["GANGLINE_REPLICA_CHECK"] = "0"
        found |= {"off, bypass": drift("bypass"), "off, flip": two_epochs(comm.rank, flip)}
        return found | {"off, Trainer": train_by("Trainer", comm)}
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return spawn(run, 3, str(tmp_path_factory.mktemp("job") / "store"), threads=1)


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_that_leaves_out_the_average_is_an_error_in_the_first_steps(way: str, job: Any) -> None:
    for text in (each[way] for each in job):
        assert f"before global batch {WAYS[way]} the optimizer has changed the weights of rank {ODD} differ" in text
        assert "first those of parameter 'module.0.weight', so the replicas drift apart" in text
        assert all(reason in text for reason in ("model.module(x)", "no_sync()", "hook within backward"))


def test_one_flipped_bit_is_an_error_at_the_next_epoch(job: Any) -> None:
    for each in job:
        assert each["flip"].startswith(f"balance: before global batch 2 the weights of rank {ODD} differ, first those")
        assert "of parameter 'module.1.weight', so" in each["flip"]
        assert "its memory flips bits" in each["flip"]
        assert not each["none"]


@pytest.mark.parametrize(
    ("front", "begin"),
    [
        ("Trainer", f"the weights of rank {ODD} differ, first those of parameter '1.weight'"),
        ("DistributedOptimizer", f"the weights of rank {ODD} differ, first those of parameter 2"),
        (
            "Module, store",
            f"before push 3 of a bucket the weights of rank {ODD} differ, first those of parameter '1.weight'",
        ),
        ("Module, network", f"after epoch 0 the weights of rank {ODD} differ, first those of parameter '1.weight'"),
    ],
)
def test_fronts_of_the_allreduce_store_compare_weights(front: str, begin: str, job: Any) -> None:
    assert all(begin in each[front] for each in job), job[0][front]


def test_an_interval_of_0_compares_nothing(job: Any) -> None:
    assert [{each[name] for name in each if name.startswith("off")} for each in job] == [{""}] * 3


def test_an_interval_must_be_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_REPLICA_CHECK", "often")
    with pytest.raises(ValueError, match="GANGLINE_REPLICA_CHECK is 'often'; expected a number of steps, such as 64"):
        check_interval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_each_bit_of_a_weight_counts(dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 7, dtype=dtype)
    octets = weight.view(-1).view(torch.uint8)
    before = number_of_weights([weight])
    for place in (0, len(octets) - 1):
        for bit in range(8):
            octets[place] = 1 << bit
            assert number_of_weights([weight]) != before
        octets[place] = 0
    assert number_of_weights([weight]) == before


def test_only_ranks_with_one_kind_of_device_are_compared() -> None:
    kind = 1 << 32
    compare_weights([kind + 1, 2 * kind + 2, kind + 1, 0], {}, lambda own: [own] * 4, "")
    with pytest.raises(gangline.MismatchError, match=r"weights of ranks 0, 3 differ, first those of parameter unknown"):
        compare_weights([kind + 1, 2 * kind + 2, 2 * kind + 2, kind + 2], {}, lambda own: [own] * 4, "")
