"""A rank of the MPI that the interpreter's mpi4py was built for."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found]  # has its own environment


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
    """Allocate arrays for a call: ``call`` and ``size``, the bytes of the larger of a rank's arrays."""
    comm, call = MPI.COMM_WORLD, options["call"]
    whole = np.zeros(options["size"] // 4, np.float32)
    if call == "barrier":
        return {"step": comm.Barrier}
    if call == "all_reduce":
        return {"step": lambda: comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)}
    if call == "broadcast":
        return {"step": lambda: comm.Bcast(whole, 0)}
    own = np.zeros(len(whole) // comm.size, np.float32)
    gathered = whole[: len(own) * comm.size]
    return {"step": lambda: comm.Allgather(own, gathered)}
