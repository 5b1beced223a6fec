"""Which store joins the workers of the job that the environment tells of."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.kvstore.parameter_server import environment as server_environment

IN_PROCESS = ("local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device", "nccl")
"""Stores that do not leave their process."""


def job_store(environment: Mapping[str, str] = os.environ) -> str:
    """The store for all processes of this job: ``"dist_sync"`` where it has servers, else ``"allreduce"``.

    Servers are there when a launcher says so (DMLC_NUM_SERVER above 0, or a role in DMLC_ROLE without that number);
    under torchrun, mpirun or srun workers are alone.

    Raises:
        RuntimeError: there is no job in the environment.
        ValueError: a launcher has set a place that cannot be.
    """
    if server_environment.is_set(environment) and environment.get("DMLC_NUM_SERVER") != "0":
        return "dist_sync"
    try:
        find_rank_info(None, None, None, environment)
    except RuntimeError as error:
        raise RuntimeError(
            "'parallel' means all processes of a job, and there is none in the environment; start the program with "
            "`gangline launch -n WORKERS -- COMMAND`, torchrun, mpirun or srun, or train in this process alone by "
            "'auto', 'cpu', 'gpu' or 'multi-gpu'"
        ) from error
    return "allreduce"


def num_workers(environment: Mapping[str, str] = os.environ) -> int:
    """How many workers this job has; 1 without a job.

    Raises:
        ValueError: a launcher has set a number that cannot be.
    """
    if server_environment.is_set(environment) and environment.get("DMLC_NUM_SERVER") != "0":
        return server_environment.from_environment(environment).workers
    try:
        return find_rank_info(None, None, None, environment).size
    except RuntimeError:
        return 1
