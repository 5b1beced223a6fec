"""Global order: the batches of all ranks together, as indices of the data set, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from gangline.models.unequal_ranks.rank_exchange import RankExchange

_CHUNK = 64  # global batches whose indices one message carries


class GlobalOrder(Protocol):
    """Reads the order of an epoch."""

    def batches(self, seed: int, skip: int) -> Iterator[list[Any]]:
        """Return the global batches of an epoch. Collective: every rank reads all of them.

        Args:
            seed: of the epoch's shuffle.
            skip: samples to leave out at the beginning.
        """

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""


class SampleOrder:
    """Order of a sampler that every rank can repeat: sequential, random by seed, or that of a DistributedSampler."""

    def __init__(self, sampler: Sampler[int], size: int, *, drop_last: bool) -> None:
        self._sampler, self._size, self._drop_last = sampler, size, drop_last

    def batches(self, seed: int, skip: int) -> Iterator[list[Any]]:
        """Return the global batches of an epoch."""
        return _cut(islice(self._indices(seed), skip, None), self._size, drop_last=self._drop_last)

    def _indices(self, seed: int) -> Iterator[int]:
        sampler = self._sampler
        if isinstance(sampler, RandomSampler):
            generator = torch.Generator()
            generator.manual_seed(seed)
            return iter(
                RandomSampler(
                    sampler.data_source,
                    replacement=sampler.replacement,
                    num_samples=sampler._num_samples,
                    generator=generator,
                )
            )
        if isinstance(sampler, DistributedSampler):
            return iter(_distributed_order(sampler))
        return iter(sampler)

    def __len__(self) -> int:
        sampler = self._sampler
        samples = (
            _distributed_length(sampler) if isinstance(sampler, DistributedSampler) else len(sampler)  # type: ignore[arg-type]
        )
        return samples // self._size if self._drop_last else -(-samples // self._size)


class RankOrder:
    """Order that samplers of the ranks draw: rank 0's sampler, or those of all ranks if each draws its own part."""

    def __init__(
        self,
        lists: Iterable[Sequence[Any]],
        exchange: RankExchange,
        *,
        of_all_ranks: bool,
        size: int | None = None,
        drop_last: bool = False,
        length: int | None = None,
    ) -> None:
        """Read lists of indices.

        Args:
            lists: this rank's; iterated anew for each epoch.
            exchange: sends them to the other ranks.
            of_all_ranks: a global batch is one list of each rank; else it is lists of rank 0.
            size: samples in a global batch, cut from rank 0's lists; None: one list per rank.
            drop_last: leave out a last batch that is smaller.
            length: number of global batches; None: unknown.
        """
        self._lists, self._exchange, self._of_all_ranks = lists, exchange, of_all_ranks
        self._size, self._drop_last, self._length = size, drop_last, length

    def batches(self, seed: int, skip: int) -> Iterator[list[Any]]:
        """Return the global batches of an epoch. Collective."""
        del seed  # the sampler is the user's
        if self._size is not None:
            indices = chain.from_iterable(chain.from_iterable(self._chunks()))
            return _cut(islice(indices, skip, None), self._size, drop_last=self._drop_last)
        lists = _skipped(chain.from_iterable(self._chunks()), skip)
        return self._joined(lists)

    def _joined(self, lists: Iterator[Sequence[Any]]) -> Iterator[list[Any]]:
        """Join one list for each rank to a global batch."""
        while batch := list(islice(lists, self._exchange.size)):
            if len(batch) < self._exchange.size and self._drop_last:
                return
            yield list(chain.from_iterable(batch))

    def _chunks(self) -> Iterator[list[Sequence[Any]]]:
        """Return lists in the order of training, some at a time."""
        reads = self._of_all_ranks or not self._exchange.rank
        own: Iterator[Sequence[Any]] = iter(())
        is_open = False

        def read() -> list[Sequence[Any]]:
            nonlocal own, is_open
            if not reads:
                return []
            if not is_open:
                own, is_open = iter(self._lists), True
            count = _CHUNK if self._of_all_ranks else _CHUNK * self._exchange.size
            return [list(each) for each in islice(own, count)]

        while any(found := self._exchange.all_gather_order(read)):
            if self._of_all_ranks:
                longest = max(map(len, found))
                yield [of_rank[n] if n < len(of_rank) else [] for n in range(longest) for of_rank in found]
            else:
                yield found[0]

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the sampler has no length, so the number of batches is not known")
        return self._length


def order_of(loader: DataLoader[Any], exchange: RankExchange, global_batch: int | None) -> tuple[GlobalOrder, int]:
    """Return the global order of a loader over a map-style data set, and the samples of a full global batch.

    Raises:
        ValueError: if the loader cannot be cut; the text says why.
    """
    sampler: Any = loader.sampler
    batches: Any = loader.batch_sampler
    if batches is None:
        raise ValueError(
            "the DataLoader has batch_size=None, so its samples are not collated into batches that can be "
            "cut; expected a batch_size or a batch_sampler"
        )
    if type(batches) is not BatchSampler:
        if global_batch is not None:
            raise ValueError(
                f"global_batch is {global_batch}, but the loader's {type(batches).__name__} decides the size of "
                "batches; leave global_batch out"
            )
        knows_ranks = _knows_ranks(batches)
        count = len(batches) if hasattr(batches, "__len__") else None
        drops = bool(getattr(batches, "drop_last", False))
        length = None
        if count is not None:
            length = count if knows_ranks else count // exchange.size if drops else -(-count // exchange.size)
        order = RankOrder(batches, exchange, of_all_ranks=knows_ranks, drop_last=drops, length=length)
        return order, (getattr(batches, "batch_size", None) or 1) * exchange.size
    assert loader.batch_size is not None
    size = global_batch or loader.batch_size * exchange.size
    if type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler):
        return SampleOrder(sampler, size, drop_last=loader.drop_last), size
    samples = len(sampler) if hasattr(sampler, "__len__") else None
    if _knows_ranks(sampler):
        if global_batch is not None:
            raise ValueError(
                f"global_batch is {global_batch}, but the {type(sampler).__name__} draws a part for each rank; leave "
                "global_batch out"
            )
        length = None if samples is None else len(batches)
        order = RankOrder(batches, exchange, of_all_ranks=True, drop_last=loader.drop_last, length=length)
        return order, size
    length = None if samples is None else samples // size if loader.drop_last else -(-samples // size)
    lists = BatchSampler(sampler, loader.batch_size, drop_last=False)
    order = RankOrder(lists, exchange, of_all_ranks=False, size=size, drop_last=loader.drop_last, length=length)
    return order, size


def _knows_ranks(sampler: object) -> bool:
    return hasattr(sampler, "rank") and hasattr(sampler, "num_replicas")


def _distributed_order(sampler: DistributedSampler[Any]) -> list[int]:
    """Return the indices of all ranks in the order of a DistributedSampler, without the repeated ones."""
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        indices: list[int] = torch.randperm(count, generator=generator).tolist()
    else:
        indices = list(range(count))
    return indices[: _distributed_length(sampler)]


def _distributed_length(sampler: DistributedSampler[Any]) -> int:
    return min(len(sampler.dataset), sampler.total_size)  # type: ignore[arg-type]


def _cut(indices: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    while batch := list(islice(indices, size)):
        if len(batch) < size and drop_last:
            return
        yield batch


def _skipped(lists: Iterator[Sequence[Any]], samples: int) -> Iterator[Sequence[Any]]:
    """Leave out lists with so many samples."""
    for each in lists:
        if samples <= 0:
            yield each
        samples -= len(each)
