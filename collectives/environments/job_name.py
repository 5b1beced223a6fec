"""Name of the job that this process belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping

RUN_ID = "GANGLINE_RUN_ID"
"""Variable with a name of the job that restarts do not change."""

_STARTED_BY_ONE = ("TORCHELASTIC_RUN_ID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables of launchers whose processes on a host have one parent."""


def job_name(variables: Mapping[str, str] | None = None, parent: int | None = None) -> str:
    """Return a text that is equal for all processes of a job on this host and differs between jobs.

    It follows from the environment of a process and the id of its parent; None: those of this one.
    """
    variables = os.environ if variables is None else variables
    parent = os.getppid() if parent is None else parent
    if RUN_ID in variables:
        return variables[RUN_ID]
    if any(name in variables for name in _STARTED_BY_ONE):
        return f"of process {parent} at {variables.get('MASTER_PORT', '')}"
    if "DMLC_PS_ROOT_PORT" in variables:
        return f"at {variables.get('DMLC_PS_ROOT_URI')}:{variables['DMLC_PS_ROOT_PORT']}"
    if "MASTER_PORT" in variables:
        return f"at {variables.get('MASTER_ADDR')}:{variables['MASTER_PORT']}"
    return ""
