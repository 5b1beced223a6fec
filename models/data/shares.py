"""Shares: the part of a rank or worker in each global batch, by number of samples or by cost."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from gangline.kvstore.workload import split_within
from gangline.models.balanced_batch import BalancedBatch
from gangline.models.data.lengths import Arrangement, Costs, Update, cost_of
from gangline.models.data.order import Order

_ALIKE = 1.1  # ratio of speeds up to which ranks may take each other's parts of an update
_FASTER = 1.5  # ratio of speeds from which a rank takes longer samples than the one before it
_PRECISION = 0.005  # relative, of the time of a step


class Split(NamedTuple):
    """Parts of the ranks in a global batch, the same on all ranks."""

    rank: int  # this one
    loads: list[float]
    caps: list[int | None]
    order: list[int]  # ranks, that of the longest samples first
    minimum: int

    def counts(self, size: int) -> list[int]:
        """Return each rank's samples in a global batch of ``size``; no share of a load is empty if samples suffice."""
        return split_within(size, self.loads, self.caps, self.minimum)

    def part_of(self, budget: float) -> float:
        """Return this rank's part of the cost of a global batch, within its limit of memory."""
        part, cap = budget * self.loads[self.rank] / sum(self.loads), self.caps[self.rank]
        return part if cap is None else min(part, cap)

    def cut(self, costs: Any, steps: int = 1, *, padding: bool = True) -> list[list[Any]]:
        """Return the positions of each rank's samples in each of ``steps`` global batches of these costs together.

        Ranks need not wait for each other between these batches. Of ranks of similar speed the one that has the least
        of the update so far gets the next larger part, so that all end the update together.
        """
        order = [rank for rank in self.order if self.loads[rank]]
        parts, size = order * steps, len(order)
        caps = [self.caps[rank] for rank in parts]
        cut = cut_by_cost(costs, [self.loads[rank] for rank in parts], caps, self.minimum, padding=padding)
        found, spent = [], [0.0] * size
        for begin in range(0, len(parts), size):
            of_rank = dict(zip(order, cut[begin : begin + size], strict=True))
            for ranks in self._alike() if steps > 1 else ():
                own = {rank: cost_of(costs[of_rank[rank]], padding=padding) for rank in ranks}
                largest = [of_rank[rank] for rank in sorted(ranks, key=own.__getitem__, reverse=True)]
                for rank, part in zip(sorted(ranks, key=spent.__getitem__), largest, strict=True):
                    of_rank[rank] = part
                    spent[rank] += cost_of(costs[part], padding=padding) / self.loads[rank]
            found.append([of_rank.get(rank, cut[0][:0]) for rank in range(len(self.loads))])
        return found

    def _alike(self) -> list[list[int]]:
        """Return groups of ranks of similar speed and the same cap, in order."""
        groups: list[list[int]] = []
        for rank in self.order:
            first = groups[-1][0] if groups else rank
            ratio = self.loads[rank] / self.loads[first]
            if groups and 1 / _ALIKE <= ratio <= _ALIKE and self.caps[rank] == self.caps[first]:
                groups[-1].append(rank)
            else:
                groups.append([rank])
        return groups


def split_of(rank: int, loads: list[float], minimum: int = 1, caps: list[int | None] | None = None) -> Split:
    """Return the split by these loads, as this rank sees it."""
    return Split(rank, loads, caps or [None] * len(loads), ranks_by_speed(loads, range(len(loads))), minimum)


Samples = Sequence[Any]
"""Indices of samples."""


class ShareSampler(Sampler[Any]):
    """Batch sampler of one rank: consecutive slices of the global batches, or parts of equal cost.

    A rank without samples gets the batch's first sample with weight 0, twice if the network needs two, so that it makes
    the same steps.
    """

    def __init__(
        self,
        order: Order,
        split: Callable[[], Split],
        ahead: int,
        arrangement: Arrangement | None,
        *,
        repeats: bool = True,
    ) -> None:
        """Cut an order by the present ``split``, so far ahead that a loader can prefetch ``ahead`` batches.

        Without ``repeats`` a rank without samples gets an empty batch, and batches need not be lists.
        """
        self._order, self._split, self._ahead, self._arrangement = order, split, ahead, arrangement
        self._repeats = repeats
        self._known: deque[tuple[Samples | Update, Split]] = deque()  # global batches that are not drawn yet
        self._drawn: deque[tuple[BalancedBatch, Samples]] = deque()  # batches not returned yet
        self.indices: Samples = ()  # of the last share
        self._batches: Iterator[Samples | Update | None] = iter(())

    def shares(self, loader: Iterable[Any], seed: int, skip: int) -> Iterator[tuple[BalancedBatch, Any]]:
        """Return this rank's shares of an epoch shuffled by ``seed``, without its first ``skip`` samples. Collective.

        The order is read here, equally far ahead on every rank, and not when a DataLoader draws, because ranks whose
        DataLoaders draw at different times would wait for each other. The loader draws from this sampler.
        """
        self._known.clear()
        self._drawn.clear()
        self._batches = self._global_batches(seed, skip)
        for _ in range(self._ahead + 1):
            self.read_ahead()
        for data in loader:
            batch, self.indices = self._drawn.popleft()
            yield batch, data

    def _global_batches(self, seed: int, skip: int) -> Iterator[Samples | Update | None]:
        arrangement = self._arrangement
        joins = arrangement is not None and arrangement.joins
        as_lists = arrangement is not None or self._repeats
        batches = self._order.batches(seed, skip, is_whole=joins, as_lists=as_lists)
        return batches if arrangement is None or not joins else arrangement.batches(batches, seed, skip)

    def read_ahead(self) -> None:
        """Read the next global batch of the order. Collective."""
        if (batch := next(self._batches, None)) is not None:
            self._known.append((batch, self._split()))

    def __iter__(self) -> Iterator[Samples]:
        """Draw the shares of the epoch that `shares` began."""
        while self._known:
            for batch, samples in shares_of(*self._known.popleft(), self._arrangement, repeats=self._repeats):
                self._drawn.append((batch, samples))
                yield samples
        assert next(self._batches, None) is None, "the DataLoader drew further ahead than num_workers x prefetch_factor"

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        if self._order.length is None:
            raise TypeError("the sampler has no length, so the number of batches is not known")
        return self._order.length


