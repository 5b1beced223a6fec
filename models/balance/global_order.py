"""Global order: the batches of all ranks together, as indices of the data set; and the sampler of one rank's part."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, starmap, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from gangline.collectives.errors import MismatchError
from gangline.models.balance.rank_balance import RankBalance
from gangline.models.balance.rank_exchange import RankExchange
from gangline.models.balanced_batch import BalancedBatch
from gangline.models.data.batches import length_of
from gangline.models.data.lengths import Arrangement, Update
from gangline.models.data.loaders import sampler_of
from gangline.models.data.split import Split

_CHUNK = 64  # global batches whose indices one message carries
_COMPARED = 4096  # samples of a data set of which ranks compare whether their samplers draw them
_HASH, _BITS = 2654435761, 0xFFFFFFFF  # samples are compared whose index times the first has low bits of a small number


class GlobalOrder:
    """Order of the samples of all ranks in an epoch, drawn by the sampler of a loader over a map-style data set.

    Every rank repeats a sampler that is sequential, random by seed, or a DistributedSampler. Of other samplers rank 0's
    draws for all ranks or, if each draws its rank's part, those of all ranks. The lists of a batch sampler of the
    user's own are not cut: a global batch is one from each rank, or as many from rank 0.
    """

    rank_lengths: Sequence[int | None] = ()
    """Lengths of all ranks, if each draws its own part."""

    def __init__(self, loader: DataLoader[Any], exchange: RankExchange, global_batch: int | None) -> None:
        """Check the loader; ValueError if it cannot be cut to global batches of this size, None: its own."""
        batches: Any = loader.batch_sampler
        if batches is None:
            raise ValueError(
                "the DataLoader has batch_size=None, so its samples are not collated into batches that can be "
                "cut; expected a batch_size or a batch_sampler"
            )
        sampler: Any = sampler_of(loader)
        self._sampler, self._exchange, self._lists = sampler, exchange, batches
        self._drop_last = bool(getattr(batches, "drop_last", False))
        is_plain = type(batches) is BatchSampler  # not a user's class, which may group samples itself
        self.is_repeated = is_plain and type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
        owners = (sampler, batches, getattr(batches, "sampler", None))
        self.of_all_ranks = not self.is_repeated and any(map(_knows_ranks, owners))
        self._is_cut = is_plain and not self.of_all_ranks
        samples, batch_size = global_batch if is_plain else None, getattr(batches, "batch_size", None)
        self.size = check_global_batch(samples, exchange.size, batch_size or 1)
        if self._is_cut:
            self._lists = BatchSampler(sampler, batches.batch_size, False)
        elif global_batch is not None:
            raise ValueError(
                f"global_batch is {global_batch}, but the {type(sampler if is_plain else batches).__name__} decides "
                "the size of batches; leave global_batch out"
            )
        self._samples = length_of(loader.dataset)  # None, once the samples that ranks draw have been compared

    def resize(self, size: int) -> None:
        """Set the samples of a global batch, for iterations that begin later; ValueError if the sampler decides."""
        if not self._is_cut:
            raise ValueError(f"global_batch is set to {size}, but the sampler decides the size of batches")
        self.size = size

    @property
    def length(self) -> int | None:
        """Number of global batches of an epoch; None: unknown."""
        if self.rank_lengths:
            return None if None in self.rank_lengths else max(length or 0 for length in self.rank_lengths)
        if self._is_cut:
            count, size = self._count(), self.size
        else:
            count, size = length_of(self._lists), 1 if self.of_all_ranks else self._exchange.size
        return None if count is None else count // size if self._drop_last else -(-count // size)

    @property
    def settings(self) -> dict[str, Any]:
        """Values that must be the same on all ranks."""
        if not self.is_repeated:
            return {} if self.of_all_ranks else {"the number of batches": self.length}
        names = ("replacement", "shuffle", "seed", "num_replicas")
        return {
            "the number of samples": self._count(),
            **{f"the sampler's {name}": getattr(self._sampler, name) for name in names if hasattr(self._sampler, name)},
        }

    def batches(self, seed: int, skip: int) -> Iterator[list[Any]]:
        """Return the global batches of an epoch shuffled by ``seed``, after ``skip`` samples. Collective."""
        lists = self._drawn_lists()
        if not self._is_cut:
            of_ranks: Any = BatchSampler(_skipped(lists, skip), self._exchange.size, self._drop_last)  # type: ignore[arg-type]
            return (list(chain.from_iterable(one_of_each_rank)) for one_of_each_rank in of_ranks)
        indices = self._indices(seed) if self.is_repeated else chain.from_iterable(lists)
        return iter(BatchSampler(islice(indices, skip, None), self.size, self._drop_last))

    def _indices(self, seed: int) -> Iterator[int]:
        sampler: Any = self._sampler
        if isinstance(sampler, RandomSampler):
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator().manual_seed(seed)
        if not isinstance(sampler, DistributedSampler):
            return iter(sampler)
        # The indices of all ranks, without padding.
        whole: Any = DistributedSampler(sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed)
        whole.set_epoch(sampler.epoch)
        return islice(whole, self._count())

    def _count(self) -> int | None:
        """Return the number of samples of an epoch; None: unknown."""
        sampler: Any = self._sampler
        is_distributed = isinstance(sampler, DistributedSampler)
        return min(len(sampler.dataset), sampler.total_size) if is_distributed else length_of(sampler)

    def _drawn_lists(self) -> Iterator[Sequence[Any]]:
        """Return the lists of samplers in the order of training. Collective, a chunk at a time."""
        reads = self.of_all_ranks or not self._exchange.rank
        own = chain(self._lists)  # `read` opens it, whose errors reach all ranks
        count = _CHUNK if self.of_all_ranks else _CHUNK * self._exchange.size
        drawn: set[int] = set()  # some of the samples, the same on all ranks if all draw all
        part = 0.0 if self.of_all_ranks or not self._samples else _COMPARED / self._samples

        def read() -> tuple[list[Any] | Tensor, list[int]]:
            lists = [list(each) for each in islice(own, count)]
            indices = list(chain.from_iterable(lists))
            is_plain = all(isinstance(index, int | np.integer) for index in indices)  # a tensor is read much faster
            packed = torch.tensor(indices, dtype=torch.int64, device="cpu") if is_plain else indices
            if part and isinstance(packed, Tensor):
                drawn.update(packed[(packed * _HASH & _BITS) <= part * _BITS].tolist())
            return (packed, [len(each) for each in lists]) if reads else ([], [])

        while any(found := [*starmap(_cut, self._exchange.all_gather_results(read, "reading the order of samples"))]):
            yield from chain.from_iterable(zip_longest(*found, fillvalue=[])) if self.of_all_ranks else found[0]
        if part:
            self._compare(drawn)

    def _compare(self, drawn: set[int]) -> None:
        """Raise MismatchError, on all ranks, if each rank's sampler has drawn its own part of the data. Collective."""
        all_samples, self._samples = min(_COMPARED, self._samples or 0), None  # once
        of_ranks = [*map(set, self._exchange.all_gather(list(drawn)))]
        drawn_by_any = set().union(*of_ranks)
        is_in_parts = all(of_ranks) and sum(map(len, of_ranks)) == len(drawn_by_any)
        if is_in_parts and 2 * len(drawn_by_any) > all_samples > 1 and self._exchange.size > 1:
            raise MismatchError(
                "balance: the sampler draws other samples on each rank, and only those of rank 0 were trained; "
                "expected one that draws all samples on each rank or, if it draws the part of its rank, has attributes "
                "rank and num_replicas"
            )


