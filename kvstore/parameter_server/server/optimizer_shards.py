"""What a server is told of its parts and their optimizer, and what it tells of the optimizer's state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import torch
from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.optimizer.clipping import THRESHOLDS, norm, scale_
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.parameter_server import sharding
from gangline.kvstore.parameter_server.server.shards import Shard
from gangline.kvstore.parameter_server.transport.shared_memory import typed
from gangline.kvstore.sparse import RowSparse


@dataclass(frozen=True)
class Definition:
    """A part as rank 0 defines it."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    width: int
    key: Key
    begin: int
    is_whole: bool

    @classmethod
    def read(cls, packed: Sequence[Any]) -> Definition:
        """From a message's entry, whose types are checked.

        Raises:
            ProtocolError: the key is none, or rows do not fit the shape.
        """
        number, dtype, shape, width, key, begin, is_whole = packed
        try:
            key = msgpack.unpackb(key)
        except (ValueError, msgpack.UnpackException):
            key = None
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise ProtocolError(f"part {number} has a key that is neither a str nor an int")
        if math.prod(shape) % width:
            raise ProtocolError(f"part {number} of {math.prod(shape)} elements has rows of {width}")
        return cls(number, getattr(torch, dtype), tuple(shape), width, key, begin, is_whole)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack_spec(spec: OptimizerSpec) -> bytes:
    """An optimizer as plain data.

    Raises:
        ValueError: its class is not torch's own: servers import nothing by a name that comes over the network.
    """
    if not spec.is_known_class:
        raise ValueError(
            f"optimizer {spec.optimizer_class.__module__}.{spec.optimizer_class.__qualname__} is not of torch.optim, "
            "and servers run no others; expected one of torch.optim's, or an 'allreduce' store"
        )
    thresholds = {name: getattr(spec, name) for name in THRESHOLDS}
    given = {**spec.arguments, "rescale_grad": spec.rescale_grad, **thresholds}
    factors = [list(one.items()) if isinstance(one, Mapping) else one for one in (spec.lr_mult, spec.wd_mult)]
    return bytes(msgpack.packb([spec.name, given, *factors]))


def read_spec(payload: bytes) -> OptimizerSpec:
    """The optimizer of `pack_spec`'s bytes.

    Raises:
        ValueError, TypeError: it is none.
    """
    name, given, lr_mult, wd_mult = msgpack.unpackb(payload)
    ours = {"lr_mult": lr_mult, "wd_mult": wd_mult}
    factors = {argument: value if isinstance(value, str) else dict(value) for argument, value in ours.items() if value}
    return OptimizerSpec.parse((name, {**given, **factors}))


class ShardOptimizers:
    """The optimizer of a server's parts: one a lane, so that lanes need not wait for each other."""

    def __init__(self, spec: OptimizerSpec, lanes: int) -> None:
        self._spec = spec
        own = [replace(spec, clip_global_norm=None, lr_mult={}, wd_mult={}) for _ in range(lanes)]
        self._of_lanes = [KeyedOptimizer(one) for one in own]
        self._held: dict[int, tuple[Shard, Tensor | RowSparse, float]] = {}  # by number; the last is the norm

    @classmethod
    def read(cls, payload: bytes, lanes: int) -> ShardOptimizers:
        """From `pack_spec`'s bytes."""
        return cls(read_spec(payload), lanes)

    @property
    def keeps_sums(self) -> bool:
        """Whether sums wait for `update_held`."""
        return self._spec.clip_global_norm is not None

    def take_sum(self, part: Shard, total: Tensor | RowSparse, learning_rate: float | None) -> None:
        """Update a part by the sum of its round; under ``clip_global_norm`` keep the sum for `update_held`.

        Raises:
            ValueError: the optimizer does not take such a gradient, or such a part.
        """
        if not self.keeps_sums:
            self._update(part, total, learning_rate)
            return
        self._of(part).check_kind(part.number, rows=isinstance(total, RowSparse))
        self._held[part.number] = part, total, float(norm([_elements(total)]))

    def norms(self) -> list[float]:
        """Of the sums that are kept, by the parts' numbers."""
        return [self._held[number][2] for number in sorted(self._held)]

    @property
    def held(self) -> list[Shard]:
        """The parts whose sums are kept."""
        return [part for part, _, _ in list(self._held.values())]

    def update_held(self, part: Shard, factor: float, learning_rate: float) -> None:
        """Update a part by the sum that was kept, times the factor; in its lane."""
        _, total, _ = self._held.pop(part.number)
        scale_([_elements(total)], torch.tensor(factor, dtype=torch.float64))
        self._update(part, total, learning_rate)

    def drop_held(self) -> None:
        """Forget the sums that are kept."""
        self._held.clear()

    def _update(self, part: Shard, gradient: Tensor | RowSparse, learning_rate: float | None) -> None:
        optimizer = self._of(part)
        if learning_rate is not None and learning_rate != optimizer.learning_rate:
            optimizer.learning_rate = learning_rate
        weight = part.weight
        if isinstance(gradient, RowSparse):
            rows = gradient.values.to(weight.dtype).view(-1, *weight.shape[1:])
            optimizer.update([(part.number, RowSparse(gradient.indices, rows, weight.shape))])
        else:
            optimizer.update([(part.number, gradient.view(weight.shape))])

    def give(self, parts: Iterable[Shard]) -> tuple[bytes, list[Tensor]]:
        """The state of all parts: what describes it, and the tensors."""
        for part in parts:
            self._of(part)
        states = [optimizer.state() for optimizer in self._of_lanes]
        tensors = {place: tensor for state in states for place, tensor in state.tensors.items()}
        plain = {place: value for state in states for place, value in state.plain.items()}
        described = [[place, _name(tensor.dtype), list(tensor.shape)] for place, tensor in tensors.items()]
        header = [self._spec.name, states[0].initial_learning_rate, self._of_lanes[0].learning_rate, plain, described]
        return bytes(msgpack.packb(header)), [tensor.contiguous() for tensor in tensors.values()]

    def take(self, payload: bytes, datas: Sequence[Tensor], parts: Mapping[int, Shard]) -> None:
        """Replace the state by what `pack_state` made.

        Raises:
            ValueError: it is of another optimizer, or does not fit.
        """
        name, plain, described = msgpack.unpackb(payload)
        tensors = {
            place: typed(data, getattr(torch, dtype)).view(shape).clone()
            for (place, dtype, shape), data in zip(described, datas, strict=True)
        }
        for part in parts.values():
            self._of(part)
        for lane, optimizer in enumerate(self._of_lanes):
            mine = {json.dumps(part.number): part.weight for part in parts.values() if part.lane == lane}
            if not mine:
                continue
            optimizer.load_state(
                OptimizerState(
                    name=name,
                    initial_learning_rate=optimizer.learning_rate,
                    learning_rate=optimizer.learning_rate,
                    shapes={number: list(weight.shape) for number, weight in mine.items()},
                    tensors={place: value for place, value in tensors.items() if place.rpartition("/")[0] in mine},
                    plain={place: value for place, value in plain.items() if place.rpartition("/")[0] in mine},
                )
            )

    def _of(self, part: Shard) -> KeyedOptimizer:
        optimizer = self._of_lanes[part.lane]
        rate, decay = self._spec.factors(part.key)
        optimizer.spec.lr_mult[part.number] = rate
        if not isinstance(optimizer.spec.wd_mult, str):
            optimizer.spec.wd_mult[part.number] = decay
        optimizer.add(part.number, part.weight)
        return optimizer


