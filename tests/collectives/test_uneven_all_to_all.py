"""All-to-all of rows that differ in size: results, errors, and how many exchanges and messages it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gangline import Communicator, spawn
from gangline.collectives.errors import MismatchError


def _row(source: int, target: int, scale: int) -> Tensor:
    """Return what one rank sends to another: nothing from rank 0 to itself."""
    return torch.arange(scale * (source + 2 * target)) * 100 + 10 * source + target


def _exchange(comm: Communicator, scale: int) -> None:
    outs = [torch.full((scale * (source + 2 * comm.rank),), -1) for source in range(comm.size)]
    comm.all_to_all_uneven([_row(comm.rank, target, scale) for target in range(comm.size)], outs)
    for source, out in enumerate(outs):
        assert out.equal(_row(source, comm.rank, scale))


def _counts(comm: Communicator, scale: int) -> tuple[int, int]:
    """Return the slot exchanges and the messages that this rank needs."""
    engine, transport = comm._engine, comm._resources.transport
    exchange_slots, send = engine.exchange_slots, transport.send
    counts = {"exchanges": 0, "messages": 0}

    def exchanged(*arguments: Any) -> int:
        counts["exchanges"] += 1
        return exchange_slots(*arguments)

    def sent(*arguments: Any) -> Any:
        counts["messages"] += 1
        return send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "exchange_slots", exchanged)
        patch.setattr(transport, "send", sent)
        _exchange(comm, scale)
    return counts["exchanges"], counts["messages"]


def _in_all_sizes(comm: Communicator) -> list[tuple[int, int]]:
    comm.barrier()
    return [_counts(comm, scale) for scale in (0, 1, 1000, 100_000)]


def test_small_rows_take_one_exchange_and_larger_ones_a_message_for_each_pair() -> None:
    found = spawn(_in_all_sizes, 3, transport="shared_memory", timeout=60)
    for few, more, small, large in found:
        assert few == more == small == (1, 0)
        assert large == (1, 2)


def test_rows_between_ranks_that_share_no_memory() -> None:
    assert all(len(found) == 4 for found in spawn(_in_all_sizes, 3, transport="ipc", timeout=60))


def _only_rank_0_sends_much(comm: Communicator) -> None:
    count = 200_000 if comm.rank == 0 else 3
    outs = [torch.zeros(200_000 if source == 0 else 3) for source in range(comm.size)]
    comm.all_to_all_uneven([torch.full((count,), comm.rank + 1.0)] * comm.size, outs)
    assert [out.unique().tolist() for out in outs] == [[source + 1.0] for source in range(comm.size)]


def test_some_rows_may_be_small_and_others_large() -> None:
    spawn(_only_rank_0_sends_much, 3, transport="shared_memory", timeout=60)


def _sizes_that_differ(comm: Communicator) -> None:
    rows = [torch.zeros(3 if (comm.rank, to) == (1, 0) else 2) for to in range(comm.size)]
    with pytest.raises(MismatchError, match="rank 1 sends 3 elements to rank 0, which expects 2"):
        comm.all_to_all_uneven(rows, [torch.zeros(2) for _ in rows])
    _exchange(comm, 2)
    with pytest.raises(ValueError, match="1 outs were given; expected one for each of 2 ranks"):
        comm.all_to_all_uneven(rows, [torch.zeros(2)])
    with pytest.raises(MismatchError, match=r"all_to_all_uneven\(float64\)"):
        comm.all_to_all_uneven(*([torch.zeros(2, dtype=(torch.float32, torch.float64)[comm.rank])] * 2,) * 2)


@pytest.mark.parametrize("transport", ["shared_memory", "ipc"])
def test_sizes_and_dtypes_that_differ_raise_on_all_ranks(transport: str) -> None:
    spawn(_sizes_that_differ, 2, transport=transport, timeout=60)
