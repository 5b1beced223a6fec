"""Tensors of GPUs for operations on the host: copied there and back, in the order of the GPU's current stream.

The host's memory is pinned and comes from torch's cache of it, which keeps what was used before, and gives nothing away
while a copy that was started from it is still under way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(data: Tensor) -> Tensor:
    """The values of a GPU's tensor as a contiguous 1-d one of the host, all there when this returns.

    The copy comes behind what the current stream of the tensor's GPU holds; other streams are not waited for.
    """
    flat = data.contiguous().view(-1)
    host = host_memory(flat.numel(), flat.dtype)
    host.copy_(flat, non_blocking=True)
    torch.cuda.current_stream(data.device).record_event().synchronize()
    return host


def from_host(data: Tensor, flat: Tensor) -> None:
    """Overwrite a GPU's tensor with values of the host, which must stay as they are; does not wait for the copy.

    What comes to the current stream of the tensor's GPU afterwards finds the values there.
    """
    data.copy_(flat.view(data.shape), non_blocking=True)


def host_memory(count: int, dtype: torch.dtype) -> Tensor:
    """A contiguous 1-d tensor of the host that GPUs copy from and to without waiting."""
    return torch.empty(count, dtype=dtype, pin_memory=True)
