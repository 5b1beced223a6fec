"""The dist stores when workers differ, run ahead, call join(), or use unknown keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gangline import kvstore
from gangline.collectives.errors import MismatchError
from gangline.kvstore import KVStore
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.cases import check
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(110)

SMALL, CUT = 37, 700_003


def ramp(numel: int, factor: float) -> torch.Tensor:
    return (torch.arange(numel) % 61 + 1).float() * factor


def pulled(kv: KVStore, key: Any, numel: int = SMALL) -> torch.Tensor:
    out = torch.full((numel,), -1.0)
    kv.pull(key, out)
    return out


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got, expected), f"{got.flatten()[:5]} ..., expected {expected.flatten()[:5]} ..."


# Init


def differences_are_the_same_error_on_all(kv: KVStore) -> list[str]:
    rank = kv.rank
    kv.init("other", torch.zeros(3))
    texts = []
    for keys, values in (
        ("shape", torch.zeros(4 if rank == 1 else 3)),
        ("dtype", torch.zeros(3, dtype=torch.float64 if rank == 1 else torch.float32)),
        (["a", "b"], [torch.zeros(3), torch.zeros(2 + rank % 2)]),
        (["a", "c" if rank == 1 else "b"], [torch.zeros(3), torch.zeros(3)]),
        (["a", "b"] if rank else ["a"], [torch.zeros(3)] * (2 if rank else 1)),
    ):
        with pytest.raises(MismatchError, match=r"rank 0.*rank 1|rank 1.*rank 0") as raised:
            kv.init(keys, values)
        texts.append(str(raised.value))
    for key in ("shape", "dtype", "a", "b"):  # a correct init follows
        assert key not in kv
        kv.init(key, torch.full((3,), float(rank + 5)))
        same(pulled(kv, key, 3), torch.full((3,), 5.0))
        out = torch.empty(3)
        kv.pushpull(key, torch.full((3,), float(rank + 1)), out=out)
        same(out, torch.full((3,), kv.num_workers * (kv.num_workers + 1) / 2))
    assert all(word in texts[0] for word in ("'shape'", "(3,)", "(4,)"))
    assert "float64" in texts[1]
    return texts


def keys_mean_the_same_in_any_order(kv: KVStore) -> None:
    names: list[str | int] = ["x", 3, "3", "y"]
    numel = {"x": SMALL, 3: CUT, "3": 5, "y": CUT + 1}
    order = names if kv.rank % 2 else names[::-1]
    kv.init(order, [torch.zeros(numel[name]) for name in order])  # in a list
    for name in order:  # and one by one
        kv.init(f"single {name!r}", torch.zeros(numel[name]))
    for keys in (names, [f"single {name!r}" for name in names]):
        for index, key in enumerate(keys if kv.rank else keys[::-1]):
            index = index if kv.rank else len(keys) - 1 - index
            kv.push(key, ramp(numel[names[index]], (kv.rank + 1) * (index + 1)))
        for index, key in enumerate(keys):
            factor = kv.num_workers * (kv.num_workers + 1) / 2 * (index + 1)
            same(pulled(kv, key, numel[names[index]]), ramp(numel[names[index]], factor))


# Rounds


def a_worker_ahead_waits_for_its_round(kv: KVStore) -> None:
    kv.init("ahead", torch.zeros(SMALL))
    works = []
    outs = [torch.empty(SMALL) for _ in range(4)]
    for number, out in enumerate(outs):
        if kv.rank == 0:
            works += [kv.push("ahead", ramp(SMALL, 4**number), async_op=True), kv.pull("ahead", out, async_op=True)]
    kv.barrier()
    for number, out in enumerate(outs if kv.rank else []):
        kv.push("ahead", ramp(SMALL, 4**number * (kv.rank + 1)))
        kv.pull("ahead", out)
    for work in works:
        work.wait(60)
    for number, out in enumerate(outs):
        same(out, ramp(SMALL, 4**number * kv.num_workers * (kv.num_workers + 1) / 2))


def later_pushes_of_a_key_may_be_more_urgent(kv: KVStore) -> None:
    kv.init("urgent", torch.zeros(2_000_000, dtype=torch.float64))
    value = torch.empty(2_000_000, dtype=torch.float64)
    values = [value.fill_(4**number).clone() for number in range(6)]  # more than the window
    for work in [kv.push("urgent", one, priority=n, async_op=True) for n, one in enumerate(values)]:
        work.wait(60)
    kv.pull("urgent", value)
    assert value.unique().tolist() == [4**5 * kv.num_workers]


def a_weight_of_0_leaves_no_nan(kv: KVStore) -> None:
    for numel in (SMALL, CUT):
        key, out = f"weighted {numel}", torch.full((numel,), 3.0, dtype=torch.float64)
        kv.init(key, torch.zeros_like(out))
        kv.push_weighted(key, torch.full_like(out, torch.nan if kv.rank == 0 else 3.0), float(kv.rank > 0))
        kv.pull(key, out)
        assert out.unique().tolist() == [3.0]


def sums_are_made_in_rank_order_and_rounded_once(kv: KVStore) -> None:
    for dtype, numel in ((torch.float32, CUT), (torch.float16, SMALL), (torch.bfloat16, SMALL)):
        seeds = [torch.Generator().manual_seed(9 + rank) for rank in range(kv.num_workers)]
        values = [torch.rand(numel, generator=seed).to(dtype) for seed in seeds]
        kv.init(f"order {dtype}", torch.zeros(numel, dtype=dtype))
        out = torch.empty(numel, dtype=dtype)
        kv.pushpull(f"order {dtype}", values[kv.rank], out=out)
        expected = values[0].float().clone()
        for value in values[1:]:
            expected += value.float()
        same(out, expected.to(dtype))


# Optimizers


def specs_that_differ_are_the_same_error_on_all(kv: KVStore) -> list[str]:
    texts, rate = [], 0.5 if kv.rank == 1 else 0.25
    for call, spec in (
        (kv.set_optimizer, ("sgd", {"learning_rate": rate})),
        (kv.set_optimizer, ("adam" if kv.rank == 1 else "sgd", {"learning_rate": 0.5})),
        (kv.set_gradient_compression, {"type": "2bit", "threshold": rate}),
    ):
        with pytest.raises(MismatchError, match=r"rank 0.*rank 1") as raised:
            call(spec)
        texts.append(str(raised.value))
    kv.init("plain", torch.zeros(SMALL))
    kv.push("plain", torch.ones(SMALL))
    same(pulled(kv, "plain"), torch.full((SMALL,), float(kv.num_workers)))  # no optimizer was set
    return texts


def the_learning_rate_of_rank_0_is_sent_with_pushes(kv: KVStore) -> None:
    with pytest.raises(RuntimeError, match="set_optimizer"):
        kv.set_learning_rate(1.0)
    kv.init(["rated", "rated cut"], [torch.zeros(SMALL), torch.zeros(CUT)])
    kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    n = kv.num_workers
    done = 0.0
    for rate in (1.0, 0.5, 0.25, 2.0):
        kv.set_learning_rate(rate if kv.rank == 0 else 1000.0)
        kv.push(["rated", "rated cut"], [ramp(SMALL, 1), ramp(CUT, 1)])
        done -= rate * n
    kv.set_learning_rate(77.0)  # without a later push
    same(pulled(kv, "rated"), ramp(SMALL, done))
    same(pulled(kv, "rated cut", CUT), ramp(CUT, done))


def an_async_store_sends_the_learning_rate_at_once(kv: KVStore) -> None:
    kv.init(["at once", "at once cut"], [torch.zeros(SMALL), torch.zeros(CUT)])
    kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    kv.push(["at once", "at once cut"], [ramp(SMALL, 1), ramp(CUT, 1)])
    kv.barrier()  # servers have received these pushes, which the next rate does not apply to
    kv.set_learning_rate(8.0 if kv.rank == 0 else 1000.0)
    kv.barrier()
    if kv.rank:
        kv.push(["at once", "at once cut"], [ramp(SMALL, 1), ramp(CUT, 1)])
        pulled(kv, "at once")
        pulled(kv, "at once cut", CUT)  # the servers have applied the push
    kv.barrier()
    done = -8.0 * (kv.num_workers - 1) - kv.num_workers
    same(pulled(kv, "at once"), ramp(SMALL, done))
    same(pulled(kv, "at once cut", CUT), ramp(CUT, done))
    kv.barrier()


# join()


def the_lowest_remaining_rank_sets_the_learning_rate(kv: KVStore) -> None:
    kv.init("remaining", torch.zeros(SMALL))
    kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    kv.set_learning_rate(0.5)
    if kv.rank:
        for _ in range(2):  # not before rank 0 has called join(), so that async stores apply them after that
            kv.barrier()
        kv.set_learning_rate(2.0 * kv.rank)
        kv.barrier()
        kv.push("remaining", ramp(SMALL, 1))
        pulled(kv, "remaining")
        kv.barrier()  # rank 1 joins when the others' pushes have been applied at its rate
    else:
        kv.barrier()
    kv.join()
    done = -2.0 * (kv.num_workers - 1)
    same(pulled(kv, "remaining"), ramp(SMALL, done))
    assert kv.learning_rate == 2.0
    kv.barrier()
    kv.push("remaining", ramp(SMALL, 1))
    pulled(kv, "remaining")
    kv.barrier()
    same(pulled(kv, "remaining"), ramp(SMALL, done - 2.0 * kv.num_workers))
    kv.join()
    assert kv.learning_rate == 2.0


def rounds_go_on_without_joined_workers(kv: KVStore) -> int:
    kv.init(["joint", "joint cut"], [torch.zeros(SMALL), torch.zeros(CUT)])
    n = kv.num_workers
    for step in range(kv.rank + 1):  # worker r makes r + 1 steps
        outs = [torch.empty(SMALL), torch.empty(CUT)]
        kv.push(["joint", "joint cut"], [ramp(SMALL, 4**kv.rank), ramp(CUT, 4**kv.rank)])
        kv.pull(["joint", "joint cut"], outs)
        expected = sum(4**rank for rank in range(step, n))
        same(outs[0], ramp(SMALL, expected))
        same(outs[1], ramp(CUT, expected))
        if step == kv.rank and kv.rank == n - 1:
            for _ in range(3):
                kv.barrier()  # joined workers count as present
            with pytest.raises(RuntimeError, match=r"init\(\) was called while worker 0 is in join\(\)"):
                kv.init("of one", torch.zeros(SMALL))
    last = kv.join()
    out = torch.empty(SMALL)
    kv.pushpull("joint", ramp(SMALL, 4**kv.rank), out=out)  # all workers take part again
    same(out, ramp(SMALL, sum(4**rank for rank in range(n))))
    same(pulled(kv, "joint cut", CUT), ramp(CUT, 4 ** (n - 1)))
    assert kv.join() in range(n)
    kv.pushpull("joint", ramp(SMALL, 1), out=out)
    same(out, ramp(SMALL, n))
    return last


ALL = [
    differences_are_the_same_error_on_all,
    a_weight_of_0_leaves_no_nan,
    sums_are_made_in_rank_order_and_rounded_once,
    specs_that_differ_are_the_same_error_on_all,
    the_learning_rate_of_rank_0_is_sent_with_pushes,
]
"""Cases of each store."""
SYNC = [
    *ALL[:-1],
    keys_mean_the_same_in_any_order,
    a_worker_ahead_waits_for_its_round,
    later_pushes_of_a_key_may_be_more_urgent,
    rounds_go_on_without_joined_workers,
    ALL[-1],  # its optimizer stays
    the_lowest_remaining_rank_sets_the_learning_rate,
]


@pytest.mark.parametrize(("workers", "servers"), [(3, 2), pytest.param(5, 3, marks=pytest.mark.slow)])
def test_sync(workers: int, servers: int) -> None:
    check("dist_sync", workers, servers, SYNC)


def test_over_collectives() -> None:
    check("allreduce", 3, 0, [*ALL, the_lowest_remaining_rank_sets_the_learning_rate])


# Async


def an_async_pull_includes_all_earlier_pushes_of_any_priority(kv: KVStore) -> None:
    kv.init("any", torch.zeros(1_000_000, dtype=torch.float64))
    out = torch.empty(1_000_000, dtype=torch.float64)
    values = [out.fill_(4.0 ** (6 * kv.rank + number)).clone() for number in range(6)]  # more than the window
    works = [kv.push("any", one, priority=n, async_op=True) for n, one in enumerate(values)]
    kv.pull("any", out, priority=9)
    assert all(int(value) >> (12 * kv.rank) & 0xFFF == 0x555 for value in out.unique())  # all digits of this worker
    for work in works:
        work.wait(60)
    kv.barrier()
    kv.pull("any", out)
    assert out.unique().tolist() == [(4.0 ** (6 * kv.num_workers) - 1) / 3]


@pytest.mark.parametrize("name", ["dist_async", pytest.param("dist_device_async", marks=pytest.mark.slow)])
def test_async(name: str) -> None:
    cases = [
        an_async_pull_includes_all_earlier_pushes_of_any_priority,
        an_async_store_sends_the_learning_rate_at_once,
        the_lowest_remaining_rank_sets_the_learning_rate,
    ]
    check(name, 3, 2, cases)


def push_and_leave() -> None:
    """Push; then leave as worker 0, or pull as another worker."""
    with kvstore.create("dist_sync") as kv:
        kv.init(["left", "left cut"], [torch.zeros(SMALL), torch.zeros(CUT)])
        keys = [("left", SMALL), ("left cut", CUT)] + [(f"left {number}", 5 * CUT) for number in range(3)]
        kv.init([key for key, _ in keys[2:]], [torch.zeros(5 * CUT)] * 3)
        for key, numel in keys:  # more than the window, without waiting
            kv.push(key, torch.full((numel,), 4.0**kv.rank), async_op=numel > CUT)
        if kv.rank:
            for key, numel in keys:
                same(pulled(kv, key, numel), torch.full((numel,), 21.0))


@pytest.mark.parametrize("transport", ["tcp", pytest.param("auto", marks=pytest.mark.slow)])
def test_pushes_before_close_count(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", transport)
    run_job(push_and_leave, 3, 1)


def staleness_blocks_and_releases(kv: KVStore) -> None:
    assert isinstance(kv, DistStore)
    kv.init(["stale", "signal"], [torch.zeros(SMALL), torch.zeros(1)])
    out, signal = torch.empty(SMALL), torch.zeros(1)
    if kv.rank == 0:
        for _ in range(2):  # two ahead of the slowest is allowed
            kv.pushpull("stale", torch.ones(SMALL), out=out)
        kv.push("stale", torch.ones(SMALL))
        blocked = kv.pull("stale", out, async_op=True)
        kv.pull("signal", signal)  # the server has received the earlier pull
        assert not blocked.is_completed()
        kv.push("signal", torch.ones(1))
        blocked.wait(60)
        same(out, torch.full((SMALL,), 3.0 + kv.num_workers - 1))
    else:
        kv.pull("stale", out)  # a worker that is behind never waits
        while not signal:  # not in a collective: workers that wait there do not count as the slowest
            kv.pull("signal", signal)
        kv.push("stale", torch.ones(SMALL))
        kv.pull("stale", out)
    kv.barrier()
    if kv.rank == kv.num_workers - 1:  # joined workers do not count as the slowest
        kv.join()
    else:
        for _ in range(6):
            kv.push("stale", torch.ones(SMALL))
            kv.exchange(b"")
        kv.pull("stale", out)
        kv.join()


def test_staleness() -> None:
    check("dist_async", 3, 1, [staleness_blocks_and_releases], max_staleness=2)


def test_staleness_is_for_async_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("dist_sync", 1), ("dist_async", -1), ("dist_async", True)):
        with pytest.raises(ValueError, match="max_staleness is"):
            kvstore.create(name, max_staleness=value)
