"""The torch.distributed backend "gangline": importing this module registers it.

    import gangline.collectives.torch_backend
    torch.distributed.init_process_group("gangline")

DistributedDataParallel, fully_shard, DeviceMesh, torch.distributed.checkpoint and other users of torch.distributed then
move their CPU tensors through a `Communicator`: shared memory within a host, tcp between hosts. Ranks find each other
through torch's store, so env:// (torchrun), tcp://, file:// and custom stores all work.
``init_process_group("cpu:gangline,cuda:nccl")`` leaves GPU tensors to NCCL. `GanglineProcessGroup` documents the
behaviour of calls; `weighted_hook` is a communication hook for DistributedDataParallel, over any backend.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import Backend

from gangline.collectives.torch_backend.c10d import allow_monitored_barrier, can_reconfigure, name_groups_by_ranks
from gangline.collectives.torch_backend.gloo_replacement import REPLACE_GLOO, replace_gloo
from gangline.collectives.torch_backend.hooks import Samples, weighted_hook
from gangline.collectives.torch_backend.process_group import GanglineProcessGroup

__all__ = ["GanglineProcessGroup", "Samples", "replace_gloo", "weighted_hook"]


def create_group(*arguments: Any) -> GanglineProcessGroup:
    """Create a process group of backend "gangline", for torch's registry.

    torch passes store, rank, size and timeout; since torch 2.14 two objects of options, which say whether the group
    connects now.
    """
    if not can_reconfigure:
        return GanglineProcessGroup(*arguments)
    options, _ = arguments
    place = (options.store, options.group_rank, options.group_size, options.timeout)
    return GanglineProcessGroup(*place, connects=not options.enable_reconfigure)


if "gangline" not in Backend.backend_list:  # else gangline.integrations.torch_discovery has registered it
    Backend.register_backend("gangline", create_group, extended_api=can_reconfigure, devices=["cpu"])
allow_monitored_barrier(GanglineProcessGroup)
name_groups_by_ranks()
if os.environ.get(REPLACE_GLOO) == "1":
    replace_gloo()
