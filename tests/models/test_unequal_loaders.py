"""Loaders of `gangline.balance`: samplers, workers and streams, cut over the ranks of real torch.distributed jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from measure import distance, mlp, plain_loop
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

import gangline
from gangline import Communicator, spawn
from tests.models.unequal_jobs import Batches, Listed, Numbers, Stream, balanced, cut, epoch_of, flat, gathered, join


class Endless(Sampler[int]):
    """Draws without end; it has no length."""

    def __iter__(self) -> Iterator[int]:
        return (number % 37 for number in count())


class OfEachRank(BatchSampler):
    """Batches of a DistributedSampler, as a class of the user's."""


def own_samplers(comm: Communicator, path: str) -> None:
    join(comm, path)
    rank, data, everything = comm.rank, Numbers(37), list(range(37))

    loader = balanced(DataLoader(data, batch_size=4))
    assert len(loader) == 5
    assert epoch_of(loader) == cut(everything, 8)
    assert loader.epoch == 1
    assert [len(batch) for batch in DataLoader(data, batch_size=4)] == [4] * 9 + [1]

    loader = balanced(DataLoader(data, batch_size=4, drop_last=True))
    assert len(loader) == 4
    assert epoch_of(loader) == cut(everything, 8)[:4]

    with pytest.raises(ValueError, match="together 6 samples; expected the global batch of 8"):
        balanced(DataLoader(data, batch_size=4), max_share=[3, 3])
    limited = balanced(
        DataLoader(data, batch_size=4), max_share=[3, 3], lengths=[0.5] * 37
    )  # of length, not of samples
    assert sorted(flat(epoch_of(limited))) == everything

    loader = balanced(DataLoader(data, batch_size=4), global_batch=10)
    assert (len(loader), loader.global_batch) == (4, 10)
    assert epoch_of(loader) == cut(everything, 10)

    for generator in (None, torch.Generator().manual_seed(rank)):
        loader = balanced(DataLoader(data, batch_size=4, shuffle=True, generator=generator))
        first, second = epoch_of(loader), epoch_of(loader)
        assert sorted(flat(first)) == sorted(flat(second)) == everything
        assert first != second
        assert first != cut(everything, 8)

    loader = balanced(DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=50)))
    drawn = flat(epoch_of(loader))
    assert len(drawn) == 50
    assert len(loader) == 7
    assert set(drawn) < set(everything)
    order = everything[::-1] if not rank else everything
    loader = balanced(DataLoader(data, batch_size=4, sampler=Listed(order)))
    assert epoch_of(loader) == cut(everything[::-1], 8)
    assert len(loader) == 5
    loader = balanced(DataLoader(data, batch_size=4, sampler=Listed(order), drop_last=True), global_batch=9)
    assert epoch_of(loader) == cut(everything[::-1], 9)[:4]
    loader = balanced(DataLoader(data, batch_size=4, sampler=Endless()))
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert epoch_of(loader, 700)[-1] == [number % 37 for number in range(699 * 8, 700 * 8)]
    assert epoch_of(loader, 1) == [list(range(8))]
    dist.destroy_process_group()


