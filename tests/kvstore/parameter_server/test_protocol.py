"""Messages of the parameter server: round trips, validation, and servers that survive invalid messages."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

import gangline
from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.refusal_log import RefusalLog
from gangline.collectives.transports.shm.segments import Offer
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import (
    ABSENT,
    CODED,
    DENSE,
    DTYPES,
    REFUSED,
    ROWS,
    Ack,
    Collective,
    Command,
    CommandResult,
    Hello,
    Message,
    Pull,
    Push,
    Release,
    Values,
    Welcome,
)
from gangline.kvstore.parameter_server.server import optimizer_shards, sessions
from gangline.kvstore.parameter_server.server.sessions import Sessions, WorkerSession
from gangline.kvstore.parameter_server.transport.shared_memory import ALIGNMENT
from tests.kvstore.keyed import bits as bytes_of
from tests.kvstore.parameter_server.in_process import Job, RawClient, RawWorkers, definition
from tests.programs import product_files

pytestmark = pytest.mark.timeout(110)

KINDS = sorted((cls for cls in vars(protocol).values() if isinstance(cls, type) and hasattr(cls, "kind")), key=str)
COUNT = 2**62 - 1
SIZE = protocol.MAX_SHARD
TYPES: dict[str, tuple[list[Any], list[Any]]] = {
    "Rank": ([3, -1, protocol.MAX_RANKS - 1], [-2, protocol.MAX_RANKS, 1.0, True]),
    "Count": ([5, 0, COUNT], [-1, 2**62, 1.0, False]),
    "String": (["word", "", "x" * 4096], ["x" * 4097, b"x", 1]),
    "Text": (["text", "x" * 2**20], ["x" * (2**20 + 1), b"x", 1]),
    "Blob": ([b"blob", b""], ["x", 1]),
    "Flag": ([True, False], [0, 1, "x"]),
    "Number": ([0.5, 0, 2**63], [-1.0, -1, float("nan"), float("inf"), True, None, "1"]),
    "OptionalNumber": ([None, 1.5, 0], [-0.5, float("nan"), float("inf"), False, "1"]),
    "Strings": ([["a"], []], ["x", [b"x"], [1]]),
    "Blobs": ([[b"a"], []], [b"x", ["x"], [None]]),
    "Process": ([["boot", 7, 9]], [["x", 1], ["x", 1, "1"], [1, 1, 1], ["x", True, 1], "x"]),
    "Counts": ([[1, 2], [], [COUNT]], [1, [-1], [1.0], [2**62], [None]]),
    "Region": ([[64, 128], None], [[1], [1, 2, 3], [-1, 1], [1, -1], [1.0, 1], 7]),
    "Entries": (
        [[[1, 2, kind, 8] for kind in (DENSE, ROWS, CODED, ABSENT, REFUSED)], [], [[COUNT, COUNT, DENSE, SIZE]]],
        [
            *([1], [[1, 2, DENSE]], [[1, 2, 5, 4]], [[1, 2, DENSE, -1]], [[-1, 2, DENSE, 4]]),
            *([[1, 2, DENSE, SIZE + 1]], [[1.0, 2, DENSE, 4]], [[1, True, DENSE, 4]]),
        ],
    ),
    "Definitions": (
        [[[1, dtype, [2, 3], 3, b"\xa1k", 0, True] for dtype in DTYPES], [], [[1, "bool", [], 1, b"", COUNT, False]]],
        [
            [1],
            [[1, "float32", [2], 1, b"k", 0]],
            [[-1, "float32", [2], 1, b"k", 0, True]],
            [[1, "float33" * 5000, [2], 1, b"k", 0, True]],
            [[1, "complex64", [2], 1, b"k", 0, True]],
            [[1, "float32", [-2], 1, b"k", 0, True]],
            [[1, "float32", [1] * (protocol.MAX_AXES + 1), 1, b"k", 0, True]],
            [[1, "float32", [2], 0, b"k", 0, True]],
            [[1, "float32", [2], 1, "k", 0, True]],
            [[1, "float32", [2], 1, b"k", -1, True]],
            [[1, "float32", [2], 1, b"k", 0, 1]],
            [[1, "float32", 2, 1, b"k", 0, True]],
        ],
    ),
    "Views": (
        [[[1, [0, 1]], [7, [0, protocol.MAX_RANKS - 1]]], []],
        [[1], [[0, [1]]], [[1, [-1]]], [[1, [protocol.MAX_RANKS]]], [[1.0, [1]]], [[1, 1]], [[1, [True]], 2]],
    ),
}
"""Valid and invalid values of each type of a field."""


def fields_of(cls: Any) -> dict[str, str]:
    """Return the type of each field by its name."""
    return {name: cls.__annotations__[name] for name in cls.__struct_fields__}


def packed(kind: Any, *values: Any, version: Any = protocol.VERSION) -> bytes:
    return bytes(msgpack.packb([version, kind, *values]))


# Messages alone


def as_lists(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value))


@pytest.mark.parametrize("cls", KINDS)
def test_a_message_survives_a_round_trip_and_a_field_beyond_its_bounds_is_refused(cls: Any) -> None:
    good = [TYPES[kind][0][0] for kind in fields_of(cls).values()]
    for index, (name, kind) in enumerate(fields_of(cls).items()):
        before, after = good[:index], good[index + 1 :]
        for value in TYPES[kind][0]:
            header = packed(cls.kind, *before, value, *after)
            assert protocol.pack(cls(*before, value, *after)) == header
            for frame in (header, memoryview(header)):
                message = protocol.unpack(frame)
                assert as_lists(getattr(message, name)) == value
                assert protocol.unpack(protocol.pack(message)) == message
        for value in [*TYPES[kind][1], {"a": 1}, [{}], [[[]]]]:
            said = rf"received {cls.__name__} with an invalid field: .*{name}|not msgpack"
            with pytest.raises(ProtocolError, match=said) as error:
                protocol.unpack(packed(cls.kind, *before, value, *after))
            assert len(str(error.value)) < 300
    for values in [[*good, 0], *([good[:-1]] if good else [])]:
        said = f"received {cls.__name__} with {len(values)} fields; expected {len(good)}"
        with pytest.raises(ProtocolError, match=said):
            protocol.unpack(packed(cls.kind, *values))


def test_truncated_and_invalid_messages_are_refused() -> None:
    whole = protocol.pack(Push(7, [(1, 2, DENSE, 8), (3, 4, ROWS, 9)], 0.5, 1e-3, True, (64, 128)))
    for end in range(len(whole)):
        with pytest.raises(ProtocolError):
            protocol.unpack(whole[:end])
    for invalid, said in (
        (whole + b"\0", "not msgpack"),
        (b"", "not a list"),
        (msgpack.packb({}), "not a list"),
        (msgpack.packb([protocol.VERSION]), "not a list"),
        (packed(4, version=99), "version 99; expected"),
        (packed(4, version="1"), "version .* expected"),
        (packed(99), "unknown kind 99"),
        (packed("4"), "unknown kind"),
        (packed(True), "unknown kind"),
        (packed([4]), "unknown kind"),
        (packed(4, 1, msgpack.ExtType(5, b"code")), "invalid field: .*answered"),
        (packed(4, 1, msgpack.Timestamp(1)), "invalid field: .*answered"),
        (packed(1, b"\xff", 0, 0, 0, 0, 0, 0, False), "invalid field: .*role"),
        (packed(10, "", "x", False)[:-3] + b"\xa1\xff\xc2", "not msgpack"),  # no UTF-8
        (packed(10, "", "x", False)[:-3] + b"\xdb\xff\xff\xff\xffx\xc2", "not msgpack"),
        (b"\x91" * 5000, "not a list"),
        (b"\xdd\xff\xff\xff\xff", "not a list"),
        (packed(22, 1, [[0, "$[99]", [1], 1, b"a", 0, True]], None), r"invalid field: .*'\$\[99\]' - at `shards"),
        (packed(25, 0)[:-1] + b"\x91" * 5000, r"invalid field: .*sequences\[0\]"),
        (packed(25, 0)[:-1] + b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (packed(31, 1, 0)[:-1] + b"\xc6\xff\xff\xff\xff", "invalid field: .*payload"),
        (packed(25, [1] * protocol.MAX_HEADER), f"Ack of {protocol.MAX_HEADER + 8} bytes; expected at most"),
    ):
        with pytest.raises(ProtocolError, match=said):
            protocol.unpack(invalid)
    most = protocol.MAX_HEADER + protocol.MAX_COLLECTIVE
    with pytest.raises(
        ProtocolError, match=f"received Leave of {most + 1} bytes; expected at most {protocol.MAX_HEADER}"
    ):
        protocol.unpack(packed(10, "", "x", False).ljust(most + 1))


def test_a_header_of_lists_is_refused_before_they_take_memory() -> None:
    count = 64 << 20
    head = b"\x93" + msgpack.packb(protocol.VERSION) + msgpack.packb(Collective.kind)
    bomb = head + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count  # 64 Mi empty lists
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            protocol.unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(bomb)
    finally:
        tracemalloc.stop()
    whole = Collective(1, "call", -1, bytes(protocol.MAX_COLLECTIVE), "")
    assert protocol.unpack(protocol.pack(whole)) == whole


def test_no_code_is_looked_up_by_a_received_name() -> None:
    root = Path(gangline.__file__).parent
    lookup = re.compile(r"getattr\(torch|pickle\.|\b(eval|exec|__import__|import_module)\(")
    for folder in ("kvstore/parameter_server", "kvstore/group", "kvstore/allreduce", "collectives/transports"):
        for file in (root / folder).rglob("*.py"):
            if file.name != "kept_state.py":  # its memory is the launcher's: nothing in it is received
                assert not lookup.search(file.read_text()), file


def test_only_memory_and_pipes_of_own_children_and_objects_with_the_switch_are_unpickled() -> None:
    """Check what SECURITY.md says."""
    load = r"[Pp]ickl\w*\.loads?\(|torch\.load\((?!.*weights_only=True)|\w\.recv\(\)|dist\.\w+_object|allow_pickle="
    files = product_files("collectives", "kvstore", "models", "gangline")
    found = " ".join(sorted(file.stem for file in files if re.search(load, file.read_text())))
    assert found == "fork_server function_call host kept_state objects rank_main spawning"


def test_refused_messages_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog()
    for number in range(1000):
        log.warn("refused %d", number)
    assert len(caplog.messages) < 50
    log._allowed = 1.0  # as after a second
    log.warn("refused again")
    assert caplog.messages[-1] == "refused again"
    assert re.fullmatch(r"\d+ more were refused", caplog.messages[-2])


def test_the_description_names_every_message_and_field() -> None:
    text = Path(__file__).parents[3].joinpath("docs/protocol.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE))
    assert rows == {str(cls.kind): cls.__name__ for cls in KINDS}
    for cls in KINDS:
        (row,) = re.findall(rf"^\| {cls.kind} \| `{cls.__name__}` \| [^|]+ \| (.*)\|$", text, re.MULTILINE)
        assert dict(re.findall(r"`(\w+): (\w+)`", row)) == fields_of(cls)
    for name in TYPES:
        assert f"| `{name}` |" in text
    for dtype in DTYPES:
        assert f"`{dtype}`" in text
    assert f"version {protocol.VERSION}" in text
    assert f"multiple of {ALIGNMENT} bytes" in text


# Messages to a server

FLOATS = 100
FIRST = torch.arange(FLOATS).float()


def floats(frame: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.float32)


class Pair(RawWorkers):
    """Two raw workers and one server; `serves` checks that valid rounds still work."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.server = job.server()
        self.address = self.members[0].servers[0]
        self.round = 0
        self.define(5, [FLOATS], bytes_of(FIRST), key="honest")
        self.define(6, [10, 10], bytes_of(FIRST), width=10, key="table")

    def pulled(self, rank: int, number: int, shard: int = 5, sequence: int = 0) -> torch.Tensor:
        self.clients[rank].pull(sequence or self.next(), shard, number)
        return floats(self.clients[rank].receive()[1][0])

    def command(self, name: str, value: Any) -> None:
        sequence = self.next()
        assert self.clients[0].request(Command(sequence, name, value)) == CommandResult(sequence, b"")

    def serves(self) -> None:
        """Run a valid round and check its result."""
        self.round += 1
        for rank in range(2):
            self.push_and_confirm(rank, self.round, bytes_of(FIRST * (rank + 1)))
        for client in self.clients:
            sequence = self.next()
            client.pull(sequence, 5, self.round)
            values, (data,) = client.receive()
            assert values == Values(sequence, values.number, [(5, self.round, DENSE, 4 * FLOATS)], [])
            assert torch.equal(floats(data), FIRST * 3)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Job(2) as job, Pair(job) as pair:
        yield pair


