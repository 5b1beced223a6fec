"""Shard of a key on its server: the values after its last rounds, open rounds, and waiting workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gangline.kvstore.compression.codec import typed
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.protocol import ABSENT, CODED, DENSE, REFUSED, ROWS
from gangline.kvstore.sparse import RowSparse, summed

if TYPE_CHECKING:
    from zmq import MessageTracker

    from gangline.collectives.transports.shm.segments import Words

_FEW = 8  # rows are copied one by one if they are less than this fraction of a shard


@dataclass(slots=True)
class PushedValue:
    """Value that a worker has pushed for a round."""

    value: Tensor | RowSparse | None
    """Flat, of the shard's dtype; None if absent or invalid."""
    weight: float | None
    release: Callable[[], None] | None
    """Function to call when the value is no longer read; None: nobody waits for that."""
    problem: str = ""
    """Reason if the value is invalid, else ""."""
    is_refused: bool = False
    """True if the worker itself refused to push, and so knows of the problem."""


@dataclass(slots=True)
class Round:
    """Pushed values by rank, and the learning rate of the update."""

    pushes: dict[int, PushedValue] = field(default_factory=dict)
    learning_rate: tuple[int, float] | None = None
    """Lowest rank that sent a learning rate, and that rate; None: the rate does not change."""
    number: int = 0
    """Async mode: number that the worker has given to its push."""
    began: int = field(default_factory=time.monotonic_ns)
    """Time of the first push."""


@dataclass(slots=True)
class Waiter:
    """A worker that waits for the value after a round."""

    rank: int
    sequence: int
    round: int
    rows: Tensor | None = None
    until: int | None = None
    """Async mode: number of the round that must be closed before the value is sent; None: not yet determined."""
    since: float = field(default_factory=time.monotonic)
    blocked_by: int = 0
    """Number of the last collective that its worker was told of by `Blocked`."""


class State(Enum):
    """State of a shard's next round; docs/protocol.md has a diagram."""

    OPEN = "open"
    """Pushes are missing."""
    COMPLETE = "complete"
    """All have arrived; `ShardRounds.guard` names what stops the update."""
    UPDATING = "updating"
    """A thread writes the next value."""
    CLOSED = "closed"
    """The value is there; workers that wait for it are answered next."""


class Reading(Protocol):
    """Worker that reads values."""

    word: Words | tuple[int]
    """Number of the last `Values` that it has read."""


@dataclass(eq=False)
class Slot:
    """Memory of one value of a shard: that after the rounds from ``first`` to ``last``.

    It is written again only when nobody needs the value any more.
    """

    stored: Tensor
    offset: int
    """Offset in the server's shared memory."""
    first: int = 0
    last: int = sys.maxsize
    filled: Tensor | None = None
    """Rows outside of which the value is 0; None: unknown."""
    behind: Tensor | None = None
    """Rows outside of which the value is the current one; None: unknown."""
    pins: int = 0
    """Number of answers with the value that have not been sent, and of published versions that have it."""
    stamp: int = 0
    """Number of the value among published ones; 0: it was not published."""
    unread: dict[Reading, int] = field(default_factory=dict)
    """Workers that were sent it, and the number of the last `Values` with it, until they have read them."""
    is_written: bool = False
    """True while a thread writes the next value into it."""
    transfers: list[list[MessageTracker]] = field(default_factory=list)
    """Messages with the value that are sent without a copy: their frames."""

    def __post_init__(self) -> None:
        self.flat = self.stored.view(-1)

    def is_needed(self, rounds: Collection[int] = ()) -> bool:
        """Return whether a worker reads the value, or is to get it, or it is that after one of these rounds."""
        if self.transfers:
            self.transfers = [frames for frames in self.transfers if not all(one.done for one in frames)]
        for worker, number in [*self.unread.items()]:
            if worker.word[0] >= number:
                del self.unread[worker]
        if self.pins or self.transfers or self.unread:
            return True
        return bool(rounds) and any(self.first <= number <= self.last for number in rounds)


