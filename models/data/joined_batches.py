"""Joined batches: the samples of a stream of batches, in batches of any other size."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class JoinedBatches:
    """Samples of a stream of batches, which are nested tensors, arrays and lists with one entry for each sample."""

    def __init__(self, batches: Iterable[Any], batch_size: int | None) -> None:
        """Read batches of ``batch_size`` samples; None: any number."""
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

    def checksum(self, batch: Any) -> int:
        """Return a number of the values of a batch's first sample."""
        return zlib.crc32(_bytes(self.cut(batch, 0, 1)))

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
                "cannot be joined; pad samples to one shape, make batches of a map-style data set, or pass lengths=: "
                "balance() then cuts samples of an IterableDataset before they are collated"
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
