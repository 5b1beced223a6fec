"""The parameters of a torch optimizer that this worker updates; the other workers update the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gangline.kvstore.interface import KVStore


class OwnedParameters:
    """Steps of an optimizer over the parameters that a worker owns, and copies of the others' from their owners."""

    def __init__(self, optimizer: Optimizer, store: KVStore, memory: Sequence[float] | str) -> None:
        """Divide the parameters by memory. Collective: all workers must call it.

        Args:
            optimizer: the optimizer; state that it has of others' parameters is dropped.
            store: the workers' store.
            memory: relative memory of the workers, or "auto".

        Raises:
            ValueError: if the store cannot divide them, or the memory does not fit.
        """
        self._optimizer, self._store = optimizer, store
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        owners = store.owners_of([one.data for one in parameters], memory)
        self._owned = [one for one, owner in zip(parameters, owners, strict=True) if owner == store.rank]
        self._others = [one for one, owner in zip(parameters, owners, strict=True) if owner != store.rank]
        self._shared: dict[tuple[int, torch.dtype], list[torch.nn.Parameter]] = defaultdict(list)
        for one, owner in zip(parameters, owners, strict=True):
            self._shared[owner, one.dtype].append(one)
        self.drop_others()

    @torch.no_grad()
    def step(self) -> None:
        """Update the owned parameters, and give all workers the weights of all. Collective."""
        gradients = [one.grad for one in self._others]
        for one in self._others:
            one.grad = None  # an optimizer leaves parameters without a gradient alone
        try:
            self._optimizer.step()
        finally:
            for one, gradient in zip(self._others, gradients, strict=True):
                one.grad = gradient
        for (owner, _), parameters in self._shared.items():
            joined = torch.cat([one.flatten() for one in parameters])
            self._store.copy_from_owner(joined, owner)
            if owner != self._store.rank:
                begin = 0
                for one in parameters:
                    one.copy_(joined[begin : begin + one.numel()].view(one.shape))
                    begin += one.numel()

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
