"""Communication hook for DistributedDataParallel: gradients weighted by sample count, over any backend."""

from __future__ import annotations

from typing import get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future


class Samples:
    """Number of samples of this rank's next backward pass: the state of `weighted_hook`.

    ``group`` is the process group of the DDP module; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.count: float = 1
        """Number of samples (or valid elements, if the loss is their mean) in this rank's loss, >= 0.

        Set it before each backward.
        """
        self._total: Tensor | None = None

    def _start(self, device: torch.device) -> None:
        """Start the sum of the ranks' counts, together with the first bucket of a backward pass."""
        if not 0 <= self.count < float("inf"):
            raise ValueError(f"Samples.count is {self.count!r}; expected the number of samples, 0 or more")
        self._total = torch.full((1,), self.count, dtype=torch.float64, device=device)  # NCCL reduces on GPUs only
        self._adding = dist.all_reduce(self._total, group=self.group, async_op=True)

    def _sum(self) -> Tensor:
        assert self._adding is not None
        assert self._total is not None
        self._adding.wait()
        if self._total.is_cpu and not self._total:
            raise ValueError("Samples.count is 0 on every rank; expected a sample on at least one")
        return self._total[0]


def weighted_hook(state: Samples, bucket: GradBucket) -> Future[Tensor]:
    """Weight each rank's gradient by its number of samples: sum(n_i g_i) / sum(n_i).

        samples = Samples()
        ddp.register_comm_hook(samples, weighted_hook)
        for data, label in share:
            samples.count = len(data)
            cross_entropy(ddp(data), label).backward()

    If each g_i is the gradient of a rank's MEAN loss over n_i samples, the result is the gradient of the mean over the
    whole batch, for any shares; DDP alone takes the mean of the means. A rank without samples sets ``count = 0`` and
    also calls backward, on any data: its gradient has weight 0, even if it is NaN.

    float16 and bfloat16 are sent as float32. Under ``no_sync()``, the count is that of the last backward alone.

    Raises:
        ValueError: in backward, if a count is invalid, or 0 on all ranks. On GPUs the latter makes all gradients NaN
            instead, because checking would block the host.
    """
    if bucket.index() == 0:
        state._start(bucket.buffer().device)
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


# DDP compares a hook's annotations with the classes themselves, not with their names.
weighted_hook.__annotations__ = get_type_hints(weighted_hook)
