"""Optimizers of a server's shards, and the formats of shard definitions, optimizers and optimizer state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import torch
from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.compression.codec import typed
from gangline.kvstore.group.serialization import bytes_of, dtype_named, name_of_dtype
from gangline.kvstore.optimizer.clipping import THRESHOLDS, norm, scale_
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.parameter_server.protocol import MAX_SHARD
from gangline.kvstore.parameter_server.server.shards import Shard
from gangline.kvstore.parameter_server.sharding import ShardPlacement
from gangline.kvstore.sparse import RowSparse

_JOINED_BYTES = 1 << 20
"""Bytes of small tensors that share a data frame, so that a state of many keys does not need too many frames."""
_PART_BYTES = 64 << 20
"""Bytes of optimizer state that share a message: both ends need memory for a copy of it."""
_PART_SHARDS = 1 << 14


@dataclass(frozen=True)
class Definition:
    """A shard as rank 0 defines it."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    width: int
    key: Key
    begin: int
    is_whole: bool

    @classmethod
    def read(cls, packed: Sequence[Any]) -> Definition:
        """Read an item of `protocol.Define` of checked types; ProtocolError if key or rows are not valid."""
        number, dtype, shape, width, key, begin, is_whole = packed
        try:
            key = msgpack.unpackb(key)
        except (ValueError, msgpack.UnpackException):
            key = None
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise ProtocolError(f"shard {number} has a key that is neither a str nor an int")
        if (elements := math.prod(shape)) % width or elements > MAX_SHARD:
            raise ProtocolError(f"shard {number} of {elements} elements has rows of {width}; at most {MAX_SHARD} fit")
        return cls(number, dtype_named(dtype), tuple(shape), width, key, begin, is_whole)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack_group(number: int, keys: Sequence[Key] | None, spec: OptimizerSpec) -> bytes:
    """Serialise the optimizer, of torch.optim, of a group: servers import nothing by a name from the network."""
    parts = spec.parts or (spec,)
    if unknown := [one.optimizer_class for one in parts if not one.is_known_class]:
        raise ValueError(
            f"optimizer {unknown[0].__module__}.{unknown[0].__qualname__} is not of torch.optim, and servers run no "
            "others; expected one of torch.optim's, or an 'allreduce' store"
        )
    shared = {name: getattr(spec, name) for name in ("rescale_grad", *THRESHOLDS)}
    factors = [list(one.items()) if isinstance(one, Mapping) else one for one in (spec.lr_mult, spec.wd_mult)]
    packed = msgpack.packb([[(one.pattern, one.name, one.arguments) for one in parts], shared, *factors])
    return bytes(msgpack.packb([number, keys, packed]))


def read_spec(payload: bytes) -> OptimizerSpec:
    """Read the optimizer in the result of `pack_group`; ValueError or TypeError if it is not a valid optimizer."""
    parts, shared, lr_mult, wd_mult = msgpack.unpackb(payload)
    ours = {"lr_mult": lr_mult, "wd_mult": wd_mult}
    factors = {argument: value if isinstance(value, str) else dict(value) for argument, value in ours.items() if value}
    optimizers = {tuple(one) if isinstance(one, list) else one: (name, given) for one, name, given in parts}
    return OptimizerSpec.parse((optimizers, {**shared, **factors}))


