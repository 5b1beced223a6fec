"""Every message of the parameter server, as data: what is in it, how it is packed, what is refused on arrival.

A message is a header frame (msgpack: ``[VERSION, kind, *fields]``) and, where tensors travel by socket, a data frame
for each entry.
What arrives is checked field by field before anything is allocated for it; nothing in it is ever unpickled or run.
docs/protocol.md describes it for clients in other languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import msgpack

from gangline.collectives.errors import ProtocolError

VERSION = 1
MAX_HEADER = 4 << 20
"""Bytes of a header frame at most."""
MAX_PART = 1 << 35
"""Bytes of one part of a key at most, whole-tensor keys included."""
MAX_RANKS = 1 << 16
MAX_AXES = 64
MAX_EXCHANGED = 64 << 20
"""Bytes that a worker may give to one exchange."""

ERRORS = (
    "DeadNodeError",
    "MismatchError",
    "ProtocolError",
    "StallError",
    "ValueError",
    "KeyError",
    "TypeError",
    "RuntimeError",
)
"""How `Failed` names what went wrong: classes of gangline.collectives.errors, or Python's own."""

Kind = type["Message"]
_M = TypeVar("_M", bound="Message")
_kinds: dict[int, Kind] = {}

# What a field may hold, by the name of its annotation.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "Rank": lambda v: type(v) is int and -1 <= v < MAX_RANKS,
    "Count": lambda v: type(v) is int and 0 <= v < 1 << 62,
    "Word": lambda v: isinstance(v, str) and len(v) <= 4096,
    "Text": lambda v: isinstance(v, str) and len(v) <= 1 << 20,
    "Blob": lambda v: isinstance(v, bytes) and len(v) <= MAX_EXCHANGED,
    "Flag": lambda v: isinstance(v, bool),
    "Number": lambda v: _is_number(v),
    "MaybeNumber": lambda v: v is None or _is_number(v),
    "Words": lambda v: isinstance(v, list) and len(v) <= MAX_RANKS and all(isinstance(w, str) for w in v),
    "Blobs": lambda v: isinstance(v, list) and len(v) <= MAX_RANKS and all(isinstance(b, bytes) for b in v),
    "Process": lambda v: isinstance(v, list) and [type(one) for one in v] == [str, int, int],
    "Sequences": lambda v: isinstance(v, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in v),
    "Place": lambda v: v is None or (isinstance(v, list) and len(v) == 2 and all(type(n) is int and n >= 0 for n in v)),
    "Entries": lambda v: isinstance(v, list) and all(_is_entry(one) for one in v),
    "Defined": lambda v: isinstance(v, list) and all(_is_definition(one) for one in v),
}
Rank = int
Count = int
Word = str
Text = str
Blob = bytes
Flag = bool
Number = float
"""Finite, 0 or more."""
MaybeNumber = float | None
Words = list[str]
Blobs = list[bytes]
Process = list[str | int]
Sequences = list[int]
Place = list[int] | None
"""Where data lie in the sender's shared memory, entry behind entry, each begun at a multiple of 64 bytes: offset and
bytes. None: they are in the data frames."""
Entries = list[list[Any]]
"""``[part, round, kind, bytes]`` each; kinds are DENSE, ROWS, CODED and ABSENT."""
Defined = list[list[Any]]
"""``[part, dtype, shape, width of a row, key as msgpack, begin in the key, whether it is the whole key]``
each, all in elements."""


class Message:
    """A message; subclasses are its kinds."""

    kind: ClassVar[int]
    fields: ClassVar[tuple[tuple[str, str, Callable[[Any], bool]], ...]]
    """Name, type and check of each, found out once."""
    names: ClassVar[tuple[str, ...]]


def message(kind: int) -> Callable[[type[_M]], type[_M]]:
    """Class decorator: a dataclass is the message of this number."""

    def decorate(cls: type[_M]) -> type[_M]:
        cls.kind = kind
        cls.fields = tuple((one.name, str(one.type), _CHECKS[str(one.type)]) for one in fields(cls))  # type: ignore[arg-type]
        cls.names = tuple(name for name, _, _ in cls.fields)
        _kinds[kind] = cls
        return cls

    return decorate


def pack(one: Message) -> bytes:
    """A message as its header frame."""
    return bytes(msgpack.packb([VERSION, one.kind, *[getattr(one, name) for name in one.names]]))


