"""A rank of a gangline `Communicator`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from gangline import Communicator, connect
from gangline.bench.peers.ranks.gloo import accessors


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, over BENCH_TRANSPORT."""
    own = _Rank()
    return {
        "who": "gangline",
        "rank": own.comm.rank,
        "size": own.comm.size,
        "transport": own.comm.transport,
        "barrier": lambda: own.comm.barrier(),
        "prepare": own.prepare,
        "leave": lambda: own.comm.close(),
    }


class _Rank:
    """A communicator, opened anew for each algorithm."""

    def __init__(self) -> None:
        self._algorithm: str | None = None
        self.comm = connect(transport=os.environ.get("BENCH_TRANSPORT", "auto"))

    def prepare(self, options: dict[str, Any]) -> dict[str, Any]:
        """Prepare a ``call``, or allocate tensors for a collective.

        Args:
            options: beside those of any rank ``algorithm`` (a value for GANGLINE_ALGO; None: use the table).
        """
        if "call" in options:
            split: dict[str, Any] = {"step": lambda: self.comm.split(0), "undo": Communicator.close}
            calls = {"barrier": {"step": self.comm.barrier}, "connect": {**split, "step": connect}, "split": split}
            return calls[options["call"]]
        self._select(options["algorithm"])
        dtype = getattr(torch, options["dtype"])
        given = torch.zeros(options["inputs"], dtype=dtype)  # sums in place stay finite, however often repeated
        out = given if options["in_place"] else torch.zeros(options["outputs"], dtype=dtype)
        return {"step": _step(self.comm, options, given, out), **accessors(given, out)}

    def _select(self, algorithm: str | None) -> None:
        """Open a communicator that uses an algorithm, unless the current one does."""
        if algorithm == self._algorithm:
            return
        self._algorithm = algorithm
        if algorithm is None:
            os.environ.pop("GANGLINE_ALGO", None)
        else:
            os.environ["GANGLINE_ALGO"] = algorithm
        self.comm.close()
        self.comm = connect(transport=os.environ.get("BENCH_TRANSPORT", "auto"))


def _step(comm: Communicator, options: dict[str, Any], given: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    op, root, own_out = options["op"], options["root"], None if out is given else out
    rows, gathered = given.view(-1, options["count"]), out.view(-1, options["count"])
    rank, size = comm.rank, comm.size

    def exchange() -> None:
        sent = comm.send(given, (rank + 1) % size, async_op=True)
        comm.recv(out, (rank - 1) % size)
        assert sent is not None
        sent.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(given, op, own_out),
        "reduce": lambda: comm.reduce(given, root, op, own_out),
        "broadcast": lambda: comm.broadcast(given, root),
        "all_gather": lambda: comm.all_gather(given, out=gathered),
        "gather": lambda: comm.gather(given, root, out=gathered),
        "scatter": lambda: comm.scatter(rows, out, root),
        "reduce_scatter": lambda: comm.reduce_scatter(rows, op, out=out),
        "all_to_all": lambda: comm.all_to_all(rows, out=gathered),
        "sendrecv": exchange,
    }
    return calls[options["collective"]]
