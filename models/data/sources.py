"""Sources: batches of (data, label) per epoch, from arrays, Datasets, DataLoaders or any iterable."""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gangline.models.arguments import check_int
from gangline.models.data.batches import Batch, as_batch, length_of, num_samples, pinned, take, tensors_of
from gangline.models.data.lengths import Arrangement, Lengths
from gangline.models.data.loaders import copy_loader, sampling_generator
from gangline.models.data.order import Exchange, Order
from gangline.models.data.reader import Collate, Reader, base_dataset
from gangline.models.data.shares import Samples, ShareSampler, Split, split_of
from gangline.models.elastic_workers import ElasticWorkers
from gangline.models.random_streams import mixed_seed
from gangline.models.workers import Workers

Item = tuple[Batch, Batch]
_GATHERED_AHEAD = 1 << 20
"""Minimum bytes of a batch to gather in a thread: a thread switch takes 0.05 ms, gathering 1 MiB of rows 0.4 ms."""


def _do_nothing() -> None:
    pass


class Source(abc.ABC):
    """Batches of (data, label) for each epoch."""

    can_skip = True
    """True if an epoch can start at any batch and yield the same batches as a whole epoch from there."""
    generator: torch.Generator | None = None
    """The source's own random generator; checkpoints save its state."""
    is_shared = False
    """True if it holds the whole job's data and each worker takes its share; False if it holds this worker's only."""
    indices: Samples = ()
    """Samples of the last share, if the source chooses them."""
    reads_ahead = 0
    """Maximum number of batches after the current one whose samples are already chosen."""
    length_is_certain = False
    """True if an epoch has exactly `num_batches` batches."""

    @abc.abstractmethod
    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _do_nothing) -> Iterator[Item]:
        """Yield the batches of an epoch after its first ``skip``; call ``skipped`` after skipping."""

    def parts(
        self,
        workers: Workers,  # noqa: ARG002  of sources that the workers share
        epoch: int,
        skip: int = 0,
        skipped: Callable[[], None] = _do_nothing,
    ) -> Iterator[Item | None]:
        """Yield this worker's share of each batch; None if it has no load, or none of its images can be read."""
        return self.epoch(epoch, skip, skipped)

    @abc.abstractmethod
    def plan(self) -> dict[str, Any]:
        """Return the settings that must be equal to resume a run within an epoch, as plain data."""

    def first(self) -> Item:
        """Return the first batch, to read its shapes; epochs still include it."""
        for item in self.epoch(0):
            return item
        raise ValueError("the data have no batches; expected at least one")

    def number_of(self, sample: int, samples: int) -> int | None:
        """Return the data index of one of the ``samples`` of the last share; None if unknown."""
        return int(self.indices[sample]) if len(self.indices) == samples else None  # else some could not be read

    def num_batches(self) -> int | None:
        """Return the number of batches in an epoch; None if unknown."""
        return None

    def close(self) -> None:  # noqa: B027  most sources have no processes
        """End the reading processes, if any; they also end when the source is garbage-collected."""


