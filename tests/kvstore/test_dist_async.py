"""A server in async mode, spoken to by hand: who is gone holds nobody up, and what cannot be applied is told."""

from __future__ import annotations

import msgpack
import pytest
import torch

from gangline.kvstore.parameter_server.protocol import DENSE, Ack, Define, Done, Failed, Pull, Push, Values
from tests.kvstore.dist_threads import Job, Line, of_ranks

pytestmark = pytest.mark.timeout(60)
FLOATS = 16 << 10
NBYTES = 4 * FLOATS  # values of this size are read where they lie


def define(line: Line) -> None:
    definition = Define(1, [[5, "float32", [FLOATS], 1, msgpack.packb("key"), 0, True]], None)
    assert line.ask(definition, bytes(NBYTES)) == Ack([1])


def push(line: Line, sequence: int, number: int, data: bytes) -> None:
    pushed = Push(sequence, [[5, number, DENSE, len(data)]], None, None, False, None)
    assert line.ask(pushed, data) == Ack([sequence])


def test_who_dies_while_it_is_held_back_is_no_reader_for_ever() -> None:
    ones = torch.ones(FLOATS).numpy().tobytes()
    with Job(2) as job:
        members = job.members()
        slow, fast = of_ranks(members, mode="async", staleness=0)
        with slow, fast:
            define(slow)
            push(fast, 2, 1, ones)
            fast.say(Pull(3, [[5, 1, DENSE, 0]], False, None))  # it is ahead, and waits
            push(fast, 4, 2, ones)
            members[1].close()
            for number in (1, 2, 3):  # these would be applied only when the dead one had read
                push(slow, 10 + number, number, ones)
                slow.say(Pull(20 + number, [[5, number, DENSE, 0]], False, None))
                values, (data,) = slow.hear()
                assert isinstance(values, Values)
                assert torch.frombuffer(bytearray(data), dtype=torch.float32).eq(2 + number).all()
                slow.say(Done([values.number]))


def test_a_push_that_cannot_be_applied_is_told_to_who_pushed_it() -> None:
    with Job(2) as job:
        members = job.members()
        one, other = of_ranks(members, mode="async")
        with one, other:
            define(one)
            small = Push(2, [[5, 1, DENSE, 8]], None, None, False, None)
            assert one.ask(small, bytes(8)) == Ack([2])
            other.say(Pull(3, [[5, 0, DENSE, 0]], False, None))
            values, _ = other.hear()
            assert isinstance(values, Values)
            other.say(Done([values.number]))
            failed = one.ask(Pull(4, [[5, 1, DENSE, 0]], False, None))
            assert isinstance(failed, Failed)
            assert failed.error == "MismatchError"
            assert "the push of worker 0 for key 'key' has 8 bytes" in failed.text
            one.say(Pull(5, [[5, 1, DENSE, 0]], False, None))  # it is told once
            assert isinstance(one.hear()[0], Values)
