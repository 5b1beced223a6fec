"""Check that ranks have the same data: where one holds a part of its own, the rest of it would never be read."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, SubsetRandomSampler, TensorDataset

from gangline.collectives.errors import MismatchError
from gangline.models.random_streams import host_states_kept

_VALUES = 64  # that are compared of each array, and arrays of each sample
_TOLERANCE = 0.05  # relative; decoders of images differ between machines
_IN_MEMORY = (TensorDataset, Tensor, np.ndarray, list)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

Described = list[str | list[float]]


def describe_data(loader: Any) -> dict[str, Described | None]:
    """Describe the data of a DataLoader by values that ranks compare; None: unknown. No random numbers are drawn."""
    found: dict[str, Described | None] = {}
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        found[f"the indices of Subset {len(found)}"] = _checksum(dataset.indices)
        dataset = dataset.dataset
    sampler = loader.batch_sampler if isinstance(loader.batch_sampler, Sequence) else loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        sampler = sampler.indices
    found["the set of the sampler's indices"] = (
        _checksum(sampler, is_set=True) if isinstance(sampler, Sequence | Tensor | np.ndarray) else None
    )
    found["the first sample of the data set"] = None
    with suppress(Exception):  # data of another kind, such as with names for indices
        if not loader.num_workers or isinstance(dataset, _IN_MEMORY):
            found["the first sample of the data set"] = _first_sample(loader.dataset)
        else:  # it may open files, which must be opened in the workers
            lists = [value for value in vars(dataset).values() if isinstance(value, list)]
            firsts = [value[0] for value in lists if len(value) == len(dataset)]
            found["the first sample of the data set"] = [text for text in _described(firsts) if isinstance(text, str)]
    return found


def check_same_data(of_ranks: Sequence[Mapping[str, Described | None]]) -> None:
    """Raise MismatchError if a rank has other data than rank 0."""
    for what, first in of_ranks[0].items():
        for rank, described in enumerate(of_ranks):
            if _differ(first, described.get(what)):
                raise MismatchError(
                    f"balance: {what} on rank {rank} is not that of rank 0. Samples are numbered alike on all ranks, "
                    "so a part of them would never be read; give the whole data set, and the same sampler, on all "
                    'ranks, or write balance(..., stream="sharded") if each rank reads samples of its own'
                )


def _first_sample(dataset: Any) -> Described | None:
    """Describe the first sample, read from a copy; None if it is random."""
    dataset = _copied(dataset) if isinstance(dataset, Dataset) else dataset
    readings = []
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices), host_states_kept():
        for seed in (1, 2):
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed GPUs used later
            np.random.seed(seed)
            random.seed(seed)
            readings.append(_described(dataset[0]))
    return readings[0] if readings[0] == readings[1] else None


def _copied(dataset: Any) -> Any:
    """Copy a data set and its random generators, but not its data."""
    copied = copy.copy(dataset)
    for name, value in list(vars(copied).items()):
        if isinstance(value, _GENERATORS):
            vars(copied)[name] = copy.deepcopy(value)
        elif isinstance(value, Dataset):
            vars(copied)[name] = _copied(value)
    return copied


def _described(sample: Any) -> Described:
    """Return texts, and some values of tensors, arrays and numbers; the rest is left out."""
    if isinstance(sample, str):
        return [sample.rsplit("/", 1)[-1]]  # of a path, which may be elsewhere on other machines
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, list | tuple) and not all(isinstance(each, int | float) for each in sample):
        return list(chain.from_iterable(map(_described, sample)))[:_VALUES]
    values = sample.detach().cpu().double().numpy() if isinstance(sample, Tensor) else np.asarray(sample)
    if values.dtype.kind not in "biuf":
        return []
    flat = values.reshape(-1)
    return [flat[:: 1 + len(flat) // _VALUES].astype(np.float64).tolist()]


def _differ(first: Described | None, other: Described | None) -> bool:
    if first is None or other is None:
        return False
    return len(first) != len(other) or any(map(_values_differ, first, other))


def _values_differ(first: str | list[float], other: str | list[float]) -> bool:
    if isinstance(first, str) or isinstance(other, str) or len(first) != len(other):
        return first != other
    values = np.array([first, other])
    return bool(np.ptp(values, axis=0).max(initial=0.0) > _TOLERANCE * np.abs(values).max(initial=0.0))


def _checksum(indices: Any, *, is_set: bool = False) -> Described | None:
    """Return a checksum of indices, or of lists of them; None if they are no numbers."""
    try:
        indices = indices.tolist() if isinstance(indices, Tensor | np.ndarray) else indices
        flat = list(chain.from_iterable(each if isinstance(each, list | tuple) else [each] for each in indices))
        values = np.asarray(flat, dtype=np.int64)
    except (TypeError, ValueError):
        return None
    return [str(zlib.crc32((np.sort(values) if is_set else values).tobytes()))]
