"""Search of the autograd graph for the parameters that a backward will reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_OPAQUE_NODE = "CheckpointFunctionBackward"
"""torch.utils.checkpoint(use_reentrant=True) runs a nested backward whose graph is not visible from outside."""


def reachable_parameters(roots: Iterable[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """Return names of the parameters that a backward from ``roots`` gives gradients; all if the graph hides them."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: set[str] = set()
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == _OPAQUE_NODE:
            return set(parameters)
        variable = getattr(node, "variable", None)  # set on AccumulateGrad nodes
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found
