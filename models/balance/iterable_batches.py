"""Iterable batches: the batches of a stream, concatenated and cut to this rank's shares."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gangline.models.balance.global_order import check_global_batch, own_iteration, shares_of
from gangline.models.balance.lengths import Arrangement
from gangline.models.balance.lockstep import Piece
from gangline.models.balance.rank_balance import RankBalance
from gangline.models.data.batches import length_of

Stream = Literal["own", "same"]
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
        if not is_iterable and stream != "own":
            raise ValueError(
                f"stream is {stream!r}, but the {kind} is not an IterableDataset; leave stream out, or write "
                'stream="own" if each rank has its own part of the samples'
            )
        own = f"the {kind} is an IterableDataset" if is_iterable else f"the loader of the {kind} has own batches"
    if stream not in ("own", "same"):
        for name in ("loader", "_dataloader"):  # of timm's PrefetchLoader and of Lightning Fabric
            if isinstance(getattr(loader, name, None), DataLoader):
                raise ValueError(
                    f"the {type(loader).__name__} wraps a DataLoader, whose batches it may read ahead; write "
                    f"balance(model, loader.{name}), iterate the result, and move its batches to the device in the loop"
                )
        raise ValueError(
            f'stream is {stream!r}, but {own}, whose batches are cut as they come; write balance(..., stream="own") if '
            'each rank reads samples of its own, or stream="same" if all ranks read the same samples in the same '
            "order; or give a plain DataLoader over a map-style data set"
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
        self,
        loader: Any,
        is_same: bool,
        size: int,
        balance: RankBalance,
        rank: int,
        arrangement: Arrangement | None = None,
        budget: float = 0.0,
    ) -> None:
        """Cut to global batches of ``size``, or of a cost of ``budget``; ``is_same``: all ranks read the same stream.

        With ``arrangement`` the loader returns lists of samples, which are collated here once they are cut.
        """
        self._loader, self._batch_size = loader, getattr(loader, "batch_size", None)
        self._is_same, self._size, self._balance, self._rank = is_same, size, balance, rank
        self._arrangement, self._budget = arrangement, budget

    def pieces(self, batches: Iterable[Any], seed: int, skip: int, first: int) -> Iterator[Piece]:
        """Return batches as `ShareSampler.pieces`; without samples once this rank's stream has ended."""
        if skip and not self._is_same:
            raise ValueError(
                f'the epoch cannot continue behind {skip} samples with stream="own", since their number on each '
                "rank is not known; save the state between epochs, or skip samples in the data set"
            )
        if self._arrangement is not None:
            listed = chain.from_iterable(batches)
            cut = self._cut(self._arrangement, listed, seed, skip, first)
            shares = cut if self._is_same else self._filled(self._arrangement, listed)
            return (replace(piece, batch=self._loader.collate_fn(share)) for share, piece in shares)
        samples = Samples(batches, self._batch_size)
        return self._of_same(samples, skip, first) if self._is_same else self._of_own(samples, first)

    def resize(self, size: int) -> None:
        """Set the samples of a global batch; ValueError if a budget decides them."""
        if self._budget:
            raise ValueError(f"global_batch is set to {size}, but budget={self._budget} decides the size of batches")
        self._size = size

    def read_ahead(self) -> None:
        """Do nothing: each rank reads its stream alone."""

    def __len__(self) -> int:
        """Return the number of global batches of an epoch; TypeError if it is not known."""
        loader, batch_size = self._loader, self._batch_size or 1
        samples: int | None = None
        if self._is_same and own_iteration(loader) is None:
            samples = length_of(loader.dataset)
            if samples is not None and loader.drop_last:
                return samples // batch_size * batch_size // self._size
        elif self._is_same and self._batch_size and not self._size % batch_size:  # its last batch may be smaller
            samples = None if (batches := length_of(loader)) is None else batches * batch_size
        if samples is None:
            raise TypeError("the streams have no length, so the number of batches is not known")
        return -(-samples // self._size)

    def _of_same(self, samples: Samples, skip: int, first: int) -> Iterator[Piece]:
        while skip > 0 and (left_out := samples.take(min(skip, self._size))[0]):
            skip -= left_out
        for number in count(first):
            total, batch = samples.take(self._size)
            if not total:
                return
            counts = self._balance.counts(number, total)
            begin, own = sum(counts[: self._rank]), counts[self._rank]
            part = samples.cut(batch, begin, begin + own) if own else samples.cut(batch, 0, self._balance.minimum)
            checksum = zlib.crc32(_bytes(samples.cut(batch, 0, 1)))  # to find ranks that read another stream
            yield Piece(own, part, total + (checksum << 20), own)

    def _cut(
        self, arrangement: Arrangement, samples: Iterator[Any], seed: int, skip: int, first: int
    ) -> Iterator[tuple[list[Any], Piece]]:
        """Return this rank's part of each global batch of the same stream, by cost."""
        order = iter(BatchSampler(samples, self._size, drop_last=False))
        for number, batch in enumerate(arrangement.batches(order, seed, skip), first):
            if batch is not None:
                yield from shares_of(batch, number, self._balance, self._rank, arrangement)

    def _filled(self, arrangement: Arrangement, samples: Iterator[Any]) -> Iterator[tuple[list[Any], Piece]]:
        """Fill shares from this rank's own stream up to its part of the budget; then repeat a sample of weight 0."""
        lengths, minimum = arrangement.lengths, self._balance.minimum
        sample = next(samples, _END)
        if sample is _END:
            raise self._has_no_samples()
        repeated = [sample] * minimum
        while sample is not _END:
            share: list[Any] = []
            costs, limit = np.array([]), self._budget * self._balance.part
            while sample is not _END:
                added = np.append(costs, lengths.of([sample]))
                if len(share) >= minimum and lengths.cost(added) > limit:
                    break
                share.append(sample)
                costs, sample = added, next(samples, _END)
            yield share, Piece(len(share), None, cost=lengths.cost(costs), total=self._budget)
        while True:
            yield repeated, Piece(0, None)

    def _has_no_samples(self) -> ValueError:
        return ValueError(
            f"the stream of rank {self._rank} has no samples, so that rank has no batch to take part with; expected "
            "at least one sample on each rank"
        )

    def _of_own(self, samples: Samples, first: int) -> Iterator[Piece]:
        repeated: Any = None
        for number in count(first):
            total, batch = samples.take(self._balance.counts(number, self._size)[self._rank])
            if not total and repeated is None:
                raise self._has_no_samples()
            repeated = samples.cut(batch, 0, self._balance.minimum) if total else repeated
            yield Piece(total, batch if total else repeated, cost=total)


class Samples:
    """Samples of a stream of batches: pytrees of tensors, arrays and lists, with one entry for each sample."""

    def __init__(self, batches: Iterable[Any], batch_size: int | None) -> None:
        self._batches, self._batch_size = iter(batches), batch_size
        self._left: deque[tuple[int, Any]] = deque()  # (samples, batch)
        self._of_samples: dict[str, bool] = {}  # by name of a list of tensors and containers, as first read

    def take(self, samples: int) -> tuple[int, Any]:
        """Return the next samples as one batch, with their number: fewer at the end of the stream, then 0."""
        parts, count = [], 0
        while count < samples:
            if not self._left:
                batch = next(self._batches, self)
                if batch is self:
                    break
                self._left.append((self.length(batch), batch))
            length, batch = self._left.popleft()
            used = min(length, samples - count)
            if used < length:
                self._left.appendleft((length - used, self.cut(batch, used, length)))
                batch = self.cut(batch, 0, used)
            parts.append(batch)
            count += used
        return count, self._map(parts, "batch", _join) if len(parts) > 1 else parts[0] if parts else None

    def cut(self, batch: Any, begin: int, end: int) -> Any:
        """Return samples ``begin`` to ``end`` of a batch."""
        return self._map([batch], "batch", lambda _, values: values[0] if values[0] is None else values[0][begin:end])

    def length(self, batch: Any) -> int:
        """Return the number of samples of a batch."""
        lengths: dict[str, int] = {}

        def measure(name: str, values: Sequence[Any]) -> None:
            (value,) = values
            if value is None:
                return
            if isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim):
                lengths[name] = len(value)
                return
            shown = "a tensor of 0 dimensions" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise ValueError(
                f"{name} is {shown}, which has no entry for each sample and cannot be cut; expected tensors, arrays "
                "and lists with one entry for each sample"
            )

        self._map([batch], "batch", measure)
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"the batch cannot be cut, because its parts have no common length: {lengths or 'no parts'}; expected "
                "one entry for each sample in dimension 0 of all tensors and in all lists"
            )
        return next(iter(lengths.values()))

    def _map(self, values: Sequence[Any], name: str, apply: Callable[[str, Sequence[Any]], Any]) -> Any:
        """Apply a function to the parts of batches that have the same structure."""
        first = values[0]
        if isinstance(first, Mapping):
            _check_alike(name, [sorted(map(str, value)) for value in values])
            items = {key: self._map([v[key] for v in values], f"{name}[{key!r}]", apply) for key in first}
            return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
        if isinstance(first, list | tuple) and not self._is_of_samples(first, name):
            _check_alike(name, [len(value) for value in values])
            parts = [self._map(column, f"{name}[{n}]", apply) for n, column in enumerate(zip(*values, strict=True))]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        return apply(name, values)

    def _is_of_samples(self, value: Sequence[Any], name: str) -> bool:
        """Return whether a list has one entry per sample, not one per part of the batch."""
        if not any(isinstance(part, Tensor | np.ndarray | Mapping | list | tuple) for part in value):
            return True
        if name not in self._of_samples:  # parts that were cut do not tell
            size = self._batch_size
            self._of_samples[name] = len(value) == size and not all(_fits(part, size) for part in value)
        return self._of_samples[name]


def _fits(part: Any, samples: int) -> bool:
    """Return whether a part of a batch has this many samples."""
    if isinstance(part, Tensor | np.ndarray):
        return part.ndim > 0 and len(part) == samples
    if isinstance(part, Mapping):
        return all(_fits(value, samples) for value in part.values())
    return part is None or (isinstance(part, list | tuple) and len(part) == samples)


def _join(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Tensor | np.ndarray):
        shapes = [tuple(value.shape[1:]) for value in values]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"{name} has samples of shape {shapes[0]} in one batch and others in the next ({shapes[1:]}), which "
                "cannot be joined; pad samples to one shape, or make batches of a map-style data set"
            )
        return torch.cat(list(values)) if isinstance(first, Tensor) else np.concatenate(values)
    return type(first)([entry for value in values for entry in value])


def _check_alike(name: str, structures: Sequence[Any]) -> None:
    for structure in structures[1:]:
        if structure != structures[0]:
            raise ValueError(f"{name} has {structures[0]} in one batch, but {structure} in another; expected the same")


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        value = value.detach().cpu().float().numpy()
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype.kind in "biufc" else repr(value).encode()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return b"".join(map(_bytes, value))
    return repr(value).encode() if isinstance(value, str | int | float | bytes) else b""
