"""Processes of a job: role, command and environment of each, by the conventions of MXNet and torchrun."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

_HOST = "127.0.0.1"
_SUPERVISED = {"GANGLINE_SUPERVISED": "1"}  # wait for workers without limit: the launcher notices if none start
_NOT_INHERITED = ("DMLC_WORKER_ID", "GANGLINE_WORK_LOAD_LIST")
"""Variables of an outer job, removed if the launcher itself runs in a worker."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Options of `gangline launch`."""

    command: tuple[str, ...]
    """Command of each worker."""
    workers: int
    servers: int
    gpus: tuple[int, ...] = ()
    """GPUs, assigned to the workers in turn and shared if there are too few; empty: not restricted."""
    work_load_list: tuple[float, ...] | Literal["auto"] = ()
    """One load per worker; "auto": measured; empty: not set."""
    passed_on: tuple[str, ...] = ()
    """Names of environment variables that every process gets."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a job."""

    role: str
    """"worker", "server" or "scheduler"."""
    rank: int | None
    """Rank within the role; None for the scheduler."""
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    """Differences from the inherited environment; None removes a variable."""

    @property
    def label(self) -> str:
        """Name in the launcher's output: "worker 0" or "scheduler"."""
        return self.role if self.rank is None else f"{self.role} {self.rank}"

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of the process, given those it inherits."""
        merged = {**inherited, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    def shell_line(self) -> str:
        """Return the process as a POSIX shell command."""
        removed = [word for name, value in self.environment.items() if value is None for word in ("-u", name)]
        given = [f"{name}={value}" for name, value in self.environment.items() if value is not None]
        return shlex.join(["env", *removed, *given, *self.command])


def process_table(
    job: JobSpec, inherited: Mapping[str, str], *, root_port: int, master_port: int, cores: int
) -> list[Process]:
    """Return the processes of a job on this machine: scheduler and servers if it has any, then the workers by rank.

    Args:
        job: options of the job.
        inherited: environment that the processes inherit.
        root_port: TCP port of the scheduler (DMLC_PS_ROOT_PORT).
        master_port: TCP port of the store that torch.distributed and gangline.connect() use (MASTER_PORT).
        cores: number of cores for all workers; each gets an equal part as OMP_NUM_THREADS unless that is set.

    Raises:
        ValueError: if a variable to pass on is not set, or a GPU is not in CUDA_VISIBLE_DEVICES.
    """
    common = {
        **_with_own_commands(inherited),
        **_passed_on(job.passed_on, inherited),
        # Within a torchrun job: these workers have no torchrun agent that would host their store.
        **{name: None for name, value in inherited.items() if _belongs_to_outer_job(name, value)},
        "PYTHONUNBUFFERED": inherited.get("PYTHONUNBUFFERED") or "1",  # output is relayed at once
        "DMLC_PS_ROOT_URI": _HOST,
        "DMLC_PS_ROOT_PORT": str(root_port),
        "DMLC_NUM_WORKER": str(job.workers),
        "DMLC_NUM_SERVER": str(job.servers),
    }
    supervised: list[tuple[str, int | None]] = []
    if job.servers:
        supervised = [("scheduler", None), *(("server", rank) for rank in range(job.servers))]
    processes = [
        Process(
            role,
            rank,
            (sys.executable, "-m", f"gangline.kvstore.parameter_server.{role}"),
            {**common, **_SUPERVISED, "DMLC_ROLE": role},
        )
        for role, rank in supervised
    ]
    gpus = _gpus(job, inherited)
    for rank in range(job.workers):
        own = _worker(job, rank, master_port, inherited.get("OMP_NUM_THREADS") or str(max(1, cores // job.workers)))
        processes.append(Process("worker", rank, job.command, {**common, **own, **gpus[rank]}))
    return processes


def _belongs_to_outer_job(name: str, value: str) -> bool:
    return name.startswith("TORCHELASTIC_") or (name in _NOT_INHERITED and value != "auto")  # auto suits any job


def _worker(job: JobSpec, rank: int, master_port: int, threads: str) -> dict[str, str]:
    own = {
        "DMLC_ROLE": "worker",
        "DMLC_WORKER_ID": str(rank),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.workers),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": threads,
    }
    if job.work_load_list:
        words = job.work_load_list
        own["GANGLINE_WORK_LOAD_LIST"] = words if words == "auto" else ",".join(f"{load!r}" for load in words)
    return own


def _with_own_commands(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return PATH with this Python's folder appended: `gangline` is found there without an active environment."""
    own, path = os.path.dirname(sys.executable), inherited.get("PATH", os.defpath)
    return {} if own in path.split(os.pathsep) else {"PATH": f"{path}{os.pathsep}{own}"}


def _passed_on(names: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str | None]:
    missing = [name for name in names if name not in inherited]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not set here; expected an exported variable to pass on")
    return {name: inherited[name] for name in names}


def _gpus(job: JobSpec, inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """Return CUDA_VISIBLE_DEVICES of each worker; GPUs are numbered among those visible to the launcher."""
    if not job.gpus:
        return [{} for _ in range(job.workers)]
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in job.gpus]
    if visible is not None:
        available = [name.strip() for name in visible.split(",") if name.strip()]
        beyond = [gpu for gpu in job.gpus if gpu >= len(available)]
        if beyond:
            raise ValueError(
                f"GPU {beyond[0]} is not there: CUDA_VISIBLE_DEVICES is {visible!r}, so the GPUs are "
                f"{', '.join(map(str, range(len(available)))) or 'none'}"
            )
        names = [available[gpu] for gpu in job.gpus]
    assigned = [names[rank % len(names) :: job.workers] for rank in range(job.workers)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in assigned]


def free_ports(count: int) -> list[int]:
    """Return ``count`` distinct TCP ports of the loopback interface that are free now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [port.getsockname()[1] for port in held]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
