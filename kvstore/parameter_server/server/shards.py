"""A part of a key on its server: its value, the rounds that are open for it, and who waits for which."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gangline.collectives.errors import name_ranks
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.protocol import ABSENT, CODED, DENSE, ROWS
from gangline.kvstore.parameter_server.transport.shared_memory import typed
from gangline.kvstore.sparse import RowSparse, summed


@dataclass(slots=True)
class Contribution:
    """What a worker gave to a round."""

    value: Tensor | RowSparse | None
    """Flat and of the part's dtype; None where there is none, or it did not fit."""
    weight: float | None
    release: Callable[[], None]
    """To be called when the value is no longer looked at."""
    problem: str = ""
    """Why it did not fit."""


@dataclass(slots=True)
class Round:
    """Contributions by rank, and the learning rate that rank 0 sent along."""

    contributions: dict[int, Contribution] = field(default_factory=dict)
    learning_rate: float | None = None


@dataclass(slots=True)
class Waiter:
    """A worker that waits for the value of a round."""

    rank: int
    sequence: int
    round: int
    rows: Tensor | None = None
    behind: int | None = None
    """Where each push is a round: up to which one the value must be there."""
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Shard:
    """A part: all but its arithmetic is touched by the server's own thread only."""

    number: int
    key: Key
    begin: int
    width: int
    stored: Tensor
    is_whole: bool
    """Whether the key has no other part."""
    offset: int
    """Of ``stored`` in the server's shared memory."""
    lane: int
    closed: int = 0
    """Rounds that are closed."""
    open: dict[int, Round] = field(default_factory=dict)
    pushed: dict[int, int] = field(default_factory=dict)
    """By rank: the last round up to which all its pushes have come; what comes again is known by it."""
    ahead: dict[int, set[int]] = field(default_factory=dict)
    """By rank: rounds beyond, whose pushes overtook others by their priority or after a lost connection."""
    waiters: list[Waiter] = field(default_factory=list)
    readers: set[tuple[int, int]] = field(default_factory=set)
    """(rank, sequence) of those who read ``stored`` where it lies."""
    owed: int = 0
    """Waiters who are to have the value as it is, and to whom it has not gone out yet."""
    busy: bool = False
    """Whether a lane changes ``stored``."""
    problems: dict[int, str] = field(default_factory=dict)
    """Rounds that closed without effect, and why."""
    refused: dict[int, str] = field(default_factory=dict)
    """Where each push is a round: by rank, why one had no effect, till that worker is told."""
    warned: int = 0
    """The last round of which a warning has told who is late."""

    def __post_init__(self) -> None:
        self.flat = self.stored.view(-1)
        self.weight = self.stored if self.is_whole else self.flat.view(-1, self.width)
        """What an optimizer sees: the key's own shape where this is all of it, else rows."""

    def read(
        self, kind: int, data: Tensor, decode: Callable[[Tensor, Tensor], None] | None
    ) -> Tensor | RowSparse | None:
        """The value of a contribution's bytes.

        Args:
            kind: DENSE, ROWS, CODED, or ABSENT, which gives None.
            data: uint8.
            decode: of the codec that is set; None: none is.

        Raises:
            ValueError: the bytes do not fit the part.
        """
        if kind == ABSENT:
            return None
        if kind == CODED:
            if decode is None:
                raise ValueError("is compressed, but no compression is set")
            value = torch.empty_like(self.flat)
            decode(data, value)
            return value
        if kind == DENSE:
            if data.numel() != self.flat.nbytes:
                raise ValueError(f"has {data.numel()} bytes; expected {self.flat.nbytes} of {self.flat.dtype}")
            return self._typed(data)
        assert kind == ROWS
        bytes_of_row = self.width * self.flat.itemsize
        count, rest = divmod(data.numel(), 8 + bytes_of_row)
        if rest:
            raise ValueError(f"has {data.numel()} bytes of rows; expected a multiple of {8 + bytes_of_row}")
        rows = typed(data[: 8 * count], torch.int64)
        values = self._typed(data[8 * count :]).view(count, self.width)
        return RowSparse(rows, values, (self.flat.numel() // self.width, self.width))

    def _typed(self, data: Tensor) -> Tensor:
        if self.flat.dtype is torch.bool:  # only 0 and 1 are bools, whatever was sent
            return data.ne(0)
        return typed(data, self.flat.dtype)

    def is_new(self, rank: int, number: int) -> bool:
        """Whether a worker's push for a round comes for the first time; from now on it has come."""
        last, ahead = self.pushed.get(rank, 0), self.ahead.setdefault(rank, set())
        if number <= last or number in ahead:
            return False
        ahead.add(number)
        while last + 1 in ahead:
            last += 1
            ahead.discard(last)
        self.pushed[rank] = last
        return True

    def catch_up(self, rank: int) -> None:
        """Expect a worker, who has rested, to go on at the round of the others."""
        self.pushed[rank] = max(self.pushed.values(), default=0)
        self.ahead.pop(rank, None)

    def ready(self, needed: Set[int]) -> Round | None:
        """The next round, if all ``needed`` have contributed and nobody reads, changes or is to have the value."""
        following = self.open.get(self.closed + 1)
        if following is None or self.busy or self.owed or self.readers or not following.contributions.keys() >= needed:
            return None
        return following

    def late(self, needed: Collection[int], before: float) -> str:
        """Where workers wait since before a time for others: for whom, and who has come; once a round."""
        waits = any(waiter.since < before and waiter.round > self.closed for waiter in self.waiters)
        if not waits or self.warned > self.closed:
            return ""
        came = self.open[self.closed + 1].contributions.keys() if self.closed + 1 in self.open else set()
        missing = set(needed) - came
        if not missing or not came:
            return ""
        self.warned = self.closed + 1
        return f"key {self.key!r}, round {self.warned}, waits for {name_ranks(missing)}; {name_ranks(came)} came"

    def total(self, contributions: Sequence[Contribution], room: Callable[[int], Tensor]) -> Tensor | RowSparse:
        """The sum of a round in the order given, or its weighted mean where weights came with it.

        Args:
            contributions: each with a value, in rank order; at least one.
            room: gives so many bytes, as uint8, for a sum that is dense.
        """
        values = [one.value for one in contributions]
        weights = [one.weight for one in contributions]
        weighted = any(weight is not None for weight in weights)
        sparse = [value for value in values if isinstance(value, RowSparse)]
        if len(sparse) == len(values):
            return mean_of_rows(sparse, weights) if weighted else summed(sparse, self.flat.device)
        dense = [value.to_dense().view(-1) if isinstance(value, RowSparse) else value for value in values]
        out = room(self.flat.nbytes).view(self.flat.dtype)
        add_up([value for value in dense if value is not None], out, weights if weighted else None)
        return out


def mean_of_rows(parts: Sequence[RowSparse], weights: Sequence[float | None]) -> RowSparse:
    """`add_up` with weights, of the rows that somebody has: in the others the mean is 0."""
    factors = [1.0 if weight is None else weight for weight in weights]
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    scaled = [
        RowSparse(part.indices, part.values.to(wide) * factor, part.shape)
        for part, factor in zip(parts, factors, strict=True)
    ]
    total = summed(scaled, parts[0].device)
    return RowSparse(total.indices, total.values.div_(sum(factors) or 1.0).to(dtype), total.shape)


def add_up(values: Sequence[Tensor], out: Tensor, weights: Sequence[float | None] | None) -> None:
    """Write the sum into ``out``, in the order given; float16 and bfloat16 are added in float32 and rounded once.

    With weights it is the sum of weight x value over the sum of weights (a weight that is None counts as 1).
    """
    total = out
    narrow = out.dtype in (torch.float16, torch.bfloat16)
    if narrow and (len(values) > 2 or weights is not None):
        total = torch.empty_like(out, dtype=torch.float32)
    if weights is not None:
        factors = [1.0 if weight is None else weight for weight in weights]
        torch.mul(values[0].to(total.dtype), factors[0], out=total)
        for value, factor in zip(values[1:], factors[1:], strict=True):
            total.add_(value.to(total.dtype), alpha=factor)
        total.div_(sum(factors) or 1.0)
    elif len(values) == 1:
        total.copy_(values[0])
    else:
        torch.add(values[0].to(total.dtype), values[1].to(total.dtype), out=total)
        for value in values[2:]:
            total.add_(value)
    if total is not out:
        out.copy_(total)
