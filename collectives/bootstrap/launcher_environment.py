"""A process's rank, job size and rendezvous address, from arguments or its launcher's environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gangline.collectives import environments
from gangline.collectives.environments import LOOPBACK, LauncherEnvironment
from gangline.collectives.environments.environment import number


class RankInfo(NamedTuple):
    """Rank and size of a job's process, and the address of the job's rendezvous."""

    rank: int
    size: int
    host: str
    """Address at which other ranks reach rank 0; `LOOPBACK` if all ranks are known to be on one machine."""
    port: int


def find_rank_info(rank: int | None, size: int | None, address: str | None, variables: Mapping[str, str]) -> RankInfo:
    """Return the rank info from arguments; arguments of None come from the launcher's environment.

    MASTER_ADDR and MASTER_PORT override the address that the launcher's environment gives. Under MPICH, Intel MPI and
    MVAPICH the port is required, as nothing else names the job.

    Raises:
        RuntimeError: if an argument is None and no launcher has set variables.
        TypeError: if the rank or the size is not an int.
        ValueError: if a value is missing, out of range or not a number; the message names the variable.
    """
    for name, value in (("rank", rank), ("size", size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} is {value!r}; expected an int, or None to read it from the environment")
    is_complete = rank is not None and size is not None and address is not None
    launcher = None if is_complete else environments.find(variables)
    if rank is None or size is None:
        if launcher is None:
            raise RuntimeError(
                "no launcher has set this process's rank (RANK and WORLD_SIZE, or those of an engine that `gangline "
                f"env` names){_hint(variables)}: start it with torchrun, mpirun or srun, run a function with "
                "gangline.spawn, or pass rank, size and address"
            )
        rank = launcher.rank() if rank is None else rank
        size = launcher.size() if size is None else size
    if size < 1:
        raise ValueError(f"size is {size}; expected at least 1")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; expected 0 to {size - 1}, because the size is {size}")
    if address is not None:
        return RankInfo(rank, size, *_parse(address))
    return RankInfo(rank, size, *_rendezvous_address(launcher, size, variables))


def _hint(variables: Mapping[str, str]) -> str:
    """Return the missing variables of an incomplete environment of a rank."""
    if "GANGLINE_SIZE" not in variables:
        for name in ("JOB_COMPLETION_INDEX", "PMIX_RANK"):
            if name in variables:
                return f"; {name} is set, but GANGLINE_SIZE, the number of processes, is not"
    if "SLURM_PROCID" in variables:
        return "; this is a batch script or a shell of Slurm, not a task of srun"
    return ""


def _rendezvous_address(
    launcher: LauncherEnvironment | None, size: int, variables: Mapping[str, str]
) -> tuple[str, int]:
    """Return host and port from MASTER_ADDR and MASTER_PORT, else from the launcher's other variables."""
    host, port_words = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if not host and not port_words and size == 1:
        return LOOPBACK, 0  # a single rank needs no rendezvous
    port = number(variables, "MASTER_PORT", 1, 65535) if port_words else None
    if launcher is not None:
        host = LOOPBACK if launcher.is_on_one_host(size) else host or launcher.host()
        port = launcher.port() if port is None else port
    if not host or port is None:
        raise ValueError(
            f"{'MASTER_PORT' if host else 'MASTER_ADDR'} is not set; expected MASTER_ADDR and MASTER_PORT on every "
            "rank, the address of rank 0 (127.0.0.1 and a free port if all ranks are on one machine)"
        )
    return _normalized(host), port


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"address is {address!r}; expected HOST:PORT with a port from 1 to 65535")
    return _normalized(host), int(port)


def _normalized(host: str) -> str:
    return LOOPBACK if host in ("localhost", "::1", "[::1]") else host.strip("[]")