def test_a_server_survives_hostile_bytes(pair: Pair) -> None:
    one = pair.clients[1]
    n = pair.next
    zeros = bytes(4 * FLOATS)
    dense = [(5, 1000, DENSE, 4 * FLOATS)]
    before = pair.server.rejected
    hostile: list[tuple[str, Any, list[bytes]]] = [
        ("ProtocolError: received a header that is not a list", b"\xc1\xff", []),
        ("ProtocolError: received Push with 1 fields", packed(23, 1), []),
        ("ProtocolError: received an unexpected Values from worker 1", Values(n(), 1, [], []), []),
        ("ProtocolError: received 0 data frames for 1", Push(n(), dense, None, None, False, None), []),
        ("ProtocolError: received 2 data frames", Push(n(), dense, None, None, False, None), [zeros, zeros]),
        ("ProtocolError: received 1 data frames", Push(n(), dense, None, None, False, None), [zeros[1:]]),
        ("ProtocolError: .* does not share", Push(n(), dense, None, None, False, (0, 4 * FLOATS)), []),
        ("MismatchError: server 0 has no shard 99", Push(n(), [(99, 1, 0, 0)], None, None, False, None), [b""]),
        ("MismatchError: server 0 has no shard 99", Pull(n(), [(99, 0, 0, 0)], False, None), []),
        ("ProtocolError: received 7 bytes of row numbers", Pull(n(), [(6, 0, ROWS, 7)], True, None), [bytes(7)]),
        ("ValueError: rows 10 to 10", Pull(n(), [(6, 0, ROWS, 8)], True, None), [bytes([10, *bytes(7)])]),
        ("ValueError: rows -1 to -1", Pull(n(), [(6, 0, ROWS, 8)], True, None), [b"\xff" * 8]),
        ("ProtocolError: worker 1 defines shards", definition(n(), 7, [FLOATS], 1, "mine"), [zeros]),
        ("ProtocolError: command 'shutdown'", Command(n(), "shutdown", b""), []),
        ("RuntimeError: there is no optimizer", Command(n(), "state", msgpack.packb([0, [5]])), []),
        ("RuntimeError: there is no optimizer", Command(n(), "load", msgpack.packb([0, "sgd", b""])), []),
        ("ValueError: Unpack failed", Command(n(), "load", b""), []),
        ("ValueError: Unpack failed", Command(n(), "optimizer", b""), []),
        ("TypeError", Command(n(), "optimizer", msgpack.packb(7)), []),
        (
            "ValueError: optimizer 'sdg' is unknown",
            Command(n(), "optimizer", group_of([[["*", "sdg", {}]], {}, [], []])),
            [],
        ),
        ("TypeError", Command(n(), "optimizer", group_of([5, {}, [], []])), []),
        ("ValueError", Command(n(), "compression", b"\xc1"), []),
        ("TypeError", Command(n(), "compression", msgpack.packb(5)), []),
        ("ValueError", Command(n(), "compression", msgpack.packb({"type": "zip"})), []),
        ("TypeError", Command(n(), "remove", msgpack.packb(5)), []),
    ]
    for said, message, frames in hostile:
        text = one.refusal(message, *frames)
        assert re.match(said, text), text
    assert pair.server.rejected == before + sum(not said.startswith("MismatchError") for said, _, _ in hostile)
    pair.serves()