def samplers_of_ranks(comm: Communicator, path: str) -> None:
    join(comm, path)
    rank, data, everything = comm.rank, Numbers(37), list(range(37))

    for shuffle in (True, False):
        sampler: Any = DistributedSampler(data, shuffle=shuffle, seed=7)
        user = DataLoader(data, batch_size=4, sampler=sampler)
        loader = balanced(user)
        first = epoch_of(loader)
        assert sorted(flat(first)) == everything  # torch's own order has one sample twice
        assert flat(gathered([int(n) for batch in user for n in batch[:, 0]])) != everything
        assert len(loader) == 5
        loader.set_epoch(1)
        second = epoch_of(loader)
        assert sampler.epoch == 1
        assert (second == first) != shuffle
        sampler.set_epoch(0)
        assert epoch_of(loader) == first

    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    loader = balanced(DataLoader(data, batch_size=4, sampler=sampler, drop_last=True))
    assert epoch_of(loader) == cut(everything, 8)[:4]
    loader = balanced(DataLoader(data, batch_size=4, sampler=sampler))
    assert flat(epoch_of(loader)) == everything[:36]

    # Batches of one length each: a global batch is as many lists as there are ranks.
    lists = [list(range(begin, begin + size)) for begin, size in ((0, 3), (3, 5), (8, 1), (9, 4), (13, 2))]
    loader = balanced(DataLoader(data, batch_sampler=Listed(lists if not rank else lists[::-1])))
    assert epoch_of(loader) == [list(range(8)), list(range(8, 13)), [13, 14]]
    loader = balanced(DataLoader(data, batch_sampler=BatchSampler(Listed(everything), 4, drop_last=True)))
    assert (len(loader), loader.global_batch) == (4, 8)
    assert epoch_of(loader) == cut(everything, 8)[:4]
    loader = balanced(DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data), 4, drop_last=False)))
    loader.set_epoch(3)
    first = epoch_of(loader)
    assert sorted(flat(first)) == everything
    loader.set_epoch(4)
    assert epoch_of(loader) != first

    # Samplers and batch samplers that draw a part for each rank, the last one only by its sampler.
    loader = balanced(DataLoader(data, batch_size=4, sampler=Listed(everything, rank, 2)))
    assert epoch_of(loader)[0] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert epoch_of(loader)[-1] == [32, 34, 36, 33, 35]
    assert len(loader) == 5
    loader = balanced(DataLoader(data, batch_sampler=Listed(cut(everything, 4), rank, 2)))
    assert epoch_of(loader) == cut(everything, 8)
    loader = balanced(DataLoader(data, batch_sampler=Listed(cut(everything, 4)[:9], rank, 2)))
    assert len(loader) == len(epoch_of(loader)) == 5  # rank 1 has 4 lists
    loader = balanced(DataLoader(data, batch_sampler=OfEachRank(DistributedSampler(data, shuffle=False), 4, False)))
    assert sorted(set(flat(epoch_of(loader)))) == everything

    # A last global batch that is smaller than the number of ranks.
    loader = balanced(DataLoader(Numbers(9), batch_size=4))
    parts = [(loader.samples, loader.weight, batch[:, 0].tolist()) for batch in loader]
    assert parts[-1] == ((1, 2.0, [8]), (0, 0.0, [8]))[rank]
    assert flat(epoch_of(loader)) == list(range(9))

    # A second loader for the model: one that only evaluates, or one after the first is closed.
    model = nn.Linear(1, 1)
    train = gangline.balance(model, DataLoader(data, batch_size=4), loads=[3, 1])
    other = gangline.balance(model, DataLoader(data, batch_size=2), loads=[1, 1], loss_reduction="normalized")
    steps = iter(train)
    next(steps)
    assert epoch_of(other) == cut(everything, 4)
    assert train.samples == (6, 2)[rank]
    assert len(list(steps)) == 4
    train.close()
    again = gangline.balance(model, DataLoader(data, batch_size=2), loads=[3, 1])
    assert epoch_of(again) == cut(everything, 4)

    # Breaking out of an epoch; then an iteration that another one has replaced.
    assert epoch_of(again, 3) == cut(everything, 4)[:3]
    assert epoch_of(again) == cut(everything, 4)
    steps = iter(again)
    next(steps)
    next(iter(again))
    with pytest.raises(RuntimeError, match="newer iteration"):
        next(steps)
    dist.destroy_process_group()


def init_worker(worker: int) -> None:
    torch.manual_seed(1000 + worker)


class SlowFirst(Numbers):
    """The first worker is behind the second."""

    def __getitem__(self, index: int) -> Tensor:
        if index < 6:
            torch.mm(torch.ones(400, 400), torch.ones(400, 400))
        return super().__getitem__(index)


