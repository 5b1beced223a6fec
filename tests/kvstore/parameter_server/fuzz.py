"""Fuzzer of a live job: mutated messages of an admitted worker and of strangers, beside a worker that trains.

`make fuzz` runs it; `python -m tests.kvstore.parameter_server.fuzz --messages 1000000 --seed 7` repeats a run.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch

from gangline.collectives.errors import MismatchError, ProtocolError
from gangline.collectives.processes.spawning import Ranks
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.pending import command
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.environment import from_environment
from gangline.kvstore.parameter_server.protocol import (
    DENSE,
    Command,
    Heartbeat,
    Join,
    Leave,
    Message,
    Pull,
    Push,
    SilenceQuery,
    Values,
    Withdraw,
)
from gangline.kvstore.parameter_server.server.server import open_server
from gangline.kvstore.parameter_server.store import DistStore
from gangline.kvstore.parameter_server.transport import client_channel, unix_stream
from gangline.kvstore.parameter_server.transport.unix_stream import UnixStream
from tests.collectives.processes import Bare
from tests.kvstore.parameter_server.processes import join_job

_NUMEL = {"small": 4_000, "large": 30_000}
"""Elements of the keys: one is sent in messages, the other in shared memory."""
_BATCH = 100
_LIMIT = 60.0
"""Seconds for an answer."""

_ODD = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 1.5, float("nan"), float("inf"), "", "x", "x" * 5000, b"", b"y" * 5000,
    [], [[]], [[[]]], {}, {"a": 1}, [0, 0], [2**62, 2**62], [[0, 0, 0, 0]], [[0, 2**61, 0, 8]], list(range(5000)),
)  # fmt: skip
"""Values for a field that expects another."""
_BOMBS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\x96\x03\x17\xdd\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 4096,
    b"\x90" * 65536,
    b"\xc9\xff\xff\xff\xff\x01",
)
"""Headers that announce, or make, much more than they hold."""


class Mutator:
    """Source of mutated messages.

    Args:
        recorded: frames of valid messages.
        chance: random numbers, which make a run repeatable.
    """

    def __init__(self, recorded: list[list[bytes]], chance: random.Random) -> None:
        self.round = 0
        """Last round that the server has answered with."""
        self._recorded = recorded
        self._chance = chance
        self._ways: list[Callable[[list[bytes]], list[list[bytes]]]] = [
            self._flip, self._truncate, self._bomb, self._odd_field, self._odd_frames, self._other_kind,
            *[self._repeat, self._reorder] * 2, *[self._other_number] * 8,
        ]  # fmt: skip

    def messages(self) -> Iterator[list[bytes]]:
        """Yield messages without end."""
        while True:
            frames = list(self._chance.choice(self._recorded))
            for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
                made = self._chance.choice(self._ways)(frames)
                yield from made[:-1]
                frames = made[-1]
            yield frames

    def _flip(self, frames: list[bytes]) -> list[list[bytes]]:
        header = bytearray(frames[0])
        for _ in range(self._chance.randint(1, 8) if header else 0):
            header[self._chance.randrange(len(header))] ^= 1 << self._chance.randrange(8)
        return [[bytes(header), *frames[1:]]]

    def _truncate(self, frames: list[bytes]) -> list[list[bytes]]:
        at = self._chance.randrange(len(frames))
        cut = frames[at][: self._chance.randint(0, len(frames[at]))]
        return [[*frames[:at], cut, *frames[at + 1 :]]]

    def _repeat(self, frames: list[bytes]) -> list[list[bytes]]:
        return [frames] * self._chance.randint(2, 4)

    def _reorder(self, frames: list[bytes]) -> list[list[bytes]]:
        other = list(self._chance.choice(self._recorded))
        return [other, frames]

    def _bomb(self, frames: list[bytes]) -> list[list[bytes]]:
        bomb = self._chance.choice(_BOMBS)
        at = self._chance.randint(0, len(frames[0]))
        return [[frames[0][:at] + bomb + frames[0][at + len(bomb) :] if at else bomb, *frames[1:]]]

    def _odd_field(self, frames: list[bytes]) -> list[list[bytes]]:
        return self._edit(
            frames, lambda items: items.__setitem__(self._chance.randrange(len(items)), self._chance.choice(_ODD))
        )

    def _other_number(self, frames: list[bytes]) -> list[list[bytes]]:
        """Name another shard, round, kind or size in an entry, or another message, rank or collective."""

        def edit(items: list[Any]) -> None:
            entries = [one for field in items if isinstance(field, list) for one in field if isinstance(one, list)]
            numbers = self._chance.choice(entries) if entries and self._chance.random() < 0.7 else items
            begin = 2 if numbers is items else 0
            places = [at for at, one in enumerate(numbers) if at >= begin and type(one) is int]
            if places:
                at = self._chance.choice(places)
                near = numbers[at]
                far = self._chance.choice((self.round + self._chance.randrange(4), self._chance.getrandbits(62)))
                numbers[at] = self._chance.choice((near + 1, near - 1, 0, 1, 2, 3, 4, 2**62 - 1, far, far, far))

        return self._edit(frames, edit)

    def _other_kind(self, frames: list[bytes]) -> list[list[bytes]]:
        return self._edit(frames, lambda items: items.__setitem__(min(1, len(items) - 1), self._chance.randrange(40)))

    def _odd_frames(self, frames: list[bytes]) -> list[list[bytes]]:
        size = self._chance.choice((0, 1, 7, 8, 9, 4096, 100_000))
        more = [bytes(size)] * self._chance.choice((1, 2, 50))
        return [self._chance.choice((frames[:1], [*frames, *more], [frames[0], *more], [b"", *frames]))]

    def _edit(self, frames: list[bytes], edit: Callable[[list[Any]], object]) -> list[list[bytes]]:
        with suppress(Exception):  # what was mutated before need not be msgpack
            items = msgpack.unpackb(frames[0])
            if isinstance(items, list) and items:
                edit(items)
                return [[msgpack.packb(items), *frames[1:]]]
        return [frames]


def message_of(frames: list[bytes]) -> Message | None:
    """Return the message of the protocol, or None if the header is none."""
    try:
        return protocol.unpack(frames[0])
    except ProtocolError:
        return None


def is_allowed(frames: list[bytes]) -> bool:
    """Return whether a worker may send this though it changes what other workers get."""
    message = message_of(frames)
    if isinstance(message, Push):  # its weight counts in the mean; its values are all 0
        return message.weight is not None
    return isinstance(message, (Leave, Join, Command))


# Processes


@dataclass
class Count:
    """Counts of a process."""

    sent: int = 0
    refused: int = 0
    """Messages that are none of the protocol, of all that were sent; each must be counted by its receiver."""
    wrong: list[str] = field(default_factory=list)
    rounds: int = 0
    mismatches: int = 0
    memory: list[int] = field(default_factory=list)
    """Resident bytes after a tenth of the messages, and in the end."""


def _rss(pid: int) -> int:
    """Return the resident bytes of a process without memory that it shares with others."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(found) for found in re.findall(r"Rss(?:Anon|File):\s+(\d+)", text))


