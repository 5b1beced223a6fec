"""Networks by name; a file each."""

from __future__ import annotations

from gangline.models.zoo import alexnet, lenet, mlp, resnet
from gangline.models.zoo.registry import Entry, create, find, names, register

__all__ = ["Entry", "alexnet", "create", "find", "lenet", "mlp", "names", "register", "resnet"]
