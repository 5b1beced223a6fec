"""The store that fits the job in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.kvstore.parameter_server import environment as server_environment


def job_store(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the store for all processes of this job: ``"dist_sync"`` with servers, else ``"allreduce"``.

    A job has servers if its launcher sets DMLC_NUM_SERVER above 0, or a role in DMLC_ROLE without that number. Under
    torchrun, mpirun and srun it has none.

    Raises:
        RuntimeError: if the environment describes no job.
        ValueError: if the launcher's variables hold an invalid rank or size.
    """
    if server_environment.has_servers(environment):
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


def default_store(environment: Mapping[str, str] = os.environ) -> str:
    """Return the store that joins the workers of this job; ``"device"`` without a job, or alone in it.

    The batch script of a Slurm job has variables of the job's tasks, but is none of them.

    Raises:
        ValueError: if the launcher's variables hold an invalid rank or size.
    """
    is_batch_script = "SLURM_PROCID" in environment and "SLURM_STEP_ID" not in environment
    if is_batch_script and not {"RANK", "DMLC_ROLE", "OMPI_COMM_WORLD_RANK"}.intersection(environment):
        return "device"
    return job_store(environment) if num_workers(environment) > 1 else "device"


def num_workers(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of workers of this job; 1 without a job.

    Raises:
        ValueError: if the launcher's variables hold an invalid rank or size.
    """
    if server_environment.has_servers(environment):
        return server_environment.from_environment(environment).workers
    try:
        return find_rank_info(None, None, None, environment).size
    except RuntimeError:
        return 1
