"""Membership of a job: which workers take part from which round on, and the agreement on the next view."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.kvstore.parameter_server.protocol import MAX_RANKS


class Views:
    """Table of views, and the requests and answers from which the next one is made. No sockets.

    The table of a job whose workers are always the same has one view. In an elastic job the next one is agreed on in
    two steps (docs/protocol.md, Elastic workers): the workers of the newest view answer which step they have begun;
    then the servers confirm the view that follows from it. Until they have, workers do not get it. There are
    ``workers`` at the start, within the bounds; none may leave below ``least`` or join above ``most``.
    """

    def __init__(self, least: int, most: int, workers: int) -> None:
        if not least <= workers <= most:
            raise ValueError(f"an elastic job of {least} to {most} workers cannot begin with {workers}")
        self.least, self.most = least, most
        self.table = [(1, frozenset(range(workers)))]
        """First round and ranks of each view."""
        self.asked = 0
        """Number of the view that is being agreed on; 0: none."""
        self._entering: set[int] = set()
        self._leaving: set[int] = set()
        self._begun: dict[int, int] = {}  # last step that a worker has begun, by rank
        self._confirmed: set[int] = set()  # servers

    def kept(self) -> tuple[object, ...]:
        """Return what `restore` takes."""
        sets = frozenset(self._entering), frozenset(self._leaving), frozenset(self._confirmed)
        return tuple(self.table), self.asked, dict(self._begun), *sets

    def restore(
        self, table: Iterable[tuple[int, Iterable[int]]], asked: int, begun: dict[int, int], *sets: Iterable[int]
    ) -> None:
        """Set all but the bounds."""
        self.table = [(first, frozenset(ranks)) for first, ranks in table]
        self.asked, self._begun = asked, begun
        self._entering, self._leaving, self._confirmed = map(set, sets)

    @property
    def newest(self) -> frozenset[int]:
        """Ranks of the newest view, confirmed or not."""
        return self.table[-1][1]

    @property
    def is_made(self) -> bool:
        """True if the view that is being agreed on is in the table: servers are yet to confirm it."""
        return 0 < self.asked < len(self.table)

    def of_round(self, number: int) -> frozenset[int]:
        """Return the ranks that take part in a round; in round 0, those of the start."""
        return next((ranks for first, ranks in reversed(self.table) if first <= number), self.table[0][1])

    def has_part(self, rank: int) -> bool:
        """Return whether the others need a worker until it leaves: it is in a view."""
        return any(rank in ranks for _, ranks in self.table)

    def known_to(self, role: str) -> list[tuple[int, list[int]]]:
        """Return the table as far as processes of a role may know it."""
        count = self.asked if role == "worker" and self.is_made else len(self.table)
        return [(first, sorted(ranks)) for first, ranks in self.table[:count]]

    def rejection(self, rank: int, known: Iterable[int], present: int) -> str:
        """Return why a new worker cannot join; "" if it can."""
        if present >= self.most:
            return f"the job has {present} workers already, and at most {self.most}"
        if rank in known or max(rank, *known, 0) >= MAX_RANKS - 1:
            return f"rank {rank} was given before; a new worker needs a rank of its own (DMLC_WORKER_ID)"
        return ""

    def enter(self, rank: int) -> None:
        """Add a worker from the next view on."""
        if not self.has_part(rank):
            self._entering.add(rank)

    def refusal(self, rank: int) -> str:
        """Remove a worker from the next view on; return why that is not possible, "" if it is."""
        if rank == 0:
            return "worker 0 cannot leave: it defines the values and sets the learning rate"
        staying = self.newest - self._leaving - {rank}
        if rank in self.newest and len(staying) < self.least:
            return f"worker {rank} cannot leave: the job needs {self.least} workers or more, and has {len(staying) + 1}"
        self._leaving.add(rank)
        return ""

    def forget(self, rank: int) -> None:
        """Drop the requests of a worker that has gone."""
        self._entering.discard(rank)
        self._leaving.discard(rank)

    def ask(self) -> bool:
        """Begin to agree on the next view if there are requests, and none is being agreed on; return whether it did."""
        self._leaving &= self.newest | self._entering
        if self.asked or not (self._entering or self._leaving):
            return False
        self.asked = len(self.table)
        self._begun, self._confirmed = {}, set()
        return True

    def answer(self, role: str, rank: int, number: int, begun: int) -> None:
        """Note the answer of a worker, or the confirmation of a server."""
        if role == "server" and self.is_made and number >= self.asked:
            self._confirmed.add(rank)
        elif role == "worker" and self.asked and not self.is_made and number == self.asked:
            self._begun.setdefault(rank, begun)

    def make(self) -> bool:
        """Add the next view to the table if all workers of the newest one have answered; return whether it did."""
        if not self.asked or self.is_made or not self._begun.keys() >= self.newest:
            return False
        first = max(max(self._begun.values(), default=0) + 1, self.table[-1][0])
        if first == 2 and self._entering:  # which keys are pushed is known once a worker has begun its second step
            first = 3
        self.table.append((first, (self.newest | self._entering) - self._leaving))
        self._entering, self._leaving = set(), set()
        return True

    def confirm(self, servers: Iterable[int]) -> bool:
        """End the agreement if these servers have confirmed the view; return whether they have."""
        if not self.is_made or not self._confirmed >= set(servers):
            return False
        self.asked = 0
        return True
