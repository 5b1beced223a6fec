"""Sparse and compressed gradients through Module: values, and costs that grow with the rows used."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from measure import contexts, distance, labelled, mlp, replicas_are_equal, same_bits, step_of
from torch import nn

from gangline import Module, cpu
from gangline.kvstore import create
from tests.kvstore.test_sparse import Elements

ROWS, WIDTH, LENGTH, CLASSES = 12, 5, 3, 4
PADDING = 2
Batch = tuple[Any, torch.Tensor]


def test_a_table_that_forward_renormalises_needs_a_context_without_a_store() -> None:
    network = nn.Sequential(nn.Embedding(10, 3, max_norm=0.5), nn.Flatten(), nn.Linear(6, 2))
    module = Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)])
    with module, pytest.raises(ValueError, match=r"layer '0' has max_norm=0\.5: its forward changes weights"):
        module.init_optimizer("local", "sgd", {"lr": 0.1})
    with Module(network, nn.CrossEntropyLoss(), cpu(0)) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1})
        module.forward_backward_update(torch.randint(10, (4, 2)), torch.randint(2, (4,)))


class Asked(nn.Module):
    """Network that looks up its table for flagged samples only, and not at all if there are none."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.always = nn.Embedding(ROWS, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, flagged: torch.Tensor) -> torch.Tensor:
        hidden = self.always(words).mean(1)
        if bool(flagged.any()):
            found = self.table.weight[words[flagged]] if self.whole else self.table(words[flagged])
            hidden = hidden.index_add(0, flagged.nonzero().flatten(), found.mean(1))
        elif self.whole:
            hidden = hidden + self.table(words).mean(1) * 0.0
        output: torch.Tensor = self.last(hidden.tanh())
        return output


@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("whole", [False, True])
def test_replicas_whose_gradient_is_missing_or_of_another_kind_do_not_matter(store: str, whole: bool) -> None:
    """With ``whole`` the gradient of a flagged share is dense; those of others are row-sparse."""
    torch.manual_seed(0)
    network = Asked(whole=whole).double()
    reference = copy.deepcopy(network)
    plain = torch.optim.SGD(reference.parameters(), lr=0.2)
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1), cpu(2)]) as module:
        module.init_optimizer(store, "sgd", {"lr": 0.2})
        for step in range(9):
            words, label = torch.randint(ROWS, (9, LENGTH)), torch.randint(CLASSES, (9,))
            flagged = (torch.arange(9) // 3 == step % 4) & torch.tensor([True, False, True] * 3)  # of one share, or no
            module.forward_backward_update({"words": words, "flagged": flagged}, label)
            replicas_are_equal(module)
            plain.zero_grad()
            nn.functional.cross_entropy(reference(words, flagged), label).backward()
            plain.step()
        assert distance(module.get_params(), reference.state_dict()) <= 1e-11


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [("sgd", {"lr": 0.1, "momentum": 0.9}), ("adam", {"lr": 0.02}), ("adagrad", {"lr": 0.05})],
)
def test_a_share_of_padding_only_and_a_batch_of_it_change_nothing(optimizer: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with Module(TablesPadded(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", optimizer, {"wd": 0.01, **arguments})
        words = torch.full((4, LENGTH), PADDING)
        before = module.get_params()
        module.forward_backward_update(words, torch.zeros(4, dtype=torch.long))
        assert same_bits(before, module.get_params())
        words[0] = 7
        module.forward_backward_update(words, torch.zeros(4, dtype=torch.long))
        replicas_are_equal(module)
        changed = (module.get_params()["table.weight"] != before["table.weight"]).any(1)
        assert changed.nonzero().flatten().tolist() == [7]


class TablesPadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, CLASSES, PADDING, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.table(words).sum(1)
        return output


VOCABULARY, WIDE = 1_000_000, 8


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.zeros(VOCABULARY, WIDE), freeze=False, sparse=True)
        self.last = nn.Linear(WIDE, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.table(words).mean(1))
        return output


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(VOCABULARY, (16, LENGTH), generator=generator)
    words[:, 0] = torch.arange(16)  # in every batch
    return words, torch.randint(CLASSES, (16,), generator=generator)


@pytest.mark.parametrize(("optimizer", "loads"), [("sgd", [1]), ("adam", [3, 1])])
def test_the_cost_of_a_step_grows_with_the_rows_used_not_with_the_table(optimizer: str, loads: list[float]) -> None:
    named: set[int] = set()
    with (
        create("device") as store,
        Module(Wide(), nn.CrossEntropyLoss(), [cpu(index) for index in range(len(loads))], loads) as module,
    ):
        module.init_optimizer(store, optimizer, {"lr": 0.5 if optimizer == "sgd" else 0.01})
        for step in range(5):
            words, label = batch(step)
            named |= set(words.flatten().tolist())
            module.forward_backward(words, label)
            for replica in module.bound.replicas.all:
                gradient = replica.network.get_parameter("table.weight").grad
                assert gradient is not None
                assert gradient._values().numel() <= 16 * LENGTH * WIDE
            with Elements() as counted:  # all in this thread
                module.update()
            if step >= 2:  # the first step creates state, then buckets
                assert 0 < counted.most <= 2 * 16 * LENGTH * WIDE
        for replica in module.bound.replicas.all:
            table = replica.network.get_parameter("table.weight").detach()
            assert set(table.any(1).nonzero().flatten().tolist()) == named


# Compression: each replica sends its share of the mean over the global batch


FEATURES = 6
TWO_BITS: dict[str, Any] = {"type": "2bit", "threshold": 0.03}
perceptron = partial(mlp, FEATURES, 16, CLASSES, seed=3, dtype=torch.float32)


def test_one_context_alone_warns_that_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    data, label = labelled(8, FEATURES, CLASSES)
    found = []
    for params in (TWO_BITS, None):
        with Module(perceptron(), nn.CrossEntropyLoss(), cpu(), compression_params=params) as module:
            caplog.clear()
            with caplog.at_level(logging.WARNING, "gangline"):
                module.init_optimizer("device", "sgd", {"lr": 0.1})
            module.forward_backward_update(data, label)
            assert module.compression_residuals() == {}
            found.append(module.get_params())
            said = ["a single context sends no gradients, so compression_params has no effect"]
            assert caplog.messages == (said if params else [])
    assert same_bits(*found)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_nan_gradient_is_an_error_by_key_and_changes_neither_its_step_nor_the_next(
    early: bool, steps_before: int
) -> None:
    """No buckets exist before the first step; later ones may be pushed while backward runs."""
    data, label = labelled(8, FEATURES, CLASSES)
    bad = data.clone()
    bad[6] = float("nan")  # of the second replica
    found = []
    for refused in (True, False):
        with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2), compression_params=TWO_BITS) as module:
            module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
            for _ in range(steps_before):
                step_of(module, early, data, label)
            for spoilt in (bad, data * float("nan")) if refused else ():
                before = module.get_params(), module.optimizer_state().tensors, module.compression_residuals()
                with pytest.raises(ValueError, match=r"the gradient of key '[02]\.(weight|bias)' holds NaN"):
                    step_of(module, early, spoilt, label)
                after = module.get_params(), module.optimizer_state().tensors, module.compression_residuals()
                for ours, theirs in zip(after, before, strict=True):  # residuals may be new, and are 0 then
                    assert all(torch.equal(theirs.get(n, torch.zeros_like(v)), v) for n, v in ours.items())
            for _ in range(3):
                step_of(module, early, data, label)
            found.append(module.get_params())
    assert same_bits(*found)
