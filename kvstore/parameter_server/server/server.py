"""A server: holds parts of keys, sums what workers push, updates, gives out values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgpack
import torch
from torch import Tensor

from gangline.collectives.compression import Compression, parse
from gangline.collectives.errors import DeadNodeError, MismatchError, ProtocolError
from gangline.collectives.host_memory import keep_freed_memory
from gangline.collectives.transports.shm.segments import Segment, open_offered
from gangline.kvstore.parameter_server import environment, protocol
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.protocol import (
    CODED,
    DENSE,
    Answer,
    Command,
    Define,
    Done,
    Failed,
    Hello,
    Message,
    Pull,
    Push,
    Welcome,
)
from gangline.kvstore.parameter_server.server import optimizer_shards
from gangline.kvstore.parameter_server.server.rounds import Rounds
from gangline.kvstore.parameter_server.server.sessions import Sessions, WorkerSession
from gangline.kvstore.parameter_server.server.shards import Contribution, Shard, Waiter
from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from gangline.kvstore.parameter_server.transport.frames import INLINE, bytes_of
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool, aligned, piece

_log = logging.getLogger("gangline")
_TICK_MS = 200


class _Held:
    """A message's memory, which may be written again when all contributions in it have been used."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._count = count
        self._release = release

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._release()


