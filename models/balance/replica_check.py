"""Replica check: whether optimizers give the replicas of a network the same updates."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gangline.models.balance.gradient_weights import averages
from gangline.models.balanced_batch import WeakCall

_FIRST_STEPS, _INTERVAL = 8, 64  # steps that are compared: the first ones, and every 64th
_VALUES = 512  # of each compared parameter
_TOLERANCE = 0.05  # relative; unequal GPUs round differently, and updates that are not averaged have nothing in common


class ReplicaCheck:
    """Reduces the updates of some weights to one number, which ranks compare.

    These are some values of the first and the last trained parameter of each network. Parameters that are divided over
    the ranks are left out, and so are those that a wrapper is told to leave alone.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Add a hook to all optimizers; it goes with this object."""
        self._networks = networks
        self._has_stepped, self._steps = False, 0
        self._compared = self._choose()
        self._values = self._read()
        hook = register_optimizer_step_post_hook(WeakCall(self._note_step))
        weakref.finalize(self, hook.remove)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._has_stepped:
            compared = {id(parameter) for parameter in self._compared}
            stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._has_stepped = any(id(parameter) in compared for parameter in stepped)

    def number(self) -> float:
        """Return a number of the updates since the last compared step; NaN if they are not to be compared."""
        self._steps += self._has_stepped
        is_due = self._has_stepped and (self._steps <= _FIRST_STEPS or self._steps % _INTERVAL == 0)
        self._has_stepped = False
        if not is_due:
            return math.nan
        before, compared, self._compared = self._values, self._compared, self._choose()
        self._values = self._read()
        if [*map(id, compared)] != [*map(id, self._compared)] or before.shape != self._values.shape:
            return math.nan
        return float((self._values - before) @ torch.arange(len(before), device="cpu").double().cos())

    def _choose(self) -> list[Tensor]:
        found: list[Tensor] = []
        for network in self._networks:
            is_flat = bool(FullyShardedDataParallel.fsdp_modules(network))
            own = [one for name, one in network.named_parameters() if not is_flat and _is_replica(network, name, one)]
            found += [*own[:1], *own[1:][-1:]]
        return found

    def _read(self) -> Tensor:
        values = [one.detach().reshape(-1)[:: max(1, one.numel() // _VALUES)] for one in self._compared]
        return torch.cat([torch.zeros(0, device="cpu").double(), *(one.cpu().double() for one in values)])


def check_updates(numbers: Sequence[float], batch: int) -> None:
    """Raise RuntimeError if the ranks have different numbers of their updates before this global batch."""
    if not all(map(math.isfinite, numbers)) or max(numbers) - min(numbers) <= _TOLERANCE * max(map(abs, numbers)):
        return
    raise RuntimeError(
        f"balance: before global batch {batch} the optimizer has changed the weights of the ranks differently "
        f"(projections of the updates: {', '.join(f'{number:.3g}' for number in numbers)}), so the replicas drift "
        "apart. The ranks must average gradients before the step. Likely reasons: the network is not in "
        "DistributedDataParallel or another wrapper, and the loop does not average its gradients; the loop calls the "
        "network past its wrapper, such as model.module(x); the step follows a backward within no_sync(); the "
        "optimizer steps in a hook within backward; or each rank adds noise of its own"
    )


def _is_replica(network: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(parameter, DTensor) or not (parameter.requires_grad and parameter.is_floating_point()):
        return False
    is_expert = not getattr(parameter, "allreduce", True)  # as DeepSpeed and Megatron mark the experts of a rank
    is_ddp = isinstance(getattr(network, "_orig_mod", network), DistributedDataParallel)
    return parameter.numel() > 0 and not is_expert and (averages(network, name) or not is_ddp)
