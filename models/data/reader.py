"""Reader: the batches of a map-style Dataset, read in this process or ahead in worker processes."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

# Modules that the fork server imports once, for all reading processes.
_PRELOAD = ["torch.utils.data", "PIL.Image", "gangline.models.data.reader", "gangline.models.data.images.folder"]
_PREFETCHED = 2
"""Number of batches that each process prefetches; torch's default."""


Collate = Callable[[list[Any]], Any]


class Unreadable(NamedTuple):
    """Item that a Dataset returns in place of a sample whose file cannot be read."""

    file: str
    reason: str


def base_dataset(dataset: Any) -> Any:
    """Return the dataset under any number of Subsets."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


class Reader:
    """The batches of a Dataset.

    The Dataset (under any Subsets) may have these optional attributes:

    - ``num_workers``: number of processes that read ahead. They start with the first epoch and run until `close` or
      until the reader is garbage-collected.
    - ``items_of_epoch(indices, epoch)``: return the items of a batch, which may differ between epochs, with
      `Unreadable` in place of items to skip. The epoch travels with each batch because two readers of one Dataset, for
      training and for validation, can be in different epochs at the same time.
    - ``note_unreadable(files)``: called in this process with the `Unreadable` items of each batch; may raise.

    With ``pin`` the batches are in pinned memory. ``collate`` joins the items of a batch; None: torch's default.
    """

    def __init__(self, dataset: Any, *, pin: bool = False, collate: Collate | None = None) -> None:
        self._base, self._pin = base_dataset(dataset), pin
        self._dataset = _Batches(dataset, collate)
        self._num_workers: int = getattr(self._base, "num_workers", 0)
        self.reads_ahead = _PREFETCHED * self._num_workers
        """Maximum number of batches that `read` prefetches."""
        self._loader: DataLoader[Any] | None = None
        self._sampler: Any = _ReplaceableSampler()

    def read(self, batches: Iterable[list[int]], epoch: int) -> Iterator[Any]:
        """Yield the collated items of each batch of indices; None for a batch without (readable) items.

        With worker processes, a new call ends the iterator of the previous one.
        """
        if self._loader is None:
            self._loader = self._new_loader()
        self._sampler.batches = ([epoch, *batch] for batch in batches)
        for batch in _begun(self._loader):  # no variable: an error's traceback would keep the worker processes
            if isinstance(batch, Exception):
                raise batch
            if batch.unreadable:
                self._base.note_unreadable(batch.unreadable)
            yield batch.items

    def close(self) -> None:
        """End the worker processes; a later `read` starts new ones."""
        self._loader = None

    def _new_loader(self) -> DataLoader[Any]:
        # Each epoch draws a seed for workers, which must not come from the training's generator.
        options: dict[str, Any] = {"generator": torch.Generator()}
        if self._num_workers:  # the fork server has no threads: a fork with torch's threads may hang
            context = torch.multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOAD)
            options |= {
                "num_workers": self._num_workers,
                "persistent_workers": True,
                "prefetch_factor": _PREFETCHED,
                "multiprocessing_context": context,
                "worker_init_fn": partial(_follow_parent, os.getpid()),
            }
        return DataLoader(
            self._dataset,
            batch_sampler=self._sampler,
            collate_fn=_unchanged,
            pin_memory=self._pin,
            **options,
        )


def _begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return a loader's iterator, with the seed drawn on the host despite `torch.set_default_device`."""
    with torch.device("cpu"):
        return iter(loader)


class _ReplaceableSampler:
    """Batch sampler whose batches are replaced for each epoch, so that worker processes persist."""

    batches: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class _Batch(NamedTuple):
    items: Any
    unreadable: list[Unreadable]


class _Batches(Dataset[Any]):
    """Adapter: takes [epoch, *indices] and returns a batch; one without indices has no items.

    Errors are returned, because the DataLoader would replace their text by a worker's traceback.
    """

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitems__(self, epoch_and_indices: list[int]) -> _Batch | Exception:
        epoch, *indices = epoch_and_indices
        if not indices:
            return _Batch(None, [])
        dataset = self._dataset
        if not hasattr(base_dataset(dataset), "items_of_epoch"):
            several = callable(getattr(dataset, "__getitems__", None))
            items = list(dataset.__getitems__(indices)) if several else [dataset[index] for index in indices]
            return _collated(items, indices, self._collate)
        while type(dataset) is Subset:
            indices = [dataset.indices[index] for index in indices]
            dataset = dataset.dataset
        try:
            return _collated(list(dataset.items_of_epoch(indices, epoch)), indices, self._collate)
        except (ValueError, RuntimeError) as error:
            return error


def _collated(items: list[Any], indices: Sequence[int], collate: Collate | None) -> _Batch | Exception:
    readable = [item for item in items if not isinstance(item, Unreadable)]
    unreadable = [item for item in items if isinstance(item, Unreadable)]
    try:
        with torch.device("cpu"):  # of labels that are numbers
            return _Batch((collate or default_collate)(readable) if readable else None, unreadable)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        kinds = [_kind(item) for item in items]
        other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
        if collate is not None or len(items) != len(indices) or (other is None and items[0] is not None):
            return error
        number = other or 0
        but = f", but sample {indices[0]} is {kinds[0]}" if number else ""
        wrong = ValueError(
            f"sample {indices[number]} of the dataset is {kinds[number]}{but}; expected samples alike, or a collate_fn "
            "that pads them"
        )
        wrong.__cause__ = error
        return wrong


def _kind(item: Any) -> str:
    """Return type and shapes of a sample, for messages."""
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return f"{tuple(item.shape)} of {item.dtype}"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{name!r}: {_kind(part)}' for name, part in item.items())}}}"
    if isinstance(item, (tuple, list)):
        return f"({', '.join(map(_kind, item))})"
    return "None" if item is None else type(item).__name__


def _unchanged(batch: Any) -> Any:
    return batch


def _follow_parent(trainer: int, _: int) -> None:
    """End this reading process when, and only when, the training process has ended for any reason.

    This process's parent is the fork server, so torch's parent check does not detect the end of the trainer. Signals to
    the process group are ignored: the trainer needs data until it has saved.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    exit_with(trainer)


def exit_with(process: int) -> None:
    """End this process as soon as another one has ended for any reason."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
