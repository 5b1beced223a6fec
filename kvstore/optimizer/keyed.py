"""The torch.optim that runs an optimizer spec key by key, wherever the weights live."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gangline.kvstore.optimizer import clipping
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec, check_learning_rate
from gangline.kvstore.sparse import RowSparse


class KeyedOptimizer:
    """One torch optimizer over the weights of many keys, of which each update names a few.

    A parameter group holds the keys that share (lr_mult, wd_mult). An update puts only its own keys into the
    groups, so it costs by the keys it names. State is torch's, per tensor, and never moves between keys.
    ``clip_global_norm`` takes the norm of the gradients of one update.

    A row-sparse gradient is applied lazily, as MXNet's ``lazy_update`` and torch's SparseAdam do it: the rows it names
    and their state see the optimizer's arithmetic, decay and momentum included; all others stay as they are.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self._learning_rate = float(spec.arguments["lr"])
        self._weights: dict[Key, torch.Tensor] = {}
        self._groups: dict[tuple[float, float], dict[str, Any]] = {}
        self._optimizer: torch.optim.Optimizer | None = None  # torch wants a tensor to make one
        self._starts: dict[Key, dict[str, float]] = {}  # as they were when a key's first rows came

    @property
    def learning_rate(self) -> float:
        """The rate that lr_mult multiplies."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        check_learning_rate(value)
        self._learning_rate = float(value)
        for (lr_mult, _), group in self._groups.items():
            group["lr"] = self._learning_rate * lr_mult

    def add(self, key: Key, weight: torch.Tensor) -> None:
        """Make ``weight`` the tensor that updates of ``key`` change; state there was for the key goes along.

        Raises:
            ValueError: the optimizer does not take such a tensor (Muon wants two axes, say).
        """
        before = self._weights.get(key)
        if before is weight:
            return
        probe = self.check(key, weight)
        factors = self.spec.factors(key)
        if self._optimizer is None:
            self._optimizer = probe
        if factors not in self._groups:
            group = self._groups[factors] = probe.param_groups[0]
            group["lr"] = self._learning_rate * factors[0]
            if "weight_decay" in group:
                group["weight_decay"] *= factors[1]
        self._weights[key] = weight
        if before is not None:
            self._restore(key, self._optimizer.state.pop(before, {}))

    def check(self, key: Key, weight: torch.Tensor) -> torch.optim.Optimizer:
        """Raise what `add` would raise; else the optimizer that torch makes of the weight."""
        if not (weight.is_floating_point() or weight.is_complex()):
            raise ValueError(f"key {key!r} does not fit optimizer {self.spec.name!r}: it holds {weight.dtype}")
        try:
            return self.spec.optimizer_class([weight], **self.spec.arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"key {key!r} does not fit optimizer {self.spec.name!r}: {error}") from error

    def update(self, gradients: Sequence[tuple[Key, torch.Tensor | RowSparse]]) -> None:
        """Run the optimizer once over these keys; every other key is left alone.

        Args:
            gradients: keys that were added, each with its summed gradient (the weight's shape, dtype and device).
                Where `modifies_gradient` says so dense ones are changed in place; a `RowSparse` has distinct rows.

        Raises:
            ValueError: the optimizer does not take a key's kind of gradient; nothing is updated then.
        """
        if not gradients:
            return
        optimizer = self._optimizer
        assert optimizer is not None, "keys are added before they are updated"
        for key, gradient in gradients:
            self.check_kind(key, rows=isinstance(gradient, RowSparse))
        for group in self._groups.values():
            group["params"] = []
        before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        parts: list[_Rows] = []
        try:
            for (key, gradient), values in zip(gradients, self._clipped([one for _, one in gradients]), strict=True):
                weight = self._weights[key]
                if isinstance(gradient, RowSparse) and self.spec.takes_dense:
                    part = _Rows.of(weight, gradient.indices, optimizer, self._start_values(key))
                    parts.append(part)
                    weight = part.weight
                before.append((weight, weight.grad))
                weight.grad = self._for_torch(gradient, values)
                self._groups[self.spec.factors(key)]["params"].append(weight)
            optimizer.param_groups = [group for group in self._groups.values() if group["params"]]
            optimizer.step()
        finally:
            for weight, gradient_before in before:
                weight.grad = gradient_before
            for part in parts:
                part.put_back(optimizer)
            for group in self._groups.values():  # nothing is held here that a store has let go
                group["params"] = []

    def check_kind(self, key: Key, *, rows: bool) -> None:
        """Raise ValueError unless the optimizer takes a gradient of this kind: rows, or a dense one."""
        if rows and not self.spec.takes_rows:
            raise ValueError(
                f"optimizer {self.spec.name!r} works on whole tensors, but the gradient of key {key!r} is row-sparse; "
                "expected an elementwise optimizer (sgd, adam, adagrad), or a dense gradient"
            )
        if not rows and not self.spec.takes_dense:
            raise ValueError(
                f"optimizer {self.spec.name!r} takes row-sparse gradients only, but that of key {key!r} is dense; "
                "expected adam, or nn.Embedding(sparse=True)"
            )

    def _start_values(self, key: Key) -> dict[str, float]:
        """What each of a key's state tensors starts from: what a step over zeros leaves in it."""
        if key not in self._starts:
            factors = self.spec.factors(key)
            probe = torch.zeros_like(self._weights[key].detach().flatten()[:1])
            probe.grad = torch.zeros_like(probe)
            group = {name: value for name, value in self._groups[factors].items() if name != "params"}
            optimizer = self.spec.optimizer_class([{**group, "params": [probe]}], **self.spec.arguments)
            optimizer.step()
            state = optimizer.state[probe].items()
            self._starts[key] = {
                name: float(value) for name, value in state if isinstance(value, torch.Tensor) and value.dim()
            }
        return self._starts[key]

    @property
    def modifies_gradient(self) -> bool:
        """Whether `update` changes, or may change, the gradients it is given."""
        return self.spec.rescale_grad != 1.0 or self.spec.clips or not self.spec.is_torchs

    @torch.no_grad()
    def _clipped(self, gradients: Sequence[torch.Tensor | RowSparse]) -> list[torch.Tensor]:
        """The gradients as the optimizer gets them; of a row-sparse one its rows, the others being zero."""
        values: list[torch.Tensor] = []
        for gradient in gradients:
            if isinstance(gradient, RowSparse):
                values.append(gradient.values.clone() if self.modifies_gradient else gradient.values)
            else:
                values.append(gradient)
        if self.spec.rescale_grad != 1.0:
            for value in values:
                value.mul_(self.spec.rescale_grad)
        if self.spec.clip_gradient is not None:
            clipping.clip_values_(values, self.spec.clip_gradient)
        elif self.spec.clip_norm is not None:
            clipping.clip_each_norm_(values, self.spec.clip_norm)
        elif self.spec.clip_global_norm is not None:
            clipping.clip_norm_(values, self.spec.clip_global_norm)
        return values

    def _for_torch(self, gradient: torch.Tensor | RowSparse, values: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, RowSparse) and not self.spec.takes_dense:
            return RowSparse(gradient.indices, values, gradient.shape).to_coo()._coalesced_(True)
        return values

    def state(self) -> OptimizerState:
        """A copy of all state, on the host."""
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, Any] = {}
        shapes = {json.dumps(key): list(weight.shape) for key, weight in self._weights.items()}
        for key, weight in self._weights.items():
            of_key = self._optimizer.state.get(weight, {}) if self._optimizer else {}
            for name, value in of_key.items():
                place = f"{json.dumps(key)}/{name}"
                if isinstance(value, torch.Tensor):
                    tensors[place] = value.detach().cpu().clone().contiguous()
                else:
                    plain[place] = value
        return OptimizerState(
            name=self.spec.name,
            initial_learning_rate=float(self.spec.arguments["lr"]),
            learning_rate=self._learning_rate,
            shapes=shapes,
            tensors=tensors,
            plain=plain,
        )

    def load_state(self, state: OptimizerState) -> None:
        """Replace all state by ``state``; the learning rate stays as it is set here.

        Raises:
            ValueError: it belongs to another optimizer, to a key unknown here, or to a tensor of another shape.
        """
        if state.name != self.spec.name:
            raise ValueError(f"the state is of optimizer {state.name!r}, but {self.spec.name!r} is set here")
        for encoded, shape in state.shapes.items():
            key = json.loads(encoded)
            if key not in self._weights:
                raise ValueError(f"the state has key {key!r}, which is unknown here; known are {list(self._weights)}")
            if shape != list(self._weights[key].shape):
                raise ValueError(
                    f"the state of key {key!r} is for shape {tuple(shape)}; expected {tuple(self._weights[key].shape)}"
                )
        of_keys: dict[Key, dict[str, Any]] = {key: {} for key in self._weights}
        for place, value in [*state.tensors.items(), *state.plain.items()]:
            encoded, _, name = place.rpartition("/")
            of_keys[json.loads(encoded)][name] = value
        for key, of_key in of_keys.items():
            self._restore(key, of_key)

    def _restore(self, key: Key, state: dict[str, Any]) -> None:
        assert self._optimizer is not None
        weight = self._weights[key]
        group = self._groups[self.spec.factors(key)]
        step_stays = not (group.get("capturable") or group.get("fused"))  # torch keeps the step on the host then
        restored = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                if name == "step":
                    value = value.to(value.device if step_stays else weight.device, copy=True)
                else:  # in the weight's precision, as torch loads it; what is one number for all elements in its own
                    elementwise = value.is_floating_point() and (value.dim() or not weight.dim())
                    dtype = weight.dtype if elementwise else value.dtype
                    value = value.to(weight.device, dtype, copy=True)
            restored[name] = value
        if restored:
            self._optimizer.state[weight] = restored
        else:
            self._optimizer.state.pop(weight, None)


