"""`mx.io`: batches of arrays and of CSV files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gangline.mxnet.nd import NDArray, array


class DataDesc(NamedTuple):
    """Name and shape of a part of a batch."""

    name: str
    shape: tuple[int, ...]


@dataclass(eq=False)
class DataBatch:
    """A batch: lists of arrays. ``pad`` is the number of samples at its end that fill it up."""

    data: Sequence[Any]
    label: Sequence[Any] | None = None
    pad: int | None = None
    index: Any = None
    bucket_key: Any = None
    provide_data: Any = None
    provide_label: Any = None


class DataIter:
    """Source of batches: define `next`, which raises StopIteration at the end, and `reset`."""

    def __init__(self, batch_size: int = 0) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[DataBatch]:
        return self

    def __next__(self) -> DataBatch:
        return self.next()

    def next(self) -> DataBatch:
        """Return the next batch."""
        raise StopIteration

    def reset(self) -> None:
        """Begin again."""


class NDArrayIter(DataIter):
    """Batches of arrays in memory.

    ``provide_data`` and ``provide_label`` are the names and shapes of a batch's parts.

    Args:
        data: an array, a list or a dict of them, with the samples on the first axis.
        label: likewise.
        batch_size: samples of a batch.
        shuffle: shuffle the samples once.
        last_batch_handle: "pad" fills the last batch up with the first samples; "discard" leaves it out; "roll_over"
            puts its samples before the next epoch's.
        data_name: name of the data.
        label_name: name of the label.
    """

    def __init__(
        self,
        data: Any,
        label: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        last_batch_handle: str = "pad",
        data_name: str = "data",
        label_name: str = "softmax_label",
    ) -> None:
        super().__init__(batch_size)
        if last_batch_handle not in ("pad", "discard", "roll_over"):
            raise ValueError(f"last_batch_handle is {last_batch_handle!r}; expected pad, discard or roll_over")
        self.data, self.label = _named(data, data_name), _named(label, label_name)
        counts = {name: len(one) for name, one in [*self.data, *self.label]}
        self.num_data = len(self.data[0][1])
        if {*counts.values()} != {self.num_data} or not 0 < batch_size <= self.num_data:
            raise ValueError(
                f"batches of {batch_size} samples from {counts}; expected equal numbers, and as many or more"
            )
        self.provide_data, self.provide_label = (
            [DataDesc(name, (batch_size, *one.shape[1:])) for name, one in part] for part in (self.data, self.label)
        )
        self._order = (torch.randperm if shuffle else torch.arange)(self.num_data, device="cpu")
        self._handle, self._left = last_batch_handle, self._order[:0]
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self._epoch = torch.cat([self._left, self._order])
        self._left, self._at = self._order[:0], 0

    def next(self) -> DataBatch:
        """Return the next batch."""
        rows = self._epoch[self._at : self._at + self.batch_size]
        pad = self.batch_size - len(rows)
        if pad and self._handle == "roll_over":
            self._left = rows
        if not len(rows) or (pad and self._handle != "pad"):
            raise StopIteration
        self._at += self.batch_size
        rows = torch.cat([rows, self._epoch[:pad]])
        data, label = [one[rows] for _, one in self.data], [one[rows] for _, one in self.label]
        return DataBatch(data, label, pad, rows.numpy(), None, self.provide_data, self.provide_label)


class CSVIter(NDArrayIter):
    """Batches of numbers in CSV files; ``round_batch`` fills the last one up."""

    def __init__(
        self,
        data_csv: str,
        data_shape: Sequence[int],
        label_csv: str | None = None,
        label_shape: Sequence[int] = (1,),
        batch_size: int = 1,
        round_batch: bool = True,
        **options: Any,
    ) -> None:
        data = _numbers(data_csv, data_shape)
        label = np.zeros(len(data), np.float32) if label_csv is None else _numbers(label_csv, label_shape).squeeze(-1)
        super().__init__(data, label, batch_size, last_batch_handle="pad" if round_batch else "discard", **options)


def _numbers(path: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.loadtxt(path, np.float32, delimiter=",", ndmin=2).reshape(-1, *shape)


def _named(given: Any, name: str) -> list[tuple[str, NDArray]]:
    if isinstance(given, dict):
        return [(key, array(one)) for key, one in sorted(given.items())]
    arrays = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [(f"_{number}_{name}" * (len(arrays) > 1) or name, array(one)) for number, one in enumerate(arrays)]
