"""Jobs without a launcher for servers: under torchrun the workers start the scheduler and the servers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from gangline.collectives.bootstrap import rendezvous
from gangline.collectives.environments import LOOPBACK
from gangline.collectives.environments.job_key import inherited_key
from gangline.collectives.transports.addresses import required_key
from gangline.kvstore.parameter_server.environment import ServerJob

_END_SECONDS = 10.0  # time for the processes to end once the job is over
_POLL_SECONDS = 0.02


class ChildServers:
    """Scheduler and server processes started by this worker; they end with the job or with this process."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start_scheduler(self, workers: int, servers: int, host: str) -> int:
        """Start a scheduler on a free port and return the port."""
        reading, writing = os.pipe()
        try:
            self.start("scheduler", workers, servers, host, 0, writing)
        finally:
            os.close(writing)
        with os.fdopen(reading) as pipe:
            port = pipe.readline()
        if not port:
            raise RuntimeError("the scheduler started by worker 0 exited at once; see its output")
        return int(port)

    def close(self, is_job_over: Callable[[], bool]) -> None:
        """Wait until the processes have ended; kill those that have not ended 10 s after the job.

        They end by themselves once all workers have left or died, which ``is_job_over`` returns.
        """
        over_at = math.inf
        while any(child.poll() is None for child in self._children):
            if over_at == math.inf and is_job_over():
                over_at = time.monotonic()
            if time.monotonic() - over_at > _END_SECONDS:
                self.kill()
                return
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """Kill the processes."""
        for child in self._children:
            child.kill()
            child.wait()

    def start(self, role: str, workers: int, servers: int, host: str, port: int, announce: int | None = None) -> None:
        """Start a scheduler, which writes its port to the descriptor ``announce``, or a server."""
        environment = {
            **os.environ,
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "GANGLINE_PARENT": str(os.getpid()),
        }
        environment.pop("DMLC_WORKER_ID", None)
        if announce is not None:
            environment["GANGLINE_ANNOUNCE_FD"] = str(announce)
        started: Future[subprocess.Popen[bytes]] = Future()
        key = required_key(host)

        def start() -> None:
            try:
                with inherited_key(key) as (variables, descriptors):
                    child = subprocess.Popen(  # noqa: S603  our own module
                        [sys.executable, "-m", f"gangline.kvstore.parameter_server.{role}"],
                        env={**environment, **variables},
                        pass_fds=[*descriptors, *([] if announce is None else [announce])],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
            except Exception as error:  # noqa: BLE001  raised below
                started.set_exception(error)
            else:
                started.set_result(child)
                child.wait()  # the kernel kills a process when the thread that started it ends

        threading.Thread(target=start, name=f"gangline-{role}", daemon=True).start()
        self._children.append(started.result())


def start_child_servers(timeout: float) -> tuple[ServerJob, ChildServers]:
    """Start one server per host and the scheduler on worker 0's host. Collective: all workers must call it.

    Ranks come from torchrun's variables; RuntimeError if the environment describes no job.
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
            child_servers.start("server", job.size, servers, host, int(port))
        return ServerJob("worker", host, int(port), job.size, servers, job.rank, interface, None), child_servers
    except BaseException:
        child_servers.kill()
        raise
    finally:
        job.close()