def group_of(optimizer: list[Any]) -> bytes:
    return bytes(msgpack.packb([0, None, msgpack.packb(optimizer)]))


def test_invalid_definitions_of_rank_0_are_refused(pair: Pair) -> None:
    zero = pair.clients[0]
    n = pair.next
    for said, message, frames in (
        ("ProtocolError: shard 8 has a key", definition(n(), 8, [2], 1, [1]), [bytes(8)]),
        ("ProtocolError: shard 8 has a key", definition(n(), 8, [2], 1, True), [bytes(8)]),
        ("ProtocolError: shard 8 of 3 elements has rows of 2", definition(n(), 8, [3], 2, "x"), [bytes(12)]),
        ("ProtocolError: received 1 data frames", definition(n(), 8, [2**33], 1, "x"), [bytes(8)]),
        ("ProtocolError: shard 8 of 1099511627776 elements .* at most", definition(n(), 8, [2**20] * 2, 1, "x"), [b""]),
        ("ProtocolError: received Define .*`shards.0..2..1.`", definition(n(), 8, [0, 2**63], 1, "x"), [b""]),
        ("MismatchError: shard 5 is of key 'honest'", definition(n(), 5, [FLOATS], 1, "other"), [bytes(4 * FLOATS)]),
        ("MismatchError: shard 5 is of key 'honest'", definition(n(), 5, [FLOATS - 1], 1, "honest"), [bytes(396)]),
    ):
        text = zero.refusal(message, *frames)
        assert re.match(said, text), text
    pair.serves()


