"""The names of `horovod.torch`. All ranks make the same calls in the same order; a difference is an error on all."""

# ruff: noqa: F401  the names are Horovod's
from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed

from gangline.collectives.errors import GanglineError as HorovodInternalError
from gangline.horovod.torch import calls, elastic
from gangline.horovod.torch.calls import *  # noqa: F403
from gangline.horovod.torch.objects import *  # noqa: F403
from gangline.horovod.torch.optimizer import DistributedOptimizer


def mpi_built() -> bool:
    """Return False: collectives are gangline's own, and NCCL's."""
    return False


mpi_enabled = mpi_threads_supported = gloo_built = gloo_enabled = ddl_built = ccl_built = mpi_built


def nccl_built() -> int:
    """Return the version of torch's NCCL as NCCL numbers it, 22703 for 2.27.3; 0 if this build of torch has none."""
    if not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Return whether this build of torch is for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether this build of torch is for ROCm."""
    return torch.version.hip is not None


def start_timeline(*_: Any, **__: Any) -> NoReturn:
    """Refuse: a timeline begins with the process."""
    raise NotImplementedError("a timeline begins with the process: set GANGLINE_TIMELINE=FILE and start the job again")


def stop_timeline() -> None:
    """Do nothing: the timeline of GANGLINE_TIMELINE ends with the process."""


def SyncBatchNorm(*_: Any, **__: Any) -> NoReturn:  # noqa: N802  Horovod's name
    """Refuse: `Module` and torch.distributed have such layers."""
    raise NotImplementedError(
        "hvd.SyncBatchNorm does not exist here; expected gangline.Module(..., sync_batchnorm=True), or "
        "gangline.convert_sync_batchnorm in a job of torch.distributed"
    )
