"""The store that fits the job in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gangline.collectives import environments
from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.collectives.environments.engines import Dmlc
from gangline.kvstore.restart_variables import ELASTIC


def job_store(variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of the store for all processes of this job: ``"dist_sync"`` with servers, else ``"allreduce"``.

    A job has servers if its launcher sets DMLC_NUM_SERVER above 0, or a role in DMLC_ROLE without that number. Under
    torchrun, mpirun and srun it has none.

    Raises:
        RuntimeError: if the environment describes no job.
        ValueError: if the launcher's variables hold an invalid rank, size or address.
    """
    if Dmlc.has_servers(variables):
        return "dist_sync"
    if environments.find(variables) is None:
        raise RuntimeError(
            "'parallel' means all processes of a job, and there is none in the environment; start the program with "
            "`gangline launch -n WORKERS -- COMMAND`, torchrun, mpirun or srun, or train in this process alone by "
            "'auto', 'cpu', 'gpu' or 'multi-gpu'"
        )
    find_rank_info(None, None, None, variables)
    return "allreduce"


def default_store(variables: Mapping[str, str] = os.environ) -> str:
    """Return the store that joins the processes of this job; ``"device"`` without a job, or as its only worker."""
    is_server = variables.get("DMLC_ROLE") in ("scheduler", "server")  # creating the store runs that role
    has_others = num_workers(variables) > 1 or ELASTIC in variables or is_server
    return job_store(variables) if has_others else "device"


def num_workers(variables: Mapping[str, str] = os.environ) -> int:
    """Return the number of workers of this job; 1 without a job."""
    launcher = Dmlc(variables) if Dmlc.has_servers(variables) else environments.find(variables)
    return 1 if launcher is None else launcher.size()
