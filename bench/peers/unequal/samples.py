"""A rank that trains on texts of unequal length: under DistributedDataParallel, with a balanced loader, or alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from gangline.bench.peers.unequal.rank import join_ranks
from gangline.bench.workload.texts import (
    CausalModel,
    count_labels,
    padded,
    random_texts,
    text_lengths,
    train_steps,
)
from gangline.models.balance.balanced_loader import BalancedLoader
from gangline.models.balance.evaluation import balance
from gangline.models.rank_timer import RankTimer

_WORDS, WIDTH = 500, 128


def join() -> dict[str, Any]:
    """Join the group of the ranks."""
    return join_ranks(lambda rank, size: partial(_prepare, rank, size))


def _prepare(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Prepare a way to train: a step is an epoch.

    Args:
        rank: number of this rank.
        size: number of ranks.
        options: ``samples``, ``mean_length``, ``longest`` and ``equal`` describe the texts; ``batch_size`` is that of a
            rank. ``sampler`` is "random", a strategy of transformers' Trainer, or "sorted": alone, without
            communication. ``balanced`` has arguments of `gangline.balance` or is None; its ``lengths`` is True or
            absent. ``accumulate`` is the number of batches of an update. ``timed``: measure each step's own time.
    """
    lengths = text_lengths(options["samples"], options["mean_length"], options["longest"], equal=options["equal"])
    accumulate, balanced = options["accumulate"], options["balanced"]
    torch.manual_seed(0)
    network = CausalModel(_WORDS, WIDTH, 4, 256, 2)
    model = network if options["sampler"] == "sorted" else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: DataLoader[Any] | BalancedLoader = _loader(lengths, rank, size, options)
    if balanced is not None:
        if accumulate > 1:
            loss: dict[str, Any] = {"accumulate": accumulate, "loss_reduction": "normalized"}
        else:
            loss = {"count": count_labels}
        loader = balance(
            model, loader, **{**balanced, **loss, **({"lengths": _costs(lengths)} if "lengths" in balanced else {})}
        )
    timer = RankTimer([model]) if options["timed"] else None
    steps: list[dict[str, Any]] = []
    epochs = count()

    def train() -> None:
        steps.clear()
        epoch = next(epochs)
        owners: list[Any] = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        begin = time.perf_counter()
        for batch in train_steps(model, optimizer, _started(loader, timer), accumulate):
            end = time.perf_counter()
            step: dict[str, Any] = {"seconds": end - begin, "padded": batch.numel(), "real": int((batch >= 0).sum())}
            begin = end
            if timer is not None:
                timer.pause()
                own = timer.take()
                step["own"] = own.seconds() if own is not None else None
            steps.append(step)

    def report() -> dict[str, Any]:
        return {"steps": steps, "loads": loader.loads if isinstance(loader, BalancedLoader) else None}

    return {"step": train, "report": report}


def _started(loader: Any, timer: RankTimer | None) -> Iterator[Tensor]:
    for batch in loader:
        if timer is not None:
            timer.start()
        yield batch


def _costs(lengths: list[int]) -> list[float]:
    """Return the cost of each text, of which attention grows with the square of its tokens."""
    return [length + length**2 / (6 * WIDTH) for length in lengths]


def _loader(lengths: list[int], rank: int, size: int, options: dict[str, Any]) -> DataLoader[Any]:
    texts: Any = random_texts(lengths, _WORDS)
    name, batch_size, accumulate = options["sampler"], options["batch_size"], options["accumulate"]
    if name == "random":
        sampler: Any = DistributedSampler(texts, size, rank, seed=1)
        return DataLoader(texts, batch_size, sampler=sampler, collate_fn=padded)
    if name == "sorted":
        order: Any = sorted(range(len(lengths)), key=lengths.__getitem__)
        return DataLoader(texts, batch_sampler=_EveryRanksBatches(order, batch_size, rank, size), collate_fn=padded)
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
    except ImportError as error:
        raise ImportError(f'{error}; install it with: pip install "transformers>=5.23"') from None
    if name == "group_by_length":
        generator = torch.Generator().manual_seed(1)
        grouped = LengthGroupedSampler(batch_size * accumulate, lengths=lengths, generator=generator)
        batches: Any = _EveryRanksBatches(grouped, batch_size, rank, size)
    else:
        batches = BatchRebalanceSampler(lengths, batch_size * size * accumulate, size, accumulate, rank=rank)
    return DataLoader(texts, batch_sampler=batches, collate_fn=padded)


class _EveryRanksBatches(Sampler[list[int]]):
    """Every rank takes the next batch of one order in turn, as accelerate cuts a Trainer's sampler."""

    def __init__(self, order: Any, batch_size: int, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = BatchSampler(order, batch_size, drop_last=False), rank, size

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._batches), self._rank, None, self._size)
