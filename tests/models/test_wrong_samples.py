"""Samples, labels and batches that a network or a loss cannot take: errors say what is wrong with which of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gangline
from gangline import Module, cpu

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


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"optimizer_params": {"learning_rat": 0.1}}, "learning_rate"),
        ({"eval_metric": "accurcy"}, "accuracy"),
        ({"initializer": "xaviar"}, "xavier"),
        ({"lr_scheduler": "cosin"}, "cosine"),
        ({"kvstore": "devce"}, "device"),
    ],
    ids=["argument", "metric", "initializer", "schedule", "store"],
)
def test_a_misspelt_name_is_corrected(options: dict[str, Any], word: str) -> None:
    module = Module(nn.Linear(16, 3), nn.CrossEntropyLoss(), cpu())
    with pytest.raises(ValueError, match=f"did you mean {word!r}"):
        module.fit(TensorDataset(DATA, LABELS), num_epoch=1, batch_size=4, **options)
    with pytest.raises(AttributeError) as raised:
        gangline.Modul  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("Modul", gangline)  # of which Python suggests the nearest


def test_metrics_are_found_by_all_their_names() -> None:
    module = Module(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), nn.CrossEntropyLoss(), cpu())
    stop = gangline.callback.EarlyStopping(1, "acc")
    module.fit((DATA, LABELS), (DATA, LABELS), num_epoch=3, batch_size=4, eval_end_callback=stop)
    assert 0 <= stop.best <= 1
