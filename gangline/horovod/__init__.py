"""Horovod's interface for PyTorch: `import gangline.horovod.torch as hvd` in place of `import horovod.torch as hvd`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gangline.launcher.functions import launch


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, np: int = 1
) -> Any:
    """Call ``func`` in ``np`` new processes of this machine; return the results in rank order, as `gangline.launch`."""
    return launch(partial(func, *args, **(kwargs or {})), workers=np, servers=0)
