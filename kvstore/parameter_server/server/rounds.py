"""The rounds of a server's parts: who has given, when a round closes, what comes of it, and who may have it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from gangline.collectives.errors import DeadNodeError, MismatchError
from gangline.collectives.liveness.limits import limits
from gangline.kvstore.parameter_server.server.optimizer_shards import ShardOptimizers
from gangline.kvstore.parameter_server.server.shards import Contribution, Round, Shard, Waiter
from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from gangline.kvstore.sparse import RowSparse

_log = logging.getLogger("gangline")


class Rounds:
    """All of a server but its sockets and its memory.

    Args:
        workers: how many there are.
        crew: adds and updates.
        give: called for a worker that may have a part's value.
        fail: called for one that cannot, with the name of an error and its text.
    """

    def __init__(
        self,
        workers: int,
        crew: ThreadPool,
        give: Callable[[Waiter, Shard], None],
        fail: Callable[[Waiter, str, str], None],
    ) -> None:
        self.parts: dict[int, Shard] = {}
        """By number."""
        self.optimizers: ShardOptimizers | None = None
        self.is_sync = True
        """Whether a round needs all workers; else each push is a round."""
        self.staleness = -1
        """See `protocol.Hello`."""
        self.resting: set[int] = set()
        """Workers whom no round waits for."""
        self._workers = workers
        self._everybody = frozenset(range(workers))
        self._crew = crew
        self._give = give
        self._fail = fail
        self._dead: dict[int, str] = {}
        self._touched: set[Shard] = set()
        self._stall_warn = limits().stall_warn
        self._warned = 0.0

    @property
    def is_touched(self) -> bool:
        """Whether there is something for `advance` to look at."""
        return bool(self._touched)

    @property
    def is_crippled(self) -> bool:
        """Whether somebody has died or left whom rounds wait for."""
        return self.is_sync and bool(self._dead.keys() - self.resting)

    def touch(self, parts: Iterable[Shard]) -> None:
        """Have these looked at by `advance`: something about them has changed."""
        self._touched.update(parts)

    def contribute(self, part: Shard, rank: int, number: int, one: Contribution, learning_rate: float | None) -> None:
        """Take what a worker gives to a round of a part, and the rate that rank 0 sent along."""
        if self.is_sync:
            this = part.open.setdefault(number, Round())
            this.contributions[rank] = one
        else:  # every push is a round of its own
            this = part.open[part.closed + len(part.open) + 1] = Round({rank: one})
        if rank == 0 and learning_rate is not None:
            this.learning_rate = learning_rate
        self._touched.add(part)

    def wait(self, part: Shard, waiter: Waiter) -> None:
        """Have a worker given a part's value when its round is closed."""
        if waiter.rank in self._dead:  # it would be taken for a reader for ever
            return
        known = any(one.rank == waiter.rank and one.sequence == waiter.sequence for one in part.waiters)
        if not known:
            part.waiters.append(waiter)
            self._touched.add(part)

    def lacks(self, rank: int) -> bool:
        """Whether somebody waits for a round that a worker has yet to give to."""
        return any(waiter.round > part.pushed.get(rank, 0) for part in self.parts.values() for waiter in part.waiters)

    def are_settled(self) -> bool:
        """Whether no round is complete and yet open, because a lane is at it or somebody reads what it would change."""
        return not any(part.busy or self._complete(part) for part in self.parts.values())

    def _complete(self, part: Shard) -> bool:
        following = part.open.get(part.closed + 1)
        return following is not None and following.contributions.keys() >= self._needed()

    def _needed(self) -> frozenset[int]:
        """The workers without whom no round closes."""
        if not self.is_sync:
            return frozenset()
        return self._everybody - self.resting if self.resting else self._everybody

    def advance(self) -> None:
        """Close what rounds can be closed, and find who can be answered."""
        while self._touched:
            part = self._touched.pop()
            self._serve(part)
            following = part.ready(self._needed())
            if following is not None:
                self._close(part, following)

    def _close(self, part: Shard, this: Round) -> None:
        part.busy = True
        given = [this.contributions[rank] for rank in sorted(this.contributions)]
        problems = [one.problem for one in given if one.problem]
        given = [one for one in given if one.value is not None]
        ranks = list(this.contributions)
        if problems or not given:
            self._closed(part, ranks, given, "; ".join(problems))
            return
        optimizers = self.optimizers
        into_stored = optimizers is None and self.is_sync

        def room(nbytes: int) -> Tensor:
            if into_stored:
                return part.flat.view(torch.uint8)
            if optimizers is not None and optimizers.keeps_sums:
                return torch.empty(nbytes, dtype=torch.uint8)
            return self._crew.scratch(part.lane, nbytes)

        def work() -> None:
            total = part.total(given, room)
            if optimizers is not None:
                optimizers.take_sum(part, total, this.learning_rate)
            elif isinstance(total, RowSparse):
                table = part.flat.view(-1, part.width)
                if self.is_sync:
                    table.zero_()
                table.index_add_(0, total.indices, total.values.to(table.dtype))
            elif not into_stored:  # without an updater only async adds
                part.flat.add_(total) if part.flat.dtype is not torch.bool else part.flat.logical_or_(total)

        self._crew.run(part.lane, part.flat.nbytes, work, lambda error: self._closed(part, ranks, given, error))

    def can_update(self) -> bool:
        """Whether nobody reads a value that `update` would change."""
        return self.optimizers is None or not any(part.readers for part in self.optimizers.held)

    def update(self, factor: float, learning_rate: float) -> None:
        """Update by the sums that were kept, times the factor; nobody reads the parts then.

        Raises:
            ValueError: a part could not be updated.
        """
        optimizers = self.optimizers
        assert optimizers is not None
        problems: list[str] = []
        for part in optimizers.held:
            work = partial(optimizers.update_held, part, factor, learning_rate)
            self._crew.run(part.lane, part.flat.nbytes, work, problems.append)
        self._crew.drain()
        if any(problems):
            raise ValueError("; ".join(filter(None, problems)))

    def _closed(self, part: Shard, ranks: Iterable[int], given: Iterable[Contribution], problem: str) -> None:
        part.closed += 1
        part.open.pop(part.closed)
        if problem and not self.is_sync:  # a round is one worker's: it alone is told
            part.refused.update(dict.fromkeys(ranks, problem))
        elif problem:
            part.problems[part.closed] = problem
            part.problems.pop(part.closed - 64, None)
        part.busy = False
        for one in given:
            one.release()
        self._touched.add(part)

    def _serve(self, part: Shard) -> None:
        """Find the workers whose round of a part is closed."""
        if part.busy:
            return
        left = []
        for waiter in part.waiters:
            if self._must_wait(part, waiter):
                left.append(waiter)
            elif problem := part.problems.get(waiter.round) if self.is_sync else part.refused.pop(waiter.rank, ""):
                self._fail(waiter, MismatchError.__name__, problem)
            else:
                self._give(waiter, part)
        part.waiters = left

    def _must_wait(self, part: Shard, waiter: Waiter) -> bool:
        if self.is_sync:
            return waiter.round > part.closed
        if part.pushed.get(waiter.rank, 0) < waiter.round:  # what it pushed before comes first
            return True
        if self.staleness >= 0:
            living = [r for r in range(self._workers) if r not in self._dead and r not in self.resting]
            slowest = min((part.pushed.get(rank, 0) for rank in living), default=0)
            if part.pushed.get(waiter.rank, 0) - slowest > self.staleness:
                return True
        if waiter.behind is None:  # what has come by now is applied first, but not all that comes later
            waiter.behind = part.closed + len(part.open)
        return part.closed < waiter.behind

    def bury(self, gone: Mapping[int, str]) -> list[int]:
        """Take in which workers have died or left, and tell those who wait for them; gives whom nobody knew of."""
        new = [rank for rank in gone if rank not in self._dead]
        self._dead.update(gone)
        for part in self.parts.values() if new else ():
            part.waiters = [waiter for waiter in part.waiters if waiter.rank not in self._dead]
            self._touched.add(part)
        if self._dead and self.is_sync:
            self._fail_waiters()
        return new

    def _fail_waiters(self) -> None:
        for part in self.parts.values():
            for waiter in list(part.waiters):
                missing = self.lost_for(part, waiter.round)
                if missing:
                    part.waiters.remove(waiter)
                    self._fail(waiter, DeadNodeError.__name__, f"{missing} (key {part.key!r}, round {waiter.round})")

    def warn(self) -> None:
        """Name those whom others have waited for too long."""
        now = time.monotonic()
        if not self.is_sync or now - self._warned < min(1.0, self._stall_warn / 4):
            return
        self._warned = now
        needed = [rank for rank in range(self._workers) if rank not in self.resting]
        told = {part.late(needed, now - self._stall_warn): part for part in self.parts.values() if part.waiters}
        for words in told.keys() - {""}:  # a cut key's parts say the same
            _log.warning("%s", words)

    def lost_for(self, part: Shard, number: int) -> str:
        """Why a round can never close; "" where it still can."""
        if not self.is_sync:
            return ""
        for following in range(part.closed + 1, number + 1):
            came = part.open[following].contributions if following in part.open else {}
            for rank, why in self._dead.items():
                if rank not in came and rank not in self.resting:
                    return f"worker {rank} {why or 'has left the job'}"
        return ""
