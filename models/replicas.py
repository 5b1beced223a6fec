"""Replicas: one copy of the network per context, with equal weights."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn

from gangline.kvstore.context import Context
from gangline.kvstore.reducer.reducer import Reducer
from gangline.kvstore.reducer.sharded_weights import ShardedWeights
from gangline.models.batchnorm.running_statistics import Buffers, averaged, averaged_over
from gangline.models.names import as_named_by, buffers_of, parameters_of, plain_name, state_of
from gangline.models.workers import Workers

_layout, _version, _requires_grad = map(attrgetter, ("layout", "_version", "requires_grad"))
_data_ptr = methodcaller("data_ptr")


@dataclass(eq=False)
class Replica:
    """A copy of the network on one context."""

    context_index: int  # index of the context in the module's list
    context: Context
    network: nn.Module
    parameters: dict[str, nn.Parameter]  # the trained parameters, by plain name
    samples_seen: int = 0  # training samples since running statistics were last averaged

    @cached_property
    def all_parameters(self) -> list[nn.Parameter]:
        """All parameters, including untrained ones."""
        return list(self.network.parameters())

    @cached_property
    def _buffers_by_module(self) -> list[dict[str, torch.Tensor | None]]:
        return [module._buffers for module in self.network.modules() if module._buffers]

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters and buffers, in the same order for all replicas."""
        buffers = [one for named in self._buffers_by_module for one in named.values() if one is not None]
        return [*self.all_parameters, *buffers]

    def untrained(self) -> dict[str, torch.Tensor]:
        """Return all buffers and the parameters that are not trained."""
        fixed = {name: one.detach() for name, one in self.network.named_parameters() if not one.requires_grad}
        return {**fixed, **dict(self.network.named_buffers())}