class ShardOptimizers:
    """Optimizer of a group of a server's shards: one instance per thread, so that threads need no locks."""

    def __init__(self, spec: OptimizerSpec, threads: int, number: int = 0) -> None:
        self.number = number
        """Number of the group."""
        self.rates: dict[int, float] = {}
        """Async mode: learning rates that workers have set, by rank; the lowest rank outside join() counts."""
        self._spec = spec
        self._of_threads = [KeyedOptimizer(replace(spec, clip_global_norm=None)) for _ in range(threads)]
        self._last_rates: dict[int, float] = {}  # learning rate of the last update of each shard that had one
        self._kept: dict[int, tuple[Shard, Tensor | RowSparse, float]] = {}  # shard number -> shard, sum, L2 norm

    @property
    def name(self) -> str:
        """Name of the optimizer."""
        return self._spec.name

    @property
    def keeps_sums(self) -> bool:
        """True if sums are kept for `update_kept`, as clip_global_norm needs it."""
        return self._spec.clip_global_norm is not None

    def apply(self, shard: Shard, total: Tensor | RowSparse, learning_rate: float | None) -> None:
        """Update a shard by the sum of a round; with ``clip_global_norm``, keep the sum for `update_kept`."""
        if not self.keeps_sums:
            self._update(shard, total, learning_rate)
            return
        self._optimizer_of(shard).check_kinds([(shard.number, [total])])
        self.keep_sum(shard, total)

    def keep_sum(self, shard: Shard, total: Tensor | RowSparse) -> None:
        """Keep a sum for `update_kept`."""
        self._kept[shard.number] = shard, total, float(norm([_elements(total)]))

    def sum_of(self, shard: Shard) -> Tensor | RowSparse | None:
        """Return the kept sum of a shard; None if there is none."""
        return self._kept[shard.number][1] if shard.number in self._kept else None

    def norms(self) -> list[float]:
        """Return the L2 norms of the kept sums in order of shard numbers."""
        return [self._kept[number][2] for number in sorted(self._kept)]

    @property
    def kept(self) -> list[Shard]:
        """Shards whose sums are kept."""
        return [shard for shard, _, _ in list(self._kept.values())]

    def update_kept(self, shard: Shard, factor: float, learning_rate: float | None) -> None:
        """Update a shard by its kept sum times a factor; runs in the shard's thread."""
        _, total, _ = self._kept.pop(shard.number)
        scale_([_elements(total)], torch.tensor(factor, dtype=torch.float64, device="cpu"))
        self._update(shard, total, learning_rate)

    def drop_kept(self) -> None:
        """Drop the kept sums."""
        self._kept.clear()

    def _update(self, shard: Shard, gradient: Tensor | RowSparse, learning_rate: float | None) -> None:
        optimizer = self._optimizer_of(shard)
        if learning_rate is not None:
            self._last_rates[shard.number] = learning_rate
        if (rate := self.learning_rate_of(shard)) != optimizer.learning_rate:
            optimizer.set_learning_rate(rate)
        weight = shard.weight
        if isinstance(gradient, RowSparse):
            rows = gradient.values.to(weight.dtype).view(len(gradient.indices), *weight.shape[1:])
            optimizer.update([(shard.number, RowSparse(gradient.indices, rows, weight.shape))])
        else:
            optimizer.update([(shard.number, gradient.view(weight.shape))])

    def state_of(self, shard: Shard) -> dict[str, Any]:
        """Return the state of a shard, which updates change: tensors and plain values by name."""
        return self._optimizer_of(shard).state_of(shard.number)

    def restore(self, shard: Shard, state: Mapping[str, Any], learning_rate: float) -> None:
        """Set the state of a shard, whose tensors are not copied, and the learning rate of its last update."""
        self.state_of(shard).update(state)
        self._last_rates[shard.number] = learning_rate

    def replace_state(self, shard: Shard, state: dict[str, Any]) -> None:
        """Replace the state of a shard, in its thread; tensors are not copied."""
        self._optimizer_of(shard).restore(shard.number, state, copy=False)

    def state_bytes(self, shard: Shard) -> int:
        """Return the bytes of the tensors of a shard's state."""
        return sum(value.nbytes for value in self.state_of(shard).values() if isinstance(value, Tensor))

    def learning_rate_of(self, shard: Shard) -> float:
        """Return the learning rate of a shard's last update, before lr_mult."""
        return self._last_rates.get(shard.number, self._spec.rate)

    def state(self, shards: Sequence[Shard]) -> tuple[bytes, list[Tensor]]:
        """Return the state of the first of these shards, as many as fit a message and at least one: see `StatePart`."""
        part = StatePart()
        for shard in shards:
            state = self.state_of(shard)
            if not part.takes(shard.number, shard.key, state):
                break
        return part.packed()

    def load_state(self, payload: bytes, datas: Sequence[Tensor], shards: Mapping[int, Shard]) -> list[Shard]:
        """Replace the state of some shards, which are returned; ValueError if it does not fit."""
        _, name, part = msgpack.unpackb(payload)
        if name != self.name:
            raise ValueError(f"the state is of optimizer {name!r}, but {self.name!r} is set here")
        numbers, plain, tensors = unpack_part(part, datas)
        states: dict[int, dict[str, Any]] = {number: {} for number in numbers}
        for place, value in [*plain.items(), *tensors.items()]:
            number, _, entry = place.rpartition("/")
            states[int(number)][entry] = value
        for one, state in states.items():
            self._optimizer_of(shards[one]).restore(one, state)
        return [shards[one] for one in states]

    def _optimizer_of(self, shard: Shard) -> KeyedOptimizer:
        optimizer = self._of_threads[shard.thread]
        optimizer.add(shard.number, shard.weight, shard.key)
        return optimizer


