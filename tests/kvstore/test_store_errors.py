"""Tests of wrong input to stores of one process: error class and message, and no change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gangline.kvstore import KVStore, RowSparse
from gangline.kvstore.buckets import Bucket, plan
from gangline.kvstore.optimizer.keyed import OptimizerState
from tests.kvstore.keyed import ranked


@pytest.fixture
def kv(kv: KVStore) -> KVStore:
    """Return a store with "w", "b" and 7."""
    kv.init(["w", "b", 7], [ranked(1, (2, 3)), ranked(2, (3,)), torch.tensor([40, 41])])
    return kv


def stored(kv: KVStore) -> dict[Any, list[Any]]:
    outs = {"w": torch.empty(2, 3), "b": torch.empty(3), 7: torch.empty(2, dtype=torch.int64)}
    kv.pull(list(outs), list(outs.values()))
    return {key: out.tolist() for key, out in outs.items()}


UNHARMED = {"w": ranked(1, (2, 3)).tolist(), "b": ranked(2, (3,)).tolist(), 7: [40, 41]}


def check_unchanged(kv: KVStore) -> None:
    """Check that neither the store nor a good value has changed."""
    assert stored(kv) == UNHARMED
    assert (G.tolist(), B.tolist(), N.tolist()) == (ranked(8).tolist(), ranked(9, (3,)).tolist(), [1, 2])


def check_unharmed(kv: KVStore) -> None:
    """Check that nothing has changed and that the store still accepts valid input."""
    check_unchanged(kv)
    kv.push(["w", "b"], [[ranked(0), ranked(1)], ranked(5, (3,))])
    kv.push("b", ranked(6, (3,)), async_op=True).wait(20)
    assert stored(kv) == UNHARMED | {"w": (ranked(0) + ranked(1)).tolist(), "b": ranked(6, (3,)).tolist()}


def read_only(rank: int) -> Any:
    array = ranked(rank).numpy().copy()
    array.flags.writeable = False
    return array


def rows(count: int) -> RowSparse:
    return RowSparse([1], torch.ones(1, 3), (count, 3))


def sparse() -> torch.Tensor:
    return torch.eye(3)[:2].to_sparse()


G, B, N = ranked(8), ranked(9, (3,)), torch.tensor([1, 2])
"""Good values for "w", "b" and 7; no call may change them."""

STATE = OptimizerState("sgd", 0.1, 0.1, {}, {}, {})

Case = tuple[str, Callable[[KVStore], Any], type[Exception], str]

# What is the matter, the call, the class of the error, what its message says. `BAD_LAST` and `store_walk` have more.
CASES: list[Case] = [
    # -- keys of a wrong type
    ("init, bool key", lambda kv: kv.init(True, G), TypeError, "key is True, a bool; expected a str or an int"),
    ("push, list in a list", lambda kv: kv.push([["w"]], [G]), TypeError, r"key is \['w'\], a list"),
    # -- shapes
    ("push, one device", lambda kv: kv.push("w", [G, ranked(0, (1, 3))]), ValueError, r"'w'.*\(2, 3\).*\(1, 3\)"),
    ("broadcast, shape", lambda kv: kv.broadcast("v", G, torch.empty(3)), ValueError, r"'v'.*\(2, 3\).*\(3,\)"),
    # -- dtypes
    ("push, dtype", lambda kv: kv.push("w", G.double()), ValueError, "'w'.*float32.*float64"),
    ("pushpull out, dtype", lambda kv: kv.pushpull("w", G, G.bfloat16()), ValueError, "'w'.*float32.*bfloat16"),
    ("assign, dtype", lambda kv: kv.assign("w", G.long()), ValueError, "'w'.*float32.*int64"),
    # -- layouts and arrays torch cannot write
    ("push, sparse", lambda kv: kv.push("w", sparse()), ValueError, r"'w'.*2 sparse axes; expected 1 \(whole rows\)"),
    ("pushpull, read-only", lambda kv: kv.pushpull("w", [G.clone(), read_only(1)]), ValueError, "'w'.*read-only"),
    ("pushpull out, read-only", lambda kv: kv.pushpull("w", G, read_only(1)), ValueError, "'w'.*read-only"),
    ("broadcast, read-only", lambda kv: kv.broadcast("v", G, read_only(1)), ValueError, "'v'.*read-only"),
    ("push, array of objects", lambda kv: kv.push("w", np.full((2, 3), None)), TypeError, "'w'"),
    ("push, rows of a shape", lambda kv: kv.push("w", rows(3)), ValueError, r"'w' has shape \(2, 3\).*shape \(3, 3\)"),
    ("pushpull, rows", lambda kv: kv.pushpull("w", rows(2)), ValueError, "'w' cannot .*; use row_sparse_pull"),
    ("pushpull, coo", lambda kv: kv.pushpull("w", rows(2).to_coo()), ValueError, "'w'.*sparse_coo; expected a dense"),
    # -- values that are no tensors
    ("init, list", lambda kv: kv.init("v", [G, G]), TypeError, "'v'.*list"),
    ("push, number", lambda kv: kv.push("w", 3.0), TypeError, "'w'.*float; expected a torch tensor"),
    ("push, too deep", lambda kv: kv.push("w", [[G]]), TypeError, "'w'.*list"),
    ("broadcast, list of values", lambda kv: kv.broadcast("v", [G, G], G), TypeError, "'v'.*list"),
    # -- lists that do not match
    ("push, too few", lambda kv: kv.push(["w", "b"], [G]), ValueError, "2 keys got 1 values"),
    ("push, a tensor for a list", lambda kv: kv.push(["w", "b"], G), TypeError, "2 keys got a Tensor"),
    ("pushpull, a tensor for outs", lambda kv: kv.pushpull(["w"], [G], G), TypeError, "1 keys got a Tensor"),
    ("init, a tensor for a list", lambda kv: kv.init(["v", "u"], G), TypeError, "2 keys got a Tensor"),
    # -- priorities
    ("push, priority", lambda kv: kv.push("w", G, priority="high"), TypeError, "priority is 'high'; expected an int"),
    ("pull, priority", lambda kv: kv.pull("w", torch.empty(2, 3), priority=1.5), TypeError, "priority is 1.5"),
    ("pushpull, priority", lambda kv: kv.pushpull("w", G, priority=None), TypeError, "priority is None"),
    ("row_sparse_pull, priority", lambda kv: kv.row_sparse_pull("w", G, "high", [1]), TypeError, "priority is 'high'"),
    ("broadcast, priority", lambda kv: kv.broadcast("v", G, G, priority="high"), TypeError, "priority is 'high'"),
    # -- asynchronous calls, which refuse at once
    ("async init", lambda kv: kv.init(["v", "w"], [G, G], async_op=True), ValueError, "'w' is initialised already"),
    ("async push, unknown", lambda kv: kv.push("nope", G, async_op=True), KeyError, "'nope'"),
    # -- what is no updater, no rate, or comes without an optimizer
    ("set_updater, number", lambda kv: kv.set_updater(3), TypeError, "updater is 3; expected a function"),
    ("push_weighted, bool", lambda kv: kv.push_weighted("w", G, True), TypeError, "weight is True"),
    ("load, no optimizer", lambda kv: kv.load_optimizer_state(STATE), RuntimeError, "needs an optimizer; call"),
    ("set_learning_rate, str", lambda kv: kv.set_learning_rate("0.1"), TypeError, "learning rate is '0.1'"),
    ("set_learning_rate, negative", lambda kv: kv.set_learning_rate(-0.1), ValueError, "learning rate is -0.1"),
]


@pytest.mark.parametrize(("call", "error", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_wrong_input_is_named_and_changes_nothing(
    kv: KVStore, call: Callable[[KVStore], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        call(kv)
    assert type(caught.value) is error
    check_unharmed(kv)
    kv.init("v", ranked(3))  # no half of a refused init is left
    kv.init("u", ranked(4))


# -- a list of which only the last key is bad -------------------------------------------------------------------------

LAST: dict[str, Callable[[KVStore, Any, Any], Any]] = {
    "push": lambda kv, key, value: kv.push(["w", 7, key], [[G, G], N, value]),
    "pushpull": lambda kv, key, value: kv.pushpull(["w", 7, key], [[G, G], N, value]),
    "pull": lambda kv, key, value: kv.pull(["w", 7, key], [G, N, value]),
    "pushpull into": lambda kv, key, value: kv.pushpull(["w", key], [ranked(5), B], [G, value]),
    "assign": lambda kv, key, value: kv.assign(["w", key], [ranked(5), value]),
    "init": lambda kv, key, value: kv.init(["v", key], [ranked(5), value]),
    "broadcast": lambda kv, key, value: kv.broadcast(["v", key], [ranked(5), value], [G, G]),
}
EXISTING = ["push", "pushpull", "pull", "pushpull into", "assign"]
OF_KEYS = ["push", "pushpull", "pull", "assign"]
NEW = ["init", "broadcast"]

# The calls, the last key and its value, the class of the error, what its message says.
BAD_LAST: dict[str, tuple[list[str], Any, Any, type[Exception], str]] = {
    "unknown": (OF_KEYS, "nope", B, KeyError, "'nope'"),
    "bool": (OF_KEYS, True, B, TypeError, "key is True"),
    "shape": (EXISTING, "b", ranked(0, (4,)), ValueError, r"'b'.*\(3,\).*\(4,\)"),
    "sparse": (EXISTING, "b", torch.eye(3).to_sparse(), ValueError, "'b'.*sparse_coo"),
    "no devices": (EXISTING[:4], "b", [], ValueError, "'b'.*empty list"),
    "known": (NEW, "w", G, ValueError, "'w' is initialised already"),
    "twice": (NEW, "v", G, ValueError, "'v' is initialised already"),
    "new, sparse": (NEW, "u", torch.eye(3).to_sparse(), ValueError, "'u'.*sparse_coo"),
}
UPDATES = ["none", "updater", "optimizer"]


def set_update(kv: KVStore, update: str) -> list[Any]:
    """Set an updater or an optimizer; return the keys that the updater is called for."""
    called: list[Any] = []
    if update == "updater":
        kv.set_updater(lambda key, summed, stored: called.append(key))
    elif update == "optimizer":
        kv.set_optimizer(("sgd", {"lr": 0.5, "momentum": 0.9}))
    return called


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("bad", BAD_LAST)
def test_a_list_whose_last_key_is_bad_changes_nothing(kv: KVStore, bad: str, update: str) -> None:
    calls, key, value, error, words = BAD_LAST[bad]
    called = set_update(kv, update)
    for call in calls:
        with pytest.raises(error, match=words):
            LAST[call](kv, key, value)
        check_unchanged(kv)
        assert "v" not in kv
    assert called == []
    if update == "optimizer":
        assert kv.optimizer_state().tensors == {}
    kv.set_updater(lambda key, summed, stored: stored.copy_(summed))
    check_unharmed(kv)
    kv.init("v", ranked(3))


@pytest.mark.parametrize("call", ["push", "pushpull"])
@pytest.mark.parametrize(("optimizer", "key"), [("muon", "b"), ("sgd", 7), ("adam", 7)])
def test_a_last_key_that_does_not_fit_the_optimizer_applies_nothing(
    kv: KVStore, optimizer: str, key: Any, call: str
) -> None:
    kv.set_optimizer((optimizer, {"lr": 0.1}))
    values = [ranked(0), ranked(1, (3,)) if key == "b" else torch.tensor([1, 2])]
    for async_op in (False, True):
        with pytest.raises(ValueError, match=f"{key!r} does not fit optimizer '{optimizer}'"):
            getattr(kv, call)(["w", key], values, async_op=async_op).wait(20)
        assert stored(kv) == UNHARMED
        assert torch.equal(values[0], ranked(0))
    kv.push("w", ranked(0))
    assert stored(kv)["w"] != UNHARMED["w"]
    assert stored(kv)[key] == UNHARMED[key]


# -- a closed store ---------------------------------------------------------------------------------------------------

CLOSED: dict[str, Callable[[KVStore], Any]] = {
    "init": lambda kv: kv.init("v", G),
    "push": lambda kv: kv.push("w", G),
    "push async": lambda kv: kv.push("w", G, async_op=True),
    "push, unknown": lambda kv: kv.push("nope", G),
    "pull": lambda kv: kv.pull("w", torch.empty(2, 3)),
    "pushpull": lambda kv: kv.pushpull("w", G),
    "push rows": lambda kv: kv.push("w", rows(2)),
    "row_sparse_pull": lambda kv: kv.row_sparse_pull("w", G, row_ids=[1]),
    "fuse": lambda kv: kv.fuse(bucket()),
    "push_bucket": lambda kv: kv.push_bucket(bucket(), [torch.zeros(bucket().numel)]),
    "pull_bucket": lambda kv: kv.pull_bucket(bucket(), [torch.zeros(bucket().numel)]),
    "broadcast": lambda kv: kv.broadcast("v", G, torch.empty(2, 3)),
    "assign": lambda kv: kv.assign("w", G),
    "barrier": lambda kv: kv.barrier(),
    "set_updater": lambda kv: kv.set_updater(lambda key, summed, stored: None),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "set_learning_rate": lambda kv: kv.set_learning_rate(0.1),
    "optimizer_state": lambda kv: kv.optimizer_state(),
    "learning_rate": lambda kv: kv.learning_rate,
    "save_optimizer_states": lambda kv: kv.save_optimizer_states("/nowhere/states"),
    "compression_residuals": lambda kv: kv.compression_residuals(),
    "set_gradient_compression": lambda kv: kv.set_gradient_compression({"type": "2bit"}),
    "load_compression_residuals": lambda kv: kv.load_compression_residuals({}),
    "load_optimizer_state": lambda kv: kv.load_optimizer_state(STATE),
}


def bucket() -> Bucket:
    return next(plan([("w", torch.empty(2, 3)), ("b", torch.empty(3))], 1 << 20))


@pytest.mark.parametrize("call", CLOSED)
def test_a_closed_store_says_so(kv: KVStore, call: str) -> None:
    kv.close()
    with pytest.raises(RuntimeError, match=f"the '{kv.type}' store is closed; {kv._when_closed}"):
        CLOSED[call](kv)


# -- the message ------------------------------------------------------------------------------------------------------


def test_the_list_of_known_keys_stays_short(kv: KVStore) -> None:
    kv.init([f"key {index}" for index in range(1000)], [torch.zeros(1)] * 1000)
    with pytest.raises(KeyError, match=re.escape("'w', 'b', 7, 'key 0'")) as caught:
        kv.push("nope", G)
    assert "..." in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_message_shows_a_number_and_its_digits_apart(kv: KVStore) -> None:
    kv.init("7", torch.zeros(2))
    with pytest.raises(ValueError, match="key 7 has"):
        kv.push(7, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="key '7' has"):
        kv.push("7", torch.tensor([1.0, 2.0, 3.0]))
