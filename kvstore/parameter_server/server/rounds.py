"""Rounds of a server's shards: collect pushes, close rounds, decide which waiters get a value or an error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from gangline.collectives import hooks
from gangline.collectives.errors import DeadNodeError, MismatchError, name_ranks
from gangline.collectives.limits import limits
from gangline.collectives.liveness.status_socket import Wait
from gangline.collectives.timeline import recorder
from gangline.kvstore.group.remote_errors import why_gone
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.server.kept_memory import KeptMemory
from gangline.kvstore.parameter_server.server.optimizer_shards import Optimizers, ShardOptimizers
from gangline.kvstore.parameter_server.server.published import Published
from gangline.kvstore.parameter_server.server.shards import PushedValue, Round, Shard, Slot, State, Waiter
from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from gangline.kvstore.sparse import RowSparse

_log = logging.getLogger("gangline")
_value_of = attrgetter("value")  # calls no Python, as a small push makes few calls
_BLOCKED_SECONDS = 0.05  # interval of checks for workers that wait for each other


class ShardRounds:
    """State of all shards of a server, without its sockets and memory.

    ``send_value`` is called for a waiter with the value that it gets, ``fail`` for one that gets an error, ``add_slot``
    for a shard whose memory is all in use.
    """

    def __init__(
        self,
        workers: int,
        thread_pool: ThreadPool,
        add_slot: Callable[[Shard], Slot],
        send_value: Callable[[Waiter, Shard, Slot], None],
        fail: Callable[[Waiter, str, str, bool], None],
    ) -> None:
        self.shards: dict[int, Shard] = {}
        """Shards by number."""
        self.optimizers = Optimizers(thread_pool.size)
        self.is_sync = True
        """True if a round needs all workers; otherwise each push is a round."""
        self.staleness = -1
        """Staleness bound in rounds, as in `protocol.Hello`; -1 for none."""
        self.kept: KeptMemory | None = None
        """Memory that outlives this process, where rounds become final; None without restarts."""
        self.is_held = False
        """True in a restarted server until all workers have repeated their requests: no round is closed."""
        self.keeps_former = False
        """True if workers that start again may pull the value before the current one."""
        self.stopped_by_unread: set[Shard] = set()
        """Shards with too many values that workers have not read; no message tells when they have."""
        self.joined: set[int] = set()
        """Workers inside join(), which rounds do not wait for."""
        self.in_collectives: dict[int, tuple[str, int]] = {}
        """Workers that wait in a collective for other workers, with the call's name and number: meanwhile
        acknowledgements to the others are not withheld, and in async mode they do not bound the staleness of others."""
        self.published = Published()
        self.changed: set[Shard] = set()
        """Shards that `advance` has to examine."""
        self._views = [(1, frozenset(range(workers)))]  # first round and the ranks that it needs
        self._before: dict[int, int] = {}  # last round before the first one of a worker that came later
        self._leaving: set[int] = set()  # workers of earlier views that may still pull the value after their last round
        self._thread_pool = thread_pool
        self._add_slot = add_slot
        self._send_value = send_value
        self._fail = fail
        self._gone: dict[int, str] = {}
        self._lost: dict[int, str] = {}  # gone workers that rounds may need
        self._stall_warn = limits().stall_warn
        self._warned_at = 0.0
        self._blocked_until = 0.0

    @property
    def is_broken(self) -> bool:
        """True if a worker that rounds need has died or left."""
        return self.is_sync and bool(self._lost) and bool(self._lost.keys() - self.joined)

    def set_views(self, views: Sequence[tuple[int, frozenset[int]]]) -> None:
        """Set from which round on which workers take part."""
        self._views = list(views)
        self._before = {}
        for first, ranks in views:
            for rank in ranks:
                self._before.setdefault(rank, first - 1)
        self._leaving = {*self.ranks() - self._views[-1][1] - self._gone.keys()}
        self.changed.update(self.shards.values())

    def ranks(self) -> frozenset[int]:
        """Return all workers that take part or have taken part."""
        return frozenset().union(*(ranks for _, ranks in self._views))

    def before(self, rank: int) -> int:
        """Return the last round before the first one of a worker."""
        return self._before.get(rank, 0)

    def last_push(self, shard: Shard, rank: int) -> int:
        """Return the last round up to which all pushes of a worker have arrived."""
        return shard.pushed.get(rank, self.before(rank))

    def push(self, shard: Shard, rank: int, number: int, value: PushedValue, learning_rate: float | None) -> None:
        """Add a worker's value to a round of a shard, and its learning rate if it sent one."""
        if self.is_sync:
            if number not in shard.open:
                shard.open[number] = Round()
            this = shard.open[number]
            this.pushes[rank] = value
            if learning_rate is not None:
                sent = rank, learning_rate
                this.learning_rate = min(this.learning_rate or sent, sent)
        else:  # every push is a round of its own
            this = shard.open[shard.closed + len(shard.open) + 1] = Round({rank: value}, number=number)
            optimizer = self.optimizers.of(shard)
            if optimizer is not None:
                first = min(optimizer.rates.keys() - self.joined or optimizer.rates)
                if rank != first or learning_rate is None:  # else a restarted server may get an old push again
                    learning_rate = optimizer.rates[first]
                this.learning_rate = first, learning_rate
        self.changed.add(shard)

    def wait(self, shard: Shard, waiter: Waiter) -> None:
        """Add a worker that waits for the value after a round."""
        if waiter.rank in self._gone:
            return
        if shard.waiters.setdefault((waiter.rank, waiter.sequence), waiter) is waiter:
            shard.new_waiters.append(waiter)
            self.changed.add(shard)

    def awaited(self, blocked: Collection[int]) -> set[int]:
        """Return the workers that others wait for, in a collective or for a round that they have not pushed.

        Workers that are ``blocked``, far ahead of others in some key, cannot push now: they wait for what is missing in
        the rounds that they have pushed. Two workers may be ahead of each other.
        """
        ranks = self.ranks()
        found = set(ranks) if self.in_collectives else set()
        if len(self.in_collectives) == 1:
            found -= self.in_collectives.keys()
        for shard, *_ in self._unfinished():
            last = max((waiter.round for waiter in shard.waiters.values()), default=0)
            last = max([last, *(self.last_push(shard, rank) for rank in blocked)])
            found.update(rank for rank in ranks - found if self.last_push(shard, rank) < last)
        return found

    def rounds_of(self, rank: int) -> list[tuple[int, int, int, Key]]:
        """Return (number, rounds pushed by this worker, maximum of rounds pushed by any worker, key) of each shard."""
        return [
            (
                shard.number,
                max(self.last_push(shard, rank), shard.closed if self.is_sync else 0),
                max(shard.pushed.values(), default=0),
                shard.key,
            )
            for shard in self.shards.values()
        ]

    def are_settled(self) -> bool:
        """Return whether all complete rounds are closed."""
        return all(shard.state is State.OPEN for shard in self.shards.values())

    def _is_complete(self, shard: Shard) -> bool:
        following = shard.open.get(shard.closed + 1)
        if following is None:
            return False
        ranks = self._ranks_of(shard.closed + 1)
        if len(following.pushes) + len(self.joined) < len(ranks):  # decides nearly always, whatever the number of ranks
            return False
        return following.pushes.keys() >= ranks - self.joined

    def _missing(self, shard: Shard, number: int) -> frozenset[int]:
        """Return the workers that must still push before a round can close."""
        pushes = shard.open[number].pushes.keys() if number in shard.open else ()
        return (self._ranks_of(number) - self.joined).difference(pushes)

    def guard(self, shard: Shard) -> tuple[str, frozenset[int]]:
        """Return what stops the next round of a shard, and the workers that it waits for; "" if nothing does.

        "missing": pushes. "held": this server was restarted, and workers may repeat what the former process had.
        "unread": workers have yet to read more values than a shard keeps.
        """
        missing = self._missing(shard, shard.closed + 1)
        if missing:
            return "missing", missing
        return ("held" if self.is_held else "unread" if shard in self.stopped_by_unread else ""), missing

    def _unfinished(self) -> Iterator[tuple[Shard, Round | None, str, frozenset[int]]]:
        """Yield each shard whose next round has begun or is waited for, that round, and its `guard`."""
        for shard in list(self.shards.values()):
            if shard.open or shard.waiters:
                yield shard, shard.open.get(shard.closed + 1), *self.guard(shard)

    def _ranks_of(self, number: int) -> frozenset[int]:
        if not self.is_sync:
            return frozenset()
        for first, ranks in reversed(self._views):
            if first <= number:
                return ranks
        raise AssertionError(f"round {number} is before the first view")

    def advance(self) -> None:
        """Close the rounds that are complete and answer waiters, for shards that have changed or were stopped."""
        self.changed |= self.stopped_by_unread
        self.stopped_by_unread.clear()
        while self.changed:
            shard = self.changed.pop()
            if shard.waiters and not shard.slot.is_written:
                self._answer_waiters(shard)
            if shard.state is State.CLOSED:
                shard.state = State.OPEN
            if shard.open and shard.state is not State.UPDATING and self._is_complete(shard):
                shard.state = State.COMPLETE
                if not self.is_held:
                    self._close(shard, shard.open[shard.closed + 1])

    def _free_slot(self, shard: Shard, *, is_bounded: bool = True) -> Slot | None:
        """Return memory for the next value of a shard: that of one which nobody needs, perhaps the current one's.

        A worker may need the values that it was sent, until it is known to have read them, and one that leaves the
        value after its last push. None: there are too many.
        """
        needed = [self.last_push(shard, rank) for rank in self._leaving] if self._leaving else ()
        current = shard.slot
        if not (self.keeps_former or self.kept is not None or current.is_needed(needed)):
            current.stamp = 0
            return current
        slot = next((one for one in shard.slots if one is not current and not one.is_needed(needed)), None)
        if slot is None and (not is_bounded or sum(bool(one.unread) for one in shard.slots) < 2 + len(self.ranks())):
            slot = self._add_slot(shard)
        if slot is not None:
            slot.first, slot.last, slot.stamp = 1, 0, 0
        return slot

    def _close(self, shard: Shard, this: Round) -> None:
        kept, optimizers = self.kept, self.optimizers.of(shard)
        keeps_sums = optimizers is not None and optimizers.keeps_sums
        slot = None if keeps_sums else self._free_slot(shard)
        if slot is None and not keeps_sums:
            self.stopped_by_unread.add(shard)
            return
        shard.state = State.UPDATING
        if recorder.current is not None:
            recorder.current.add_overlapping(
                f"wait for pushes of {shard.key!r}",
                this.began,
                round=this.number or shard.closed + 1,
                last=f"worker {next(reversed(this.pushes))}",
                bytes=shard.flat.nbytes,
            )
        pushes = [this.pushes[rank] for rank in sorted(this.pushes)]
        problems: list[str] = []
        values: list[PushedValue] = []
        absent, plain, refused, nbytes = 0.0, 0, 0, 0
        for one in pushes:
            plain += one.weight is None
            refused += one.is_refused
            if one.problem:
                problems += (one.problem,)
            if one.value is not None:
                values += (one,)
                nbytes = max(nbytes, one.value.nbytes)
            elif one.weight is not None:
                absent += one.weight
        count = len(pushes)
        if not problems and 0 < plain < count:
            problems = [_mixed(shard, this)]
        if refused == count:  # every worker has raised its own error
            problems = []
        if problems:  # these have raised errors of their own
            shard.told.update((rank, shard.closed + 1) for rank, one in this.pushes.items() if one.is_refused)
        if kept is not None and not self.is_sync:
            rank = next(iter(this.pushes))
            kept.count(shard, rank, this.number, self.before(rank))
        if problems or not values:
            self._note_problem(shard, this, "; ".join(problems))
            if kept is not None:
                kept.save(shard, shard.closed + 1, optimizers)
            self._closed(shard, this)
            return
        update = partial(self._update_by, shard, slot, this, values, absent)
        if recorder.current is not None:
            update = partial(_in_span, f"update of {shard.key!r}", update)
        rows = self._changed_rows(shard, map(_value_of, values))
        note, end = partial(self._note_problem, shard, this), partial(self._closed, shard, this)
        self._write(shard, slot, shard.closed + 1, rows, nbytes, update, note, end)

    def _write(
        self,
        shard: Shard,
        slot: Slot | None,
        number: int,
        rows: Tensor | None,
        nbytes: int,
        update: Callable[[], None],
        note: Callable[[str], None],
        end: Callable[[str], None],
    ) -> None:
        """Run an update in a shard's thread, and publish the value that it writes; ``slot`` is None if it writes none.

        Where memory outlives this process, it happens completely or not at all. ``number`` is the round after which it
        is the value; ``rows`` change, None: all. ``note`` is called in the thread with an error before that becomes
        final, ``end`` then in the main thread with its text, "" after success.
        """
        kept = self.kept

        def write() -> None:
            if kept is not None:
                kept.begin(shard, slot, rows)
            written = slot
            try:
                update()
            except Exception as error:
                written = None
                note(f"{type(error).__name__}: {error}")
                raise
            finally:
                if kept is not None:
                    kept.commit(shard, number, self.optimizers.of(shard), written)

        def publish(problem: str) -> None:
            if slot is not None:
                slot.is_written = False
                if not problem:
                    shard.publish(slot, number, rows)
            end(problem)

        if slot is not None:
            slot.is_written = True
        self._thread_pool.run(shard.thread, nbytes, write, publish)

    def _changed_rows(self, shard: Shard, values: Iterable[Tensor | RowSparse | None]) -> Tensor | None:
        """Return the rows that an update by these values may change; None: all."""
        rows = []
        for value in values:
            if type(value) is not RowSparse:
                return None
            rows.append(value.indices)
        if self.is_sync and self.optimizers.of(shard) is None:  # the sum replaces the value
            if shard.slot.filled is None:
                return None
            rows.append(shard.slot.filled)
        return torch.cat(rows)

    def _update_by(
        self, shard: Shard, slot: Slot | None, this: Round, values: Sequence[PushedValue], absent: float
    ) -> None:
        """Write the value after a round into a slot, in the shard's thread; without one, keep the sum."""
        optimizers = self.optimizers.of(shard)

        def allocate() -> Tensor:
            if slot is not None and optimizers is None and self.is_sync:
                slot.filled = slot.behind = None
                return slot.flat
            if slot is None:
                return torch.empty_like(shard.flat)
            return self._thread_pool.scratch(shard.thread, shard.flat.nbytes).view(shard.flat.dtype)

        total = shard.total(values, allocate, absent)
        if optimizers is not None:
            if slot is not None:
                shard.prepare(slot)
            optimizers.apply(shard, total, this.learning_rate[1] if this.learning_rate else None)
            return
        assert slot is not None
        if type(total) is RowSparse:
            table, filled = slot.flat.view(-1, shard.width), slot.filled
            if not self.is_sync:
                shard.prepare(slot)
            elif filled is None:
                table.zero_()
            else:
                table.index_fill_(0, filled, 0)
            table.index_add_(0, total.indices, total.values.to(table.dtype))
            slot.filled = total.indices if self.is_sync else None
        elif not self.is_sync:  # without an optimizer, async mode adds to the value
            slot.filled = slot.behind = None
            add = torch.add if shard.flat.dtype is not torch.bool else torch.logical_or
            add(shard.flat, total, out=slot.flat)

    def keep_unread(self, shard: Shard) -> None:
        """Copy the current value of a shard if workers have yet to read it, before it is changed in place."""
        if shard.slot.is_needed():
            slot = self._free_slot(shard, is_bounded=False)
            assert slot is not None
            shard.prepare(slot)
            shard.publish(slot, shard.closed, None)

    def update(self, optimizers: ShardOptimizers, factor: float, learning_rate: float | None) -> None:
        """Update the shards of a group with their kept sums times a factor."""
        problems: list[str] = []

        def update(shard: Shard, slot: Slot) -> None:
            shard.prepare(slot)
            optimizers.update_kept(shard, factor, learning_rate)

        for shard in optimizers.kept:
            slot = self._free_slot(shard, is_bounded=False)
            assert slot is not None
            rows = self._changed_rows(shard, [optimizers.sum_of(shard)])
            work, nbytes = partial(update, shard, slot), shard.flat.nbytes
            self._write(shard, slot, shard.closed, rows, nbytes, work, lambda _: None, problems.append)
        self._thread_pool.drain()
        if any(problems):
            raise ValueError("; ".join(filter(None, problems)))

    def _note_problem(self, shard: Shard, this: Round, problem: str) -> None:
        """Record why the round that closes next has no effect, in any thread; "": it has an effect."""
        if problem and not self.is_sync:  # the round is of one worker, and only that worker gets the error
            shard.rejected.update(dict.fromkeys(this.pushes, problem))
        elif problem:
            shard.problems[shard.closed + 1] = problem
            shard.problems.pop(shard.closed - 63, None)

    def _closed(self, shard: Shard, this: Round, problem: str = "") -> None:
        if problem:
            self._note_problem(shard, this, problem)
        shard.closed += 1
        shard.open.pop(shard.closed)
        shard.state = State.CLOSED
        if shard.told:
            shard.told = {(rank, number) for rank, number in shard.told if number in shard.problems}
        if shard.number in self.published.awaited:
            self.published.keep(shard)
        for one in this.pushes.values():
            if one.release is not None:
                one.release()
        self.changed.add(shard)

    def _answer_waiters(self, shard: Shard) -> None:
        """Send the value, or the error of the round, to waiters whose round is closed."""
        has_closed = shard.state is State.CLOSED
        waiters = list(shard.waiters.values()) if has_closed or not self.is_sync else shard.new_waiters
        shard.new_waiters = []
        slowest = self._slowest(shard) if waiters and not self.is_sync and self.staleness >= 0 else 0
        for waiter in waiters:
            place = waiter.rank, waiter.sequence
            if place not in shard.waiters or self._must_wait(shard, waiter, slowest):
                continue
            del shard.waiters[place]
            if problem := self._take_problem(shard, waiter):
                self._fail(waiter, MismatchError.__name__, problem, True)
                continue
            is_current = waiter.round == shard.closed or not self.is_sync
            slot = shard.slot if is_current else shard.value_after(waiter.round)
            if slot is not None:
                self._send_value(waiter, shard, slot)
            else:
                text = f"the value of key {shard.key!r} after round {waiter.round} is not kept any more"
                self._fail(waiter, MismatchError.__name__, f"{text}: round {shard.closed} is closed", True)

    def _take_problem(self, shard: Shard, waiter: Waiter) -> str:
        """Return why the push of a waiter's round had no effect, unless its worker knows already; else ""."""
        if not self.is_sync:
            return shard.rejected.pop(waiter.rank, "")
        problem = shard.problems.get(waiter.round, "")
        if not problem or (waiter.rank, waiter.round) in shard.told:
            return ""
        shard.told.add((waiter.rank, waiter.round))
        return problem

    def _slowest(self, shard: Shard) -> int:
        """Return the minimum number of pushes over the workers that bound the staleness."""
        idle = self._gone.keys() | self.joined | self.in_collectives.keys()
        active = (self.last_push(shard, rank) for rank in self._views[-1][1] if rank not in idle)
        return min(active, default=sys.maxsize)

    def _must_wait(self, shard: Shard, waiter: Waiter, slowest: int) -> bool:
        if self.is_sync:
            return waiter.round > shard.closed
        if self.last_push(shard, waiter.rank) < waiter.round:  # its own earlier pushes come first
            return True
        if 0 <= self.staleness < self.last_push(shard, waiter.rank) - slowest:
            return True
        if waiter.until is None:  # all pushes that have arrived by now are applied first
            waiter.until = shard.closed + len(shard.open)
        return shard.closed < waiter.until

    def blocked(self) -> Iterator[tuple[Waiter, int, str]]:
        """Yield each waiter that deadlocks: it needs a push of a worker that waits in a collective for its worker.

        Also yields the collective's number and a text that names both calls. Each waiter is yielded once per
        collective.
        """
        if not self.is_sync or not self.in_collectives or self.is_held:  # a push may have to be repeated yet
            return
        if time.monotonic() < self._blocked_until:
            return
        self._blocked_until = time.monotonic() + _BLOCKED_SECONDS
        for shard, _, _, missing in self._unfinished():
            rank = min(missing & self.in_collectives.keys(), default=None)
            if rank is None:
                continue
            name, number = self.in_collectives[rank]
            text = f"waits for a push of key {shard.key!r} by rank {rank}, which is in {name}"
            for waiter in shard.waiters.values():
                is_blocked = waiter.rank not in self.in_collectives and waiter.round > shard.closed
                if is_blocked and waiter.blocked_by != number:
                    waiter.blocked_by = number
                    yield waiter, number, text

    def set_in_collectives(self, calls: dict[int, tuple[str, int]]) -> None:
        """Set the workers that wait in collectives."""
        if calls is not self.in_collectives:
            self.in_collectives = calls
            self.changed.update(shard for shard in self.shards.values() if shard.waiters)

    def mark_gone(self, gone: Mapping[int, str], errors: Mapping[int, str]) -> list[int]:
        """Mark ranks as gone, fail waiters whose round can no longer close, and return the newly gone ranks.

        ``errors`` have ended ranks that are gone without a reason.
        """
        new = [rank for rank in gone if rank not in self._gone]
        self._gone.update(gone)
        self._leaving -= self._gone.keys()
        lost = [rank for rank in new if gone[rank] or rank in self._views[-1][1]]
        self._lost.update({rank: why_gone(gone[rank], errors.get(rank, "")) for rank in lost})
        for shard in self.shards.values() if new else ():
            self._drop_waiters(shard, self._gone)
            self.changed.add(shard)
        if self._lost and self.is_sync:
            self._fail_waiters()
        return new

    def drop_waiters(self, rank: int) -> None:
        """Drop the requests of a dead worker that may be restarted; its pushes still count."""
        for shard in self.shards.values():
            self._drop_waiters(shard, (rank,))
        self.changed.update(self.shards.values())

    @staticmethod
    def _drop_waiters(shard: Shard, ranks: Collection[int]) -> None:
        shard.waiters = {place: waiter for place, waiter in shard.waiters.items() if waiter.rank not in ranks}

    def _fail_waiters(self) -> None:
        lost: dict[tuple[int, int], tuple[Waiter, str]] = {}  # by rank and sequence of a request
        for shard in self.shards.values():
            for place, waiter in list(shard.waiters.items()):
                why = self.why_lost(shard, waiter.round)
                if why:
                    del shard.waiters[place]
                    text = f"{why} (key {shard.key!r}, round {waiter.round})"
                    lost.setdefault((waiter.rank, waiter.sequence), (waiter, text))
        for waiter, text in lost.values():
            self._fail(waiter, DeadNodeError.__name__, text, False)

    def warn_of_stalls(self) -> None:
        """Log the workers that others have waited for longer than the limit."""
        now = time.monotonic()
        if not self.is_sync or now - self._warned_at < min(1.0, self._stall_warn / 4):
            return
        self._warned_at = now
        before = now - self._stall_warn
        warnings: set[str] = set()  # shards of one key give the same text
        late: set[int] = set()
        for shard, this, _, missing in self._unfinished():
            waits = any(one.since < before and one.round > shard.closed for one in shard.waiters.values())
            if waits and this is not None and missing and shard.warned <= shard.closed:
                shard.warned = shard.closed + 1
                waiting = f"waits for {name_ranks(missing)}; present: {name_ranks(this.pushes)}"
                warnings.add(f"key {shard.key!r}, round {shard.warned}, {waiting}")
                late |= missing
        for text in sorted(warnings):
            _log.warning("%s%s", text, hooks.places(workers=late))

    def waits(self) -> list[Wait]:
        """Return the rounds that have begun and do not close, with the workers that they wait for.

        Rounds that the same workers stop for the same reason are merged.
        """
        now = time.monotonic_ns()
        found: dict[tuple[str, frozenset[int]], list[tuple[int, Shard, list[int]]]] = {}
        for shard, this, guard, ranks in self._unfinished() if self.is_sync else ():
            if this is not None and guard:
                found.setdefault((guard, ranks), []).append((this.began, shard, sorted(this.pushes)))
        waits = []
        for (guard, ranks), rounds in found.items():
            began, shard, present = min(rounds, key=lambda one: one[0])
            others = f" and {len(rounds) - 1} more" if len(rounds) > 1 else ""
            why = "" if guard == "missing" else f" ({guard})"
            waits.append(
                Wait(
                    what=f"round {shard.closed + 1} of key {shard.key!r}{others}{why}",
                    seconds=(now - began) / 1e9,
                    missing=[f"worker {rank}" for rank in sorted(ranks)],
                    waiting=[f"worker {rank}" for rank in present],
                )
            )
        return waits

    def why_lost(self, shard: Shard, number: int) -> str:
        """Return why a round can never close; "" if it can."""
        if not self.is_sync:
            return ""
        for following in range(shard.closed + 1, number + 1):
            missing = self._missing(shard, following)
            for rank in filter(missing.__contains__, self._lost):  # the first, whose end may have ended the others
                return f"worker {rank} {self._lost[rank]}"
        return ""


def _in_span(name: str, work: Callable[[], None]) -> None:
    timeline = recorder.current
    with nullcontext() if timeline is None else timeline.span(name):
        work()


def _mixed(shard: Shard, this: Round) -> str:
    """Return the error of a round in which some workers push with a weight and some without."""
    ranks = {
        is_plain: name_ranks([rank for rank, one in this.pushes.items() if (one.weight is None) is is_plain])
        for is_plain in (True, False)
    }
    return (
        f"key {shard.key!r} is pushed by push on {ranks[True]} and by push_weighted on {ranks[False]}; expected one of "
        "the two on all workers"
    )
