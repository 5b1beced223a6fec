"""Argument checks of the stores' calls; every accepted form becomes a list of (key, values)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, eq
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from gangline.kvstore.buckets import Bucket, BucketValues
from gangline.kvstore.numpy_arrays import readable, shared
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.sparse import RowSparse

_V = TypeVar("_V")
_Parsed = TypeVar("_Parsed", bound=Sequence[Any])
_shape_and_dtype, _layout, _device = attrgetter("shape", "dtype"), attrgetter("layout"), attrgetter("device")
Value = torch.Tensor | RowSparse
Pairs = Sequence[tuple[Key, list[torch.Tensor]]]
"""Keys with their tensors, one tensor per device."""
Pushed = Sequence[tuple[Key, list[Value]]]
"""Keys with their values to push, one value per device; no values for a key that this worker leaves out."""
Layout = Mapping[Key, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each key."""
RowPulls = list[tuple[Key, list[tuple[Value, torch.Tensor]]]]
"""Keys with (output, row numbers)."""


class ByPosition(Sequence[tuple[Key, list[torch.Tensor]]]):
    """Keys with equal numbers of dense tensors, stored by position: the first tensor of every key, the second, ..."""

    def __init__(self, keys: list[Key], tensors: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self.key_list = keys  # not ``keys``, which dict() would call
        self.tensors = tensors
        """One tuple per position, with one tensor per key; the tensors may require grad."""

    def __len__(self) -> int:
        return len(self.key_list)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def __iter__(self) -> Iterator[tuple[Key, list[torch.Tensor]]]:
        for key, *tensors in zip(self.key_list, *self.tensors, strict=True):
            yield key, [_without_grad(tensor) for tensor in tensors]


def keys_of(pairs: Sequence[tuple[Key, Any]]) -> list[Key]:
    """Return the keys of pairs."""
    return pairs.key_list if type(pairs) is ByPosition else [key for key, _ in pairs]


def single(key: Any, value: Any) -> Pushed:
    """Return keys with exactly one value each; as in MXNet, a single key's tensor may be in a list."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and not isinstance(key, (list, tuple)):
        value = value[0]
    return [(_checked_key(one), [_value(one, tensor)]) for one, tensor in _zipped(key, value)]


def dense(pairs: Pushed) -> Pairs:
    """Return the same keys with dense values."""
    return [(key, [one.to_dense() if isinstance(one, RowSparse) else one for one in values]) for key, values in pairs]


def pushed(key: Any, value: Any) -> Pushed:
    """Return keys with their values to push, one value per device."""
    return [(one, [_value(one, tensor) for tensor in many]) for one, many in _grouped(key, value)]


def pushed_or_none(key: Any, value: Any) -> Pushed:
    """Return keys with their values to push, one value per device; an empty list for a key whose value is None."""
    pairs = _zipped(key, value)
    return [(_checked_key(one), []) if of_one is None else pushed(one, of_one)[0] for one, of_one in pairs]


def outs(key: Any, out: Any) -> Pairs:
    """Return keys with their output tensors, one per device."""
    return [(one, [_writable(one, tensor) for tensor in many]) for one, many in _grouped(key, out)]


def by_position(key: Any, value: Any, layout: Layout, *, written: bool) -> ByPosition | None:
    """Return a list of keys with equal numbers of tensors, if all are dense and match the layout; None otherwise.

    It does what `pushed`, `outs` and `check_like` do, for many keys in a fraction of their time: no Python code runs
    for each tensor. Tensors that are ``written`` must be contiguous, so that none is expanded.
    """
    if type(key) is not list or type(value) is not list or len(key) != len(value) or {*map(type, key)} - {str, int}:
        return None
    tensors = [(*value,)]
    if {*map(type, value)} == {list} and len({*map(len, value)}) == 1:
        tensors = [*zip(*value, strict=True)]
    expected = [*map(layout.get, key)]
    for of_position in tensors:
        if {*map(type, of_position)} != {torch.Tensor} or {*map(_layout, of_position)} != {torch.strided}:
            return None
        if not all(map(eq, map(_shape_and_dtype, of_position), expected)):
            return None
        if written and not all(map(torch.Tensor.is_contiguous, of_position)):
            return None
    return ByPosition([*key], tensors) if tensors else None


def checked(parse: Callable[[Any, Any], _Parsed], key: Any, value: Any, layout: Layout) -> _Parsed:
    """Return keys with their values by `pushed` or `outs`, after all checks."""
    if type(key) is str or type(key) is int:  # what `parse` and `check_pairs` do, without a call for each tensor
        tensors: Any = [*value] if type(value) is list or type(value) is tuple else [value]
        for one in tensors:
            if (
                type(one) is not torch.Tensor
                or (one.shape, one.dtype) != layout.get(key)
                or one.layout is not torch.strided
                or one.requires_grad
                or not (parse is pushed or one.is_contiguous())
            ):
                break
        else:
            if tensors:
                return [(key, tensors)]  # type: ignore[return-value]  # a cast would be a call
    pairs: Any = by_position(key, value, layout, written=parse is outs)
    if pairs is None:
        pairs = parse(key, value)
        check_pairs(pairs, layout)
    return pairs  # type: ignore[no-any-return]


def check_pairs(pairs: Iterable[tuple[Key, Sequence[Value]]], layout: Layout) -> None:
    """Raise KeyError for a key that the layout lacks, ValueError for a value of another shape or dtype."""
    for key, tensors in pairs:
        if key not in layout:
            known = list(layout)
            shown = f"{known[:20]}{' ...' if len(known) > 20 else ''}"
            raise KeyError(f"key {key!r} was not initialised; known keys: {shown}")
        for tensor in tensors:
            check_like(key, tensor, *layout[key])


def row_pulls(key: Any, out: Any, row_ids: Any) -> list[tuple[Key, list[tuple[Value, Any]]]]:
    """Return keys with (output, row numbers); the row numbers are not checked."""
    pulls: list[tuple[Key, list[tuple[Value, Any]]]] = []
    for (one, targets), (_, ids) in zip(_grouped(key, out), _zipped(key, row_ids), strict=True):
        own = isinstance(ids, (list, tuple)) and not all(isinstance(row, (int, np.integer)) for row in ids)
        if own and len(ids) != len(targets):
            raise ValueError(f"key {one!r} has {len(targets)} tensors to pull into, but {len(ids)} row_ids")
        checked = [target if isinstance(target, RowSparse) else _writable(one, target) for target in targets]
        pulls.append((one, list(zip(checked, ids if own else [ids] * len(targets), strict=True))))
    return pulls


def tensors_of(pairs: Iterable[tuple[Any, Iterable[Value]]]) -> Iterator[torch.Tensor]:
    """Yield all tensors of the values of keys: for a row-sparse value, its row numbers and its rows."""
    for _, values in pairs:
        for value in values:
            yield from (value.indices, value.values) if type(value) is RowSparse else (value,)


def checked_priority(priority: Any) -> int:
    """Return ``priority``; raise TypeError unless it is an int."""
    if type(priority) is not int and (type(priority) is bool or not isinstance(priority, int)):
        raise TypeError(f"priority is {priority!r}; expected an int")
    return priority


def check_mean(key: Key, dtype: torch.dtype) -> None:
    """Raise ValueError if no mean can be taken of values of ``dtype``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"key {key!r} has dtype {dtype}, which has no weighted mean; push it without a weight")


