"""Server in async mode: dead workers block nobody."""

from __future__ import annotations

import msgpack
import pytest
import torch

from gangline.kvstore.parameter_server.protocol import DENSE, Ack, Define, Pull, Push, Values, ValuesRead
from tests.kvstore.parameter_server.in_process import Job, RawClient, raw_clients

pytestmark = pytest.mark.timeout(60)
FLOATS = 16 << 10
NBYTES = 4 * FLOATS  # large enough to be read in place


def define(client: RawClient) -> None:
    definition = Define(1, [[5, "float32", [FLOATS], 1, msgpack.packb("key"), 0, True]], None)
    assert client.request(definition, bytes(NBYTES)) == Ack([1])


def push(client: RawClient, sequence: int, number: int, data: bytes) -> None:
    pushed = Push(sequence, [[5, number, DENSE, len(data)]], None, None, False, None)
    assert client.request(pushed, data) == Ack([sequence])


def test_a_worker_that_dies_while_it_waits_does_not_count_as_reader() -> None:
    ones = torch.ones(FLOATS).numpy().tobytes()
    with Job(2) as job:
        members = job.members()
        slow, fast = raw_clients(members, mode="async", staleness=0)
        with slow, fast:
            define(slow)
            push(fast, 2, 1, ones)
            fast.send(Pull(3, [[5, 1, DENSE, 0]], False, None))  # it is ahead and waits
            push(fast, 4, 2, ones)
            members[1].close()
            for number in (1, 2, 3):  # a dead reader would block these
                push(slow, 10 + number, number, ones)
                slow.send(Pull(20 + number, [[5, number, DENSE, 0]], False, None))
                values, (data,) = slow.receive()
                assert isinstance(values, Values)
                assert torch.frombuffer(bytearray(data), dtype=torch.float32).eq(2 + number).all()
                slow.send(ValuesRead([values.number]))