class StatePart:
    """Optimizer state of some shards of a server, of which a message holds one part."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._plain: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._nbytes = 0

    def takes(self, number: int, key: Key, state: Mapping[str, Any]) -> bool:
        """Add the state of a shard, tensors and plain values by name; False, without effect, if there is no room."""
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes > MAX_SHARD:
            raise ValueError(
                f"the optimizer state of key {key!r} has {nbytes} bytes in one shard; a message holds {MAX_SHARD}: use "
                "an elementwise optimizer, whose keys are split, or an 'allreduce' store"
            )
        if self._numbers and (self._nbytes + nbytes > _PART_BYTES or len(self._numbers) >= _PART_SHARDS):
            return False
        self._numbers.append(number)
        self._nbytes += nbytes
        for name, value in state.items():
            if name in tensors:
                self._tensors[f"{number}/{name}"] = value.detach().cpu().contiguous()
            else:
                self._plain[f"{number}/{name}"] = value
        return True

    def packed(self) -> tuple[bytes, list[Tensor]]:
        """Return description and tensors; the tensors may share memory with those that were added."""
        described = [[path, name_of_dtype(one.dtype), list(one.shape)] for path, one in self._tensors.items()]
        return bytes(msgpack.packb([self._numbers, self._plain, described])), _joined(self._tensors.values())


def unpack_part(payload: bytes, datas: Iterable[Tensor]) -> tuple[list[int], dict[str, Any], dict[str, Tensor]]:
    """Return shards, plain values and tensors, by "shard/name", of the result of `StatePart.packed`."""
    numbers, plain, described = msgpack.unpackb(payload)
    return numbers, plain, dict(_tensors(described, datas))


class Optimizers:
    """The optimizers of a server, by the number of their group; 0: of all shards outside of the other groups."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.all: dict[int, ShardOptimizers] = {}
        self._numbers: dict[Key, int] = {}

    def set(self, payload: bytes) -> int:
        """Set the optimizer that `pack_group` has serialised, in place of the group's former one; return its number."""
        number, keys, packed = msgpack.unpackb(payload)
        spec = read_spec(packed)
        new = ShardOptimizers(spec, self._threads, int(number))
        new.rates = {0: spec.rate}
        others = {key: group for key, group in self._numbers.items() if group != number}
        self._numbers = others | dict.fromkeys(keys or (), new.number)
        self.all[new.number] = new
        return new.number

    def of(self, shard: Shard) -> ShardOptimizers | None:
        """Return the optimizer of a shard; None if it has none."""
        return self.all.get(self._numbers.get(shard.key, 0))

    def numbered(self, number: int) -> ShardOptimizers:
        """Return the optimizer of a group; RuntimeError if there is none."""
        if number not in self.all:
            raise RuntimeError(f"there is no optimizer{f' of group {number}' if number else ''}")
        return self.all[number]

    def shards_of(self, number: int, shards: Mapping[int, Shard]) -> dict[int, Shard]:
        """Return the shards of a group."""
        own = self.numbered(number)
        return {one: shard for one, shard in shards.items() if self.of(shard) is own}