def test_unknown_processes_get_errors_and_change_nothing(pair: Pair) -> None:
    with RawClient(pair.address) as stranger:
        push = Push(1, [(5, 1, DENSE, 4 * FLOATS)], None, None, False, None)
        assert "received Push before a Hello" in stranger.refusal(push, bytes(4 * FLOATS))
        with RawClient(pair.address) as other:
            other.send(push, bytes(1 << 16))
            other.wait_until_closed()
        for hello, said in (
            (Hello(2, 1, "sync", -1, b"", 0), "worker 2 of view 1"),
            (Hello(-1, 1, "sync", -1, b"", 0), "worker -1 of view 1"),
            (Hello(1, 2, "sync", -1, b"", 0), "expected view 1"),
            (Hello(1, 1, "both", -1, b"", 0), "mode is 'both'; expected sync or async"),
            (Hello(1, 1, "async", -1, b"", 0), "MismatchError: worker 1 wants async rounds"),
            (Hello(1, 1, "sync", -1, b"", 0), "worker 1, which is another process"),
        ):
            assert said in stranger.refusal(hello)
        assert "received Push before a Hello" in stranger.refusal(push, bytes(4 * FLOATS))
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
        pair.push_and_confirm(0, pair.round, bytes(4 * FLOATS))
        pair.push_and_confirm(1, pair.round, data, kind)
        (text,) = {
            client.refusal(Pull(pair.next(), [(5, pair.round, DENSE, 0)], False, None)) for client in pair.clients
        }
        assert text.startswith("MismatchError: the push of worker 1 for key 'honest'")
        assert said in text
        assert torch.equal(pair.pulled(0, 0), FIRST * 3)  # unchanged since the last valid round
        pair.serves()


