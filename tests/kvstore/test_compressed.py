"""Tests of gradient compression in stores of one process: decoded values, residuals, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gangline.kvstore import KVStore, RowSparse, create
from gangline.kvstore.compression import TwoBit, compress
from tests.kvstore.keyed import KEYS, LIMIT, SHAPES, check_same, gradient
from tests.kvstore.keyed import pulled as all_pulled

W = "fc.weight"
THRESHOLD = 0.3
TWO_BIT = {"type": "2bit", "threshold": THRESHOLD}


def prepared(kv: KVStore) -> KVStore:
    kv.init(KEYS, [torch.zeros(shape) for shape in SHAPES.values()])
    return kv


@pytest.fixture
def kv(kv: KVStore) -> KVStore:
    """Return a store with zeros for all of `SHAPES`."""
    return prepared(kv)


def gradients(step: int, senders: int) -> list[list[torch.Tensor]]:
    """Return each key's values, one per sender."""
    return [[gradient(key, step, sender) for sender in range(senders)] for key in KEYS]


def pulled(kv: KVStore, key: Any) -> torch.Tensor:
    return all_pulled(kv, [key])[key]


def send(gradient: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return what two bits send of ``gradient`` and a residual, which becomes the rest; see `test_compression`."""
    residual = torch.zeros_like(gradient) if residual is None else residual
    sent, codec = torch.empty_like(gradient), TwoBit(THRESHOLD)
    codec.decode(compress(codec, gradient, residual, "a key"), sent)
    return sent


# -- two bits ---------------------------------------------------------------------------------------------------------


def test_without_error_feedback_there_are_no_residuals(kv: KVStore) -> None:
    kv.set_gradient_compression(TWO_BIT | {"error_feedback": False})
    for step in range(5):
        kv.push(W, [gradient(W, step, sender) for sender in range(2)])
        expected = [send(gradient(W, step, sender)) for sender in range(2)]
        assert torch.equal(pulled(kv, W), expected[0] + expected[1])
    assert kv.compression_residuals() == {}


# -- NaN and infinity -------------------------------------------------------------------------------------------------


def last_bad(step: int, bad: float, where: str) -> list[list[torch.Tensor]]:
    values = gradients(step, 2)
    values[-1][0 if where == "first sender" else 1][0, 2] = bad
    return values


CODECS: dict[str, dict[str, Any]] = {
    "2bit": TWO_BIT,
    "topk": {"type": "topk", "ratio": 0.3},
    "fp16": {"type": "fp16"},
    "bf16 with feedback": {"type": "bf16", "error_feedback": True},
}


@pytest.mark.parametrize(
    ("call", "where", "codec"),
    [
        ("push", "last sender", "2bit"),
        ("async push", "first sender", "topk"),
        ("pushpull", "last sender", "fp16"),
        ("pushpull", "first sender", "bf16 with feedback"),
    ],
)
def test_a_nan_in_the_last_key_of_a_list_changes_nothing_of_any_key(
    kv: KVStore, codec: str, where: str, call: str
) -> None:
    bad = math.nan if codec in ("2bit", "fp16") else -math.inf
    kv.set_optimizer(("adam", {"lr": 0.5}))
    kv.set_gradient_compression(CODECS[codec])
    with pytest.raises(ValueError, match=r"key 'a/b\.gamma' holds NaN or infinity"):
        kv.push(KEYS, last_bad(1, bad, where))
    assert not any(value.any() for value in kv.compression_residuals().values())
    kv.push(KEYS, gradients(0, 2))
    weights, residuals, state = all_pulled(kv), kv.compression_residuals(), kv.optimizer_state().tensors
    outs = [torch.full(shape, 99.0) for shape in SHAPES.values()]
    arguments = (KEYS, last_bad(1, bad, where), *([outs] if "pushpull" in call else []))
    with pytest.raises(ValueError, match=r"key 'a/b\.gamma' holds NaN or infinity"):
        getattr(kv, call.split()[-1])(*arguments, async_op="async" in call).wait(LIMIT)
    assert all((out == 99).all() for out in outs)
    check_same(kv.compression_residuals(), residuals)
    check_same(all_pulled(kv), weights)
    check_same(kv.optimizer_state().tensors, state)


def test_a_push_refused_by_the_optimizer_leaves_residuals_unchanged(kv: KVStore) -> None:
    kv.init("b", torch.zeros(4, 6))
    kv.set_optimizer("muon")
    kv.set_gradient_compression(TWO_BIT)
    kv.push([W, "b"], [gradient(W, 0), gradient(W, 1)])
    residuals = kv.compression_residuals()
    with pytest.raises(ValueError, match="'muon' works on whole tensors, but the gradient of key 'b' is row-sparse"):
        kv.push([W, "b"], [gradient(W, 2), RowSparse([1], torch.ones(1, 6), (4, 6))])
    check_same(kv.compression_residuals(), residuals)


# -- setting and ending -----------------------------------------------------------------------------------------------


def test_none_ends_compression_and_drops_residuals(kv: KVStore) -> None:
    kv.set_gradient_compression(TWO_BIT)
    kv.push(KEYS, gradients(0, 2))
    kv.set_gradient_compression(None)
    assert kv.compression_residuals() == {}
    kv.push(KEYS, gradients(1, 2))
    for key in KEYS:
        assert torch.equal(pulled(kv, key), gradient(key, 1) + gradient(key, 1, 1))
    kv.set_gradient_compression(None)
    kv.set_gradient_compression(TWO_BIT)
    kv.push(W, gradient(W, 2))
    assert torch.equal(pulled(kv, W), send(gradient(W, 2)))


def test_setting_compression_waits_for_pending_pushes(kv: KVStore) -> None:
    works = [kv.push(W, gradient(W, 0), priority=-5, async_op=True)]
    kv.set_gradient_compression(TWO_BIT)
    assert works[0].is_completed()
    assert torch.equal(pulled(kv, W), gradient(W, 0))
    works.append(kv.push(W, gradient(W, 1), priority=-5, async_op=True))
    residuals = kv.compression_residuals()  # behind them too
    assert works[1].is_completed()
    send(gradient(W, 1), expected := torch.zeros(SHAPES[W]))
    assert torch.equal(residuals['"fc.weight"/0'], expected)


def test_a_wrong_setting_is_named_and_changes_nothing(kv: KVStore) -> None:
    residuals = [torch.zeros(SHAPES[W]) for _ in range(2)]
    kv.set_gradient_compression(TWO_BIT)
    for step in range(3):
        values = [gradient(W, step, sender) for sender in range(2)]
        kv.push(W, values)
        first, second = map(send, values, residuals)
        assert torch.equal(pulled(kv, W), first + second)
        with pytest.raises(ValueError, match=f"pull_type is 'fp16', but a '{kv.type}' store copies weights"):
            kv.set_gradient_compression({"type": "fp16", "pull_type": "fp16"})


# -- residuals out and in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["local", "device"])
@pytest.mark.parametrize("codec", ["2bit", "topk", "bf16 with feedback"])
def test_saved_and_loaded_residuals_continue_bit_for_bit(kv: KVStore, codec: str, target: str) -> None:
    kv.set_gradient_compression(CODECS[codec])
    for step in range(5):
        kv.push(KEYS, gradients(step, 3))
    residuals = kv.compression_residuals()
    names = ['"fc.weight"', "3", '"3"', '"a/b.gamma"']
    assert set(residuals) == {f"{name}/{place}" for name in names for place in range(3)}
    with create(target) as fresh:
        prepared(fresh).set_gradient_compression(CODECS[codec])
        fresh.push(W, [gradient(W, 77)] * 5)  # its residual is replaced by the load
        fresh.load_compression_residuals(residuals)
        for step in range(5, 10):
            for store in (kv, fresh):
                store.push(KEYS, gradients(step, 3))
            check_same(all_pulled(fresh), all_pulled(kv))
        check_same(fresh.compression_residuals(), kv.compression_residuals())


def test_residuals_are_copies_both_ways(kv: KVStore) -> None:
    kv.set_gradient_compression(TWO_BIT)
    kv.push(KEYS, gradients(0, 2))
    residuals, kept = kv.compression_residuals(), kv.compression_residuals()
    for value in residuals.values():
        value.fill_(1e6)
    check_same(kv.compression_residuals(), kept)
    given = {name: value.clone() for name, value in kept.items()}
    kv.load_compression_residuals(given)
    for value in given.values():
        value.fill_(1e6)
    check_same(kv.compression_residuals(), kept)
    kv.load_compression_residuals({})
    assert kv.compression_residuals() == {}


BAD: dict[str, tuple[str, Any, str]] = {
    "unknown key": ('"nope"/0', torch.zeros(3), "key 'nope', which is unknown here; known keys: .*'fc.weight', 3, '3'"),
    "shape": ("3/0", torch.zeros(2, 6), r"key 3 has shape \(2, 5\), but got a tensor of shape \(2, 6\)"),
    "dtype": ("3/0", torch.zeros(2, 5).double(), "key 3 has dtype .*float32.*float64"),
    "no key": ("garbage", torch.zeros(2, 5), "garbage"),
    "a place below 0": ("3/-1", torch.zeros(2, 5), "3/-1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_residuals_are_named_and_nothing_changes(kv: KVStore, case: str) -> None:
    name, value, words = BAD[case]
    kv.set_gradient_compression(TWO_BIT)
    kv.push(KEYS, gradients(0, 2))
    before = kv.compression_residuals()
    with pytest.raises(ValueError, match=words):
        kv.load_compression_residuals({'"fc.weight"/0': torch.ones(SHAPES[W]), name: value})
    check_same(kv.compression_residuals(), before)
