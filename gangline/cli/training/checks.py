"""Checks of data against a network, on one sample, before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from gangline.models.data.batches import (
    Batch,
    as_batch,
    call_network,
    evaluating,
    length_of,
    map_tensors,
    take,
    tensors_of,
)
from gangline.models.data.datasets import Splits
from gangline.models.loss.explanation import check_classes
from gangline.usage_error import UsageError


def check_fits(network: nn.Module, sample: Batch, num_classes: int | None) -> int:
    """Check that a network accepts a sample and returns one value per class; return the number of values.

    The sample goes through the network once, in evaluation mode and without gradients. Batch statistics and the states
    of the random generators do not change.
    """
    with evaluating([network]), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            output = call_network(network, sample)
        except Exception as error:  # layers raise many types
            shapes = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tensors_of(sample))
            raise ValueError(f"the network does not accept a batch of one sample, {shapes}: {error}") from error
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"the network returns a {type(output).__name__}; expected a tensor, one value per class")
    if output.ndim < 2 or len(output) != 1:
        wanted = "classes" if num_classes is None else num_classes
        raise ValueError(f"the network returns {tuple(output.shape)} for one sample; expected (1, {wanted})")
    given = output.shape[1]
    if num_classes is not None and given != num_classes:
        raise ValueError(
            f"the network returns {given} values per sample, but the data have {num_classes} classes; "
            "build it with as many outputs as there are classes"
        )
    return given


def check_labels(data: Any, num_classes: int, what: str = "the data") -> None:
    """Check that all labels of (data, labels), or of a TensorDataset of two tensors, are classes.

    Labels of other data are not checked.
    """
    labels = None
    if isinstance(data, tuple) and len(data) == 2:
        labels = data[1]
    elif isinstance(data, TensorDataset) and len(data.tensors) == 2:
        labels = data.tensors[1]
    if isinstance(labels, (torch.Tensor, np.ndarray)):
        check_classes(torch.as_tensor(labels, device="cpu"), num_classes, what)


def check_counts(splits: Splits, samples: int | None, num_classes: int | None) -> None:
    """Check the numbers of training samples and of classes that a user expects; None: any."""
    data = splits.train
    found = length_of(data[0] if isinstance(data, tuple) else data)
    for flag, wanted, count in (("num-examples", samples, found), ("num-classes", num_classes, splits.num_classes)):
        if wanted not in (None, count):
            has = "an unknown number" if count is None else count
            raise UsageError(f"--{flag} is {wanted}, but the training data have {has}; expected this number, or none")


def first_sample(data: Any) -> Batch | None:
    """Return the first sample of data for `Module.fit`, as a batch of one; None if reading it would consume it.

    Arrays, Datasets, sequences and DataLoaders over Datasets can be read again; other iterables are not started.
    """
    with torch.random.fork_rng(devices=[]):  # reading may augment with random numbers
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
    """Return the first readable item of a dataset, in a list; ``__getitems__`` may skip unreadable ones."""
    if not hasattr(dataset, "__getitems__"):
        return [dataset[0]]
    for index in range(len(dataset)):
        items = list(dataset.__getitems__([index]))
        if items:
            return items
    raise ValueError("the data have no readable sample; expected at least one")
