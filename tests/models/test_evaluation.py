"""Evaluation on unequal ranks: each sample once, in the order of the data set, and a training that is not disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import gangline
from gangline import Communicator, spawn
from gangline.models.balance.evaluation import without_empty_shares
from tests.models.test_unequal_errors import check_refused
from tests.models.test_unequal_ranks import weights, wrapped
from tests.models.unequal_jobs import Listed, Numbers, Stream, flat, gathered, join

SAMPLES, CLASSES = 41, 3
FEATURES = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(FEATURES, LABELS, torch.arange(SAMPLES))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def check(model: nn.Module, loader: Any, order: list[int], mode: Any = torch.no_grad) -> list[list[int]]:
    """Evaluate; compare outputs and metrics with one process; return each rank's numbers of samples."""
    was_training, alone = model.training, network().eval()
    alone.load_state_dict(weights(model))
    model.eval()
    mean, accuracy = MeanMetric().set_dtype(torch.float64), MulticlassAccuracy(CLASSES, average="micro")
    outputs, numbers, own, shares = [], [], [], []
    with mode():
        for features, labels, number in loader:
            assert loader.samples == len(number) > 0
            rows = model(features)
            outputs.append(gangline.gather_rows(rows))
            numbers += gangline.gather_rows(number).tolist()
            own += number.tolist()
            shares.append(len(number))
            mean.update(nn.functional.cross_entropy(rows, labels, reduction="none"))
            accuracy.update(rows, labels)
    model.train(was_training)
    of_ranks = gathered(shares)
    assert len({len(each) for each in of_ranks}) == 1
    assert sorted(flat(gathered(own))) == sorted(order)
    assert numbers == order
    with torch.no_grad():
        expected, labels = alone(FEATURES[order]), LABELS[order]
        assert (torch.cat(outputs) - expected).abs().max() < 1e-11
        assert abs(mean.compute() - nn.functional.cross_entropy(expected, labels)) < 1e-11
        assert accuracy.compute() == (expected.argmax(1) == labels).float().mean()
    return of_ranks


