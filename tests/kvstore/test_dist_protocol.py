"""The parameter server's messages: what goes through, what is refused, and that servers outlive whatever is sent."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.shm.segments import Offer
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import (
    ABSENT,
    CODED,
    DENSE,
    DTYPES,
    ROWS,
    Ack,
    Answer,
    Command,
    Define,
    Done,
    Free,
    Hello,
    Message,
    Pull,
    Push,
    Values,
    Welcome,
)
from gangline.kvstore.parameter_server.server import optimizer_shards
from gangline.kvstore.parameter_server.server import sessions as answers_module
from gangline.kvstore.parameter_server.server.sessions import Sessions, WorkerSession
from gangline.kvstore.parameter_server.transport.shared_memory import ALIGNMENT
from tests.kvstore.dist_threads import Job, Line, of_ranks

pytestmark = pytest.mark.timeout(110)

KINDS = sorted((cls for cls in vars(protocol).values() if isinstance(cls, type) and hasattr(cls, "kind")), key=str)
COUNT = st.integers(0, 2**62 - 1)
NUMBER = st.floats(0, allow_infinity=False, allow_nan=False) | st.integers(0, 2**60)
SIZE = st.integers(0, protocol.MAX_PART)
ENTRY = st.tuples(COUNT, COUNT, st.sampled_from([DENSE, ROWS, CODED, ABSENT]), SIZE).map(list)
DEFINITION = st.tuples(
    COUNT,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 50), max_size=4),
    st.integers(1, 9),
    st.binary(max_size=9),
    COUNT,
    st.booleans(),
).map(list)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "Rank": st.integers(-1, protocol.MAX_RANKS - 1),
    "Count": COUNT,
    "Word": st.text(max_size=20),
    "Text": st.text(max_size=200),
    "Blob": st.binary(max_size=200),
    "Flag": st.booleans(),
    "Number": NUMBER,
    "MaybeNumber": st.none() | NUMBER,
    "Words": st.lists(st.text(max_size=9), max_size=4),
    "Blobs": st.lists(st.binary(max_size=9), max_size=4),
    "Process": st.tuples(st.text(max_size=9), COUNT, COUNT).map(list),
    "Sequences": st.lists(COUNT, max_size=5),
    "Place": st.none() | st.tuples(COUNT, COUNT).map(list),
    "Entries": st.lists(ENTRY, max_size=4),
    "Defined": st.lists(DEFINITION, max_size=4),
}
# What a field of each kind may not hold, beside what is of another type altogether.
OUTSIDE: dict[str, list[Any]] = {
    "Rank": [-2, protocol.MAX_RANKS, 1.0, True],
    "Count": [-1, 2**62, 1.0, False],
    "Word": ["x" * 4097, b"x"],
    "Text": ["x" * (2**20 + 1), b"x"],
    "Blob": ["x"],
    "Flag": [0, 1, None],
    "Number": [-1.0, float("nan"), float("inf"), True, None, "1"],
    "MaybeNumber": [-0.5, float("nan"), float("inf"), False, "1"],
    "Words": ["x", [b"x"], [1]],
    "Blobs": [b"x", ["x"], [None]],
    "Process": [["x", 1], ["x", 1, "1"], [1, 1, 1], ["x", True, 1], "x"],
    "Sequences": [1, [-1], [1.0], [2**62], [None]],
    "Place": [[1], [1, 2, 3], [-1, 1], [1, -1], [1.0, 1], 7],
    "Entries": [
        [1],
        [[1, 2, DENSE]],
        [[1, 2, 4, 4]],
        [[1, 2, DENSE, -1]],
        [[-1, 2, DENSE, 4]],
        [[1, 2, DENSE, protocol.MAX_PART + 1]],
        [[1.0, 2, DENSE, 4]],
        [[1, True, DENSE, 4]],
    ],
    "Defined": [
        [1],
        [[1, "float32", [2], 1, b"k", 0]],
        [[-1, "float32", [2], 1, b"k", 0, True]],
        [[1, "float33", [2], 1, b"k", 0, True]],
        [[1, "complex64", [2], 1, b"k", 0, True]],
        [[1, "float32", [-2], 1, b"k", 0, True]],
        [[1, "float32", [2**20, 2**20], 1, b"k", 0, True]],
        [[1, "float32", [1] * (protocol.MAX_AXES + 1), 1, b"k", 0, True]],
        [[1, "float32", [2], 0, b"k", 0, True]],
        [[1, "float32", [2], 1, "k", 0, True]],
        [[1, "float32", [2], 1, b"k", -1, True]],
        [[1, "float32", [2], 1, b"k", 0, 1]],
        [[1, "float32", 2, 1, b"k", 0, True]],
    ],
}


def made(cls: Any) -> st.SearchStrategy[Message]:
    return st.builds(cls, **{field.name: FIELDS[field.type] for field in dataclasses.fields(cls)})


MESSAGES = st.sampled_from(KINDS).flatmap(made)


def packed(kind: Any, *values: Any, version: Any = protocol.VERSION) -> bytes:
    return bytes(msgpack.packb([version, kind, *values]))


# On its own


@given(MESSAGES)
def test_every_message_comes_out_as_it_went_in(message: Message) -> None:
    assert protocol.unpack(protocol.pack(message)) == message


@pytest.mark.parametrize("cls", KINDS)
def test_a_field_of_another_type_or_beyond_its_bounds_is_refused(cls: Any) -> None:
    fields = dataclasses.fields(cls)
    good = [EXAMPLES[field.type] for field in fields]
    assert protocol.unpack(packed(cls.kind, *good)) == cls(*good)
    for index, field in enumerate(fields):
        strange = [{"a": 1}, -1, 1.5, True, None, b"x", "x", [{}], [[[]]], 2**64 - 1]
        for value in [*OUTSIDE[field.type], *(v for v in strange if not fits(v, field.type))]:
            said = rf"{cls.__name__} came with {field.name}=.*expected a {field.type}"
            with pytest.raises(ProtocolError, match=said):
                protocol.unpack(packed(cls.kind, *good[:index], value, *good[index + 1 :]))
    for values in [[*good, 0], *([good[:-1]] if good else [])]:
        said = f"{cls.__name__} came with {len(values)} fields; expected {len(good)}"
        with pytest.raises(ProtocolError, match=said):
            protocol.unpack(packed(cls.kind, *values))


EXAMPLES: dict[str, Any] = {
    "Rank": 3,
    "Count": 5,
    "Word": "word",
    "Text": "text",
    "Blob": b"blob",
    "Flag": True,
    "Number": 0.5,
    "MaybeNumber": None,
    "Words": ["a"],
    "Blobs": [b"a"],
    "Process": ["boot", 7, 9],
    "Sequences": [1, 2],
    "Place": [64, 128],
    "Entries": [[1, 2, DENSE, 8]],
    "Defined": [[1, "float32", [2, 3], 3, b"\xa1k", 0, True]],
}


def fits(value: Any, name: str) -> bool:
    """Whether a value that is strange in most fields is none in this one."""
    allowed: dict[str, tuple[Any, ...]] = {
        "Rank": (-1,),
        "Word": ("x",),
        "Text": ("x",),
        "Blob": (b"x",),
        "Flag": (True,),
        "Number": (1.5, 2**64 - 1),
        "MaybeNumber": (1.5, None, 2**64 - 1),
        "Place": (None,),
    }
    return any(value is one or (type(value) is type(one) and value == one) for one in allowed.get(name, ()))


def test_what_is_cut_off_or_no_message_is_refused() -> None:
    whole = protocol.pack(Push(7, [[1, 2, DENSE, 8], [3, 4, ROWS, 9]], 0.5, 1e-3, True, [64, 128]))
    for end in range(len(whole)):
        with pytest.raises(ProtocolError):
            protocol.unpack(whole[:end])
    for junk, said in (
        (whole + b"\0", "no msgpack"),
        (b"", "no msgpack"),
        (msgpack.packb({}), "no list"),
        (msgpack.packb([protocol.VERSION]), "no list"),
        (packed(4, version=2), "version 2"),
        (packed(4, version="1"), "version '1'"),
        (packed(999), "unknown kind 999"),
        (packed("4"), "unknown kind '4'"),
        (packed(True), "unknown kind True"),
        (packed([4]), "unknown kind"),
        (packed(4, msgpack.ExtType(5, b"code")), "no msgpack"),
        (packed(4, msgpack.Timestamp(1)), "no msgpack"),
        (b"\x91" * 5000, "no msgpack"),
        (b"\xdd\xff\xff\xff\xff", "no msgpack"),
        (b"\xc6\xff\xff\xff\xff", "no msgpack"),
    ):
        with pytest.raises(ProtocolError, match=said):
            protocol.unpack(junk)
    with pytest.raises(ProtocolError, match="a header of 9 bytes came; expected at most 8"):
        protocol.unpack(b"123456789", 8)


@given(st.binary(max_size=64) | st.lists(st.integers(-9, 2**63), max_size=9).map(msgpack.packb))
def test_no_bytes_do_more_than_be_refused(frame: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(protocol.unpack(frame), Message)


def test_the_description_names_every_message_and_field() -> None:
    text = Path(__file__).parents[2].joinpath("docs/protocol.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE))
    assert rows == {str(cls.kind): cls.__name__ for cls in KINDS}
    for cls in KINDS:
        (row,) = re.findall(rf"^\| {cls.kind} \| `{cls.__name__}` \| [^|]+ \| (.*)\|$", text, re.MULTILINE)
        assert re.findall(r"`(\w+): (\w+)`", row) == [(field.name, field.type) for field in dataclasses.fields(cls)]
    for name in FIELDS:
        assert f"| `{name}` |" in text
    for dtype in DTYPES:
        assert f"`{dtype}`" in text
    assert f"version {protocol.VERSION}" in text
    assert f"multiple of {ALIGNMENT} bytes" in text


# A server in the midst of it

FLOATS = 100
FIRST = torch.arange(FLOATS).float()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def floats(frame: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.float32)


def defined(sequence: int, number: int, shape: list[int], width: int, key: Any) -> Define:
    return Define(sequence, [[number, "float32", shape, width, msgpack.packb(key), 0, True]], None)


class Pair:
    """Two workers that speak by hand with one server, and honest rounds between them."""

    def __init__(self, job: Job) -> None:
        members = job.members()
        self.server = job.server()
        self.lines = of_ranks(members)
        self.address = members[0].servers[0]
        self.sequence = 10
        self.round = 0
        assert self.lines[0].ask(defined(1, 5, [FLOATS], 1, "honest"), bytes_of(FIRST)) == Ack([1])
        assert self.lines[0].ask(defined(2, 6, [10, 10], 10, "table"), bytes_of(FIRST)) == Ack([2])

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def serves(self) -> None:
        """Run an honest round."""
        self.round += 1
        for rank, line in enumerate(self.lines):
            sequence = self.next()
            entries = [[5, self.round, DENSE, 4 * FLOATS]]
            assert line.ask(Push(sequence, entries, None, None, False, None), bytes_of(FIRST * (rank + 1))) == Ack(
                [sequence]
            )
        for line in self.lines:
            sequence = self.next()
            line.say(Pull(sequence, [[5, self.round, DENSE, 0]], False, None))
            values, (data,) = line.hear()
            assert values == Values(sequence, 0, [[5, self.round, DENSE, 4 * FLOATS]], [])
            assert torch.equal(floats(data), FIRST * 3)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Job(2) as job:
        pair = Pair(job)
        yield pair
        for line in pair.lines:
            line.__exit__()


def test_a_server_outlives_hostile_bytes(pair: Pair) -> None:
    one = pair.lines[1]
    n = pair.next
    zeros = bytes(4 * FLOATS)
    dense = [[5, 1000, DENSE, 4 * FLOATS]]
    before = pair.server.junk
    hostile: list[tuple[str, Any, list[bytes]]] = [
        ("ProtocolError: a header came that is no msgpack", b"\xc1\xff", []),
        ("ProtocolError: a header came that is no msgpack", b"", []),
        ("ProtocolError: a message of protocol version 9", packed(23, version=9), []),
        ("ProtocolError: a message of unknown kind 77", packed(77), []),
        ("ProtocolError: Push came with 1 fields", packed(23, 1), []),
        ("ProtocolError: Values came from worker 1", Values(n(), 1, [], []), []),
        ("ProtocolError: 0 data frames came for 1", Push(n(), dense, None, None, False, None), []),
        ("ProtocolError: 2 data frames came", Push(n(), dense, None, None, False, None), [zeros, zeros]),
        ("ProtocolError: 1 data frames came", Push(n(), dense, None, None, False, None), [zeros[1:]]),
        ("ProtocolError: .* does not share", Push(n(), dense, None, None, False, [0, 4 * FLOATS]), []),
        ("KeyError: part 99 is unknown to server 0", Push(n(), [[99, 1, 0, 0]], None, None, False, None), [b""]),
        ("KeyError: part 99 is unknown to server 0", Pull(n(), [[99, 0, 0, 0]], False, None), []),
        ("ProtocolError: 7 bytes of row numbers", Pull(n(), [[6, 0, ROWS, 7]], True, None), [bytes(7)]),
        ("ValueError: rows 10 to 10", Pull(n(), [[6, 0, ROWS, 8]], True, None), [bytes([10, *bytes(7)])]),
        ("ValueError: rows -1 to -1", Pull(n(), [[6, 0, ROWS, 8]], True, None), [b"\xff" * 8]),
        ("ProtocolError: worker 1 defines parts", defined(n(), 7, [FLOATS], 1, "mine"), [zeros]),
        ("ProtocolError: command 'shutdown'", Command(n(), "shutdown", b""), []),
        ("RuntimeError: there is no optimizer", Command(n(), "state", b""), []),
        ("ValueError: there is no optimizer", Command(n(), "load", b""), []),
        ("ValueError: Unpack failed", Command(n(), "optimizer", b""), []),
        ("TypeError", Command(n(), "optimizer", msgpack.packb(7)), []),
        ("ValueError: optimizer 'sdg' is unknown", Command(n(), "optimizer", msgpack.packb(["sdg", {}, [], []])), []),
        ("TypeError", Command(n(), "optimizer", msgpack.packb([{}, {}, [], []])), []),
        ("ValueError", Command(n(), "compression", b"\xc1"), []),
        ("TypeError", Command(n(), "compression", msgpack.packb(5)), []),
        ("ValueError", Command(n(), "compression", msgpack.packb({"type": "zip"})), []),
        ("TypeError", Command(n(), "forget", msgpack.packb(5)), []),
    ]
    for said, message, frames in hostile:
        text = one.refusal(message, *frames)
        assert re.match(said, text), text
    assert pair.server.junk == before + len(hostile)
    pair.serves()


def test_rank_0_itself_may_define_nonsense(pair: Pair) -> None:
    zero = pair.lines[0]
    n = pair.next
    for said, message, frames in (
        ("ProtocolError: part 8 has a key", defined(n(), 8, [2], 1, [1]), [bytes(8)]),
        ("ProtocolError: part 8 has a key", defined(n(), 8, [2], 1, True), [bytes(8)]),
        ("ProtocolError: part 8 of 3 elements has rows of 2", defined(n(), 8, [3], 2, "x"), [bytes(12)]),
        ("ProtocolError: 1 data frames came", defined(n(), 8, [2**33], 1, "x"), [bytes(8)]),
        ("RuntimeError|ValueError|OverflowError|TypeError", defined(n(), 8, [0, 2**63], 1, "x"), [b""]),
        ("MismatchError: part 5 is of key 'honest'", defined(n(), 5, [FLOATS], 1, "other"), [bytes(4 * FLOATS)]),
        ("MismatchError: part 5 is of key 'honest'", defined(n(), 5, [FLOATS - 1], 1, "honest"), [bytes(396)]),
    ):
        text = zero.refusal(message, *frames)
        assert re.match(said, text), text
    pair.serves()


def test_strangers_are_told_and_change_nothing(pair: Pair) -> None:
    with Line(pair.address) as stranger:
        push = Push(1, [[5, 1, DENSE, 4 * FLOATS]], None, None, False, None)
        assert "came before a Hello" in stranger.refusal(push, bytes(4 * FLOATS))
        for hello, said in (
            (Hello(2, 1, "sync", -1, b"", 0), "worker 2 of view 1"),
            (Hello(-1, 1, "sync", -1, b"", 0), "worker -1 of view 1"),
            (Hello(1, 2, "sync", -1, b"", 0), "expected view 1"),
            (Hello(1, 1, "both", -1, b"", 0), "mode is 'both'; expected sync or async"),
            (Hello(1, 1, "async", -1, b"", 0), "MismatchError: worker 1 wants async rounds"),
            (Hello(1, 1, "sync", -1, b"", 0), "worker 1, who is another process"),
        ):
            assert said in stranger.refusal(hello)
        assert "came before a Hello" in stranger.refusal(push, bytes(4 * FLOATS))
    pair.serves()


def test_a_push_that_does_not_fit_fails_its_round_for_all_and_the_next_is_clean(pair: Pair) -> None:
    pair.serves()
    for kind, data, said in (
        (DENSE, bytes(8), "has 8 bytes; expected 400 of torch.float32"),
        (CODED, bytes(8), "is compressed, but no compression is set"),
        (ROWS, bytes(13), "has 13 bytes of rows; expected a multiple of 12"),
        (ROWS, bytes([FLOATS, *bytes(11)]), f"row {FLOATS}"),
        (ROWS, b"\xff" * 12, "row -1"),
    ):
        pair.round += 1
        good = [[5, pair.round, DENSE, 4 * FLOATS]]
        sequence = pair.next()
        assert pair.lines[0].ask(Push(sequence, good, None, None, False, None), bytes(4 * FLOATS)) == Ack([sequence])
        sequence = pair.next()
        assert pair.lines[1].ask(
            Push(sequence, [[5, pair.round, kind, len(data)]], None, None, False, None), data
        ) == Ack([sequence])
        texts = {line.refusal(Pull(pair.next(), [[5, pair.round, DENSE, 0]], False, None)) for line in pair.lines}
        (text,) = texts
        assert text.startswith("MismatchError: the push of worker 1 for key 'honest'")
        assert said in text
        sequence = pair.next()
        pair.lines[0].say(Pull(sequence, [[5, 0, DENSE, 0]], False, None))
        _, (stored,) = pair.lines[0].hear()
        assert torch.equal(floats(stored), FIRST * 3)  # as the last good round left it
        pair.serves()


def test_wrong_payloads_of_codecs_fail_their_round(pair: Pair) -> None:
    for params in ({"type": "2bit", "threshold": 0.5}, {"type": "fp16"}, {"type": "topk", "ratio": 0.1}):
        sequence = pair.next()
        assert pair.lines[0].ask(Command(sequence, "compression", msgpack.packb(params))) == Answer(sequence, b"")
        for data in (b"", b"\xff" * 25, b"\xff" * 80, b"\xff" * 200, b"\xff" * 4096):
            pair.round += 1
            for line in pair.lines:
                sequence = pair.next()
                entries = [[5, pair.round, CODED, len(data)]]
                assert line.ask(Push(sequence, entries, None, None, False, None), data) == Ack([sequence])
            for line in pair.lines:
                line.say(Pull(pair.next(), [[5, pair.round, DENSE, 0]], False, None))
                line.hear()  # a value where the bytes can be one, else an error
    sequence = pair.next()
    assert pair.lines[0].ask(Command(sequence, "compression", msgpack.packb(None))) == Answer(sequence, b"")
    pair.serves()


def test_what_comes_again_is_answered_and_not_done_again(pair: Pair) -> None:
    pair.round += 1
    entries = [[5, pair.round, DENSE, 4 * FLOATS]]
    first, second = pair.next(), pair.next()
    for _ in range(3):
        assert pair.lines[0].ask(Push(first, entries, None, None, False, None), bytes_of(FIRST)) == Ack([first])
    for sequence in (second, pair.next()):  # under another number too: rank, part and round tell
        assert pair.lines[1].ask(Push(sequence, entries, None, None, False, None), bytes_of(4 * FIRST)) == Ack(
            [sequence]
        )
    for line in pair.lines:
        for _ in range(2):
            line.say(Pull(second, entries, False, None))
            _, (data,) = line.hear()
            assert torch.equal(floats(data), FIRST * 5)
    again = defined(pair.next(), 5, [FLOATS], 1, "honest")
    assert pair.lines[0].ask(again, bytes_of(FIRST)) == Ack([again.sequence])
    pair.serves()
    assert pair.lines[0].ask(again, bytes_of(FIRST)) == Ack([again.sequence])
    pair.lines[0].say(Pull(pair.next(), entries, False, None))
    assert torch.equal(floats(pair.lines[0].hear()[1][0]), FIRST * 3)  # not as it was defined


def test_pushes_that_overtake_each_other_are_all_counted(pair: Pair) -> None:
    for number in (2, 3, 1):
        for rank, line in enumerate(pair.lines):
            sequence = pair.next()
            entries = [[5, pair.round + number, DENSE, 4 * FLOATS]]
            data = bytes_of(FIRST * 4 ** (2 * number + rank))
            assert line.ask(Push(sequence, entries, None, None, False, None), data) == Ack([sequence])
    pair.round += 3
    for line in pair.lines:
        line.say(Pull(pair.next(), [[5, pair.round, DENSE, 0]], False, None))
        assert torch.equal(floats(line.hear()[1][0]), FIRST * (4**6 + 4**7))
    pair.serves()


@pytest.mark.parametrize("numel", [FLOATS, 100_000])  # in the answer, and where it lies
def test_a_pull_gets_its_round_though_the_next_one_is_complete(pair: Pair, numel: int) -> None:
    part = pair.next()
    assert pair.lines[0].ask(defined(part, part, [numel], 1, f"next {numel}"), bytes(4 * numel)) == Ack([part])
    for number in range(1, 40, 2):

        def push(line: Line, number: int) -> None:
            data = bytes_of(torch.full((numel,), float(number)))
            line.say(Push(pair.next(), [[part, number, DENSE, 4 * numel]], None, None, False, None), data)

        push(pair.lines[0], number)
        assert isinstance(pair.lines[0].hear()[0], Ack)
        for later in (number, number + 1):
            push(pair.lines[1], later)
            assert isinstance(pair.lines[1].hear()[0], Ack)
        first, second = pair.next(), pair.next()  # all at once: the server may see them together
        pair.lines[0].say(Pull(first, [[part, number, DENSE, 0]], False, None))
        push(pair.lines[0], number + 1)
        pair.lines[0].say(Pull(second, [[part, number + 1, DENSE, 0]], False, None))
        expected = {first: number, second: number + 1}
        for _ in range(3):  # two values, and the server's word that it has the push
            message, frames = pair.lines[0].hear()
            if isinstance(message, Values):
                assert floats(frames[0]).unique().tolist() == [2.0 * expected.pop(message.sequence)]
                if message.number:
                    pair.lines[0].say(Done([message.number]))
        assert not expected


def test_an_optimizer_takes_no_state_that_is_none() -> None:
    with Job(2) as job:
        pair = Pair(job)
        refuse_states(pair)
        for line in pair.lines:
            line.__exit__()


def refuse_states(pair: Pair) -> None:
    n = pair.next
    spec = optimizer_shards.pack_spec(OptimizerSpec.parse(("sgd", {"learning_rate": 1.0, "momentum": 0.5})))
    sequence = n()
    assert pair.lines[0].ask(Command(sequence, "optimizer", spec)) == Answer(sequence, b"")
    for state, frames in (
        (5, []),
        (["sgd", {}, [["5/momentum_buffer", "float32", [FLOATS]]]], []),
        (["sgd", {}, [["5/momentum_buffer", "load", [FLOATS]]]], [bytes(4 * FLOATS)]),
        (["sgd", {}, [["5/momentum_buffer", 7, [FLOATS]]]], [bytes(4 * FLOATS)]),
        (["sgd", {}, [["5/momentum_buffer", "float32", [FLOATS + 1]]]], [bytes(4 * FLOATS)]),
        (["sgd", {}, [["5/momentum_buffer", "float32", [FLOATS]]]], [bytes(3)]),
        (["sgd", {}, [[5, "float32", [FLOATS]]]], [bytes(4 * FLOATS)]),
        (["adam", {}, []], []),
        (["sgd", 5, []], []),
    ):
        assert pair.lines[0].refusal(Command(n(), "load", msgpack.packb(state)), *frames)
    entries = [[6, 1, DENSE, 4 * FLOATS]]
    for line in pair.lines:
        sequence = n()
        assert line.ask(Push(sequence, entries, None, None, False, None), bytes_of(FIRST)) == Ack([sequence])
    for line in pair.lines:
        line.say(Pull(n(), entries, False, None))
        assert torch.equal(floats(line.hear()[1][0]), -FIRST)


# Shared memory


def test_places_in_memory_are_looked_at_and_freed_once() -> None:
    nbytes = 4 * FLOATS
    offer = Offer(4096)
    offer.segment.tensor(64, nbytes).copy_(FIRST.view(torch.uint8))
    with Job(1) as job:
        (member,) = job.members()
        with Line(member.servers[0], member.identity) as line:
            for card in (b"no card", b"\xff" * 40, offer.handle):  # who is known stays what it was
                assert line.ask(Hello(0, 1, "sync", -1, card, 0)) == Welcome(False, b"")
        offer.close()
    offer = Offer(4096)
    offer.segment.tensor(64, nbytes).copy_(FIRST.view(torch.uint8))
    with Job(1) as job:
        (member,) = job.members()
        with Line.of_worker(member, card=offer.handle) as line:
            assert line.ask(defined(1, 5, [FLOATS], 1, "k"), bytes(nbytes)) == Ack([1])
            entries = [[5, 1, DENSE, nbytes]]
            for offset in (32, 65, 4096, 4096 - 64, 2**61):
                text = line.refusal(Push(2, entries, None, None, False, [offset, nbytes]))
                assert text.startswith("ProtocolError: bytes"), text
            for _ in range(2):  # the second is one that came already: its memory is as free
                line.say(Push(3, entries, None, None, False, [64, nbytes]))
                heard = [line.hear()[0], line.hear()[0]]
                assert sorted(map(str, heard)) == sorted(map(str, (Ack([3]), Free([3]))))
            line.say(Pull(4, entries, False, None))
            assert torch.equal(floats(line.hear()[1][0]), FIRST)
    offer.close()


def test_memory_of_an_open_round_is_not_freed_by_its_repeat() -> None:
    nbytes = 4 * FLOATS
    offer = Offer(4096)
    offer.segment.tensor(64, nbytes).copy_(FIRST.view(torch.uint8))
    with Job(2) as job:
        members = job.members()
        lines = [Line.of_worker(members[0], card=offer.handle), Line.of_worker(members[1])]
        assert lines[0].ask(defined(1, 5, [FLOATS], 1, "k"), bytes(nbytes)) == Ack([1])
        entries = [[5, 1, DENSE, nbytes]]
        for _ in range(2):
            assert lines[0].ask(Push(2, entries, None, None, False, [64, nbytes])) == Ack([2])
            assert lines[0].hears_nothing()
        assert lines[1].ask(Push(2, entries, None, None, False, None), bytes_of(FIRST)) == Ack([2])
        assert lines[0].hear()[0] == Free([2])
        for line in lines:
            line.say(Pull(3, entries, False, None))
            assert torch.equal(floats(line.hear()[1][0]), FIRST * 2)
            line.__exit__()
    offer.close()


def test_values_do_not_change_while_they_are_read_and_do_after_a_lost_answer() -> None:
    count = 20_000
    ones = torch.ones(count)
    entries = [[5, 1, DENSE, 4 * count]]
    following = [[5, 2, DENSE, 4 * count]]
    offer = Offer(4096)
    with Job(2) as job:
        members = job.members()
        hellos = [Hello(member.rank, 1, "sync", -1, offer.handle, 0) for member in members]
        lines = of_ranks(members, card=offer.handle)
        assert lines[0].ask(defined(1, 5, [count], 1, "k"), bytes(4 * count)) == Ack([1])
        for line in lines:
            assert line.ask(Push(2, entries, None, None, False, None), bytes_of(ones)) == Ack([2])
        numbers = []
        for line in lines:
            values = line.ask(Pull(3, entries, False, None))
            assert len(values.places) == 1
            numbers.append(values.number)
        for line in lines:
            assert line.ask(Push(4, following, None, None, False, None), bytes_of(ones)) == Ack([4])
        lines[1].say(Done(numbers))  # that of another does not count
        lines[1].say(Pull(5, following, False, None))
        again = lines[0].ask(Pull(3, entries, False, None)).number  # it asks again, for the answer was lost
        assert again not in numbers
        assert lines[1].hears_nothing()
        lines[0].say(Done([again]))  # stands for the lost one, too
        values = lines[1].hear()[0]
        assert values.entries == following
        lines[1].say(Done([values.number]))
        values = lines[0].ask(Pull(5, following, False, None))
        last = [[5, 3, DENSE, 4 * count]]
        for line in lines:
            assert line.ask(Push(6, last, None, None, False, None), bytes_of(ones)) == Ack([6])
        lines[1].say(Pull(7, last, False, None))
        assert lines[0].ask(Pull(8, [[99, 0, DENSE, 0]], False, None)).error == "KeyError"
        assert lines[1].hears_nothing()
        welcome = lines[0].ask(dataclasses.replace(hellos[0], read=values.number))  # its Done was lost
        assert isinstance(welcome, Welcome)
        assert lines[1].hear()[0].entries == last
        for line in lines:
            line.__exit__()
    offer.close()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.tuples(MESSAGES, st.lists(st.binary(max_size=40), max_size=3)), max_size=8))
def test_any_message_at_all_is_survived(pair: Pair, messages: list[tuple[Message, list[bytes]]]) -> None:
    with Line(pair.address, os.urandom(8)) as stranger:
        for message, frames in messages:
            stranger.say(message, *frames)
        stranger.say(b"\xc1")
        while "no msgpack" not in getattr(stranger.hear()[0], "text", ""):
            pass
    pair.serves()


def test_pushes_that_nobody_waits_for_are_acknowledged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "_LATE_SECONDS", math.inf)
    sent: list[tuple[bytes, Message]] = []
    doors = SimpleNamespace(send=lambda identity, frames: sent.append((identity, protocol.unpack(frames[0]))))
    answers = Sessions(doors, lambda _: None, lambda _: False)  # type: ignore[arg-type]
    workers = [WorkerSession(b"%d" % rank, rank, None, False) for rank in range(2)]
    answers.workers.update({worker.identity: worker for worker in workers})
    workers[0].late_acks += range(63)
    answers.flush()
    assert sent == []
    answers.flush_late()
    answers.flush_late()
    assert sent == [(b"0", Ack(list(range(63))))]
    workers[0].late_acks += range(64)
    workers[1].late_acks += [1, 2]
    workers[1].acks += [3]
    answers.flush()
    assert sent[1:] == [(b"0", Ack(list(range(64)))), (b"1", Ack([3, 1, 2]))]
    answers.flush_late()
    assert len(sent) == 3
    answers.has(workers[0], 7, late=True)
    answers.flush()
    assert len(sent) == 3
    monkeypatch.setattr(answers_module, "_LATE_SECONDS", -1.0)  # nor do they wait for an idle moment for ever
    answers.flush()
    assert sent[3:] == [(b"0", Ack([7]))]
