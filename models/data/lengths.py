"""Lengths of samples: what they and their batches cost, and batches of similar lengths."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gangline.models.data.batches import length_of
from gangline.models.data.loaders import own_iteration

Costs = NDArray[np.float64]


class Lengths:
    """Cost of each sample of a data set: what its ``lengths`` say, such as tokens, frames, nodes or pixels."""

    def __init__(self, lengths: Any, samples: int | None, *, padding: bool = True) -> None:
        """Check the lengths of a data set of so many samples; None: unknown.

        Args:
            lengths: one number for each sample, by index: a list, array, tensor or column; or a function of the index.
            samples: length of the data set.
            padding: True if a batch costs its number of samples times its longest sample; False: the sum of lengths.

        Raises:
            TypeError: if it is neither.
            ValueError: if the number of lengths is wrong, or one is negative or not finite; the message names it.
        """
        self.padding = padding
        self._function: Callable[[Any], Any] | None = lengths if callable(lengths) else None
        self._values: Costs | None = None
        if self._function is not None:
            return
        if isinstance(lengths, str | Mapping) or not hasattr(lengths, "__len__") or not hasattr(lengths, "__getitem__"):
            raise TypeError(
                f"lengths is {lengths!r}; expected one number for each sample of the data set, such as "
                "[len(text) for text in texts] or a column, or a function from an index to a number"
            )
        values = lengths.detach().cpu().numpy() if isinstance(lengths, Tensor) else lengths
        values = values if isinstance(values, np.ndarray) else list(values)
        try:
            self._values = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            self._values = None
        if self._values is None or (self._values.ndim != 1 and len(values)):
            first = next((n for n, value in enumerate(values) if not isinstance(value, int | float | np.number)), 0)
            raise TypeError(
                f"lengths[{first}] is of type {type(values[first]).__name__}; expected a number, such as the sample's "
                "number of tokens"
            )
        if samples is not None and len(self._values) != samples:
            raise ValueError(
                f"lengths has {len(self._values)} numbers for the {samples} samples of the data set; expected one for "
                "each, by index"
            )
        self._check(self._values, range(len(self._values)))

    @property
    def checksum(self) -> int | str:
        """Number that is equal on all ranks if their lengths are."""
        return "a function" if self._values is None else zlib.crc32(self._values.tobytes())

    def of(self, indices: Sequence[Any]) -> Costs:
        """Return the costs of samples.

        Raises:
            ValueError: if the function returns what is no number of 0 or more; the message names the index.
        """
        if self._values is not None:
            try:
                return self._values[np.asarray(indices, np.int64)]
            except (TypeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"lengths is a sequence, but the sampler draws indices such as {indices[0]!r}; expected whole "
                    f"numbers below {len(self._values)}, or a function from an index to a number"
                ) from error
        assert self._function is not None
        try:
            costs = np.asarray([float(self._function(index)) for index in indices], np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"lengths({indices[0]!r}) returned no number; expected one for each index") from error
        self._check(costs, indices)
        return costs

    def _check(self, costs: Costs, indices: Sequence[Any]) -> None:
        wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
        if len(wrong):
            place = int(wrong[0])
            raise ValueError(
                f"the length of sample {indices[place]} is {costs[place]}; expected a finite number, 0 or more"
            )

    def cost(self, costs: Costs) -> float:
        """Return the cost of a batch of samples of these costs."""
        return cost_of(costs, padding=self.padding)

    def in_batch(self, costs: Costs) -> list[float]:
        """Return what each sample costs in a batch of samples of these costs: with padding as much as the longest."""
        return [float(costs.max())] * len(costs) if self.padding and len(costs) else costs.tolist()


def cost_of(costs: Costs, *, padding: bool) -> float:
    """Return the cost of a batch of samples of these costs: with padding, as if all were the longest."""
    if not len(costs):
        return 0.0
    return float(costs.max() * len(costs) if padding else costs.sum())


@dataclass(frozen=True)
class Arrangement:
    """Form batches of similar lengths from the samples of several global batches."""

    lengths: Lengths
    accumulate: int = 1
    """Batches of one update, which are sorted together."""
    by_parts: bool = False
    """True if the batches of an update are cut together, whatever the number of samples of each."""
    pool: int = 1
    """Batches from which as many batches of similar lengths are formed, in random order."""
    budget: float | None = None
    """Cost of a global batch of which each rank fills its part from its own stream; None: the samples are counted."""

    @property
    def joins(self) -> bool:
        """True if batches are formed from samples of several ones of the order."""
        return self.accumulate > 1 or self.pool > 1

    def batches(self, order: Iterator[list[Any]], seed: int, skip: int) -> Iterator[list[Any] | Update | None]:
        """Return the global batches, or an update and None for each of its other batches, without ``skip`` samples.

        An update that was begun is returned whole, because its first gradients are lost.
        """
        batches = self._pooled(order, seed) if self.pool > 1 else order
        for group in _groups(batches, self.accumulate):
            if self.by_parts:
                samples = list(chain.from_iterable(group))
                if skip < len(samples):
                    yield Update(samples, len(group))
                    yield from [None] * (len(group) - 1)
                skip = max(0, skip - len(samples))
                continue
            for batch in self._sorted_together(group) if len(group) > 1 else group:
                if skip <= 0:
                    yield batch
                skip -= len(batch)

    def _pooled(self, order: Iterator[list[Any]], seed: int) -> Iterator[list[Any]]:
        for number, group in enumerate(_groups(order, self.pool)):
            formed = self._sorted_together(group)
            random.Random(f"{seed} {number}").shuffle(formed)  # noqa: S311  no secret
            yield from formed

    def _sorted_together(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Return batches of the same sizes, in which the samples descend in length."""
        samples = list(chain.from_iterable(batches))
        descending = iter(np.argsort(-self.lengths.of(samples), kind="stable").tolist())
        return [[samples[place] for place in islice(descending, len(batch))] for batch in batches]


def arrangement_of(
    lengths: Any,
    loader: Any,
    stream: str | None,
    padding: bool,
    accumulate: int,
    pool: int,
    budget: float | None,
    *,
    by_parts: bool,
) -> Arrangement | None:
    """Return what arranges a loader's samples by their lengths, None without; ValueError: if an argument is wrong."""
    for name, value in {"accumulate": accumulate, "pool": pool}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a number of global batches, 1 or more")
    if pool > 1 and (lengths is None or stream == "sharded"):
        raise ValueError(f"pool is {pool}; expected lengths of samples that all ranks read, or pool=1")
    if (budget is not None) != (stream == "sharded" and lengths is not None) or not (budget is None or budget > 0):
        raise ValueError(
            f'budget is {budget!r}; with stream="sharded" and lengths, expected the cost of a global batch, such as '
            "its number of tokens; else None"
        )
    if lengths is None:
        return None
    if stream is not None and (not callable(lengths) or own_iteration(loader) or loader.batch_size is None):
        raise ValueError(
            "lengths of a stream are those of its samples; expected a function from a sample to a number, such as "
            'lambda sample: len(sample["input_ids"]), and a torch DataLoader with a batch_size'
        )
    checked = Lengths(lengths, None if stream is not None else length_of(loader.dataset), padding=padding)
    together = 1 if stream == "sharded" else accumulate
    return Arrangement(checked, together, by_parts=by_parts and together > 1, pool=pool, budget=budget)


class Update(NamedTuple):
    """Samples of one update of the weights, to be cut into parts for several steps."""

    samples: list[Any]
    steps: int


def _groups(batches: Iterator[list[Any]], size: int) -> Iterator[list[list[Any]]]:
    while group := list(islice(batches, size)):
        yield group
