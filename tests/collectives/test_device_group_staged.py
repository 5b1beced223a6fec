"""Staged backend on simulated GPUs: each operation waits for what it needs, and pieces overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline import gpu
from gangline.collectives.devices.backends import staged
from gangline.collectives.devices.backends.staged import Staged
from gangline.collectives.devices.device_group import DeviceGroup
from tests.collectives.grid import combined
from tests.collectives.simulated_gpus import current_stream, on_simulated_gpu, side_streams_run, simulated_gpus

PIECE = 64  # bytes: 16 elements of float32


@pytest.fixture
def order() -> str:
    return "early"


@pytest.fixture(autouse=True)
def _machine(order: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(staged, "PIECE", PIECE)
    with side_streams_run(order), simulated_gpus():
        yield


def values_on(gpus: Sequence[int], count: int, first: int) -> tuple[list[Tensor], list[Any]]:
    values = [torch.arange(count, dtype=torch.float32) * 7 + first + position for position in range(len(gpus))]
    return values, [on_simulated_gpu(value, index) for value, index in zip(values, gpus, strict=True)]


@pytest.mark.parametrize("order", ["late", "early", "1", "2", "3"])
@pytest.mark.parametrize("gpus", [[0, 1], [0, 1, 2, 3], [0, 1, 0], [2, 2]], ids=str)
def test_results_do_not_depend_on_the_speed_of_streams(gpus: list[int]) -> None:
    """Calls follow each other, in the same buffers, while none of the earlier ones has ended."""
    group = DeviceGroup([gpu(index) for index in gpus], "staged")
    expected: list[Tensor] = []
    made: list[Any] = []
    for call, count in enumerate([200, 3, 170]):
        root = call % len(gpus)
        values, tensors = values_on(gpus, count, call)
        made += group.all_reduce(tensors)
        reduced = group.reduce(tensors, root, "mean", torch.zeros_like(tensors[root]))
        expected += [combined(values, "sum")] * (len(gpus) + 1)
        others, tensors = values_on(gpus, count, 100 + call)
        outs, copies = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(2))
        group.move([(tensors, tensors[root], outs), ((), reduced, copies)])
        made += [reduced, *copies, tensors[root], *outs]
        expected += [combined(values, "sum")] * len(gpus) + [combined(others, "sum")] * (1 + len(gpus))
        values, tensors = values_on(gpus, count, 200 + call)
        made += group.broadcast(tensors, root)
        expected += [values[root]] * len(gpus)
    assert all(torch.equal(tensor.host(), want) for tensor, want in zip(made, expected, strict=True))


def test_pieces_are_copied_while_an_earlier_one_is_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Staged([torch.device("cuda", index) for index in range(2)])
    backend.all_reduce(values_on([0, 1], 8 * 16, 0)[1], "sum")  # allocates the buffers
    combine: Callable[..., None] = staged._combine
    is_open = False

    def combine_later(values: Sequence[Tensor], op: str, total: Any, outs: Sequence[Tensor]) -> None:
        current_stream(total.card).put(lambda: is_open)
        combine(values, op, total, outs)

    monkeypatch.setattr(staged, "_combine", combine_later)
    values, tensors = values_on([0, 1], 6 * 16, 0)
    backend.move([(tensors, tensors[0], ())])
    for kind, position, pieces in (("received", 0, {0, 1}), ("value", 1, {2, 3})):
        memory: list[Any] = [buffer.memory for buffer in backend._buffers[kind, position, 1]]
        contents = {tuple((one.inner if one.is_cuda else one).view(torch.float32).tolist()) for one in memory}
        assert contents == {tuple(values[1].view(6, 16)[piece].tolist()) for piece in pieces}, kind
    is_open = True
    assert torch.equal(tensors[0].host(), combined(values, "sum"))


def test_each_value_and_result_crosses_the_host_once_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, done = Staged([torch.device("cuda", index) for index in range(3)]), []
    enqueue = backend._enqueue

    def record(position: int, use: Any, *arguments: Any) -> None:
        done.append((use, position))
        enqueue(position, use, *arguments)

    monkeypatch.setattr(backend, "_enqueue", record)
    backend.all_reduce(values_on([0, 1, 2], 9 * 16, 0)[1], "sum")
    for position in range(3):  # each one owns 3 of 9 pieces
        assert done.count(("compute", position)) == 3
        assert done.count(("out", position)) == 6 + 3
        assert done.count(("in", position)) == 3 * 2 + 6
    assert done[:4] == [("out", 1), ("out", 2), ("in", 0), ("in", 0)]
    assert done[4:6] == [("out", 0), ("out", 2)]  # of the second piece, before the first is combined
    assert {len(pair) for pair in backend._buffers.values()} == {2}
