"""A rank of the MPI that the interpreter's mpi4py was built for, which splits its communicator again and again."""

from __future__ import annotations

from typing import Any

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
    """Prepare a call; MPI connects once in a process."""
    comm = MPI.COMM_WORLD
    if options["call"] == "connect":
        raise ValueError("MPI_Init cannot be called twice")
    if options["call"] == "barrier":
        return {"step": comm.Barrier}
    opened: list[Any] = []

    def undo() -> None:
        while opened:
            opened.pop().Free()

    return {"step": lambda: opened.append(comm.Split(0)), "undo": undo}
