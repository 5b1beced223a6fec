"""Messages of the parameter server: fields, packing and validation.

A message is a header frame (msgpack: ``[VERSION, kind, *fields]``) followed by one data frame per entry if its tensors
are sent over the socket. Every field is checked while it is decoded. Nothing is unpickled or run.
docs/protocol.md specifies the messages for clients in other languages.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from gangline.collectives.errors import ProtocolError

VERSION = 12
MAX_HEADER = 4 << 20
"""Maximum bytes of a header frame without a `Blob`; one with it may have MAX_COLLECTIVE more."""
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
MAX_MESSAGE = MAX_SHARD + MAX_COLLECTIVE + MAX_HEADER
"""Maximum bytes of a message over a Unix stream."""
PART_BYTES = 1 << 18
"""Bytes of each `Part` of an item but the last one."""
MAX_PARTS = 8
"""Maximum number of `Read` messages of a reader that a server has not answered, or whose answers it may not have."""


class VersionError(ProtocolError):
    """Error of a message of another version of the protocol."""


# Types of fields

Rank = Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
String = Annotated[str, Meta(max_length=4096)]
Text = Annotated[str, Meta(max_length=1 << 20)]
Blob = Annotated[bytes, Meta(max_length=MAX_COLLECTIVE)]
Flag = bool
Number = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
OptionalNumber = Number | None
Strings = Annotated[list[str], Meta(max_length=MAX_RANKS)]
Blobs = Annotated[list[bytes], Meta(max_length=MAX_RANKS)]
Process = tuple[str, int, int]
Counts = list[Count]
Region = tuple[Count, Count] | None
"""``(offset, bytes)`` in the sender's shared memory, where entries are consecutive and aligned to 64 bytes.
None: the data are in data frames."""
Entries = list[tuple[Count, Count, Annotated[int, Meta(ge=0, le=4)], Annotated[int, Meta(ge=0, le=MAX_SHARD)]]]
"""``(shard, round, kind, bytes)`` each; kind is DENSE, ROWS, CODED, ABSENT or REFUSED."""
Dtype = Literal["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"]
DTYPES: tuple[str, ...] = get_args(Dtype)
Positive = Annotated[int, Meta(ge=1)]
Definitions = list[tuple[Count, Dtype, Annotated[Counts, Meta(max_length=MAX_AXES)], Positive, bytes, Count, bool]]
"""``(shard, dtype, shape, row width, key as msgpack, begin, is whole key)`` each; width and begin in elements."""
Views = list[tuple[Positive, list[Annotated[int, Meta(ge=0, lt=MAX_RANKS)]]]]
"""``(first round, ranks)`` each, in ascending order: the workers from that round on."""

_pack = msgspec.msgpack.Encoder().encode
_heads: dict[type[Message], bytes] = {}
_kinds: dict[bytes, tuple[type[Message], msgspec.msgpack.Decoder[Any], int]] = {}
"""By the first three bytes of a frame, array's length, version and kind: the message, and its maximum bytes."""


class Message(msgspec.Struct, array_like=True):
    """Base class of all messages; ``class Name(Message, tag=NUMBER)`` has that kind number."""

    kind: ClassVar[int]


def pack(message: Message) -> bytes:
    """Return the header frame of a message."""
    return _heads[type(message)] + memoryview(_pack(message))[1:]


