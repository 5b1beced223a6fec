"""The parameters of a torch optimizer that this worker updates; the other workers update the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from gangline.kvstore.allreduce.store import AllReduceStore

_LARGE = 1 << 16
"""Bytes from which a parameter is copied on its own."""


class OwnedParameters:
    """Steps of an optimizer over the parameters that a worker owns."""

    def __init__(self, optimizer: Optimizer, owners: Mapping[torch.nn.Parameter, int], store: AllReduceStore) -> None:
        """Drop the optimizer's state of parameters that other workers own."""
        self._optimizer, self._owners, self._store = optimizer, owners, store
        self._others = [one for one, owner in owners.items() if owner != store.rank]
        self.drop_others()

    def step(self) -> None:
        """Update the owned parameters."""
        gradients = [one.grad for one in self._others]
        for one in self._others:
            one.grad = None  # an optimizer leaves parameters without a gradient alone
        try:
            self._optimizer.step()
        finally:
            for one, gradient in zip(self._others, gradients, strict=True):
                one.grad = gradient

    @torch.no_grad()
    def copy_from_owners(self) -> None:
        """Give all workers the weights of all: large ones in place, small ones of an owner joined. Collective."""
        small: dict[tuple[int, torch.dtype], list[torch.nn.Parameter]] = defaultdict(list)
        tensors, owners = [], []
        for one, owner in self._owners.items():
            if one.nbytes >= _LARGE and one.is_contiguous():
                torch.autograd.graph.increment_version(one)  # a graph that needs the old values learns of it
                tensors.append(one.data.view(-1))
                owners.append(owner)
            else:
                small[owner, one.dtype].append(one)
        joined = [torch.cat([one.flatten() for one in parameters]) for parameters in small.values()]
        self._store.copy_from_owners("updated parameters", tensors + joined, owners + [owner for owner, _ in small])
        for flat, ((owner, _), parameters) in zip(joined, small.items(), strict=True):
            if owner != self._store.rank:
                parts = torch.split(flat, [one.numel() for one in parameters])
                for one, part in zip(parameters, parts, strict=True):
                    one.copy_(part.view(one.shape))

    def drop_others(self) -> None:
        """Drop the state of parameters that other workers own."""
        for one in self._others:
            self._optimizer.state.pop(one, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, in torch's form, on the host. Collective."""
        own = self._optimizer.state_dict()
        state: dict[int, Any] = {}
        for theirs in self._store.group.all_gather(list(own["state"].items()), "state_dict"):
            state |= {int(number): values for number, values in theirs}
        return {**own, "state": dict(sorted(state.items()))}
