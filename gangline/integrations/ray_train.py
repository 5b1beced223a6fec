"""Ray Train with gangline: the torch.distributed backend, and stores inside a train loop.

    TorchTrainer(train_loop, torch_config=GanglineConfig(), scaling_config=ScalingConfig(num_workers=2)).fit()

In ``train_loop``, DistributedDataParallel and others use the backend, and ``Trainer(..., kvstore="allreduce")``,
``create("allreduce")`` and `connect` find the other workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from gangline.collectives.environments.job_key import JobKey, open_descriptor
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
    def on_start(self, worker_group: Any, backend_config: GanglineConfig) -> None:
        """Register the backend in each worker and give it the job's key, then open the process group."""
        worker_group.execute(_prepare, JobKey.new().hex())
        super().on_start(worker_group, backend_config)
        # The group's store keeps its port; the stores of gangline need another one.
        port = worker_group.execute_single(0, free_ports, 1)[0]
        worker_group.execute(_set_store_address, port)


def _prepare(key: str) -> None:
    os.environ["GANGLINE_JOB_KEY_FD"] = str(open_descriptor(JobKey.from_hex(key)))
    import_module("gangline.collectives.torch_backend")


def _set_store_address(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
