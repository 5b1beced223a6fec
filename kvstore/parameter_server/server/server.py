"""Server process: receives messages of workers, applies them to shards and answers."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import msgpack
import torch
from torch import Tensor

from gangline.collectives.errors import DeadNodeError, MismatchError, ProtocolError
from gangline.collectives.liveness.status_socket import Part, publish, withdraw
from gangline.collectives.transports.shm.segments import Segment, open_offered
from gangline.kvstore.arguments import available_memory
from gangline.kvstore.compression import Compression, parse
from gangline.kvstore.freed_memory import keep_freed_memory
from gangline.kvstore.group.remote_errors import error_name, text_with_traceback, why_gone
from gangline.kvstore.optimizer.spec import check_learning_rate
from gangline.kvstore.parameter_server import environment, protocol
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.protocol import CODED, REFUSED, Message
from gangline.kvstore.parameter_server.server import optimizer_shards
from gangline.kvstore.parameter_server.server.kept_memory import KeptMemory
from gangline.kvstore.parameter_server.server.published import Readers
from gangline.kvstore.parameter_server.server.rounds import ShardRounds
from gangline.kvstore.parameter_server.server.sessions import Sessions, WorkerSession
from gangline.kvstore.parameter_server.server.shards import PushedValue, Shard, Slot, Waiter, add_push
from gangline.kvstore.parameter_server.server.state_files import StateFiles
from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from gangline.kvstore.parameter_server.transport.frames import INLINE, tensor_of
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool, aligned, region_of
from gangline.kvstore.restart_variables import KEPT_MEMORY

_log = logging.getLogger("gangline")
_TICK_MS = 200
_READ_MS = 2
"""Interval of looks at what workers have read, while that stops a round or their values."""
_LOOK_SECONDS = 0.05  # interval of checks of waits while messages arrive
_EARLY = 64  # number of workers that may send Hello before the scheduler has announced them
_LAST_SECONDS = 5.0  # time for readers to pull the last version once the workers have left
_SMALL_MESSAGES = 64 << 20
_PER_MESSAGE = 9
"""Maximum bytes of a message beyond the above, in multiples of all shards' bytes (numbers of rows of one byte)."""


