"""Communication hooks for DistributedDataParallel: compressed gradients, and gradients weighted by sample count.

Both work over any backend of torch.distributed that supports the tensors.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from gangline.collectives.compression import Compression, compress, parse


def compress_hook(type: str, **options: Any) -> CompressHook:  # noqa: A002  the name in set_gradient_compression
    """Return a hook that sends gradients through a codec and, on every rank, sums the received ones in rank order.

        ddp.register_comm_hook(None, compress_hook("2bit", threshold=0.03))

    The hook's state is a process group, or None for the default one. The compressed value is this rank's share of the
    mean over all ranks, its gradient / size, plus the residual if there is error feedback: thresholds are in that unit.
    The hook keeps the residual by parameter when DDP rebuilds its buckets after the first step; each DDP module needs a
    hook of its own. A bucket costs every rank size times its payload: 2bit sends a sixteenth of float32.

    Args:
        type: "2bit", "fp16", "bf16", "topk", or a name given to `gangline.collectives.compression.register`.
        options: the codec's, such as ``threshold`` (2bit) or ``ratio`` (topk), and ``error_feedback``.

    Raises:
        ValueError: if the type or an option is unknown, or a value is out of range. In backward: if a gradient holds
            NaN or infinity, or is not floating-point.
        TypeError: if a value has the wrong type.
    """
    return CompressHook(parse({"type": type, **options}))


class Samples:
    """Number of samples of this rank's next backward pass: the state of `weighted_hook`.

    Args:
        group: the process group of the DDP module; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.count: float = 1
        """Number of samples (or valid elements, if the loss is their mean) in this rank's loss, >= 0.

        Set it before each backward.
        """
        self._total: Tensor | None = None

    def _start(self) -> None:
        """Start the sum of the ranks' counts, together with the first bucket of a backward pass."""
        if not 0 <= self.count < float("inf"):
            raise ValueError(f"Samples.count is {self.count!r}; expected the number of samples, 0 or more")
        self._total = torch.tensor([self.count], dtype=torch.float64)
        self._adding = dist.all_reduce(self._total, group=self.group, async_op=True)

    def _sum(self) -> float:
        assert self._adding is not None
        assert self._total is not None
        self._adding.wait()
        total = float(self._total)
        if not total:
            raise ValueError("Samples.count is 0 on every rank; expected a sample on at least one")
        return total


def weighted_hook(state: Samples, bucket: GradBucket) -> Future[Tensor]:
    """Weight each rank's gradient by its number of samples: sum(n_i g_i) / sum(n_i).

        samples = Samples()
        ddp.register_comm_hook(samples, weighted_hook)
        for data, label in share:
            samples.count = len(data)
            cross_entropy(ddp(data), label).backward()

    If each g_i is the gradient of this rank's MEAN loss over n_i samples, the result is the gradient of the mean over
    the whole batch, however unequal the shares are; DDP alone takes the mean of the means. A rank without samples sets
    ``count = 0`` and calls backward as the others do, on any data: its gradient has weight 0, even if it is NaN.

    float16 and bfloat16 are sent as float32. Under ``no_sync()``, the count is that of the last backward alone.

    Raises:
        ValueError: in backward, if a count is invalid, or 0 on all ranks.
    """
    if bucket.index() == 0:
        state._start()
    buffer: Tensor = bucket.buffer()
    wide = buffer.float() if buffer.dtype in (torch.float16, torch.bfloat16) else buffer
    if state.count:
        wide.mul_(state.count)
    else:
        wide.zero_()  # 0 x NaN is NaN
    total = state._sum

    def divided(future: Future[list[Tensor]]) -> Tensor:
        (summed,) = future.value()
        summed.div_(total())
        return summed if summed.dtype == buffer.dtype else buffer.copy_(summed)

    future: Future[Tensor] = dist.all_reduce(wide, group=state.group, async_op=True).get_future().then(divided)
    return future


class CompressHook:
    """Hook made by `compress_hook`, with each parameter's residual."""

    def __init__(self, compression: Compression) -> None:
        self.__name__ = self.__qualname__ = "compress_hook"  # read by DDP
        self._compression = compression
        self._buckets: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._of_parameter: dict[Tensor, Tensor] = {}

    def __call__(self, state: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the mean of a bucket's gradients over all ranks, as transmitted."""
        group = dist.group.WORLD if state is None else state
        assert group is not None
        buffer: Tensor = bucket.buffer()
        part = buffer / group.size()
        residual = self._residual(bucket) if self._compression.error_feedback else None
        codec = self._compression.codec
        payload = compress(codec, part, residual, f"bucket {bucket.index()}")
        arrived = payload.new_empty((group.size(), payload.numel()))

        def summed(_: Future[Any]) -> Tensor:
            codec.decode(arrived[0], buffer)
            for row in arrived[1:]:
                codec.decode(row, part)
                buffer.add_(part)
            return buffer

        gathering = dist.all_gather(list(arrived), payload, group=group, async_op=True)
        future: Future[Tensor] = gathering.get_future().then(summed)
        return future

    def residual(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter's gradient that this rank has not sent yet, in its shape; initially zeros."""
        found = self._of_parameter.get(parameter)
        return torch.zeros_like(parameter) if found is None else found.view(parameter.shape).clone()

    def _residual(self, bucket: GradBucket) -> Tensor:
        """Return the residual of a bucket, whose parameters change when DDP rebuilds its buckets."""
        parameters: list[Tensor] = bucket.parameters()
        known, flat = self._buckets.get(bucket.index(), ([], torch.empty(0)))
        if len(known) == len(parameters) and all(map(_is, known, parameters)):
            return flat
        flat = torch.zeros_like(bucket.buffer())
        views = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            if (before := self._of_parameter.get(parameter)) is not None:
                view.copy_(before)
            self._of_parameter[parameter] = view
        self._buckets[bucket.index()] = parameters, flat
        return flat


def _is(one: object, other: object) -> bool:
    return one is other


# DDP compares a hook's annotations with the classes themselves, not with their names.
for _hook in (weighted_hook, CompressHook.__call__):
    _hook.__annotations__ = get_type_hints(_hook)
