"""Actors of a job on a Ray cluster: places in a placement group, and what runs in them."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gangline.collectives.environments.job_key import DESCRIPTOR, JobKey, open_descriptor
from gangline.collectives.liveness.process_state import boot_id
from gangline.launcher.binding import LOCALHOST, Host
from gangline.launcher.function_process import search_path, start_launcher
from gangline.launcher.job import JobSpec, Process, free_ports, process_table

_OWN_TO_NODE = ("PATH", "OMP_NUM_THREADS")
"""Variables of the launcher that each node and Ray set themselves."""
_READ = 1 << 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of a job's actors and how Ray places them."""

    worker_resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    """Ray's resources of each worker, such as {"CPU": 4, "GPU": 1}."""
    server_resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    strategy: str = "PACK"
    """Ray's strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    timeout: float = 300.0
    """Seconds until all resources must be there."""


class Member:
    """Actor of one worker or server; the actor of server 0 runs the scheduler too."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path += [one for one in path if one not in sys.path]
        self._popen: subprocess.Popen[bytes] | None = None

    def host(self) -> tuple[str, str, list[int]]:
        """Return this host's address, its name, and two free ports."""
        return ray.util.get_node_ip_address(), f"{socket.gethostname()} {boot_id()}", free_ports(2)

    def call(self, environment: Mapping[str, str | None], key: str, fn: Callable[..., Any], args: Any) -> Any:
        """Call a function in this process, which gets the variables and the job's key first."""
        known = JobKey.from_hex(key)
        own = {"GANGLINE_JOB_ID": known.job_id(), **environment, DESCRIPTOR: str(open_descriptor(known))}
        for name, value in own.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        return fn(*args)

    def start(self, table: Sequence[Process], key: str, grace: float, is_relayed: bool) -> None:
        """Start processes under a launcher; ``is_relayed``: their output goes to `output`, else to Ray's log."""
        pipe = subprocess.PIPE if is_relayed else None
        environment = {**os.environ, "PYTHONPATH": search_path(os.environ)}
        here = [
            one if one.role == "worker" else replace(one, command=(sys.executable, *one.command[1:])) for one in table
        ]
        self._popen = start_launcher(here, environment, grace, stdout=pipe, stderr=pipe, key=key)

    def finish(self) -> int:
        """Wait for the processes and return their exit code."""
        assert self._popen is not None
        return self._popen.wait()

    def output(self) -> Iterator[tuple[int, bytes]]:
        """Return the lines of the processes as (1 or 2, data) while they come, then (0, exit code as text)."""
        assert self._popen is not None
        with selectors.DefaultSelector() as selector:
            for number, pipe in ((1, self._popen.stdout), (2, self._popen.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _READ)
                    if data:
                        yield key.data, data
                    else:
                        selector.unregister(key.fileobj)
        yield 0, str(self._popen.wait()).encode()

    def stop(self) -> None:
        """Stop the processes: SIGTERM, then SIGKILL after the grace period. A second call kills them at once."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.terminate()

    def end(self) -> None:
        """Stop the processes and wait for their ends."""
        self.stop()
        if self._popen is not None:
            self._popen.wait()


class Job:
    """Actors of one job in a placement group, with each process's environment; closing it ends all of them.

    Workers are called in the actor's process (``is_function``), else they are processes of their own.
    """

    def __init__(
        self, job: JobSpec, placement: Placement, *, is_function: bool, env: Mapping[str, str], key: JobKey
    ) -> None:
        resources = [*[placement.worker_resources] * job.workers, *[placement.server_resources] * job.servers]
        self._group = placement_group([dict(one) for one in resources], strategy=placement.strategy)
        self.workers: list[Any] = []
        self.servers: list[Any] = []
        self.calls: list[Any] = []
        """References of calls whose errors Ray would log if nobody asked for them."""
        self.key = key.hex()
        try:
            _wait_until_placed(self._group, resources, placement.timeout)
            actors = [
                _actor(self._group, index, one, is_threaded=index >= job.workers or not is_function)
                for index, one in enumerate(resources)
            ]
            self.workers, self.servers = actors[: job.workers], actors[job.workers :]
            hosts = ray.get([one.host.remote() for one in actors], timeout=placement.timeout)
            self.tables = _tables(job, hosts, env)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes of all actors, then the actors, and give the resources back."""
        actors = [*self.workers, *self.servers]
        for one in self.servers:
            with suppress(RayError):  # it has ended, and its processes with it
                ray.get(one.end.remote(), timeout=60)
        for one in actors:
            with suppress(RayError):
                ray.kill(one)
        for one in self.calls:
            with suppress(RayError):
                ray.get(one, timeout=10)
        self.workers, self.servers, self.calls = [], [], []
        remove_placement_group(self._group)


def in_cluster(address: str | None) -> bool:
    """Connect this program to a Ray cluster unless it is connected; return True if it was not.

    The cluster is that of the address, of RAY_ADDRESS, or one of this machine, started if needed.
    """
    if ray.is_initialized():
        return False
    ray.init(address=address, include_dashboard=None if address else False)
    return True


def _actor(group: Any, index: int, resources: Mapping[str, float], *, is_threaded: bool) -> Any:
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    options = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": others,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    }
    if is_threaded:  # so that it can be stopped while it waits; functions run in the main thread
        options["max_concurrency"] = 3
    path = [one or os.getcwd() for one in sys.path]
    return ray.remote(Member).options(**options).remote(path)


def _wait_until_placed(group: Any, resources: Sequence[Mapping[str, float]], timeout: float) -> None:
    try:
        ray.get(group.ready(), timeout=timeout)
    except GetTimeoutError as error:
        wanted = ", ".join(str(dict(one)) for one in resources)
        raise RuntimeError(
            f"Ray did not place the job within {timeout:g} s: it needs {wanted}; the cluster has "
            f"{ray.cluster_resources()} and {ray.available_resources()} of them free"
        ) from error


def _tables(job: JobSpec, hosts: Sequence[tuple[str, str, list[int]]], env: Mapping[str, str]) -> list[list[Process]]:
    """Return the processes of each actor: one per worker, then one per server, the first with the scheduler."""
    names = [name for _, name, _ in hosts]
    is_one_host = len(set(names)) == 1
    first_server = hosts[job.workers if job.servers else 0]
    table = process_table(
        job, dict(os.environ), root_port=first_server[2][0], master_port=hosts[0][2][1], hosts=[Host()]
    )
    addresses = {
        "DMLC_PS_ROOT_URI": LOCALHOST if is_one_host else first_server[0],
        "MASTER_ADDR": LOCALHOST if is_one_host else hosts[0][0],
    }
    tables: list[list[Process]] = [[] for _ in hosts]
    for one in table:
        own: dict[str, str | None] = {**one.environment, **env}
        for name in _OWN_TO_NODE:
            if name not in env and name not in job.passed_on:
                own.pop(name, None)
        own |= {name: address for name, address in addresses.items() if name in own}
        index = one.rank or 0
        if one.role == "worker":
            name = names[index]
            own["LOCAL_RANK"] = str(names[:index].count(name))
            own["LOCAL_WORLD_SIZE"] = str(names[: job.workers].count(name))
        else:
            index += job.workers
        tables[index].append(replace(one, environment=own))
    return tables
