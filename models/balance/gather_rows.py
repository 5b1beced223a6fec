"""Rows of all ranks as one tensor, for losses among the samples of the whole batch."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gangline.kvstore.reducer.waits import waiting_for_ranks
from gangline.models.balanced_batch import batch_of_rows, weighted


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate the rows of all ranks in rank order, differentiably. Forward and backward are collective.

        z = gangline.gather_rows(encoder(images))  # [samples of the global batch, features]
        loss = contrastive_loss(z)

    For losses among all samples, such as contrastive ones. Ranks may have different numbers of rows. If ranks average
    gradients, the gradient is that of one device on the global batch, whether each rank computes the whole loss or the
    mean over its own rows (those from ``sum(loader.shares[:rank])`` on), with and without `balance`.

    In the loop over `BalancedLoader.evaluation` with ``lengths``, rows of which there is one for each sample are in the
    order of the data set.

    Args:
        rows: this rank's rows, [n, ...]; dtype and all dimensions but the first are equal on all ranks.
        group: the ranks that average gradients; None: those of the balanced loader, else all.

    Raises:
        RuntimeError: if torch.distributed is not initialized, or several balanced loaders have a batch and no network
            of theirs computed the rows.
        ValueError: if rows has no dimension, or on all ranks if their shapes or dtypes differ.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
    if not rows.dim():
        raise ValueError("rows is a tensor of 0 dimensions; expected [rows, ...]")
    batch = batch_of_rows(rows)
    with waiting_for_ranks():
        gathered: Tensor = _GatherRows.apply(  # type: ignore[no-untyped-call]
            rows, batch.weight, batch.samples > 0, group if group is not None else batch.group
        )
    return batch.in_order(gathered)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: float, counts: bool, group: dist.ProcessGroup | None) -> Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own = rows if counts else rows[:0]
        kind = zlib.crc32(f"{rows.dtype} {tuple(rows.shape[1:])}".encode())  # a number that is equal in all processes
        described = torch.tensor([len(own), kind], device=rows.device)
        of_ranks = [torch.empty_like(described) for _ in range(size)]
        dist.all_gather(of_ranks, described, group=group)
        lengths, kinds = torch.stack(of_ranks).t().tolist()
        for other, other_kind in enumerate(kinds):
            if other_kind != kinds[0]:
                raise ValueError(
                    f"gather_rows: rank {other} has rows of another shape or dtype than rank 0; here they are "
                    f"{rows.dtype} of {tuple(rows.shape[1:])}; expected the same on all ranks"
                )
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        ctx.weight, ctx.group, ctx.rows = weight, group, len(rows)
        ctx.begin, ctx.end = sum(lengths[:rank]), sum(lengths[: rank + 1])
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # The mean over ranks weights each rank's loss. Gradients of all losses with respect to this rank's rows are
        # scaled by this rank's weight at the parameters, so divide by it here.
        summed = weighted(gradient, ctx.weight)
        with waiting_for_ranks():
            dist.all_reduce(summed, group=ctx.group)
        if ctx.begin == ctx.end:
            return gradient.new_zeros(ctx.rows, *gradient.shape[1:]), None, None, None
        return summed[ctx.begin : ctx.end] / ctx.weight, None, None, None
