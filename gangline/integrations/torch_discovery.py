"""Entry points by which torch finds backend "gangline" without an import in the program."""

from __future__ import annotations

import os
import sys

_HOME = "gangline.collectives.torch_backend"


def register() -> None:
    """Register the backend when a program names it: group ``torch.distributed.backends``, torch 2.14 and later."""
    import gangline.collectives.torch_backend  # noqa: F401


def at_import_of_torch() -> None:
    """Register the backend, to be imported with its first group: group ``torch.backends``, which torch calls at import.

    GANGLINE_REPLACE_GLOO=1 imports it now, to replace gloo. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns all this off.
    """
    from torch import distributed as dist

    if not dist.is_available() or _HOME in sys.modules:  # its import is under way, and registers the backend
        return
    if os.environ.get("GANGLINE_REPLACE_GLOO") == "1":
        register()
    elif "gangline" not in dist.Backend.backend_list:
        has_options = hasattr(dist.ProcessGroup, "reconfigure")  # as create_group expects them
        dist.Backend.register_backend("gangline", _create, extended_api=has_options, devices=["cpu"])


def _create(*arguments: object) -> object:
    from gangline.collectives.torch_backend import create_group

    return create_group(*arguments)