@dataclass(eq=False)
class Shard:
    """A shard; all but its arithmetic runs in the server's main thread.

    Its values are a sequence of versions, one per round: the next one is written beside the current one.
    """

    number: int
    key: Key
    begin: int
    width: int
    slots: list[Slot]
    """Memory of its values; at first, that of the current value is the first one."""
    is_whole: bool
    """True if this is the only shard of the key."""
    thread: int
    closed: int = 0
    """Number of closed rounds."""
    open: dict[int, Round] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    """Last round up to which all pushes of a rank have arrived, by rank. Repeated pushes are recognised by it."""
    ahead: dict[int, set[int]] = field(default_factory=dict)
    """Later rounds for which a push has arrived early, because of priorities or a lost connection; by rank."""
    waiters: dict[tuple[int, int], Waiter] = field(default_factory=dict)
    """Requests for the value, by rank and sequence."""
    new_waiters: list[Waiter] = field(default_factory=list)
    """Those that came since the waiters were answered; the others are looked at when a round has closed."""
    state: State = State.OPEN
    problems: dict[int, str] = field(default_factory=dict)
    """Reason why a round closed without effect, by round."""
    told: set[tuple[int, int]] = field(default_factory=set)
    """Rank and round of the workers that know the reason: a worker is told once, and can go on then."""
    rejected: dict[int, str] = field(default_factory=dict)
    """Async mode: reason why a rank's push had no effect, by rank, until it is reported to the rank."""
    warned: int = 0
    """Last round for which a stall warning was issued."""

    def __post_init__(self) -> None:
        self.slot = self.slots[0]
        """Current value."""
        self.flat = self.slot.flat
        self.weight = self.as_weight(self.slot)
        """Tensor that the optimizer updates: the value that is written now, or was written last."""

    def as_weight(self, slot: Slot) -> Tensor:
        """Return the view of a value for the optimizer: the key's shape if this is the only shard, else rows."""
        return slot.stored.detach() if self.is_whole else slot.flat.view(-1, self.width)

    def value_after(self, number: int) -> Slot | None:
        """Return the value after a round; None if it is not kept any more. 0: the current value then."""
        found = (slot for slot in self.slots if slot.first <= number <= slot.last)
        return next(found, None if number else self.slot)

    def prepare(self, slot: Slot) -> None:
        """Make the value of a slot the current one, for an update in place; runs in the shard's thread."""
        self.weight.data = self.as_weight(slot)
        rows, slot.behind, slot.filled = slot.behind, None, None
        if slot is self.slot:
            return
        if rows is None:
            slot.flat.copy_(self.flat)
        elif len(rows):
            slot.flat.view(-1, self.width).index_copy_(0, rows, self.flat.view(-1, self.width).index_select(0, rows))

    def publish(self, slot: Slot, number: int, rows: Tensor | None) -> None:
        """Make a slot the current value, from a round on; ``rows`` differ from the value before (None: any)."""
        for other in self.slots:
            known = [] if rows is None or other.behind is None else [other.behind, rows]
            is_few = known and _FEW * sum(map(len, known)) * self.width < self.flat.numel()
            other.behind = torch.cat(known) if is_few else None
        self.slot.last = min(self.slot.last, number - 1)
        slot.first, slot.last, slot.behind = number, sys.maxsize, torch.empty(0, dtype=torch.int64, device="cpu")
        self.slot, self.flat = slot, slot.flat

    def read(
        self, kind: int, data: Tensor, decode: Callable[[Tensor, Tensor], None] | None
    ) -> Tensor | RowSparse | None:
        """Return the pushed value in an entry's uint8 data; None for ABSENT. ValueError if they do not fit the shard.

        ``decode`` is the decoder of the compression that is set; None: no compression.
        """
        if kind == DENSE:
            if data.nbytes != self.flat.nbytes:
                raise ValueError(f"has {data.nbytes} bytes; expected {self.flat.nbytes} of {self.flat.dtype}")
            return self._typed(data)
        if kind == ABSENT:
            return None
        if kind == REFUSED:
            raise ValueError(f"was refused: {data.numpy().tobytes().decode(errors='replace')}")
        if kind == CODED:
            if decode is None:
                raise ValueError("is compressed, but no compression is set")
            value = torch.empty_like(self.flat)
            decode(data, value)
            return value
        assert kind == ROWS
        row_bytes = self.width * self.flat.itemsize
        count, remainder = divmod(data.numel(), 8 + row_bytes)
        if remainder:
            raise ValueError(f"has {data.numel()} bytes of rows; expected a multiple of {8 + row_bytes}")
        rows = typed(data[: 8 * count], torch.int64)
        values = self._typed(data[8 * count :]).view(count, self.width)
        return RowSparse(rows, values, (self.flat.numel() // self.width, self.width))

    def _typed(self, data: Tensor) -> Tensor:
        if self.flat.dtype is torch.bool:  # bytes other than 0 and 1 are not valid bools
            return data.ne(0)
        return typed(data, self.flat.dtype)

    def resume(self, rank: int) -> None:
        """Set the last round of a worker that returns from join() to that of the others."""
        self.pushed[rank] = max(self.pushed.values(), default=0)
        self.ahead.pop(rank, None)

    def total(
        self, pushes: Sequence[PushedValue], allocate: Callable[[], Tensor], absent: float = 0.0
    ) -> Tensor | RowSparse:
        """Return the sum of a round in the order given, or its weighted mean if the pushes have weights.

        All ``pushes`` have values. ``allocate`` returns flat memory for a dense sum; ``absent`` is the summed weight of
        the workers without a value, whose gradient is 0.
        """
        dense: list[Tensor] = []
        sparse: list[RowSparse] = []
        weights: list[float] = []  # of all or of none
        for one in pushes:
            if type(one.value) is RowSparse:
                sparse += (one.value,)
            elif one.value is not None:
                dense += (one.value,)
            if one.weight is not None:
                weights += (one.weight,)
        if sparse and not dense:
            return mean_of_rows(sparse, weights, absent) if weights else summed(sparse, self.flat.device)
        for index, one in enumerate(pushes if sparse else ()):
            if isinstance(one.value, RowSparse):
                dense.insert(index, one.value.to_dense().view(-1))
        out = allocate()
        add_up(dense, out, weights, absent)
        return out


def add_push(pushed: dict[int, int], ahead: dict[int, set[int]], rank: int, number: int, before: int = 0) -> bool:
    """Add a worker's push of a round to `Shard.pushed` and `Shard.ahead`; return False if it is among them.

    ``before`` is the last round before the worker's first one.
    """
    last, later = pushed.get(rank, before), ahead.get(rank)
    if number <= last or (later and number in later):
        return False
    if not later and number == last + 1:
        pushed[rank] = number
        return True
    later = ahead.setdefault(rank, set())
    later.add(number)
    while last + 1 in later:
        last += 1
        later.discard(last)
    pushed[rank] = last
    return True


def mean_of_rows(values: Sequence[RowSparse], weights: Sequence[float], absent: float = 0.0) -> RowSparse:
    """Return the weighted mean of row-sparse values, as `add_up`; rows that no worker has stay absent."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    scaled = [
        RowSparse(value.indices, value.values.to(wide) * factor, value.shape)
        for value, factor in zip(values, weights, strict=True)
    ]
    total = summed(scaled, values[0].device)
    return RowSparse(total.indices, total.values.div_(sum(weights) + absent or 1.0).to(dtype), total.shape)


def add_up(values: Sequence[Tensor], out: Tensor, weights: Sequence[float], absent: float = 0.0) -> None:
    """Write the sum, in the order given, into ``out``; float16 and bfloat16 are summed in float32 and rounded once.

    With weights: sum of weight * value divided by the sum of weights and of ``absent``.
    """
    total = out
    narrow = out.dtype in (torch.float16, torch.bfloat16)
    if narrow and (len(values) > 2 or weights):
        total = torch.empty_like(out, dtype=torch.float32)
    if weights:
        torch.mul(values[0].to(total.dtype), weights[0], out=total)
        for value, weight in zip(values[1:], weights[1:], strict=True):
            total.add_(value.to(total.dtype), alpha=weight)
        total.div_(sum(weights) + absent or 1.0)
    elif len(values) == 1:
        total.copy_(values[0])
    else:
        torch.add(values[0].to(total.dtype), values[1].to(total.dtype), out=total)
        for value in values[2:]:
            total.add_(value)
    if total is not out:
        out.copy_(total)
