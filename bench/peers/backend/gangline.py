"""A rank of torch.distributed over backend "gangline"."""

from __future__ import annotations

from typing import Any

import gangline.collectives.torch_backend  # noqa: F401  registers the backend
from gangline.bench.peers.backend import gloo


def join() -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe."""
    return gloo.join("gangline")
