"""Passes over memory of large sums between CPU contexts: each chunk is summed and copied while it is in a cache."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from gangline.collectives.devices.backends import copies
from gangline.kvstore import create

COUNT = (9 << 20) // 4 + 3  # elements; just above the size from which threads are used


class Passes:
    """Counts the bytes that each kind of numpy call writes, in all threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.written: dict[str, list[int]] = {"add": [], "copyto": []}
        self._lock = threading.Lock()
        add, copyto = np.add, np.copyto

        def counted_add(*arrays: Any, out: Any) -> None:
            self._count("add", out.nbytes)
            add(*arrays, out=out)

        def counted_copyto(out: Any, value: Any) -> None:
            self._count("copyto", out.nbytes)
            copyto(out, value)

        patch.setattr(np, "add", counted_add)
        patch.setattr(np, "copyto", counted_copyto)

    def _count(self, call: str, nbytes: int) -> None:
        with self._lock:
            self.written[call].append(nbytes)


@pytest.mark.parametrize("contexts", [2, 4])
@pytest.mark.parametrize("store", ["local", "device"])
def test_pushpull_passes_over_memory_once_per_value_and_output(
    store: str, contexts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [torch.randn(COUNT) for _ in range(contexts)]
    outs = [torch.empty(COUNT) for _ in range(contexts)]
    expected = values[0] + values[1]
    for value in values[2:]:
        expected += value
    with create(store) as kv:
        kv.init("w", torch.zeros(COUNT))
        passes = Passes(monkeypatch)
        kv.pushpull("w", values, outs)
        assert sum(passes.written["add"]) == (contexts - 1) * COUNT * 4
        assert sum(passes.written["copyto"]) == contexts * COUNT * 4
        assert max(passes.written["add"] + passes.written["copyto"]) <= copies._CHUNK
        outs[0].fill_(-1.0)  # the store has a copy of its own
        kv.pull("w", outs[0])
    assert all(torch.equal(out, expected) for out in outs)


def test_a_total_that_is_one_of_the_values_is_summed_once() -> None:
    values = [torch.randn(COUNT) for _ in range(4)]
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    copies.move([(values, values[2], [values[0], values[1], values[3]])])
    assert all(torch.equal(value, expected) for value in values)


def test_a_parameter_is_a_value_and_an_output() -> None:
    values = [torch.nn.Parameter(torch.ones(COUNT)) for _ in range(2)]
    versions = [value._version for value in values]
    with create("local") as kv:
        kv.init("w", torch.zeros(COUNT))
        kv.pushpull("w", values)
    assert all(torch.equal(value.detach(), torch.full((COUNT,), 2.0)) for value in values)
    assert all(value._version > version for value, version in zip(values, versions, strict=True))
