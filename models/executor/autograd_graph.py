"""What a backward will reach: the parameters in the graph of its roots, found before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_HIDES_ITS_GRAPH = "CheckpointFunctionBackward"
"""torch.utils.checkpoint with use_reentrant=True runs a backward of its own, of which the graph knows nothing."""


def reached(roots: Iterable[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the parameters that a backward from ``roots`` gives gradients; all where that cannot be known."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: set[str] = set()
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == _HIDES_ITS_GRAPH:
            return set(parameters)
        variable = getattr(node, "variable", None)  # of the nodes that accumulate a leaf's gradient
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
