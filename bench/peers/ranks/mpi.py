"""A rank of the MPI that the interpreter's mpi4py was built for."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found]  # has its own environment

_OPS = {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def join() -> dict[str, Any]:
    """Join the group that mpirun started."""
    name, version = MPI.get_vendor()
    comm = MPI.COMM_WORLD
    return {
        "who": f"{name} {'.'.join(map(str, version))}",
        "rank": comm.rank,
        "size": comm.size,
        "barrier": comm.Barrier,
        "prepare": prepare,
        "leave": MPI.Finalize,
    }


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Prepare a ``call``, or allocate arrays for a collective; MPI connects once per process."""
    if "call" in options:
        comm = MPI.COMM_WORLD
        return {"barrier": {"step": comm.Barrier}, "split": {"step": lambda: comm.Split(0), "undo": MPI.Comm.Free}}[
            options["call"]
        ]
    collective, dtype, op = options["collective"], options["dtype"], options["op"]
    if dtype == "bfloat16" or (collective in _REDUCING and (dtype in ("float16", "bool") or op not in _OPS)):
        raise ValueError(f"MPI has no {op} of {dtype}")
    given = np.zeros(options["inputs"], dtype)
    out = given if options["in_place"] else np.zeros(options["outputs"], dtype)

    def write(start: int, values: Any) -> None:
        given[start : start + len(values)] = values.astype(dtype)

    def read(start: int, stop: int) -> Any:
        part = out[start:stop]
        return part.astype({"f": np.float64, "b": np.bool_}.get(part.dtype.kind, np.int64))

    return {"step": _step(collective, given, out, _OPS.get(op), options["root"]), "write": write, "read": read}


def _step(collective: str, given: Any, out: Any, op: Any, root: int) -> Any:
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    source, reduced = (MPI.IN_PLACE, out) if out is given else (given, out)
    if collective == "reduce" and rank != root:
        source, reduced = given, None
    calls = {
        "all_reduce": lambda: comm.Allreduce(source, out, op),
        "reduce": lambda: comm.Reduce(source, reduced, op, root),
        "broadcast": lambda: comm.Bcast(out, root),
        "all_gather": lambda: comm.Allgather(given, out),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(given, out, op),
        "all_to_all": lambda: comm.Alltoall(given, out),
        "sendrecv": lambda: comm.Sendrecv(given, (rank + 1) % size, recvbuf=out, source=(rank - 1) % size),
    }
    return calls[collective]
