"""Weights divided over the workers by memory; a layer's are whole only while it computes.

As the third stage of ZeRO (Rajbhandari and others, 2020) and PyTorch's FSDP, but with unequal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gangline.collectives.work import Work
from gangline.kvstore.interface import KVStore
from gangline.kvstore.reducer.owned_parameters import OwnedParameters

_IN_FLIGHT = 2
"""Sums of gradients that are on their way to their owners at a time."""
_MOST_GROUPS = 511
"""Bits that go along with a copy; each stands for a group of gradients."""


@dataclass(eq=False)
class _Weight:
    """A parameter that one worker owns."""

    name: str
    parameter: nn.Parameter
    owner: int
    placeholder: torch.Tensor
    """One NaN in the parameter's shape, for the weight and the gradient on the workers that do not own it."""
    own: torch.Tensor | None
    """The weight on its owner."""
    whole: torch.Tensor | None = None
    """The weight while some layer, or backward, uses it."""
    users: int = 0
    """Layers that use it now, and 1 for backward."""
    mean: torch.Tensor | None = None
    """The gradient's mean over the workers, which is ``.grad`` on the owner after backward."""
    earlier: torch.Tensor | None = None
    """The mean of an earlier backward, to which that of the next one is added."""


@dataclass(eq=False)
class _Layer:
    """Weights that become whole together."""

    weights: list[_Weight]
    saved: int = 0
    """Times that autograd has saved one for backward and not yet taken it back."""
    is_used_by_backward: bool = False


