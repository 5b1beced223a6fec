"""Published versions of a server's shards, and the readers that pull them.

A version names a round of each shard: the last one that worker 0 had pushed when it published. The value after that
round is not overwritten while the version is kept, so readers get it part by part, each when they ask for it, in time
that workers do not need.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import torch

from gangline.collectives.errors import MismatchError, StallError
from gangline.collectives.limits import limits
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import MAX_PARTS, PART_BYTES, Attach, Detached, Part, Read, Want
from gangline.kvstore.parameter_server.server.shards import Shard, Slot
from gangline.kvstore.parameter_server.transport.listener import Listener

_log = logging.getLogger("gangline")
_KEPT = 2  # number of whole versions that are kept
_MOST_READERS = 256
_IDLE_SECONDS = 0.002
"""Time after the last message of a worker from which on parts are sent at once."""
_SHARE = 20  # before that they are sent a twentieth of the time
_TURN_SECONDS = 0.0003  # time for parts between two looks at other messages


@dataclass(eq=False)
class _Version:
    number: int
    described: list[list[object]]
    """``[shard, round, key, dtype, shape of the key, begin, elements]`` of each item, as worker 0 has sent it. The
    stamp of the value, which is the same in the next version if the value is, then replaces the round."""
    items: list[memoryview]
    """The description, once the version is whole, and the values."""
    missing: int
    """Number of items that are not there yet."""
    slots: dict[int, Slot] = field(default_factory=dict)
    """Memory of values, by position of the item."""


class Published:
    """Versions of the shards of a server: values that are not overwritten as long as their version is kept."""

    def __init__(self) -> None:
        self.awaited: dict[int, list[tuple[int, int, _Version]]] = {}
        """Round, position of the item, and version, for each version that waits for a shard's round, by its number."""
        self.versions: list[_Version] = []
        """The newest whole ones, ascending."""
        self.on_whole: Callable[[], None] = lambda: None
        """Called when a version has become whole."""
        self._newest = -1
        self._stamps = itertools.count(time.time_ns())  # differ from those of a former process

    def publish(self, payload: bytes, frames: Sequence[memoryview], shards: Mapping[int, Shard]) -> None:
        """Keep a version of the shards that are named, and of further tensors in data frames, whose number is -1.

        A version that is not above the last one is a repeat by a worker 0 that was restarted or has reconnected.
        """
        number, described = msgpack.unpackb(payload)
        if number <= self._newest:
            return
        if unknown := [one[0] for one in described if one[0] >= 0 and one[0] not in shards]:
            raise MismatchError(f"version {number} names shard {unknown[0]}, which this server does not have")
        own = [shards.get(one[0]) for one in described]
        for shard, one in zip(own, described, strict=True):
            if shard is not None and (shard.closed > one[1] or (shard.closed == one[1] and shard.slot.is_written)):
                _log.warning("version %d is left out: key %r is beyond its round %d", number, shard.key, one[1])
                return
        self._newest = number
        version = _Version(number, described, [memoryview(b"")] * (len(own) + 1), len(own) + 1)
        extra = iter(frames)
        for place, (shard, one) in enumerate(zip(own, described, strict=True), 1):
            if shard is None:
                self._add(version, place, next(self._stamps), next(extra))
            elif shard.closed == one[1]:
                self._add_shard(version, place, shard)
            else:
                self.awaited.setdefault(shard.number, []).append((one[1], place, version))
        self._end(version)

    def keep(self, shard: Shard) -> None:
        """Keep the value of a shard for the versions that have waited for the round that has just closed."""
        waiting = self.awaited.pop(shard.number)
        if later := [one for one in waiting if one[0] > shard.closed]:
            self.awaited[shard.number] = later
        for number, place, version in waiting:
            if number <= shard.closed:
                self._add_shard(version, place, shard)

    def remove(self, shard: Shard) -> None:
        """Copy what versions have of a shard that is removed."""
        waiting = (one[-1] for awaited in self.awaited.values() for one in awaited)
        for version in {*self.versions, *waiting}:
            for place, slot in version.slots.items():
                if slot in shard.slots:
                    version.items[place] = memoryview(bytes(version.items[place]))

    def _add_shard(self, version: _Version, place: int, shard: Shard) -> None:
        slot = version.slots[place] = shard.slot
        slot.pins += 1
        slot.stamp = slot.stamp or next(self._stamps)
        self._add(version, place, slot.stamp, slot.flat.view(torch.uint8).numpy().data)

    def _add(self, version: _Version, place: int, stamp: int, item: memoryview) -> None:
        version.described[place - 1][1], version.items[place] = stamp, item
        self._end(version)

    def _end(self, version: _Version) -> None:
        version.missing -= 1
        if version.missing:
            return
        version.items[0] = memoryview(msgpack.packb(version.described))
        self.versions = sorted([*self.versions, version], key=lambda one: one.number)
        for replaced in self.versions[:-_KEPT]:
            for slot in replaced.slots.values():
                slot.pins -= 1
        del self.versions[:-_KEPT]
        self.on_whole()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the whole versions, ascending."""
        return [version.number for version in self.versions]


@dataclass(eq=False)
class _Reader:
    identity: bytes
    name: str
    heard_at: float
    want: Want | None = None
    """The last one."""
    is_answered: bool = False
    """True if it is."""
    reads: deque[Read] = field(default_factory=deque)
    """Those that are not answered."""
    sent: int = 0
    """Number of answers to earlier ones."""
    received: int = 0
    """Number of these answers that it has acknowledged."""


class Readers:
    """Readers of a server's published versions. All but `receive` cost the workers' messages nothing."""

    def __init__(self, rank: int, listener: Listener, published: Published) -> None:
        self.due: dict[_Reader, None] = {}
        """Readers with unanswered `Read` messages, in the order of their turns."""
        self.yields = False
        """True if a message of a worker has come since the last `serve`."""
        self.sent_bytes = 0
        self._rank = rank
        self._listener = listener
        self._published = published
        published.on_whole = self._answer_all
        self._readers: dict[bytes, _Reader] = {}
        self._dropped: dict[bytes, str] = {}  # reasons of the last ones, by identity
        self._limit = limits().heartbeat_limit
        self._yielded_at = self._next_at = 0.0  # `time.monotonic` seconds

    def __len__(self) -> int:
        return len(self._readers)

    def receive(self, identity: bytes, message: Attach | Want | Read) -> None:
        """Handle a message of a reader."""
        reader = self._readers.get(identity)
        if isinstance(message, Attach) and identity not in self._dropped and (reader or len(self) < _MOST_READERS):
            self._listener.admit(identity, protocol.MAX_STRANGER)
            self._forget(reader)
            self._readers[identity] = _Reader(identity, message.name, time.monotonic())
        elif reader is None:
            why = f"server {self._rank} serves {len(self)} readers already, or does not know this one"
            self._send(identity, Detached(StallError.__name__, self._dropped.pop(identity, why)))
        elif not isinstance(message, Attach):
            reader.heard_at, reader.received = time.monotonic(), max(reader.received, message.received)
            if isinstance(message, Want):
                reader.want, reader.is_answered = message, False
                self._answer(reader)
                return
            reader.reads.append(message)
            self.due[reader] = None
            if reader.sent + len(reader.reads) - reader.received > MAX_PARTS:
                self._drop(reader, f"it asks for more than {MAX_PARTS} parts that it has not received")

    def wait_ms(self, tick_ms: int) -> int:
        """Return the time until `serve` has something to do, at most ``tick_ms``."""
        if all(self._listener.is_full(reader.identity) for reader in self.due):
            return tick_ms
        return int(time.monotonic() - self._yielded_at < _IDLE_SECONDS)

    def serve(self) -> None:
        """Send parts for a short time, to one reader after the other; while workers send, seldom."""
        began = time.monotonic()
        if self.yields:
            self._yielded_at, self.yields = began, False
        if began < self._next_at and began - self._yielded_at < _IDLE_SECONDS:
            return
        for reader in [one for one in self.due if not self._listener.is_full(one.identity)]:
            del self.due[reader]
            self._send_part(reader, reader.reads.popleft())
            if reader.reads and reader.identity in self._readers:
                self.due[reader] = None
            if time.monotonic() - began > _TURN_SECONDS:
                break
        ended = time.monotonic()
        self._next_at = ended + (_SHARE - 1) * (ended - began)

    def _send_part(self, reader: _Reader, read: Read) -> None:
        items = next((one.items for one in self._published.versions if one.number == read.version), None)
        if items is None:  # replaced by newer ones
            reader.sent += 1
            self._send(reader.identity, protocol.Versions(0, self._published.numbers))
        elif read.item < len(items) and read.offset <= len(items[read.item]):
            reader.sent += 1
            part = items[read.item][read.offset : read.offset + PART_BYTES]
            self.sent_bytes += len(part)
            head = Part(read.version, read.item, read.offset, len(items[read.item]))
            self._send(reader.identity, head, part)
        else:
            self._drop(
                reader, f"it asks for byte {read.offset} of item {read.item}, which version {read.version} lacks"
            )

    def _answer_all(self) -> None:
        for reader in list(self._readers.values()):
            self._answer(reader)

    def _answer(self, reader: _Reader) -> None:
        numbers = self._published.numbers
        if reader.want and not reader.is_answered and numbers and numbers[-1] >= reader.want.least:
            self._send(reader.identity, protocol.Versions(reader.want.sequence, numbers))
            reader.is_answered = True

    def check(self) -> None:
        """Forget readers that have ended, and drop those that do not receive what they have asked for."""
        for identity in self._listener.take_lost():
            self._forget(self._readers.get(identity))
        before = time.monotonic() - self._limit
        for reader in list(self._readers.values()):
            if reader.heard_at < before and reader.sent > reader.received:
                count = reader.sent - reader.received
                self._drop(reader, f"it has not received {count} parts of a version within {self._limit:g} s")

    def are_behind(self) -> bool:
        """Return whether a reader has not read the newest version yet."""
        numbers = self._published.numbers
        wants = [reader.want for reader in self._readers.values()]
        return bool(numbers) and any(want is None or want.least <= numbers[-1] for want in wants)

    def end(self, error: str, text: str) -> None:
        """Send all readers the reason for which this server ends."""
        newest = f"its last version is {self._published.numbers[-1]}" if self._published.versions else ""
        for identity in self._readers:
            self._send(identity, Detached(error, f"{text}; {newest or 'no version was published'}"))

    def _drop(self, reader: _Reader, why: str) -> None:
        text = f"server {self._rank} has dropped reader {reader.name}: {why}"
        self._listener.refusals.warn("%s", text)
        self._forget(reader)
        if self._listener.is_full(reader.identity):
            self._dropped[reader.identity] = text  # it is told when it attaches again
            if len(self._dropped) > _MOST_READERS:
                del self._dropped[next(iter(self._dropped))]
        else:
            self._send(reader.identity, Detached(StallError.__name__, text))
        self._listener.disconnect(reader.identity)

    def _forget(self, reader: _Reader | None) -> None:
        if reader is not None:
            self._readers.pop(reader.identity, None)
            self.due.pop(reader, None)

    def _send(self, identity: bytes, message: protocol.Message, *frames: memoryview) -> None:
        self._listener.send(identity, [protocol.pack(message), *frames])