def merge_states(
    spec: OptimizerSpec,
    learning_rate: float,
    shards: Mapping[Key, Sequence[ShardPlacement]],
    parts: Iterable[tuple[bytes, list[Tensor]]],
) -> OptimizerState:
    """Return the state of whole keys from all servers' results of `ShardOptimizers.state`, which are not kept.

    Elements of a shard without state are 0, as of one whose rows were never pushed.
    """
    placements = {shard.number: shard for of_key in shards.values() for shard in of_key}
    shapes = {json.dumps(key): list(of_key[0].layout.shape) for key, of_key in shards.items()}
    state = OptimizerState(spec.name, spec.rate, learning_rate, shapes, {}, {}, spec.names(shards))
    for payload, datas in parts:
        _, plain, tensors = unpack_part(payload, datas)
        for path, value in [*plain.items(), *tensors.items()]:
            number, _, name = path.rpartition("/")
            shard = placements[int(number)]
            place = f"{json.dumps(shard.layout.key)}/{name}"
            if isinstance(value, Tensor) and value.dim() and value.numel() == shard.numel and not shard.is_whole:
                if place not in state.tensors:
                    state.tensors[place] = torch.zeros(shard.layout.shape, dtype=value.dtype, device="cpu")
                state.tensors[place].view(-1)[shard.begin : shard.begin + shard.numel] = value.view(-1)
            elif isinstance(value, Tensor):
                if shard.begin == 0 or place not in state.tensors:
                    state.tensors[place] = value.clone()
            elif shard.begin == 0 or place not in state.plain:
                state.plain[place] = value
    return state


def split_state(
    group: OptimizerGroup, state: OptimizerState, shards: Mapping[Key, Sequence[ShardPlacement]]
) -> Iterator[dict[int, tuple[bytes, list[Tensor]]]]:
    """Yield payload and tensors of "load" commands, by server, from a state of a group's whole keys."""
    name = group.spec.name
    state.check(group.spec, {key: of_key[0].layout.shape for key, of_key in shards.items()})
    of_keys: dict[Key, dict[str, Any]] = {key: {} for key in shards}
    for path, value in [*state.plain.items(), *state.tensors.items()]:
        encoded, _, entry = path.rpartition("/")
        of_keys[json.loads(encoded)][entry] = value
    parts: dict[int, list[StatePart]] = {}
    for key, of_key in shards.items():
        for shard in of_key:
            of_server = parts.setdefault(shard.server, [StatePart()])
            of_shard = {entry: _part_of(shard, value) for entry, value in of_keys[key].items()}
            if not of_server[-1].takes(shard.number, key, of_shard):
                of_server.append(StatePart())
                of_server[-1].takes(shard.number, key, of_shard)
    while parts:
        packed = {server: of_server.pop(0).packed() for server, of_server in parts.items()}
        yield {
            server: (bytes(msgpack.packb([group.number, name, part])), datas)
            for server, (part, datas) in packed.items()
        }
        parts = {server: of_server for server, of_server in parts.items() if of_server}


def _part_of(shard: ShardPlacement, value: Any) -> Any:
    """Return the elements of a shard in a state tensor of its key's shape; other values unchanged."""
    if not isinstance(value, Tensor) or shard.is_whole or not value.dim() or value.numel() != shard.layout.numel:
        return value
    return value.contiguous().view(-1)[shard.begin : shard.begin + shard.numel].view(-1, shard.width)


def _joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the bytes of tensors, where neighbours share a tensor of at most `_JOINED_BYTES`: each becomes a frame."""
    groups: list[list[Tensor]] = []
    filled = 0
    for tensor in tensors:
        if not groups or filled + tensor.nbytes > _JOINED_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(bytes_of(tensor.contiguous()))
        filled += tensor.nbytes
    return [torch.cat(group) if len(group) > 1 else group[0] for group in groups]


def _tensors(
    described: Sequence[tuple[str, str, Sequence[int]]], datas: Iterable[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each ``[name, dtype, shape]`` from what `_joined` returned; ValueError if bytes lack."""
    following = iter(datas)
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    for path, name, shape in described:
        dtype = dtype_named(name)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > data.nbytes:
            data = next(following, data)
        if nbytes > data.nbytes:
            raise ValueError(f"the optimizer state of {path!r} has {data.nbytes} bytes; expected {nbytes}")
        yield path, typed(data[:nbytes], dtype).view(shape)
        data = data[nbytes:]


def _elements(value: Tensor | RowSparse) -> Tensor:
    return value.values if isinstance(value, RowSparse) else value