def test_wrong_payloads_of_codecs_fail_their_round(pair: Pair) -> None:
    for params in ({"type": "2bit", "threshold": 0.5}, {"type": "fp16"}, {"type": "topk", "ratio": 0.1}):
        pair.command("compression", msgpack.packb(params))
        for data in (b"", b"\xff" * 25, b"\xff" * 80, b"\xff" * 200, b"\xff" * 4096):
            pair.round += 1
            for rank in range(2):
                pair.push_and_confirm(rank, pair.round, data, CODED)
            for client in pair.clients:
                client.pull(pair.next(), 5, pair.round)
                client.receive()  # a value if the bytes can be decoded, else an error
    pair.command("compression", msgpack.packb(None))
    pair.serves()


@pytest.mark.parametrize("numel", [FLOATS, 100_000])  # in a data frame, and read in place
def test_a_pull_gets_its_round_though_the_next_one_is_complete(pair: Pair, numel: int) -> None:
    shard, zero = pair.next(), pair.clients[0]
    pair.define(shard, [numel], bytes(4 * numel), key=f"next {numel}")
    for number in range(1, 24, 2):
        data, next_data = (bytes_of(torch.full((numel,), float(value))) for value in (number, number + 1))
        for rank in range(2):
            pair.push_and_confirm(rank, number, data, shard=shard)
        pair.push_and_confirm(1, number + 1, next_data, shard=shard)
        first, second = pair.next(), pair.next()  # sent together, so that the server may receive them together
        zero.pull(first, shard, number)
        pair.push(0, number + 1, next_data, shard=shard)
        zero.pull(second, shard, number + 1)
        expected = {first: number, second: number + 1}
        for _ in range(3):  # two values and one acknowledgement
            message, frames = zero.receive()
            if isinstance(message, Values):
                assert floats(frames[0]).unique().tolist() == [2.0 * expected.pop(message.sequence)]
        assert not expected


def part(described: list[Any], *, name: str = "sgd", plain: Any = None, shard: int = 5, group: int = 0) -> list[Any]:
    return [group, name, msgpack.packb([[shard], {} if plain is None else plain, described])]


