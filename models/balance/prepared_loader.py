"""Prepared loader: a loader from accelerate's `prepare`, whose inner DataLoader is replaced.

accelerate itself is not imported: a script that holds such a loader has done so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gangline.models.data.batches import copy_loader


class PreparedLoader(NamedTuple):
    """Loader inside one that accelerate prepared."""

    loader: DataLoader[Any]
    """DataLoader as it was before `prepare`."""
    global_batch: int | None
    """Samples of all ranks in a step if the batch size counts them (split_batches); else None."""


_ITERATION = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


def own_iteration(loader: Any) -> str | None:
    """Describe how a loader's iteration differs from a torch DataLoader's; None: it does not."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return f"the {kind.__name__} is not a torch DataLoader"
    changed = [name for name in _ITERATION if getattr(kind, name) is not getattr(DataLoader, name)]
    return f"the {kind.__name__} is a DataLoader with a {changed[0]} of its own" if changed else None


def unprepared(loader: Any) -> PreparedLoader | None:
    """Return the DataLoader inside one that accelerate prepared, if it can be cut; None for other loaders."""
    kind = type(loader)
    if not kind.__module__.startswith("accelerate."):
        return None
    if kind.__name__ != "DataLoaderShard":
        raise ValueError(
            f"the loader is accelerate's {kind.__name__}, which has its own way of sharing batches out; expected a "
            "DataLoaderShard: write Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
        )
    if loader.use_stateful_dataloader:
        raise ValueError(
            "the loader was prepared with use_stateful_dataloader=True, whose state does not know the split; leave it "
            "out, and use state_dict() of the loader that balance() returns"
        )
    base: DataLoader[Any] = loader.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        return _of_stream(base)
    shard: Any = base.batch_sampler
    batches, is_global = shard, False
    if type(shard).__name__ == "BatchSamplerShard":
        batches, is_global = shard.batch_sampler, shard.split_batches
    if type(batches) is BatchSampler:
        plain = copy_loader(base, batch_size=batches.batch_size, sampler=batches.sampler, drop_last=batches.drop_last)
        return PreparedLoader(plain, batches.batch_size if is_global else None)
    if is_global:
        raise ValueError(
            f"split_batches=True with a {type(batches).__name__}: the lists of a batch sampler of one's own cannot be "
            "global batches; leave split_batches out"
        )
    return PreparedLoader(copy_loader(base, batch_sampler=batches), None)


def _of_stream(base: DataLoader[Any]) -> PreparedLoader:
    part: Any = base.dataset
    if type(part).__name__ != "IterableDatasetShard":
        return PreparedLoader(base, None)
    plain = copy_loader(base, dataset=part.dataset, batch_size=part.batch_size, drop_last=part.drop_last)
    return PreparedLoader(plain, part.batch_size if part.split_batches else None)
