"""The torch.distributed backend "gangline": importing this module registers it.

    import gangline.collectives.torch_backend
    torch.distributed.init_process_group("gangline")

From there DistributedDataParallel, fully_shard, DeviceMesh, torch.distributed.checkpoint and whatever else talks by
torch.distributed moves its CPU tensors through a `Communicator`: shared memory within a host, tcp between hosts. The
ranks meet by the store that torch has, so env:// (torchrun), tcp://, file:// and a store of one's own all do; and
``init_process_group("cpu:gangline,cuda:nccl")`` leaves GPUs' tensors to NCCL. How calls behave is told by
`GanglineProcessGroup`; `compress_hook` and `weighted_hook` are communication hooks for DistributedDataParallel, over
any backend.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Backend, Store  # type: ignore[attr-defined]

from gangline.collectives.torch_backend.hooks import Samples, compress_hook, weighted_hook
from gangline.collectives.torch_backend.process_group import GanglineProcessGroup

__all__ = ["GanglineProcessGroup", "Samples", "compress_hook", "weighted_hook"]


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> GanglineProcessGroup:
    return GanglineProcessGroup(store, rank, size, timeout)


Backend.register_backend("gangline", _make, devices=["cpu"])
