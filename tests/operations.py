"""Counts torch's operations in a block."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts sums ("add"), copies ("copy"), both of many tensors at once, and copies to other devices ("to")."""

    NAMES: ClassVar = {
        "add": "add",
        "add_": "add",
        "sum": "add",
        "copy_": "copy",
        "clone": "copy",
        "_to_copy": "to",
        "_foreach_add_": "add of many",
        "_foreach_copy_": "copy of many",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.counts[self.NAMES[name]] += 1
        return func(*args, **(kwargs or {}))