class Server:
    """Serves the workers of one job until it is over."""

    def __init__(self, membership: SchedulerClient, doors: Listener, crew: ThreadPool) -> None:
        """Serve those who come through doors that are open already; see `open_server`."""
        self._member = membership
        self._doors = doors
        self._crew = crew
        self._answers = Sessions(doors, lambda parts: self._rounds.touch(parts), lambda rank: self._rounds.lacks(rank))
        self._rounds = Rounds(membership.num_workers, crew, self._answers.is_ready, self._answers.fail)
        self._compression: Compression | None = None
        self._commands: list[tuple[WorkerSession, Command, list[memoryview]]] = []
        self.junk = 0
        """Messages that were dropped because they were not what workers send."""
        try:
            self._arena: SharedMemoryPool | None = SharedMemoryPool()
        except OSError as error:
            _log.warning("server %d shares no memory with workers: %s", membership.rank, error)
            self._arena = None
        membership.on_news = self._crew.ring

    @torch.no_grad()
    def run(self) -> None:
        """Serve until the scheduler says that the job is over, or is gone itself."""
        try:
            while not (self._member.is_over or self._member.lost):
                if self._doors.wait(_TICK_MS, self._answers.flush_late):
                    self._crew.finish()
                for identity, frames in self._doors.receive():
                    self._receive(identity, frames)
                self._bury()
                self._rounds.warn()
                self._advance()
        finally:
            if self._arena is not None:
                self._arena.close()

    def _advance(self) -> None:
        """Close rounds and answer, as far as what has come allows, and follow commands when nobody is owed a value."""
        while True:
            self._rounds.advance()
            self._answers.flush()
            if self._rounds.is_touched:  # by what has gone out
                continue
            if self._commands and self._rounds.are_settled():
                self._follow_commands()
                self._answers.flush()
            if not self._rounds.is_touched:
                return

    # What comes in

    def _receive(self, identity: bytes, frames: list[memoryview]) -> None:
        sequence = 0
        try:
            if not frames:
                raise ProtocolError("a message of no frames came")
            message = protocol.unpack(frames[0])
            sequence = getattr(message, "sequence", 0)
            if isinstance(message, Hello):
                self._greet(identity, message)
                return
            worker = self._answers.workers.get(identity)
            if worker is None:
                raise ProtocolError(f"{type(message).__name__} came before a Hello")
            self._handle(worker, message, frames[1:])
        except Exception as error:  # noqa: BLE001  whoever sent it is told, the others are served on
            self._refuse(identity, sequence, error)

    def _refuse(self, identity: bytes, sequence: int, error: Exception) -> None:
        if not isinstance(error, MismatchError):
            self.junk += 1
        text = str(error.args[0]) if error.args else type(error).__name__  # str() of a KeyError is quoted
        _log.warning("server %d refuses a message: %s", self._member.rank, text)
        self._answers.send(identity, Failed(sequence, protocol.name_of(error), text[: 1 << 16]))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if not 0 <= hello.rank < self._member.num_workers or hello.view != self._member.view:
            raise ProtocolError(
                f"worker {hello.rank} of view {hello.view} says hello; expected view {self._member.view}"
            )
        if hello.mode not in ("sync", "async"):
            raise ProtocolError(f"mode is {hello.mode!r}; expected sync or async")
        mode = hello.mode == "sync", hello.staleness
        if self._answers.workers and mode != (self._rounds.is_sync, self._rounds.staleness):
            raise MismatchError(
                f"worker {hello.rank} wants {hello.mode} rounds with staleness {hello.staleness}, others "
                f"{'sync' if self._rounds.is_sync else 'async'} with {self._rounds.staleness}"
            )
        if any(one.rank == hello.rank and one.identity != identity for one in self._answers.workers.values()):
            raise ProtocolError(f"somebody says hello as worker {hello.rank}, who is another process")
        self._rounds.is_sync, self._rounds.staleness = mode
        worker = self._answers.workers.get(identity)
        if worker is None:
            memory = self._memory_of(hello)
            shares = memory is not None and self._arena is not None
            worker = self._answers.workers[identity] = WorkerSession(identity, hello.rank, memory, shares)
        self._answers.end_reads(hello.rank, hello.read)  # whatever became of its Done
        card = self._arena.card if worker.shares and self._arena is not None else b""
        self._answers.send(identity, Welcome(worker.memory is not None, card))

    def _memory_of(self, hello: Hello) -> Segment | None:
        if hello.memory:
            try:
                return open_offered(hello.memory)
            except OSError as error:
                _log.info("server %d and worker %d share no memory: %s", self._member.rank, hello.rank, error)
        return None

    def _handle(self, worker: WorkerSession, message: Message, frames: list[memoryview]) -> None:
        match message:
            case Push():
                self._push(worker, message, frames)
            case Pull(sequence, entries, has_rows, place):
                datas = self._data(worker, entries, place, frames) if has_rows else [None] * len(entries)
                parts = [self._part(entry[0]) for entry in entries]
                for part, entry, data in zip(parts, entries, datas, strict=True):
                    rows = None if data is None else _row_numbers(data, part)
                    self._rounds.wait(part, Waiter(worker.rank, sequence, entry[1], rows))
            case Done(numbers):
                for number in numbers:
                    self._answers.end_read(worker.rank, number)
            case Define(sequence, definitions, place):
                if sequence not in worker.done:
                    self._define(worker, definitions, place, frames)
                    worker.done.append(sequence)
                worker.acks.append(sequence)
            case Command():
                self._commands.append((worker, message, frames))
            case _:
                raise ProtocolError(f"{type(message).__name__} came from worker {worker.rank}")

    def _data(
        self,
        worker: WorkerSession,
        entries: Sequence[Sequence[int]],
        place: Sequence[int] | None,
        frames: list[memoryview],
    ) -> list[Tensor]:
        """The bytes of each entry."""
        sizes = [entry[3] for entry in entries]
        if place is None:
            if [len(frame) for frame in frames] != sizes:
                raise ProtocolError(f"{len(frames)} data frames came for {len(entries)} entries, or of other sizes")
            return [bytes_of(frame) for frame in frames]
        if worker.memory is None:
            raise ProtocolError(f"worker {worker.rank} names a place in memory that it does not share")
        try:
            whole = piece(worker.memory, place[0], sum(map(aligned, sizes)))
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        datas = []
        begin = 0
        for size in sizes:
            datas.append(whole[begin : begin + size])
            begin += aligned(size)
        return datas

    def _define(
        self,
        worker: WorkerSession,
        definitions: Sequence[Sequence[object]],
        place: Sequence[int] | None,
        frames: list[memoryview],
    ) -> None:
        """New parts, or new values of known ones, from rank 0."""
        if worker.rank != 0:
            raise ProtocolError(f"worker {worker.rank} defines parts; only worker 0 may")
        self._crew.drain()
        made = [optimizer_shards.Definition.read(definition) for definition in definitions]
        datas = self._data(worker, [[one.number, 0, DENSE, one.nbytes] for one in made], place, frames)
        for one, data in zip(made, datas, strict=True):
            part = self._rounds.parts.get(one.number)
            if part is None:
                stored, offset = self._room(one)
                lane = self._crew.lane_of(one.number)
                part = Shard(one.number, one.key, one.begin, one.width, stored, one.is_whole, offset, lane)
                self._rounds.parts[one.number] = part
            elif part.flat.nbytes != one.nbytes or part.flat.dtype is not one.dtype or part.key != one.key:
                raise MismatchError(f"part {one.number} is of key {part.key!r} already; key {one.key!r} came for it")
            part.flat.view(torch.uint8).copy_(data)
        self._bound_backlogs()

    def _room(self, one: optimizer_shards.Definition) -> tuple[Tensor, int]:
        if self._arena is None:
            return torch.empty(one.shape, dtype=one.dtype), 0
        offset = self._arena.allocate(one.nbytes)
        return self._arena.bytes_at(offset, one.nbytes).view(one.dtype).view(one.shape), offset

    def _part(self, number: int) -> Shard:
        part = self._rounds.parts.get(number)
        if part is None:
            raise KeyError(f"part {number} is unknown to server {self._member.rank}")
        return part

    def _push(self, worker: WorkerSession, push: Push, frames: list[memoryview]) -> None:
        datas = self._data(worker, push.entries, push.place, frames)
        parts = [self._part(entry[0]) for entry in push.entries]
        release = _nothing
        if push.place and push.sequence not in worker.held:  # else it is freed when its first copy has been used
            worker.held.add(push.sequence)
            release = partial(worker.free, push.sequence)
        held = _Held(len(parts), release)
        lost = ""
        for part, entry, data in zip(parts, push.entries, datas, strict=True):
            number = entry[1]
            why = self._rounds.lost_for(part, number) if self._rounds.is_crippled else ""
            lost = lost or why
            if why or not part.is_new(
                worker.rank, number
            ):  # nobody will use it; or it came before: the answer was lost
                held.release()
            else:
                one = self._read(part, worker, push, entry[2], data, held)
                self._rounds.contribute(part, worker.rank, number, one, push.learning_rate)
            if push.wants:
                self._rounds.wait(part, Waiter(worker.rank, push.sequence, number))
        if lost and not push.wants:  # who asks for values is told when it is seen who died
            self._answers.send(worker.identity, Failed(push.sequence, DeadNodeError.__name__, lost))
            return
        self._answers.has(worker, push.sequence, late=sum(data.nbytes for data in datas) <= INLINE)

    def _read(
        self, part: Shard, worker: WorkerSession, push: Push, kind: int, data: Tensor, held: _Held
    ) -> Contribution:
        decode = None if self._compression is None else self._compression.codec.decode
        try:
            value = part.read(kind, data, decode)
        except Exception as error:  # noqa: BLE001  the round must close, and its workers are told
            held.release()
            text = f"the push of worker {worker.rank} for key {part.key!r} {error}"
            return Contribution(None, push.weight, _nothing, text)
        if value is None:
            held.release()
            return Contribution(value, push.weight, _nothing)
        release = held.release
        if kind == CODED:  # into memory of our own
            held.release()
            release = _nothing
        return Contribution(
            value, push.weight, worker.count(part.flat.nbytes if kind == CODED else data.nbytes, release)
        )

    def _bury(self) -> None:
        """Take in who has died or left."""
        if not self._member.gone:
            return
        gone = {rank: why for (role, rank), why in list(self._member.gone.items()) if role == "worker"}
        for rank in self._rounds.bury(gone):
            self._answers.end_reads(rank)
        if self._rounds.is_crippled:  # no round may ever make room again; who waits for one is told why
            self._answers.most_backlog = math.inf

    # Commands

    def _follow_commands(self) -> None:
        """Do what was told, behind all rounds that were complete then."""
        commands, self._commands = self._commands, []
        for worker, command, frames in commands:
            if command.name == "update" and not self._rounds.can_update():
                self._commands.append((worker, command, frames))
                continue
            answer: bytes = b""
            given: list[Tensor] = []
            try:
                if command.sequence not in worker.done:
                    answer, given = self._command(worker, command.name, command.payload, frames)
                    worker.done.extend([command.sequence] if command.name not in ("state", "norms") else [])
            except Exception as error:  # noqa: BLE001  as in `_receive`
                self._refuse(worker.identity, command.sequence, error)
            else:
                self._answers.send(worker.identity, Answer(command.sequence, answer), given)

    def _command(
        self, worker: WorkerSession, name: str, payload: bytes, frames: list[memoryview]
    ) -> tuple[bytes, list[Tensor]]:
        match name:
            case "optimizer":
                self._rounds.optimizers = optimizer_shards.ShardOptimizers.read(payload, self._crew.lanes)
            case "compression":
                params = msgpack.unpackb(payload)
                self._compression = None if params is None else parse(params)
                self._answers.pull_codec = None if self._compression is None else self._compression.pull_codec
            case "state":
                if self._rounds.optimizers is None:
                    raise RuntimeError("there is no optimizer whose state could be given")
                return self._rounds.optimizers.give(self._rounds.parts.values())
            case "load":
                if self._rounds.optimizers is None:
                    raise ValueError("there is no optimizer that could take a state")
                self._rounds.optimizers.take(payload, [bytes_of(frame) for frame in frames], self._rounds.parts)
            case "norms" | "update" | "drop":
                if self._rounds.optimizers is None:
                    raise RuntimeError("there is no optimizer that could have kept sums")
                if name == "norms":
                    return msgpack.packb(self._rounds.optimizers.norms()), []
                if name == "update":
                    self._rounds.update(*msgpack.unpackb(payload))
                self._rounds.optimizers.drop_held()
            case "rest":
                self._rounds.resting.add(worker.rank)
                self._rounds.touch(self._rounds.parts.values())
            case "wake":
                self._rounds.resting.discard(worker.rank)
                for part in self._rounds.parts.values():
                    part.catch_up(worker.rank)
            case "forget":
                self._forget(msgpack.unpackb(payload))
            case _:
                raise ProtocolError(f"command {name!r} is unknown")
        return b"", []

    def _forget(self, numbers: Sequence[int]) -> None:
        """Parts whose keys have moved to another server."""
        for number in numbers:
            part = self._rounds.parts.pop(number, None)
            if part is not None and self._arena is not None:
                self._arena.free(part.offset)
        self._bound_backlogs()

    def _bound_backlogs(self) -> None:
        if not self._rounds.is_crippled:
            self._answers.bound_backlogs(sum(part.flat.nbytes for part in self._rounds.parts.values()))