class Server:
    """Server of one job."""

    def __init__(
        self, scheduler: SchedulerClient, listener: Listener, thread_pool: ThreadPool, kept: KeptMemory | None = None
    ) -> None:
        self._scheduler = scheduler
        self._listener = listener
        self._thread_pool = thread_pool
        self._sessions = Sessions(listener, lambda blocked: self._rounds.awaited(blocked))
        self._rounds = ShardRounds(
            scheduler.num_workers, thread_pool, self._add_slot, self._sessions.send_value, self._sessions.fail
        )
        self._state_files = StateFiles(thread_pool, f"server {scheduler.rank}", lambda shard: self._save([shard]))
        self._readers = Readers(scheduler.rank, listener, self._rounds.published)
        self._compression: Compression | None = None
        self._commands: list[tuple[WorkerSession, protocol.Command, list[memoryview]]] = []
        self._early: dict[bytes, protocol.Hello] = {}  # of processes not yet announced by the scheduler
        self._fenced: set[bytes] = set()
        self.rejected = 0
        """Number of invalid messages."""
        self._received_bytes = 0  # of pushes
        self._look_at = 0.0  # `time.monotonic` seconds of the next `_follow_scheduler`
        self._kept = self._rounds.kept = kept
        self._repeated: set[bytes] = set()  # identities of workers that have repeated their requests
        try:
            self._pool: SharedMemoryPool | None = SharedMemoryPool() if kept is None else kept.pool
        except OSError as error:
            _log.warning("server %d shares no memory with workers: %s", scheduler.rank, error)
            self._pool = None
        if kept is not None:
            self._restore(kept)
        self._follow_views()
        scheduler.on_change = self._thread_pool.notify
        publish(self, f"server {scheduler.rank}")

    def status(self) -> Part:
        """Return this server's state, for `gangline status`."""
        rounds = max((shard.closed for shard in list(self._rounds.shards.values())), default=0)
        sent = self._sessions.sent_bytes
        counters = {"rounds": rounds, "received_bytes": self._received_bytes, "sent_bytes": sent}
        if versions := self._rounds.published.numbers:
            counters |= {"version": versions[-1], "read_bytes": self._readers.sent_bytes}
        return {"part": "server", "counters": counters, "waits": self._rounds.waits()}

    def _restore(self, kept: KeptMemory) -> None:
        """Restore the state that this server kept before its restart."""
        settings, rounds = kept.settings, self._rounds
        for number, (_, payload) in settings.optimizers.items():
            rounds.optimizers.set(payload)
            rounds.optimizers.all[number].rates.update(settings.rates.get(number, {}))
        if settings.compression is not None:
            self._set_compression(settings.compression)
        rounds.joined.update(settings.joined)
        self._follow_views()
        for shard in kept.restore(rounds.optimizers.all, self._thread_pool.size):
            self._thread_pool.loads[shard.thread] += shard.flat.nbytes
            rounds.shards[shard.number] = shard
            if not shard.pushed:  # pushes of all workers are in the closed rounds, or come again
                taking_part = (rank for rank in rounds.ranks() if rounds.before(rank) <= shard.closed)
                shard.pushed = dict.fromkeys(taking_part, shard.closed)
        rounds.is_held = kept.was_used
        if kept.was_used:
            closed = max((shard.closed for shard in rounds.shards.values()), default=0)
            text = "server %d goes on with %d shards at round %d; %d interrupted updates were undone"
            _log.warning(text, self._scheduler.rank, len(rounds.shards), closed, kept.undone)

    @torch.no_grad()
    def run(self) -> None:
        """Serve until the scheduler ends the job or is lost."""
        try:
            while not (self._scheduler.is_over or self._scheduler.lost):
                is_polling = self._sessions.due or self._rounds.stopped_by_unread
                tick_ms = _READ_MS if is_polling else _TICK_MS
                if self._readers.due:
                    tick_ms = self._readers.wait_ms(tick_ms)
                if self._listener.wait(tick_ms, self._sessions.flush_acks):
                    self._thread_pool.run_callbacks()
                    self._look_at = 0.0
                for identity, frames in self._listener.receive():
                    self._receive(identity, frames)
                now = time.monotonic()
                if now >= self._look_at:
                    self._look_at = now + _LOOK_SECONDS
                    self._follow_scheduler()
                self._advance()
                if self._readers.due:
                    self._readers.serve()
            self._end_readers()
        finally:
            withdraw(self)
            if self._pool is not None:
                self._pool.close()

    def _end_readers(self) -> None:
        """Wait until readers have the last version, unless the job has failed, and send them the end of the job."""
        died = {f"{role} {rank} {why}" for (role, rank), why in self._scheduler.gone.items() if why}
        died |= {f"the scheduler {self._scheduler.lost}"} if self._scheduler.lost else set()
        self._thread_pool.drain()
        ends = time.monotonic() + _LAST_SECONDS
        while not died and self._readers.are_behind() and time.monotonic() < ends:
            self._listener.wait(self._readers.wait_ms(_TICK_MS) if self._readers.due else _TICK_MS)
            for identity, frames in self._listener.receive():
                self._receive(identity, frames)
            self._readers.serve()
            self._readers.check()
        text = f"the job has failed: {'; '.join(sorted(died))}" if died else "the job has ended"
        self._readers.end((DeadNodeError if died else EOFError).__name__, text)

    def _follow_scheduler(self) -> None:
        """Handle changes that the scheduler has announced, which notify `run`, and long waits."""
        self._follow_views()
        self._fence_dead_workers()
        self._greet_early_workers()
        self._remove_gone_workers()
        self._end_hold()
        self._readers.check()
        self._rounds.set_in_collectives(self._scheduler.waiting)
        for waiter, number, text in self._rounds.blocked():
            self._sessions.send_to_rank(waiter.rank, protocol.Blocked(waiter.sequence, number, text))
        self._rounds.warn_of_stalls()

    def exit_code(self, *, is_supervised: bool) -> int:
        """Return 1 if the scheduler was lost before the job was over, or another process has died.

        Under a launcher the job's exit code is that of the workers. There, 1 means that this process must be restarted:
        the job continues, but this process was paused and counts as dead, or lost the scheduler.
        """
        is_lost = bool(self._scheduler.lost) and not self._scheduler.is_over
        if is_supervised:
            return int(is_lost and self._scheduler.allows_restarts)
        return int(is_lost or any(self._scheduler.gone.values()))

    def _advance(self) -> None:
        """Close complete rounds and answer waiters; run commands once all rounds are settled."""
        while True:
            self._rounds.advance()
            self._sessions.flush()
            if self._commands and not self._rounds.is_held and self._rounds.are_settled():
                self._run_commands()
                self._sessions.flush()
            if not self._rounds.changed:
                return

    def _end_hold(self) -> None:
        """Resume closing rounds and running commands once all requests from before the restart were repeated.

        Commands then run after the same rounds as before, and no worker reads a value of the former process in place.
        """
        if not self._rounds.is_held:
            return
        out = [rank for role, rank in [*self._scheduler.gone, *self._scheduler.away] if role == "worker"]
        present = {worker.rank for worker in self._sessions.workers.values() if worker.identity in self._repeated}
        if present.union(out) >= self._rounds.ranks():
            self._rounds.is_held = False
            self._rounds.changed.update(self._rounds.shards.values())

    # Messages

    def _receive(self, identity: bytes, frames: list[memoryview]) -> None:
        worker, message = None, None
        try:
            if not frames:
                raise ProtocolError("received a message of no frames")
            worker = self._sessions.workers.get(identity)
            if worker is None and (nbytes := sum(map(len, frames))) > protocol.MAX_STRANGER:
                raise ProtocolError(f"received {nbytes} bytes before a Hello")
            message = protocol.unpack(frames[0])
            if type(message) is protocol.Hello:
                self._greet(identity, message)
                return
            if identity in self._fenced:
                raise DeadNodeError("this process counts as dead, and another may have taken its place; it must end")
            if worker is None:
                if isinstance(message, (protocol.Attach, protocol.Want, protocol.Read)):
                    self._readers.receive(identity, message)
                    return
                raise ProtocolError(f"received {type(message).__name__} before a Hello")
            self._readers.yields = True
            self._handle(worker, message, frames[1:])
        except Exception as error:  # noqa: BLE001  sent to the worker; the server continues
            sequence = getattr(message, "sequence", 0)
            self._reject(identity, sequence, error)
            if (
                isinstance(message, protocol.Push)
                and worker is not None
                and sequence not in worker.in_use
                and (self._scheduler.allows_restarts or (message.region and worker.memory is not None))
            ):
                self._sessions.release(worker, sequence)

    def _reject(self, identity: bytes, sequence: int, error: Exception) -> None:
        if not isinstance(error, MismatchError):
            self.rejected += 1
        text = str(error.args[0]) if error.args else type(error).__name__  # str() of a KeyError adds quotes
        is_expected = isinstance(error, (ProtocolError, MismatchError, DeadNodeError))
        self._listener.refusals.warn(
            "server %d rejects a message: %s", self._scheduler.rank, text, exc_info=None if is_expected else error
        )
        text = text[: 1 << 16] if is_expected else text_with_traceback(text, error)
        self._sessions.send(identity, protocol.Failed(sequence, error_name(error), text))

    def _greet(self, identity: bytes, hello: protocol.Hello) -> None:
        view = self._scheduler.view
        self._fence_dead_workers()
        if identity in self._fenced:
            raise DeadNodeError(
                f"worker {hello.rank} counts as dead, and another may have taken its place; it must end"
            )
        is_early = self._scheduler.keeps_positions and view < hello.view and len(self._early) < _EARLY
        is_known = 0 < hello.view <= view if self._scheduler.keeps_positions else hello.view == view
        workers = protocol.MAX_RANKS if self._scheduler.is_elastic else self._scheduler.num_workers
        if not 0 <= hello.rank < workers or not (is_known or is_early):
            raise ProtocolError(f"received Hello of worker {hello.rank} of view {hello.view}; expected view {view}")
        if is_early:
            self._early[identity] = hello
            return
        if hello.mode not in ("sync", "async"):
            raise ProtocolError(f"mode is {hello.mode!r}; expected sync or async")
        mode = hello.mode == "sync", hello.staleness
        if self._sessions.workers and mode != (self._rounds.is_sync, self._rounds.staleness):
            raise MismatchError(
                f"worker {hello.rank} wants {hello.mode} rounds with staleness {hello.staleness}, others "
                f"{'sync' if self._rounds.is_sync else 'async'} with {self._rounds.staleness}"
            )
        other = self._sessions.of_rank(hello.rank)
        if other is not None and other.identity != identity:
            raise ProtocolError(f"received Hello of worker {hello.rank}, which is another process")
        self._rounds.is_sync, self._rounds.staleness = mode
        self._rounds.keeps_former = self._scheduler.allows_restarts or self._scheduler.is_elastic  # guests are replaced
        self._sessions.is_sync = self._rounds.is_sync
        worker = self._sessions.workers.get(identity)
        if worker is None:
            memory = self._memory_of(hello)
            shares_memory = memory is not None and self._pool is not None
            worker = WorkerSession(identity, hello.rank, memory, shares_memory)
            if shares_memory and memory is not None:
                if hello.word % 8 or hello.word + 8 > memory.nbytes:
                    raise ProtocolError(f"received Hello with word={hello.word} in {memory.nbytes} bytes of memory")
                worker.word = memory.words(hello.word, 1)
            self._sessions.add(worker)
            if self._kept is not None:
                worker.handled.extend(self._kept.settings.handled.get(identity, ()))
        elif not hello.memory:  # the worker could not open this server's memory
            worker.memory, worker.shares_memory, worker.word = None, False, (0,)
        self._listener.admit(identity, self._max_message(hello.rank))
        handle = self._pool.handle if worker.shares_memory and self._pool is not None else b""
        self._sessions.send(identity, protocol.Welcome(worker.memory is not None, handle))

    def _memory_of(self, hello: protocol.Hello) -> Segment | None:
        try:
            return open_offered(hello.memory) if hello.memory else None
        except OSError as error:
            _log.info("server %d and worker %d share no memory: %s", self._scheduler.rank, hello.rank, error)
            return None

    def _handle(self, worker: WorkerSession, message: Message, frames: list[memoryview]) -> None:
        match message:
            case protocol.Push():
                self._push(worker, message, frames)
            case protocol.Pull(sequence, entries, has_rows, region):
                datas: Sequence[Tensor | None] = [None] * len(entries)
                if has_rows:
                    datas = self._data(worker, [entry[3] for entry in entries], region, frames)
                shards = self._shards(entries)
                for shard, entry, data in zip(shards, entries, datas, strict=True):
                    rows = None if data is None else _row_numbers(data, shard)
                    self._wait(worker, shard, Waiter(worker.rank, sequence, entry[1], rows))
            case protocol.Define(sequence):
                if sequence not in worker.handled:
                    self._define(worker, message, frames)
                    self._mark_handled(worker, sequence)
                self._sessions.acknowledge(worker, [sequence])
            case protocol.Command(sequence, "learning_rate", payload):  # for pushes that arrive later
                if sequence not in worker.handled:
                    self._set_learning_rate(worker.rank, payload)
                    self._mark_handled(worker, sequence)
                self._sessions.send(worker.identity, protocol.CommandResult(sequence, b""))
            case protocol.Command(sequence, "publish", payload):  # before later pushes
                self._rounds.published.publish(payload, frames, self._rounds.shards)
                self._sessions.send(worker.identity, protocol.CommandResult(sequence, b""))
            case protocol.Command():
                self._commands.append((worker, message, frames))
            case protocol.Repeated():
                self._repeated.add(worker.identity)
                self._look_at = 0.0  # the last one ends the hold
            case _:
                raise ProtocolError(f"received an unexpected {type(message).__name__} from worker {worker.rank}")

    def _wait(self, worker: WorkerSession, shard: Shard, waiter: Waiter) -> None:
        if waiter.sequence in worker.refused:
            self._sessions.send(worker.identity, worker.refused[waiter.sequence])
        else:
            self._rounds.wait(shard, waiter)

    def _data(
        self, worker: WorkerSession, sizes: list[int], region: Sequence[int] | None, frames: list[memoryview]
    ) -> list[Tensor]:
        """Return the data of each entry as uint8 tensors."""
        if region is None:
            if [*map(len, frames)] != sizes:
                raise ProtocolError(
                    f"received {len(frames)} data frames for {len(sizes)} entries, or frames of other sizes"
                )
            return [*map(tensor_of, frames)]
        if worker.memory is None:
            raise ProtocolError(f"worker {worker.rank} names a region of memory that it does not share")
        try:
            whole = region_of(worker.memory, region[0], sum(map(aligned, sizes)))
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        begins = accumulate(map(aligned, sizes), initial=0)
        return [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]

    def _define(self, worker: WorkerSession, message: protocol.Define, frames: list[memoryview]) -> None:
        """Create shards, or overwrite values of existing ones."""
        if worker.rank != 0:
            raise ProtocolError(f"worker {worker.rank} defines shards; only worker 0 may")
        self._thread_pool.drain()
        definitions = [optimizer_shards.Definition.read(one) for one in message.shards]
        zeros = {at for at, frame in enumerate(frames) if not len(frame)}
        sizes = [0 if at in zeros else one.nbytes for at, one in enumerate(definitions)]
        datas = self._data(worker, sizes, message.region, frames)
        new: list[Shard] = []
        for one, data in zip(definitions, datas, strict=True):
            shard = self._rounds.shards.get(one.number)
            if shard is not None:
                self._rounds.keep_unread(shard)
            else:
                slot = Slot(*self._allocate(one.shape, one.dtype))
                thread = self._thread_pool.assign(one.nbytes)
                shard = Shard(one.number, one.key, one.begin, one.width, [slot], one.is_whole, thread)
                self._rounds.shards[one.number] = shard
                new.append(shard)
            first, count = one.begin - shard.begin, math.prod(one.shape)
            fits = 0 <= first <= shard.flat.numel() - count and (not one.is_whole or count == shard.flat.numel())
            if not fits or shard.flat.dtype is not one.dtype or shard.key != one.key:
                raise MismatchError(f"shard {one.number} is of key {shard.key!r}, but was defined for key {one.key!r}")
            for slot in shard.slots:
                slot.behind = None
            shard.slot.filled, shard.slot.stamp = None, 0
            if data.nbytes:
                shard.flat[first : first + count].view(torch.uint8).copy_(data)
            else:
                self._clear(shard.slot)
        if self._kept is not None:
            self._kept.add(new)
        self._save({self._rounds.shards[one.number] for one in definitions}.difference(new))
        self._bound_backlogs()

    def _mark_handled(self, worker: WorkerSession, sequence: int) -> None:
        """Record that a message must not be handled again; this makes its effects final."""
        worker.handled.append(sequence)
        if self._kept is not None:
            self._kept.settings.joined = list(self._rounds.joined)
            self._kept.settings.rates = {one.number: dict(one.rates) for one in self._rounds.optimizers.all.values()}
            self._kept.settings.handled[worker.identity] = list(worker.handled)
            self._kept.save_settings()

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int]:
        if self._pool is None:
            return torch.empty(shape, dtype=dtype, device="cpu"), 0
        nbytes = math.prod(shape) * dtype.itemsize
        offset = self._pool.allocate(nbytes)
        return self._pool.tensor_at(offset, nbytes).view(dtype).view(shape), offset

    def _add_slot(self, shard: Shard) -> Slot:
        """Add memory for one more value of a shard."""
        slot = Slot(*self._allocate(shard.slot.stored.shape, shard.flat.dtype))
        if shard.slot.filled is not None:  # a table of zeros, of which a copy would take memory
            self._clear(slot)
            slot.behind = shard.slot.filled
        shard.slots.append(slot)
        return slot

    def _clear(self, slot: Slot) -> None:
        """Set a value to zeros, which take no memory."""
        slot.filled = torch.empty(0, dtype=torch.int64, device="cpu")
        if self._pool is None:
            slot.flat.zero_()
        else:
            self._pool.clear(slot.offset, slot.flat.nbytes)

    def _shards(self, entries: Sequence[Sequence[int]]) -> list[Shard]:
        shards, known = [], self._rounds.shards
        for number, *_ in entries:
            if number not in known:
                raise MismatchError(
                    f"server {self._scheduler.rank} has no shard {number}: worker 0, which sends the values, has not "
                    "initialised its key; expected init() of the same keys on all workers"
                )
            shards.append(known[number])
        return shards

    def _push(self, worker: WorkerSession, push: protocol.Push, frames: list[memoryview]) -> None:
        sizes = [entry[3] for entry in push.entries]
        datas, nbytes = self._data(worker, sizes, push.region, frames), sum(sizes)
        self._received_bytes += nbytes
        shards = self._shards(push.entries)
        release = None
        # A repeated message is released with its first copy.
        if (push.region or self._scheduler.allows_restarts) and push.sequence not in worker.in_use:
            worker.in_use[push.sequence] = len(shards)
            release = partial(self._sessions.release, worker, push.sequence)
        if not worker.shares_memory and push.last_read > worker.word[0]:
            worker.word = (push.last_read,)
        lost, rounds = "", self._rounds
        is_broken, before = rounds.is_broken, rounds.before(worker.rank)
        for shard, entry, data in zip(shards, push.entries, datas, strict=True):
            number = entry[1]
            why = rounds.why_lost(shard, number) if is_broken else ""
            lost = lost or why
            if why or not add_push(shard.pushed, shard.ahead, worker.rank, number, before):
                if release is not None:
                    release()  # the round cannot close, or the push is a repeat
            else:
                value = self._read(shard, worker, push, entry[2], data, release)
                rounds.push(shard, worker.rank, number, value, push.learning_rate)
            if push.wants_values:
                self._wait(worker, shard, Waiter(worker.rank, push.sequence, number))
        if lost and not push.wants_values:  # waiters fail when the death is handled
            self._sessions.send(worker.identity, protocol.Failed(push.sequence, DeadNodeError.__name__, lost))
            return
        # The worker does not wait for the acknowledgement of a small push.
        self._sessions.acknowledge_push(worker, push.sequence, urgent=nbytes > INLINE)

    def _read(
        self,
        shard: Shard,
        worker: WorkerSession,
        push: protocol.Push,
        kind: int,
        data: Tensor,
        release: Callable[[], None] | None,
    ) -> PushedValue:
        decode = None if self._compression is None else self._compression.codec.decode
        try:
            value = shard.read(kind, data, decode)
        except Exception as error:  # noqa: BLE001  the round closes with this error for all its workers
            text = f"the push of worker {worker.rank} for key {shard.key!r} {error}"
            return PushedValue(None, push.weight, self._release_early(release), text, kind == REFUSED)
        if value is None:
            return PushedValue(value, push.weight, self._release_early(release))
        nbytes = data.nbytes
        if kind == CODED:  # decoded into memory of the server
            nbytes, release = shard.flat.nbytes, self._release_early(release)
            if push.weight is not None and isinstance(value, Tensor):  # the worker has divided it
                value.mul_(self._scheduler.num_workers)
        worker.backlog += nbytes
        return PushedValue(value, push.weight, partial(worker.subtract_from_backlog, nbytes, release))

    def _release_early(self, release: Callable[[], None] | None) -> Callable[[], None] | None:
        """Release an entry that is no longer read, unless it must last until the round is final."""
        if self._kept is None and release is not None:
            release()
            return None
        return release

    def _fence_dead_workers(self) -> None:
        """End the sessions of dead workers that may be restarted."""
        for identity in self._scheduler.fenced - self._fenced:
            self._fenced.add(identity)
            worker = self._end_session(identity)
            if worker is not None:
                self._commands = [one for one in self._commands if one[0] is not worker]
                self._rounds.drop_waiters(worker.rank)

    def _end_session(self, identity: bytes) -> WorkerSession | None:
        if self._kept is not None:
            self._kept.settings.handled.pop(identity, None)
        return self._sessions.drop(identity)

    def _greet_early_workers(self) -> None:
        """Greet restarted workers that the scheduler has announced by now."""
        for identity, hello in list(self._early.items()):
            if hello.view <= self._scheduler.view:
                del self._early[identity]
                try:
                    self._greet(identity, hello)
                except Exception as error:  # noqa: BLE001  as in `_receive`
                    self._reject(identity, 0, error)

    def _follow_views(self) -> None:
        """Follow new views of the job before their first pushes can arrive."""
        views = self._scheduler.views
        if self._scheduler.confirmed < len(views):
            self._rounds.set_views(views)
            self._scheduler.confirm_views(len(views))

    def _remove_gone_workers(self) -> None:
        """Handle workers that have died or left."""
        if not self._scheduler.gone:
            return
        gone = {rank: why for (role, rank), why in list(self._scheduler.gone.items()) if role == "worker"}
        errors = {rank: self._scheduler.errors.get(("worker", rank), "") for rank in gone}
        for rank in self._rounds.mark_gone(gone, errors):
            worker = self._sessions.of_rank(rank)
            if worker is not None:
                self._sessions.end_reads(worker)
                if self._scheduler.is_elastic:  # its rank is never reused
                    self._end_session(worker.identity)
        if self._rounds.is_broken:  # rounds may never close, so withheld acknowledgements would wait for ever
            self._sessions.max_backlog = math.inf

    # Commands

    def _run_commands(self) -> None:
        """Run the commands that have arrived; all rounds that were complete before are closed."""
        commands, self._commands = self._commands, []
        for worker, command, frames in commands:
            payload: bytes = b""
            datas: list[Tensor] = []
            try:
                if command.sequence not in worker.handled:
                    payload, datas = self._run_command(worker, command.name, command.payload, frames)
                    if command.name not in ("state", "state_bytes", "save", "load_files", "norms", "rounds"):
                        self._mark_handled(worker, command.sequence)
            except Exception as error:  # noqa: BLE001  as in `_receive`
                self._reject(worker.identity, command.sequence, error)
            else:
                self._sessions.send(worker.identity, protocol.CommandResult(command.sequence, payload), datas)

    def _run_command(
        self, worker: WorkerSession, name: str, payload: bytes, frames: list[memoryview]
    ) -> tuple[bytes, list[Tensor]]:
        rounds = self._rounds
        match name:
            case "optimizer":
                number = rounds.optimizers.set(payload)
                if self._kept is not None:
                    own = rounds.optimizers.shards_of(number, rounds.shards)
                    self._kept.set_optimizer(number, payload, own.values())
            case "compression":
                self._set_compression(payload)
                if self._kept is not None:
                    self._kept.settings.compression = payload
            case "state":
                number, wanted = msgpack.unpackb(payload)
                own = rounds.optimizers.shards_of(number, rounds.shards)
                return rounds.optimizers.numbered(number).state([own[one] for one in wanted])
            case "state_bytes" | "save" | "load_files":
                number, *given = msgpack.unpackb(payload)
                find = partial(rounds.optimizers.shards_of, number, rounds.shards)
                optimizers = rounds.optimizers.numbered(number)
                return self._state_files.run(worker.rank, name, given, find, optimizers), []
            case "load":
                number = msgpack.unpackb(payload)[0]
                own = rounds.optimizers.shards_of(number, rounds.shards)
                datas = [*map(tensor_of, frames)]
                self._save(rounds.optimizers.numbered(number).load_state(payload, datas, own))
            case "norms" | "update" | "drop":
                given = msgpack.unpackb(payload)
                optimizers = rounds.optimizers.numbered(given[0] if name == "update" else given)
                if name == "norms":
                    return msgpack.packb(optimizers.norms()), []
                if name == "update":
                    rounds.update(optimizers, *given[1:])
                dropped = optimizers.kept
                optimizers.drop_kept()
                self._save(dropped)
            case "rounds":
                return msgpack.packb(rounds.rounds_of(worker.rank)), []
            case "join":
                rounds.joined.add(worker.rank)
                rounds.changed.update(rounds.shards.values())
            case "resume":
                rounds.joined.discard(worker.rank)
                for one in rounds.optimizers.all.values() if worker.rank else ():
                    one.rates.pop(worker.rank, None)  # worker 0's learning rate counts again
                for shard in rounds.shards.values():
                    shard.resume(worker.rank)
            case "remove":
                self._remove(msgpack.unpackb(payload))
            case _:
                raise ProtocolError(f"command {name!r} is unknown")
        return b"", []

    def _set_learning_rate(self, rank: int, payload: bytes) -> None:
        number, rate = msgpack.unpackb(payload)
        check_learning_rate(rate)
        self._rounds.optimizers.numbered(number).rates[rank] = float(rate)

    def _set_compression(self, payload: bytes) -> None:
        params = msgpack.unpackb(payload)
        self._compression = None if params is None else parse(params)
        self._sessions.pull_codec = None if self._compression is None else self._compression.pull_codec

    def _save(self, shards: Iterable[Shard]) -> None:
        """Make changes of the state of shards final that no round made."""
        if self._kept is not None:
            for shard in shards:
                self._kept.save(shard, shard.closed, self._rounds.optimizers.of(shard))

    def _remove(self, numbers: Sequence[int]) -> None:
        """Remove shards whose keys have moved to another server."""
        removed = [self._rounds.shards.pop(number) for number in numbers if number in self._rounds.shards]
        if self._kept is not None:
            self._kept.remove(removed)
        for shard in removed:
            self._rounds.published.remove(shard)
            self._thread_pool.loads[shard.thread] -= shard.flat.nbytes
        if self._pool is not None:
            for slot in [slot for shard in removed for slot in shard.slots]:
                self._pool.free(slot.offset)
            self._pool.return_pages()
        self._bound_backlogs()

    def _max_message(self, rank: int) -> int:
        """Return the maximum bytes of a message of a worker; worker 0 defines shards, so any size."""
        if not rank:
            return protocol.MAX_MESSAGE
        return _SMALL_MESSAGES + _PER_MESSAGE * sum(shard.flat.nbytes for shard in self._rounds.shards.values())

    def _bound_backlogs(self) -> None:
        nbytes = sum(shard.flat.nbytes for shard in self._rounds.shards.values())
        for worker in self._sessions.workers.values():
            self._listener.bound_messages(worker.identity, self._max_message(worker.rank))
        if not self._rounds.is_broken:
            self._sessions.bound_backlogs(nbytes)


