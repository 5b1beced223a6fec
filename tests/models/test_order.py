"""Grid of the order of samples: samplers x ranks x last batch x size x what was skipped, beside a plain sampler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gangline import Communicator, spawn
from gangline.models.balance.rank_exchange import RankExchange
from gangline.models.data.order import Exchange, Order
from gangline.models.data.shares import ShareSampler, Split, split_of
from tests.models.unequal_jobs import Listed, Numbers, join

SAMPLES, SEED = 301, 11
DATA = Numbers(SAMPLES)
WEIGHTS = [1.0 + number % 3 for number in range(SAMPLES)]
LISTS = [list(range(begin, min(begin + 1 + begin % 4, SAMPLES))) for begin in range(0, SAMPLES, 4)]
"""Lists of one to four samples, as a batch sampler of the user's own yields them."""


class Bucketed(BatchSampler):
    """Yields the lists of another sampler."""

    def __init__(self, lists: Sequence[list[int]], drop_last: bool) -> None:
        super().__init__(Listed([]), 1, drop_last)
        self.lists = Listed(lists)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def shuffled(**options: Any) -> RandomSampler:
    return RandomSampler(DATA, generator=torch.Generator().manual_seed(SEED), **options)


def of_ranks(rank: int, ranks: int, **options: Any) -> DistributedSampler[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, ranks, rank, seed=5, **options)
    sampler.set_epoch(2)
    return sampler