def _row_numbers(data: Tensor, part: Shard) -> Tensor:
    if data.numel() % 8:
        raise ProtocolError(f"{data.numel()} bytes of row numbers came; expected a multiple of 8")
    rows = data.clone().view(torch.int64)
    count = part.flat.numel() // part.width
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ValueError(f"rows {int(rows.min())} to {int(rows.max())} are asked of {count} rows of key {part.key!r}")
    return rows


def _nothing() -> None:
    pass


def serve(job: environment.ServerJob) -> None:
    """Run a server until its job ends, with one thread per core that adds and updates."""
    torch.set_num_threads(1)  # of each: what several threads share, they wait for while workers have the cores
    with open_server(job) as server:
        server.run()


@contextmanager
def open_server(job: environment.ServerJob) -> Iterator[Server]:
    """A server that has joined its job, and leaves it at the end."""
    environment.check_address(job.interface)
    keep_freed_memory()  # what comes by socket takes 4 MiB again and again
    crew = ThreadPool()
    doors = Listener(job.interface, crew.bell)
    try:
        patience = math.inf if job.is_supervised else None
        member = SchedulerClient("server", job.scheduler, address=doors.address, timeout=patience)
        try:
            yield Server(member, doors, crew)
        finally:
            member.close()
    finally:
        doors.close()
        crew.close()


def main() -> int:
    """Be the server that the environment describes."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    serve(environment.from_environment())
    return 0