def test_an_optimizer_refuses_invalid_states() -> None:
    place, data = "5/momentum_buffer", bytes(4 * FLOATS)
    spec = OptimizerSpec.parse(("sgd", {"learning_rate": 1.0, "momentum": 0.5}))
    with Job(2) as job, Pair(job) as pair:
        pair.command("optimizer", optimizer_shards.pack_group(0, None, spec))
        for state, frames in (
            (5, []),
            ([0, "sgd", 5], []),
            (part([[place, "float32", [FLOATS]]]), []),
            (part([[place, "load", [FLOATS]]]), [data]),
            (part([[place, 7, [FLOATS]]]), [data]),
            (part([[place, "float32", [FLOATS + 1]]]), [data]),
            (part([[place, "float32", [FLOATS]]]), [bytes(3)]),
            (part([[5, "float32", [FLOATS]]]), [data]),
            (part([], name="adam"), []),
            (part([], plain=5), []),
            (part([], shard=99), []),
            (part([], group=1), []),
        ):
            assert pair.clients[0].refusal(Command(pair.next(), "load", msgpack.packb(state)), *frames)
        for rank in range(2):
            pair.push_and_confirm(rank, 1, bytes_of(FIRST), shard=6)
        for rank in range(2):
            assert torch.equal(pair.pulled(rank, 1, shard=6), -FIRST)


# Shared memory


NBYTES = 4 * FLOATS


def pushed_from_memory(sequence: int, offset: int = 64) -> Push:
    return Push(sequence, [(5, 1, DENSE, NBYTES)], None, None, False, (offset, NBYTES))


@pytest.fixture
def offer() -> Iterator[Offer]:
    """Shared memory of a worker, with the values of `FIRST` at byte 64."""
    offer = Offer(4096)
    offer.segment.tensor(64, NBYTES).copy_(FIRST.view(torch.uint8))
    yield offer
    offer.close()


def test_handles_that_name_no_memory_are_ignored(offer: Offer) -> None:
    with Job(1) as job:
        (member,) = job.members()
        with RawClient(member.servers[0], member.identity) as client:
            for card in (b"no card", b"\xff" * 40, offer.handle):  # later handles of a known worker are ignored
                assert client.request(Hello(0, 1, "sync", -1, card, 0)) == Welcome(False, b"")


def test_memory_regions_are_checked_and_released_once(offer: Offer) -> None:
    with Job(1) as job, RawWorkers(job, handle=offer.handle) as one:
        (client,) = one.clients
        one.define(5, [FLOATS], bytes(NBYTES))
        for offset in (32, 65, 4096, 4096 - 64, 2**61):
            text = client.refusal(pushed_from_memory(2, offset))
            assert text.startswith("ProtocolError: bytes"), text
            assert client.receive()[0] == Release([2])  # what is refused is not read
        for _ in range(2):  # the second is a repeat: its region is released too
            client.send(pushed_from_memory(3))
            heard = [client.receive()[0], client.receive()[0]]
            assert sorted(map(str, heard)) == sorted(map(str, (Ack([3]), Release([3]))))
        client.pull(4, 5, 1)
        assert torch.equal(floats(client.receive()[1][0]), FIRST)


def test_a_repeated_push_does_not_release_the_region_of_an_open_round(offer: Offer) -> None:
    with Job(2) as job, RawWorkers(job, handle=offer.handle) as two:
        zero = two.clients[0]
        two.define(5, [FLOATS], bytes(NBYTES))
        for _ in range(2):
            assert zero.request(pushed_from_memory(2)) == Ack([2])
            assert zero.has_nothing()
        two.push_and_confirm(1, 1, bytes_of(FIRST))
        assert zero.receive()[0] == Release([2])
        for client in two.clients:
            client.pull(3, 5, 1)
            assert torch.equal(floats(client.receive()[1][0]), FIRST * 2)


