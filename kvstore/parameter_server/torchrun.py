"""Jobs without a launcher for servers: under torchrun the workers start the scheduler and the servers."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from gangline.collectives.bootstrap import rendezvous
from gangline.collectives.bootstrap.launcher_environment import LOOPBACK
from gangline.collectives.processes.parent_death import die_with_parent
from gangline.kvstore.parameter_server.environment import ServerJob


class ChildServers:
    """Scheduler and server processes started by this worker; they end with the job or with this process."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start_scheduler(self, workers: int, servers: int, host: str) -> int:
        """Start a scheduler on a free port and return the port."""
        reading, writing = os.pipe()
        try:
            self._start("scheduler", workers, servers, host, 0, writing)
        finally:
            os.close(writing)
        with os.fdopen(reading) as pipe:
            port = pipe.readline()
        if not port:
            raise RuntimeError("the scheduler started by worker 0 exited at once; see its output")
        return int(port)

    def start_server(self, workers: int, servers: int, host: str, port: int) -> None:
        """Start a server."""
        self._start("server", workers, servers, host, port, None)

    def close(self) -> None:
        """Wait until the processes have ended, which they do when all workers have left or died."""
        for child in self._children:
            child.wait()

    def kill(self) -> None:
        """Kill the processes."""
        for child in self._children:
            child.kill()
        self.close()

    def _start(self, role: str, workers: int, servers: int, host: str, port: int, announce: int | None) -> None:
        environment = {
            **os.environ,
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
        }
        environment.pop("DMLC_WORKER_ID", None)
        if announce is not None:
            environment["GANGLINE_ANNOUNCE_FD"] = str(announce)
        child = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", f"gangline.kvstore.parameter_server.{role}"],
            env=environment,
            pass_fds=[] if announce is None else [announce],
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
            start_new_session=True,
        )
        self._children.append(child)


def start_child_servers(timeout: float) -> tuple[ServerJob, ChildServers]:
    """Start one server per host and the scheduler on worker 0's host; ranks come from torchrun's variables.

    Collective: all workers must call it.

    Raises:
        RuntimeError: if the environment describes no job.
        StallError: if a worker does not take part within the timeout.
    """
    try:
        job = rendezvous.Rendezvous(timeout=timeout)
    except RuntimeError as error:
        raise RuntimeError(
            "this process belongs to no job, so there are no servers; start it with "
            "'gangline launch -n WORKERS -- COMMAND', torchrun, mpirun or srun"
        ) from error
    child_servers = ChildServers()
    try:
        hosts = rendezvous.hosts(job.exchange) if job.size > 1 else [0]
        servers = len(set(hosts))
        interface = job.interface() if job.size > 1 else LOOPBACK
        address = b""
        if job.rank == 0:
            address = f"{interface} {child_servers.start_scheduler(job.size, servers, interface)}".encode()
        host, _, port = (job.exchange(address)[0] if job.size > 1 else address).decode().rpartition(" ")
        if hosts.index(hosts[job.rank]) == job.rank:  # the first worker of its host
            child_servers.start_server(job.size, servers, host, int(port))
        return ServerJob("worker", host, int(port), job.size, servers, job.rank, interface, None), child_servers
    except BaseException:
        child_servers.kill()
        raise
    finally:
        job.close()
