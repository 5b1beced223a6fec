"""A rank of gangline that connects and splits again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gangline import collectives


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    comm = collectives.connect()
    opened: list[collectives.Communicator] = []
    calls: dict[str, Callable[[], Any]] = {
        "connect": lambda: opened.append(collectives.connect()),
        "split": lambda: opened.extend(filter(None, [comm.split(0)])),
    }

    def undo() -> None:
        while opened:
            opened.pop().close()

    def prepare(options: dict[str, Any]) -> dict[str, Any]:
        if options["call"] == "barrier":
            return {"step": comm.barrier}
        return {"step": calls[options["call"]], "undo": undo}

    return {
        "who": "gangline",
        "rank": comm.rank,
        "size": comm.size,
        "transport": comm.transport,
        "barrier": comm.barrier,
        "prepare": prepare,
        "leave": comm.close,
    }
