"""Tests of gradient clipping in the stores: torch's results on the sums over devices and workers."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from gangline import kvstore
from gangline.kvstore import KVStore, Trainer
from gangline.kvstore.buckets import plan
from gangline.kvstore.optimizer import clipping
from gangline.kvstore.optimizer.keyed import KeyedOptimizer
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.parameter_server.protocol import DENSE, Ack, Command, CommandResult, Push
from gangline.kvstore.parameter_server.server import optimizer_shards
from tests.kvstore.parameter_server.cases import check
from tests.kvstore.parameter_server.in_process import Job, RawClient

pytestmark = pytest.mark.timeout(110)

SHAPES = {"weight": (7, 5), "bias": (4,), "one": ()}
STORES = ("local", "device")


def gradients(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES.values()]


def parameters(values: list[Tensor]) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(found, values, strict=True):
        parameter.grad = value.clone()
    return found


# The arithmetic


@pytest.mark.parametrize("threshold", [1e-3, 1.0, 5.0, 1e6])
@pytest.mark.parametrize("spoilt", [None, math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_gradients_equal_torchs_bit_for_bit(threshold: float, spoilt: float | None, dtype: torch.dtype) -> None:
    given = gradients(dtype)
    if spoilt == 0.0:
        given = [value.zero_() for value in given]
    elif spoilt is not None:
        given[1][2] = spoilt
    for name, torchs in (
        ("clip_gradient", clip_grad_value_),
        ("clip_global_norm", clip_grad_norm_),
        ("clip_norm", lambda those, most: [clip_grad_norm_([one], most) for one in those]),
    ):
        found, expected = [value.clone() for value in given], parameters(given)
        KeyedOptimizer(OptimizerSpec.parse(("sgd", {name: threshold})))._clipped(found)
        torchs(expected, threshold)
        for value, parameter in zip(found, expected, strict=True):
            assert torch.equal(value.nan_to_num(nan=7.0), parameter.grad.nan_to_num(nan=7.0))
            assert torch.equal(value.isnan(), parameter.grad.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_beyond_float16_does_not_make_gradients_zero(dtype: torch.dtype) -> None:
    value = torch.full((400,), 6e4, dtype=dtype)  # the norm is 1.2e6, its square 1.4e12
    clipping.clip_norm_([value], 1.0)
    assert torch.allclose(value.float(), torch.full((400,), 0.05), rtol=1e-2)


def test_a_norm_may_span_dtypes() -> None:
    parts = [torch.full((2,), 3.0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    assert float(clipping.norm(parts)) == pytest.approx(math.sqrt(54))
    clipping.clip_norm_([], 1.0)


@pytest.mark.parametrize("name", clipping.THRESHOLDS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"])
def test_a_threshold_is_a_number_above_0(name: str, value: Any) -> None:
    for give in (OptimizerSpec.parse, kvstore.create("local").set_optimizer):
        with pytest.raises(ValueError, match=rf"{name} is {value!r}; expected a number above 0"):
            give(("sgd", {name: value}))
    with pytest.raises(ValueError, match=rf"{name} is {value!r}"):
        Trainer([torch.zeros(2)], "sgd", {name: value}, "local")


def test_at_most_one_threshold_may_be_given() -> None:
    with pytest.raises(ValueError, match="clip_norm=1 and clip_global_norm=2 are given; expected at most"):
        OptimizerSpec.parse(("adam", {"clip_global_norm": 2, "clip_norm": 1, "clip_gradient": None}))
    assert not OptimizerSpec.parse(("adam", dict.fromkeys(clipping.THRESHOLDS))).clips


# One process


def started(kv: KVStore, **arguments: Any) -> KVStore:
    kv.init(list(SHAPES), [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES.values()])
    kv.set_optimizer(("sgd", {"learning_rate": 1.0, **arguments}))
    return kv


def pulled(kv: KVStore) -> list[Tensor]:
    out = [torch.empty(shape, dtype=torch.float64) for shape in SHAPES.values()]
    kv.pull(list(SHAPES), out)
    return out


@pytest.mark.parametrize("store", STORES)
def test_pushes_are_clipped_together_by_update(store: str) -> None:
    expected = parameters(gradients())
    clip_grad_norm_(expected, 0.5)
    for way in ("list", "async, backwards", "bucket"):
        kv = started(kvstore.create(store), clip_global_norm=0.5, rescale_grad=2.0)
        values = {key: [value / 8, value * 3 / 8] for key, value in zip(SHAPES, gradients(), strict=True)}
        if way == "list":
            kv.push(list(values), list(values.values()))
        elif way == "bucket":
            [bucket] = plan([(key, value) for key, (value, _) in values.items()], 1 << 20)
            kv.fuse(bucket)
            kv.push_bucket(bucket, [{key: of_key[place] for key, of_key in values.items()} for place in range(2)])
        else:
            works = [kv.push(key, value, async_op=True) for key, value in reversed(values.items())]
            assert all(work.wait() is None for work in works)
        for value, _ in values.values():  # the store must not use them after the push
            value.fill_(math.nan)
        for _ in range(2):
            kv.update()  # the second has nothing to do
        torch.testing.assert_close(pulled(kv), [-p.grad for p in expected], rtol=1e-12, atol=0)


def test_the_order_of_pushes_does_not_change_the_bits() -> None:
    shapes = {str(number): (50 + number,) for number in range(12)}
    generator = torch.Generator().manual_seed(4)
    values = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    found = []
    for keys in (list(shapes), list(reversed(shapes)), sorted(shapes)):
        kv = kvstore.create("local")
        kv.init(list(shapes), [torch.zeros(shape) for shape in shapes.values()])
        kv.set_optimizer(("sgd", {"learning_rate": 1.0, "clip_global_norm": 1.0}))
        for key in keys:
            kv.push(key, values[key])
        kv.update()
        out = [torch.empty(shape) for shape in shapes.values()]
        kv.pull(list(shapes), out)
        found.append(torch.cat(out))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_pending_push_forbids_pull_and_push_and_can_be_dropped() -> None:
    kv = started(kvstore.create("local"), clip_global_norm=1.0)
    ones = torch.ones(4, dtype=torch.float64)
    assert kv.updates_wait
    kv.push("bias", ones)
    with pytest.raises(RuntimeError, match=r"keys \[\"'bias'\"\] were pulled before update\(\)"):
        kv.pull("bias", torch.empty(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'bias'.* were pushed already, and clip_global_norm delays"):
        kv.push(["one", "bias"], [ones[0], ones])
    with pytest.raises(ValueError, match=r"call push\(\), update\(\) and pull\(\)"):
        kv.pushpull("one", ones[0].clone())
    kv.pull("one", torch.empty((), dtype=torch.float64))  # it does not wait
    kv.drop_updates()
    kv.update()
    assert not any(value.any() for value in pulled(kv))
    kv.push("bias", ones)
    kv.set_optimizer(("sgd", {"learning_rate": 1.0, "clip_norm": 1.0}))  # drops pending sums
    assert not kv.updates_wait
    kv.push("bias", ones)
    kv.update()  # has nothing to do
    assert torch.allclose(pulled(kv)[1], -ones / 2, atol=1e-5)


def test_the_rate_is_that_of_update() -> None:
    kv = started(kvstore.create("device"), clip_global_norm=1.0)
    kv.push("one", torch.tensor(10.0, dtype=torch.float64))
    kv.set_learning_rate(0.25)
    kv.update()
    assert float(pulled(kv)[2]) == pytest.approx(-0.25, abs=1e-5)


# Workers


def a_few_keys(kv: KVStore, prefix: str) -> tuple[str, str]:
    """A dense key and a table, under a global norm of 1."""
    dense, table = f"{prefix}-dense", f"{prefix}-table"
    kv.init([dense, table], [torch.zeros(2, dtype=torch.float64), torch.zeros(5, 1, dtype=torch.float64)])
    kv.set_optimizer(("sgd", {"learning_rate": 1.0, "clip_global_norm": 1.0}))
    return dense, table


def values_of(kv: KVStore, dense: str, table: str) -> list[float]:
    out = [torch.empty(2, dtype=torch.float64), torch.empty(5, 1, dtype=torch.float64)]
    kv.pull([dense, table], out)
    return [round(float(value), 4) for value in torch.cat([out[0], out[1].view(-1)])]


def the_rate_is_rank_0s(kv: KVStore) -> list[float]:
    dense, table = a_few_keys(kv, "rate")
    kv.push(dense, torch.tensor([1.5, 2.0], dtype=torch.float64))
    kv.set_learning_rate(0.5 if kv.rank == 0 else 100.0)
    kv.update()
    found = values_of(kv, dense, table)
    assert found == [-0.3, -0.4, 0, 0, 0, 0, 0]
    return found


def what_waits_can_be_dropped(kv: KVStore) -> list[float]:
    dense, table = a_few_keys(kv, "dropped")
    for times in (100.0, 0.1):
        kv.push(dense, torch.tensor([3.0, 4.0], dtype=torch.float64) * times / kv.num_workers)
        if times == 100.0:
            kv.drop_updates()
    kv.update()
    kv.update()  # nothing is pending
    found = values_of(kv, dense, table)
    assert found == [-0.3, -0.4, 0, 0, 0, 0, 0]  # below the threshold: as it is
    return found


def who_has_joined_takes_part(kv: KVStore) -> list[float]:
    """Update after rank 0 has joined: the norm is that of the other ranks, the rate rank 1's."""
    dense, table = a_few_keys(kv, "joined")
    if kv.rank == 0:
        kv.join()
    else:
        kv.push(dense, torch.tensor([30.0, 40.0], dtype=torch.float64))
        kv.update()
        kv.push(table, torch.ones(5, 1, dtype=torch.float64) / 10)
        kv.drop_updates()
        kv.join()
    found = values_of(kv, dense, table)
    assert found == [-0.6, -0.8, 0, 0, 0, 0, 0]
    return found