Kind = tuple[Callable[[int, int], Sampler[int]], Callable[[int], list[int]]]
KINDS: dict[str, Kind] = {
    "sequential": (lambda rank, ranks: SequentialSampler(DATA), lambda ranks: list(range(SAMPLES))),
    "shuffled": (lambda rank, ranks: RandomSampler(DATA), lambda ranks: list(shuffled())),
    "some": (lambda rank, ranks: RandomSampler(DATA, num_samples=97), lambda ranks: list(shuffled(num_samples=97))),
    "with replacement": (
        lambda rank, ranks: RandomSampler(DATA, replacement=True),
        lambda ranks: list(shuffled(replacement=True)),
    ),
    "distributed": (of_ranks, lambda ranks: list(of_ranks(0, 1))),
    "distributed, not shuffled": (
        lambda rank, ranks: of_ranks(rank, ranks, shuffle=False),
        lambda ranks: list(range(SAMPLES)),
    ),
    "distributed, without its last": (
        lambda rank, ranks: of_ranks(rank, ranks, drop_last=True),
        lambda ranks: list(of_ranks(0, 1))[: SAMPLES // ranks * ranks],
    ),
    "weighted": (
        lambda rank, ranks: WeightedRandomSampler(WEIGHTS, SAMPLES),
        lambda ranks: list(WeightedRandomSampler(WEIGHTS, SAMPLES)),
    ),
    "of a generator": (
        lambda rank, ranks: SubsetRandomSampler(range(SAMPLES - 1), torch.Generator().manual_seed(3)),
        lambda ranks: list(SubsetRandomSampler(range(SAMPLES - 1), torch.Generator().manual_seed(3))),
    ),
    "each rank's part": (
        lambda rank, ranks: Listed(range(SAMPLES), rank, ranks),
        lambda ranks: [],  # as a list of each rank's batches below
    ),
}


def cut(samples: Sequence[int], size: int, skip: int, drop_last: bool) -> list[list[int]]:
    """Return the batches of samples after the skipped ones."""
    batches = [[*samples[begin : begin + size]] for begin in range(skip, len(samples), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


def join_lists(lists: Sequence[Sequence[list[int]]], skip: int, drop_last: bool) -> list[list[int]]:
    """Return batches of a list from each rank, after so many batches."""
    joined = [list(chain.from_iterable(of_all)) for of_all in lists if not drop_last or len(of_all) == len(lists[0])]
    return joined[skip:]


def states() -> str:
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


def read(order: Order, skip: int, *, as_lists: bool) -> list[list[int]]:
    return [list(map(int, batch)) for batch in order.batches(SEED, skip, as_lists=as_lists)]


def walk(exchange: Exchange) -> int:
    """Compare each order of the grid on this rank with that of a plain sampler; return their number."""
    rank, ranks, compared = exchange.rank, exchange.size, 0
    for name, drop_last, (batch_size, skipped) in product(KINDS, (False, True), ((1, 0), (2, 1), (2, 70), (7, 3))):
        make, plain = KINDS[name]
        size = batch_size * ranks

        def order(state: Any = None) -> Order:
            loader = DataLoader(DATA, batch_size, sampler=make(rank, ranks), drop_last=drop_last)  # noqa: B023
            found = Order(loader, exchange)
            lengths = exchange.all_gather(found.length)
            if found.of_all_ranks:
                found.rank_lengths = lengths
            found.random = state or {}
            return found

        what = f"{name}, drop_last {drop_last}, {ranks} ranks of {batch_size}, {skipped} batches skipped"
        torch.manual_seed(SEED)
        if name == "each rank's part":
            parts = [cut(range(each, SAMPLES, ranks), batch_size, 0, drop_last) for each in range(ranks)]
            most = max(map(len, parts))
            lists = [[part[number] for part in parts if number < len(part)] for number in range(most)]
            expected = [join_lists(lists, skip, False) for skip in (0, skipped)]  # each list is whole
        else:
            drawn = plain(ranks)
            expected = [cut(drawn, size, 0, drop_last)]
            expected.append(expected[0][skipped:])
        torch.manual_seed(SEED + rank)  # the ranks draw differently, and rank 0 as the plain sampler
        whole = order()
        assert read(whole, 0, as_lists=True) == expected[0], what
        assert whole.length == len(expected[0]), what
        torch.manual_seed((99 if skipped else SEED) + rank)  # a restarted loop has drawn other numbers
        resumed, before = order(dict(whole.random)), states()
        as_lists = batch_size != 7
        samples = sum(map(len, expected[0][:skipped]))
        assert read(resumed, samples, as_lists=as_lists) == expected[1], what
        assert states() == before or not skipped, what
        assert resumed.random == whole.random or not skipped, what
        if whole.is_repeated:
            odd = samples + 1  # after a change of the size within the epoch
            assert read(order(), odd, as_lists=True) == cut(drawn, size, odd, drop_last), what
        compared += 1
    return compared


def walk_lists(exchange: Exchange) -> None:
    """Compare the joined lists of a batch sampler of the user's own, of which rank 0's count."""
    for drop_last, skipped in product((False, True), (0, 1, 9)):
        groups = [LISTS[begin : begin + exchange.size] for begin in range(0, len(LISTS), exchange.size)]
        expected = join_lists(groups, 0, drop_last)
        order = Order(DataLoader(DATA, batch_sampler=Bucketed(LISTS, drop_last)), exchange)
        samples = sum(map(len, expected[:skipped]))
        assert read(order, samples, as_lists=True) == expected[skipped:]
        assert order.length == len(expected)
        with pytest.raises(ValueError, match="the sampler decides"):
            order.resize(4)


def walk_in_job(comm: Communicator, path: str) -> int:
    join(comm, path)
    exchange = RankExchange(None)
    walk_lists(exchange)
    return walk(exchange)


def test_batches_are_those_of_one_sampler_also_after_a_restart() -> None:
    walk_lists(Exchange())
    assert walk(Exchange()) == 2 * 4 * len(KINDS)


def test_batches_of_two_ranks_are_those_of_one_sampler_also_after_a_restart(tmp_path: Path) -> None:
    assert spawn(walk_in_job, 2, str(tmp_path / "store"), threads=1) == [2 * 4 * len(KINDS)] * 2


@pytest.mark.parametrize("minimum", [1, 2])
@pytest.mark.parametrize("loads", [[1.0], [3.0, 1.0], [1.0, 0.0], [1.0, 2.0, 4.0]])
def test_shares_of_the_ranks_are_the_batches_of_the_order(loads: list[float], minimum: int) -> None:
    """Also where the loads change: a batch is cut by those that were present when it was read ahead."""
    for size, ahead, skip in product((5, 8), (0, 3), (0, 8)):
        of_ranks = []
        for rank in range(len(loads)):
            reads: list[Split] = []

            def split(rank: int = rank, reads: list[Split] = reads) -> Split:
                reads.append(split_of(rank, loads if len(reads) < 6 else loads[::-1], minimum))
                return reads[-1]

            loader = DataLoader(DATA, size, sampler=RandomSampler(DATA))
            sampler = ShareSampler(Order(loader, Exchange()), split, ahead, None)
            found = []
            for batch, indices in sampler.shares(sampler, SEED, skip):
                assert len(reads) == min(len(found) + ahead + 1, -(-(SAMPLES - skip) // size))
                assert batch.samples == len(indices) or (batch.samples == 0 and len(indices) == minimum)
                found.append(list(indices)[: batch.samples])
                sampler.read_ahead()
            of_ranks.append((found, reads))
        batches = cut(list(shuffled()), size, skip, False)
        joined = [list(chain.from_iterable(parts)) for parts in zip(*(found for found, _ in of_ranks), strict=True)]
        assert joined == batches
        for rank, (found, reads) in enumerate(of_ranks):
            counts = [one.counts(len(batch))[rank] for one, batch in zip(reads, batches, strict=True)]
            assert [len(part) for part in found] == counts


def test_an_epoch_that_was_left_leaves_nothing_to_the_next() -> None:
    sampler = ShareSampler(Order(DataLoader(DATA, 8), Exchange()), lambda: split_of(0, [1.0]), 3, None)
    for _ in range(2):
        shares = sampler.shares(sampler, SEED, 0)
        assert [list(next(shares)[1]) for _ in range(2)] == cut(range(SAMPLES), 8, 0, False)[:2]
