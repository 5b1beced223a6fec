"""A rank of torch.distributed over gloo, which can repeatedly initialise its default group and new groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_TIMEOUT = timedelta(minutes=5)
_OPS = {
    "sum": distributed.ReduceOp.SUM,
    "product": distributed.ReduceOp.PRODUCT,
    "min": distributed.ReduceOp.MIN,
    "max": distributed.ReduceOp.MAX,
}


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    own = _Rank()
    return {
        "who": f"gloo, torch {torch.__version__.partition('+')[0]}",
        "rank": own.rank,
        "size": own.size,
        "transport": "tcp",
        "barrier": own.wait,
        "prepare": own.prepare,
        "leave": own.leave,
    }


class _Rank:
    """A process group for the clock's barrier, in addition to the measured default group."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        self.store = TCPStore(self.host, port, self.size, self.rank == 0, _TIMEOUT)
        self.group = distributed.ProcessGroupGloo(self.store, self.rank, self.size, _TIMEOUT)
        self.connections = 0

    def prepare(self, options: dict[str, Any]) -> dict[str, Any]:
        """Prepare a ``call``, or tensors for a collective; all calls but connect need the default group."""
        call = options.get("call")
        if call == "connect":
            self.choose_port()
            return {"step": self.connect, "undo": self.choose_port}
        if not distributed.is_initialized():
            if not self.connections:
                self.choose_port()
            self.connect()
        if call is None:
            return prepare(options)
        if call == "barrier":
            return {"step": distributed.barrier}
        return {"step": distributed.new_group, "undo": distributed.destroy_process_group}

    def connect(self) -> None:
        """Initialise the default group, at a port that `choose_port` has chosen."""
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{self.host}:{self.port}", rank=self.rank, world_size=self.size, timeout=_TIMEOUT
        )

    def choose_port(self, _: object = None) -> None:
        """Destroy the default group, if there is one, and agree on the next one's port."""
        self.leave()
        self.connections += 1
        key = f"port{self.connections}"
        if self.rank == 0:
            with socket.create_server((self.host, 0)) as server:
                self.store.set(key, str(server.getsockname()[1]))
        self.port = int(self.store.get(key))

    def wait(self) -> None:
        """Wait for all ranks in the unmeasured group."""
        self.group.barrier().wait()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Destroy the default group, if there is one."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Allocate tensors for a collective; if gloo only works in place, copy first for out of place."""
    if options["op"] not in _OPS and options["collective"] in ("all_reduce", "reduce", "reduce_scatter"):
        raise ValueError(f"gloo has no {options['op']}")
    dtype = getattr(torch, options["dtype"])
    given = torch.zeros(options["inputs"], dtype=dtype)
    out = given if options["in_place"] else torch.zeros(options["outputs"], dtype=dtype)
    collective, op, root = options["collective"], _OPS.get(options["op"]), options["root"]
    rank, size = distributed.get_rank(), distributed.get_world_size()

    def exchange() -> None:
        sent = distributed.isend(given, (rank + 1) % size)
        distributed.recv(out, (rank - 1) % size)
        assert sent is not None
        sent.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: distributed.all_reduce(out, op),
        "reduce": lambda: distributed.reduce(out, root, op),
        "broadcast": lambda: distributed.broadcast(out, root),
        "all_gather": lambda: distributed.all_gather_into_tensor(out, given),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(out, given, op),
        "all_to_all": lambda: distributed.all_to_all_single(out, given),
        "sendrecv": exchange,
    }
    step = calls[collective]
    if collective in ("all_reduce", "reduce") and out is not given:
        return {"step": lambda: (out.copy_(given), step()), **accessors(given, out)}
    return {"step": step, **accessors(given, out)}


def accessors(given: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    """Return the functions by which `checks.py` writes the input and reads the result."""

    def write(start: int, values: Any) -> None:
        given[start : start + len(values)].copy_(torch.from_numpy(values))

    def read(start: int, stop: int) -> Any:
        part = out[start:stop]
        wide = torch.float64 if part.is_floating_point() else torch.bool if part.dtype == torch.bool else torch.int64
        return part.to(wide).numpy()

    return {"write": write, "read": read}
