"""Tests of buckets: plans, and bucket calls that equal key calls bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline import Work
from gangline.kvstore import KVStore, RowSparse, create
from gangline.kvstore.arguments import Pairs, Pushed
from gangline.kvstore.buckets import Bucket, plan
from gangline.kvstore.device import DeviceStore
from gangline.kvstore.optimizer.group import OptimizerGroup
from tests.kvstore.keyed import (
    KEYS,
    LIMIT,
    OPTIMIZERS,
    SHAPES,
    check_same,
    gradient,
    held,
    owned,
    pulled,
    push,
    weights,
)
from tests.operations import Operations

CPU = torch.device("cpu")
DEVICES = 2
# What makes a store do more than replace.
Setting = Callable[[KVStore], object]
SETTINGS: dict[str, Setting] = {
    "nothing": lambda kv: None,
    "clipped sgd": lambda kv: kv.set_optimizer(("sgd", {"lr": 0.1, "rescale_grad": 0.5, "clip_gradient": 0.4})),
    "sgd": lambda kv: kv.set_optimizer(("sgd", OPTIMIZERS["sgd"][1])),
}


def bucket_of(keys: Sequence[Any] = KEYS) -> Bucket:
    (bucket,) = plan([(key, torch.empty(SHAPES[key])) for key in keys], 1 << 20)
    return bucket


def flat(bucket: Bucket, fill: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    made = bucket.empty(CPU)
    for key, view in bucket.views(made).items():
        view.copy_(fill(key))
    return made


def flats(bucket: Bucket, step: int, devices: int = DEVICES) -> list[torch.Tensor]:
    return [flat(bucket, lambda key, d=device: gradient(key, step, d)) for device in range(devices)]  # type: ignore[misc]


def pulled_flat(kv: KVStore, bucket: Bucket) -> dict[Any, torch.Tensor]:
    outs = [torch.full((bucket.numel,), 99.0, dtype=bucket.dtype) for _ in range(DEVICES)]
    kv.pull_bucket(bucket, outs)
    first, second = (bucket.views(out) for out in outs)
    check_same(first, second)
    return first


def prepared(kv: KVStore, setting: Setting = SETTINGS["nothing"]) -> KVStore:
    start = weights()
    kv.init(list(start), list(start.values()))
    setting(kv)
    return kv


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_bucket_ends_where_the_next_key_does_not_fit() -> None:
    tensors = [(name, torch.empty(size)) for name, size in zip("abcdef", (16, 16, 33, 64, 1, 32), strict=True)]
    buckets = list(plan(tensors, 256))
    assert [bucket.keys for bucket in buckets] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert [bucket.nbytes for bucket in buckets] == [128, 192, 256, 192]


@pytest.mark.parametrize("tensor", [torch.empty(4, 6)[:, ::2], torch.empty(1, 3).expand(4, 3)])
def test_a_key_that_is_not_dense_is_contiguous_in_the_bucket(tensor: torch.Tensor) -> None:
    (bucket,) = plan([("first", torch.empty(5)), ("key", tensor)], 1 << 20)
    view = bucket.views(bucket.empty(CPU))["key"]
    assert (view.shape, view.is_contiguous()) == (tensor.shape, True)


tensors = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.float16, torch.uint8]),
        st.randoms(use_true_random=False),
    ),
    max_size=12,
)


@given(tensors, st.integers(0, 8).map(lambda lines: 64 * lines))
def test_every_plan_has_each_key_once_without_overlap(
    described: list[tuple[tuple[int, ...], torch.dtype, Any]], max_bytes: int
) -> None:
    given_tensors: list[tuple[Any, torch.Tensor]] = []
    for number, (shape, dtype, random) in enumerate(described):
        axes = random.sample(range(len(shape)), len(shape))
        given_tensors.append((number, torch.empty(shape, dtype=dtype).permute(axes)))
    buckets = list(plan(given_tensors, max_bytes))
    assert [key for bucket in buckets for key in bucket.keys] == list(range(len(described)))
    for bucket in buckets:
        made = torch.zeros(bucket.numel, dtype=bucket.dtype)
        assert bucket.nbytes == made.nbytes
        assert bucket.nbytes <= max_bytes or len(bucket.keys) == 1
        likes = dict(given_tensors)
        for key, view in bucket.views(made).items():
            like = likes[key]
            assert (view.shape, view.dtype) == (like.shape, like.dtype)
            assert view.stride() == like.stride() or not like.numel()
            assert view.storage_offset() * view.element_size() % 64 == 0
            view += 1
        assert int(made.sum(dtype=torch.int64)) == sum(likes[key].numel() for key in bucket.keys)
        assert made.numel() == 0 or made.max() <= 1  # no two keys share an element


# -- owners on the device store ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [2, 3])
def test_a_bucket_has_one_owner_and_bytes_stay_balanced(places: int) -> None:
    sizes = {index: 16 * (1 + index * 7 % 5) for index in range(24)}
    kv = DeviceStore()
    with kv:
        kv.init(list(sizes), [torch.zeros(size) for size in sizes.values()])
        kv.pull(list(sizes), [[torch.empty(size)] * places for size in sizes.values()])
        for max_bytes in (600, 300, 1000):
            buckets = list(plan([(key, torch.empty(size)) for key, size in sizes.items()], max_bytes))
            for bucket in buckets:
                kv.fuse(bucket)
                assert len({kv.owner(key) for key in bucket.keys}) == 1
            loads = owned(kv, sizes, places)
            assert sum(loads) == sum(sizes.values())
            assert max(loads) - min(loads) <= max(bucket.numel for bucket in buckets)


# -- a store of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pushed", [True, False], ids=["placed by key", "not placed"])
def test_owners_stay_through_a_buckets_pushes_and_pulls(is_pushed: bool) -> None:
    bucket = bucket_of()
    kv = DeviceStore()
    with kv:
        prepared(kv)
        if is_pushed:
            push(kv, 0)
            assert {kv.owner(key) for key in KEYS} == {0, 1}
        kv.fuse(bucket)
        kv.push_bucket(bucket, flats(bucket, 0))
        (owner,) = {kv.owner(key) for key in KEYS}
        kv.push_bucket(bucket, flats(bucket, 1))
        pulled_flat(kv, bucket)
        push(kv, 2)
        assert {kv.owner(key) for key in KEYS} == {owner if is_pushed else 0}


@pytest.mark.parametrize("call", ["push", "push of a list", "pull", "pull of a list"])
def test_a_fused_key_moves_to_another_device_with_its_bucket(call: str) -> None:
    bucket, elsewhere = bucket_of(), torch.empty(SHAPES[3], device="meta")  # a device without memory
    kv = DeviceStore()
    with kv:
        prepared(kv).fuse(bucket)
        given_value = [elsewhere, elsewhere] if "list" in call else elsewhere
        getattr(kv, call.split()[0])(3, given_value, async_op=True).exception()
        kv.assign(3, gradient(3, 1))
        assert outcome(lambda: pulled(kv)[3]) == outcome(lambda: pulled_flat(kv, bucket)[3])


def outcome(call: Callable[[], torch.Tensor]) -> Any:
    try:
        return call().tolist()
    except RuntimeError as error:  # torch's for a copy out of a device without memory
        return type(error)


class PerKey(KVStore):
    """Third-party store that adds, without bucket support."""

    def __init__(self, name: str = "per_key") -> None:
        super().__init__(name)
        self.held: dict[Any, torch.Tensor] = {}
        self.calls: list[tuple[str, list[Any], int, bool]] = []

    def _init(self, pairs: Pairs, async_op: bool) -> Work:
        self.held.update({key: value.clone() for key, (value,) in pairs})
        return Work.finished("init")

    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work:
        self.calls.append(("push", [key for key, _ in pairs], priority, async_op))
        for key, values in pairs:
            for value in values:
                assert isinstance(value, torch.Tensor)
                self.held[key] += value
        return Work.finished("push")

    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        self.calls.append(("pull", [key for key, _ in pairs], priority, async_op))
        for key, outs in pairs:
            for out in outs:
                out.copy_(self.held[key])
        return Work.finished("pull")

    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work:
        self._push(values, priority, async_op)
        return self._pull(outs, priority, async_op)

    def _assign(self, pairs: Pairs) -> None:
        self.held.update({key: value.clone() for key, (value,) in pairs})


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_a_store_without_bucket_support_takes_buckets(fused: bool) -> None:
    bucket = bucket_of()
    kv = PerKey()
    with kv:
        prepared(kv)
        if fused:
            kv.fuse(bucket)
        kv.push_bucket(bucket, flats(bucket, 0), priority=3)
        kv.push_bucket(bucket, flats(bucket, 1, 1), ["3", "fc.weight"], -1, async_op=True).wait(LIMIT)
        expected = {
            key: weights()[key] + gradient(key, 0) + gradient(key, 0, 1) + (gradient(key, 1) if key in kept else 0)
            for kept in (("3", "fc.weight"),)
            for key in KEYS
        }
        check_same(pulled_flat(kv, bucket), expected)
        check_same(pulled(kv), expected)
        assert kv.calls[:3] == [
            ("push", KEYS, 3, False),
            ("push", ["fc.weight", "3"], -1, True),
            ("pull", KEYS, 0, False),
        ]


# -- errors -----------------------------------------------------------------------------------------------------------

THREE = ("3", torch.empty(3, 3))

# The flat tensors, the class of the error, what it says.
WRONG_FLATS: dict[str, tuple[list[torch.Tensor], type[Exception], str]] = {
    "too short": ([torch.zeros(79)], ValueError, r"80 elements of torch.float32 .* shape \(79,\)"),
    "dtype": ([torch.zeros(80).double()], ValueError, "80 elements of torch.float32 .* torch.float64"),
    "strides": ([torch.zeros(160)[::2]], ValueError, "80 elements .* expected a contiguous flat one"),
    "second": ([torch.zeros(80), torch.zeros(81)], ValueError, r"80 elements .* shape \(81,\)"),
    "none": ([], ValueError, "empty"),
}
# The tensors of the bucket's keys, the class of the error, what it says.
WRONG_KEYS: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": (
        [THREE, ("nope", torch.zeros(2))],
        KeyError,
        "'nope' was not initialised; known keys: .*'fc.weight', 3",
    ),
    "shape": ([THREE, (3, torch.zeros(5, 2))], ValueError, r"key 3 has shape \(2, 5\), but got .* of shape \(5, 2\)"),
    "dtype": (weights(torch.float64).items(), ValueError, "key 'fc.weight' has dtype torch.float32, .*torch.float64"),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("store", ["local", "device"])
def test_wrong_arguments_are_refused_and_nothing_changes(store: str, fused: bool) -> None:
    with create(store) as kv:
        prepared(kv, SETTINGS["sgd"])
        if fused:
            kv.fuse(bucket_of())

        def check(call: Callable[[], object], error: type[Exception], words: str) -> None:
            with pytest.raises(error, match=words) as caught:
                call()
            assert type(caught.value) is error
            check_same(pulled(kv), weights())

        def check_moves(bucket: Bucket, flats: list[torch.Tensor], *expected: Any, **options: Any) -> None:
            before = [one.clone() for one in flats]
            for move in (kv.push_bucket, kv.pull_bucket):
                for async_op in (False, True):
                    check(lambda: move(bucket, flats, async_op=async_op, **options), *expected)  # noqa: B023
            assert all(torch.equal(one, old) for one, old in zip(flats, before, strict=True))

        for flats, *expected in WRONG_FLATS.values():
            check_moves(bucket_of(), flats, *expected)
        ones = [torch.ones(bucket_of().numel)]
        check_moves(bucket_of(), ones, TypeError, "priority is 'high'; expected an int", priority="high")
        for tensors, *expected in WRONG_KEYS.values():
            bucket = next(plan(tensors, 1 << 20))
            check(lambda: kv.fuse(bucket), *expected)  # noqa: B023
            check_moves(bucket, [bucket.empty(CPU).fill_(7)], *expected)


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (("sgd", {"lr": 0.1}), {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}),
        (("muon", {"lr": 0.1}), {"a": torch.ones(2, 2), "b": torch.ones(2), "c": torch.ones(2)}),
    ],
    ids=["integers", "muon"],
)
def test_fusing_keys_that_the_optimizer_refuses_changes_all_or_nothing(
    kv: KVStore, spec: Any, values: dict[str, torch.Tensor]
) -> None:
    kv.init(list(values), list(values.values()))
    kv.set_optimizer(spec)
    (bucket,) = plan(list(values.items()), 1 << 20)
    try:
        kv.fuse(bucket)
    except ValueError as error:
        assert "does not fit optimizer" in str(error)  # noqa: PT017  either is right
    out = bucket.empty(CPU)
    kv.pull_bucket(bucket, [out])
    check_same(bucket.views(out), values)


# -- memory and operations --------------------------------------------------------------------------------------------


counting = pytest.mark.usefixtures("only_what_the_test_makes")
KEY_BYTES = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())


@counting
@pytest.mark.parametrize(
    ("setting", "devices", "sums", "states"),
    [
        ("nothing", 2, 1, 0),  # some of the keys need a sum of all to be copied from
        ("nothing", 1, 0, 0),
        ("sgd", 2, 1, 1),
        ("sgd", 1, 0, 1),
        ("clipped sgd", 2, 1, 0),
    ],
)
def test_a_bucket_holds_one_copy_of_the_weights_and_one_sum_of_several_devices(
    kv: KVStore, setting: str, devices: int, sums: int, states: int
) -> None:
    bucket, values = bucket_of(), flats(bucket_of(), 0, devices)
    outs = [torch.empty(bucket.numel) for _ in range(devices)]
    before = held()
    prepared(kv, SETTINGS[setting])
    assert held() - before == KEY_BYTES
    kv.fuse(bucket)
    assert held() - before == bucket.nbytes  # what the keys lay in is free
    choices: list[list[Any] | None] = [None, [3, "3"], None]
    for keys in choices:
        kv.push_bucket(bucket, values, keys)
        kv.pull_bucket(bucket, outs)
    kv.push_bucket(bucket, values, async_op=True).wait(LIMIT)
    assert held() - before == bucket.nbytes * (1 + sums) + KEY_BYTES * states


@counting
def test_fusing_again_and_closing_free_what_was_there_before(kv: KVStore) -> None:
    first, second = bucket_of(), [bucket_of(["3", "fc.weight"]), bucket_of([3, "a/b.gamma"])]
    before = held()
    push(prepared(kv, SETTINGS["sgd"]), 0)
    assert held() - before == 3 * KEY_BYTES
    kv.fuse(first)
    assert held() - before == first.nbytes + KEY_BYTES  # without the sums of the keys
    kv.push_bucket(first, flats(first, 0))
    assert held() - before == 2 * first.nbytes + KEY_BYTES
    for bucket in second:
        kv.fuse(bucket)
        kv.push_bucket(bucket, flats(bucket, 1))
    assert held() - before == 2 * sum(bucket.nbytes for bucket in second) + KEY_BYTES
    kv.close()
    del first, second, bucket
    assert held() == before


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_bucket_is_pushed_and_pulled_as_one(kv: KVStore, devices: int) -> None:
    bucket, values = bucket_of(), flats(bucket_of(), 0, devices)
    outs = [torch.empty(bucket.numel) for _ in range(devices)]
    prepared(kv).fuse(bucket)
    with Operations() as operations:
        kv.push_bucket(bucket, values)
    assert operations.counts == ({"add": devices - 1} if devices > 1 else {"copy": 1})
    with Operations() as operations:
        kv.pull_bucket(bucket, outs)
    assert operations.counts == {"copy": devices}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_plain_sgd_on_a_bucket_costs_one_sum_and_one_add_per_key(kv: KVStore, devices: int) -> None:
    bucket, values = bucket_of(), flats(bucket_of(), 0, devices)
    prepared(kv).fuse(bucket)
    kv.set_optimizer(("sgd", {"lr": 0.1}))
    kv.push_bucket(bucket, values)
    with Operations() as operations:
        kv.push_bucket(bucket, values)
    assert operations.counts == {"add": devices - 1 + len(KEYS)}


class PerKeyOptimizer(PerKey):
    """Third-party store that takes optimizers."""

    def _set_optimizer(self, group: OptimizerGroup) -> None:
        self.spec = group.spec


def test_a_third_party_store_without_update_refuses_clip_global_norm() -> None:
    with PerKeyOptimizer() as kv:
        with pytest.raises(ValueError, match="a 'per_key' store does not clip by clip_global_norm; use clip_norm or"):
            kv.set_optimizer(("sgd", {"clip_global_norm": 1.0}))
        kv.set_optimizer(("sgd", {"clip_norm": 1.0}))
        assert kv.spec.clip_norm == 1.0


def test_a_third_party_store_inherits_row_pulls_and_refuses_what_it_does_not_do() -> None:
    with PerKey() as kv:
        kv.init("table", torch.arange(12.0).view(4, 3))
        out, rows = torch.zeros(4, 3), RowSparse([0], torch.zeros(1, 3), (4, 3))
        kv.row_sparse_pull("table", [out, rows], row_ids=[3, 1, 3])
        assert out.tolist() == [[0, 0, 0], [3, 4, 5], [0, 0, 0], [9, 10, 11]]
        assert (rows.indices.tolist(), rows.values.tolist()) == ([1, 3], [[3, 4, 5], [9, 10, 11]])
        assert kv.compression_residuals() == {}
        kv.set_gradient_compression(None)
        kv.load_compression_residuals({})
        for call, words in (
            (lambda: kv.set_optimizer("sgd"), "a 'per_key' store runs no optimizer"),
            (lambda: kv.set_gradient_compression({"type": "2bit"}), "a 'per_key' store does not compress gradients"),
            (lambda: kv.set_gradient_compression({"type": "1bit"}), "'1bit'; expected one of"),
            (
                lambda: kv.load_compression_residuals({"table/0": out}),
                "keeps no compression residuals, but got 1",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        for call in (kv.optimizer_state, lambda: kv.learning_rate, lambda: kv.set_learning_rate(0.1)):
            with pytest.raises(RuntimeError, match="a 'per_key' store runs no optimizer"):
                call()