def train(kv: DistStore, is_over: Callable[[], bool]) -> Count:
    """Push and compare each result, which shows a push that is lost or counted twice; return what went wrong."""
    count = Count()
    expected = dict.fromkeys(_NUMEL, 0.0)
    sign = -1.0 if kv.type == "dist_sync" else 1.0  # with an optimizer, which subtracts
    while not is_over():
        for key, numel in _NUMEL.items():
            value, out = 1.0 + count.rounds % 7, torch.empty(numel, dtype=torch.float64)
            count.rounds += 1
            try:
                kv.pushpull(key, torch.full_like(out, value), out)
            except MismatchError as error:  # of the other worker, which must be named; the round has no effect
                count.mismatches += 1
                if "worker 1" not in str(error):
                    count.wrong.append(f"round {count.rounds}: {error}")
                continue  # a pull of this round would raise the error again; the next round shows the value
            expected[key] += value * sign
            if (found := out.unique().tolist()) != [expected[key]]:
                count.wrong.append(f"round {count.rounds}, key {key}: {found[:5]}, expected {expected[key]}")
                expected[key] = found[0]
        time.sleep(0.001)  # the other worker and the server need the cores more
    return count


class Attack:
    """Sends mutated messages as worker 1, and as strangers; counts what they must lead to."""

    def __init__(self, kv: DistStore, seed: int, pids: dict[str, int]) -> None:
        self.count = {"server": Count(), "scheduler": Count()}
        self._kv = kv
        self._chance = random.Random(seed)
        self._pids = pids
        self._servers: ServerClient = kv._servers
        self._scheduler: SchedulerClient = kv._scheduler
        self._connection = self._servers._connections[0]
        self._sequence = 1 << 40
        self._strangers: dict[str, UnixStream] = {}
        to_server, to_scheduler = self._take_over()
        self._mutator = Mutator(to_server, self._chance)
        self._to_server = self._mutator.messages()
        self._to_scheduler = Mutator(to_scheduler, self._chance).messages()

    def _take_over(self) -> tuple[list[list[bytes]], list[list[bytes]]]:
        """Use the store's connections in its place; return messages of a worker to server and scheduler."""
        pack, pool = protocol.pack, self._kv._pool
        protocol.pack = lambda message: message if isinstance(message, bytes) else pack(message)
        self._servers.flush()
        self._servers._driving.acquire()  # the store's thread uses the channel no more
        hello = pack(self._connection.hello)
        self._connection.channel.send([hello])
        to_server = [
            [hello],
            [pack(Pull(9, [(0, 1, DENSE, 0), (1, 2, DENSE, 0)], False, None))],
        ]
        assert pool is not None
        for number in range(1, 4):
            for shard, nbytes in enumerate(8 * numel for numel in sorted(_NUMEL.values(), reverse=True)):
                entries, wants_values = [(shard, number, DENSE, nbytes)], number == 2 and self._kv.is_async
                region = (pool.allocate(nbytes), nbytes) if shard == 0 else None
                push = pack(Push(10 + number, entries, None, None, wants_values, region))
                to_server.append([push] if region else [push, bytes(nbytes)])
        messages = (self._scheduler._registration, Heartbeat(), SilenceQuery(60.0), Withdraw(1))
        return to_server, [[pack(message)] for message in messages]

    def run(self, messages: int) -> None:
        """Send so many messages; measure the growth of memory from the first tenth on."""
        for part in (messages // 10, messages - messages // 10):
            for number in range(part):
                self._send_one()
                if number % _BATCH == _BATCH - 1 or number == part - 1:
                    self._settle()
            for role, pid in self._pids.items():
                self.count[role].memory.append(_rss(pid))

    def _send_one(self) -> None:
        way = self._chance.random()
        if way < 0.55:
            frames = next(frames for frames in self._to_server if not is_allowed(frames))
            self._note("server", frames)
            self._connection.channel.send(frames)
        elif way < 0.75:
            frames = next(frames[:1] for frames in self._to_scheduler if not is_allowed(frames))
            self._note("scheduler", frames)
            self._scheduler._send(frames[0])  # type: ignore[arg-type]  see _take_over
        elif way < 0.85:
            self._send_as_stranger("server", next(self._to_server))
        elif way < 0.95:
            self._send_as_stranger("scheduler", next(self._to_scheduler))
        else:
            self._stream()

    def _note(self, role: str, frames: list[bytes]) -> None:
        self.count[role].sent += 1
        self.count[role].refused += message_of(frames) is None

    def _send_as_stranger(self, role: str, frames: list[bytes]) -> None:
        self._note(role, frames)
        stream = self._strangers.get(role)
        if stream is None or self._chance.random() < 0.002 or not is_open(stream):
            if stream is not None:
                stream.close()
            stream = self._strangers[role] = unix_stream.connect(self._name_of(role))
            stream.send([self._chance.randbytes(16)])
        with suppress(OSError):
            stream.send(frames)
        if sum(map(len, frames)) > protocol.MAX_STRANGER - 8 * len(frames):  # it is closed
            del self._strangers[role]
            with suppress(OSError):
                stream.flush()
            stream.close()

    def _name_of(self, role: str) -> str:
        scheduler = client_channel.scheduler_address(self._scheduler._address)
        return (self._scheduler.servers[0] if role == "server" else scheduler).removeprefix("unix://")

    def _stream(self) -> None:
        """Send bytes to the server's Unix socket: a broken stream of messages, from a process without a name."""
        frames = next(self._to_server)
        sizes = b"".join(len(frame).to_bytes(8, "little") for frame in frames)
        head = b"glu1" + len(frames).to_bytes(4, "little") + sizes
        data = bytearray(b"glu1\x01\0\0\0\x10" + bytes(7) + self._chance.randbytes(16) + head + b"".join(frames))
        for _ in range(self._chance.randint(1, 6)):
            data[self._chance.randrange(min(len(data), 80))] ^= 1 << self._chance.randrange(8)
        with socket.socket(socket.AF_UNIX) as one, suppress(OSError):
            one.connect(f"\0{self._name_of('server')}")
            one.settimeout(1)
            one.sendall(data)
        self.count["server"].sent += 1

    def _pull(self, sequence: int) -> None:
        """Send a valid request, as after a reconnection."""
        for message in (self._connection.hello, Pull(sequence, [(0, 0, 0, 0)], False, None)):
            self._connection.channel.send([protocol.pack(message)])

    def _settle(self) -> None:
        """Wait until server and scheduler have answered a valid request; confirm values that were sent meanwhile."""
        self._sequence += 1
        sequence = self._sequence
        self._pull(sequence)
        ends = time.monotonic() + _LIMIT
        while not self._answers(sequence):
            if time.monotonic() > ends:
                raise AssertionError(f"the server has not answered a pull within {_LIMIT:g} s")
        self._scheduler.silent_members(60.0)

    def _answers(self, sequence: int) -> bool:
        """Handle the server's answers; return whether that of a request is among them."""
        channel, found = self._connection.channel, False
        events = self._servers._poller.wait(100)
        if channel.reconnected(events):
            self._pull(sequence)
        for frames in channel.receive(events):
            message = protocol.unpack(frames[0])
            if isinstance(message, Values):
                self._mutator.round = max([self._mutator.round, *(entry[1] for entry in message.entries)])
                self._servers._last_read[0] = max(self._servers._last_read[0], message.number)
            found |= getattr(message, "sequence", 0) == sequence
        return found

    def close(self) -> None:
        self._connection.in_flight = self._connection.undelivered = 0
        self._connection.pending.clear()
        self._servers._driving.release()
        for stream in self._strangers.values():
            stream.close()


def is_open(stream: UnixStream) -> bool:
    """Read the answers of a stream; return whether it is open."""
    try:
        for _ in stream.receive():
            pass
    except OSError:
        return False
    return True


def _play(place: Bare, name: str, messages: int, seed: int, folder: str) -> Any:
    """Run a role: scheduler, server, honest worker, attacker."""
    logging.getLogger("gangline").setLevel(logging.CRITICAL)  # each rejected message is a line
    own = join_job(place, 2, 1)
    pids = dict(zip(("scheduler", "server"), map(int, place.exchange(str(os.getpid()).encode())[:2]), strict=True))
    if own is not None:
        own.run()
        return own.rejected + own._listener.rejected
    if place.rank == 1:
        os.environ["DMLC_ROLE"] = "server"
        with open_server(from_environment()) as server:
            server.run()
        return server.rejected + server._listener.rejected
    os.environ.update(DMLC_ROLE="worker", DMLC_WORKER_ID=str(place.rank - 2))
    over = Path(folder, "over")
    kv = DistStore(name, timeout=_LIMIT)
    try:
        kv.init(list(_NUMEL), [torch.zeros(numel, dtype=torch.float64) for numel in _NUMEL.values()])
        if name == "dist_sync":
            kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
        kv.barrier()
        if place.rank == 2:
            return train(kv, over.exists)
        if name == "dist_sync":
            command(kv._servers, "join")  # then rounds need worker 0 only
        attack = Attack(kv, seed, pids)
        attack.run(messages)
        attack.close()
        return attack.count
    finally:
        over.touch()
        kv.close()


def check(name: str, messages: int, seed: int) -> str:
    """Run a job of a server, an honest worker and one that sends mutated messages; return a summary.

    Raises:
        AssertionError: if a round of the honest worker is wrong, memory has grown, or a message is not counted.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-fuzz-"))
        ranks = stack.enter_context(Ranks(_play, 4, (name, messages, seed, folder), opener=Bare))
        scheduler, server, honest, sent = ranks.results()
    lines = [
        f"{name}, seed {seed}: {messages:,} messages in {time.monotonic() - began:.0f} s; {honest.rounds:,} honest "
        f"rounds, {honest.mismatches:,} of them failed by worker 1, {len(honest.wrong)} wrong"
    ]
    for role, rejected in (("server", server), ("scheduler", scheduler)):
        count = sent[role]
        warm, end = count.memory
        growth = end / warm - 1
        lines.append(
            f"  {role}: {count.sent:,} sent, {count.refused:,} of them no messages of the protocol, {rejected:,} "
            f"rejected; memory {warm / 1e6:.1f} -> {end / 1e6:.1f} MB ({growth:+.1%})"
        )
        summary = "\n".join(lines)
        assert not honest.wrong, f"{summary}\n{honest.wrong[:5]}"
        assert rejected >= count.refused, summary
        assert growth < 0.1, summary
    assert honest.rounds > 0, summary
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="number of mutated messages in each mode")
    parser.add_argument("--seed", type=int, default=None, help="seed of a run to repeat")
    parser.add_argument("--mode", choices=["dist_async", "dist_sync"], default=None)
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    for name in [options.mode] if options.mode else ["dist_async", "dist_sync"]:
        print(f"{name}: seed {seed}", flush=True)
        print(check(name, options.messages, seed), flush=True)


if __name__ == "__main__":
    sys.exit(main())