@dataclass(frozen=True)
class _Saved:
    """What autograd keeps in place of a weight, or of a view of it."""

    layer: _Layer
    weight: _Weight
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Parameters(dict[str, "nn.Parameter | None"]):
    """A layer's parameters; one that is read while a network computes becomes whole, whichever layer reads it."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], use: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._use = use

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._use(parameter)
        return parameter


class ShardedWeights(OwnedParameters):
    """Divides the weights of a network over the workers, with their gradients and the optimizer's state.

    Before a layer's forward its parameters are copied from their owners, after it they are dropped, and autograd gets
    them again when backward needs them. All workers must run the same layers in the same order; the order of gradients
    may differ with the number of samples, so with each copy in backward the workers agree on the gradients that all of
    them have, and these go to their owners. Outside a forward, a worker sees NaN in place of the weights and gradients
    that others own.
    """

    def __init__(self, optimizer: Optimizer, network: nn.Module, store: KVStore, memory: Sequence[float] | str) -> None:
        """Divide the network's parameters by memory, with rank 0's values. Collective: all workers must call it.

        Raises:
            ValueError: if the network lacks a parameter of the optimizer, or as for `OwnedParameters`.
        """
        names = {one: name for name, one in network.named_parameters() if one.is_floating_point() or one.is_complex()}
        foreign = sum(one not in names for group in optimizer.param_groups for one in group["params"])
        if foreign:
            raise ValueError(f"the optimizer has {foreign} parameters that the network does not have; expected its own")
        super().__init__(optimizer, list(names), store, memory)
        self._network = network
        self._frames: list[list[_Layer]] = []  # what each module whose forward runs now has made whole
        self._saving: Any = None
        self._weight = self._total = 1.0
        self._is_syncing = self._keeps_whole = False
        self._works: list[tuple[Work, list[tuple[_Weight, torch.Tensor]]]] = []
        self._by_address: dict[int, tuple[_Layer, _Weight]] = {}  # weights that are whole for a forward
        self._layers: list[_Layer] = []  # used by backward
        for one in names:
            one.data = one.data.contiguous()
        store.copy_from_owners([one.data.view(-1) for one in names], [0] * len(names))
        self._weights = {one: self._divide(name, one) for one, name in names.items()}
        trained = [weight for weight in self._weights.values() if weight.parameter.requires_grad]
        size = -(-len(trained) // _MOST_GROUPS) or 1
        self._groups = [trained[begin : begin + size] for begin in range(0, len(trained), size)]
        self._group_of = {weight: number for number, group in enumerate(self._groups) for weight in group}
        self._pending = [0] * len(self._groups)  # gradients of each group that are yet to arrive
        self._missing = self._none = (1 << len(self._groups)) - 1  # a bit for each group without sums to be sent
        self._hooks: list[Any] = []
        self._plain: list[tuple[nn.Module, Any]] = []
        for layer in network.modules():
            if next(layer.parameters(), None) is not None:
                self._watch(layer)
        for weight in trained:
            before, after = partial(self._before_gradient, weight), partial(self._on_gradient, weight)
            self._hooks.append(weight.parameter.register_hook(before))  # type: ignore[no-untyped-call]
            self._hooks.append(weight.parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def _divide(self, name: str, parameter: nn.Parameter) -> _Weight:
        owner, data = self._owners[parameter], parameter.data
        placeholder = torch.full((), torch.nan, dtype=data.dtype, device=data.device).expand(data.shape)
        own = None
        if owner == self._store.rank:
            own = _like(data).copy_(data)  # in memory of its own, by which autograd's views of it are known
        parameter.data = placeholder if own is None else own
        return _Weight(name, parameter, owner, placeholder, own)

    def _watch(self, layer: nn.Module) -> None:
        self._plain.append((layer, layer._parameters))
        layer._parameters = _Parameters(layer._parameters, self._use)
        self._hooks += [
            layer.register_forward_pre_hook(self._before_forward, prepend=True),
            layer.register_forward_hook(self._after_forward, always_call=True),
            layer.register_state_dict_pre_hook(self._refuse_state),  # type: ignore[no-untyped-call]
            layer.register_load_state_dict_pre_hook(self._refuse_state),  # type: ignore[no-untyped-call]
        ]

    def _refuse_state(self, *_: object) -> None:
        if not self._keeps_whole:
            raise RuntimeError(
                "the workers divide this network's weights, so state_dict() and load_state_dict() of one worker have "
                "only a part; call the DistributedOptimizer's model_state_dict() and load_model_state_dict() on all"
            )

    # Forward

    def _before_forward(self, layer: nn.Module, _: object) -> None:
        if not self._frames and torch._C._current_graph_task_id() == -1:  # a checkpoint's recomputation saves itself
            self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, self._restore)
            self._saving.__enter__()
        self._frames.append([])
        self._make_whole(one for one in dict.values(layer._parameters) if one is not None)

    def _after_forward(self, *_: object) -> None:
        for layer in self._frames.pop():
            for weight in layer.weights:
                del self._by_address[_address(weight.parameter)]
                if weight.own is None:
                    weight.parameter.data = weight.placeholder
            self._release(layer)
        if not self._frames and self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None

    def _use(self, parameter: nn.Parameter) -> None:
        if self._frames:
            self._make_whole([parameter])

    def _make_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        weights = [self._weights[one] for one in dict.fromkeys(parameters) if one in self._weights]
        layer = _Layer([weight for weight in weights if _address(weight.parameter) not in self._by_address])
        if not layer.weights:
            return
        self._acquire(layer)
        self._frames[-1].append(layer)
        for weight in layer.weights:
            assert weight.whole is not None
            weight.parameter.data = weight.whole
            self._by_address[_address(weight.whole)] = layer, weight

    def _acquire(self, layer: _Layer) -> None:
        missing = [weight for weight in layer.weights if not weight.users]
        for weight in missing:
            weight.whole = weight.own if weight.own is not None else _like(weight.placeholder)
        if missing:
            flats = [weight.whole.view(-1) for weight in missing if weight.whole is not None]
            owners = [weight.owner for weight in missing]
            waiting, total = self._store.copy_from_owners(flats, owners, self._missing, self._weight)
            if self._is_syncing:
                self._reduce_together(waiting, total)
        for weight in layer.weights:
            weight.users += 1

    def _release(self, layer: _Layer) -> None:
        for weight in layer.weights:
            weight.users -= 1
            if not weight.users:
                weight.whole = None

    # Backward

    def _save(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        found = self._by_address.get(_address(tensor)) if tensor.numel() else None
        if found is None:
            return tensor
        found[0].saved += 1
        return _Saved(*found, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _restore(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        layer, weight = saved.layer, saved.weight
        if not layer.is_used_by_backward:
            layer.is_used_by_backward = True
            self._layers.append(layer)
            self._acquire(layer)
        assert weight.whole is not None
        found = weight.whole.as_strided(saved.size, saved.stride, saved.offset)
        layer.saved -= 1
        if layer.saved <= 0:
            self._end_use(layer)
        return found

    def _end_use(self, layer: _Layer) -> None:
        layer.is_used_by_backward = False
        self._layers.remove(layer)
        self._release(layer)

    def begin(self, _: Iterable[int], *, push_early: bool, weight: float | None = None) -> None:
        """Prepare for a backward, as `Reducer.begin`."""
        self._is_syncing, self._weight = push_early, weight or 0.0
        self._pending = [len(group) for group in self._groups]
        self._missing = self._none

    def _before_gradient(self, weight: _Weight, _: torch.Tensor) -> None:
        self._set_mean_aside(weight)

    def _set_mean_aside(self, weight: _Weight) -> None:
        """Keep the mean of an earlier backward apart from this one's gradient, unless it was reset."""
        parameter = weight.parameter
        if parameter.grad is None:
            weight.earlier = None
        elif not self._waits(weight):
            weight.earlier, parameter.grad = weight.mean, None
        weight.mean = None

    def _on_gradient(self, weight: _Weight, _: torch.Tensor) -> None:
        if self._is_syncing:
            number = self._group_of[weight]
            self._pending[number] -= 1
            if not self._pending[number]:
                self._missing &= ~(1 << number)

    def _reduce_together(self, missing: int, total: float) -> None:
        """Send the gradients of the groups that no worker waits for to their owners."""
        ready = [number for number in range(len(self._groups)) if not missing >> number & 1]
        for number in ready:
            self._missing |= 1 << number
        self._reduce([weight for number in ready for weight in self._groups[number]], total)

    def _reduce(self, weights: Sequence[_Weight], total: float) -> None:
        if not total:  # no worker has samples
            for weight in weights:
                weight.mean = weight.parameter.grad = weight.earlier
        elif weights:
            sums = [(weight, self._part(weight, total)) for weight in weights]
            while len(self._works) >= _IN_FLIGHT:
                self._take_means()
            flats, owners = [part.view(-1) for _, part in sums], [weight.owner for weight in weights]
            self._works.append((self._store.reduce_to_owners(flats, owners), sums))

    def _part(self, weight: _Weight, total: float) -> torch.Tensor:
        """Take the gradient of a parameter; return this worker's part of the mean."""
        gradient, weight.parameter.grad = weight.parameter.grad, None
        if gradient is None or not self._weight:
            return _like(weight.placeholder).zero_()
        if gradient.is_sparse:
            raise ValueError(f"{weight.name} has a sparse gradient; expected a dense one (nn.Embedding(sparse=False))")
        return gradient.detach().contiguous().mul_(self._weight / total)

    def _take_means(self) -> None:
        work, sums = self._works.pop(0)
        work.wait()
        for weight, mean in sums:
            if weight.own is None:
                weight.parameter.grad = weight.placeholder
            else:
                weight.mean = weight.parameter.grad = mean if weight.earlier is None else weight.earlier.add_(mean)
            weight.earlier = None

    def finish(self, weight: float | None = None) -> None:
        """Send the gradients that wait, and wait for the means. Collective.

        Args:
            weight: weight of this worker's gradients; None or 0: they are ignored.
        """
        while self._works:
            self._take_means()
        for layer in list(self._layers):
            layer.saved = 0
            self._end_use(layer)
        waiting = {one.name for one in self._weights.values() if self._waits(one)}
        gathered = self._store.group.all_gather([weight or 0.0, sorted(waiting)], "gradients that wait")
        together = {name for _, names in gathered for name in names}
        left = [one for one in self._weights.values() if one.name in together]
        for one in left:
            if one.name not in waiting:
                self._set_mean_aside(one)
        self._weight = weight or 0.0
        self._reduce(left, sum(theirs for theirs, _ in gathered))
        while self._works:
            self._take_means()
        self._is_syncing, self._missing = False, self._none

    def _waits(self, weight: _Weight) -> bool:
        gradient = weight.parameter.grad
        return gradient is not None and gradient is not weight.mean and gradient is not weight.placeholder

    def step(self) -> None:
        """Update the owned weights."""
        self._update()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients by their common 2-norm, which is returned. Collective."""
        own = [weight.mean for weight in self._weights.values() if weight.parameter.grad is weight.mean is not None]
        squares = sum(float(one.double().square().sum()) for one in own)
        norm = sum(self._store.group.all_gather(squares, "clip_grad_norm_")) ** 0.5
        for one in own:
            one.mul_(min(max_norm / (norm + 1e-6), 1.0))
        return torch.tensor(norm)

    # Whole weights

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._keeps_whole = True
        try:
            yield
        finally:
            self._keeps_whole = False

    def model_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the network's whole state on the host at rank 0, an empty dict elsewhere. Collective."""
        with self._open():
            state = self._network.state_dict(keep_vars=True)
        found = {}
        for name, value in state.items():
            weight = self._weights.get(value) if isinstance(value, nn.Parameter) else None
            if weight is not None:
                layer = _Layer([weight])
                self._acquire(layer)
                assert weight.whole is not None
                value = weight.whole
                self._release(layer)
            if not self._store.rank:
                found[name] = value.detach().to("cpu", copy=True)
        return found

    def load_model_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the network's state by rank 0's; ``state`` is ignored on other ranks. Collective.

        Raises:
            ValueError: if rank 0's names or shapes are others than the network's; on all workers.
        """
        with self._open():
            own = self._network.state_dict(keep_vars=True)
        wrong = ""
        if not self._store.rank:
            differing = sorted(own.keys() ^ state.keys())
            differing += [name for name in own if name in state and own[name].shape != state[name].shape]
            wrong = f"the state does not fit the network; missing, unknown or of another shape: {differing}"
            wrong = wrong if differing else ""
        wrong = self._store.group.all_gather(wrong, "load_model_state_dict")[0]
        if wrong:
            raise ValueError(wrong)
        for name, value in own.items():
            weight = self._weights.get(value) if isinstance(value, nn.Parameter) else None
            target = value.detach() if weight is None else weight.own
            taken = _like(value.detach())
            if not self._store.rank:
                taken.copy_(state[name])
            self._store.copy_from_owners([taken.view(-1)], [0])
            if target is not None:
                target.copy_(taken)

    def close(self) -> None:
        """Remove the hooks; weights that other workers own stay NaN here."""
        for hook in self._hooks:
            hook.remove()
        for layer, parameters in self._plain:
            layer._parameters = parameters


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