def workers(comm: Communicator, path: str) -> None:
    join(comm, path)
    rank, everything = comm.rank, list(range(150))
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}

    loader = balanced(DataLoader(Numbers(150), batch_size=1, shuffle=True, **options))
    for _ in range(2):
        assert sorted(flat(epoch_of(loader))) == everything
    assert len(epoch_of(loader, 4)) == 4  # left in the middle, with batches in flight
    assert sorted(flat(epoch_of(loader))) == everything
    seeds = {(int(worker), int(seed)) for batch in loader for _, worker, seed in batch}
    assert {worker for worker, _ in seeds} == {0, 1}
    assert len({seed for _, seed in seeds}) == 2
    del loader

    # Ranks that read ahead differently, with an order that comes from rank 0 in several messages.
    own: dict[str, Any] = options if not rank else {}
    user: DataLoader[Any] = DataLoader(
        Numbers(150), batch_size=1, sampler=Listed(everything[::-1]), worker_init_fn=init_worker, **own
    )
    loader = balanced(user)
    assert epoch_of(loader) == cut(everything[::-1], 2)
    assert {int(row[2]) for batch in loader for row in batch} == ({1000, 1001} if not rank else {rank})
    del loader

    loader = balanced(DataLoader(SlowFirst(40), batch_size=4, num_workers=2, in_order=False))
    assert epoch_of(loader) == cut(range(40), 8)
    dist.destroy_process_group()


@pytest.mark.parametrize("cases", [own_samplers, samplers_of_ranks, workers])
def test_map_style(cases: Callable[..., None], tmp_path: Path) -> None:
    spawn(cases, 2, str(tmp_path / "store"), threads=1)


def sample(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(6, dtype=torch.float64, generator=generator),
        "more": (number % 3, {"number": number}),
        "name": f"sample {number}",
    }


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self._numbers)


network = partial(mlp, 6, 8, 3, seed=3)


def train_stream(numbers: Sequence[int], stream: Any, steps: int, **options: Any) -> Batches:
    """Train some steps on a stream, and the same global batches in one process; return the batches."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    user: DataLoader[Any] = DataLoader(Stream(numbers, sample), batch_size=4, **options)
    loader = gangline.balance(model, user, loads=[3, 1], stream=stream)
    found = []
    for batch in islice(loader, steps):
        labels, extra = batch["more"]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), labels).backward()
        optimizer.step()
        assert batch["name"] == [f"sample {number}" for number in extra["number"]]
        found.append(gathered((extra["number"][: loader.samples].tolist(), loader.weight)))
        assert found[-1][dist.get_rank()][1] == loader.samples * 2 / sum(len(numbers) for numbers, _ in found[-1])
    batches = [[number for numbers, _ in parts for number in numbers] for parts in found]
    joined = []
    for numbers in batches:
        samples = [sample(number) for number in numbers]
        features, classes = [one["x"] for one in samples], [one["more"][0] for one in samples]
        joined.append((torch.stack(features), torch.tensor(classes)))
    assert distance(model.module.state_dict(), plain_loop(network(), joined, lr=0.2, momentum=0.9)) < 1e-11
    return batches


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Named(dict[str, Any]):
    """A mapping of the user's."""


def lists_of_tensors(samples: Sequence[int]) -> tuple[Any, ...]:
    """Return images of unequal size and their boxes, as detection does."""
    return tuple(torch.full((3, 2 + n % 3), n) for n in samples), tuple({"boxes": torch.zeros(n % 4)} for n in samples)


