"""Execution of schedules: no memory is written while it is read, sums are rounded once, foreign messages fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline.collectives.call_signature import DTYPES
from gangline.collectives.engine.executor import AllToAllChunks, EqualChunks, MisplacedMessageError, run
from gangline.collectives.engine.reduction import combine
from gangline.collectives.errors import ProtocolError
from gangline.collectives.liveness.membership import ThreadMembership
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.schedule import Receive, Reduce, Send, Step
from gangline.collectives.transports.base import PIECE, MessageTag
from gangline.collectives.transports.in_process import InProcessTransport, ThreadGroup
from tests.collectives.ranks import combined, ops_for, same, values

TAG = MessageTag(7, 1234)


def transports(size: int) -> list[InProcessTransport]:
    """Return the transports of ranks that are threads of this process."""
    group = ThreadGroup(size)
    memberships = ThreadMembership.group(size)
    return [
        InProcessTransport(rank, group, Watchdog(membership, timeout=30, stall_warn=30))
        for rank, membership in enumerate(memberships)
    ]


class Running:
    """Function in a thread; `result` waits for it and raises its error."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._error = error


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("count", [3, PIECE // 4 + 5])
def test_memory_is_not_written_before_a_slow_rank_has_read_it(is_reduced: bool, count: int) -> None:
    here, there = transports(2)
    own, others = values(count, 0, torch.float32), values(count, 1, torch.float32)
    mine = own.clone()
    step: Step = Reduce((0, 1), 0, 1, complete=True) if is_reduced else Receive(1, 0, 1)
    running = Running(run, [Send(1, 0, 1), step], here, EqualChunks(mine, 1), TAG)
    there.send(0, as_bytes(others), TAG).wait()  # rank 0 has read all of it, and would have written by now
    late = torch.empty(count)
    receive_request = there.receive(0)
    assert (receive_request.message_tag, receive_request.nbytes) == (TAG, count * 4)
    assert running.is_alive()  # it waits until its message is read
    receive_request.into(as_bytes(late))
    running.result()
    same(late, own, "what rank 0 sent")
    same(mine, combined([own, others], "sum") if is_reduced else others, "what rank 0 has in the end")


def test_an_incomplete_sum_is_not_divided() -> None:
    here, there = transports(3)[:2]
    mine = torch.tensor([8.0, 16.0])
    program = [Reduce((0, 1), 0, 1, complete=False), Reduce((0, 1), 1, 2, complete=True)]
    for number in (1.0, 5.0):
        there.send(0, as_bytes(torch.tensor([number])), TAG)
    run(program, here, EqualChunks(mine, 2), TAG, "mean", divisor=3)
    assert mine.tolist() == [9.0, 7.0]


@pytest.mark.parametrize("message_tag", [MessageTag(8, 1234), MessageTag(7, 1235)])
def test_a_message_of_another_call_is_an_error(message_tag: MessageTag) -> None:
    here, there = transports(2)
    for step in (Receive(1, 0, 1), Reduce((0, 1), 0, 1, complete=True)):
        there.send(0, as_bytes(torch.ones(3)), message_tag)
        text = f"rank 1 sent a message of call {message_tag.sequence}"
        with pytest.raises(MisplacedMessageError, match=text) as caught:
            run([step], here, EqualChunks(torch.ones(3), 1), TAG)
        assert (caught.value.source, caught.value.message_tag) == (1, message_tag)
        here.receive(1).done()


def test_a_message_of_another_length_is_an_error() -> None:
    here, there = transports(2)
    there.send(0, as_bytes(torch.ones(4)), TAG)
    with pytest.raises(ProtocolError, match="rank 1 sent 16 bytes, expected 12"):
        run([Receive(1, 0, 1)], here, EqualChunks(torch.ones(3), 1), TAG)


def test_rows_of_an_all_to_all_are_given_and_taken_by_their_numbers() -> None:
    given = (torch.arange(12) * 10 + 1).view(3, 4)
    taken = torch.zeros(3, 4, dtype=torch.int64)
    rows = AllToAllChunks(1, 3, given, taken)
    assert torch.equal(rows.source(5, 6), given[2])
    assert torch.equal(rows.source(3, 5), given[:2].reshape(-1))
    rows.target(7, 8).fill_(9)
    assert torch.equal(taken, torch.tensor([[0] * 4, [0] * 4, [9] * 4]))
    with pytest.raises(ValueError, match="chunks 4 to 7 of an all-to-all come from several ranks; expected one chunk"):
        rows.target(4, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_may_be_one_of_the_values(dtype: torch.dtype) -> None:
    for op, number in product(ops_for(dtype), (1, 2, 3, 5)):
        for place in range(number):
            rows = [values(19, rank, dtype) for rank in range(number)]
            want = combined([row.clone() for row in rows], op)
            combine(rows, op, rows[place], number if op == "mean" else 1)
            same(rows[place], want, f"{op} of {dtype} into {place} of {number}")
            for rank, row in enumerate(rows):
                if rank != place:
                    same(row, values(19, rank, dtype), "another value")
