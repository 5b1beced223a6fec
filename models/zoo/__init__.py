"""Networks by name; a file each."""

from __future__ import annotations

from models.zoo import lenet, mlp, resnet
from models.zoo.registry import Entry, create, find, names, register

__all__ = ["Entry", "create", "find", "lenet", "mlp", "names", "register", "resnet"]