def source(
    data: Any,
    batch_size: int | None,
    *,
    shuffle: bool,
    seed: int,
    what: str = "train_data",
    labels: bool = True,
    pin: bool = False,
    lengths: Any = None,
    padding: bool = True,
    collate: Collate | None = None,
) -> Source:
    """Return a source for data of `Module.fit`; without ``labels`` also for arrays of data alone.

    Permutations depend on (seed, epoch). With ``pin`` batches of arrays and Datasets are in pinned memory, for a GPU.
    ``what`` names the data in messages. ``lengths``, ``padding`` and ``collate`` are for Datasets.
    """
    is_map_style = _is_map_style(data, batch_size)
    for name, value in {"lengths": lengths, "collate_fn": collate}.items():
        if value is not None and not is_map_style:
            kind = "holds arrays, whose rows are alike" if isinstance(data, tuple) else "has batches already"
            raise ValueError(f"{name} is given, but {what} {kind}; expected a Dataset and its batch_size, or no {name}")
    if isinstance(data, tuple) or (not labels and isinstance(data, (torch.Tensor, np.ndarray, dict))):
        arrays = data if isinstance(data, tuple) else (data, None)
        if len(arrays) != 2:
            raise ValueError(f"{what} is a tuple of {len(arrays)}; expected (data, labels)")
        pair = as_batch(arrays[0], f"{what}[0]"), None if arrays[1] is None else as_batch(arrays[1], f"{what}[1]")
        return _Arrays(*pair, _checked_batch_size(batch_size, what), shuffle, seed, what, pin=pin)
    if is_map_style:
        size = _checked_batch_size(batch_size, what)
        if not len(data):
            raise ValueError("the dataset has no samples; expected at least one")
        checked = None if lengths is None else Lengths(lengths, len(data), padding=padding)
        reader = Reader(data, pin=pin, collate=collate)
        return _Samples(reader, len(data), size, shuffle=shuffle, seed=seed, lengths=checked)
    if isinstance(data, (torch.Tensor, np.ndarray, dict, str)) or not isinstance(data, Iterable):
        raise TypeError(
            f"{what} is a {type(data).__name__}; expected (data, labels), a Dataset, a DataLoader, "
            "or an iterable of (data, label) batches"
        )
    if batch_size is not None:
        raise ValueError(f"batch_size is {batch_size}, but {what} has batches already; give only one of them")
    if (
        isinstance(data, DataLoader)
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
    ):
        return _Loader(data)
    return _Iterable(data, what)


def _is_map_style(data: Any, batch_size: int | None) -> bool:
    """Return whether data are samples by index: a torch Dataset, or with a batch size one of Hugging Face."""
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    if batch_size is None or isinstance(data, (torch.Tensor, np.ndarray, dict, str, list, tuple, DataLoader)):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _checked_batch_size(batch_size: int | None, what: str) -> int:
    if batch_size is None:
        raise ValueError(f"{what} holds samples, so batch_size is needed; expected a number such as 64")
    return check_int("batch_size", batch_size)


