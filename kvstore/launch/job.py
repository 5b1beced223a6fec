"""What a job consists of: each process's role, command and environment, by MXNet's and torchrun's contract."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

_HOST = "127.0.0.1"
_SERVANT = {"GANGLINE_SUPERVISED": "1"}  # wait for workers: whether any will come, the launcher sees
_OUTER = ("DMLC_WORKER_ID", "GANGLINE_WORK_LOAD_LIST")
"""What a launcher inside another one's worker must not pass on."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the user asked for."""

    command: tuple[str, ...]
    """What each worker runs."""
    workers: int
    servers: int
    gpus: tuple[int, ...] = ()
    """Dealt out to the workers in turn; with fewer than workers each serves several. Empty: nothing is set."""
    work_load_list: tuple[float, ...] = ()
    """One load a worker; empty: nothing is set."""
    passed_on: tuple[str, ...] = ()
    """Variables of this environment that every process gets, wherever it runs."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a job."""

    role: str
    """"worker", "server" or "scheduler"."""
    rank: int | None
    """Its number within its role; None for the only scheduler."""
    command: tuple[str, ...]
    environment: Mapping[str, str | None]
    """What differs from the launcher's environment; None: the variable is taken out."""

    @property
    def label(self) -> str:
        """Its name in what the launcher prints: "worker 0" or "scheduler"."""
        return self.role if self.rank is None else f"{self.role} {self.rank}"

    def full_environment(self, launchers: Mapping[str, str]) -> dict[str, str]:
        """All of its variables, where the launcher's own are ``launchers``."""
        merged = {**launchers, **self.environment}
        return {name: value for name, value in merged.items() if value is not None}

    def shell_line(self) -> str:
        """The process as a line for a POSIX shell."""
        taken_out = [word for name, value in self.environment.items() if value is None for word in ("-u", name)]
        given = [f"{name}={value}" for name, value in self.environment.items() if value is not None]
        return shlex.join(["env", *taken_out, *given, *self.command])


def process_table(
    job: JobSpec, launchers: Mapping[str, str], *, root_port: int, master_port: int, cores: int
) -> list[Process]:
    """The processes of a job on this machine: scheduler and servers if it has servers, then its workers by rank.

    Args:
        job: what to run.
        launchers: the environment that the processes inherit.
        root_port: where the scheduler will listen (DMLC_PS_ROOT_PORT).
        master_port: where worker 0 keeps the store of torch.distributed and of gangline.connect() (MASTER_PORT).
        cores: how many the workers share; each gets its part as OMP_NUM_THREADS unless that is set.

    Raises:
        ValueError: a variable to pass on is not set; or CUDA_VISIBLE_DEVICES does not hold a GPU asked for.
    """
    common = {
        **_with_own_commands(launchers),
        **_passed_on(job.passed_on, launchers),
        # A launcher inside a torchrun job: its workers are no agent's, they keep their store themselves.
        **{name: None for name in launchers if name.startswith("TORCHELASTIC_") or name in _OUTER},
        "PYTHONUNBUFFERED": launchers.get("PYTHONUNBUFFERED") or "1",  # what is printed shows when it is printed
        "DMLC_PS_ROOT_URI": _HOST,
        "DMLC_PS_ROOT_PORT": str(root_port),
        "DMLC_NUM_WORKER": str(job.workers),
        "DMLC_NUM_SERVER": str(job.servers),
    }
    servants: list[tuple[str, int | None]] = []
    if job.servers:
        servants = [("scheduler", None), *(("server", rank) for rank in range(job.servers))]
    processes = [
        Process(
            role,
            rank,
            (sys.executable, "-m", f"gangline.kvstore.parameter_server.{role}"),
            {**common, **_SERVANT, "DMLC_ROLE": role},
        )
        for role, rank in servants
    ]
    gpus = _gpus(job, launchers)
    for rank in range(job.workers):
        own = _worker(job, rank, master_port, launchers.get("OMP_NUM_THREADS") or str(max(1, cores // job.workers)))
        processes.append(Process("worker", rank, job.command, {**common, **own, **gpus[rank]}))
    return processes


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
        own["GANGLINE_WORK_LOAD_LIST"] = ",".join(f"{load!r}" for load in job.work_load_list)
    return own


def _with_own_commands(launchers: Mapping[str, str]) -> dict[str, str]:
    """PATH, so that `gangline` and its neighbours are found where their environment is not active, behind all else."""
    own, path = os.path.dirname(sys.executable), launchers.get("PATH", os.defpath)
    return {} if own in path.split(os.pathsep) else {"PATH": f"{path}{os.pathsep}{own}"}


def _passed_on(names: Sequence[str], launchers: Mapping[str, str]) -> dict[str, str | None]:
    missing = [name for name in names if name not in launchers]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not set here; expected a variable to pass on, such as one exported")
    return {name: launchers[name] for name in names}


def _gpus(job: JobSpec, launchers: Mapping[str, str]) -> list[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES of each worker. GPUs are numbered as torch does, within those that the launcher may see."""
    if not job.gpus:
        return [{} for _ in range(job.workers)]
    visible = launchers.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in job.gpus]
    if visible is not None:
        there = [name.strip() for name in visible.split(",") if name.strip()]
        beyond = [gpu for gpu in job.gpus if gpu >= len(there)]
        if beyond:
            raise ValueError(
                f"GPU {beyond[0]} is not there: CUDA_VISIBLE_DEVICES is {visible!r}, so the GPUs are "
                f"{', '.join(map(str, range(len(there)))) or 'none'}"
            )
        names = [there[gpu] for gpu in job.gpus]
    dealt = [names[rank % len(names) :: job.workers] for rank in range(job.workers)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(own)} for own in dealt]


def free_ports(count: int) -> list[int]:
    """Different TCP ports of loopback that nobody uses now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [port.getsockname()[1] for port in held]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
