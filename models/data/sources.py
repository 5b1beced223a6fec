"""Sources: batches of (data, label) from arrays, datasets, DataLoaders or any iterable, epoch by epoch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gangline.models.data.batches import Batch, as_batch, num_samples, take
from gangline.models.data.reader import Reader, base_of
from gangline.models.random_streams import mixed_seed
from gangline.models.workers import Workers

Item = tuple[Batch, Batch]


def _nothing() -> None:
    pass


class Source(abc.ABC):
    """Batches of (data, label), epoch by epoch."""

    can_skip = True
    """Whether an epoch can begin in its middle and give what it would have given."""
    generator: torch.Generator | None = None
    """A generator of the source's own, whose state belongs to a checkpoint."""
    is_shared = False
    """Whether it holds the data of the whole job, which workers share out; else each worker has its own part in it."""

    @abc.abstractmethod
    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing) -> Iterator[Item]:
        """The batches of an epoch, without its first ``skip``; ``skipped`` is called when those are passed over."""

    def parts(
        self, workers: Workers, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing
    ) -> Iterator[Item | None]:
        """What this worker has of each step's batch, None where that is nothing; as `epoch` for one that is alone.

        It is nothing, too, where none of its images could be read: for one that is alone there is no update then.
        Where each worker has batches of its own, those who run out take part in the others' steps without samples; a
        collective then, step by step, of workers in step.
        """
        for item in self.epoch(epoch, skip, skipped):
            workers.any(True)
            yield item
        while workers.any(False):
            yield None

    @abc.abstractmethod
    def plan(self) -> dict[str, Any]:
        """What must be equal for a run to go on in mid-epoch, as plain data."""

    def first(self) -> Item:
        """A batch to learn shapes from; the epochs give it all the same."""
        for item in self.epoch(0):
            return item
        raise ValueError("the data has no batches; expected at least one")

    def num_batches(self) -> int | None:
        """Batches in an epoch, where that is known."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End the processes that read, if there are any; they also end when nobody has the source any more."""


def source(
    data: Any, batch_size: int | None, *, shuffle: bool, seed: int, what: str = "train_data", labels: bool = True
) -> Source:
    """The source that ``data`` is.

    Args:
        data: a tuple of two (tensors, arrays, or dicts of them), data and labels; a map-style Dataset; a DataLoader;
            or any iterable of (data, label) batches. Without ``labels`` also a tensor, array or dict: data alone.
        batch_size: needed for arrays and datasets; the others have batches already.
        shuffle: arrays and datasets: a permutation by (seed, epoch) each epoch.
        seed: see ``shuffle``.
        what: how messages name it.
        labels: whether labels are needed.

    Raises:
        TypeError: no such thing.
        ValueError: a missing or needless batch size, or data and labels of different lengths.
    """
    if isinstance(data, tuple) or (not labels and isinstance(data, (torch.Tensor, np.ndarray, dict))):
        arrays = data if isinstance(data, tuple) else (data, None)
        if len(arrays) != 2:
            raise ValueError(f"{what} is a tuple of {len(arrays)}; expected (data, labels)")
        pair = as_batch(arrays[0], f"{what}[0]"), None if arrays[1] is None else as_batch(arrays[1], f"{what}[1]")
        return _Arrays(*pair, _checked_batch_size(batch_size, what), shuffle, seed, what)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _Samples(data, _checked_batch_size(batch_size, what), shuffle, seed)
    if isinstance(data, (torch.Tensor, np.ndarray, dict, str)) or not isinstance(data, Iterable):
        raise TypeError(
            f"{what} is a {type(data).__name__}; expected (data, labels), a Dataset, a DataLoader, "
            "or an iterable of (data, label) batches"
        )
    if batch_size is not None:
        raise ValueError(f"batch_size is {batch_size}, but {what} has batches already; drop one of them")
    if (
        isinstance(data, DataLoader)
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
    ):
        return _Loader(data)
    return _Iterable(data, what)


def _checked_batch_size(batch_size: int | None, what: str) -> int:
    if batch_size is None:
        raise ValueError(f"{what} holds samples, so batch_size is needed; expected a number such as 64")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size is {batch_size!r}; expected an int")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
    return batch_size


@dataclass
class _Order:
    """Which samples the batches of an epoch have."""

    samples: int
    batch_size: int
    shuffle: bool
    seed: int

    def __call__(self, epoch: int) -> list[torch.Tensor]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            order = torch.randperm(self.samples, generator=generator)
        else:
            order = torch.arange(self.samples)
        return list(torch.split(order, self.batch_size))

    def plan(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
        }

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def shares(self, epoch: int, workers: Workers) -> list[torch.Tensor]:
        """What one worker has of each batch."""
        return [indices[workers.share(len(indices))] for indices in self(epoch)]


