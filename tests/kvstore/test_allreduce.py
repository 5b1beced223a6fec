"""Tests of the `allreduce` store with worker processes."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gangline import Communicator, spawn
from gangline.kvstore import KVStore, create
from gangline.kvstore.buckets import plan
from tests.kvstore.keyed import said
from tests.kvstore.parameter_server.cases import check


def numbers(rank: int, shape: tuple[int, ...] = (2, 3), stride: int = 2) -> torch.Tensor:
    """``index * stride + rank``: over all ranks they add up to ``size * index * stride + size * (size - 1) / 2``."""
    return (torch.arange(math.prod(shape)) * stride + rank).reshape(shape).double()


def total(size: int, shape: tuple[int, ...] = (2, 3), stride: int = 2) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) * stride * size + size * (size - 1) // 2).reshape(shape).double()


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    kv.pull(key, out)
    return out


# Cases, on stores of two or three workers


def asynchronous_calls_run_in_call_order_whatever_their_priority(kv: KVStore) -> None:
    keys = list(range(6))
    kv.init(keys, [torch.zeros(4, dtype=torch.float64)] * 6)
    outs = [torch.empty(4, dtype=torch.float64) for _ in keys]
    works = []
    for key in keys:
        priority = key if kv.rank else -key
        works.append(kv.push(key, numbers(kv.rank, (4,), key), priority, async_op=True))
        works.append(kv.pull(key, outs[key], -priority, async_op=True))
    kv.barrier()
    for one in works:
        one.wait()
    for key, out in enumerate(outs):
        assert torch.equal(out, total(2, (4,), key))


def a_nan_that_one_rank_cannot_compress_changes_no_residual(kv: KVStore) -> tuple[str, str]:
    kv.init("w", torch.zeros(5))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    gradient = torch.tensor([0.3, -0.6, 0.2, 0.9, 0.0]) * (kv.rank + 1)
    kv.push("w", gradient)
    residual = kv.compression_residuals()['"w"/0']
    gradient[kv.rank] = math.nan if kv.rank == 1 else 0.3
    name, text = said(lambda: kv.push("w", gradient))
    assert name == "MismatchError"
    assert "rank 1 of 2: push of ['w'] was refused: the gradient of key 'w' holds NaN" in text
    assert torch.equal(kv.compression_residuals()['"w"/0'], residual)
    return name, text


def init_is_refused_while_a_rank_has_joined(kv: KVStore) -> int:
    name, text = said(kv.join) if kv.rank else said(lambda: kv.init("late", numbers(0)))
    assert name == "MismatchError"
    assert "rank 0 called init, but rank 1 of 2 joined; expected only pushes, updates, barriers and exchanges" in text
    kv.init("late", numbers(0))
    if not kv.rank:
        kv.exchange(b"alone")
    last = kv.join()
    assert last == 0
    return last


def test_two_workers() -> None:
    cases = [
        asynchronous_calls_run_in_call_order_whatever_their_priority,
        a_nan_that_one_rank_cannot_compress_changes_no_residual,
        init_is_refused_while_a_rank_has_joined,
    ]
    check("allreduce", 2, 0, cases)


def differing_calls_raise_the_same_error_on_all_ranks_and_change_nothing(kv: KVStore) -> list[tuple[str, str]]:
    odd, other = kv.rank == 1, numbers(0, (4,))
    kv.init(["a", "b"], [numbers(0), other])
    tensors = [("a", numbers(0)), ("b", other)]
    (fused,) = plan(tensors[::-1] if odd else tensors, 1 << 20)
    found = []
    for call, words in (
        (
            lambda: kv.push("b", other) if odd else kv.push("a", numbers(0)),
            "rank 0 called push of ['a'], rank 1 called push of ['b']",
        ),
        (
            lambda: kv.push_weighted("a", numbers(0), -1.0 if odd else 1.0),
            "rank 1 of 3: push_weighted was refused: weight is -1.0",
        ),
        (
            lambda: kv.push("nothing", numbers(0)) if odd else kv.barrier(),
            "rank 1 of 3: push was refused: key 'nothing' was not initialised; known keys: ['a', 'b']; "
            "rank 0 called barrier",
        ),
        (lambda: kv.fuse(fused), "fuse: place 0 has key 'a' (2, 3) with strides (3, 1) at 0 on rank 0, but key 'b'"),
    ):
        found.append(said(call))
        assert found[-1][0] == "MismatchError"
        assert words in found[-1][1]
    kv.push("a", numbers(kv.rank))  # works as before
    assert torch.equal(pulled(kv, "a"), total(3))
    return found


def test_three_workers() -> None:
    check("allreduce", 3, 0, [differing_calls_raise_the_same_error_on_all_ranks_and_change_nothing])


def _failed(comm: Communicator) -> list[Any]:
    kv = create("allreduce", communicator=comm)
    kv.init("a", numbers(0))
    out = numbers(0)
    calls: list[Callable[[], Any]] = [
        lambda: kv.push("a", numbers(0)) if comm.rank else comm.all_reduce(torch.zeros(7)),
        lambda: kv.push("a", numbers(0)),
        lambda: kv.pull("a", out),
        lambda: kv.push("a", numbers(0, (9,))),
        lambda: kv.barrier(),
        lambda: kv.push("a", numbers(0), async_op=True),
    ]
    return [said(call) for call in calls]


def test_after_a_failed_collective_every_call_raises_its_error() -> None:
    (first, *others), behind = spawn(_failed, 2, threads=1)
    assert first[0] == "MismatchError"
    assert behind == [first] * 6
    assert others[0] == first
    assert {name for name, _ in others} == {"MismatchError"}


# Opening and closing


def test_without_a_job_the_error_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="gangline launch -n WORKERS"):
        create("allreduce")


def test_a_job_of_one_worker_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with create("allreduce") as kv:
        kv.init("a", numbers(1))
        kv.push("a", numbers(2))
        assert torch.equal(pulled(kv, "a"), numbers(2))
        with pytest.raises(KeyError, match="'b' was not initialised"):
            kv.push("b", numbers(0))
    with pytest.raises(RuntimeError, match="closed"):
        kv.push("a", numbers(0))


def _from_environment(comm: Communicator) -> list[Any]:
    port = torch.zeros(1, dtype=torch.int64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port[0] = free.getsockname()[1]
    comm.broadcast(port)
    place = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.item()}
    os.environ.update({name: str(value) for name, value in place.items()})
    kv = create("allreduce")
    kv.init("a", numbers(kv.rank))
    kv.push("a", numbers(kv.rank))
    results: list[Any] = [kv.rank, kv.num_workers, pulled(kv, "a")]
    if kv.rank:
        kv.close()
    comm.barrier()
    if not kv.rank:
        results += [said(lambda: kv.push("a", numbers(0))), said(kv.barrier)]
        kv.close()
    return results


def test_close_leaves_the_job_of_the_environment() -> None:
    first, second = spawn(_from_environment, 2, threads=1)
    for rank, found in enumerate((first, second)):
        assert found[:2] == [rank, 2]
        assert torch.equal(found[2], total(2))
    left, again = first[3:]
    assert left[0] == "DeadNodeError"
    assert "rank 1" in left[1]
    assert again == left