CASES = [
    the_rate_is_rank_0s,
    what_waits_can_be_dropped,
    who_has_joined_takes_part,
]


def test_allreduce_workers_clip_their_sums() -> None:
    check("allreduce", 2, 0, CASES)


def test_a_server_keeps_sums_until_the_update_command_and_refuses_pulls_before() -> None:
    count, small = 20_000, 4
    spec = OptimizerSpec.parse(("sgd", {"learning_rate": 1.0, "clip_global_norm": 1.0}))
    group = msgpack.packb(0)
    with Job(1) as job:
        (member,) = job.members()
        with RawClient.of_worker(member) as client:
            sizes = {5: count, 6: small}
            for sequence, (number, size) in enumerate(sizes.items(), 11):
                client.define(sequence, number, [size], bytes(4 * size), key=str(number))
            assert "RuntimeError" in client.refusal(Command(2, "norms", group))
            assert client.request(Command(3, "optimizer", optimizer_shards.pack_group(0, None, spec))) == CommandResult(
                3, b""
            )
            entries = [(number, 1, DENSE, 4 * size) for number, size in sizes.items()]
            ones = [torch.ones(size).numpy().tobytes() for size in sizes.values()]
            assert client.request(Push(4, entries, None, None, False, None), *ones) == Ack([4])
            for _ in range(2):  # asked again, for the answer was lost
                norms = msgpack.unpackb(client.request(Command(5, "norms", group)).payload)
                assert norms == [pytest.approx(math.sqrt(count)), 2.0]
            assert not pulled_large(client, 6).any()
            update = Command(7, "update", msgpack.packb([0, 0.5, 3.0]))
            for _ in range(2):  # the second time it is not done again
                assert client.request(update) == CommandResult(7, b"")
            assert torch.equal(pulled_large(client, 9), torch.full((count,), -1.5))
            assert msgpack.unpackb(client.request(Command(10, "norms", group)).payload) == []


def pulled_large(client: RawClient, sequence: int) -> torch.Tensor:
    client.pull(sequence, 5, 1)
    _, (data,) = client.receive()
    return torch.frombuffer(bytearray(data), dtype=torch.float32)
