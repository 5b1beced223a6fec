"""Messages of the parameter server: fields, packing and validation.

A message is a header frame (msgpack: ``[VERSION, kind, *fields]``) followed by one data frame per entry if its tensors
are sent over the socket. Every field is checked before any memory is allocated for it. Nothing is unpickled or run.
docs/protocol.md specifies the messages for clients in other languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, dataclass_transform

import msgpack

from gangline.collectives.errors import ProtocolError

VERSION = 9
MAX_HEADER = 4 << 20
"""Maximum bytes of a header frame."""
MAX_SHARD = 1 << 35
"""Maximum bytes of one shard, including keys that are not split."""
MAX_ENTRIES = 1 << 12
"""Maximum number of entries of a message that this implementation sends; Unix streams refuse 65,536 frames or more."""
MAX_STRANGER = 4096
"""Maximum bytes of a message of a process that has not been admitted by `Register` or `Hello`."""
MAX_RANKS = 1 << 16
MAX_AXES = 64
MAX_COLLECTIVE = 64 << 20
"""Maximum bytes that a worker contributes to one collective."""

_MOST_FIELDS = 16
_kinds: dict[int, type[Message]] = {}


class VersionError(ProtocolError):
    """Error of a message of another version of the protocol."""


def _are_counts(values: Any) -> bool:
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110  `all` calls a generator for each value
        if type(value) is not int or not 0 <= value < 1 << 62:
            return False
    return True


def _are_entries(values: Any) -> bool:
    if type(values) is not list:
        return False
    for value in values:
        if type(value) is not list or len(value) != 4:
            return False
        shard, number, kind, nbytes = value
        if not (
            (type(shard) is int and shard >= 0)
            and (type(number) is int and number >= 0)
            and (type(kind) is int and DENSE <= kind <= REFUSED)
            and (type(nbytes) is int and 0 <= nbytes <= MAX_SHARD)
        ):
            return False
    return True


# Types of fields, each with its check.

Rank = Annotated[int, lambda v: type(v) is int and -1 <= v < MAX_RANKS]
Count = Annotated[int, lambda v: type(v) is int and 0 <= v < 1 << 62]
String = Annotated[str, lambda v: isinstance(v, str) and len(v) <= 4096]
Text = Annotated[str, lambda v: isinstance(v, str) and len(v) <= 1 << 20]
Blob = Annotated[bytes, lambda v: isinstance(v, bytes) and len(v) <= MAX_COLLECTIVE]
Flag = Annotated[bool, lambda v: v is True or v is False]
Number = Annotated[float, lambda v: _is_number(v)]
"""Finite, at least 0."""
OptionalNumber = Annotated[float | None, lambda v: v is None or _is_number(v)]
Strings = Annotated[
    list[str], lambda v: isinstance(v, list) and len(v) <= MAX_RANKS and all(isinstance(w, str) for w in v)
]
Blobs = Annotated[
    list[bytes], lambda v: isinstance(v, list) and len(v) <= MAX_RANKS and all(isinstance(b, bytes) for b in v)
]
Process = Annotated[list[str | int], lambda v: isinstance(v, list) and [type(one) for one in v] == [str, int, int]]
Counts = Annotated[list[int], _are_counts]
Region = Annotated[
    list[int] | None,
    lambda v: v is None or (isinstance(v, list) and len(v) == 2 and all(type(n) is int and n >= 0 for n in v)),
]
"""``[offset, bytes]`` in the sender's shared memory, where entries are consecutive and aligned to 64 bytes.
None: the data are in data frames."""
Entries = Annotated[list[list[Any]], _are_entries]
"""``[shard, round, kind, bytes]`` each; kind is DENSE, ROWS, CODED, ABSENT or REFUSED."""
Definitions = Annotated[list[list[Any]], lambda v: isinstance(v, list) and all(map(_is_definition, v))]
"""``[shard, dtype, shape, row width, key as msgpack, begin, is whole key]`` each; width and begin in elements."""
Views = Annotated[list[list[Any]], lambda v: isinstance(v, list) and all(map(_is_view, v))]
"""``[first round, ranks]`` each, in ascending order: the workers from that round on."""


@dataclass_transform(field_specifiers=(field,))
class Message:
    """Base class of all messages; ``class Name(Message, kind=NUMBER)`` makes a dataclass of that kind number."""

    kind: ClassVar[int]
    fields: ClassVar[tuple[tuple[str, str, Callable[[Any], bool]], ...]]
    """Name, type and check of each field."""
    size: ClassVar[int]
    """Number of items of a header: version, kind and fields."""

    def __init_subclass__(cls, kind: int) -> None:
        dataclass(cls)
        cls.kind = kind
        types = [(one.name, str(one.type)) for one in fields(cls)]  # type: ignore[arg-type]
        cls.fields = tuple((name, expected, globals()[expected].__metadata__[0]) for name, expected in types)
        cls.size = 2 + len(cls.fields)
        _kinds[kind] = cls


def pack(one: Message) -> bytes:
    """Return the header frame of a message."""
    return bytes(msgpack.packb([VERSION, one.kind, *one.__dict__.values()]))


def unpack(frame: bytes | memoryview, *, is_bounded: bool = True) -> Message:
    """Return the message of a header frame.

    Args:
        frame: at most MAX_HEADER bytes, or a message whose only large fields are bytes, of MAX_COLLECTIVE bytes more.
        is_bounded: False: of any size, for messages of the scheduler, which hold the data of all workers.

    Raises:
        ProtocolError: if the frame is not a valid message; the text names the field or the violated limit.
    """
    nbytes, most = len(frame), MAX_HEADER + MAX_COLLECTIVE
    if is_bounded and nbytes > most:
        raise ProtocolError(f"received a header of {nbytes} bytes; expected at most {most}")
    try:
        if is_bounded and nbytes > MAX_HEADER:
            items = _unpack_flat(frame)
        else:
            items = msgpack.unpackb(frame, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"received a header that is not msgpack: {error}") from None
    size = len(items) if type(items) is list else 0
    if size < 2:
        raise ProtocolError("received a header that is not a list of version, kind and fields")
    version, kind, *values = items
    if version != VERSION:
        raise VersionError(f"received a message of protocol version {version!r}; expected {VERSION}")
    if type(kind) is not int or kind not in _kinds:
        raise ProtocolError(f"received a message of unknown kind {kind!r}")
    cls = _kinds[kind]
    if size != cls.size:
        raise ProtocolError(f"received {cls.__name__} with {size - 2} fields; expected {cls.size - 2}")
    for (name, expected, check), value in zip(cls.fields, values, strict=True):
        if not check(value):
            raise ProtocolError(f"received {cls.__name__} with {name}={_abbreviated(value)}; expected type {expected}")
    return cls(*values)


def _unpack_flat(frame: bytes | memoryview) -> list[object]:
    """Unpack a list without lists in it, which would take up to 72 times the bytes of the frame."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(frame), max_array_len=0, max_map_len=0, max_ext_len=0)
    unpacker.feed(frame)
    return [unpacker.unpack() for _ in range(min(unpacker.read_array_header(), _MOST_FIELDS))]