def evaluate(comm: Communicator, path: str, engine: str) -> None:
    join(comm, path, "gangline")
    size = comm.size
    loads = [3.0, *[1.0] * (size - 1)]
    plain = list(range(SAMPLES))

    def train(evaluates: bool) -> dict[str, Tensor]:
        model = wrapped(engine, gangline.convert_sync_batchnorm(network()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_data = TensorDataset(FEATURES[: 8 * size + 2], LABELS[: 8 * size + 2])  # a third rank gets none at last
        with gangline.balance(model, DataLoader(train_data, 4), loads=loads) as loader:
            kept = loader.evaluation(DataLoader(DATA, 5))
            for step, (features, labels) in enumerate(loader):
                outputs = model(features)
                if evaluates:
                    before = (loader.weight, loader.samples, loader.shares)
                    shares = check(model, kept, plain)
                    assert shares[0][0] == round(5 * size * 3 / (size + 2))
                    check(model, loader.evaluation(DataLoader(DATA, 4), loads=[1] * size), plain, torch.inference_mode)
                    by_cost = loader.evaluation(DataLoader(DATA, 6), lengths=[1 + 7 * n % 20 for n in plain])
                    check(model, by_cost, plain, nullcontext if step else torch.no_grad)
                    next(iter(kept))  # a loop that ends early
                    assert before == (loader.weight, loader.samples, loader.shares)
                    assert len(gangline.gather_rows(labels)) == sum(loader.shares)
                nn.functional.cross_entropy(outputs, labels).backward()
                if evaluates:
                    check(model, kept, plain)
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    disturbed, alone = train(True), train(False)
    assert all(torch.equal(value, alone[name]) for name, value in disturbed.items())

    # Without a training, and other orders.
    model = wrapped(engine, gangline.convert_sync_batchnorm(network()))
    for batch_size in (1, 2, 5, SAMPLES):
        check(model, gangline.balance(None, DataLoader(DATA, batch_size), loads=loads), plain)
    sampler: Any = DistributedSampler(DATA, seed=3)
    sampler.set_epoch(2)
    whole: Any = DistributedSampler(DATA, 1, 0, seed=3)
    whole.set_epoch(2)
    check(model, gangline.balance(None, DataLoader(DATA, 4, sampler=sampler)), list(whole))
    lists = [plain[begin : begin + 3] for begin in range(0, SAMPLES, 3)]
    check(model, gangline.balance(None, DataLoader(DATA, batch_sampler=Listed(lists))), plain)
    shuffled = gangline.balance(None, DataLoader(DATA, 4, shuffle=True), loads=loads, max_share=[6] * size)
    orders = [flat([number.tolist() for *_, number in shuffled]) for _ in range(2)]
    assert orders[0] != orders[1]
    assert all(sorted(flat(gathered(each))) == plain for each in orders)


@pytest.mark.parametrize(("engine", "size"), [("ddp", 2), ("fsdp2", 2), ("ddp", 3)])
def test_each_sample_once_in_order(engine: str, size: int, tmp_path: Path) -> None:
    spawn(evaluate, size, str(tmp_path / "store"), engine, threads=1)


def speeds(comm: Communicator, path: str) -> None:
    join(comm, path, "gangline")
    model = DistributedDataParallel(nn.Linear(1, 1))
    loader = gangline.balance(model, DataLoader(Numbers(8), 2))
    numbers: DataLoader[Any] = DataLoader(Numbers(120), 4)
    next(iter(loader))
    loader._balance.set_loads([1.5, 0.5])
    evaluation = loader.evaluation(numbers)
    assert evaluation.loads == [1.5, 0.5]
    timer, own = loader._balance.timer, evaluation._balance.timer
    assert timer is not None
    assert own is not None
    timer.start()
    for batch in evaluation:
        assert not timer.pause()  # evaluation is no time of the training
        assert own.pause()
        own.resume()
        time.sleep(0.012 * len(batch) * (1 + 2 * (1 - comm.rank)))
    assert timer.pause()
    assert evaluation.loads[1] > 1.5 * evaluation.loads[0]
    assert loader.loads == [1.5, 0.5]
    assert loader.evaluation(numbers).loads == evaluation.loads
    loader.close()
    alone = gangline.balance(None, numbers)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert alone.loads == [1, 1]
    alone.close()


def test_shares_follow_the_time_of_forward(tmp_path: Path) -> None:
    spawn(speeds, 2, str(tmp_path / "store"), threads=1)


def refusals(comm: Communicator, path: str) -> None:
    join(comm, path, "gangline")
    rank = comm.rank
    model = DistributedDataParallel(nn.Linear(1, 1))
    loader = gangline.balance(model, DataLoader(Numbers(20), 2), loads=[3, 1])

    def of(user: Any, **options: Any) -> Callable[[], object]:
        return lambda: list(loader.evaluation(user, **options))

    plain: DataLoader[Any] = DataLoader(Numbers(20), 2)
    stream: DataLoader[Any] = DataLoader(Stream(range(20), torch.tensor), 2)
    for user, name in ((Numbers(20), "Numbers"), (loader, "BalancedLoader"), (stream, "DataLoader of a Stream")):
        check_refused(of(user), f"evaluation is of a {name}", "; expected a torch DataLoader over a map-style data set")
    check_refused(of(DataLoader(Numbers(1), 2)), "there are 1 samples for 2 ranks; expected one for each rank")
    check_refused(of(DataLoader(Numbers(20 + rank), 2)), "length of the data set is 20 on rank 0, but 21 on rank 1")
    check_refused(of(plain, loads=[3, 0]), "loads is [3, 0]; expected a number above 0 for each of 2 ranks")
    check_refused(
        of(plain, count=len),
        "evaluation has no option 'count'; expected loads, global_batch, max_share, lengths, padding",
    )
    check_refused(of(plain, lengths=[1]), "lengths has 1 numbers for the 20 samples")
    check_refused(of(DataLoader(Numbers(20), None)), "batch_size=None")
    check_refused(of(plain, group=None), "evaluation has no option 'group'")
    check_refused(lambda: gangline.balance(None, stream, stream="replicated"), "evaluation has no option 'stream'")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for batch in gangline.balance(None, plain):
            model(batch[:, :1].float()).sum().backward()
            optimizer.step()

    check_refused(train, "the SGD of the DistributedDataParallel of Linear steps in a batch of evaluation")
    next(iter(loader.evaluation(plain)))
    optimizer.step()  # after evaluation
    kept, steps = loader.evaluation(plain), iter(loader)
    model(next(steps)[:, :1].float()).sum().backward()
    check_refused(lambda: next(steps) if rank else list(kept), "rank 0 begins an epoch that others have not ended")
    loader.close()
    check_refused(lambda: list(kept), "the balanced loader is closed")
    check_refused(of(plain), "closed")
    loader = gangline.balance(model, plain)
    check_refused(lambda: list(loader) if rank else list(loader.evaluation(plain)), "ranks are at different calls")


def test_wrong_uses_are_errors_on_all_ranks(tmp_path: Path) -> None:
    spawn(refusals, 2, str(tmp_path / "store"), threads=1)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 60))
def test_global_batches_have_a_sample_for_each_rank(ranks: int, more: int, samples: int) -> None:
    size, numbers = ranks + more, list(range(samples))
    cut = [numbers[begin : begin + size] for begin in range(0, samples, size)]
    if 0 < samples < ranks:
        with pytest.raises(ValueError, match=f"there are {samples} samples for {ranks} ranks"):
            list(without_empty_shares(iter(cut), ranks))
        return
    found = list(without_empty_shares(iter(cut), ranks))
    assert flat(found) == numbers
    assert all(ranks <= len(batch) for batch in found)
    assert all(len(batch) <= size for batch in found) or size < 2 * ranks
    assert len(found) == len(cut) or size < 2 * ranks
