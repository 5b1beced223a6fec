"""The processes of a job that a bench measures: from the fork server, or programs of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import gangline
from gangline.collectives.processes.parent_death import die_with_parent
from gangline.kvstore.launch.job import free_ports

if TYPE_CHECKING:
    from gangline.bench.hosts import Hosts

_ROOT = Path(gangline.__file__).resolve().parent.parent


@dataclass(frozen=True)
class Plan:
    """What a job consists of."""

    module: str
    """A file of bench/peers, without its ``.py``, whose ``join()`` makes a process a worker."""
    workers: int
    servers: int = 0
    """With a scheduler; 0: neither."""
    setting: str = ""
    """What the table names."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all processes."""
    threads: int = 1
    """Of torch, in each worker."""
    interpreter: Path | None = None
    """A Python that each process starts anew; None: all come from the fork server, which is quicker to start, and makes
    small messages a fifth quicker too: such processes share memory, and the processor's caches with it. So it is for
    sides that stand beside others from there."""
    serving: str = ""
    """What scheduler and servers run where they are started anew: a line of Python."""


@dataclass(frozen=True)
class Place:
    """Where a job runs."""

    address: str
    """Of scheduler, servers, or, where there are none, of worker 0."""
    port: int
    namespaces: tuple[str, str] | None
    """Of the servers and of the workers."""

    @classmethod
    def on(cls, hosts: Hosts | None) -> Place:
        """A place on the machine itself, or on two hosts: the servers on the first."""
        (port,) = free_ports(1)
        if hosts is None:
            return cls("127.0.0.1", port, None)
        return cls(hosts.addresses[0], port, (hosts.names[0], hosts.names[1]))

    def enter(self, role: str) -> None:
        """Move this process to where one of its role runs."""
        if self.namespaces is not None:
            from gangline.bench.hosts import enter

            enter(self.namespaces[role == "worker"])

    def environment(self, plan: Plan, role: str, rank: int) -> dict[str, str]:
        """What tells a process who it is, by MXNet's contract and by torchrun's."""
        if not plan.servers:
            return {
                "RANK": str(rank),
                "WORLD_SIZE": str(plan.workers),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(plan.workers),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.port),
            }
        return {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": self.address,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(plan.workers),
            "DMLC_NUM_SERVER": str(plan.servers),
            **({"DMLC_WORKER_ID": str(rank)} if role == "worker" else {}),
        }


def _parts(plan: Plan) -> list[tuple[str, int]]:
    """Role and rank of each process."""
    servants = [("scheduler", 0), *(("server", rank) for rank in range(plan.servers))] if plan.servers else []
    return [*servants, *(("worker", rank) for rank in range(plan.workers))]


class Processes(Protocol):
    """The processes of a job."""

    pids: dict[str, int]
    """By role and rank, as in "worker 0"."""

    def last_words(self) -> str:
        """What one that ended has left."""
        ...

    def close(self) -> None:
        """End those that still run."""
        ...


class Forked:
    """Processes from the fork server, which has imported torch."""

    def __init__(self, plan: Plan, place: Place, path: str) -> None:
        from gangline.collectives.processes.spawning import Ranks

        parts = _parts(plan)
        self._ranks = Ranks(_play, len(parts), (plan, place, path), threads=plan.threads, opener=_Rank)
        labels = (f"{role} {rank}" for role, rank in parts)
        self.pids = dict(zip(labels, self._ranks.pids, strict=True))

    def last_words(self) -> str:  # noqa: D102  as Processes says
        return "it was killed, or left"  # what fails by itself says so

    def close(self) -> None:  # noqa: D102  likewise
        self._ranks.close()


class _Rank:
    """What `Ranks` opens in a process in place of a communicator: its number."""

    def __init__(self, rank: int, *_: object, **__: object) -> None:
        self.rank = rank

    def close(self) -> None:
        """Nothing is held."""


def _play(own: _Rank, plan: Plan, place: Place, path: str) -> None:
    """Be one of a job's processes."""
    role, rank = _parts(plan)[own.rank]
    os.environ.update({**plan.env, **place.environment(plan, role, rank)})
    try:
        place.enter(role)
        _work(plan, role, path)
    except Exception as error:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as driver:  # the driver may be gone
            driver.connect(path)
            driver.sendall(json.dumps({"failed": f"{role} {rank}: {type(error).__name__}: {error}"}).encode() + b"\n")
        raise


def _work(plan: Plan, role: str, path: str) -> None:
    if role == "worker":
        from gangline.bench.peers.worker import serve

        serve(import_module(f"gangline.bench.peers.{plan.module}").join(), path)
    elif role == "server":
        from gangline.kvstore.parameter_server import environment
        from gangline.kvstore.parameter_server.server import server

        server.serve(environment.from_environment())
    else:
        from gangline.kvstore.parameter_server.scheduler import scheduler

        scheduler.main()


def _begin(parent: int, place: Place, role: str) -> None:
    """What a process does before its program."""
    die_with_parent(parent, signal.SIGKILL)
    place.enter(role)


class Programs:
    """Processes that are started anew; each ends with this one."""

    def __init__(self, plan: Plan, place: Place, path: str) -> None:
        assert plan.interpreter is not None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self._started: list[subprocess.Popen[bytes]] = []
        self.pids: dict[str, int] = {}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        threads = {"OMP_NUM_THREADS": str(plan.threads)}
        try:
            for role, rank in _parts(plan):
                worker = ["-m", "gangline.bench.peers.worker", plan.module, path]
                process = subprocess.Popen(
                    [str(plan.interpreter), *(worker if role == "worker" else ["-c", plan.serving])],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    cwd=_ROOT if role == "worker" else "/",  # which finds bench, and for a server nothing of ours
                    env={**inherited, **threads, **plan.env, **place.environment(plan, role, rank)},
                    start_new_session=True,  # Ctrl-C is the driver's
                    preexec_fn=partial(_begin, os.getpid(), place, role),
                )
                self._started.append(process)
                self.pids[f"{role} {rank}"] = process.pid
        except BaseException:
            self.close()
            raise

    def last_words(self) -> str:  # noqa: D102  as Processes says
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:  # noqa: D102  likewise
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
        self._log.close()
