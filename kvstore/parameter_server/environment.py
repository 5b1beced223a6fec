"""What the environment says of this process's role in a parameter-server job: DMLC_*, as MXNet and ps-lite set them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from gangline.collectives.transports.addresses import check_address, local_address

__all__ = ["ServerJob", "announce", "check_address", "from_environment", "is_set"]

ROLES = ("scheduler", "server", "worker")


class ServerJob(NamedTuple):
    """A process's part in a job with servers."""

    role: str
    host: str
    """Where the scheduler listens."""
    port: int
    workers: int
    servers: int
    rank: int
    """The worker's rank that was asked for; -1: any."""
    interface: str
    """This host's address for the others."""
    announce_fd: int | None
    """Where a scheduler that takes any port tells which it took."""
    is_supervised: bool = False
    """Whether a launcher ends scheduler and servers, so that they wait for the first worker however long it takes."""

    @property
    def scheduler(self) -> str:
        """Where the scheduler is reached, as ZeroMQ writes it."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def is_set(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has given this process a role."""
    return "DMLC_ROLE" in environment or "DMLC_PS_ROOT_URI" in environment


def serve_if_told() -> None:
    """Be the scheduler or server that the environment makes of this process, and leave by SystemExit(0)."""
    role = os.environ.get("DMLC_ROLE")
    if role == "scheduler":
        from gangline.kvstore.parameter_server.scheduler import scheduler

        raise SystemExit(scheduler.main())
    if role == "server":
        from gangline.kvstore.parameter_server.server import server

        raise SystemExit(server.main())


def from_environment(environment: Mapping[str, str] = os.environ) -> ServerJob:
    """The job that DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER describe.

    DMLC_WORKER_ID asks for a rank; DMLC_INTERFACE names the interface by which the others reach this host.

    Raises:
        ValueError: one is missing, out of range or no number; the message names it.
    """
    role = environment.get("DMLC_ROLE", "worker")
    if role not in ROLES:
        raise ValueError(f"DMLC_ROLE is {role!r}; expected one of {', '.join(ROLES)}")
    host = environment.get("DMLC_PS_ROOT_URI", "")
    if not host:
        raise ValueError("DMLC_PS_ROOT_URI is not set; expected the scheduler's address, as gangline launch sets it")
    announce = environment.get("GANGLINE_ANNOUNCE_FD")
    port = _number(environment, "DMLC_PS_ROOT_PORT", 0 if announce else 1, 65535)
    workers = _number(environment, "DMLC_NUM_WORKER", 1, 1 << 16)
    servers = _number(environment, "DMLC_NUM_SERVER", 1, 1 << 16)
    rank = _number(environment, "DMLC_WORKER_ID", 0, workers - 1) if "DMLC_WORKER_ID" in environment else -1
    interface = local_address(host, environment.get("DMLC_INTERFACE"))
    descriptor = int(announce) if announce else None
    is_supervised = environment.get("GANGLINE_SUPERVISED") == "1"
    return ServerJob(role, host, port, workers, servers, rank, interface, descriptor, is_supervised)


def announce(descriptor: int, port: int) -> None:
    """Tell the parent, which holds the pipe's other end, where the scheduler listens."""
    os.write(descriptor, f"{port}\n".encode())
    os.close(descriptor)


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    word = environment.get(name)
    if word is None:
        raise ValueError(f"{name} is not set; expected a number from {least} to {most}, as gangline launch sets it")
    if not word.isascii() or not word.strip().isdecimal() or not least <= int(word) <= most:
        raise ValueError(f"{name} is {word!r}; expected a number from {least} to {most}")
    return int(word)
