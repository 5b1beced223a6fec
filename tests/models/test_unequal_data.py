"""Data of `gangline.balance` that ranks must agree on, and global batches of another size."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import gangline
from gangline import Communicator, spawn
from gangline.models.data.same_data import describe_data
from tests.models.test_unequal_errors import check_refused
from tests.models.unequal_jobs import Listed, Stream, balanced, cut, epoch_of, flat, join


class Files(Dataset[Tensor]):
    """Reads files by name, in workers only."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("read in the main process")


class Augmented(Dataset[Tensor]):
    """Samples with random noise, from generators of every kind."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.handle: Any = None  # of a file, opened by the first reading

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        self.handle = "open"
        return torch.tensor([index, random.random(), np.random.rand(), self.generator.random()]) + torch.rand(1)


def agreement(comm: Communicator, path: str) -> None:
    join(comm, path)
    rank, numbers = comm.rank, torch.arange(32)
    random.seed(rank)
    whole = TensorDataset(numbers)

    def of(data: Any, **options: Any) -> Callable[[], object]:
        return lambda: balanced(DataLoader(data, batch_size=4, **options))

    files = Files([f"/data/{rank}/{number}.png" for number in range(rank, 32, 2)])
    own: dict[str, list[Callable[[], object]]] = {
        "the first sample of the data set on rank 1": [
            of(numbers[rank::2]),
            of(TensorDataset(numbers[rank::2]), num_workers=1),
            of([f"{n}.png" for n in range(rank, 32, 2)]),
            of([{"text": [n, n + 1], "label": 0} for n in range(rank, 32, 2)]),
            of(files, num_workers=1),
        ],
        "the set of the sampler's indices on rank 1": [
            of(whole, sampler=SubsetRandomSampler(range(rank, 32, 2))),
            of(whole, sampler=range(rank, 32, 2)),
            lambda: balanced(DataLoader(whole, batch_sampler=cut(range(rank, 32, 2), 4))),
        ],
        "the indices of Subset 0 on rank 1": [of(Subset(whole, range(rank, 32, 2)))],
    }
    for what, calls in own.items():
        for call in calls:
            check_refused(call, what, "give the whole data set", 'stream="sharded") if')

    halves: list[dict[str, Any]] = [
        {"sampler": Listed(range(rank, 32, 2))},  # of the user's own, without rank and num_replicas
        {"batch_sampler": Listed(cut(range(rank, 32, 2), 4))},
    ]
    for half in halves:
        loader = balanced(DataLoader(numbers, **half))
        check_refused(lambda: epoch_of(loader), "the sampler draws other samples on each rank")  # noqa: B023
    for both in (Listed(range(32)[:: 1 - 2 * rank]), Listed(range(rank, 31)), WeightedRandomSampler([1.0] * 32, 32)):
        epoch_of(balanced(DataLoader(numbers, batch_size=4, sampler=both)))

    def state() -> str:
        generator = augmented.generator.bit_generator.state
        return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(), generator))

    augmented = Augmented(rank)
    before = state()
    described = describe_data(DataLoader(augmented, batch_size=4))
    assert (state(), augmented.handle, described["the first sample of the data set"]) == (before, None, None)
    of(Files([f"/mount{rank}/{number}.png" for number in range(32)]), num_workers=1)()
    of(whole, sampler=SubsetRandomSampler(torch.randperm(32).tolist()))()  # in another order
    of(whole, shuffle=True)()
    of((1 + numbers) / (3 + rank * 1e-3))()  # decoded otherwise

    for loader in (
        DataLoader(numbers[rank::2], batch_size=4),
        DataLoader(numbers, batch_size=4, sampler=SubsetRandomSampler(range(rank, 32, 2))),
        DataLoader(numbers, batch_sampler=cut(range(rank, 32, 2), 4)),
    ):
        batches = epoch_of(balanced(loader, stream="sharded", global_batch=8))
        assert sorted(flat(batches)) == list(range(32))
        assert len(batches[0]) == 8
    filled = DataLoader(numbers, batch_size=4, sampler=range(rank, 32, 2), collate_fn=torch.stack)
    assert sorted(flat(epoch_of(balanced(filled, stream="sharded", lengths=lambda _: 1, budget=8)))) == list(range(32))
    dist.destroy_process_group()


def test_ranks_with_a_part_of_the_data_are_an_error_unless_they_say_so(tmp_path: Path) -> None:
    spawn(agreement, 2, str(tmp_path / "store"), threads=1)


def ramp(comm: Communicator, path: str) -> None:
    join(comm, path)
    everything = list(range(32))
    stream: DataLoader[Any] = DataLoader(Stream(everything, int), batch_size=4, drop_last=True)
    for loader in (
        balanced(DataLoader(torch.arange(32), batch_size=4)),
        balanced(DataLoader(torch.arange(32), batch_size=4, sampler=everything)),
        balanced(stream, stream="replicated"),
    ):
        for size, batches in ((10, 4), (16, 2)):
            loader.global_batch = size
            assert epoch_of(loader) == cut(everything, size)[: len(everything) // size if loader.drop_last else None]
            assert loader.global_batch == size
            if not isinstance(loader.dataset, Stream):
                assert len(loader) == batches
    loader = balanced(DataLoader(torch.arange(32), batch_size=4), max_share=[6, 4])

    def set_to(size: Any) -> None:
        loader.global_batch = size
        list(loader)

    check_refused(lambda: set_to(1), "global_batch is 1;", "at least one sample for each of 2 ranks")
    check_refused(lambda: set_to(16), "max_share is [6, 4], together 10 samples")
    check_refused(lambda: set_to(6 + comm.rank), "global batch is 6 on rank 0, but 7 on rank 1")
    loader = balanced(DataLoader(torch.arange(32), batch_sampler=cut(everything, 3)))
    check_refused(lambda: set_to(8), "the sampler decides the size of batches")
    ramp_within_an_epoch(comm.rank)
    resume_with_own_sampler(with_generator=False)
    resume_with_own_sampler(with_generator=True, lengths=[1] * 600, pool=2)
    dist.destroy_process_group()


def resume_with_own_sampler(*, with_generator: bool, **options: Any) -> None:
    """Leave an epoch in the middle; the sampler then draws what it had drawn, also behind the first message."""

    def made() -> gangline.BalancedLoader:
        generator = torch.Generator() if with_generator else None
        sampler = SubsetRandomSampler(range(5, 600), generator)
        return balanced(DataLoader(torch.arange(600), batch_size=2, sampler=sampler), **options)

    torch.manual_seed(7)
    loader = made()
    begun = epoch_of(loader, 140)
    state, loader = loader.state_dict(), made()
    torch.manual_seed(8)
    loader.load_state_dict(state)
    begun += epoch_of(loader, 3)
    loader.load_state_dict(loader.state_dict())
    assert sorted(flat(begun + epoch_of(loader))) == [*range(5, 600)]


def ramp_within_an_epoch(rank: int) -> None:
    numbers, wanted = torch.arange(32), [8, 8, 12, 4]
    parts = Stream(range(rank, 32, 2), int)

    def sizes(loader: gangline.BalancedLoader, samples: int = 12, stop: int = 0) -> list[int]:
        found = []
        for number, _ in enumerate(loader, 1):
            found.append(sum(loader.shares))
            if number == 2:
                loader.global_batch = samples
            if number == stop:
                break
        return found

    shuffled = DataLoader(numbers, batch_size=4, shuffle=True)
    for loader in (
        balanced(shuffled),
        balanced(DataLoader(numbers, batch_size=4, num_workers=2, shuffle=True, persistent_workers=True)),
        balanced(DataLoader(Stream(range(32), int), batch_size=4), stream="replicated"),
        balanced(
            DataLoader(Stream(range(32), int), batch_size=4),
            stream="replicated",
            lengths=lambda number: 1,
            padding=False,
        ),
        balanced(DataLoader(parts, batch_size=4), [1, 1], stream="sharded"),
        balanced(DataLoader(parts, batch_size=4), [1, 1], stream="sharded", accumulate=2, count=len),
    ):
        assert sizes(loader)[:3] == wanted[:3]
        assert sorted(flat(epoch_of(loader))) == list(range(32))
        loader.close()
    loader = balanced(shuffled)
    assert sizes(loader, stop=3) == [8, 8, 12]
    state, loader = loader.state_dict(), balanced(shuffled)
    loader.load_state_dict(state)
    assert [sum(loader.shares) for _ in loader] == [4]
    assert [sum(loader.shares) for _ in loader] == [12, 12, 8]
    check_refused(lambda: sizes(balanced(shuffled), 12 + 4 * rank), "the same global_batch")
    ones: dict[str, Any] = {"lengths": [1] * 32, "pool": 2}
    for refused in (balanced(shuffled, **ones), balanced(DataLoader(numbers, batch_size=4, sampler=range(32)))):
        check_refused(lambda: sizes(refused), "global_batch is set to 12 within an epoch")  # noqa: B023


def test_another_global_batch_takes_effect_with_the_next_batch_of_all_ranks(tmp_path: Path) -> None:
    spawn(ramp, 2, str(tmp_path / "store"), threads=1)


def messages(comm: Communicator, path: str) -> dict[str, int]:
    join(comm, path)
    found = {}
    for name, steps, options in (
        ("of batches", 1, {"loss_reduction": "normalized"}),
        ("of updates", 4, {"loss_reduction": "normalized"}),
        ("of updates in parts", 4, {"loss_reduction": "normalized", "lengths": range(64)}),
    ):
        model = DistributedDataParallel(nn.Linear(1, 1))
        loader = gangline.balance(model, DataLoader(torch.arange(64), batch_size=4), accumulate=steps, **options)
        gather, sent = loader._exchange.gather, []
        loader._exchange.gather = lambda *row: (sent.append(row), gather(*row))[1]  # type: ignore[method-assign]  # noqa: B023
        assert len(list(loader)) == 8
        found[name] = len(sent)
        if name == "of batches":
            check_refused(lambda: loader.mean(1.0), 'loss_reduction is "normalized"; expected "mean"')  # noqa: B023
        loader.close()
    wrong_losses(comm.rank)
    dist.destroy_process_group()
    return found


def wrong_losses(rank: int) -> None:
    loader = balanced(DataLoader(torch.arange(32), batch_size=4), accumulate=2, count=len)
    check_refused(lambda: loader.mean(1.0), "got 1 losses, and this update has trained 0 batches; expected the loss")
    for _ in loader:
        check_refused(lambda: loader.mean(torch.ones(2)), "mean() got a tensor of shape (2,); expected one number")
        check_refused(
            lambda: loader.mean(torch.ones(2 - rank)), "mean() got a tensor of shape (2,); expected one number"
        )
        check_refused(lambda: loader.mean([1.0] * 3), "got 3 losses, and this update has trained")
        check_refused(
            lambda: loader.mean([1.0] * (1 + rank)), "number of losses" if loader.ends_update else "got 2 losses"
        )
        check_refused(lambda: loader.mean([]), "got 0 losses")
        assert loader.mean(float(rank)) == 0.25
    model = DistributedDataParallel(nn.Linear(1, 1))
    loader = gangline.balance(model, DataLoader(torch.ones(16, 1), batch_size=4))
    for batch in loader:
        for part in loader.micro_batches(batch, 2):
            model(part).sum().backward()
            check_refused(lambda: loader.mean(1.0), "got the loss of a micro-batch")
    loader.close()
    left_in_update(model, rank)


def left_in_update(model: Any, rank: int) -> None:
    """Leave an update on one rank, end it on all by stop(), and continue in its middle."""
    options: dict[str, Any] = {"loss_reduction": "normalized", "accumulate": 4, "lengths": range(1, 65)}
    whole = DataLoader(torch.arange(64.0)[:, None], batch_size=4)
    with gangline.balance(model, whole, loads=[3, 1], **options) as loader:
        trained = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in loader:
                trained += 1
                if rank and trained == 2:
                    break
        assert trained == (2 if rank else 3)  # rank 0 asks for the last one
        trained = 0
        for _ in loader:
            trained += 1
            loader.stop()
        assert trained == 4
        for stop in (5, 1, 1):  # in the second update, which is trained again
            for number, _ in enumerate(loader, 1):
                trained = sum(loader.shares)
                if number == stop:
                    break
            assert loader.state_dict()["samples"] == 32 + trained
            loader.load_state_dict(loader.state_dict())
    few = gangline.balance(
        nn.BatchNorm1d(1), DataLoader(torch.ones(8, 1), batch_size=1), **{**options, "lengths": [1] * 8}
    )
    check_refused(lambda: list(few), "an update has 8 samples for 4 steps of shares of 2 samples")


def test_an_update_needs_two_messages(tmp_path: Path) -> None:
    """One before its first batch, with the counts of all, and one before the last, in which gradients are reduced."""
    counts = spawn(messages, 2, str(tmp_path / "store"), threads=1)[0]
    assert counts["of batches"] - counts["of updates"] == 8 - 2 * 2
    assert counts["of updates"] == counts["of updates in parts"]