def joined(
    spec: OptimizerSpec,
    learning_rate: float,
    parts: Mapping[Key, Sequence[sharding.ShardPlacement]],
    answers: Sequence[tuple[bytes, list[Tensor]]],
) -> OptimizerState:
    """The state of whole keys, from what servers gave of their parts."""
    tensors: dict[int, dict[str, Tensor]] = {}
    plain: dict[int, dict[str, Any]] = {}
    for payload, datas in answers:
        _, _, _, of_parts, described = msgpack.unpackb(payload)
        for place, value in of_parts.items():
            number, _, name = place.rpartition("/")
            plain.setdefault(int(number), {})[name] = value
        for (place, dtype, shape), data in zip(described, datas, strict=True):
            number, _, name = place.rpartition("/")
            tensors.setdefault(int(number), {})[name] = typed(data, getattr(torch, dtype)).view(shape)
    state = OptimizerState(spec.name, float(spec.arguments["lr"]), learning_rate, {}, {}, {})
    for key, of_key in parts.items():
        encoded, first = json.dumps(key), of_key[0]
        state.shapes[encoded] = list(first.layout.shape)
        for name, value in plain.get(first.number, {}).items():
            state.plain[f"{encoded}/{name}"] = value
        for name, one in tensors.get(first.number, {}).items():
            if one.dim() and one.numel() == first.numel and not first.is_whole:
                pieces = [tensors[part.number][name].view(-1) for part in of_key]
                state.tensors[f"{encoded}/{name}"] = torch.cat(pieces).view(first.layout.shape)
            else:
                state.tensors[f"{encoded}/{name}"] = one.clone()
    return state


def split(
    spec: OptimizerSpec, state: OptimizerState, parts: Mapping[Key, Sequence[sharding.ShardPlacement]], servers: int
) -> list[tuple[bytes, list[Tensor]]]:
    """What each server is told of a state of whole keys.

    Raises:
        ValueError: it is of another optimizer, of a key unknown here, or of a tensor of another shape.
    """
    if state.name != spec.name:
        raise ValueError(f"the state is of optimizer {state.name!r}, but {spec.name!r} is set here")
    for encoded, shape in state.shapes.items():
        key = json.loads(encoded)
        if key not in parts:
            raise ValueError(f"the state has key {key!r}, which is unknown here; known are {list(parts)}")
        if tuple(shape) != parts[key][0].layout.shape:
            expected = parts[key][0].layout.shape
            raise ValueError(f"the state of key {key!r} is for shape {tuple(shape)}; expected {expected}")
    plain: list[dict[str, Any]] = [{} for _ in range(servers)]
    described: list[list[Any]] = [[] for _ in range(servers)]
    datas: list[list[Tensor]] = [[] for _ in range(servers)]
    for place, value in [*state.plain.items(), *state.tensors.items()]:
        encoded, _, name = place.rpartition("/")
        for part in parts[json.loads(encoded)]:
            own = f"{part.number}/{name}"
            if not isinstance(value, Tensor):
                plain[part.server][own] = value
                continue
            one = value.contiguous()
            if not part.is_whole and one.dim() and one.numel() == part.layout.numel:
                one = one.view(-1)[part.begin : part.begin + part.numel].view(-1, part.width)
            described[part.server].append([own, _name(one.dtype), list(one.shape)])
            datas[part.server].append(one)
    return [
        (bytes(msgpack.packb([spec.name, plain[server], described[server]])), datas[server])
        for server in range(servers)
    ]


def _elements(value: Tensor | RowSparse) -> Tensor:
    return value.values if isinstance(value, RowSparse) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
