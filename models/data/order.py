"""Order: the batches of all ranks or workers together, as indices of the data set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice, starmap, zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from gangline.collectives.errors import MismatchError
from gangline.models.data.batches import length_of
from gangline.models.data.loaders import sampler_of, sampling_generator
from gangline.models.random_streams import host_states, host_states_kept, set_host_states

_CHUNK = 64  # global batches whose indices one message carries
_COMPARED = 4096  # samples of a data set of which ranks compare whether their samplers draw them
_HASH, _BITS = 2654435761, 0xFFFFFFFF  # samples are compared whose index times the first has low bits of a small number


T = TypeVar("T")


class Exchange:
    """Messages between the ranks, one of which may draw for all; here there is one."""

    rank, size = 0, 1

    def all_gather(self, data: Any) -> list[Any]:
        """Return every rank's data in rank order. Collective."""
        return [data]

    def all_gather_results(self, call: Callable[[], T], doing: str) -> list[T]:  # noqa: ARG002  of several ranks
        """Run a function on every rank and return all results; ``doing`` names it in errors. Collective."""
        return [call()]


class Order:
    """Order of the samples of all ranks in an epoch, drawn by the sampler of a loader over a map-style data set.

    Every rank repeats a sampler that is sequential, random by seed, or a DistributedSampler. Of other samplers rank 0's
    draws for all ranks or, if each draws its rank's part, those of all ranks. The lists of a batch sampler of the
    user's own are not cut: a global batch is one from each rank, or as many from rank 0.
    """

    rank_lengths: Sequence[int | None] = ()
    """Lengths of all ranks, if each draws its own part."""
    random: Mapping[str, Any] = {}
    """States of the host's and the sampler's generators when the epoch began, if this rank draws for others."""

    def __init__(self, loader: DataLoader[Any], exchange: Exchange, global_batch: int | None = None) -> None:
        """Check the loader; ValueError if it cannot be cut to global batches of this size, None: its own."""
        batches: Any = loader.batch_sampler
        if batches is None:
            raise ValueError(
                "the DataLoader has batch_size=None, so its samples are not collated into batches that can be "
                "cut; expected a batch_size or a batch_sampler"
            )
        sampler: Any = sampler_of(loader)
        self._sampler, self._exchange, self._lists = sampler, exchange, batches
        self._drop_last = bool(getattr(batches, "drop_last", False))
        is_plain = type(batches) is BatchSampler  # not a user's class, which may group samples itself
        self.is_repeated = is_plain and type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
        owners = (sampler, batches, getattr(batches, "sampler", None))
        self.of_all_ranks = not self.is_repeated and any(map(_knows_ranks, owners))
        self._is_cut = is_plain and not self.of_all_ranks
        samples, batch_size = global_batch if is_plain else None, getattr(batches, "batch_size", None)
        self.size = check_global_batch(samples, exchange.size, batch_size or 1)
        if self._is_cut:
            self._lists = BatchSampler(sampler, batches.batch_size, False)
        elif global_batch is not None:
            raise ValueError(
                f"global_batch is {global_batch}, but the {type(sampler if is_plain else batches).__name__} decides "
                "the size of batches; leave global_batch out"
            )
        self._generator = sampling_generator(loader)
        self._samples = length_of(loader.dataset)  # None, once the samples that ranks draw have been compared

    def resize(self, size: int) -> None:
        """Set the samples of a global batch, for iterations that begin later; ValueError if the sampler decides."""
        if not self._is_cut:
            raise ValueError(f"global_batch is set to {size}, but the sampler decides the size of batches")
        self.size = size

    @property
    def length(self) -> int | None:
        """Number of global batches of an epoch; None: unknown."""
        if self.rank_lengths:
            return None if None in self.rank_lengths else max(length or 0 for length in self.rank_lengths)
        if self._is_cut:
            count, size = self._count(), self.size
        else:
            count, size = length_of(self._lists), 1 if self.of_all_ranks else self._exchange.size
        return None if count is None else count // size if self._drop_last else -(-count // size)

    @property
    def settings(self) -> dict[str, Any]:
        """Values that must be the same on all ranks."""
        if not self.is_repeated:
            return {} if self.of_all_ranks else {"the number of batches": self.length}
        names = ("replacement", "shuffle", "seed", "num_replicas")
        return {
            "the number of samples": self._count(),
            **{f"the sampler's {name}": getattr(self._sampler, name) for name in names if hasattr(self._sampler, name)},
        }

    def batches(self, seed: int, skip: int, *, is_whole: bool = False, as_lists: bool = True) -> Iterator[Any]:
        """Return the global batches of an epoch shuffled by ``seed``, after ``skip`` samples. Collective.

        They are lists; without ``as_lists`` slices of a tensor or range if the whole order is known. Samples that were
        drawn before `random` was saved are drawn again from it. With ``is_whole`` the skipped ones are returned too.
        """
        lists, skip = self._drawn_lists(skip), 0 if is_whole else skip
        if not self._is_cut:
            of_ranks: Any = BatchSampler(_skipped(lists, skip), self._exchange.size, self._drop_last)  # type: ignore[arg-type]
            return (list(chain.from_iterable(one_of_each_rank)) for one_of_each_rank in of_ranks)
        indices, size = self._indices(seed) if self.is_repeated else chain.from_iterable(lists), self.size
        if isinstance(indices, Iterator):
            return iter(BatchSampler(islice(indices, skip, None), size, self._drop_last))
        end = len(indices) - (len(indices) - skip) % size * self._drop_last
        slices = map(slice, range(skip, end, size), range(skip + size, end + size, size))
        batches = map(indices.__getitem__, slices)  # no frame of Python for each
        as_list: Any = Tensor.tolist if isinstance(indices, Tensor) else list
        return map(as_list, batches) if as_lists else batches

    def _indices(self, seed: int) -> Tensor | range | Iterator[int]:
        sampler: Any = self._sampler
        if isinstance(sampler, SequentialSampler):
            return range(len(sampler))
        if isinstance(sampler, RandomSampler):
            sampler = copy.copy(sampler)
            sampler.generator = torch.Generator().manual_seed(seed)
            if not sampler.replacement and len(sampler) == len(sampler.data_source):
                return torch.randperm(len(sampler), generator=sampler.generator, device="cpu")
            return chain(sampler)
        # The indices of all ranks, without padding.
        whole: Any = DistributedSampler(sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed)
        whole.set_epoch(sampler.epoch)
        return islice(whole, self._count())

    def _count(self) -> int | None:
        """Return the number of samples of an epoch; None: unknown."""
        sampler: Any = self._sampler
        is_distributed = isinstance(sampler, DistributedSampler)
        return min(len(sampler.dataset), sampler.total_size) if is_distributed else length_of(sampler)

    def _drawn_lists(self, skip: int) -> Iterator[Sequence[Any]]:
        """Return the lists of samplers in the order of training. Collective, a chunk at a time."""
        reads = self.of_all_ranks or not self._exchange.rank
        own = chain(self._lists)  # `read` opens it, whose errors reach all ranks
        count = _CHUNK if self.of_all_ranks else _CHUNK * self._exchange.size
        if not skip:
            self.random = host_states(self._generator) if reads else {}
        states = dict(self.random)  # until the samples after the skipped ones are drawn
        drawn: set[int] = set()  # some of the samples, the same on all ranks if all draw all
        part = 0.0 if self.of_all_ranks or not self._samples else _COMPARED / self._samples

        def read() -> tuple[list[Any] | Tensor, list[int]]:
            nonlocal skip
            is_repeated = skip > 0  # as before the run was resumed; the loop's own draws are not
            with host_states_kept() if is_repeated else nullcontext():
                if is_repeated and states:  # only ranks that draw for others have saved them
                    set_host_states(states, self._generator)
                lists = [list(each) for each in islice(own, count)]
                states.update(host_states(self._generator) if is_repeated else {})
            indices = list(chain.from_iterable(lists))
            skip -= len(indices) * (self._exchange.size if self.of_all_ranks else 1)
            is_plain = all(isinstance(index, int | np.integer) for index in indices)  # a tensor is read much faster
            packed = torch.tensor(indices, dtype=torch.int64, device="cpu") if is_plain else indices
            if part and isinstance(packed, Tensor):
                drawn.update(packed[(packed * _HASH & _BITS) <= part * _BITS].tolist())
            return (packed, [len(each) for each in lists]) if reads else ([], [])

        while any(found := [*starmap(_cut, self._exchange.all_gather_results(read, "reading the order of samples"))]):
            yield from chain.from_iterable(zip_longest(*found, fillvalue=[])) if self.of_all_ranks else found[0]
        if part:
            self._compare(drawn)

    def _compare(self, drawn: set[int]) -> None:
        """Raise MismatchError, on all ranks, if each rank's sampler has drawn its own part of the data. Collective."""
        all_samples, self._samples = min(_COMPARED, self._samples or 0), None  # once
        of_ranks = [*map(set, self._exchange.all_gather(list(drawn)))]
        drawn_by_any = set().union(*of_ranks)
        is_in_parts = all(of_ranks) and sum(map(len, of_ranks)) == len(drawn_by_any)
        if is_in_parts and 2 * len(drawn_by_any) > all_samples > 1 and self._exchange.size > 1:
            raise MismatchError(
                "balance: the sampler draws other samples on each rank, and only those of rank 0 were trained; "
                "expected one that draws all samples on each rank or, if it draws the part of its rank, has attributes "
                "rank and num_replicas"
            )


def _cut(indices: list[Any] | Tensor, lengths: list[int]) -> list[Sequence[Any]]:
    flat = iter(indices.tolist() if isinstance(indices, Tensor) else indices)
    return [list(islice(flat, length)) for length in lengths]


def check_global_batch(global_batch: int | None, ranks: int, batch_size: int) -> int:
    """Return the number of samples of a global batch; ValueError if it is below one for each rank."""
    if global_batch is None:
        return batch_size * ranks
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < ranks:
        raise ValueError(
            f"global_batch is {global_batch!r}; expected an int with at least one sample for each of {ranks} ranks"
        )
    return global_batch


def _knows_ranks(sampler: object) -> bool:
    """Check for the attributes of distributed samplers of torch, MMEngine and Detectron2."""
    ranks, sizes = ("rank", "_rank"), ("num_replicas", "world_size", "_world_size")
    return any(hasattr(sampler, name) for name in ranks) and any(hasattr(sampler, name) for name in sizes)


def _skipped(lists: Iterator[Sequence[Any]], samples: int) -> Iterator[Sequence[Any]]:
    """Skip lists until ``samples`` samples are skipped."""
    for each in lists:
        if samples <= 0:
            yield each
        samples -= len(each)
