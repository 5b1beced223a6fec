"""The torch.distributed backend "gangline", and communication hooks for DistributedDataParallel over any backend.

Importing this module registers the backend:

    import gangline.torch_backend
    torch.distributed.init_process_group("gangline")

`gangline.collectives.torch_backend` says how it finds ranks and which tensors it moves.
"""

from __future__ import annotations

from gangline.collectives.torch_backend import GanglineProcessGroup as GanglineProcessGroup
from gangline.collectives.torch_backend import Samples as Samples
from gangline.collectives.torch_backend import replace_gloo as replace_gloo
from gangline.collectives.torch_backend import weighted_hook as weighted_hook
from gangline.kvstore.compression.hook import compress_hook as compress_hook
