"""DataLoaders: copies with other batches, and what describes the batches of one."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.utils.data import DataLoader

from gangline.models.data.batches import length_of

_OF_BATCHES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
"""Arguments of a DataLoader that choose the batches."""
_ITERATION = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Copy a DataLoader with other batches: batch_sampler, or batch_size, sampler and drop_last."""
    kept = signature(DataLoader).parameters.keys() - _OF_BATCHES
    return DataLoader(**{**{name: getattr(loader, name) for name in kept}, **changes})


def own_iteration(loader: Any) -> str | None:
    """Describe how a loader's iteration differs from a torch DataLoader's; None: it does not."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return f"the {kind.__name__} is not a torch DataLoader"
    changed = [name for name in _ITERATION if getattr(kind, name) is not getattr(DataLoader, name)]
    return f"the {kind.__name__} is a DataLoader with a {changed[0]} of its own" if changed else None


def sampler_of(loader: Any) -> Any:
    """Return a loader's sampler; None: it has none."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))


def sampling_generator(loader: Any) -> torch.Generator | None:
    """Return the random generator of a loader's sampler, else the loader's; None: the host's generators."""
    owners = (sampler_of(loader), getattr(loader, "batch_sampler", None), loader)
    generators = [getattr(owner, "generator", None) for owner in owners]
    return next((each for each in generators if isinstance(each, torch.Generator)), None)


def settings_of(loader: Any) -> dict[str, Any]:
    """Return what describes a loader's batches, as plain data by name."""
    dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    return {
        "the type of the data set": type(dataset).__name__,
        "the length of the data set": length_of(dataset),
        "the loader": type(loader).__name__,
        "the batch sampler": type(batches).__name__,
        "the sampler": type(sampler_of(loader)).__name__,
        "drop_last": bool(getattr(batches, "drop_last", getattr(loader, "drop_last", False))),
    }
