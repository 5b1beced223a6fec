"""Splitting of a batch over contexts, workers or ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction


def check_work_load_list(work_load_list: Sequence[float] | None, count: int) -> list[float]:
    """Return the checked loads of ``count`` contexts; equal loads for None.

    Raises:
        TypeError: if the loads are not a sequence of numbers.
        ValueError: if the length is wrong, a load is negative or not finite, or all are zero.
    """
    if work_load_list is None:
        return [1] * count
    return _checked(work_load_list, count)


def _checked(work_load_list: Sequence[float], count: int | None = None) -> list[float]:
    if isinstance(work_load_list, (str, bytes)) or not isinstance(work_load_list, Sequence):
        raise TypeError(f"work_load_list is {work_load_list!r}; expected one number per context, such as [3, 1]")
    loads = list(work_load_list)
    if count is not None and len(loads) != count:
        entries = "1 entry" if len(loads) == 1 else f"{len(loads)} entries"
        raise ValueError(f"work_load_list has {entries} for {count} context{'s' * (count != 1)}")
    for index, load in enumerate(loads):
        if isinstance(load, bool) or not isinstance(load, (int, float)):
            raise TypeError(f"work_load_list[{index}] is {load!r}; expected a number")
        if not math.isfinite(load) or load < 0:
            raise ValueError(f"work_load_list[{index}] is {load!r}; expected a finite number, 0 or more")
    if not any(loads):
        raise ValueError(f"work_load_list is {loads}; expected at least one load above 0")
    return loads


def split_batch(batch_size: int, work_load_list: Sequence[float], minimum: int = 1) -> list[slice]:
    """Split a batch over contexts, in order and without gaps.

    Quotas are exact fractions of the loads as printed, rounded by largest remainder (ties to the larger load, then the
    lower index). Then contexts that have a load but fewer than ``minimum`` samples get more from the fullest context. A
    batch that is too small for that goes to the contexts with the largest loads. An idle context (load 0) gets an empty
    slice.

    Args:
        batch_size: samples in the batch, at least 1.
        work_load_list: one load per context, as accepted by `check_work_load_list`.
        minimum: smallest share that is not empty; a smaller batch is one share.

    Raises:
        ValueError: if ``batch_size`` is below 1 or the loads are invalid.
        TypeError: if a type is wrong.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size is {batch_size!r}; expected an int")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
    counts = split_within(batch_size, work_load_list, None, minimum)
    return [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]


def split_within(
    batch_size: int, loads: Sequence[float], caps: Sequence[int | None] | None = None, minimum: int = 1
) -> list[int]:
    """Split as `split_batch` and return the sizes; samples beyond a share's cap go to the others by load.

    Args:
        batch_size: samples in the batch, at least 1.
        loads: one load per share.
        caps: maximum of each share; None: no limit. If all caps together are below ``batch_size``, they are scaled up.
        minimum: smallest share that is not empty.
    """
    return list(_sizes(batch_size, tuple(_checked(loads)), tuple(caps or [None] * len(loads)), minimum))


@functools.lru_cache  # batches of an epoch have one or two sizes, and fractions take 40 us
def _sizes(batch_size: int, loads: tuple[float, ...], caps: tuple[int | None, ...], minimum: int) -> tuple[int, ...]:
    limits, free, counts = holding(caps, batch_size), [_exact(load) for load in loads], [0] * len(loads)
    while True:
        left = batch_size - sum(counts)
        wanted = _counts(left, free, minimum) if left and any(free) else [0] * len(counts)
        full = [index for index, cap in enumerate(limits) if cap is not None and wanted[index] > cap]
        for index in full or range(len(counts)):
            counts[index] += (limits[index] or 0) if full else wanted[index]
            free[index] = Fraction(0)
        if not full:
            return tuple(counts)


def holding(caps: Sequence[int | None], batch_size: int) -> list[int | None]:
    """Return the caps, scaled up in proportion if their sum is below ``batch_size``."""
    known = [cap for cap in caps if cap is not None]
    if len(known) < len(caps) or sum(known) >= batch_size:
        return list(caps)
    return list(_counts(batch_size, [Fraction(cap) for cap in known], 1))


def _counts(batch_size: int, loads: list[Fraction], minimum: int) -> list[int]:
    able = max(1, batch_size // minimum)
    if sum(map(bool, loads)) > able:
        largest = sorted(range(len(loads)), key=lambda index: (-loads[index], index))[:able]
        loads = [load if index in largest else Fraction(0) for index, load in enumerate(loads)]
    counts = _largest_remainder(batch_size, loads)
    while short := [index for index, load in enumerate(loads) if load and counts[index] < min(minimum, batch_size)]:
        fullest = max(range(len(counts)), key=lambda index: (counts[index], -loads[index], index))
        counts[fullest] -= 1
        counts[max(short, key=lambda index: (loads[index], -index))] += 1
    return counts


def _exact(load: float) -> Fraction:
    """Return the load as printed: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(load) if isinstance(load, int) else Fraction(repr(float(load)))


def _largest_remainder(total: int, loads: list[Fraction]) -> list[int]:
    whole = sum(loads)
    quotas = [total * load / whole for load in loads]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(loads)), key=lambda i: (counts[i] - quotas[i], -loads[i], i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
