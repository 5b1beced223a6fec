"""Role of this process in a parameter-server job, read from DMLC_* variables as MXNet and ps-lite define them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from gangline.collectives.environments.environment import number
from gangline.collectives.transports.addresses import local_address, meeting_address
from gangline.kvstore.restart_variables import ELASTIC

ROLES = ("scheduler", "server", "worker")
SERVER_MEMORY = "GANGLINE_SERVER_MEMORY"
"""Variable with the memory of a server, such as 8G, by which keys are placed."""


class ServerJob(NamedTuple):
    """Role and settings of one process in a job with servers."""

    role: str
    host: str
    """Address of the scheduler."""
    port: int
    workers: int
    servers: int
    rank: int
    """Requested rank; -1: any."""
    interface: str
    """Address of this host as other hosts reach it."""
    announce_fd: int | None
    """Pipe to which the scheduler writes its port."""
    is_supervised: bool = False
    """True if a launcher ends scheduler and servers; they then wait for the first worker without a timeout."""
    memory: int = 0
    """Bytes of a server, as the user has set them; 0: not set."""

    @property
    def scheduler(self) -> str:
        """ZeroMQ endpoint of the scheduler."""
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def from_environment(environment: Mapping[str, str] = os.environ) -> ServerJob:
    """Read DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER.

    DMLC_WORKER_ID or DMLC_SERVER_ID requests a rank; GANGLINE_INTERFACE or DMLC_INTERFACE names the interface by which
    other hosts reach this one. ValueError if a variable is missing, out of range or not a number, or the scheduler's
    host is unknown; the message names it.
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
    name, count = ("DMLC_SERVER_ID", servers) if role == "server" else ("DMLC_WORKER_ID", workers)
    most = (1 << 16) - 1 if role == "worker" and environment.get(ELASTIC) else count - 1  # new workers get new ranks
    rank = _number(environment, name, 0, most) if name in environment else -1
    host = meeting_address(host, environment)
    try:
        interface = local_address(host, environment)
    except OSError as error:
        raise ValueError(
            f"DMLC_PS_ROOT_URI is {host!r}, which this host cannot resolve or reach ({error}); expected the "
            "scheduler's address"
        ) from error
    descriptor = int(announce) if announce else None
    is_supervised = environment.get("GANGLINE_SUPERVISED") == "1"
    words = environment.get(SERVER_MEMORY) if role == "server" else None
    memory = parse_bytes(words, SERVER_MEMORY) if words else 0
    return ServerJob(role, host, port, workers, servers, rank, interface, descriptor, is_supervised, memory)


def parse_bytes(words: str, what: str) -> int:
    """Return the bytes of a size such as 8G, 512M or 1000000; ValueError if it is none, ``what`` names it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", words.strip(), re.IGNORECASE)
    nbytes = int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if nbytes < 1:
        raise ValueError(f"{what} is {words!r}; expected bytes above 0, such as 8G, 512M or 1000000")
    return nbytes


def load_of(rank: int) -> float:
    """Return the load of a worker of an elastic job, by GANGLINE_WORK_LOAD_LIST; workers beyond its end have 1."""
    words = os.environ.get("GANGLINE_WORK_LOAD_LIST", "").split(",")
    return float(words[rank]) if rank < len(words) and words[rank] else 1.0


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    if name not in environment:
        raise ValueError(f"{name} is not set; expected a number from {least} to {most}, as gangline launch sets it")
    return number(environment, name, least, most)
