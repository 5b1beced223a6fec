"""A rank of torch.distributed over gloo that initialises its default group and new ones again and again."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_TIMEOUT = timedelta(minutes=5)


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
    """A process group for the clock's barrier, beside the default group, which is measured."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        self.store = TCPStore(self.host, port, self.size, self.rank == 0, _TIMEOUT)
        self.group = distributed.ProcessGroupGloo(self.store, self.rank, self.size, _TIMEOUT)
        self.connections = 0

    def prepare(self, options: dict[str, Any]) -> dict[str, Any]:
        """Prepare a call; all but connecting need the default group."""
        self.undo()
        if options["call"] == "connect":
            return {"step": self.connect, "undo": self.undo}
        self.connect()
        if options["call"] == "barrier":
            return {"step": distributed.barrier}
        groups: list[Any] = []

        def undo() -> None:
            while groups:
                distributed.destroy_process_group(groups.pop())

        return {"step": lambda: groups.append(distributed.new_group(list(range(self.size)))), "undo": undo}

    def connect(self) -> None:
        """Initialise the default group, at a port that `undo` has chosen."""
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{self.host}:{self.port}", rank=self.rank, world_size=self.size, timeout=_TIMEOUT
        )

    def undo(self) -> None:
        """Destroy the default group, if there is one, and agree on the next one's port."""
        self.leave()
        self.connections += 1
        key = f"port{self.connections}"
        if self.rank == 0:
            with socket.create_server((self.host, 0)) as server:
                self.store.set(key, str(server.getsockname()[1]))
        self.port = int(self.store.get(key))

    def wait(self) -> None:
        """Wait for all ranks, in the group that is not measured."""
        self.group.barrier().wait()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Destroy the default group, if there is one."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