class _Ordered(Source):
    """Data of the whole job; this source chooses the samples of each batch."""

    is_shared = True

    def __init__(
        self, samples: int, batch_size: int, *, shuffle: bool, seed: int, lengths: Lengths | None = None
    ) -> None:
        """Set the order: a permutation by (seed, epoch) unless ``shuffle`` is False.

        Batches are cut into shares by ``lengths``; None: by the number of samples.
        """
        every: Any = range(samples)
        self._order = Order(DataLoader(every, batch_size, shuffle), Exchange())
        self._shuffle, self._samples, self._seed, self._lengths = shuffle, samples, seed, lengths

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _do_nothing) -> Iterator[Item]:
        return (item for item in self.parts(Workers(), epoch, skip, skipped) if item is not None)

    def parts(
        self, workers: Workers, epoch: int, skip: int = 0, skipped: Callable[[], None] = _do_nothing
    ) -> Iterator[Item | None]:
        skipped()  # skipping draws no random numbers
        if isinstance(workers, ElasticWorkers):
            return self._parts_of_steps(workers, epoch, skip)
        return self._shares(workers, epoch, skip)

    def _shares(self, workers: Workers, epoch: int, skip: int, split: Split | None = None) -> Iterator[Item | None]:
        """Yield the shares of a split; None: that of the loads, which cut batches equally far ahead on all workers."""
        lengths, size = self._lengths, self._order.size

        def present() -> Split:
            return split or split_of(workers.rank, workers.loads, workers.minimum)

        ahead = self.num_batches() if split else max(self.reads_ahead, workers.reads_ahead)
        sampler = ShareSampler(self._order, present, ahead, Arrangement(lengths) if lengths else None, repeats=False)
        for batch, item in sampler.shares(self._items(sampler, epoch), mixed_seed(self._seed, epoch), skip * size):
            self.indices, workers.share_cost = sampler.indices, batch.cost if lengths else None
            yield item
            sampler.read_ahead()

    def _parts_of_steps(self, workers: ElasticWorkers, epoch: int, skip: int) -> Iterator[Item | None]:
        """Yield this worker's share of each step's batch until it leaves the job.

        Prefetching assumes an equal share of the next batch; if the share differs, prefetching restarts there.
        """
        length, split = self.num_batches(), split_of(0, [1.0])
        shares: Iterator[Item | None] = iter(())
        for number in range(skip, length):
            size = min(self._order.size, self._samples - number * self._order.size)
            share = workers.share_of(epoch * length + number, size)
            if share is None:
                return
            loads = [*map(float, (share.start, share.stop - share.start, size - share.stop))]  # its own is the second
            if loads != split.loads:
                split = split_of(1, loads)
                shares = self._shares(workers, epoch, number, split)
            yield next(shares)

    @abc.abstractmethod
    def _items(self, batches: Iterable[Samples], epoch: int) -> Iterator[Item | None]:
        """Yield the samples of each batch of indices; None for a batch without samples."""

    def plan(self) -> dict[str, Any]:
        seed, lengths = self._seed if self._shuffle else None, self._lengths
        plan = {"samples": self._samples, "batch_size": self._order.size, "shuffle": self._shuffle, "seed": seed}
        return plan if lengths is None else {**plan, "lengths": lengths.checksum, "padding": lengths.padding}

    def num_batches(self) -> int:
        return -(-self._samples // self._order.size)


class _Arrays(_Ordered):
    def __init__(
        self, data: Batch, label: Batch | None, batch_size: int, shuffle: bool, seed: int, what: str, *, pin: bool
    ) -> None:
        samples = num_samples(data, f"{what}[0]")
        if label is not None and num_samples(label, f"{what}[1]") != samples:
            raise ValueError(f"{what} has {samples} samples, but {num_samples(label, f'{what}[1]')} labels")
        self._data, self._label, self._pin = data, label, pin
        super().__init__(samples, batch_size, shuffle=shuffle, seed=seed)
        per_sample = sum(tensor[0].nbytes for tensor in tensors_of((data, () if label is None else label)))
        copies = shuffle or pin  # otherwise batches are views
        self.reads_ahead = int(copies and per_sample * min(batch_size, samples) >= _GATHERED_AHEAD)

    def _items(self, batches: Iterable[Samples], epoch: int) -> Iterator[Item | None]:  # noqa: ARG002  inherited
        """Yield the samples of each batch; a thread gathers the next batch if batches are large."""
        if not self.reads_ahead:
            yield from map(self._select, batches)
            return
        with ThreadPoolExecutor(1, "gangline-gather") as thread:
            ahead: deque[Future[Item | None]] = deque()
            for indices in batches:
                ahead.append(thread.submit(self._select, indices))
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)

    def _select(self, indices: Samples) -> Item | None:
        if not len(indices):
            return None
        index: Any = indices if self._shuffle else slice(int(indices[0]), int(indices[-1]) + 1)
        item = take(self._data, index), None if self._label is None else take(self._label, index)
        return (pinned(item[0]), None if item[1] is None else pinned(item[1])) if self._pin else item


class _Samples(_Ordered):
    """A map-style Dataset, read by its ``num_workers`` processes, if any."""

    def __init__(self, reader: Reader, samples: int, batch_size: int, **options: Any) -> None:
        super().__init__(samples, batch_size, **options)
        self._reader, self.reads_ahead = reader, reader.reads_ahead

    def _items(self, batches: Iterable[Samples], epoch: int) -> Iterator[Item | None]:
        lists = (indices.tolist() if isinstance(indices, torch.Tensor) else [*indices] for indices in batches)
        for item in self._reader.read(lists, epoch):
            yield _pair(item, "a batch of the dataset") if item is not None else None

    def close(self) -> None:
        self._reader.close()