def shares_of(
    whole: Samples | Update, split: Split, arrangement: Arrangement | None, *, repeats: bool = True
) -> Iterator[tuple[BalancedBatch, Samples]]:
    """Return this rank's share of a global batch, or of each batch of an update, with its samples."""
    samples, steps = whole if isinstance(whole, Update) else (whole, 1)
    if arrangement is None:
        counts = split_within(len(samples), split.loads, split.caps, split.minimum)
        own, begin = counts[split.rank], sum(counts[: split.rank])
        batch = BalancedBatch(samples=own, cost=own, agreed=len(samples))
        yield batch, samples[begin : begin + own] if own else [samples[0]] * split.minimum * repeats
        return
    lengths = arrangement.lengths
    costs = lengths.of(samples)
    for places in split.cut(costs, steps, padding=lengths.padding):
        counts, part = [*map(len, places)], costs[places[split.rank]]
        if not any(counts):
            raise ValueError(
                f"an update has {len(samples)} samples for {steps} steps of shares of {split.minimum} samples or "
                "more; expected a larger global_batch, or accumulate=1"
            )
        batch = BalancedBatch(
            samples=len(part),
            cost=lengths.cost(part),
            costs=lengths.in_batch(part),
            places=places,
            total=sum(float(costs[each].sum()) for each in places),
            agreed=sum(counts) + (zlib.crc32(repr(counts).encode()) << 20),
        )
        repeated = [samples[int(costs.argmin())]] * split.minimum * repeats
        yield batch, [samples[place] for place in places[split.rank]] or repeated


def ranks_by_speed(speeds: Sequence[float], before: Sequence[int]) -> list[int]:
    """Return the ranks, fastest first; ranks of similar speed stay as they were before.

    Costs do not tell all: if long samples take more time than their cost says, the rank that has them seems slower. It
    keeps them, so that its speed is that of its samples.
    """
    order = list(before)
    for end in range(1, len(order)):
        for place in range(end, 0, -1):
            if speeds[order[place]] <= _FASTER * speeds[order[place - 1]]:
                break
            order[place - 1 : place + 1] = order[place], order[place - 1]
    return order


def cut_by_cost(
    costs: Costs,
    speeds: Sequence[float],
    caps: Sequence[float | None] | None = None,
    minimum: int = 1,
    *,
    padding: bool = True,
) -> list[NDArray[np.int64]]:
    """Cut samples into consecutive parts in descending order of cost, so that the slowest part finishes first.

    A part's time is its cost over its speed; its cost with ``padding`` is its number of samples times its largest cost,
    else the sum. For a given time the first part takes what fits, then the second one, and so on; the least time in
    which all samples fit is found by bisection, to 0.5 %.

    Args:
        costs: cost of each sample.
        speeds: relative speed of each part, above 0; the first part gets the largest costs.
        caps: maximum cost of each part; None: no limit. Caps that cannot hold the samples are scaled up.
        minimum: smallest number of samples in a part, if there are enough samples for all parts.
        padding: True if a part is padded to its longest sample.

    Returns:
        The positions of each part's samples, ascending. With fewer samples than parts the last parts are empty.
    """
    samples, parts = len(costs), len(speeds)
    if not costs.any():
        costs = np.ones_like(costs)
    order = np.argsort(-costs, kind="stable")
    descending = costs[order].tolist()
    sums = [0.0, *np.cumsum(costs[order]).tolist()]
    able = min(parts, max(1, samples // minimum))
    limits = [math.inf if cap is None else float(cap) for cap in (caps or [None] * parts)[:able]]
    pairs = list(zip(speeds[:able], limits, strict=True))

    def counts_within(seconds: float, scale: float) -> list[int] | None:
        begin, counts, kept = 0, [], samples - minimum * able
        for speed, cap in pairs:
            kept += minimum  # left for this part, when the others have the minimum
            most = kept - begin if able > 1 else samples
            limit = min(seconds * speed, scale * cap)
            if not padding:
                count = bisect_right(sums, sums[begin] + limit, begin, begin + most + 1) - 1 - begin
            elif descending[begin] * most <= limit:
                count = most
            else:
                count = int(limit / descending[begin] * (1 + 1e-12))
            if count < minimum and count < samples:
                return None
            counts.append(count)
            begin += count
        return counts if begin == samples else None

    low = sums[-1] / sum(speeds[:able])
    high, scale, counts = low, 1.0, None
    while counts is None:
        low, high = high, high * 1.5
        counts = counts_within(high, scale)
        if counts is None and counts_within(math.inf, scale) is None:
            scale *= 1.1  # the caps cannot hold the samples
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        if (found := counts_within(middle, scale)) is None:
            low = middle
        else:
            counts, high = found, middle
    ends = np.cumsum(counts)
    cut = [np.sort(part) for part in np.split(order, ends[:-1])]
    return cut + [order[:0]] * (parts - able)