class _Arrays(Source):
    is_shared = True

    def __init__(self, data: Batch, label: Batch | None, batch_size: int, shuffle: bool, seed: int, what: str) -> None:
        samples = num_samples(data, f"{what}[0]")
        if label is not None and num_samples(label, f"{what}[1]") != samples:
            raise ValueError(f"{what} has {samples} samples, but {num_samples(label, f'{what}[1]')} labels")
        self._data, self._label = data, label
        self._order = _Order(samples, batch_size, shuffle, seed)

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing) -> Iterator[Item]:
        skipped()
        yield from map(self._taken, self._order(epoch)[skip:])

    def parts(
        self, workers: Workers, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing
    ) -> Iterator[Item | None]:
        skipped()
        for indices in self._order.shares(epoch, workers)[skip:]:
            yield self._taken(indices) if len(indices) else None

    def _taken(self, indices: torch.Tensor) -> Item:
        where: Any = indices if self._order.shuffle else slice(int(indices[0]), int(indices[-1]) + 1)
        return take(self._data, where), None if self._label is None else take(self._label, where)

    def plan(self) -> dict[str, Any]:
        return self._order.plan()

    def num_batches(self) -> int:
        return len(self._order)


class _Samples(Source):
    """A map-style Dataset; what says ``num_workers`` is read by as many processes, which last as long as this."""

    is_shared = True

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, seed: int) -> None:
        if not len(dataset):
            raise ValueError("the dataset has no samples; expected at least one")
        self._reader = Reader(dataset)
        self._order = _Order(len(dataset), batch_size, shuffle, seed)

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing) -> Iterator[Item]:
        batches = [indices.tolist() for indices in self._order(epoch)]
        for item in self._reader.read(_Skipping(batches, skip, skipped), epoch):
            if item is not None:
                yield _pair(item, "a batch of the dataset")

    def parts(
        self, workers: Workers, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing
    ) -> Iterator[Item | None]:
        shares = [indices.tolist() for indices in self._order.shares(epoch, workers)][skip:]
        own = [share for share in shares if share]
        items = self._reader.read(_Skipping(own, 0, skipped), epoch)
        if not own:
            skipped()
        for share in shares:
            item = next(items) if share else None
            yield _pair(item, "a batch of the dataset") if item is not None else None

    def plan(self) -> dict[str, Any]:
        return self._order.plan()

    def num_batches(self) -> int:
        return len(self._order)

    def close(self) -> None:
        self._reader.close()


class _Loader(Source):
    """A map-style DataLoader: it shuffles by torch's generator or its own, whose state belongs to a checkpoint."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.generator = loader.generator

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing) -> Iterator[Item]:
        samplers: tuple[Any, ...] = (self._loader.sampler, self._loader.batch_sampler)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        base = base_of(self._loader.dataset)
        if hasattr(base, "set_epoch"):
            base.set_epoch(epoch)  # such as for augmentation that differs from epoch to epoch
        for item in self._without(skip, skipped) if skip else self._loader:
            yield _pair(item, "a batch of the DataLoader")

    def _without(self, skip: int, skipped: Callable[[], None]) -> Iterator[Any]:
        if not self._loader.num_workers:
            return iter(self._skipping(skip, skipped))
        batches = iter(self._loader)  # worker processes draw as they read: they must read the first batches again
        for _ in range(skip):
            next(batches, None)
        skipped()
        return batches

    def _skipping(self, skip: int, skipped: Callable[[], None]) -> DataLoader[Any]:
        """The same loader over the same sampler, which draws its first batches and does not have them read."""
        loader = self._loader
        return DataLoader(
            loader.dataset,
            batch_sampler=_Skipping(loader.batch_sampler, skip, skipped),
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
        )

    def plan(self) -> dict[str, Any]:
        return {"batches": self.num_batches(), "batch_size": self._loader.batch_size}

    def num_batches(self) -> int | None:
        return _length(self._loader)


class _Skipping:
    """A batch sampler without its first batches, which are drawn and passed over."""

    def __init__(self, sampler: Any, skip: int, skipped: Callable[[], None]) -> None:
        self._sampler, self._skip, self._skipped = sampler, skip, skipped

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._sampler)
        for _ in range(self._skip):
            next(batches, None)
        self._skipped()
        yield from batches


class _Iterable(Source):
    """Any other iterable: it has no epochs of ours, and no middle to begin in."""

    can_skip = False

    def __init__(self, batches: Iterable[Any], what: str) -> None:
        self._batches, self._what = batches, what
        self._iterator = batches if isinstance(batches, Iterator) else None  # gives its batches once
        self._ahead: list[Item] = []
        self._epochs = 0

    def first(self) -> Item:
        if self._iterator is None:
            return super().first()
        self._ahead.append(self._item(next(self._iterator)))
        return self._ahead[0]

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _nothing) -> Iterator[Item]:  # noqa: ARG002
        if self._iterator is not None and self._epochs:
            raise ValueError(
                f"{self._what} is an iterator, which gives its batches once; expected an iterable such as a list"
            )
        self._epochs += 1
        yield from self._ahead
        for item in self._batches:
            yield self._item(item)

    def _item(self, item: Any) -> Item:
        return _pair(item, f"a batch of {self._what}")

    def plan(self) -> dict[str, Any]:
        return {}

    def num_batches(self) -> int | None:
        return _length(self._batches)


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def _pair(item: Any, what: str) -> Item:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return as_batch(item[0], f"{what}, data,"), as_batch(item[1], f"{what}, label,")
    if isinstance(item, (torch.Tensor, np.ndarray, dict)):
        return as_batch(item, what), None
    raise TypeError(f"{what} is a {type(item).__name__}; expected (data, label)")