def unpack(frame: bytes | memoryview, most: int = MAX_HEADER + MAX_EXCHANGED) -> Message:
    """The message of a header frame of ``most`` bytes at most.

    Raises:
        ProtocolError: it is none; the text says what is wrong with it.
    """
    if len(frame) > most:
        raise ProtocolError(f"a header of {len(frame)} bytes came; expected at most {most}")
    try:
        items = msgpack.unpackb(frame, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a header came that is no msgpack: {error}") from None
    if not isinstance(items, list) or len(items) < 2:
        raise ProtocolError("a header came that is no list of version, kind and fields")
    version, kind, *values = items
    if version != VERSION:
        raise ProtocolError(f"a message of protocol version {version!r} came; expected {VERSION}")
    cls = _kinds.get(kind) if type(kind) is int else None
    if cls is None:
        raise ProtocolError(f"a message of unknown kind {kind!r} came")
    if len(values) != len(cls.fields):
        raise ProtocolError(f"{cls.__name__} came with {len(values)} fields; expected {len(cls.fields)}")
    for (name, expected, check), value in zip(cls.fields, values, strict=True):
        if not check(value):
            raise ProtocolError(f"{cls.__name__} came with {name}={_shown(value)}; expected a {expected}")
    return cls(*values)


def name_of(error: Exception) -> str:
    """The name among `ERRORS` of an error's class, or of what it is derived from."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in ERRORS), RuntimeError.__name__)


# To and from the scheduler


@message(1)
@dataclass
class Join(Message):
    """A process asks to take part; its ZeroMQ identity is its incarnation."""

    role: Word
    rank: Rank
    """The rank it wants; -1: any."""
    process: Process
    address: Word
    """Where a server is to be reached; "" for workers."""


@message(2)
@dataclass
class Joined(Message):
    """All are here."""

    rank: Rank
    view: Count
    workers: Count
    servers: Words
    """Their addresses in rank order."""
    heartbeat: Number
    """Seconds between two signs of life that the scheduler expects."""
    limit: Number


@message(3)
@dataclass
class Refused(Message):
    """What was asked for cannot be."""

    error: Word
    """ValueError, or StallError where somebody did not come."""
    text: Text


@message(4)
@dataclass
class Beat(Message):
    """A sign of life, either way."""


@message(5)
@dataclass
class Gone(Message):
    """A process is dead, or has left by itself (``why`` is empty)."""

    role: Word
    rank: Rank
    why: Text


@message(6)
@dataclass
class Meet(Message):
    """A worker's bytes for the exchange of this number; a barrier is one without bytes."""

    number: Count
    data: Blob


@message(7)
@dataclass
class Met(Message):
    """All have come to the exchange: what each gave; joined workers gave nothing."""

    number: Count
    data: Blobs


@message(8)
@dataclass
class Rest(Message):
    """A worker takes no further part until all say so."""

    number: Count
    """Of the last exchange that it knows of."""
    data: Blob


@message(9)
@dataclass
class Rested(Message):
    """All workers rest: who came last, and what each gave."""

    last: Rank
    number: Count
    """Above those of all exchanges so far; the next one has the next number."""
    data: Blobs


@message(10)
@dataclass
class Leave(Message):
    """Goodbye."""


@message(11)
@dataclass
class Over(Message):
    """The answer to a goodbye; to servers: all workers have left."""


# Between workers and servers


@message(20)
@dataclass
class Hello(Message):
    """A worker's first message to a server, on every connection."""

    rank: Rank
    view: Count
    mode: Word
    """"sync" or "async"."""
    staleness: Rank
    """How many pushes of a key a worker may be ahead of the slowest; -1: any number."""
    memory: Blob
    """The card of its shared memory; empty: it has none."""
    read: Count
    """The highest number of `Values` of this server that it has read; 0: none."""


@message(21)
@dataclass
class Welcome(Message):
    """The server's answer."""

    shared: Flag
    """Whether the server could open the worker's memory."""
    memory: Blob
    """The card of the server's; empty: it has none."""


@message(22)
@dataclass
class Define(Message):
    """Parts of keys with their first values, from rank 0."""

    sequence: Count
    parts: Defined
    place: Place


@message(23)
@dataclass
class Push(Message):
    """A worker's contributions to rounds of parts."""

    sequence: Count
    entries: Entries
    weight: MaybeNumber
    learning_rate: MaybeNumber
    """Rank 0's from this round on."""
    wants: Flag
    """Whether the answer is the values of those rounds: `Values` in place of `Ack`."""
    place: Place


@message(24)
@dataclass
class Pull(Message):
    """Parts that a worker wants, each when its round is closed."""

    sequence: Count
    entries: Entries
    has_rows: Flag
    """Whether the data are row numbers, and only those rows are wanted."""
    place: Place


@message(25)
@dataclass
class Ack(Message):
    """What came with these numbers is in the server's hands."""

    sequences: Sequences


@message(26)
@dataclass
class Free(Message):
    """The memory of these may be written again."""

    sequences: Sequences


@message(27)
@dataclass
class Values(Message):
    """Values of parts, in the data frames or in the server's shared memory."""

    sequence: Count
    number: Count
    """Of this message among the server's, to be answered by `Done`: so long the values stay. 0: no answer."""
    entries: Entries
    places: Sequences
    """Offsets in the server's shared memory, one an entry; empty: the values are in data frames."""


@message(28)
@dataclass
class Done(Message):
    """The worker has the values of these messages."""

    numbers: Sequences


@message(29)
@dataclass
class Failed(Message):
    """What was asked with this number went wrong."""

    sequence: Count
    error: Word
    """One of `ERRORS`."""
    text: Text


@message(30)
@dataclass
class Command(Message):
    """Something for all parts of a server: "optimizer", "norms", "update", "drop", "compression", "state", ..."""

    sequence: Count
    name: Word
    payload: Blob


@message(31)
@dataclass
class Answer(Message):
    """What a command gives."""

    sequence: Count
    payload: Blob


# What entries hold

DENSE, ROWS, CODED, ABSENT = 0, 1, 2, 3
"""Kinds of data: elements; row numbers (int64) then rows; a codec's payload; nothing, from a worker that has none."""

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)


def _is_entry(value: Any) -> bool:
    if type(value) is not list or len(value) != 4:
        return False
    part, number, kind, nbytes = value
    return (
        (type(part) is int and part >= 0)
        and (type(number) is int and number >= 0)
        and (type(kind) is int and DENSE <= kind <= ABSENT)
        and (type(nbytes) is int and 0 <= nbytes <= MAX_PART)
    )


def _is_definition(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(one) for one in value] == [int, str, list, int, bytes, int, bool]
        and value[0] >= 0
        and value[1] in DTYPES
        and len(value[2]) <= MAX_AXES
        and all(type(axis) is int and axis >= 0 for axis in value[2])
        and math.prod(value[2]) <= MAX_PART
        and value[3] > 0
        and value[5] >= 0
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