class _Loader(Source):
    """A DataLoader over a map-style Dataset; its sampler draws from its own generator, if any, else from torch's."""

    length_is_certain = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.generator = sampling_generator(loader)

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _do_nothing) -> Iterator[Item]:
        samplers: tuple[Any, ...] = (self._loader.sampler, self._loader.batch_sampler)
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        base = base_dataset(self._loader.dataset)
        if hasattr(base, "set_epoch"):
            base.set_epoch(epoch)  # for augmentation
        batches: Iterable[Any] = self._loader
        if skip and self._loader.num_workers:  # draw random numbers while reading, so they must read the first batches
            batches = _after(batches, skip, skipped)
        elif skip:  # draws the first batches without reading them
            batches = copy_loader(self._loader, batch_sampler=_after(samplers[1], skip, skipped))
        for item in batches:
            yield _pair(item, "a batch of the DataLoader")

    def plan(self) -> dict[str, Any]:
        return {"batches": self.num_batches(), "batch_size": self._loader.batch_size}

    def num_batches(self) -> int | None:
        return length_of(self._loader)


def _after(batches: Iterable[Any], skip: int, skipped: Callable[[], None]) -> Iterator[Any]:
    """Draw and drop the first ``skip`` batches; yield the others after a call of ``skipped``."""
    others = iter(batches)
    for _ in range(skip):
        next(others, None)
    skipped()
    yield from others


class _Iterable(Source):
    """Any other iterable; epochs can only start at their first batch."""

    can_skip = False

    def __init__(self, batches: Iterable[Any], what: str) -> None:
        self._batches, self._what = batches, what
        self._iterator = batches if isinstance(batches, Iterator) else None  # yields its batches once
        self._peeked: list[Item] = []
        self._epochs = 0
        is_map_style = isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset)
        self.length_is_certain = is_map_style or isinstance(batches, Sequence)

    def first(self) -> Item:
        if self._iterator is None:
            return super().first()
        self._peeked.append(self._item(next(self._iterator)))
        return self._peeked[0]

    def epoch(self, epoch: int, skip: int = 0, skipped: Callable[[], None] = _do_nothing) -> Iterator[Item]:  # noqa: ARG002
        if self._iterator is not None and self._epochs:
            raise ValueError(
                f"{self._what} is an iterator, which yields its batches once; expected an iterable such as a list"
            )
        self._epochs += 1
        yield from self._peeked
        for item in self._batches:
            yield self._item(item)

    def _item(self, item: Any) -> Item:
        return _pair(item, f"a batch of {self._what}")

    def plan(self) -> dict[str, Any]:
        return {}

    def num_batches(self) -> int | None:
        return length_of(self._batches)


def _pair(item: Any, what: str) -> Item:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return as_batch(item[0], f"{what}, data,"), as_batch(item[1], f"{what}, label,")
    if isinstance(item, (torch.Tensor, np.ndarray, dict)):
        return as_batch(item, what), None
    raise TypeError(f"{what} is a {type(item).__name__}; expected (data, label)")


def read_speed(data: Any, batch_size: int | None = None, epochs: int = 1) -> float:
    """Read the data as `Module.fit` would, without training, and return the samples per second.

    A network that trains faster than this waits for its data.

    Args:
        data: data as for `Module.fit`.
        batch_size: samples per batch, for arrays and Datasets.
        epochs: number of passes over the data, shuffled in each.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if epochs is below 1, the batch size is missing or superfluous, or there are no batches.
    """
    check_int("epochs", epochs)
    batches = source(data, batch_size, shuffle=True, seed=0, what="data")
    began = time.perf_counter()
    try:
        samples = sum(num_samples(item[0], "data") for epoch in range(epochs) for item in batches.epoch(epoch))
        if not samples:
            raise ValueError("the data have no batches; expected at least one")
        return samples / max(time.perf_counter() - began, 1e-9)
    finally:
        batches.close()
