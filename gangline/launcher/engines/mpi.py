"""Launcher for MPI: mpirun starts the workers, and a scheduler and servers run beside it on this host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from gangline.collectives.transports.addresses import resolved
from gangline.launcher.engines.hostfile import HostEntry
from gangline.launcher.job import Process

_INHERITED = ("GANGLINE_JOB_KEY_FILE", "GANGLINE_JOB_ID", "GANGLINE_INSECURE")
"""Variables of the launcher that mpirun passes on to other hosts."""


class Starter(Enum):
    """A program that starts workers: name, variables of a worker's rank and local rank, and signal to end workers."""

    OPEN_MPI = ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", signal.SIGUSR1)
    """It forwards SIGUSR1 to the ranks; at SIGTERM it kills them, and its exit code is 1."""
    HYDRA = ("mpirun", "PMI_RANK", "MPI_LOCALRANKID", signal.SIGTERM)
    """mpirun of MPICH, Intel MPI and MVAPICH."""
    SLURM = ("srun", "SLURM_PROCID", "SLURM_LOCALID", signal.SIGTERM)


def detect(mpirun: str) -> Starter:
    """Return the implementation of MPI that a command belongs to, by its --version."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise ValueError(f"{mpirun} cannot be run: {error.strerror}; install an MPI, or name its --mpirun") from error
    text = done.stdout + done.stderr
    if "Open MPI" in text or "OpenRTE" in text or "PRTE" in text:
        return Starter.OPEN_MPI
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return Starter.HYDRA
    raise ValueError(f"{mpirun} --version says {text[:80]!r}; expected Open MPI, MPICH or Intel MPI")


def mpi_table(
    table: Sequence[Process], mpirun: str, mpi: Starter, hosts: Sequence[HostEntry], options: Sequence[str]
) -> list[Process]:
    """Return the scheduler and servers of a job's table, and mpirun in place of its workers."""
    names = [f"{host.name}:{host.slots}" for host in hosts]
    shared = shared_variables(table)
    if mpi is Starter.OPEN_MPI:
        where = ["-H", ",".join(names)] if names else []
        known = [name for name in _INHERITED if name in os.environ]
        passed = [
            word for name in [*(name for name in shared if shared[name] is not None), *known] for word in ("-x", name)
        ]
    else:
        where = ["-hosts", ",".join(names)] if names else []
        passed = ["-genvall"]
    count = sum(process.role == "worker" for process in table)
    command = (mpirun, "-n", str(count), *where, *passed, *options)
    found = substitute(table, mpi, command)
    if hosts:  # rank 0 is on the first of them
        master = {"MASTER_ADDR": resolved(hosts[0].name.rpartition("@")[2])}
        found[-1] = replace(found[-1], environment={**found[-1].environment, **master})
    return found


def shared_variables(table: Sequence[Process]) -> dict[str, str | None]:
    """Return the variables that are the same in all workers, and without servers none of DMLC's."""
    has_servers = any(process.role != "worker" for process in table)
    first, *others = (process.environment for process in table if process.role == "worker")
    own = {"DMLC_WORKER_ID", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
    shared = {
        name: value
        for name, value in first.items()
        if name not in own
        and (has_servers or not name.startswith("DMLC_"))
        and all(name in other and other[name] == value for other in others)
    }
    stops = {*os.environ.get("GANGLINE_STOP_SIGNALS", "").split(","), "TERM", "USR1"} - {""}
    return {**shared, "GANGLINE_STOP_SIGNALS": ",".join(sorted(stops))}


def substitute(table: Sequence[Process], starter: Starter, start: Sequence[str]) -> list[Process]:
    """Return a table in which one program, by a command such as that of mpirun, starts the workers."""
    name, rank, local_rank, stop = starter.value
    worker = next(process for process in table if process.role == "worker")
    beside = [process for process in table if process.role != "worker"]
    shared = shared_variables(table)
    count = sum(process.role == "worker" for process in table)
    # The engine's own variables name the rank, but a job with servers reads DMLC_WORKER_ID.
    place = f"DMLC_WORKER_ID=${rank} RANK=${rank} LOCAL_RANK=${local_rank} WORLD_SIZE={count}"
    command = (*start, "sh", "-c", f'export {place}; exec "$0" "$@"', *worker.command)
    if not beside:
        command = (*start, *worker.command)
    return [
        *beside,
        replace(worker, role=name, rank=None, command=command, environment=shared, cpus=(), stop_signal=stop),
    ]
