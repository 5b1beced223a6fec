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
from gangline.kvstore.parameter_server.server.shards import Shard
from gangline.kvstore.parameter_server.sharding import ShardPlacement
from gangline.kvstore.sparse import RowSparse

_JOINED_BYTES = 1 << 20
"""Bytes of small tensors that share a data frame, so that a state of many keys does not need too many frames."""


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
        if math.prod(shape) % width:
            raise ProtocolError(f"shard {number} of {math.prod(shape)} elements has rows of {width}")
        return cls(number, dtype_named(dtype), tuple(shape), width, key, begin, is_whole)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack_spec(spec: OptimizerSpec) -> bytes:
    """Serialise an optimizer of torch.optim: servers import nothing by a name received over the network."""
    if not spec.is_known_class:
        raise ValueError(
            f"optimizer {spec.optimizer_class.__module__}.{spec.optimizer_class.__qualname__} is not of torch.optim, "
            "and servers run no others; expected one of torch.optim's, or an 'allreduce' store"
        )
    thresholds = {name: getattr(spec, name) for name in THRESHOLDS}
    arguments = {**spec.arguments, "rescale_grad": spec.rescale_grad, **thresholds}
    factors = [list(one.items()) if isinstance(one, Mapping) else one for one in (spec.lr_mult, spec.wd_mult)]
    return bytes(msgpack.packb([spec.name, arguments, *factors]))


def pack_group(number: int, keys: Sequence[Key] | None, spec: OptimizerSpec) -> bytes:
    """Serialise the optimizer of a group of keys, as `OptimizerGroup`."""
    return bytes(msgpack.packb([number, keys, pack_spec(spec)]))


def read_spec(payload: bytes) -> OptimizerSpec:
    """Read the result of `pack_spec`; ValueError or TypeError if it is not a valid optimizer."""
    name, arguments, lr_mult, wd_mult = msgpack.unpackb(payload)
    ours = {"lr_mult": lr_mult, "wd_mult": wd_mult}
    factors = {argument: value if isinstance(value, str) else dict(value) for argument, value in ours.items() if value}
    return OptimizerSpec.parse((name, {**arguments, **factors}))


