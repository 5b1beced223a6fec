"""Sums and copies within one process: operations of small ones, passes over memory of large ones."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from gangline.collectives.compiled_core import core, problem
from gangline.collectives.devices.device_group import reduce
from gangline.kvstore import create
from tests.kvstore.keyed import ranked
from tests.operations import Operations

COUNT = (9 << 20) // 4 + 3  # elements; just above the size from which threads are used


@pytest.mark.skipif(core is None, reason=f"gangline._core is not here: {problem}")
@pytest.mark.parametrize("contexts", [2, 4])
@pytest.mark.parametrize("store", ["local", "device"])
def test_the_compiled_core_reads_each_value_and_writes_each_output_once(
    store: str, contexts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [torch.randn(COUNT) for _ in range(contexts)]
    outs = [torch.empty(COUNT) for _ in range(contexts)]
    expected = torch.stack(values).sum(0) if contexts == 2 else ((values[0] + values[1]) + values[2]) + values[3]
    combine = Mock(wraps=core.combine)
    monkeypatch.setattr(core, "combine", combine)
    with create(store) as kv:
        kv.init("w", torch.zeros(COUNT))
        kv.pushpull("w", values, outs)
        [packed] = {call.args[3] for call in combine.call_args_list}
        head = memoryview(packed).cast("q")[:4].tolist()
        assert head == [0, COUNT, contexts, contexts + 1]  # the store's own copy is an output too
        outs[0].fill_(-1.0)
        kv.pull("w", outs[0])
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.skipif(core is None, reason=f"gangline._core is not here: {problem}")
@pytest.mark.parametrize("store", ["local", "device"])
def test_one_table_of_the_compiled_core_serves_all_keys_of_a_call(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [1, 7, 70_000, 300_000, 300_001] * 2
    keys = [*range(len(counts))]
    dtypes = [torch.float64 if key % 3 == 1 else torch.float32 for key in keys]
    values = [[torch.randn(count, dtype=dtype) for _ in range(3)] for count, dtype in zip(counts, dtypes, strict=True)]
    expected = [(a + b) + c for a, b, c in values]
    outs = [[torch.empty_like(value) for value in of_key] for of_key in values]
    combine = Mock(wraps=core.combine)
    monkeypatch.setattr(core, "combine", combine)
    with create(store) as kv:
        kv.init(keys, [torch.zeros_like(first) for first, *_ in values])
        for call, written in (
            (lambda: kv.pushpull(keys, values, outs), outs),
            (lambda: kv.push(keys, values), []),
            (lambda: kv.pull(keys, outs), outs),
            (lambda: kv.pushpull(keys, values), values),
        ):
            combine.reset_mock()
            for out in (out for of_key in outs if written is outs for out in of_key):
                out.fill_(-1)
            call()
            assert len({call.args[3] for call in combine.call_args_list}) == 1
            assert all(
                torch.equal(out, sum_) for of_key, sum_ in zip(written, expected, strict=False) for out in of_key
            )


@pytest.mark.parametrize("count", [2, 20])
def test_outputs_that_overlap_values_in_part_get_the_whole_sum(count: int) -> None:
    """Written span by span, they would overwrite values that are not yet summed."""
    size, keys = (1 << 20) + 5, [*range(count)]
    memory = [torch.randn(size + 1) for _ in keys]
    others = [torch.randn(size) for _ in keys]
    expected = [one[:-1] + other for one, other in zip(memory, others, strict=True)]
    with create("local") as kv:
        kv.init(keys, [torch.zeros(size) for _ in keys])
        kv.pushpull(
            keys,
            [[one[:-1], other] for one, other in zip(memory, others, strict=True)],
            [[one[1:]] for one in memory],
        )
    assert all(torch.equal(one[1:], total) for one, total in zip(memory, expected, strict=True))


def test_a_parameter_is_a_value_and_an_output() -> None:
    values = [torch.nn.Parameter(torch.ones(COUNT)) for _ in range(2)]
    versions = [value._version for value in values]
    with create("local") as kv:
        kv.init("w", torch.zeros(COUNT))
        kv.pushpull("w", values)
    assert all(torch.equal(value.detach(), torch.full((COUNT,), 2.0)) for value in values)
    assert all(value._version > version for value, version in zip(values, versions, strict=True))


@pytest.mark.parametrize(
    ("count", "dtype", "operations"),
    [
        (1, torch.float32, {"copy": 1}),
        *(
            (count, dtype, {"add": count - 1})
            for dtype in (torch.float64, torch.float32, torch.int64, torch.bool)
            for count in (2, 3, 4, 8)
        ),
        *((2, dtype, {"add": 1}) for dtype in (torch.float16, torch.bfloat16)),
        *(  # the first one is widened, and the sum is rounded
            (count, dtype, {"to": 1, "add": count - 1, "copy": 1})
            for dtype in (torch.float16, torch.bfloat16)
            for count in (3, 5)
        ),
    ],
)
def test_k_values_take_k_minus_1_adds(count: int, dtype: torch.dtype, operations: dict[str, int]) -> None:
    values, out = [ranked(rank).to(dtype) for rank in range(count)], torch.empty(2, 3, dtype=dtype)
    with Operations() as counted:
        reduce(values, out)
    assert counted.counts == operations
    assert all(torch.equal(value, ranked(rank).to(dtype)) for rank, value in enumerate(values))  # are not changed


def test_many_small_keys_take_one_call_for_all() -> None:
    keys = [f"key {number}" for number in range(20)]
    values, outs = ([[torch.ones(2, 3), torch.ones(2, 3)] for _ in keys] for _ in range(2))
    with create("local") as kv:
        kv.init(keys, [torch.zeros(2, 3) for _ in keys])
        with Operations() as counted:
            kv.pushpull(keys, values, outs)
    assert all(out.unique().tolist() == [2.0] for of_key in outs for out in of_key)
    assert counted.counts == {"copy of many": 3, "add of many": 1}
