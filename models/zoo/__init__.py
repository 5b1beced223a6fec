"""Networks by name, one file per architecture, and transfer learning."""

from __future__ import annotations

from gangline.models.zoo import alexnet, lenet, mlp, resnet, unet  # registers them
from gangline.models.zoo.registry import Entry, create, create_network, find, names, register

__all__ = [
    "Entry",
    "alexnet",
    "create",
    "create_network",
    "find",
    "lenet",
    "mlp",
    "names",
    "register",
    "resnet",
    "unet",
]
