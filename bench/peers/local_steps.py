"""A worker that trains on digits or characters, with gradients averaged in each step or with `gangline.LocalSteps`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gangline
from gangline.bench.workload.texts import CausalModel
from gangline.models.data.datasets import digits

_CHARACTERS = 64  # of a text
_HELD_OUT = 0.1
_PREPARED = 3  # calls that `serve.py` makes before it measures
_VALIDATED = 64  # texts

Task = tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Generator], tuple[Tensor, Tensor]], Callable[[], float]]


def join() -> dict[str, Any]:
    """Join torch's process group with BENCH_BACKEND, else a store."""
    torch.set_num_threads(1)
    if backend := os.environ.get("BENCH_BACKEND"):
        dist.init_process_group(backend)
        rank, size, store = dist.get_rank(), dist.get_world_size(), None
        ends: dict[str, Any] = {"barrier": dist.barrier, "leave": dist.destroy_process_group}
    else:
        store = gangline.kvstore.create("auto")
        rank, size = store.rank, store.num_workers
        ends = {"barrier": store.barrier, "leave": store.close}
    return {"who": "gangline", "rank": rank, "size": size, "prepare": partial(prepare, rank, store), **ends}


def prepare(rank: int, store: gangline.KVStore | None, options: dict[str, Any]) -> dict[str, Any]:
    """Prepare training; a step of the bench is all of it, from the fourth on: `serve.py` makes three to prepare.

    Args:
        rank: this worker's rank.
        store: for `LocalSteps`; None: DistributedDataParallel.
        options: ``task`` ("digits" or "text"), ``batch_size`` of a worker, ``options`` of `LocalSteps`, ``steps`` of
            each worker, ``delays``: for each worker, factor of its time by which it is late.
    """
    torch.manual_seed(0)
    model, optimizer, batch, score = {"digits": _digits, "text": _text}[options["task"]](options["batch_size"])
    network = model if store is not None else DistributedDataParallel(model)
    if store is not None:
        optimizer = gangline.LocalSteps(model, optimizer, store, **options["options"])
    generator = torch.Generator().manual_seed(rank)
    steps, delay, calls = options["steps"][rank], options["delays"][rank], count()

    def train() -> None:
        if next(calls) < _PREPARED:
            return
        for _ in range(steps):
            begin = time.perf_counter()
            data, labels = batch(generator)
            optimizer.zero_grad()
            loss = cross_entropy(network(data).flatten(0, -2), labels.flatten())
            time.sleep(delay * 2 * (time.perf_counter() - begin))  # backward takes about as long
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if isinstance(optimizer, gangline.LocalSteps):
            optimizer.synchronize()

    def report() -> dict[str, Any]:
        with torch.no_grad():
            return {"score": score(), "every": getattr(optimizer, "every", 1)}

    return {"step": train, "report": report}


def _digits(batch_size: int) -> Task:
    """Return a network and accuracy on the held-out images."""
    (pixels, labels), validation, _ = digits()
    model = gangline.create_network("lenet")

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        own = torch.randint(len(labels), (batch_size,), generator=generator)
        return pixels[own], labels[own]

    def score() -> float:
        return float((model(validation[0]).argmax(1) == validation[1]).double().mean())

    return model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), batch, score


def _text(batch_size: int) -> Task:
    """Return a language model of characters, and its loss on held-out text, in nats per character."""
    text = "\n".join(topics.values())
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    encoded = torch.tensor([numbers[letter] for letter in text])
    end = int((1 - _HELD_OUT) * len(encoded))
    train, held_out = encoded[:end], encoded[end:]
    model = CausalModel(len(numbers), 128, 4, 512, 3)

    def batch(generator: torch.Generator, part: Tensor = train, texts: int = batch_size) -> tuple[Tensor, Tensor]:
        begins = torch.randint(len(part) - _CHARACTERS, (texts,), generator=generator)
        found = part[begins.unsqueeze(1) + torch.arange(_CHARACTERS + 1)]
        return found[:, :-1], found[:, 1:]

    def score() -> float:
        data, labels = batch(torch.Generator().manual_seed(0), held_out, _VALIDATED)
        return cross_entropy(model(data).flatten(0, -2), labels.flatten()).item()

    return model, torch.optim.AdamW(model.parameters(), lr=2e-3), batch, score
