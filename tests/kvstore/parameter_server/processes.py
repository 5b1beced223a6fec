"""Parameter-server jobs for tests: scheduler, servers and workers as processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from gangline.collectives.processes.spawning import Outcome, Ranks
from gangline.kvstore.parameter_server.scheduler import scheduler
from gangline.kvstore.parameter_server.server import server
from tests import scripted_faults  # noqa: F401  wraps the points of faults in these processes
from tests.collectives.processes import Bare


def join_job(place: Bare, workers: int, servers: int) -> scheduler.Scheduler | None:
    """Set the variables of a job whose scheduler is rank 0; return the scheduler there."""
    torch.set_num_threads(1)
    host = os.environ.get("GANGLINE_TEST_SCHEDULER", "127.0.0.1")
    own = scheduler.Scheduler(workers, servers, host) if place.rank == 0 else None
    port = place.exchange(b"" if own is None else str(own.port).encode())[0].decode()
    os.environ.update(
        DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port, DMLC_NUM_WORKER=str(workers), DMLC_NUM_SERVER=str(servers)
    )
    return own


def _play(place: Bare, workers: int, servers: int, play: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run the role of a rank: 0 is the scheduler, then servers, then workers, which call ``play(*args)``.

    Further ranks have the numbers of further workers, and ``play`` gives them the rank of a worker that has died.
    """
    if own := join_job(place, workers, servers):
        own.run()
        return None
    if place.rank <= servers:
        os.environ["DMLC_ROLE"] = "server"
        server.main()
        return None
    os.environ.update(DMLC_ROLE="worker", DMLC_WORKER_ID=str(place.rank - 1 - servers))
    return play(*args)


class DistJob:
    """Job whose workers run ``play(*args)``; a context manager."""

    def __init__(
        self,
        play: Callable[..., Any],
        workers: int,
        servers: int,
        *args: Any,
        opener: type[Bare] = Bare,
        successors: int = 0,
    ) -> None:
        self._first = 1 + servers
        size = 1 + servers + workers + successors
        self._ranks = Ranks(_play, size, (workers, servers, play, args), opener=opener)

    def results(self) -> list[Any]:
        """Return the results of the workers; raise the exception of one that failed."""
        return list(self._ranks.results()[self._first :])

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of scheduler, servers and workers in this order."""
        return self._ranks.outcomes()

    def pid(self, role: str, rank: int) -> int:
        return self._ranks.pids[{"scheduler": 0, "server": 1, "worker": self._first}[role] + rank]

    def __enter__(self) -> DistJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()


def run_job(play: Callable[..., Any], workers: int, servers: int, *args: Any) -> list[Any]:
    """Run a job and return the results of its workers."""
    with DistJob(play, workers, servers, *args) as job:
        return job.results()