def _cut(indices: list[Any] | Tensor, lengths: list[int]) -> list[Sequence[Any]]:
    flat = iter(indices.tolist() if isinstance(indices, Tensor) else indices)
    return [list(islice(flat, length)) for length in lengths]


def check_global_batch(global_batch: int | None, ranks: int, batch_size: int) -> int:
    """Return the number of samples of a global batch; ValueError if it is below one for each rank."""
    if global_batch is None:
        return batch_size * ranks
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < ranks:
        raise ValueError(
            f"global_batch is {global_batch!r}; expected an int with at least one sample for each of {ranks} ranks"
        )
    return global_batch


def _knows_ranks(sampler: object) -> bool:
    """Check for the attributes of distributed samplers of torch, MMEngine and Detectron2."""
    ranks, sizes = ("rank", "_rank"), ("num_replicas", "world_size", "_world_size")
    return any(hasattr(sampler, name) for name in ranks) and any(hasattr(sampler, name) for name in sizes)


def _skipped(lists: Iterator[Sequence[Any]], samples: int) -> Iterator[Sequence[Any]]:
    """Skip lists until ``samples`` samples are skipped."""
    for each in lists:
        if samples <= 0:
            yield each
        samples -= len(each)


class ShareSampler(Sampler[list[Any]]):
    """Batch sampler of one rank: consecutive slices of the global batches, or parts of equal cost.

    A rank without samples gets the batch's first sample with weight 0, twice if the network needs two, so that it makes
    the same steps.
    """

    def __init__(self, order: GlobalOrder, balance: RankBalance, ahead: int, arrangement: Arrangement | None) -> None:
        """Cut an order; each rank's DataLoader prefetches at most ``ahead`` batches."""
        self._order, self._balance, self._ahead, self._arrangement = order, balance, ahead, arrangement
        self._known: deque[tuple[list[Any] | Update, Split]] = deque()  # global batches that are not drawn yet
        self._drawn: deque[BalancedBatch] = deque()  # batches not returned yet
        self._batches: Iterator[list[Any] | Update | None] = iter(())

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
            yield self._drawn.popleft(), data

    def _global_batches(self, seed: int, skip: int) -> Iterator[list[Any] | Update | None]:
        arrangement = self._arrangement
        if arrangement is None or not arrangement.joins:
            return self._order.batches(seed, skip)
        return arrangement.batches(self._order.batches(seed, 0), seed, skip)

    def read_ahead(self) -> None:
        """Read the next global batch of the order. Collective."""
        following = islice(self._batches, 1)
        self._known.extend((batch, self._balance.split) for batch in following if batch is not None)

    def __iter__(self) -> Iterator[list[Any]]:
        """Draw the shares of the epoch that `shares` began."""
        while self._known:
            for batch, samples in shares_of(*self._known.popleft(), self._arrangement):
                self._drawn.append(batch)
                yield samples
        assert next(self._batches, None) is None, "the DataLoader drew further ahead than num_workers x prefetch_factor"

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        if self._order.length is None:
            raise TypeError("the sampler has no length, so the number of batches is not known")
        return self._order.length


def shares_of(
    whole: list[Any] | Update, split: Split, arrangement: Arrangement | None
) -> Iterator[tuple[BalancedBatch, list[Any]]]:
    """Return this rank's share of a global batch, or of each batch of an update, with its samples."""
    samples, steps = whole if isinstance(whole, Update) else (whole, 1)
    if arrangement is None:
        counts = split.counts(len(samples))
        own, begin = counts[split.rank], sum(counts[: split.rank])
        batch = BalancedBatch(samples=own, cost=own, agreed=len(samples))
        yield batch, samples[begin : begin + own] or samples[:1] * split.minimum
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
        yield batch, [samples[place] for place in places[split.rank]] or [samples[int(costs.argmin())]] * split.minimum
