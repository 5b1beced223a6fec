"""A rank of torch.distributed over gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

_OPS = {
    "sum": distributed.ReduceOp.SUM,
    "product": distributed.ReduceOp.PRODUCT,
    "min": distributed.ReduceOp.MIN,
    "max": distributed.ReduceOp.MAX,
}


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE and RENDEZVOUS (a file that does not exist yet) describe."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return {
        "who": f"gloo, torch {torch.__version__.partition('+')[0]}",
        "rank": distributed.get_rank(),
        "size": distributed.get_world_size(),
        "transport": "tcp",
        "barrier": distributed.barrier,
        "prepare": prepare,
        "leave": distributed.destroy_process_group,
    }


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Allocate tensors for a collective; where gloo works in place only, out of place is a copy first."""
    if options["op"] not in _OPS and options["collective"] in ("all_reduce", "reduce", "reduce_scatter"):
        raise ValueError(f"gloo has no {options['op']}")
    dtype = getattr(torch, options["dtype"])
    given = torch.zeros(options["inputs"], dtype=dtype)
    out = given if options["in_place"] else torch.zeros(options["outputs"], dtype=dtype)
    collective, op, root = options["collective"], _OPS.get(options["op"]), options["root"]
    rank, size = distributed.get_rank(), distributed.get_world_size()

    def step() -> None:
        if collective in ("all_reduce", "reduce") and out is not given:
            out.copy_(given)
        if collective == "all_reduce":
            distributed.all_reduce(out, op)
        elif collective == "reduce":
            distributed.reduce(out, root, op)
        elif collective == "broadcast":
            distributed.broadcast(out, root)
        elif collective == "all_gather":
            distributed.all_gather_into_tensor(out, given)
        elif collective == "reduce_scatter":
            distributed.reduce_scatter_tensor(out, given, op)
        elif collective == "all_to_all":
            distributed.all_to_all_single(out, given)
        else:
            sent = distributed.isend(given, (rank + 1) % size)
            distributed.recv(out, (rank - 1) % size)
            assert sent is not None
            sent.wait()

    def write(start: int, values: Any) -> None:
        given[start : start + len(values)].copy_(torch.from_numpy(values))

    def read(start: int, stop: int) -> Any:
        part = out[start:stop]
        wide = torch.float64 if part.is_floating_point() else torch.bool if part.dtype == torch.bool else torch.int64
        return part.to(wide).numpy()

    return {"step": step, "write": write, "read": read}