def unpack(frame: bytes | memoryview, *, is_bounded: bool = True) -> Message:
    """Return the message of a header frame, which may have any size unless ``is_bounded``.

    Raises:
        ProtocolError: if the frame is not a valid message; the text names the field or the violated limit.
    """
    known = _kinds.get(bytes(frame[:3]))
    if known is None:
        raise _fault(*frame[:3])
    cls, decoder, most = known
    if is_bounded and len(frame) > most:
        raise ProtocolError(f"received {cls.__name__} of {len(frame)} bytes; expected at most {most}")
    try:
        return decoder.decode(bytes([frame[0] - 1]) + memoryview(frame)[2:])  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        text = re.sub(r"(?<= `)\$\[(\d+)\](?=[^`]*`$)", lambda at: cls.__struct_fields__[int(at[1]) - 1], str(error))
        text = text if len(text) < 200 else f"{text[:100]}...{text[-50:]}"
        raise ProtocolError(f"received {cls.__name__} with an invalid field: {text}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"received a header that is not msgpack: {error}") from None


def _fault(head: int = 0, version: int = 0, kind: int = 0) -> ProtocolError:
    """Return the error of a frame whose first three bytes begin no message."""
    if not 0x92 <= head <= 0x9F:
        return ProtocolError("received a header that is not a list of version, kind and fields")
    if version != VERSION:
        return VersionError(f"received a message of protocol version {version}; expected {VERSION}")
    for cls in _heads:
        if cls.kind == kind:
            fields = len(cls.__struct_fields__)
            return ProtocolError(f"received {cls.__name__} with {head - 0x92} fields; expected {fields}")
    return ProtocolError(f"received a message of unknown kind {kind}")


# Scheduler messages


class Register(Message, tag=1):
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
    memory: Count = 0
    """Bytes that a server has for values and state; 0: unknown."""
    is_memory_set: Flag = False
    """True if the user has set them, False if they are the free memory of the host."""


class Registered(Message, tag=2):
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
    views: Views = []
    """Table of the workers that take part; one view if they are always the same."""
    memory: Counts = []
    """Memory of the servers in rank order, by which keys are placed; empty: all have the same."""


class Rejected(Message, tag=3):
    """Rejection of a `Register`."""

    error: String
    """ValueError, or StallError if another process did not register in time."""
    text: Text


class Heartbeat(Message, tag=4):
    """Heartbeat, in either direction."""

    sent: Count = 0
    """Clock of a process that records a timeline, in nanoseconds; the scheduler repeats it in its answer."""
    answered: Count = 0
    """Clock of the scheduler, in such an answer."""


class MemberGone(Message, tag=5):
    """Notice that a process has died, or has left (``why`` is empty)."""

    role: String
    rank: Rank
    why: Text
    error: String = ""
    """Error of its `Leave`."""


class Collective(Message, tag=6):
    """Contribution of a worker to the collective of this number; a barrier has empty data."""

    number: Count
    name: Text
    """Name of the call, which must be the same on all workers."""
    root: Rank
    """Rank that gets the data; -1: all."""
    data: Blob
    refusal: Text
    """Why this worker does not take part, which fails the collective for all; empty: it does."""


class CollectiveResult(Message, tag=7):
    """Contributions of all workers in rank order, empty for workers inside join(); none for ranks but the root."""

    number: Count
    data: Blobs


class Join(Message, tag=8):
    """Call of join(): collectives go on without this worker until all workers have joined."""

    number: Count
    """Number of the last collective of this worker."""
    data: Blob


class JoinResult(Message, tag=9):
    """End of join(): all workers have called it."""

    last: Rank
    """Worker that called join() last."""
    number: Count
    """Larger than the number of any collective so far; the next collective is number + 1."""
    data: Blobs


class Leave(Message, tag=10):
    """Notice that the sender leaves the job."""

    why: Text = ""
    """Reason if others cannot go on without it; "" otherwise."""
    error: String = ""
    """Class and first line of the error that ends the sender; "" if none does."""
    remains: Flag = False
    """True if the sender takes part until its process ends, because others wait for its restart or fail with it."""


class JobOver(Message, tag=11):
    """Acknowledgement of `Leave`; sent to servers when all workers have left."""


class CollectiveFailed(Message, tag=12):
    """End of a collective because workers made different calls, or one refused its call."""

    number: Count
    text: Text


class Withdraw(Message, tag=13):
    """Withdrawal of a `Collective` whose worker does not wait any longer; its next call has the same number."""

    number: Count


class Withdrawn(Message, tag=14):
    """Answer to `Withdraw` if the collective has not completed before."""

    number: Count
    missing: Counts
    """Workers that the collective waits for."""


class Waiting(Message, tag=15):
    """Notice to servers of the workers that wait in collectives for other workers, each time this changes."""

    ranks: Counts
    calls: Strings
    """Name of the call of each of them."""
    numbers: Counts
    """Number of the collective of each of them."""


class SilenceQuery(Message, tag=16):
    """Question which processes the scheduler has not heard for this many seconds."""

    seconds: Number


class SilenceResult(Message, tag=17):
    """Answer to `SilenceQuery`."""

    members: Strings
    """Role and rank of each, such as "worker 1"."""


class MemberAway(Message, tag=18):
    """Notice that a process has died whose place a restarted one may take; `MemberBack` or `MemberGone` follows."""

    role: String
    rank: Rank
    why: Text
    identity: Blob
    """Identity of its sockets, from which servers accept nothing any more."""


class MemberBack(Message, tag=19):
    """Notice that a restarted process has taken the place of one that has died, or that a new worker has come."""

    role: String
    rank: Rank
    view: Count
    """Number of the membership with this process."""
    address: String
    """Address of a server; "" for workers."""


class Recall(Message, tag=33):
    """Question of a restarted worker whether a collective is over, whose result it then gets from the record."""

    number: Count
    skips: Flag
    """True if collectives of smaller numbers go on without this worker from now on."""


class Recalled(Message, tag=34):
    """Answer to `Recall`."""

    number: Count
    is_over: Flag


class ViewRequest(Message, tag=40):
    """Request of a worker of an elastic job to take part, or to leave."""

    enters: Flag


class ViewRequested(Message, tag=41):
    """Answer to `ViewRequest`; `ViewChange` follows if it is granted."""

    enters: Flag
    text: Text
    """Reason why the worker cannot leave; "": granted."""


class ViewQuery(Message, tag=42):
    """Question which step a worker has begun; it begins no further one until it knows the view of this number."""

    number: Count


class ViewAnswer(Message, tag=43):
    """Answer of a worker to `ViewQuery`; of a server, notice that it follows the views up to this number."""

    number: Count
    round: Count
    """Last step that the worker has begun; 0 of servers."""


class ViewChange(Message, tag=44):
    """The next view of an elastic job."""

    number: Count
    first: Count
    """First round of the view."""
    ranks: Counts
    """Workers that take part from then on."""


class RankRequest(Message, tag=52):
    """Request of a process of another host, which has not registered, for the rank of a new worker."""

    version: String
    """Version of gangline."""


class RankGranted(Message, tag=53):
    """Answer to `RankRequest`; `Rejected` is the other one, with StallError if the same request may succeed later."""

    variables: Strings
    """Environment of the worker, ``NAME=VALUE`` each."""


# Server messages


class Hello(Message, tag=20):
    """First message of a worker on every connection to a server."""

    rank: Rank
    view: Count
    mode: String
    """"sync" or "async"."""
    staleness: Rank
    """Number of pushes per key that a worker may be ahead of the slowest; -1: unlimited."""
    memory: Blob
    """Handle of the worker's shared memory; empty: none."""
    word: Count
    """Offset in that memory of a 64-bit integer: the number of the last `Values` of this server that it has read."""


class Welcome(Message, tag=21):
    """Answer to `Hello`."""

    shared: Flag
    """True if the server has mapped the worker's memory."""
    memory: Blob
    """Handle of the server's shared memory; empty: none."""


class Define(Message, tag=22):
    """Shards and their initial values, from rank 0."""

    sequence: Count
    shards: Definitions
    region: Region


class Push(Message, tag=23):
    """Values of a worker for rounds of shards."""

    sequence: Count
    entries: Entries
    weight: OptionalNumber
    learning_rate: OptionalNumber
    """Learning rate from this round on, of rank 0 and of ranks that have set one; the lowest rank's counts."""
    wants_values: Flag
    """True if the server answers with the `Values` of these rounds."""
    region: Region
    last_read: Count = 0
    """Number of the last `Values` of the server that this worker has read."""


class Pull(Message, tag=24):
    """Request for shards, each to be sent when its round is closed."""

    sequence: Count
    entries: Entries
    has_rows: Flag
    """True if the data are row numbers and only these rows are requested."""
    region: Region


class Ack(Message, tag=25):
    """Notice that the server has received the messages of these sequence numbers."""

    sequences: Counts


class Release(Message, tag=26):
    """Notice that the memory regions of these messages may be overwritten."""

    sequences: Counts


class Values(Message, tag=27):
    """Values of shards, in data frames or in the server's shared memory."""

    sequence: Count
    number: Count
    """Rises with each message to this worker; the server keeps the values until it knows that it has read them."""
    entries: Entries
    offsets: Counts
    """Offset of each entry in the server's shared memory; empty: the values are in data frames."""


class Failed(Message, tag=29):
    """Failure of the request of this sequence number."""

    sequence: Count
    error: String
    """Name of a class in `remote_errors.ERRORS`."""
    text: Text


class Command(Message, tag=30):
    """Command for all shards of a server: "optimizer", "norms", "update", "drop", "compression", "rounds", ..."""

    sequence: Count
    name: String
    payload: Blob


class CommandResult(Message, tag=31):
    """Result of a command."""

    sequence: Count
    payload: Blob


class Blocked(Message, tag=32):
    """Notice that a request waits for a push of a worker which itself waits in a collective for the requesting one."""

    sequence: Count
    number: Count
    """Number of the collective."""
    text: Text


class Repeated(Message, tag=35):
    """Notice after a `Welcome` that the worker has repeated all requests that a lost connection may have lost."""


# Messages of readers


class Attach(Message, tag=45):
    """First message of a reader on each connection to the scheduler, which it may repeat there, or to a server."""

    name: String
    """Host and process id, for logs."""


class Attached(Message, tag=46):
    """Answer of the scheduler to `Attach`."""

    servers: Strings
    """Server addresses in rank order; empty: the job has not begun."""
    why: Text
    """Why the job fails; "": it does not."""
    restart_limit: Number
    """Seconds for which the scheduler may be away, because it is restarted; 0: it is not."""


class Want(Message, tag=47):
    """Question of a reader which whole versions a server has; it is answered once there is one from ``least`` on."""

    sequence: Count
    least: Count
    """Lowest version that the reader wants; it has read what it wants of those below."""
    received: Count
    """Number of answers to `Read` messages that the reader has received; see there."""


class Versions(Message, tag=48):
    """Whole versions of a server: the answer to `Want`, or to a `Read` of a version that the server has no more."""

    sequence: Count
    """Number of the `Want`; 0: the answer to a `Read`."""
    numbers: Counts


class Read(Message, tag=49):
    """Request of a reader for a part of an item of a version."""

    version: Count
    item: Count
    """0: the description of the version; n: the n-th tensor in it."""
    offset: Count
    received: Count
    """Number of answers to earlier `Read` messages that the reader has received since its `Attach`."""


class Part(Message, tag=50):
    """Bytes of an item from an offset on, in a data frame: the answer to `Read`."""

    version: Count
    item: Count
    offset: Count
    nbytes: Count
    """Bytes of the item."""


class Detached(Message, tag=51):
    """Notice that a server does not serve a reader any more; it may attach again unless the job has ended."""

    error: String
    """Name of a class in `remote_errors.ERRORS`: EOFError if the job has ended."""
    text: Text


# Collectives

ROUND = 1 << 20
"""Base of collective numbers: where workers may be restarted, the first one after n pushes is n * ROUND + 1. Those that
set up the store are numbered from 1 whenever they are called."""

# Entries

DENSE, ROWS, CODED, ABSENT, REFUSED = range(5)
"""Kinds of data: elements; row numbers (int64) then rows; payload of a codec; none (the worker has no value); the
reason, in UTF-8, why a worker refused to push, which fails the round for all."""

for _cls in Message.__subclasses__():
    _cls.kind = int(_cls.__struct_config__.tag or 0)
    _head = bytes([0x92 + len(_cls.__struct_fields__), VERSION, _cls.kind])
    _most = MAX_HEADER + MAX_COLLECTIVE * ("Blob" in _cls.__annotations__.values())
    _heads[_cls], _kinds[_head] = _head[:2], (_cls, msgspec.msgpack.Decoder(_cls), _most)