def _row_numbers(data: Tensor, shard: Shard) -> Tensor:
    if data.numel() % 8:
        raise ProtocolError(f"received {data.numel()} bytes of row numbers; expected a multiple of 8")
    rows = data.clone().view(torch.int64)
    count = shard.flat.numel() // shard.width
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ValueError(
            f"rows {int(rows.min())} to {int(rows.max())} are requested of {count} rows of key {shard.key!r}"
        )
    return rows


@contextmanager
def open_server(job: environment.ServerJob) -> Iterator[Server]:
    """Join a job as a server; leave it at the end of the block, with the reason if it fails."""
    keep_freed_memory()  # messages from sockets allocate up to 4 MiB each
    descriptor = os.environ.pop(KEPT_MEMORY, "")
    kept = KeptMemory(int(descriptor)) if descriptor else None
    thread_pool = ThreadPool()
    listener = Listener(job.interface, thread_pool.event_fd)
    try:
        timeout = math.inf if job.is_supervised else None
        memory = (job.memory, True) if job.memory else (available_memory(), False)
        scheduler = SchedulerClient(
            "server", job.scheduler, rank=job.rank, address=listener.address, memory=memory, timeout=timeout
        )
        try:
            if scheduler.is_restarted and kept is None:
                scheduler.leave("was started again, but the values that it held are lost")
            yield Server(scheduler, listener, thread_pool, kept)
        except Exception as error:
            scheduler.leave(why_gone("", f"{type(error).__name__}: {error}"))
            raise
        finally:
            scheduler.close()
    finally:
        listener.close()
        thread_pool.close()


def main() -> int:
    """Run the server of the job in the environment until the job ends; return its exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    torch.set_num_threads(1)  # per thread of the pool: torch's threads would compete with workers for cores
    job = environment.from_environment()
    with open_server(job) as server:
        server.run()
        return server.exit_code(is_supervised=job.is_supervised)
