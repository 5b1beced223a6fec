"""A job as actors of a Ray cluster: `run` calls a function in each worker and returns the results."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from gangline.collectives.environments.job_key import JobKey
from gangline.collectives.errors import DeadNodeError
from gangline.collectives.limits import SPAWN_CAUSE_SECONDS
from gangline.integrations.ray_members import Job, Placement, in_cluster
from gangline.launcher.job import JobSpec

_log = logging.getLogger("gangline")
_COLOUR = re.compile(r"\x1b\[\d*m")
_SERVERS_SECONDS = 10.0
"""Time for servers and scheduler to end after the last worker."""


def run(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    servers: int = 1,
    worker_resources: Mapping[str, float] | None = None,
    server_resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    grace: float = 10.0,
    timeout: float = 300.0,
    address: str | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` in each worker of a new job on a Ray cluster and return the results in rank order.

    Workers and servers are actors in one placement group; the scheduler runs beside server 0. `create`, `Trainer` and
    `connect` find their place in the job without arguments. All actors and their processes end when ``run`` returns or
    raises, and when this program ends. The program is connected to the cluster if it is not yet, and stays connected.

    With ``max_restarts`` a failed job, such as one with a killed actor, starts again on the same resources, which Ray
    replaces if a node was lost. ``fn`` is called again, with GANGLINE_RESTART in its environment; `Module.fit` resumes
    from the newest checkpoint that the job wrote, other loops have to do so themselves.

    Args:
        fn: function to run in each worker.
        *args: its arguments.
        workers: number of workers.
        servers: number of servers; 0: none and no scheduler, for ``create("allreduce")`` and `connect`.
        worker_resources: Ray's resources of each worker, such as {"CPU": 4, "GPU": 1}; None: {"CPU": 1}.
        server_resources: the same of each server.
        strategy: Ray's placement strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        max_restarts: number of times that a failed job starts again.
        env: environment variables of all processes.
        grace: seconds from SIGTERM until servers are killed.
        timeout: seconds until the cluster must have the resources.
        address: address of the cluster; None: that of RAY_ADDRESS, or a cluster of this machine, started if needed.

    Returns:
        The workers' results.

    Raises:
        DeadNodeError: if the actor of a worker or server was killed, or a server failed.
        RuntimeError: if the cluster does not have the resources.
        Exception: if ``fn`` raised: the first error, with the rank and its traceback as a note.
    """
    in_cluster(address)
    spec = JobSpec((), workers, servers)
    resources = worker_resources or {"CPU": 1}, server_resources or {"CPU": 1}
    placement = Placement(*resources, strategy, timeout)
    for restart in range(max_restarts + 1):
        job = Job(replace(spec, restart=restart), placement, is_function=True, env=env or {}, key=JobKey.new())
        try:
            return _run(job, fn, args, grace)
        except Exception as error:  # whatever failed, a restart may help
            if restart == max_restarts:
                raise
            _log.warning(
                "the job failed: %s: %s; restart %d of %d", type(error).__name__, error, restart + 1, max_restarts
            )
        finally:
            job.close()
    raise AssertionError("the last attempt returns or raises")


def _run(job: Job, fn: Callable[..., Any], args: tuple[Any, ...], grace: float) -> list[Any]:
    size = len(job.workers)
    ray.get([one.start.remote(job.tables[size + i], job.key, grace, False) for i, one in enumerate(job.servers)])
    ends = {one.finish.remote(): f"server {index}" for index, one in enumerate(job.servers)}
    function = ray.put(fn)
    calls = {
        one.call.remote(job.tables[rank][0].environment, job.key, function, args): rank
        for rank, one in enumerate(job.workers)
    }
    results: dict[int, Any] = {}
    errors: dict[str, Exception] = {}
    deadline: float | None = None
    pending = [*calls, *ends]
    job.calls = [*pending]
    while len(results) < size:
        left = None if deadline is None else deadline - time.monotonic()
        ready = ray.wait(pending, timeout=left and max(0.0, left))[0]
        for reference in ready:
            pending.remove(reference)
            rank = calls.get(reference)
            name = ends[reference] if rank is None else f"worker {rank}"
            try:
                value = ray.get(reference)
            except RayError as error:
                errors[name] = _failure(error, name, size)
                continue
            if rank is not None:
                results[rank] = value
            elif value:
                errors[name] = DeadNodeError(f"the process of {name} or the scheduler ended with code {value}")
        # A worker that lost another one may be heard first: its cause follows.
        is_cause = any(not isinstance(error, DeadNodeError) or _is_dead(error) for error in errors.values())
        if errors and (is_cause or not pending or (deadline is not None and time.monotonic() >= deadline)):
            raise _first(errors)
        if errors and deadline is None:
            deadline = time.monotonic() + SPAWN_CAUSE_SECONDS
    if ends:
        ray.wait([*ends], num_returns=len(ends), timeout=_SERVERS_SECONDS)
    return [results[rank] for rank in range(size)]


def _failure(error: RayError, name: str, size: int) -> Exception:
    """Return the error of a call: that of the function, or a DeadNodeError if its actor is gone."""
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error))
        cause.add_note(f"raised by {name} of {size}:\n{_COLOUR.sub('', str(error))}")
        return cause
    dead = DeadNodeError(f"the actor of {name} ended: {str(error).strip()}")
    dead.__cause__ = error
    return dead


def _is_dead(error: Exception) -> bool:
    return isinstance(error.__cause__, RayActorError)


def _first(errors: Mapping[str, Exception]) -> Exception:
    """Return the error that caused the others, with the others as notes."""
    order = sorted(errors, key=lambda name: isinstance(errors[name], DeadNodeError) and not _is_dead(errors[name]))
    first, *others = order
    for name in others:
        errors[first].add_note(f"{name} failed too: {type(errors[name]).__name__}: {errors[name]}")
    return errors[first]