# Scheduler messages


class Register(Message, kind=1):
    """Request of a process to take part in the job. Its ZeroMQ identity identifies this incarnation."""

    role: String
    rank: Rank
    """Requested rank; -1: any."""
    process: Process
    address: String
    """Address of a server; "" for workers."""
    job: String = ""
    """GANGLINE_JOB_ID, by which the scheduler refuses processes of other jobs."""
    incarnation: Count = 0
    """Number of times that this process was started again while its job ran on."""


class Registered(Message, kind=2):
    """Start of the job: all processes have registered."""

    rank: Rank
    view: Count
    workers: Count
    servers: Strings
    """Server addresses in rank order."""
    heartbeat: Number
    """Seconds between two heartbeats that the scheduler expects."""
    limit: Number
    restarts: Flag = False
    """True if processes that die may be started again."""
    is_restarted: Flag = False
    """True if the process came after the start: it has taken the place of one that died, or joins an elastic job."""
    is_elastic: Flag = False
    """True if workers come and go while the job runs."""
    views: Views = field(default_factory=list)
    """Table of the workers that take part; one view if they are always the same."""


class Rejected(Message, kind=3):
    """Rejection of a `Register`."""

    error: String
    """ValueError, or StallError if another process did not register in time."""
    text: Text


class Heartbeat(Message, kind=4):
    """Heartbeat, in either direction."""

    sent: Count = 0
    """Clock of a process that records a timeline, in nanoseconds; the scheduler repeats it in its answer."""
    answered: Count = 0
    """Clock of the scheduler, in such an answer."""