def test_values_do_not_change_while_they_are_read_even_if_an_answer_is_lost(offer: Offer) -> None:
    count = 20_000
    with Job(2) as job, RawWorkers(job, handle=offer.handle) as two:
        zero, one = two.clients
        two.define(5, [count], bytes(4 * count))

        def push_both(number: int) -> None:
            for rank in range(2):
                two.push_and_confirm(rank, number, bytes_of(torch.full((count,), float(number))))

        def pull(client: RawClient, number: int) -> Values:
            client.pull(two.next(), 5, number)
            values = client.receive()[0]
            assert isinstance(values, Values)
            return values

        def value(values: Values) -> list[float]:
            return floats(segment.bytes(values.offsets[0], 4 * count)).unique().tolist()

        server = job.server()
        segment, words = server._pool.segment, offer.segment.words(0, 2)
        held = []
        for number in (1, 2, 3):
            push_both(number)
            held += [pull(client, number) for client in (two.clients if number == 1 else [two.clients[number - 2]])]
        assert [value(values) for values in held] == [[2], [2], [4], [6]]
        zero.pull(held[0].sequence, 5, 1)  # it repeats the request because the answer was lost
        again = zero.receive()[0]
        assert (again.entries, value(again)) == ([(5, 1, DENSE, 4 * count)], [2])
        shard = server._rounds.shards[5]
        words[1] = held[-1].number
        push_both(4)
        assert [value(values) for values in [*held, again]] == [
            [2],
            [2],
            [4],
            [8],
            [2],
        ]  # of worker 0
        pull(one, 4)
        push_both(5)
        assert len(shard.slots) == 4
        pull(one, 5)
        push_both(6)
        one.pull(two.next(), 5, 6)
        zero.pull(two.next(), 99, 0)
        assert zero.receive()[0].error == "MismatchError"
        assert one.has_nothing()
        assert server._rounds.guard(shard)[0] == "unread"
        assert server.status()["waits"][0]["what"] == "round 6 of key 'key' (unread)"
        words[0] = again.number  # it has also read what it got before
        values = one.receive()[0]
        assert (values.entries, value(values)) == ([(5, 6, DENSE, 4 * count)], [12])
        zero.pull(two.next(), 5, 1)
        failed = zero.receive()[0]
        assert (failed.error, failed.text) == (
            "MismatchError",
            "the value of key 'key' after round 1 is not kept any more: round 6 is closed",
        )


def test_what_was_read_from_a_former_process_of_a_server_says_nothing_of_this_one() -> None:
    numbers = []
    for _ in range(2):  # with each a worker, which shares no memory, has the value after round 1
        with Job(1) as job, RawWorkers(job) as workers:
            (client,) = workers.clients
            client.define(1, 5, [FLOATS], bytes(NBYTES))
            client.push(2, 5, 1, bytes_of(FIRST))
            assert client.receive()[0] == Ack([2])
            client.pull(3, 5, 1)
            numbers.append(client.receive()[0].number)
            client._last_read = numbers[0]  # of a push that the worker repeats in a restarted server
            client.push(4, 5, 2, bytes_of(FIRST))
            assert client.receive()[0] == Ack([4])
            client.pull(3, 5, 1)  # again, as the answer was lost
            answer, _ = client.receive()
            assert isinstance(answer, Values) == (len(numbers) > 1), answer
    assert numbers[1] > numbers[0]


@pytest.mark.parametrize("word", [4, 4096, 2**61])
def test_a_word_outside_of_the_memory_is_refused(offer: Offer, word: int) -> None:
    with Job(1) as job:
        (member,) = job.members()
        with RawClient(member.servers[0], member.identity) as client:
            assert f"word={word} in 4096 bytes" in client.refusal(Hello(0, 1, "sync", -1, offer.handle, word))


def test_pushes_without_a_waiter_are_acknowledged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_DEFER_SECONDS", math.inf)
    sent: list[tuple[bytes, Message]] = []
    listener = SimpleNamespace(send=lambda identity, frames: sent.append((identity, protocol.unpack(frames[0]))))
    own = Sessions(listener, lambda _: ())  # type: ignore[arg-type]
    workers = [WorkerSession(b"%d" % rank, rank, None, False) for rank in range(2)]
    for worker in workers:
        own.add(worker)
    own.acknowledge(workers[0], range(63), urgent=False)
    own.flush()
    assert sent == []
    own.flush_acks()
    own.flush_acks()
    assert sent == [(b"0", Ack(list(range(63))))]
    own.acknowledge(workers[0], range(64), urgent=False)
    own.acknowledge(workers[1], [1, 2], urgent=False)
    own.acknowledge(workers[1], [3])
    own.flush()
    assert sent[1:] == [(b"0", Ack(list(range(64)))), (b"1", Ack([1, 2, 3]))]
    own.acknowledge_push(workers[0], 7, urgent=False)
    own.flush()
    assert len(sent) == 3
    monkeypatch.setattr(sessions, "_DEFER_SECONDS", -1.0)  # old ones are sent even if the server is never idle
    own.flush()
    assert sent[3:] == [(b"0", Ack([7]))]
