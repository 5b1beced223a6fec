"""Loaders of accelerate: the DataLoader inside a prepared one, and gathers of shares of unequal size.

accelerate is imported only where a script has prepared a loader.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from gangline.models.balanced_batch import batch_of_rows, share_of_mean
from gangline.models.data.loaders import copy_loader

_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Prepared loaders whose batches are split unequally."""


class PreparedLoader(NamedTuple):
    """Loader inside one that accelerate prepared."""

    loader: DataLoader[Any]
    """DataLoader as it was before `prepare`."""
    global_batch: int | None
    """Samples of all ranks in a step if the batch size counts them (split_batches); else None."""


def unprepared(loader: Any) -> PreparedLoader | None:
    """Return the DataLoader inside one that accelerate prepared, if it can be cut; None for other loaders."""
    kind = type(loader)
    if not kind.__module__.startswith("accelerate."):
        return None
    if kind.__name__ != "DataLoaderShard":
        raise ValueError(
            f"the loader is accelerate's {kind.__name__}, which has its own way of sharing batches out; expected a "
            "DataLoaderShard: write Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)), or "
            'TrainingArguments(accelerator_config={"dispatch_batches": False})'
        )
    if loader in _loaders:
        raise ValueError(
            "the loader is balanced already; iterate what balance() or evaluation() returned, or close() that"
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


def accumulated_steps() -> int:
    """Return the number of batches of which accelerate accumulates gradients."""
    from accelerate.state import GradientState

    return int(GradientState().num_steps)


def read_unequal(
    loader: Any, batches: Iterable[Any], waiting: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Replace the batches of a prepared loader by ``batches`` of unequal numbers of rows; return the inverse function.

    Until then accelerate gathers tensors of different numbers of rows, without the repeated samples of weight 0, and
    the mean of a loss over the ranks, as by ``accelerator.reduce(loss, "mean")``, is that over all samples. In the
    context of ``waiting`` this rank waits for others.
    """
    from accelerate import accelerator
    from accelerate.state import GradientState
    from accelerate.utils import operations

    plain = inspect.unwrap(operations._gpu_gather)  # by this name accelerate's gather and gather_for_metrics call it
    plain_reduce = inspect.unwrap(accelerator.reduce)  # type: ignore[attr-defined, unused-ignore]
    _loaders.add(loader)
    before, loader.base_dataloader = loader.base_dataloader, batches

    def gather_one(tensor: torch.Tensor) -> Any:
        if not tensor.dim():
            return plain(tensor)
        trained = GradientState().active_dataloader
        batch = batch_of_rows(tensor)
        is_repeated = not batch.samples and (trained is None or trained in _loaders)
        own = tensor.detach()[: 0 if is_repeated else None]
        lengths = plain(torch.tensor([len(own)], device=tensor.device)).tolist()
        if min(lengths) == max(lengths):
            return batch.in_order(plain(own))
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(own)] = own
        parts = zip(plain(padded).split(max(lengths)), lengths, strict=True)
        return batch.in_order(torch.cat([part[:length] for part, length in parts]))

    @functools.wraps(plain)
    def gather(tensors: Any) -> Any:
        with waiting():
            return operations.recursively_apply(gather_one, tensors, error_on_other_type=True)

    def weighted(tensor: torch.Tensor) -> torch.Tensor:
        is_loss = not tensor.dim() and tensor.is_floating_point() and GradientState().active_dataloader in _loaders
        return share_of_mean(tensor) if is_loss else tensor

    @functools.wraps(plain_reduce)
    def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        with waiting():
            if reduction == "mean":
                tensor = operations.recursively_apply(weighted, tensor, error_on_other_type=True)
            return plain_reduce(tensor, reduction, scale)

    def restore() -> None:
        _loaders.discard(loader)
        loader.base_dataloader = before
        if not _loaders:
            operations._gpu_gather = plain
            accelerator.reduce = plain_reduce  # type: ignore[attr-defined, unused-ignore]

    operations._gpu_gather = gather
    accelerator.reduce = reduce  # type: ignore[attr-defined, unused-ignore]
    return restore
