"""Server in async mode: dead workers block nobody, and pushes that cannot be applied fail."""

from __future__ import annotations

import msgpack
import pytest
import torch

from gangline.kvstore.parameter_server.protocol import DENSE, Ack, Define, Failed, Pull, Push, Values, ValuesRead
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


def test_a_push_that_cannot_be_applied_fails_the_next_pull_of_its_worker() -> None:
    with Job(2) as job:
        members = job.members()
        one, other = raw_clients(members, mode="async")
        with one, other:
            define(one)
            small = Push(2, [[5, 1, DENSE, 8]], None, None, False, None)
            assert one.request(small, bytes(8)) == Ack([2])
            other.send(Pull(3, [[5, 0, DENSE, 0]], False, None))
            values, _ = other.receive()
            assert isinstance(values, Values)
            other.send(ValuesRead([values.number]))
            failed = one.request(Pull(4, [[5, 1, DENSE, 0]], False, None))
            assert isinstance(failed, Failed)
            assert failed.error == "MismatchError"
            assert "the push of worker 0 for key 'key' has 8 bytes" in failed.text
            one.send(Pull(5, [[5, 1, DENSE, 0]], False, None))  # the error is reported once
            assert isinstance(one.receive()[0], Values)