class ShardOptimizers:
    """Optimizer of a group of a server's shards: one instance per thread, so that threads need no locks."""

    def __init__(self, spec: OptimizerSpec, threads: int, number: int = 0) -> None:
        self.number = number
        """Number of the group."""
        self.rates: dict[int, float] = {}
        """Async mode: learning rates that workers have set, by rank; the lowest rank outside join() counts."""
        self._spec = spec
        own = [replace(spec, clip_global_norm=None, lr_mult={}, wd_mult={}) for _ in range(threads)]
        self._of_threads = [KeyedOptimizer(one) for one in own]
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
        if learning_rate is not None and learning_rate != optimizer.learning_rate:
            optimizer.learning_rate = learning_rate
        weight = shard.weight
        if isinstance(gradient, RowSparse):
            rows = gradient.values.to(weight.dtype).view(-1, *weight.shape[1:])
            optimizer.update([(shard.number, RowSparse(gradient.indices, rows, weight.shape))])
        else:
            optimizer.update([(shard.number, gradient.view(weight.shape))])

    def state_of(self, shard: Shard) -> dict[str, Any]:
        """Return the state of a shard, which updates change: tensors and plain values by name."""
        return self._optimizer_of(shard).state_of(shard.number)

    def restore(self, shard: Shard, state: Mapping[str, Any]) -> None:
        """Set the state of a shard; tensors are not copied."""
        self.state_of(shard).update(state)

    def learning_rate_of(self, shard: Shard) -> float:
        """Return the learning rate of a shard's last update, before lr_mult."""
        return self._of_threads[shard.thread].learning_rate

    def set_learning_rate(self, thread: int, learning_rate: float) -> None:
        """Set the learning rate of the shards of a thread, as of their last update."""
        self._of_threads[thread].learning_rate = learning_rate

    def state(self, shards: Iterable[Shard]) -> tuple[bytes, list[Tensor]]:
        """Return the state of all shards: description and tensors."""
        for shard in shards:
            self._optimizer_of(shard)
        state = OptimizerState.merged([optimizer.state() for optimizer in self._of_threads])
        described = [[name, name_of_dtype(tensor.dtype), list(tensor.shape)] for name, tensor in state.tensors.items()]
        header = [self._spec.name, state.initial_learning_rate, state.learning_rate, state.plain, described]
        return bytes(msgpack.packb(header)), _joined(state.tensors.values())

    def load_state(self, payload: bytes, datas: Sequence[Tensor], shards: Mapping[int, Shard]) -> None:
        """Replace the state by a result of `split_state`; ValueError if it does not fit."""
        _, name, plain, described = msgpack.unpackb(payload)
        state = OptimizerState(name, 0.0, 0.0, {}, dict(_tensors(described, datas)), plain)
        for shard in shards.values():
            self._optimizer_of(shard)
        for thread, optimizer in enumerate(self._of_threads):
            mine = {shard.number: list(shard.weight.shape) for shard in shards.values() if shard.thread == thread}
            if mine:
                shapes = {json.dumps(number): shape for number, shape in mine.items()}
                optimizer.load_state(replace(state.of_keys(mine.__contains__), shapes=shapes))

    def _optimizer_of(self, shard: Shard) -> KeyedOptimizer:
        optimizer = self._of_threads[shard.thread]
        lr_mult, wd_mult = self._spec.factors(shard.key)
        optimizer.spec.lr_mult[shard.number] = lr_mult
        if not isinstance(optimizer.spec.wd_mult, str):
            optimizer.spec.wd_mult[shard.number] = wd_mult
        optimizer.add(shard.number, shard.weight)
        return optimizer


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
        new.rates = {0: float(spec.arguments["lr"])}
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
    results: Sequence[tuple[bytes, list[Tensor]]],
) -> OptimizerState:
    """Return the state of whole keys from the servers' results of `ShardOptimizers.state`."""
    of_shards: dict[int, dict[str, Any]] = {}
    for payload, datas in results:
        _, _, _, plain, described = msgpack.unpackb(payload)
        for path, value in [*plain.items(), *_tensors(described, datas)]:
            number, _, name = path.rpartition("/")
            of_shards.setdefault(int(number), {})[name] = value
    state = OptimizerState(spec.name, float(spec.arguments["lr"]), learning_rate, {}, {}, {})
    for key, of_key in shards.items():
        encoded, first = json.dumps(key), of_key[0]
        state.shapes[encoded] = list(first.layout.shape)
        for name, value in of_shards.get(first.number, {}).items():
            path = f"{encoded}/{name}"
            if not isinstance(value, Tensor):
                state.plain[path] = value
            elif value.dim() and value.numel() == first.numel and not first.is_whole:
                flats = [of_shards[shard.number][name].view(-1) for shard in of_key]
                state.tensors[path] = torch.cat(flats).view(first.layout.shape)
            else:
                state.tensors[path] = value.clone()
    return state


def split_state(
    group: OptimizerGroup, state: OptimizerState, shards: Mapping[Key, Sequence[ShardPlacement]], servers: int
) -> list[tuple[bytes, list[Tensor]]]:
    """Return payload and tensors of the "load" command for each server, from a state of a group's whole keys."""
    name = group.spec.name
    state.check(name, {key: of_key[0].layout.shape for key, of_key in shards.items()})
    plain: list[dict[str, Any]] = [{} for _ in range(servers)]
    described: list[list[Any]] = [[] for _ in range(servers)]
    datas: list[list[Tensor]] = [[] for _ in range(servers)]
    for path, value in [*state.plain.items(), *state.tensors.items()]:
        encoded, _, entry = path.rpartition("/")
        for shard in shards[json.loads(encoded)]:
            own = f"{shard.number}/{entry}"
            if not isinstance(value, Tensor):
                plain[shard.server][own] = value
                continue
            one = value.contiguous()
            if not shard.is_whole and one.dim() and one.numel() == shard.layout.numel:
                one = one.view(-1)[shard.begin : shard.begin + shard.numel].view(-1, shard.width)
            described[shard.server].append([own, name_of_dtype(one.dtype), list(one.shape)])
            datas[shard.server].append(one)
    return [
        (bytes(msgpack.packb([group.number, name, plain[server], described[server]])), _joined(datas[server]))
        for server in range(servers)
    ]


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
