"""Ray Train with gangline: the torch.distributed backend, and stores inside a train loop.

    TorchTrainer(train_loop, torch_config=GanglineConfig(), scaling_config=ScalingConfig(num_workers=2)).fit()

In ``train_loop``, DistributedDataParallel and others use the backend, and `create`, `Trainer`, `Module.fit` and
`connect` find the other workers. A ``dist_sync`` store starts its servers, one per host. When Ray Train starts the
workers again after a failure, `Module.fit` resumes from the newest checkpoint that the run wrote.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from gangline.collectives.environments.job_key import JobKey, open_descriptor
from gangline.collectives.environments.job_name import RUN_ID
from gangline.kvstore.restart_variables import RESTART
from gangline.launcher.job import free_ports


@dataclass
class GanglineConfig(TorchConfig):
    """TorchConfig of Ray Train whose process group is gangline's.

    Args:
        backend: backend of torch.distributed; "cpu:gangline,cuda:nccl" leaves GPU tensors to NCCL.
        init_method: as in TorchConfig.
        timeout_s: seconds that a worker waits for another one in a collective.
    """

    backend: str = "gangline"

    @property
    def backend_cls(self) -> type[_GanglineBackend]:
        """Class that prepares the workers."""
        return _GanglineBackend


class _GanglineBackend(_TorchBackend):
    def __init__(self) -> None:
        super().__init__()
        self._run_id, self._restart = secrets.token_hex(8), 0

    def on_start(self, worker_group: Any, backend_config: GanglineConfig) -> None:
        """Register the backend in each worker and give it the job's key, then open the process group."""
        variables = {RUN_ID: self._run_id, RESTART: str(self._restart)}
        worker_group.execute(_prepare, JobKey.new().hex(), variables)
        self._restart += 1
        super().on_start(worker_group, backend_config)
        # The group's store keeps its port; the stores of gangline need another one.
        port = worker_group.execute_single(0, free_ports, 1)[0]
        worker_group.execute(_set_store_address, port)


def _prepare(key: str, variables: Mapping[str, str]) -> None:
    os.environ.update(variables, GANGLINE_JOB_KEY_FD=str(open_descriptor(JobKey.from_hex(key))))
    import_module("gangline.collectives.torch_backend")


def _set_store_address(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