class MemberGone(Message, kind=5):
    """Notice that a process has died, or has left (``why`` is empty)."""

    role: String
    rank: Rank
    why: Text


class Collective(Message, kind=6):
    """Contribution of a worker to the collective of this number; a barrier has empty data."""

    number: Count
    name: Text
    """Name of the call, which must be the same on all workers."""
    root: Rank
    """Rank that gets the data; -1: all."""
    data: Blob
    refusal: Text
    """Why this worker does not take part, which fails the collective for all; empty: it does."""


class CollectiveResult(Message, kind=7):
    """Contributions of all workers in rank order, empty for workers inside join(); none for ranks but the root."""

    number: Count
    data: Blobs


class Join(Message, kind=8):
    """Call of join(): collectives go on without this worker until all workers have joined."""

    number: Count
    """Number of the last collective of this worker."""
    data: Blob


class JoinResult(Message, kind=9):
    """End of join(): all workers have called it."""

    last: Rank
    """Worker that called join() last."""
    number: Count
    """Larger than the number of any collective so far; the next collective is number + 1."""
    data: Blobs


class Leave(Message, kind=10):
    """Notice that the sender leaves the job."""

    why: Text = ""
    """Reason if others cannot go on without it; "" otherwise."""


class JobOver(Message, kind=11):
    """Acknowledgement of `Leave`; sent to servers when all workers have left."""


class CollectiveFailed(Message, kind=12):
    """End of a collective because workers made different calls, or one refused its call."""

    number: Count
    text: Text


class Withdraw(Message, kind=13):
    """Withdrawal of a `Collective` whose worker does not wait any longer; its next call has the same number."""

    number: Count


class Withdrawn(Message, kind=14):
    """Answer to `Withdraw` if the collective has not completed before."""

    number: Count
    missing: Counts
    """Workers that the collective waits for."""


class Waiting(Message, kind=15):
    """Notice to servers of the workers that wait in collectives for other workers, each time this changes."""

    ranks: Counts
    calls: Strings
    """Name of the call of each of them."""
    numbers: Counts
    """Number of the collective of each of them."""


class SilenceQuery(Message, kind=16):
    """Question which processes the scheduler has not heard for this many seconds."""

    seconds: Number


class SilenceResult(Message, kind=17):
    """Answer to `SilenceQuery`."""

    members: Strings
    """Role and rank of each, such as "worker 1"."""


class MemberAway(Message, kind=18):
    """Notice that a process has died whose place a restarted one may take; `MemberBack` or `MemberGone` follows."""

    role: String
    rank: Rank
    why: Text
    identity: Blob
    """Identity of its sockets, from which servers accept nothing any more."""


class MemberBack(Message, kind=19):
    """Notice that a restarted process has taken the place of one that has died, or that a new worker has come."""

    role: String
    rank: Rank
    view: Count
    """Number of the membership with this process."""
    address: String
    """Address of a server; "" for workers."""


class Recall(Message, kind=33):
    """Question of a restarted worker whether a collective is over, whose result it then gets from the record."""

    number: Count
    skips: Flag
    """True if collectives of smaller numbers go on without this worker from now on."""


class Recalled(Message, kind=34):
    """Answer to `Recall`."""

    number: Count
    is_over: Flag


class ViewRequest(Message, kind=40):
    """Request of a worker of an elastic job to take part, or to leave."""

    enters: Flag


class ViewRequested(Message, kind=41):
    """Answer to `ViewRequest`; `ViewChange` follows if it is granted."""

    enters: Flag
    text: Text
    """Reason why the worker cannot leave; "": granted."""


class ViewQuery(Message, kind=42):
    """Question which step a worker has begun; it begins no further one until it knows the view of this number."""

    number: Count


class ViewAnswer(Message, kind=43):
    """Answer of a worker to `ViewQuery`; of a server, notice that it follows the views up to this number."""

    number: Count
    round: Count
    """Last step that the worker has begun; 0 of servers."""


class ViewChange(Message, kind=44):
    """The next view of an elastic job."""

    number: Count
    first: Count
    """First round of the view."""
    ranks: Counts
    """Workers that take part from then on."""


class RankRequest(Message, kind=45):
    """Request of a process of another host, which has not registered, for the rank of a new worker."""

    version: String
    """Version of gangline."""


