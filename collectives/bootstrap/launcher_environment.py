"""A process's rank, job size and rendezvous address from the variables of torchrun, mpirun or Slurm."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


class RankInfo(NamedTuple):
    """Rank and size of a job's process, and the address of the job's rendezvous."""

    rank: int
    size: int
    host: str
    """Address at which other ranks reach rank 0; `LOOPBACK` if all ranks are known to be on one machine."""
    port: int


def from_environment(environment: Mapping[str, str]) -> RankInfo:
    """Return the rank info from the first of these families of launcher variables that is set.

    - RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun, or set by hand.
    - OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE: Open MPI's mpirun.
    - SLURM_PROCID, SLURM_NTASKS: Slurm's srun.
    - PMI_RANK, PMI_SIZE: mpirun of MPICH and Intel MPI.

    MASTER_ADDR and MASTER_PORT apply to all families and are optional under Open MPI's mpirun and srun; under MPICH and
    Intel MPI the port is required, as nothing else names the job. The default host under mpirun is loopback if all
    ranks are on one machine, and under srun the first host of the step. The default port is derived from the job's id.

    Raises:
        RuntimeError: if no variable is set.
        ValueError: if a variable is missing, out of range or not a number; the message names it.
    """
    return find_rank_info(None, None, None, environment)


def find_rank_info(rank: int | None, size: int | None, address: str | None, environment: Mapping[str, str]) -> RankInfo:
    """Return the rank info of the arguments; arguments that are None come from the environment (`from_environment`).

    Args:
        rank: rank of this process, from 0.
        size: number of processes.
        address: "HOST:PORT" at which rank 0 is reached.
        environment: environment variables.

    Raises:
        RuntimeError: if an argument is None and no launcher has set variables.
        TypeError: if the rank or the size is not an int.
        ValueError: if a value is missing, out of range or not a number.
    """
    for name, value in (("rank", rank), ("size", size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} is {value!r}; expected an int, or None to read it from the environment")
    family = next((family for family in _FAMILIES if any(name in environment for name in family)), None)
    if rank is None or size is None:
        if family is None:
            raise RuntimeError(
                "no launcher has set this process's rank (RANK and WORLD_SIZE, or those of an MPI or Slurm): "
                "start it with torchrun, mpirun or srun, run a function with collectives.spawn, "
                "or pass rank, size and address"
            )
        rank = _number(environment, family[0], least=0) if rank is None else rank
        size = _number(environment, family[1], least=1) if size is None else size
    if size < 1:
        raise ValueError(f"size is {size}; expected at least 1")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; expected 0 to {size - 1}, because the size is {size}")
    if address is not None:
        return RankInfo(rank, size, *_parse(address))
    return RankInfo(rank, size, *_rendezvous_address(family, size, environment))


_FAMILIES = _TORCHRUN, _OPEN_MPI, _SLURM, _MPICH = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("PMI_RANK", "PMI_SIZE"),
)
_LOCAL_SIZES = {
    _TORCHRUN: "LOCAL_WORLD_SIZE",
    _OPEN_MPI: "OMPI_COMM_WORLD_LOCAL_SIZE",
    _MPICH: "MPI_LOCALNRANKS",
}
"""Variable with the number of this job's processes on this host."""


def _rendezvous_address(family: tuple[str, str] | None, size: int, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port from MASTER_ADDR and MASTER_PORT, else from the launcher's other variables."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host and not port and size == 1:
        return LOOPBACK, 0  # a single rank needs no rendezvous
    if _are_on_one_machine(family, size, environment):
        host = LOOPBACK if host or family != _TORCHRUN else None
    if family == _OPEN_MPI:
        port = port or _port_from(environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid"))
    elif family == _SLURM:
        host = host or _slurm_host(environment)
        port = port or _port_from(environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID", "0"))
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        if not value:
            raise ValueError(
                f"{name} is not set; expected MASTER_ADDR and MASTER_PORT on every rank, the address of rank 0 "
                "(127.0.0.1 and a free port if all ranks are on one machine)"
            )
    assert host is not None
    return _normalized(host), _number({"MASTER_PORT": str(port)}, "MASTER_PORT", 1, 65535)


def _are_on_one_machine(family: tuple[str, str] | None, size: int, environment: Mapping[str, str]) -> bool:
    if family == _SLURM:
        return environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
    return family is not None and environment.get(_LOCAL_SIZES[family]) == str(size)


def _slurm_host(environment: Mapping[str, str]) -> str | None:
    """Return the first host of the step, where Slurm starts task 0: gpu07 of "gpu[07-09,12],cpu1"."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not hosts:
        return environment.get("SLURM_LAUNCH_NODE_IPADDR")
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", hosts)  # up to a comma outside brackets
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group()) if first is not None else None


def _port_from(*job: str | None) -> str | None:
    """Return a port derived from a job's ids, below the range of ephemeral ports."""
    if not all(job):
        return None
    return str((1 << 14) + zlib.crc32(" ".join(map(str, job)).encode()) % (1 << 14))


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"address is {address!r}; expected HOST:PORT with a port from 1 to 65535")
    return _normalized(host), int(port)


def _normalized(host: str) -> str:
    return LOOPBACK if host in ("localhost", "::1", "[::1]") else host.strip("[]")


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        others = [f"{other} is" for family in _FAMILIES if name in family for other in family if other in environment]
        raise ValueError(f"{name} is not set, but {', '.join(others)}; expected both, as launchers set them")
    limits = f"at least {least}" if most is None else f"{least} to {most}"
    if not text.strip().isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(f"{name} is {text!r}; expected a whole number, {limits}")
    return int(text)
