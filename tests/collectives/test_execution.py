"""Execution of schedules: no memory is written while it is read, and foreign messages fail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from gangline.collectives.engine.executor import EqualChunks, run
from gangline.collectives.errors import ProtocolError
from gangline.collectives.liveness.membership import ThreadMembership
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.schedule import Receive, Reduce, Send, Step
from gangline.collectives.transports.base import PIECE, MessageTag
from gangline.collectives.transports.in_process import InProcessTransport, ThreadGroup
from tests.collectives.ranks import combined, same, values

TAG = MessageTag(7, 1234)


def transports(size: int) -> list[InProcessTransport]:
    """Return the transports of ranks that are threads of this process."""
    group = ThreadGroup(size)
    memberships = ThreadMembership.group(size)
    return [
        InProcessTransport(rank, group, Watchdog(membership, timeout=30, stall_warn=30))
        for rank, membership in enumerate(memberships)
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("count", [3, PIECE // 4 + 5])
def test_memory_is_not_written_before_a_slow_rank_has_read_it(is_reduced: bool, count: int) -> None:
    here, there = transports(2)
    own, others = values(count, 0, torch.float32), values(count, 1, torch.float32)
    mine = own.clone()
    step: Step = Reduce((0, 1), 0, 1, complete=True) if is_reduced else Receive(1, 0, 1)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, [Send(1, 0, 1), step], here, EqualChunks(mine, 1), TAG)
        there.send(0, as_bytes(others), TAG).wait()  # rank 0 has read all of it, and would have written by now
        late = torch.empty(count)
        receive_request = there.receive(0)
        assert (receive_request.message_tag, receive_request.nbytes) == (TAG, count * 4)
        assert not running.done()  # it waits until its message is read
        receive_request.into(as_bytes(late))
        running.result()
    same(late, own, "what rank 0 sent")
    same(mine, combined([own, others], "sum") if is_reduced else others, "what rank 0 has in the end")


def test_a_message_of_another_length_is_an_error() -> None:
    here, there = transports(2)
    there.send(0, as_bytes(torch.ones(4)), TAG)
    with pytest.raises(ProtocolError, match="rank 1 sent 16 bytes, expected 12"):
        run([Receive(1, 0, 1)], here, EqualChunks(torch.ones(3), 1), TAG)
