"""Networks by name; a file each."""

from __future__ import annotations

from models.zoo import alexnet, lenet, mlp, resnet
from models.zoo.registry import Entry, create, find, names, register

__all__ = ["Entry", "alexnet", "create", "find", "lenet", "mlp", "names", "register", "resnet"]