class RankGranted(Message, kind=46):
    """Answer to `RankRequest`; `Rejected` is the other one, with StallError if the same request may succeed later."""

    variables: Strings
    """Environment of the worker, ``NAME=VALUE`` each."""


# Server messages


class Hello(Message, kind=20):
    """First message of a worker on every connection to a server."""

    rank: Rank
    view: Count
    mode: String
    """"sync" or "async"."""
    staleness: Rank
    """Number of pushes per key that a worker may be ahead of the slowest; -1: unlimited."""
    memory: Blob
    """Handle of the worker's shared memory; empty: none."""
    last_read: Count
    """Highest `Values.number` of this server that the worker has read; 0: none."""


class Welcome(Message, kind=21):
    """Answer to `Hello`."""

    shared: Flag
    """True if the server has mapped the worker's memory."""
    memory: Blob
    """Handle of the server's shared memory; empty: none."""


class Define(Message, kind=22):
    """Shards and their initial values, from rank 0."""

    sequence: Count
    shards: Definitions
    region: Region


class Push(Message, kind=23):
    """Values of a worker for rounds of shards."""

    sequence: Count
    entries: Entries
    weight: OptionalNumber
    learning_rate: OptionalNumber
    """Learning rate from this round on, of rank 0 and of ranks that have set one; the lowest rank's counts."""
    wants_values: Flag
    """True if the server answers with the `Values` of these rounds."""
    region: Region


class Pull(Message, kind=24):
    """Request for shards, each to be sent when its round is closed."""

    sequence: Count
    entries: Entries
    has_rows: Flag
    """True if the data are row numbers and only these rows are requested."""
    region: Region


class Ack(Message, kind=25):
    """Notice that the server has received the messages of these sequence numbers."""

    sequences: Counts


class Release(Message, kind=26):
    """Notice that the memory regions of these messages may be overwritten."""

    sequences: Counts


class Values(Message, kind=27):
    """Values of shards, in data frames or in the server's shared memory."""

    sequence: Count
    number: Count
    """Number to confirm by `ValuesRead`; the values do not change before that. 0: no confirmation."""
    entries: Entries
    offsets: Counts
    """Offset of each entry in the server's shared memory; empty: the values are in data frames."""


class ValuesRead(Message, kind=28):
    """Confirmation that the worker has read the `Values` of these numbers."""

    numbers: Counts


class Failed(Message, kind=29):
    """Failure of the request of this sequence number."""

    sequence: Count
    error: String
    """Name of a class in `remote_errors.ERRORS`."""
    text: Text
    number: Count = 0
    """Number to confirm by `ValuesRead`; the error is sent again if the request is repeated before. 0: none."""


class Command(Message, kind=30):
    """Command for all shards of a server: "optimizer", "norms", "update", "drop", "compression", "rounds", ..."""

    sequence: Count
    name: String
    payload: Blob


class CommandResult(Message, kind=31):
    """Result of a command."""

    sequence: Count
    payload: Blob


class Blocked(Message, kind=32):
    """Notice that a request waits for a push of a worker which itself waits in a collective for the requesting one."""

    sequence: Count
    number: Count
    """Number of the collective."""
    text: Text


class Repeated(Message, kind=35):
    """Notice after a `Welcome` that the worker has repeated all requests that a lost connection may have lost."""


# Collectives

ROUND = 1 << 20
"""Base of collective numbers: where workers may be restarted, the first one after n pushes is n * ROUND + 1. Those that
set up the store are numbered from 1 whenever they are called."""

# Entries

DENSE, ROWS, CODED, ABSENT, REFUSED = range(5)
"""Kinds of data: elements; row numbers (int64) then rows; payload of a codec; none (the worker has no value); the
reason, in UTF-8, why a worker refused to push, which fails the round for all."""

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


def _is_definition(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(one) for one in value] == [int, str, list, int, bytes, int, bool]
        and value[0] >= 0
        and value[1] in DTYPES
        and len(value[2]) <= MAX_AXES
        and all(type(axis) is int and axis >= 0 for axis in value[2])
        and math.prod(value[2]) <= MAX_SHARD
        and value[3] > 0
        and value[5] >= 0
    )


def _is_view(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(one) for one in value] == [int, list]
        and value[0] > 0
        and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in value[1])
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
