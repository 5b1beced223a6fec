"""Whether data fit a network, found out on one sample before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from gangline.models.data.batches import Batch, as_batch, call_network, map_tensors, take, tensors_of

IGNORED = -100
"""The label that torch's CrossEntropyLoss and NLLLoss pass over."""


def check_fits(network: nn.Module, sample: Batch, num_classes: int | None) -> int:
    """See that a network takes a sample and gives a value for each class; how many it gives is returned.

    The sample goes through the network once, in evaluation mode and without gradients, where the network is. Nothing
    stays of that: not in batch statistics, nor in the state of the random generators.

    Args:
        network: what is to be trained, on the CPU.
        sample: a batch of one sample, as the network takes its data: a tensor, or a tuple or dict of them.
        num_classes: of the data; None where nobody knows, and only the sample is tried.

    Raises:
        ValueError: the network does not take the sample, does not give (1, classes, ...), or gives another number.
    """
    with _left_as_it_is(network):
        try:
            output = call_network(network, sample)
        except Exception as error:  # whatever the layers of any network raise
            shapes = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tensors_of(sample))
            raise ValueError(f"the network does not take a batch of one sample, {shapes}: {error}") from error
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"the network gives a {type(output).__name__}; expected a tensor, one value for each class")
    if output.ndim < 2 or len(output) != 1:
        wanted = "classes" if num_classes is None else num_classes
        raise ValueError(f"the network gives {tuple(output.shape)} for one sample; expected (1, {wanted})")
    given = output.shape[1]
    if num_classes is not None and given != num_classes:
        raise ValueError(
            f"the network gives {given} values a sample, but the data have {num_classes} classes; "
            "build it with as many outputs as there are classes"
        )
    return given


def check_labels(data: Any, num_classes: int, what: str = "the data") -> None:
    """See that all labels of (data, labels), or of a TensorDataset of two, are classes; other data are not looked at.

    Args:
        data: as `Module.fit` takes it.
        num_classes: C; labels are int64 or uint8 numbers from 0 to C - 1, or -100, which the loss ignores. Floats are
            a probability for each class: (samples, C, ...).
        what: how the message names the data.

    Raises:
        ValueError: a label is none of that; the first one is named.
    """
    labels = _labels(data)
    if labels is None:
        return
    if labels.is_floating_point():
        if labels.ndim < 2 or labels.shape[1] != num_classes:
            raise ValueError(
                f"the labels of {what} are {labels.dtype} of shape {tuple(labels.shape)}; expected int64 "
                f"class numbers, or probabilities of shape (samples, {num_classes})"
            )
        return
    if labels.dtype not in (torch.int64, torch.uint8):  # what torch's losses take
        raise ValueError(f"the labels of {what} are {labels.dtype}; expected torch.int64, as .long() makes them")
    wrong = ((labels < 0) | (labels >= num_classes)) & (labels != IGNORED)
    if bool(wrong.any()):
        places = wrong.nonzero()
        first = tuple(places[0].tolist())
        raise ValueError(
            f"label {int(labels[first])} of sample {first[0]} of {what} is no class; expected 0 to {num_classes - 1} "
            f"({len(places)} labels are beyond that)"
        )


def first_sample(data: Any) -> Batch | None:
    """The first sample of data that `Module.fit` takes, as a batch of one; None where it cannot be had without a trace.

    Arrays, Datasets and DataLoaders over these are read once more later; what can only be iterated is not begun.

    Raises:
        TypeError, ValueError: what is there holds no batch, or nothing.
    """
    with torch.random.fork_rng(devices=[]):  # a sample may be augmented by random numbers, as those of training are
        if isinstance(data, tuple) and len(data) == 2:
            item: Any = take(as_batch(data[0], "the data"), slice(0, 1)), None
        elif isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
            collate = data.collate_fn if data.batch_size is not None else default_collate
            item = collate(_first_items(data.dataset)) if data.batch_sampler is not None else data.dataset[0]
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            item = default_collate(_first_items(data))
        elif isinstance(data, Sequence) and data:
            item = data[0]
        else:
            return None
    sample = item[0] if isinstance(item, (tuple, list)) and len(item) == 2 else item
    return map_tensors(lambda tensor: tensor[:1], as_batch(sample, "a sample of the data"))


def _first_items(dataset: Any) -> list[Any]:
    """The first item of a dataset, in a list; one that reads several at once may pass over what it cannot read."""
    if not hasattr(dataset, "__getitems__"):
        return [dataset[0]]
    for index in range(len(dataset)):
        items = list(dataset.__getitems__([index]))
        if items:
            return items
    raise ValueError("the data have no sample that can be read; expected at least one")


def _labels(data: Any) -> torch.Tensor | None:
    if isinstance(data, tuple) and len(data) == 2:
        labels = data[1]
    elif isinstance(data, TensorDataset) and len(data.tensors) == 2:
        labels = data.tensors[1]
    else:
        return None
    return torch.as_tensor(labels) if isinstance(labels, (torch.Tensor, np.ndarray)) else None


@contextmanager
def _left_as_it_is(network: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; training modes and random numbers are afterwards what they were."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training
