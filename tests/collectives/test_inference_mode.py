"""Every call, first inside torch.inference_mode() and then outside: what the first one keeps can be written again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gangline.collectives.communicator import Communicator
from gangline.kvstore import KVStore, Trainer, create
from gangline.kvstore.allreduce.store import AllReduceStore
from tests.collectives.grid import COLLECTIVES, Cell, check, outs_of
from tests.collectives.processes import Processes, Rank, join_group
from tests.collectives.ranks import in_ranks
from tests.kvstore.parameter_server.processes import run_job

COUNTS = (5, 9_001, 300_007)  # elements: within a slot; of a message, in a buffer and in the sender's memory


def inside_then_outside(call: Callable[[], object]) -> None:
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            call()


def _communicator(comm: Communicator) -> None:
    shared: list[Tensor] = []

    def registered() -> None:
        shared.append(comm.empty(7).fill_(1.0))
        assert {comm.all_reduce(one.fill_(1.0)).sum().item() for one in shared} == {14.0}  # type: ignore[union-attr]

    for count in COUNTS:
        for collective in (*COLLECTIVES, "all_to_all_uneven", "send_recv"):
            inside_then_outside(partial(check, comm, Cell(collective, count, out=outs_of(collective)[0])))
    inside_then_outside(registered)


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "tcp"])
def test_a_communicator(transport: str) -> None:
    in_ranks(transport, 2, _communicator)


def _group(rank: Rank, path: str) -> None:
    join_group(rank, path)
    own, other = float(rank.rank), 1 - rank.rank

    def collectives(count: int, *, async_op: bool) -> None:
        values, outs = torch.full((count,), own), [torch.zeros(count), torch.zeros(count)]
        both = torch.zeros(2 * count)
        for call, got, want in (
            (partial(dist.all_reduce, values), values, 1.0),
            (partial(dist.broadcast, values, 0), values, 1.0),
            (partial(dist.all_gather, outs, values), outs[other], 1.0),
            (partial(dist.all_gather_into_tensor, both, values), both, 1.0),
            (partial(dist.reduce_scatter_tensor, values, both), values, 2.0),
            (partial(dist.all_to_all, outs, [values, values]), outs[other], 2.0),
            (partial(dist.all_to_all_single, both, torch.ones(2 * count)), both, 1.0),
            (partial(dist.reduce, values, 0), values, 4.0 if rank.rank == 0 else 2.0),
        ):
            work = call(async_op=async_op)
            if work is not None:
                work.wait()
            assert got.unique().tolist() == [want], (call.func, got.unique(), count, async_op)

    def messages(count: int) -> None:
        values = torch.full((count,), own)
        sent, got = dist.isend(values, other), torch.zeros(count)
        dist.recv(got, other)
        assert sent is not None
        sent.wait()
        assert got.unique().tolist() == [float(other)]

    for count in COUNTS:
        inside_then_outside(partial(messages, count))
        for async_op in (False, True):
            inside_then_outside(partial(collectives, count, async_op=async_op))
    rank.tell("ended")
    dist.destroy_process_group()


def test_a_process_group(tmp_path: Any) -> None:
    with Processes(_group, 2, f"{tmp_path}/group") as ranks:
        assert ranks.all_heard() == ["ended"] * 2


def _verbs(store: KVStore) -> None:
    """Call the verbs that take tensors, with all kinds of sums that a store keeps."""
    workers = store.num_workers
    keys = ["a", "b", "c"]
    with torch.inference_mode():
        store.init(keys, [torch.zeros(3)] * 3)
    sgd = {"learning_rate": 1.0, "momentum": 0.5}

    def push_pull() -> None:
        out = torch.zeros(3)
        store.push("a", torch.full((3,), store.rank + 1.0))
        store.pull("a", out)
        assert out.isfinite().all()
        store.pushpull("b", torch.ones(3), out)
        assert out.isfinite().all()

    def sums() -> None:
        out = torch.zeros(3)
        for async_op in (False, True):
            store.push("a", torch.ones(3), async_op=async_op).wait()
            store.pull("a", out, async_op=async_op).wait()
            assert out.tolist() == [float(workers)] * 3
            store.pushpull("a", torch.ones(3), out, async_op=async_op).wait()
            assert out.tolist() == [float(workers)] * 3
            store.push_weighted("b", torch.full((3,), 2.0), 1.0, async_op=async_op).wait()
            store.pull("b", out)
            assert out.tolist() == [2.0] * 3

    inside_then_outside(sums)
    with torch.inference_mode():
        store.set_optimizer(("sgd", sgd))
    inside_then_outside(push_pull)
    with torch.inference_mode():
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    inside_then_outside(push_pull)
    store.close()


def _allreduce(comm: Communicator) -> None:
    _verbs(AllReduceStore(communicator=comm))


def _dist() -> None:
    _verbs(create("dist_sync"))


def test_stores() -> None:
    _verbs(create("local"))
    in_ranks("shared_memory", 2, _allreduce)
    run_job(_dist, 2, 1)


def _trainer(comm: Communicator | None) -> None:
    for inside, fused in product((True, False), repeat=2):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=fused))
        store = create("device") if comm is None else AllReduceStore(communicator=comm)
        with torch.inference_mode(inside):
            trainer = Trainer(model.parameters(), "adam", {"learning_rate": 0.1}, store)
        for _ in range(2):
            trainer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            with torch.inference_mode(inside):
                trainer.step(1)
        store.close()


def test_a_trainer() -> None:
    _trainer(None)
    in_ranks("shared_memory", 2, _trainer)
