"""Processes of a job: role, command and environment of each, by the conventions of MXNet and torchrun."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from gangline.collectives.environments.job_name import RUN_ID
from gangline.collectives.transports import unix_sockets
from gangline.kvstore.parameter_server.environment import SERVER_MEMORY
from gangline.kvstore.restart_variables import ELASTIC, INCARNATION, LEAVING, PROCESS_RESTARTS, RESTART
from gangline.launcher.binding import LOCALHOST, NCCL_MEMCPY, Binding, Host, bind

_log = logging.getLogger("gangline")

_SUPERVISED = {"GANGLINE_SUPERVISED": "1"}  # wait for workers without limit: the launcher detects failed starts
_LOADS = "GANGLINE_WORK_LOAD_LIST"
_ATTEMPTS = 100
_NOT_INHERITED = ("DMLC_WORKER_ID", "DMLC_SERVER_ID", INCARNATION, LEAVING, PROCESS_RESTARTS, ELASTIC, _LOADS)
"""Variables of an outer job, removed if the launcher itself runs in a worker."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Options of `gangline launch`."""

    command: tuple[str, ...]
    """Command of each worker."""
    workers: int
    servers: int
    work_load_list: tuple[float, ...] | Literal["auto"] = ()
    """One load per worker; "auto": measured; empty: not set."""
    passed_on: tuple[str, ...] = ()
    """Names of environment variables that every process gets."""
    binds_cores: bool = True
    """Bind each worker to cores of its own."""
    idle_surplus: bool = False
    """Leave out workers beyond the GPUs or slots of the hosts; False: they are an error."""
    restart: int = 0
    """Number of restarts of the job."""
    restart_processes: int = 0
    """Maximum number of restarts of single workers and servers while the job runs."""
    elastic: tuple[int, int] | None = None
    """Minimum and maximum number of workers of an elastic job; None: not elastic."""
    server_memory: tuple[int, ...] = ()
    """Bytes of each server, in whose proportion it holds keys; empty: by their free memory."""
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Name of the job, the same after restarts."""

    def loads_text(self, workers: int | None = None) -> str:
        """Return the loads of the first ``workers``, or of all, in the form of `--work-load-list`; "" if not set."""
        loads = self.work_load_list
        return loads if loads == "auto" else ",".join(map(repr, loads[:workers]))


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a job."""

    role: str
    """"worker", "server", "scheduler", or the name of a program that runs workers."""
    rank: int | None
    """Rank within the role; None for the scheduler."""
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    """Differences from the inherited environment; None removes a variable."""
    host: int = 0
    """Number of the process's host among the hosts of the job."""
    cpus: tuple[int, ...] = ()
    """CPUs that the process may use; empty: not restricted."""
    document: str | None = None
    """First line of standard input, which stays open, for a supervisor on another host; None: empty input."""

    stop_signal: int = signal.SIGTERM
    """Signal that asks the process to end."""
    is_spare: bool = False
    """True for a slot of an elastic job whose worker may be started later."""

    @property
    def is_worker(self) -> bool:
        """True for a worker, and for another program that runs workers: mpirun, srun, a supervisor on another host."""
        return self.role not in ("scheduler", "server")

    @property
    def label(self) -> str:
        """Name in the launcher's output: "worker 0" or "scheduler"."""
        return self.role if self.rank is None else f"{self.role} {self.rank}"

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Process:
        """Return a process from a result of `dataclasses.asdict` that was sent as JSON."""
        return cls(**{**fields, "command": tuple(fields["command"]), "cpus": tuple(fields["cpus"])})

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of the process, including ``inherited``."""
        merged = {**inherited, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    def shell_line(self) -> str:
        """Return the process as a POSIX shell command."""
        removed = [word for name, value in self.environment.items() if value is None for word in ("-u", name)]
        given = [f"{name}={value}" for name, value in self.environment.items() if value is not None]
        bound = ["taskset", "-c", ",".join(map(str, self.cpus))] if self.cpus else []
        return shlex.join(["env", *removed, *given, *bound, *self.command])


def process_table(
    job: JobSpec, inherited: Mapping[str, str], *, root_port: int, master_port: int, hosts: Sequence[Host]
) -> list[Process]:
    """Return the processes of a job: scheduler and servers if it has any, then the workers by rank.

    The scheduler and worker 0 are on the first host, the servers on all hosts in turn. `bind` assigns the workers'
    hosts, GPUs and cores; OMP_NUM_THREADS and NCCL_SHM_USE_CUDA_MEMCPY are not changed if set.
    """
    places = job.workers if job.elastic is None else job.elastic[1]
    bindings = bind(hosts, places, idle_surplus=job.idle_surplus)
    workers = len(bindings) if job.elastic is None else job.workers
    used = sorted({binding.node_rank for binding in bindings})
    root = bindings[0].host.address
    common = {
        **_with_own_commands(inherited),
        **_passed_on(job.passed_on, inherited),
        # Within a torchrun job: no torchrun agent hosts a store for these workers.
        **{name: None for name in inherited if _belongs_to_outer_job(name, inherited)},
        "PYTHONUNBUFFERED": inherited.get("PYTHONUNBUFFERED") or "1",  # output is relayed at once
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": str(root_port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(job.servers),
        RESTART: str(job.restart),
        RUN_ID: job.run_id,
    }
    if job.elastic is not None:
        common[ELASTIC] = "{}:{}".format(*job.elastic)
    if job.restart_processes:
        common[PROCESS_RESTARTS] = str(job.restart_processes)
    supervised: list[tuple[str, int | None]] = []
    if job.servers:
        supervised = [("scheduler", None), *(("server", rank) for rank in range(job.servers))]
    has_server_ranks = job.restart_processes or job.server_memory
    processes = [
        Process(
            role,
            rank,
            (sys.executable, "-m", f"gangline.kvstore.parameter_server.{role}"),
            {
                **common,
                **_SUPERVISED,
                "DMLC_ROLE": role,
                **({"DMLC_SERVER_ID": str(rank)} if rank is not None and has_server_ranks else {}),
                **({SERVER_MEMORY: str(job.server_memory[rank])} if rank is not None and job.server_memory else {}),
            },
            used[(rank or 0) % len(used)],
        )
        for role, rank in supervised
    ]
    kept = {name: inherited[name] for name in ("OMP_NUM_THREADS", NCCL_MEMCPY) if inherited.get(name)}
    for binding in bindings:
        own = _worker(job, binding, workers, root, master_port)
        environment = {**common, **own, **binding.environment(), **kept}
        cpus = binding.cpus if job.binds_cores else ()
        is_spare = binding.rank >= workers
        node = binding.node_rank
        processes.append(Process("worker", binding.rank, job.command, environment, node, cpus, is_spare=is_spare))
    if not job.restart and any(NCCL_MEMCPY in {*one.environment()} - {*kept} for one in bindings):
        _log.info("%s=1 is set for workers: the GPUs have no access to each other's memory", NCCL_MEMCPY)
    return processes


def _belongs_to_outer_job(name: str, inherited: Mapping[str, str]) -> bool:
    if name == _LOADS:
        return "DMLC_ROLE" in inherited and inherited[name] != "auto"  # auto suits any job
    return name.startswith("TORCHELASTIC_") or name in _NOT_INHERITED


def _worker(job: JobSpec, binding: Binding, workers: int, master: str, master_port: int) -> dict[str, str]:
    own = {
        "DMLC_ROLE": "worker",
        "DMLC_WORKER_ID": str(binding.rank),
        "RANK": str(binding.rank),
        "LOCAL_RANK": str(binding.local_rank),
        "GROUP_RANK": str(binding.node_rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(binding.local_size),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(master_port),
    }
    if job.work_load_list:
        own[_LOADS] = job.loads_text(workers)
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


def free_ports(count: int, address: str = LOCALHOST) -> list[int]:
    """Return ``count`` distinct TCP ports that are free now at an address of this host, and so are their Unix sockets.

    On one host, a job does not listen on the ports themselves: they name Unix sockets.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(_ATTEMPTS):
        with ExitStack() as stack:
            held = [stack.enter_context(socket.socket(family)) for _ in range(count)]
            for port in held:
                port.bind(("", 0))  # any address: an IPv6-only host has no 127.0.0.1
            ports: list[int] = [port.getsockname()[1] for port in held]
        if all(unix_sockets.is_free(purpose, port) for port in ports for purpose in ("scheduler", "store")):
            return ports
    raise OSError(errno.EADDRINUSE, f"the Unix sockets of {_ATTEMPTS} free ports such as {ports[0]} are in use")
