"""Rank 0's optimizer state, given to all workers."""

from __future__ import annotations

import json
from typing import Any

import torch

from gangline.kvstore.allreduce.negotiation import WorkerGroup
from gangline.kvstore.optimizer.keyed import OptimizerState


def first_state(workers: WorkerGroup, state: OptimizerState | None) -> OptimizerState:
    """The state that rank 0 gives; all workers call this, and what the others give is not looked at.

    Tensors go one by one, as bytes: they may be of dtypes that collectives do not take.
    """
    header: dict[str, Any] = {}
    if not workers.rank:
        assert state is not None
        layout = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.tensors.items()}
        header = {**state.header(), "layout": layout}
    header = json.loads(workers.exchange(json.dumps(header).encode())[0])
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in header.pop("layout").items():
        if state is not None and not workers.rank:
            tensors[name] = state.tensors[name].contiguous()
        else:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        workers.take_first(tensors[name].view(-1).view(torch.uint8))
    return OptimizerState.from_parts(header, tensors)