def check_like(key: Key, value: Value, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``value`` has this shape and dtype."""
    if value.shape != shape:
        raise ValueError(f"key {key!r} has shape {tuple(shape)}, but got a tensor of shape {tuple(value.shape)}")
    if value.dtype != dtype:
        raise ValueError(f"key {key!r} has dtype {dtype}, but got a tensor of {value.dtype}")


def check_flat(bucket: Bucket, flats: BucketValues) -> None:
    """Raise ValueError unless each value is a contiguous flat tensor of the bucket, or a dict of its keys' tensors."""
    if not flats:
        raise ValueError(f"a bucket of {len(bucket.slots)} keys has an empty list of tensors; expected one per device")
    for flat in flats:
        if isinstance(flat, Mapping):
            if [*map(_shape_and_dtype, flat.values())] == [*map(bucket.layout.get, flat)]:
                continue
            for key, tensor in flat.items():
                if key not in bucket.layout:
                    raise ValueError(f"key {key!r} is not in the bucket; it has {bucket.keys}")
                check_like(key, tensor, *bucket.layout[key])
            continue
        if flat.shape != (bucket.numel,) or flat.dtype != bucket.dtype or not flat.is_contiguous():
            raise ValueError(
                f"a bucket of {bucket.numel} elements of {bucket.dtype} got a tensor of shape {tuple(flat.shape)} and "
                f"{flat.dtype}; expected a contiguous flat one, as of Bucket.empty"
            )


def by_key(bucket: Bucket, values: BucketValues, keys: Sequence[Key]) -> Pushed:
    """Return the values of ``keys`` in a bucket, one per device that has a value."""
    views = [value if isinstance(value, Mapping) else bucket.views(value) for value in values]
    return [(key, [view[key] for view in views if key in view]) for key in keys]


def of_only_device(values: BucketValues, keys: Sequence[Key], device: torch.device) -> dict[Key, torch.Tensor] | None:
    """Return a bucket's values of ``keys`` if ``device`` is the only one and has all values, dense; else None."""
    only = values[0] if len(values) == 1 else None
    if not isinstance(only, Mapping):
        return None
    tensors: list[Any] = [*map(only.get, keys)]
    if {*map(type, tensors)} != {torch.Tensor} or {*map(_device, tensors)} != {device}:
        return None
    return dict(zip(keys, tensors, strict=True))


def merged(pairs: Sequence[tuple[Key, list[_V]]]) -> Sequence[tuple[Key, list[_V]]]:
    """Return one entry per key, with all of its values."""
    if len(pairs) == 1 or len({*keys_of(pairs)}) == len(pairs):
        return pairs
    merged: dict[Key, list[_V]] = {}
    for key, values in pairs:
        merged[key] = merged[key] + values if key in merged else values
    return list(merged.items())


def _zipped(keys: Any, values: Any) -> list[tuple[Any, Any]]:
    if not isinstance(keys, (list, tuple)):
        return [(keys, values)]
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{len(keys)} keys got a {type(values).__name__}; expected a list of {len(keys)} values")
    if len(values) != len(keys):
        raise ValueError(f"{len(keys)} keys got {len(values)} values; expected as many")
    return list(zip(keys, values, strict=True))


def _grouped(key: Any, value: Any) -> list[tuple[Key, list[Any]]]:
    grouped = []
    for one, tensors in _zipped(key, value):
        many = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        if not many:
            raise ValueError(f"key {one!r} has an empty list of tensors; expected one per device")
        grouped.append((_checked_key(one), many))
    return grouped


def _checked_key(key: Any) -> Key:
    if type(key) is bool or not isinstance(key, (str, int)):
        raise TypeError(f"key is {key!r}, a {type(key).__name__}; expected a str or an int")
    return key


def _value(key: Any, value: Any) -> Value:
    if isinstance(value, RowSparse):
        return value
    if isinstance(value, np.ndarray):
        value = readable(value, f"the value of key {key!r}")
    _check_is_tensor(key, value)
    if value.layout == torch.sparse_coo and value.sparse_dim() == 1:
        return RowSparse.from_coo(value)
    if value.layout == torch.sparse_coo:
        axes = value.sparse_dim()
        raise ValueError(
            f"key {key!r} has a value of layout sparse_coo with {axes} sparse axes; expected 1 (whole rows)"
        )
    if value.layout != torch.strided:
        raise ValueError(f"key {key!r} has a value of layout {value.layout}; expected a dense or a sparse_coo tensor")
    return _without_grad(value)


def _writable(key: Any, value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = shared(value, f"the value of key {key!r}")
    if isinstance(value, RowSparse):
        raise ValueError(f"key {key!r} cannot be pulled into a RowSparse; use row_sparse_pull")
    _check_is_tensor(key, value)
    if value.layout != torch.strided:
        raise ValueError(f"key {key!r} has a value of layout {value.layout}; expected a dense tensor to write into")
    strides = value.stride()
    if (
        0 in strides
        and value.numel()
        and any(size > 1 and not stride for size, stride in zip(value.shape, strides, strict=True))
    ):
        raise ValueError(f"key {key!r} cannot be written into an expanded tensor; clone it first")
    return _without_grad(value)


def _without_grad(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor without grad; skip `detach` if not needed, because it costs as much as a sum."""
    return value.detach() if value.requires_grad else value


def _check_is_tensor(key: Any, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"key {key!r} has a value of type {type(value).__name__}; "
            "expected a torch tensor, a numpy array or a RowSparse"
        )


def check_shard(shard: object, *, or_weights: bool = False) -> None:
    """Raise ValueError unless ``shard`` is "optimizer", None or, with ``or_weights``, "weights"."""
    if shard == "weights" and not or_weights:
        raise ValueError(
            "shard is 'weights', which is for Module, Trainer and DistributedOptimizer; expected 'optimizer' or None"
        )
    if shard not in (None, "optimizer", "weights"):
        expected = "'optimizer', 'weights'" if or_weights else "'optimizer'"
        raise ValueError(f"shard is {shard!r}; expected {expected} or None")


def check_memory(memory: object, count: int, owners: str = "workers") -> None:
    """Raise ValueError unless memory is "auto" or one number per owner, with at least one above 0."""
    if memory == "auto":
        return
    numbers = list(memory) if isinstance(memory, Sequence) and not isinstance(memory, str) else []
    if len(numbers) != count or not all(
        isinstance(one, (int, float)) and math.isfinite(one) and one >= 0 for one in numbers
    ):
        raise ValueError(f"memory is {memory!r}; expected 'auto', or a number >= 0 for each of {count} {owners}")
    if not any(numbers):
        raise ValueError(f"memory is {memory!r}; expected a number above 0 for one of {count} {owners} at least")


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a device; on the host, this worker's part of the available memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_memory() -> int:
    """Return the free bytes of this host, or of this container if its memory is limited."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no cgroup, or one without limit ("max")
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))
        free = min(free, max(limit - used + cached, 0))
    return free