class Replicas:
    """All replicas of a module. A context with a load of 0 has no replica and uses no memory."""

    def __init__(
        self,
        network: nn.Module,
        contexts: Sequence[Context],
        loads: Sequence[float],
        fixed: Iterable[str],
    ) -> None:
        """Move the network to the first context with a load, and copies of the network to the others.

        Parameters with the names in ``fixed`` are not trained.
        """
        parameters = parameters_of(network, remove_duplicate=False)
        for name in fixed:
            parameters[name].requires_grad_(False)
        self.all: list[Replica] = []
        self._saved_buffers: list[torch.Tensor] = []
        self._noted: list[tuple[int, int]] = []
        self._frozen: list[nn.Parameter] | None = None  # when the optimizer was set; None: not listed yet
        self._settings: list[tuple[int, ...]] = []  # of the parameters of all replicas, when they were equal
        self.noted_gradients: list[dict[str, tuple[torch.Tensor, int]]] = []
        """Gradients of each replica with their versions, as of `note_gradients`."""
        self.divided: ShardedWeights | None = None
        """The sharded weights of the only replica; None if weights are not sharded."""
        for index, (context, load) in enumerate(zip(contexts, loads, strict=True)):
            if load:
                own = (copy.deepcopy(network) if self.all else network).to(context.torch_device)
                self.all.append(Replica(index, context, own, _trained(own)))
        self.note()

    @property
    def first(self) -> Replica:
        """The replica that is the user's own network."""
        return self.all[0]

    def update_trained_parameters(self) -> None:
        """Copy ``requires_grad`` of the user's network to all replicas."""
        trained = {name: parameter.requires_grad for name, parameter in parameters_of(self.first.network).items()}
        for replica in self.all:
            for name, parameter in parameters_of(replica.network).items():
                parameter.requires_grad_(trained[name])
            replica.parameters = _trained(replica.network)
        self._frozen = None

    def unfrozen(self) -> list[str]:
        """Return the names of parameters that were frozen at `update_trained_parameters` and require gradients now."""
        first = self.all[0]
        if self._frozen is None:
            trained = set(map(id, first.parameters.values()))
            self._frozen = [one for one in first.all_parameters if id(one) not in trained]
        if True not in map(_requires_grad, self._frozen):
            return []
        frozen = set(map(id, self._frozen))
        return [name for name, one in parameters_of(first.network).items() if one.requires_grad and id(one) in frozen]

    def copy_frozen_and_hooks(self) -> None:
        """Freeze in all replicas what is frozen in the user's network now, unfreeze the others, and copy its hooks.

        Each replica's hooks get its own gradients.
        """
        first, *others = [replica.all_parameters for replica in self.all]
        if not others:
            return
        states = _settings_of(chain(first, *others))
        if states == self._settings:
            return
        for copies in others:
            for parameter, target in zip(first, copies, strict=True):
                target.requires_grad_(parameter.requires_grad)
                if target._backward_hooks is not parameter._backward_hooks:
                    target._backward_hooks = parameter._backward_hooks
                of_user = _users_hooks(parameter)
                if of_user != _users_hooks(target):
                    own = target._post_accumulate_grad_hooks or {}
                    reducers = {number: hook for number, hook in own.items() if _is_reducers(hook)}
                    target._post_accumulate_grad_hooks = OrderedDict(of_user | reducers)
        self._settings = _settings_of(chain(first, *others))

    def note_gradients(self, *, by_all: bool) -> None:
        """Record the gradients after a backward, for `take_written_gradients`; one replica's only with ``by_all``."""
        if not by_all and len(self.all) == 1:
            return
        self.noted_gradients = [
            {name: (one.grad, one.grad._version) for name, one in replica.parameters.items() if one.grad is not None}
            for replica in self.all
        ]

    def take_written_gradients(self, *, by_all: bool) -> list[str]:
        """Return the names of parameters whose gradient in the user's network was written since `note_gradients`.

        Without ``by_all``, leave out those whose gradients were written in all replicas. The record is dropped.
        """
        noted, self.noted_gradients = self.noted_gradients, []
        written = [
            {
                name: (one := replica.parameters[name].grad) is not gradient or one._version != version
                for name, (gradient, version) in known.items()
            }
            for known, replica in zip(noted, self.all, strict=False)
        ]
        return [
            name
            for name, is_written in (written[0] if written else {}).items()
            if is_written and (by_all or not all(of.get(name, True) for of in written))
        ]

    def note(self) -> None:
        """Record the state of the user's network after a pass, for `copy_written`."""
        if len(self.all) > 1:
            self._noted = _write_states(self.all[0].tensors())

    @torch.no_grad()
    def copy_written(self, *, weights: bool) -> None:
        """Copy tensors of the user's network that were written since `note` to the other replicas.

        These are buffers and untrained parameters, and with ``weights`` trained ones, too. A write shows in a
        tensor's address or version; one in place through ``.data`` does not show.
        """
        if len(self.all) == 1:
            return
        first = self.all[0].tensors()
        states = _write_states(first)
        if states == self._noted:
            return
        others = [replica.tensors() for replica in self.all[1:]]
        for before, state, tensor, *copies in zip(self._noted, states, first, *others, strict=False):
            if state != before and (weights or not tensor.requires_grad):
                for target in copies:
                    target.copy_(tensor)

    @torch.no_grad()
    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current buffers and sample counts, and clears the gradients.

        The values are copied to memory that the next snapshot reuses.
        """
        seen = self.samples_seen
        buffers = [buffer for replica in self.all for buffer in replica.network.buffers()]
        if list(map(_kind, buffers)) != list(map(_kind, self._saved_buffers)):
            self._saved_buffers = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._saved_buffers, buffers)

        @torch.no_grad()
        def restore() -> None:
            for replica, count in zip(self.all, seen, strict=True):
                replica.samples_seen = count
            for buffer, value in zip(buffers, self._saved_buffers, strict=True):
                buffer.copy_(value)
            self.note()
            self.clear_gradients()

        return restore

    def detach_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Remove the gradients from the parameters and return them, for `add_gradients`.

        On a GPU they are copies: the originals may be parts of a bucket, which the next backward fills.
        """
        kept = []
        for replica in self.all:
            for parameter in replica.parameters.values():
                if parameter.grad is not None:
                    kept.append((parameter, parameter.grad.clone() if parameter.is_cuda else parameter.grad))
                    parameter.grad = None
        return kept

    @torch.no_grad()
    def add_gradients(self, kept: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add the gradients from `detach_gradients` to the current ones."""
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        self.noted_gradients = []
        for replica in self.all:
            for parameter in replica.all_parameters:
                parameter.grad = None

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients in place."""
        for gradient in self.all_gradients():
            gradient.mul_(factor)

    def all_gradients(self) -> Iterator[torch.Tensor]:
        """Yield every gradient of every replica: values of sparse ones, and only owned ones of sharded weights."""
        for replica in self.all:
            parameters = replica.parameters if self.divided is None else self.divided.owned()
            for parameter in parameters.values():
                if parameter.grad is not None:
                    yield parameter.grad if parameter.grad.layout == torch.strided else parameter.grad._values()

    def first_non_finite(self) -> str | None:
        """Return the name of a trained parameter on this worker that holds inf or nan; None: all are finite."""
        parameters = self.first.parameters if self.divided is None else self.divided.owned()
        if bool(all_finite(parameter.detach() for parameter in parameters.values())):  # waits once for a GPU
            return None
        return next(name for name, parameter in parameters.items() if not bool(parameter.isfinite().all()))

    def weights(self, name: str) -> list[torch.Tensor]:
        """Return each replica's value of a parameter."""
        return [replica.parameters[name].data for replica in self.all]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers on the host; buffers that differ are averaged, weighted by samples seen.

        Collective if the workers divide the weights; then rank 0 gets them, the others get an empty dict.
        """
        if self.divided is not None:
            state = self.divided.model_state_dict()
            return {plain_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
        state = {name: tensor.detach().cpu().clone() for name, tensor in state_of(self.first.network).items()}
        return state | (averaged(self.own_buffers(), self.samples_seen) if len(self.all) > 1 else {})

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy these values, by name, to every replica.

        Collective if the workers divide the weights; then rank 0's values count.
        """
        if self.divided is not None:
            with self.state_names():
                named = as_named_by(self.first.network, state)
            self.divided.load_model_state_dict(named, allow_missing=True)
            return
        for replica in self.all:
            _copy(state, state_of(replica.network))

    def untrained(self) -> dict[str, torch.Tensor]:
        """Return buffers and untrained parameters on the host, without sharded ones."""
        if self.divided is not None:
            return {name: tensor.detach().cpu().clone() for name, tensor in self._undivided().items()}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in self.first.parameters}

    def load_untrained(self, state: dict[str, torch.Tensor]) -> None:
        """Copy values of `untrained`, by name, to every replica."""
        for replica in self.all:
            _copy(state, state_of(replica.network) if self.divided is None else self._undivided())

    def _undivided(self) -> dict[str, torch.Tensor]:
        """Return persistent buffers, and parameters that are not real numbers and so have no owner."""
        assert self.divided is not None
        owners = self.divided.owners
        with self.state_names():
            state = state_of(self.first.network, keep_vars=True)
        return {name: one for name, one in state.items() if one not in owners}

    def state_names(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that allows reading names and shapes of the network's state_dict."""
        return contextlib.nullcontext() if self.divided is None else self.divided.allow_state_dict()

    def average_buffers(self, workers: Workers) -> None:
        """Average the buffers that differ over the replicas of all workers, and reset sample counts. Collective."""
        if workers.count > 1 or len(self.all) > 1:
            self.load_untrained(averaged_over(workers, self.own_buffers(), self.samples_seen))
        for replica in self.all:
            replica.samples_seen = 0

    @property
    def samples_seen(self) -> list[int]:
        """Training samples of each replica since running statistics were last averaged."""
        return [replica.samples_seen for replica in self.all]

    def own_buffers(self) -> dict[str, list[torch.Tensor]]:
        """Return each replica's values of the persistent buffers, on the host, by name."""
        with self.state_names():
            names = set(state_of(self.first.network))
        per_replica = [buffers_of(replica.network) for replica in self.all]
        return {
            name: [buffers[name].detach().cpu().clone() for buffers in per_replica]
            for name in per_replica[0]
            if name in names
        }

    def set_own_buffers(self, values: Buffers, samples_seen: Sequence[int]) -> None:
        """Restore the values of `own_buffers`, and the `samples_seen` read with them."""
        for index, replica in enumerate(self.all):
            buffers = buffers_of(replica.network)
            for name, per_replica in values.items():
                buffers[name].copy_(per_replica[index])
            replica.samples_seen = samples_seen[index]
        self.note()


def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return whether all tensors are finite: one flag, shape (), for all devices, on a GPU if there is one.

    The host does not wait for it here. It waits once when it reads the flag, after it has launched the step's other
    work.
    """
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            on_device.setdefault(tensor.device, []).append(tensor)
    flags = [torch.stack(torch._foreach_norm(one, math.inf)).isfinite().all() for one in on_device.values()]
    if not flags:
        return torch.tensor(True, device="cpu")
    target = next((flag.device for flag in flags if flag.is_cuda), flags[0].device)  # a copy to the host would wait
    return torch.stack([flag.to(target, non_blocking=True) for flag in flags]).all()


@torch.no_grad()
def _copy(values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        targets[name].copy_(value)


def _trained(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters_of(network).items() if parameter.requires_grad}


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _users_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """Return the hooks after accumulation that are not the reducer's, by number."""
    hooks = parameter._post_accumulate_grad_hooks or {}
    return {number: hook for number, hook in hooks.items() if not _is_reducers(hook)}


def _is_reducers(hook: Any) -> bool:
    return isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), Reducer)


def _settings_of(parameters: Iterable[nn.Parameter]) -> list[tuple[int, ...]]:
    """Return whether each parameter is trained, and the ids of its hooks."""
    return [
        (one.requires_grad, id(one._backward_hooks), *(one._post_accumulate_grad_hooks or ())) for one in parameters
    ]


def _write_states(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return each tensor's address and version, which writes change."""
    if {*map(_layout, tensors)} == {torch.strided} and not any(map(torch.Tensor.is_inference, tensors)):
        return [*zip(map(_data_ptr, tensors), map(_version, tensors), strict=True)]
    return [
        (one.data_ptr() if one.layout == torch.strided else 0, 0 if one.is_inference() else one._version)
        for one in tensors
    ]
