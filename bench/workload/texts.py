"""Texts of unequal length, and a causal language model that trains on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

PADDING = -100
"""Token that fills a batch's shorter texts; no loss counts it."""
_SIGMA = 1.0  # of the logarithms of the lengths
_SHORTEST = 8  # tokens


def text_lengths(count: int, mean: float, longest: int, *, equal: bool = False) -> list[int]:
    """Return lognormal numbers of tokens around a mean, clipped to 8 and ``longest``; or the mean for each text."""
    if equal:
        return [round(mean)] * count
    normal = torch.randn(count, generator=torch.Generator().manual_seed(0))
    lengths = torch.exp(_SIGMA * normal + math.log(mean) - _SIGMA**2 / 2)
    return [int(length) for length in lengths.round().clamp(_SHORTEST, longest)]


def random_texts(lengths: Sequence[int], words: int) -> list[Tensor]:
    """Return texts of these lengths, random tokens below ``words``."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(words, (length,), generator=generator) for length in lengths]


def padded(texts: Sequence[Tensor]) -> Tensor:
    """Collate texts: pad each to the longest."""
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=PADDING)


def count_labels(batch: Tensor) -> Tensor:
    """Return the number of tokens that a model predicts in a batch."""
    return (batch[:, 1:] != PADDING).sum()


class CausalModel(nn.Module):
    """Transformer that predicts each next token; real tokens attend to no padding, which follows them."""

    def __init__(self, words: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, hidden, 0.0, batch_first=True)
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (texts, tokens) to (texts, tokens, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        out: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return out


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Tensor],
    accumulate: int = 1,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Train an epoch; yield each batch when its step is complete.

    The loss is the mean over a batch's labels. With ``accumulate`` it is the mean over the labels of all ranks in so
    many batches: gradients are those of sums, divided before the optimizer's step.
    """
    counted = torch.zeros((), dtype=torch.int64)
    for number, batch in enumerate(loader, 1):
        tokens = batch if device is None else batch.to(device, non_blocking=True)
        is_last = number % accumulate == 0
        with nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            with torch.autocast(tokens.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(tokens[:, :-1].clamp(0))
                reduction = "mean" if accumulate == 1 else "sum"
                labels = tokens[:, 1:].flatten()
                loss = cross_entropy(logits.flatten(0, 1), labels, ignore_index=PADDING, reduction=reduction)
            loss.backward()  # type: ignore[no-untyped-call]
        counted += count_labels(batch)
        if is_last:
            if accumulate > 1:
                dist.all_reduce(counted)
                factor = dist.get_world_size() / int(counted)  # DistributedDataParallel has divided by the world size
                torch._foreach_mul_([one.grad for one in model.parameters() if one.grad is not None], factor)
            optimizer.step()
            optimizer.zero_grad()
            counted.zero_()
        yield batch
