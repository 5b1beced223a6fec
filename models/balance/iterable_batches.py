"""Iterable batches: the batches of a stream, concatenated and cut to this rank's shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from gangline.models.balance.rank_balance import RankBalance
from gangline.models.balanced_batch import BalancedBatch
from gangline.models.data.batches import length_of
from gangline.models.data.joined_batches import JoinedBatches
from gangline.models.data.lengths import Arrangement
from gangline.models.data.loaders import own_iteration
from gangline.models.data.order import check_global_batch
from gangline.models.data.shares import Samples, shares_of

Stream = Literal["sharded", "replicated"]
_END = object()


def check_stream(loader: Any, stream: str | None, global_batch: int | None, ranks: int) -> int:
    """Return the number of samples of a global batch; ValueError if the arguments do not determine it."""
    own = own_iteration(loader)
    if stream is None and hasattr(loader, "__getitem__") and not isinstance(loader, list | tuple):
        raise ValueError(
            f"the loader is a {type(loader).__name__}, a data set; expected a DataLoader over it, such as "
            "DataLoader(dataset, batch_size=32)"
        )
    if own is None:
        kind = type(loader.dataset).__name__
        is_iterable = isinstance(loader.dataset, IterableDataset)
        if not is_iterable and stream != "sharded":
            raise ValueError(
                f"stream is {stream!r}, but the {kind} is not an IterableDataset; leave stream out, or write "
                'stream="sharded" if each rank has its own part of the samples'
            )
        own = f"the {kind} is an IterableDataset" if is_iterable else f"the loader of the {kind} has own batches"
    if stream not in ("sharded", "replicated"):
        for name in ("loader", "_dataloader"):  # of timm's PrefetchLoader and of Lightning Fabric
            if isinstance(getattr(loader, name, None), DataLoader):
                raise ValueError(
                    f"the {type(loader).__name__} wraps a DataLoader, whose batches it may read ahead; write "
                    f"balance(model, loader.{name}), iterate the result, and move its batches to the device in the loop"
                )
        raise ValueError(
            f"stream is {stream!r}, but {own}, whose batches are cut as they come; write balance(..., "
            'stream="sharded") if each rank reads samples of its own, or stream="replicated" if all ranks read '
            "the same samples in the same order; or give a plain DataLoader over a map-style data set"
        )
    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None and global_batch is None:
        raise ValueError(
            f"{own} without a batch_size, so the size of a global batch is not known; write balance(..., "
            "global_batch=) with the samples of all ranks in a step"
        )
    return check_global_batch(global_batch, ranks, batch_size or 1)


class IterableBatches:
    """Cuts the batches of a loader to shares as they come."""

    def __init__(
        self, loader: Any, is_same: bool, size: int, balance: RankBalance, arrangement: Arrangement | None
    ) -> None:
        """Cut to global batches of ``size``, or of a budget; ``is_same``: all ranks read the same stream.

        With ``arrangement`` the loader returns lists of samples, which are collated here once they are cut.
        """
        self._loader, self._batch_size = loader, getattr(loader, "batch_size", None)
        self._is_same, self.size, self._balance = is_same, size, balance
        self._arrangement = arrangement

    def shares(self, batches: Iterable[Any], seed: int, skip: int) -> Iterator[tuple[BalancedBatch, Any]]:
        """Return shares as `ShareSampler.shares`; without samples once this rank's stream has ended."""
        if skip and not self._is_same:
            raise ValueError(
                f'the epoch cannot continue behind {skip} samples with stream="sharded", since their number on each '
                "rank is not known; save the state between epochs, or skip samples in the data set"
            )
        if self._arrangement is not None:
            listed = chain.from_iterable(batches)
            cut = self._cut(self._arrangement, listed, seed, skip)
            shares = cut if self._is_same else self._filled(self._arrangement, listed)
            return ((batch, self._loader.collate_fn(samples)) for batch, samples in shares)
        joined = JoinedBatches(batches, self._batch_size)
        return self._of_same(joined, skip) if self._is_same else self._of_own(joined)

    def resize(self, size: int) -> None:
        """Set the samples of a global batch; ValueError if a budget decides them."""
        if self._arrangement is not None and (budget := self._arrangement.budget):
            raise ValueError(f"global_batch is set to {size}, but budget={budget} decides the size of batches")
        self.size = size

    def read_ahead(self) -> None:
        """Do nothing: each rank reads its stream alone."""

    def __len__(self) -> int:
        """Return the number of global batches of an epoch; TypeError if it is not known."""
        loader, batch_size = self._loader, self._batch_size or 1
        samples: int | None = None
        if self._is_same and own_iteration(loader) is None:
            samples = length_of(loader.dataset)
            if samples is not None and loader.drop_last:
                return samples // batch_size * batch_size // self.size
        elif self._is_same and self._batch_size and not self.size % batch_size:  # its last batch may be smaller
            samples = None if (batches := length_of(loader)) is None else batches * batch_size
        if samples is None:
            raise TypeError("the streams have no length, so the number of batches is not known")
        return -(-samples // self.size)

    def _of_same(self, samples: JoinedBatches, skip: int) -> Iterator[tuple[BalancedBatch, Any]]:
        while skip > 0 and (left_out := samples.take(min(skip, self.size))[0]):
            skip -= left_out
        for total, batch in iter(lambda: samples.take(self.size), (0, None)):
            split = self._balance.split
            counts = split.counts(total)
            begin, own = sum(counts[: split.rank]), counts[split.rank]
            part = samples.cut(batch, begin, begin + own) if own else samples.cut(batch, 0, split.minimum)
            agreed = total + (samples.checksum(batch) << 20)  # to find ranks that read another stream
            yield BalancedBatch(samples=own, cost=own, agreed=agreed), part

    def _of_own(self, samples: JoinedBatches) -> Iterator[tuple[BalancedBatch, Any]]:
        repeated: Any = None
        while True:
            split = self._balance.split
            own, batch = samples.take(split.counts(self.size)[split.rank])
            if own:
                repeated = samples.cut(batch, 0, split.minimum)
            elif repeated is None:
                raise self._has_no_samples()
            yield BalancedBatch(samples=own, cost=own, agreed=self.size), batch if own else repeated

    def _cut(
        self, arrangement: Arrangement, samples: Iterator[Any], seed: int, skip: int
    ) -> Iterator[tuple[BalancedBatch, Samples]]:
        """Return this rank's part of each global batch of the same stream, by cost."""
        order = iter(lambda: list(islice(samples, self.size)), [])  # `resize` holds from the next batch on
        if not arrangement.joins:
            skip -= sum(1 for _ in islice(samples, skip))
        for batch in arrangement.batches(order, seed, skip):
            if batch is not None:
                yield from shares_of(batch, self._balance.split, arrangement)

    def _filled(self, arrangement: Arrangement, samples: Iterator[Any]) -> Iterator[tuple[BalancedBatch, list[Any]]]:
        """Fill shares from this rank's own stream up to its part of the budget; then repeat a sample of weight 0."""
        lengths, budget, minimum = arrangement.lengths, arrangement.budget or 0.0, self._balance.split.minimum
        first = sample = next(samples, _END)
        if first is _END:
            raise self._has_no_samples()
        while sample is not _END:
            share: list[Any] = []
            costs, limit = np.array([]), self._balance.split.part_of(budget)
            while sample is not _END:
                added = np.append(costs, lengths.of([sample]))
                if len(share) >= minimum and lengths.cost(added) > limit:
                    break
                share.append(sample)
                costs, sample = added, next(samples, _END)
            in_batch = lengths.in_batch(costs)
            yield BalancedBatch(samples=len(share), cost=lengths.cost(costs), costs=in_batch, total=budget), share
        while True:
            yield BalancedBatch(samples=0), [first] * minimum

    def _has_no_samples(self) -> ValueError:
        return ValueError(
            f"the stream of rank {self._balance.split.rank} has no samples, so that rank has no batch to take part "
            "with; expected at least one sample on each rank"
        )
