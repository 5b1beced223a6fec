"""One torch.optim optimizer over the weights of many keys, updated a few keys at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _len_torch_function_stack

from gangline.kvstore.optimizer import clipping
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec, Pattern, check_learning_rate
from gangline.kvstore.sparse import RowSparse

_HEADER = ("initial_learning_rate", "learning_rate", "shapes", "plain", "names")
"""Fields of an `OptimizerState` in its header, in addition to the name."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _on_host(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a call of torch's optimizers: some create their counts of steps on the default device."""

    @wraps(call)
    def on_host(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.device("cpu") if _len_torch_function_stack() else nullcontext():  # a default device is a mode
            return call(*args, **kwargs)

    return on_host


@dataclass
class _Part:
    """The torch optimizer of a pattern, and its parameter groups by (lr_mult, wd_mult)."""

    spec: OptimizerSpec
    optimizer: torch.optim.Optimizer
    groups: dict[tuple[float, float], dict[str, Any]] = field(default_factory=dict)


class KeyedOptimizer:
    """Optimizer of a store: torch.optim over the weights of many keys, of which an update changes some.

    Keys of a pattern with equal (lr_mult, wd_mult) share a parameter group. An update puts only its own keys into the
    groups, so its cost depends on these keys alone. State is torch's, per key. ``clip_global_norm`` takes the norm over
    the gradients of one update.

    Row-sparse gradients are applied lazily, as with MXNet's ``lazy_update`` and torch's SparseAdam: weight decay,
    momentum and the update itself affect only the rows of the gradient and their state.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.learning_rate = spec.rate
        """The learning rate, before lr_mult; see `set_learning_rate`."""
        self.weights: dict[Key, torch.Tensor] = {}
        """Tensors from the last `add` of each key."""
        self._parts: dict[Pattern, _Part] = {}  # from the first key on, as torch needs a tensor to create one
        self._part_of: dict[Key, _Part] = {}
        self._group_of: dict[Key, dict[str, Any]] = {}
        self._starts: dict[Key, dict[str, complex]] = {}  # by key: initial values of row state
        self._uses_gpu = False
        self._begins_with_state = False  # whether the optimizer creates state with the weight, as Adagrad

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next update on."""
        check_learning_rate(learning_rate)
        self.learning_rate = float(learning_rate)
        for part in self._parts.values():
            for (lr_mult, _), group in part.groups.items():
                group["lr"] = self.spec.rate_of(part.spec, self.learning_rate) * lr_mult

    def add(self, key: Key, weight: torch.Tensor, named: Key | None = None) -> None:
        """Set the tensor that updates of ``key`` change; keep existing state of the key, on the tensor's device.

        ``named``: the key by which pattern and factors are found; None: this one. Adding the same tensor again does
        nothing. ValueError if the optimizer does not support it, see `checked`.
        """
        before = self.weights.get(key)
        if before is weight:
            return
        named = key if named is None else named
        spec, factors = self.spec.of(named), self.spec.factors(named)
        probe = checked(spec, named, weight)
        self._begins_with_state |= bool(probe.state)
        probe.state.clear()  # a key's state begins with its first update: a worker that never updates it has none
        part = self._part_of[key] = self._parts.setdefault(spec.pattern, _Part(spec, probe))
        if factors not in part.groups:
            group = part.groups[factors] = probe.param_groups[0]
            group["lr"] = self.spec.rate_of(spec, self.learning_rate) * factors[0]
            if "weight_decay" in group:
                group["weight_decay"] *= factors[1]
        self.weights[key] = weight
        self._uses_gpu |= weight.is_cuda  # torch's optimizers then take foreach by themselves
        self._group_of[key] = part.groups[factors]
        if before is not None:
            self.restore(key, part.optimizer.state.pop(before, {}))

    def state_of(self, key: Key) -> dict[str, Any]:
        """Return the live state of an added key: tensors and plain values by name."""
        state: dict[str, Any] = self._part_of[key].optimizer.state[self.weights[key]]
        return state

    @_on_host
    @torch.inference_mode(mode=False)  # its state is kept
    def update(
        self, gradients: Sequence[tuple[Key, torch.Tensor | RowSparse]], is_wanted: Callable[[Key], bool] | None = None
    ) -> None:
        """Run one optimizer step over these keys; no other key changes.

        Args:
            gradients: keys that were added, each with its summed gradient, of the weight's shape, dtype and device.
                Dense ones are changed in place if `modifies_gradient`; the rows of a `RowSparse` must be distinct.
            is_wanted: whether a key is updated; the others only count for clipping by their common norm.

        Raises:
            ValueError: if the optimizer does not support a key's kind of gradient; nothing is updated then.
        """
        if not gradients:
            return
        self.check_kinds([(key, (gradient,)) for key, gradient in gradients])
        groups = [group for part in self._parts.values() for group in part.groups.values()]
        for group in groups:
            group["params"] = []
        before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        sparse: list[_Rows] = []
        try:
            for (key, gradient), values in zip(gradients, self._clipped([one for _, one in gradients]), strict=True):
                if is_wanted is not None and not is_wanted(key):
                    continue
                weight, part = self.weights[key], self._part_of[key]
                optimizer = part.optimizer
                if self._begins_with_state and weight not in optimizer.state:
                    optimizer.state[weight] = checked(part.spec, key, weight).state[weight]
                for_torch = values
                if isinstance(gradient, RowSparse) and part.spec.takes_dense:
                    rows = _Rows(weight, gradient.indices, optimizer.state, self._start_values(key))
                    sparse.append(rows)
                    weight = rows.weight
                elif isinstance(gradient, RowSparse):
                    for_torch = RowSparse(gradient.indices, values, gradient.shape).to_coo()._coalesced_(True)
                before.append((weight, weight.grad))
                weight.grad = for_torch
                self._group_of[key]["params"].append(weight)
            for part in self._parts.values():
                part.optimizer.param_groups = [group for group in part.groups.values() if group["params"]]
                if part.optimizer.param_groups:
                    part.optimizer.step()
        finally:
            for weight, gradient_before in before:
                weight.grad = gradient_before
            for rows in sparse:
                rows.write_back()
            for group in groups:  # hold no tensor that the store has released
                group["params"] = []

    def check_kinds(self, pairs: Iterable[tuple[Key, Sequence[torch.Tensor | RowSparse]]]) -> None:
        """Raise ValueError unless the optimizer supports the kinds of these gradients: row-sparse or dense."""
        if self.spec.takes_dense and RowSparse not in map(type, chain.from_iterable([one for _, one in pairs])):
            return
        for key, values in pairs:
            is_sparse = all(isinstance(value, RowSparse) for value in values)
            spec = self._part_of[key].spec if key in self._part_of else self.spec.of(key)
            if is_sparse and not spec.is_elementwise:
                raise ValueError(
                    f"optimizer {spec.name!r} works on whole tensors, but the gradient of key {key!r} is "
                    "row-sparse; expected an elementwise optimizer (sgd, adam, adagrad), or a dense gradient"
                )
            if not is_sparse and not spec.takes_dense:
                raise ValueError(
                    f"optimizer {spec.name!r} takes row-sparse gradients only, but that of key {key!r} is dense; "
                    "expected adam, or nn.Embedding(sparse=True)"
                )

    def _start_values(self, key: Key) -> dict[str, complex]:
        """Return the initial values of a key's elementwise state tensors: those after a step over zeros."""
        if key not in self._starts:
            probe = torch.zeros(1, dtype=self.weights[key].dtype, device=self.weights[key].device)
            probe.grad = torch.zeros_like(probe)
            group = {name: value for name, value in self._group_of[key].items() if name != "params"}
            spec = self._part_of[key].spec
            optimizer = spec.optimizer_class([{**group, "params": [probe]}], **spec.arguments)
            optimizer.step()
            state = optimizer.state[probe].items()
            self._starts[key] = {
                name: value.item() for name, value in state if isinstance(value, torch.Tensor) and value.dim()
            }
        return self._starts[key]

    @property
    def modifies_gradient(self) -> bool:
        """True if `update` may change dense gradients in place."""

        def writes(spec: OptimizerSpec) -> bool:
            by_foreach = spec.arguments.get("foreach", self._uses_gpu) and not spec.arguments.get("fused")
            adds_momentum = by_foreach and spec.arguments.get("nesterov", False)  # torch's SGD, to the gradient itself
            return adds_momentum or not spec.is_known_class

        return self.spec.rescale_grad != 1.0 or self.spec.clips or any(map(writes, self.spec.parts or [self.spec]))

    @torch.no_grad()
    def _clipped(self, gradients: Sequence[torch.Tensor | RowSparse]) -> list[torch.Tensor]:
        """Return the rescaled and clipped gradients; rows for row-sparse gradients."""
        is_changed = self.modifies_gradient
        values = [
            (one.values.clone() if is_changed else one.values) if isinstance(one, RowSparse) else one
            for one in gradients
        ]
        if self.spec.rescale_grad != 1.0 and values:
            torch._foreach_mul_(values, self.spec.rescale_grad)
        if self.spec.clip_gradient is not None:
            for one in values:
                one.clamp_(-self.spec.clip_gradient, self.spec.clip_gradient)
        elif self.spec.clip_norm is not None:
            for one in values:
                clipping.clip_norm_([one], self.spec.clip_norm)
        elif self.spec.clip_global_norm is not None:
            clipping.clip_norm_(values, self.spec.clip_global_norm)
        return values

    def state(self) -> OptimizerState:
        """Return a copy of all state, on the host."""
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        shapes = {json.dumps(key): list(weight.shape) for key, weight in self.weights.items()}
        for key, weight in self.weights.items():
            for name, value in self._part_of[key].optimizer.state.get(weight, {}).items():
                place = f"{json.dumps(key)}/{name}"
                if isinstance(value, torch.Tensor):
                    tensors[place] = value.detach().cpu().clone().contiguous()
                else:
                    plain[place] = value
        spec, names = self.spec, self.spec.names(self.weights)
        return OptimizerState(spec.name, spec.rate, self.learning_rate, shapes, tensors, plain, names)

    @torch.inference_mode(mode=False)
    def load_state(self, state: OptimizerState) -> None:
        """Load the state of all keys, which `OptimizerState.check` accepts; the learning rate stays."""
        state.check(self.spec, {key: weight.shape for key, weight in self.weights.items()})
        of_keys: dict[Key, dict[str, Any]] = {key: {} for key in self.weights}
        for place, value in [*state.tensors.items(), *state.plain.items()]:
            encoded, _, name = place.rpartition("/")
            of_keys[json.loads(encoded)][name] = value
        for key, of_key in of_keys.items():
            self.restore(key, of_key)

    def restore(self, key: Key, state: dict[str, Any], *, copy: bool = True) -> None:
        """Replace the state of an added key; without ``copy`` tensors that fit are kept."""
        weight, group, of_weights = self.weights[key], self._group_of[key], self._part_of[key].optimizer.state
        step_on_host = not (group.get("capturable") or group.get("fused"))
        restored = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                if name == "step":
                    value = value.to(value.device if step_on_host else weight.device, copy=copy)
                else:  # as load_state_dict: elementwise state in the weight's dtype, scalars unchanged
                    elementwise = value.is_floating_point() and (value.dim() or not weight.dim())
                    dtype = weight.dtype if elementwise else value.dtype
                    value = value.to(weight.device, dtype, copy=copy)
            restored[name] = value
        if restored:
            of_weights[weight] = restored
        else:
            of_weights.pop(weight, None)


@_on_host
def checked(spec: OptimizerSpec, key: Key, weight: torch.Tensor) -> torch.optim.Optimizer:
    """Return a torch optimizer over the weight of a key alone; ValueError if the optimizer does not support it."""
    if misfit := spec.misfit(weight.dtype):
        raise ValueError(f"key {key!r} does not fit optimizer {spec.name!r}: {misfit}")
    is_half_on_cpu = weight.is_cpu and weight.dtype.itemsize < 4
    if is_half_on_cpu and spec.optimizer_class is torch.optim.SGD and spec.arguments.get("fused"):
        raise ValueError(  # torch 2.12 and 2.13: https://github.com/pytorch/pytorch/issues/191763
            f"key {key!r} does not fit optimizer {spec.name!r}: torch's fused SGD leaves most elements of a "
            f"{weight.dtype} weight on the CPU unchanged; leave 'fused' out"
        )
    try:
        return spec.optimizer_class([weight], **spec.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"key {key!r} does not fit optimizer {spec.name!r}: {error}") from error


class _Rows:
    """Some rows of a weight and their state, copied into a separate tensor for one update."""

    def __init__(
        self, whole: torch.Tensor, indices: torch.Tensor, states: dict[torch.Tensor, Any], starts: dict[str, complex]
    ) -> None:
        self.whole, self.indices, self.starts, self.states = whole, indices, starts, states
        self.weight = whole.detach().index_select(0, indices)
        if whole in states:
            states[self.weight] = {
                name: value.index_select(0, indices) if name in starts else value
                for name, value in states[whole].items()
            }

    def write_back(self) -> None:
        with torch.no_grad():
            self.whole.index_copy_(0, self.indices, self.weight)
        for name, value in self.states.pop(self.weight, {}).items():
            of_whole = self.states[self.whole]
            if name not in self.starts:
                of_whole[name] = value
                continue
            if name not in of_whole:
                of_whole[name] = torch.full_like(self.whole, self.starts[name], requires_grad=False)
            of_whole[name].index_copy_(0, self.indices, value)


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state: tensors and plain values by ``<key as JSON>/<name>``, and the learning rate."""

    name: str
    initial_learning_rate: float
    learning_rate: float
    shapes: dict[str, list[int]]
    """Shapes of the weights, by key as JSON."""
    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    """Names of the keys' optimizers, by key as JSON; without patterns it is ``name`` for all."""

    def check(self, spec: OptimizerSpec, shapes: Mapping[Key, tuple[int, ...]]) -> None:
        """Raise ValueError unless the state is of this optimizer and its keys and shapes are known."""
        if self.name != spec.name and not (self.names or spec.parts):
            raise ValueError(f"the state is of optimizer {self.name!r}, but {spec.name!r} is set here")
        for encoded, shape in self.shapes.items():
            key = json.loads(encoded)
            if key not in shapes:
                raise ValueError(f"the state has key {key!r}, which is unknown here; known keys: {list(shapes)}")
            if tuple(shape) != tuple(shapes[key]):
                raise ValueError(f"the state of key {key!r} is for shape {tuple(shape)}; expected {tuple(shapes[key])}")
            name, part = self.names.get(encoded, self.name), spec.find(key)
            if part is not None and name != part.name:
                raise ValueError(f"the state of key {key!r} is of optimizer {name!r}, but here it has {part.name!r}")

    def of_keys(self, is_wanted: Callable[[Key], bool]) -> OptimizerState:
        """Return the state of some keys, with the shapes of all keys."""

        def part(values: dict[str, Any]) -> dict[str, Any]:
            return {place: value for place, value in values.items() if is_wanted(json.loads(place.rpartition("/")[0]))}

        return replace(self, tensors=part(self.tensors), plain=part(self.plain))

    @classmethod
    def merged(cls, parts: Sequence[OptimizerState]) -> OptimizerState:
        """Merge the keys of all parts, with the learning rates of the first part."""
        return replace(
            parts[0],
            shapes={key: shape for part in parts for key, shape in part.shapes.items()},
            tensors={place: tensor for part in parts for place, tensor in part.tensors.items()},
            plain={place: value for part in parts for place, value in part.plain.items()},
            names={key: name for part in parts for key, name in part.names.items()},
        )

    def header(self) -> dict[str, Any]:
        """Return all fields but the tensors, as JSON data."""
        return {"optimizer": self.name, **{name: getattr(self, name) for name in _HEADER}}

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> OptimizerState:
        """Build the state from its `header` and tensors."""
        given = {name: header[name] for name in _HEADER if name in header}
        return cls(name=header["optimizer"], tensors=tensors, **given)
