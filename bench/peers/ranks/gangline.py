"""A rank of a gangline `Communicator`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch

from gangline import Communicator, connect
from gangline.bench.peers.ranks.gloo import accessors

_PAGE = 4096


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
    """A communicator and its registered memory, which is freed with the communicator."""

    def __init__(self) -> None:
        self._algorithm: str | None = None
        self._memory: torch.Tensor | None = None
        self.comm = connect(transport=os.environ.get("BENCH_TRANSPORT", "auto"))

    def prepare(self, options: dict[str, Any]) -> dict[str, Any]:
        """Prepare a ``call``, or allocate tensors for a collective.

        Args:
            options: beside those of any rank ``registered`` (use tensors of ``comm.empty``; registered tensors prepared
                before must not be used again) and ``algorithm`` (a value for GANGLINE_ALGO; None: use the table).
        """
        if "call" in options:
            split: dict[str, Any] = {"step": lambda: self.comm.split(0), "undo": Communicator.close}
            calls = {"barrier": {"step": self.comm.barrier}, "connect": {**split, "step": connect}, "split": split}
            return calls[options["call"]]
        self._select(options["algorithm"])
        dtype = getattr(torch, options["dtype"])
        counts = [options["inputs"]] if options["in_place"] else [options["inputs"], options["outputs"]]
        allocate = self._registered if options["registered"] else _ordinary
        given, *others = allocate(counts, dtype)
        given.zero_()  # sums in place stay finite, however often they are repeated
        out = others[0] if others else given
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
        self._memory = None
        self.comm.close()
        self.comm = connect(transport=os.environ.get("BENCH_TRANSPORT", "auto"))

    def _registered(self, counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return tensors in registered memory, which is reused and only grows, because it is never freed."""
        sizes = [-(-count * dtype.itemsize // _PAGE) * _PAGE for count in counts]
        if self._memory is None or self._memory.numel() < sum(sizes):
            self._memory = self.comm.empty((sum(sizes),), torch.uint8)
        ends = itertools.accumulate(sizes)
        parts = [self._memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [part[: count * dtype.itemsize].view(dtype) for part, count in zip(parts, counts, strict=True)]


def _ordinary(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=dtype) for count in counts]


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
