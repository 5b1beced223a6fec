"""Data, samples and labels that a network or a loss cannot take: errors say what is wrong with which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from measure import same_bits
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import gangline
from gangline import Module, cpu
from gangline.cli.training import checks

DATA, LABELS = torch.zeros(8, 1, 4, 4), torch.arange(8) % 3
CONTEXTS = [cpu(0), cpu(1)]


class Items(Dataset[Any]):
    """A dataset of 8 items that a function makes."""

    def __init__(self, item: Callable[[int], Any], num_workers: int = 0) -> None:
        self._item, self.num_workers = item, num_workers

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self._item(index)


def fit(data: Any, loss: nn.Module | None = None) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    size = None if isinstance(data, DataLoader) else 4
    with Module(network, loss or nn.CrossEntropyLoss(), CONTEXTS) as module:
        module.fit(data, num_epoch=1, batch_size=size, shuffle=False, kvstore="local")


GOT = "the loss got the output (2, 3) of torch.float32, and the label "


@pytest.mark.parametrize(
    ("data", "notes"),
    [
        (
            (DATA[:, :, 1:], LABELS),
            [
                "raised in layer '1', Linear(in_features=16, out_features=3, bias=True)",
                "the network got (2, 1, 3, 4) of torch.float32, its share of the batch; its weights are torch.float32",
            ],
        ),
        (
            (DATA.double(), LABELS),
            ["the network got (2, 1, 4, 4) of torch.float64, its share of the batch; its weights are torch.float32"],
        ),
        ((DATA, LABELS.float()), [f"{GOT}(2,) of torch.float32", "expected int64 class numbers"]),
        ((DATA, LABELS + 2), [f"{GOT}(2,) of torch.int64", "label 3 of sample 1 of the share is not a class"]),
        ((DATA, LABELS[:, None]), [f"{GOT}(2, 1) of torch.int64"]),
        (
            DataLoader(Items(lambda index: {"image": DATA[index], "label": LABELS[index]}), 4),
            ["the data are a dict, whose values become arguments of forward() by their names, ['image', 'label']"],
        ),
    ],
    ids=["shape", "dtype", "float labels", "label out of range", "labels in a column", "dict with the label"],
)
def test_what_a_network_or_loss_cannot_take_is_described(data: Any, notes: list[str]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  what torch raises
        fit(data)
    found = "\n".join(raised.value.__notes__)
    for note in notes:
        assert note in found


def second_is_none(index: int) -> Any:
    return (DATA[index], 0) if index != 2 else None


@pytest.mark.parametrize(
    ("item", "num_workers", "message"),
    [
        (second_is_none, 0, r"sample 2 of the dataset is None, but sample 0 is \("),
        (second_is_none, 1, r"sample 2 of the dataset is None, but sample 0 is \("),
        (lambda index: None, 0, r"sample 0 of the dataset is None"),
        (
            lambda index: (DATA[index, :, index // 3 :], 0),
            0,
            r"sample 3 of the dataset is \(\(1, 3, 4\) of torch.float32, int\), but sample 0 is \(\(1, 4, 4\)",
        ),
    ],
    ids=["one is None", "read by a process", "all are None", "shapes differ"],
)
def test_a_sample_unlike_the_others_is_named(item: Callable[[int], Any], num_workers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(Items(item, num_workers))


def test_metrics_are_found_by_all_their_names() -> None:
    module = Module(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), nn.CrossEntropyLoss(), cpu())
    stop = gangline.callback.EarlyStopping(1, "acc")
    module.fit((DATA, LABELS), (DATA, LABELS), num_epoch=3, batch_size=4, eval_end_callback=stop)
    assert 0 <= stop.best <= 1


# Checks of data against a network before training; they change nothing


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it must not be read")


class Images(Dataset[Any]):
    """Dataset with random items, like augmented images."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3) + index, index


class Gaps(Images):
    """Dataset in which one sample is readable, the last, or none."""

    def __init__(self, readable: int = 4) -> None:
        self.readable = readable

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [(torch.full((3,), float(index)), index) for index in indices if index == self.readable]


class Outputs(nn.Module):
    """Return what a function returns for its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *data: torch.Tensor, **named: torch.Tensor) -> Any:
        return self.function(*data, **named)


def test_a_network_that_does_not_take_the_data_is_refused_and_the_check_leaves_no_trace() -> None:
    for output, message in (
        (lambda x: (x, x), "returns a tuple; expected a tensor"),
        (lambda x: x.squeeze(), r"returns \(3,\) for one sample; expected \(1, 2\)"),
        (lambda x: x.expand(4, 3), r"returns \(4, 3\) for one sample; expected \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            checks.check_fits(Outputs(output), torch.zeros(1, 3), 2)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Sequential(nn.Linear(4, 2)))
    network[3].eval()
    network.register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    numbers = torch.get_rng_state()
    checks.check_fits(network, torch.ones(1, 3), 2)
    with pytest.raises(ValueError, match=r"does not accept a batch of one sample, \(1, 9\) .*shapes cannot be mult"):
        checks.check_fits(network, torch.ones(1, 9), 2)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert [module.training for module in network.modules()] == modes
    assert same_bits(network.state_dict(), state)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_samples_that_a_dataset_passes_over_are_not_the_first() -> None:
    for data in (Gaps(), Subset(Gaps(), [1, 4]), DataLoader(Gaps(), batch_size=2)):
        assert torch.equal(checks.first_sample(data), torch.full((1, 3), 4.0))
    with pytest.raises(ValueError, match="have no readable sample"):
        checks.first_sample(Gaps(-1))


def test_a_first_sample_leaves_the_order_of_the_others_as_it_was() -> None:
    batches = []
    for looks in (False, True):
        torch.manual_seed(5)
        loader = DataLoader(Images(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
        if looks:
            assert checks.first_sample(loader).shape == (1, 3)
            assert checks.first_sample(Images()).shape == (1, 3)
        batches.append(torch.cat([data for data, _ in loader]))
    assert torch.equal(*batches)


KINDS_OF_LABELS: list[Any] = [
    (torch.tensor([0, -100, 2, 3]), None),
    (torch.tensor([0, 1, 2, 3], dtype=torch.uint8), None),
    (torch.full((4, 4), 0.25), None),
    (torch.tensor([0, 4, 2, 9]), r"label 4 of sample 1 of the data is not a class; expected 0 to 3 \(2 out of range\)"),
    (torch.tensor([0, 1, -1, 3]), "label -1 of sample 2 of the data is not a class"),
    (torch.tensor([[0, 1], [2, 7], [1, 1], [1, 1]]), "label 7 of sample 1 of the data is not a class"),
    (torch.zeros(4), r"labels of the data are torch.float32 of shape \(4,\); expected int64 class numbers, or"),
    (torch.zeros(4, 3), r"of shape \(4, 3\); expected int64 class numbers, or probabilities of shape \(samples, 4"),
    (torch.tensor([0, 1, 2, 3], dtype=torch.int32), "are torch.int32; expected torch.int64"),
]


def test_labels_that_are_no_classes_are_named() -> None:
    for labels, message in KINDS_OF_LABELS:
        for data in ((torch.zeros(4, 3), labels.numpy()), TensorDataset(torch.zeros(4, 3), labels)):
            if message is None:
                checks.check_labels(data, 4)
            else:
                with pytest.raises(ValueError, match=message):
                    checks.check_labels(data, 4)
    checks.check_labels(Stream(), 2)
    checks.check_labels((torch.zeros(2, 3), {"class": torch.tensor([5, 6])}), 2)
