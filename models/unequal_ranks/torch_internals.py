"""Private names of torch that balancing needs; tests check them with each version of torch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


def flat_parameters(network: nn.Module) -> list[Tensor]:
    """Return the parameters that gradients arrive at under FullyShardedDataParallel (FSDP1); none without it."""
    units = FullyShardedDataParallel.fsdp_modules(network)
    return [unit._flat_param for unit in units if unit._flat_param is not None]