def streams(comm: Communicator, path: str) -> None:
    join(comm, path)
    rank = comm.rank

    own = list(range(120)) if not rank else list(range(1000, 1023))
    batches = train_stream(own, "sharded", 30)
    assert batches[:2] == [[0, 1, 2, 3, 4, 5, 1000, 1001], [6, 7, 8, 9, 10, 11, 1002, 1003]]
    assert len(batches) == 20  # 6 a step of the longer stream; the other one ends after 12
    assert sorted(flat(batches)) == [*range(120), *range(1000, 1023)]
    drops = DataLoader(Stream(own, int), batch_size=4, drop_last=True)
    assert len(epoch_of(balanced(drops, stream="sharded"))) == 10  # rank 1's loader drops 3 samples of 23
    assert len(train_stream(own, "sharded", 3)) == 3

    numbers = list(range(163))
    assert train_stream(numbers, "replicated", 30) == cut(numbers, 8)
    loader = balanced(DataLoader(SizedStream(numbers, int), batch_size=4, drop_last=True), stream="replicated")
    for _ in range(2):
        assert epoch_of(loader) == cut(numbers, 8)[:20]
    assert len(loader) == 20
    loader = balanced(DataLoader(SizedStream(numbers, int), batch_size=4), stream="replicated", global_batch=9)
    assert len(loader) == len(epoch_of(loader)) == 19  # the last one has 1 sample for 2 ranks
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    loader = balanced(DataLoader(Stream(own, int), batch_size=4, **options), stream="sharded")
    for _ in range(2):
        assert sorted(flat(epoch_of(loader))) == [*range(120), *range(1000, 1023)]
    del loader

    # Batches that the data set makes itself, of sizes of its own; a namedtuple, an array, a mapping, None.
    def whole(number: int) -> Any:
        part = torch.arange(5) + 5 * number
        return Named(a=numpy.asarray(part), b=Pair(part, part), c=None, d=[str(n) for n in part.tolist()])

    parts = []
    loader = balanced(DataLoader(Stream(range(5), whole), batch_size=None), stream="replicated", global_batch=7)
    for batch in loader:
        assert type(batch) is Named
        assert batch["c"] is None
        assert batch["a"].tolist() == batch["b"].second.tolist() == [int(text) for text in batch["d"]]
        parts.append(batch["a"][: loader.samples].tolist())
    assert [n for of_rank in zip(*gathered(parts), strict=True) for n in flat(list(of_rank))] == list(range(25))

    # An epoch that was left goes on behind the samples that were trained, also in the middle of a batch.
    numbers = DataLoader(Stream(range(26), lambda number: torch.tensor([number])), batch_size=4)
    first = balanced(numbers, stream="replicated", global_batch=6)
    assert epoch_of(first, 2) == cut(range(26), 6)[:2]
    again = balanced(numbers, stream="replicated", global_batch=6)
    again.load_state_dict(first.state_dict())
    assert epoch_of(again) == cut(range(26), 6)[2:]

    # Batches with as many parts as samples.
    for size in (1, 2, 3):
        for kind in ("replicated", "sharded"):
            triples = Stream(range(23), lambda n: (torch.tensor([n]), n, str(n)))
            taken = []
            for first, second, third in balanced(DataLoader(triples, batch_size=size), loads=[3, 1], stream=kind):
                assert first.flatten().tolist() == second.tolist() == [int(text) for text in third]
                taken += second.tolist()
            found = {number for of_rank in gathered(taken) for number in of_rank}
            assert found == set(range(23))

    # Lists with a tensor for each sample are cut between samples, also in a last batch that is smaller.
    detection: DataLoader[Any] = DataLoader(Stream(range(14), int), batch_size=4, collate_fn=lists_of_tensors)
    seen = []
    for images, targets in balanced(detection, stream="replicated"):
        assert len(images) == len(targets)
        assert all(image.shape[1] == 2 + int(image[0, 0]) % 3 for image in images)
        seen.append([int(image[0, 0]) for image in images])
    assert [n for parts in zip(*gathered(seen), strict=True) for n in flat(list(parts))] == list(range(14))
    dist.destroy_process_group()


def test_streams(tmp_path: Path) -> None:
    spawn(streams, 2, str(tmp_path / "store"), threads=1)
