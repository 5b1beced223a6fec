"""Reading the samples of a Dataset batch by batch, here or in processes that read ahead."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

# What the process that readers are forked from imports once, for all of them.
_PRELOAD = [
    "torch.utils.data",
    "PIL.Image",
    "gangline.models.data.reader",
    "gangline.models.data.images.folder",
    "kornia.geometry.transform",
]


def base_of(dataset: Any) -> Any:
    """The data set that Subsets are of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


class Reader:
    """The batches of a Dataset.

    A Dataset, or what a Subset of it is of, may say more of itself than torch asks for:

    - ``num_workers``: so many processes read ahead. They start with the first epoch and last until `close`, or until
      nobody has the reader any more.
    - ``items_of_epoch(indices, epoch)``: the items of a batch, which may differ from epoch to epoch; those that cannot
      be read may be missing.
    - ``report_skipped()``: called here after each batch.
    """

    def __init__(self, dataset: Any) -> None:
        self._base = base_of(dataset)
        self._by_epoch = hasattr(self._base, "items_of_epoch")
        self._dataset = _OfEpoch(dataset) if self._by_epoch else dataset
        self._num_workers: int = getattr(self._base, "num_workers", 0)
        self._loader: DataLoader[Any] | None = None
        self._batches = _Batches()

    def read(self, batches: Iterable[list[int]], epoch: int) -> Iterator[Any]:
        """The collated items of each batch, None where none is left.

        With processes, a call ends the one before it.
        """
        named = _with_epoch(batches, epoch) if self._by_epoch else batches
        report = getattr(self._base, "report_skipped", None)
        for item in self._ahead(named) if self._num_workers else self._here(named):
            if report is not None:
                report()
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self) -> None:
        """End the processes; a later `read` starts others."""
        self._loader = None

    def _here(self, batches: Iterable[list[int]]) -> DataLoader[Any]:
        sampler: Any = batches
        return DataLoader(self._dataset, batch_sampler=sampler, collate_fn=_collated)

    def _ahead(self, batches: Iterable[list[int]]) -> DataLoader[Any]:
        self._batches.of_epoch = batches
        if self._loader is None:
            sampler: Any = self._batches
            self._loader = DataLoader(
                self._dataset,
                batch_sampler=sampler,
                collate_fn=_collated,
                num_workers=self._num_workers,
                persistent_workers=True,
                multiprocessing_context=_context(),
                worker_init_fn=partial(_end_with, os.getpid()),
                generator=torch.Generator(),  # starting processes draws a seed, not from the stream that training sees
            )
        return self._loader


class _Batches:
    """A batch sampler whose batches are set for each epoch."""

    of_epoch: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.of_epoch)


def _with_epoch(batches: Iterable[list[int]], epoch: int) -> Iterator[list[int]]:
    """Each batch behind the number of its epoch: so it reaches processes that last, and none gets that of another."""
    for batch in batches:
        yield [epoch, *batch]


class _OfEpoch(Dataset[Any]):
    """A data set that is asked for the items of an epoch, by what `_with_epoch` gives."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, asked: list[int]) -> list[Any]:
        epoch, *indices = asked
        dataset = self._dataset
        while type(dataset) is Subset:
            indices = [dataset.indices[index] for index in indices]
            dataset = dataset.dataset
        try:
            items: list[Any] = dataset.items_of_epoch(indices, epoch)
        except (ValueError, RuntimeError) as error:
            return [error]  # it is raised where training runs, with its text as it is
        return items


def _collated(items: list[Any]) -> Any:
    if not items:
        return None
    return items[0] if isinstance(items[0], Exception) else default_collate(items)


def _context() -> Any:
    """Forks of a process without threads: those of one whose threads have computed may hang."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _end_with(trainer: int, _: int) -> None:
    """Have a process that reads end with the one that trains, however that went, and not before.

    Its parent is the process that forks, which lives as long as any that it has forked: that tells it nothing. A signal
    to all of a job is a word to who trains, and who reads serves it until it has saved.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        handle = os.pidfd_open(trainer)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