@dataclass(eq=False)
class _Rows:
    """Some rows of a key's weight, with their state, as a tensor of their own while they are updated."""

    whole: torch.Tensor
    indices: torch.Tensor
    weight: torch.Tensor
    starts: dict[str, float]

    @classmethod
    def of(
        cls, whole: torch.Tensor, indices: torch.Tensor, optimizer: torch.optim.Optimizer, starts: dict[str, float]
    ) -> _Rows:
        rows = cls(whole, indices, whole.detach().index_select(0, indices), starts)
        if whole in optimizer.state:
            optimizer.state[rows.weight] = {
                name: value.index_select(0, indices) if name in starts else value
                for name, value in optimizer.state[whole].items()
            }
        return rows

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self.whole.index_copy_(0, self.indices, self.weight)
        state = optimizer.state.pop(self.weight, {})
        for name, value in state.items():
            if name not in self.starts:
                optimizer.state[self.whole][name] = value
                continue
            if name not in optimizer.state[self.whole]:
                optimizer.state[self.whole][name] = torch.full_like(self.whole, self.starts[name], requires_grad=False)
            optimizer.state[self.whole][name].index_copy_(0, self.indices, value)


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer remembers: tensors and plain values by ``<key as JSON>/<name>``, and its learning rate."""

    name: str
    initial_learning_rate: float
    learning_rate: float
    shapes: dict[str, list[int]]
    """The weights' shapes by key as JSON."""
    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]

    def header(self) -> dict[str, Any]:
        """All but the tensors, as JSON takes it."""
        return {
            "optimizer": self.name,
            "initial_learning_rate": self.initial_learning_rate,
            "learning_rate": self.learning_rate,
            "shapes": self.shapes,
            "plain": self.plain,
        }

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> OptimizerState:
        """The state that `header` and its tensors describe."""
        return cls(
            name=header["optimizer"],
            initial_learning_rate=header["initial_learning_rate"],
            learning_rate=header["learning_rate"],
            shapes=header["shapes"],
            tensors=tensors,
            plain=header["plain"],
        )
