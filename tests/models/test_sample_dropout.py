"""random="sample": dropout that does not depend on the number of contexts."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gangline import Module, cpu
from gangline.models.sample_dropout import ReplicaDropout, SampleDropout


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop2d = nn.Conv2d(1, 6, 3), nn.Dropout2d(0.3)
        self.wide, self.drop = nn.Linear(6 * 36, 32), nn.Dropout(0.5)
        self.last = nn.Linear(32, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.drop2d(self.conv(images).tanh()).flatten(1)
        features = self.drop(self.wide(features).tanh())
        logits: torch.Tensor = self.last(F.dropout(features, 0.2, self.training))
        return logits


def test_masks_keep_the_given_share_and_differ_between_samples_calls_and_steps() -> None:
    ones = torch.ones(64, 1000, dtype=torch.float64)
    with SampleDropout(7, 0, 64):
        first, second = F.dropout(ones, 0.3), F.dropout(ones, 0.3)
    with SampleDropout(8, 0, 64):
        third = F.dropout(ones, 0.3)
    for masked in (first, second, third):
        kept = (masked > 0).double()
        assert kept.mean().item() == pytest.approx(0.7, abs=0.006)  # 4 standard errors
        assert masked.sum().item() == pytest.approx(kept.sum().item() / 0.7)
        assert torch.corrcoef(kept).fill_diagonal_(0).abs().max() < 0.18  # 5.7 standard errors of 2016 pairs
        assert torch.corrcoef(kept.T[:200]).fill_diagonal_(0).abs().max() < 0.65
    for one, other in ((first, second), (first, third), (second, third)):
        agree = ((one > 0) == (other > 0)).double().mean().item()
        assert agree == pytest.approx(0.58, abs=0.008)  # 0.7 * 0.7 + 0.3 * 0.3


def test_parts_of_a_batch_have_the_masks_of_the_whole() -> None:
    ones = torch.ones(10, 4, 3)
    with SampleDropout(3, 0, 10):
        whole = F.dropout(ones, 0.5), F.dropout1d(ones, 0.5)
    for begin, end in ((0, 4), (4, 5), (5, 10)):
        with SampleDropout(3, begin, end - begin):
            part = F.dropout(ones[begin:end], 0.5), F.dropout1d(ones[begin:end], 0.5)
        for own, all_of in zip(part, whole, strict=True):
            assert torch.equal(own, all_of[begin:end])


def test_whole_channels_are_dropped_and_in_place_writes_to_the_input() -> None:
    ones = torch.ones(8, 16, 5, 5)
    with SampleDropout(3, 0, 8):
        dropped = F.dropout2d(ones, 0.5)
        given = ones.clone()
        assert F.dropout(given, 0.5, inplace=True) is given
        assert torch.equal(F.dropout(ones, 1.0), torch.zeros_like(ones))
        assert F.dropout(ones, 0.5, training=False) is ones
    assert set(dropped.flatten(2).mean(2).unique().tolist()) == {0.0, 2.0}
    assert set(given.unique().tolist()) == {0.0, 2.0}


def test_the_first_axis_may_be_samples_times_heads_but_nothing_else() -> None:
    ones = torch.ones(6, 50)
    with SampleDropout(3, 0, 3):
        whole = F.dropout(ones, 0.5)
    with SampleDropout(3, 1, 2):
        assert torch.equal(F.dropout(ones[2:], 0.5), whole[2:])
        with pytest.raises(ValueError, match=r"shape \(5, 2\) for 2 samples; random='sample' needs the samples"):
            F.dropout(torch.ones(5, 2), 0.5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1, 2)
        logits: torch.Tensor = self.last(self.attention(rows, rows, rows)[0].mean(1))
        return logits


class Checkpointed(Network):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        given = images.clone().requires_grad_()  # which reentrant checkpointing needs
        return checkpoint(super().forward, given, use_reentrant=True)  # type: ignore[no-any-return]


BATCH = torch.ones(8, 1, 8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("network", "message"),
    [(Attention, "draws random numbers other than by dropout"), (Checkpointed, "activation checkpointing")],
)
def test_random_layers_other_than_dropout_and_recomputed_dropout_are_refused(
    network: type[nn.Module], message: str
) -> None:
    with Module(network().double(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)], random="sample") as module:
        module.init_optimizer("local", "sgd")
        with pytest.raises(RuntimeError, match=message):
            module.forward_backward_update(*BATCH)
    gc.collect()  # torch 2.11 leaves its hooks in place until the forward that failed is collected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_replicas_own_generator_gives_the_numbers_of_torchs(dtype: torch.dtype) -> None:
    def drawn() -> list[torch.Tensor]:
        ones = torch.ones(4, 6, 5, 3, dtype=dtype)
        wide = ones.to(memory_format=torch.channels_last)
        masked = [F.dropout(ones, 0.3), F.dropout(wide, 0.5), F.dropout2d(ones, 0.4), F.dropout1d(ones[0], 0.4)]
        return [*masked, F.dropout(ones, 1.0), F.dropout(ones.clone(), 0.1, inplace=True), nn.Dropout(0.7)(ones)]

    torch.manual_seed(11)
    expected, state = drawn(), torch.get_rng_state()
    with ReplicaDropout(11, torch.device("cpu")):
        assert all(torch.equal(own, theirs) for own, theirs in zip(drawn(), expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


class Meeting(nn.Module):
    """Layer in which the replicas of a step wait for one another, if requested."""

    barrier: threading.Barrier | None = None

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if Meeting.barrier is not None:
            Meeting.barrier.wait(20)  # seconds after which the test has failed
        return data


def test_contexts_that_share_a_generator_draw_dropout_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(2))
    with Module(nn.Sequential(Meeting(), Network()).double(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("local", "sgd", {"learning_rate": 0.1})
        for _ in range(3):
            module.forward_backward_update(*BATCH)


@pytest.mark.parametrize("network", [Attention, Checkpointed])
def test_contexts_that_share_a_generator_are_refused_other_random_numbers(network: type[nn.Module]) -> None:
    with Module(network().double(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("local", "sgd")
        before = module.get_params()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="from a generator that its contexts share; start"):
                module.forward_backward_update(*BATCH)
        assert all(torch.equal(one, before[name]) for name, one in module.get_params().items())
    gc.collect()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here")
def test_masks_on_a_gpu_are_those_of_the_host() -> None:
    masks = []
    for device in ("cpu", "cuda"):
        with SampleDropout(7, 3, 16):
            masks.append(F.dropout(torch.ones(16, 100, device=device), 0.4).cpu())
    assert torch.equal(*masks)
