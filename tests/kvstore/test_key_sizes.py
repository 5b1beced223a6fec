"""Calls with many small keys, which are summed and copied by one operation for all, and with keys above 2 GiB."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import psutil
import pytest
import torch

from gangline.kvstore import KVStore
from gangline.kvstore.buckets import plan
from tests.kvstore.test_launch import launch

KEYS = [f"key {number}" for number in range(40)]
Tensors = list[list[torch.Tensor]]


@pytest.fixture
def kv(kv: KVStore) -> KVStore:
    kv.init(KEYS, [torch.zeros(2, 3) for _ in KEYS])
    return kv


def tensors(value: float) -> Tensors:
    return [[torch.full((2, 3), value + place) for place in range(2)] for _ in KEYS]


def all_are(outs: Tensors, expected: float) -> bool:
    return all(out.tolist() == [[expected] * 3] * 2 for of_key in outs for out in of_key)


def called_by(run: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that a call runs."""
    called: list[str] = []
    gc.disable()  # other packages' callbacks are Python functions
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return called


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "in place"])
def test_no_python_function_runs_for_each_key(kv: KVStore, call: str) -> None:
    values, outs = tensors(1.0), tensors(0.0)
    kv.pushpull(KEYS, values, outs)  # a device store chooses the keys' devices

    def calls(count: int) -> list[str]:
        keys, of_keys, into = KEYS[:count], values[:count], outs[:count]
        run = {
            "push": lambda: kv.push(keys, of_keys),
            "pull": lambda: kv.pull(keys, into),
            "pushpull": lambda: kv.pushpull(keys, of_keys, into),
            "in place": lambda: kv.pushpull(keys, of_keys),
        }[call]
        return called_by(run)

    assert calls(40) == calls(20)


@pytest.mark.parametrize(("call", "most"), [("push", 40), ("pull", 30), ("pushpull", 42)])
def test_a_call_of_one_key_makes_few_python_calls(kv: KVStore, call: str, most: int) -> None:
    """Count Python functions, some 36, 25 and 35 of a local store: they are most of the time of a small key."""
    values, outs = [torch.ones(2, 3), torch.ones(2, 3)], [torch.empty(2, 3), torch.empty(2, 3)]
    for of_one, into in ((values, outs), (values[0], outs[0]), ((*values,), (*outs,))):
        run = {
            "push": lambda of_one=of_one: kv.push(KEYS[0], of_one),
            "pull": lambda into=into: kv.pull(KEYS[0], into),
            "pushpull": lambda of_one=of_one, into=into: kv.pushpull(KEYS[0], of_one, into),
        }[call]
        kv.pushpull(KEYS[0], of_one, into)
        assert len(called_by(run)) <= most


@pytest.mark.parametrize("name", ["value", "out"])
def test_a_tensor_that_changed_since_the_last_call_is_checked_again(kv: KVStore, name: str) -> None:
    values, outs = tensors(1.0), tensors(0.0)
    changed = (values if name == "value" else outs)[7][1]
    kv.pushpull(KEYS, values, outs)
    for data, error in (
        (torch.ones(3, 2), r"key 'key 7' has shape \(2, 3\), but got a tensor of shape \(3, 2\)"),
        (torch.ones(1, 3), "shape"),
        (torch.ones(2, 3, dtype=torch.int32), "key 'key 7' has dtype torch.float32, but got a tensor of torch.int32"),
    ):
        changed.data = data
        with pytest.raises(ValueError, match=error):
            kv.pushpull(KEYS, values, outs)
    if name == "out":
        changed.data = torch.zeros(1, 3).expand(2, 3)
        with pytest.raises(ValueError, match="expanded"):
            kv.pushpull(KEYS, values, outs)
    changed.data = torch.full((2, 3), 2.0)
    kv.pushpull(KEYS, values, outs)
    assert all_are(outs, 3.0)
    changed.resize_(4, 3)
    with pytest.raises(ValueError, match="shape"):
        kv.pushpull(KEYS, values, outs)
    changed.resize_(2, 3).t_()
    with pytest.raises(ValueError, match="shape"):
        kv.pushpull(KEYS, values, outs)
    changed.t_()
    for of_key in values:
        of_key[0].data = torch.full((2, 3), 5.0)  # other memory
    kv.pushpull(KEYS, values, outs)
    assert all_are(outs, 7.0)


def test_an_updater_or_optimizer_set_between_two_calls_applies(kv: KVStore) -> None:
    values, outs = tensors(1.0), tensors(0.0)
    for _ in range(2):
        kv.pushpull(KEYS, values, outs)
    assert all_are(outs, 3.0)
    kv.set_updater(lambda _, summed, stored: stored.sub_(summed, alpha=2.0))
    kv.pushpull(KEYS, values, outs)
    assert all_are(outs, -3.0)
    kv.set_optimizer(("sgd", {"lr": 1.0}))
    kv.pushpull(KEYS, values, outs)
    assert all_are(outs, -6.0)
    kv.set_updater(lambda _, summed, stored: stored.copy_(summed))
    kv.pushpull(KEYS, values, outs)
    assert all_are(outs, 3.0)
    with pytest.raises(RuntimeError, match="set_optimizer"):
        _ = kv.learning_rate


@pytest.mark.parametrize("lender", ["fuse", "updater"])
def test_a_value_in_the_stores_own_memory_is_summed(kv: KVStore, lender: str) -> None:
    """The second value of each key is its stored value, which the sum must not overwrite before it is read."""
    values, stored = tensors(1.0), {}
    kv.push(KEYS, tensors(1.0))
    if lender == "fuse":
        [bucket] = plan([(key, torch.zeros(2, 3)) for key in KEYS], 1 << 20)
        flat = torch.zeros(bucket.numel)
        kv.fuse(bucket, flat)
        stored.update(bucket.views(flat))
    else:
        kv.set_updater(lambda key, _, memory: stored.update({key: memory}))
        kv.push(KEYS, tensors(0.0))
    given = [[of_key[0], stored[key]] for key, of_key in zip(KEYS, values, strict=True)]
    if lender == "fuse":
        outs = tensors(0.0)
        kv.pushpull(KEYS, given, outs)
        assert all_are(outs, 4.0)
    else:
        kv.set_optimizer(("sgd", {"lr": 1.0}))
        kv.push(KEYS, given)
        assert all_are([[stored[key]] for key in KEYS], -1.0)


# Keys above 2 GiB


CODE = """\
import sys, torch, gangline
with gangline.create(sys.argv[1]) as kv:
    value = torch.zeros((1 << 31) + 8, dtype=torch.uint8)
    kv.init("w", value)
    value[::4099] = 3
    value[-1] = 5
    kv.push("w", value)
    kv.pull("w", value.zero_())
    assert int(value[:-1:4099].min()) == int(value[:-1:4099].max()) == 3
    assert int(value[-1]) == 5
    assert int(value.count_nonzero()) == len(value[:-1:4099]) + 1
print("right", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["device", "dist_sync", "allreduce"])
def test_a_key_above_2_gib(name: str) -> None:
    if psutil.virtual_memory().available < 14 << 30:
        pytest.skip("less than 14 GiB of memory are free")
    servers = "1" if name == "dist_sync" else "0"
    with launch("-n", "1", "-s", servers, "--", sys.executable, "-c", CODE, name) as job:
        status, out, errors = job.end(250)
    assert (status, out) == (0, ["[worker 0] right"]), errors
