"""Broadcast of an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch

from gangline.kvstore.allreduce.negotiation import Negotiator
from gangline.kvstore.group.serialization import dtype_named
from gangline.kvstore.optimizer.keyed import OptimizerState


def broadcast_state(workers: Negotiator, state: OptimizerState | None, root: int = 0) -> OptimizerState:
    """Return the root's optimizer state on every rank. Collective: all workers must call it.

    Tensors are broadcast one by one, as bytes: collectives do not support all of their dtypes.

    Args:
        workers: the workers of the job.
        state: on the root its state, on the host; ignored on other ranks.
        root: rank whose state counts.
    """
    header: dict[str, Any] = {}
    if workers.rank == root:
        assert state is not None
        layout = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.tensors.items()}
        header = {**state.header(), "layout": layout}
    header = workers.group.broadcast(header, "broadcast of the optimizer's state", root)
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in header.pop("layout").items():
        if state is not None and workers.rank == root:
            tensors[name] = state.tensors[name].contiguous()
        else:
            tensors[name] = torch.empty(shape, dtype=dtype_named(dtype))
        with workers.communicator() as communicator:
            communicator.broadcast(tensors[name].view(-1).view(torch.uint8), root)
    return OptimizerState.from_parts(header, tensors)
