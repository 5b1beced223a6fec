"""The KVStore interface, what its arguments may look like, and the registry behind `create`."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from collectives.arrays import readable, shared
from collectives.work import Work
from kvstore.optimizer import OptimizerState
from kvstore.optimizer_spec import Key, OptimizerSpec

Value = torch.Tensor | np.ndarray[Any, Any]
Updater = Callable[[Key, torch.Tensor, torch.Tensor], None]
Pairs = list[tuple[Key, list[torch.Tensor]]]
"""Keys, each with its tensors: one a device."""


class KVStore(abc.ABC):
    """Keys to tensors: gradients go in with `push`, weights come out with `pull`.

    A key is a str or an int; ``3`` and ``"3"`` are two keys. Values are torch tensors or numpy arrays. Every
    method that moves tensors takes one key with its value, or a list of keys with a list of values; a value is a
    tensor or a list of tensors, one a device. It checks all its arguments before it changes anything.

    ``async_op=True`` returns at once with a `Work`; the tensors belong to the store until its ``wait()``.
    Without it the returned Work is over. Larger ``priority`` goes first among operations under way.

    Raises, throughout: KeyError for a key that was not initialised; ValueError for a wrong shape, dtype or
    name; TypeError for a wrong Python type; RuntimeError once the store is closed.
    """

    def __init__(self, name: str) -> None:
        self.type = name
        self._layout: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._layout_lock = threading.Lock()
        self._closed = False

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return 1

    def barrier(self) -> None:
        """Return when every worker has come here."""
        self._check_open()

    def dead_nodes(self) -> list[str]:
        """Which workers and servers are known to be dead."""
        return []

    def num_dead_nodes(self, timeout: float = 60.0) -> int:  # noqa: ARG002  MXNet's signature
        """How many workers and servers have not been heard for ``timeout`` seconds."""
        return len(self.dead_nodes())

    def init(self, key: Any, value: Any, *, async_op: bool = False) -> Work:
        """Make ``key`` known with a copy of ``value`` as its stored value.

        Raises:
            ValueError: the key is known already, or twice in the list.
        """
        self._check_open()
        pairs = self._single(key, value)
        with self._layout_lock:
            seen = set(self._layout)
            for one, _ in pairs:
                if one in seen:
                    raise ValueError(f"key {one!r} is initialised already; expected a new key (push replaces a value)")
                seen.add(one)
            for one, (tensor,) in pairs:
                self._layout[one] = (tensor.shape, tensor.dtype)
        return self._init(pairs, async_op)

    def push(self, key: Any, value: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """Sum ``value`` over its devices; the sum goes to the updater, or without one replaces the stored value.

        A key that comes twice in one call counts as one push of the sum.
        """
        self._check_open()
        pairs = self._grouped(key, value)
        self._check(pairs)
        return self._push(pairs, _checked_priority(priority), async_op)

    def pull(self, key: Any, out: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """Copy the stored value into each tensor of ``out``."""
        self._check_open()
        pairs = self._grouped(key, out, writable=True)
        self._check(pairs)
        return self._pull(pairs, _checked_priority(priority), async_op)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, async_op: bool = False) -> Work:
        """Push ``value`` and pull into ``out``, or into ``value`` itself, in one round trip."""
        self._check_open()
        values = self._grouped(key, value, writable=out is None)
        outs = values if out is None else self._grouped(key, out, writable=True)
        self._check(values)
        self._check(outs)
        return self._pushpull(values, outs, _checked_priority(priority), async_op)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """`init` with ``value`` and `pull` into ``out``."""
        self._check_open()
        priority = _checked_priority(priority)
        values, outs = self._single(key, value), self._grouped(key, out, writable=True)
        for (one, (tensor,)), (_, targets) in zip(values, outs, strict=True):
            for target in targets:
                _check_like(one, target, tensor.shape, tensor.dtype)
        self.init(key, value, async_op=async_op)
        return self._pull(outs, priority, async_op)

    def assign(self, key: Any, value: Any) -> None:
        """Replace the stored value without an update; optimizer state stays."""
        self._check_open()
        pairs = self._single(key, value)
        self._check(pairs)
        self._assign(pairs)

    def set_updater(self, updater: Updater) -> None:  # noqa: ARG002  refused here
        """Have ``updater(key, summed, stored)`` change ``stored`` in place, once a push and key."""
        raise ValueError(f"a {self.type!r} store takes no updater; use set_optimizer")

    def set_optimizer(self, spec: Any) -> None:
        """Have each push update the stored value with an optimizer of torch.optim.

        Args:
            spec: as `OptimizerSpec.parse` takes it, e.g. ``("sgd", {"learning_rate": 0.1, "momentum": 0.9})``.
        """
        self._check_open()
        self._set_optimizer(OptimizerSpec.parse(spec))

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the optimizer's state to a safetensors file, aside first and then renamed."""
        from kvstore import files

        state = self.optimizer_state()
        files.save(Path(path), state.tensors, state.header())

    def load_optimizer_states(self, path: str | Path) -> None:
        """Take over the optimizer state of a file; the learning rate stays as it is set.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a torn or foreign file, another optimizer, unknown keys, or other shapes.
        """
        from kvstore import files

        tensors, header = files.load(Path(path))
        if "optimizer" not in header:
            raise ValueError(f"{path} holds no optimizer state; expected a file of save_optimizer_states")
        self.load_optimizer_state(OptimizerState.from_parts(header, tensors))

    @property
    @abc.abstractmethod
    def learning_rate(self) -> float:
        """The optimizer's rate; RuntimeError without an optimizer."""

    @abc.abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next push on."""

    @abc.abstractmethod
    def optimizer_state(self) -> OptimizerState:
        """A copy of the optimizer's state, on the host."""

    @abc.abstractmethod
    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Replace the optimizer's state."""

    @abc.abstractmethod
    def _init(self, pairs: Pairs, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _push(self, pairs: Pairs, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _pushpull(self, values: Pairs, outs: Pairs, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _assign(self, pairs: Pairs) -> None: ...

    @abc.abstractmethod
    def _set_optimizer(self, spec: OptimizerSpec) -> None: ...

    def close(self) -> None:
        """Finish what is under way and free what the store holds; closing again does nothing."""
        self._closed = True

    def __contains__(self, key: object) -> bool:
        return not self._closed and key in self._layout

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.type!r} store is closed; create a new one")

    def _single(self, key: Any, value: Any) -> Pairs:
        """Keys with exactly one tensor each."""
        if isinstance(key, (list, tuple)):
            return [(_checked_key(one), [_tensor(one, tensor)]) for one, tensor in _zipped(key, value)]
        return [(_checked_key(key), [_tensor(key, value)])]

    def _grouped(self, key: Any, value: Any, *, writable: bool = False) -> Pairs:
        """Keys with their tensors, one a device."""
        pairs = _zipped(key, value) if isinstance(key, (list, tuple)) else [(key, value)]
        grouped = []
        for one, tensors in pairs:
            many = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
            if not many:
                raise ValueError(f"key {one!r} has an empty list of tensors; expected one a device")
            grouped.append((_checked_key(one), [_tensor(one, tensor, writable=writable) for tensor in many]))
        return grouped

    def _check(self, pairs: Pairs) -> None:
        for key, tensors in pairs:
            if key not in self._layout:
                known = list(self._layout)
                shown = f"{known[:20]}{' ...' if len(known) > 20 else ''}"
                raise KeyError(f"key {key!r} was not initialised; known keys: {shown}")
            for tensor in tensors:
                _check_like(key, tensor, *self._layout[key])


def _zipped(keys: Sequence[Any], values: Any) -> list[tuple[Any, Any]]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{len(keys)} keys came with a {type(values).__name__}; expected a list of {len(keys)} values")
    if len(values) != len(keys):
        raise ValueError(f"{len(keys)} keys came with {len(values)} values; expected as many")
    return list(zip(keys, values, strict=True))


def _checked_key(key: Any) -> Key:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise TypeError(f"key is {key!r}, a {type(key).__name__}; expected a str or an int")
    return key


def _checked_priority(priority: Any) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority is {priority!r}; expected an int")
    return priority


def _tensor(key: Any, value: Any, *, writable: bool = False) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = (shared if writable else readable)(value, f"the value of key {key!r}")
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"key {key!r} has a value of type {type(value).__name__}; expected a torch tensor or a numpy array"
        )
    if value.layout != torch.strided:
        raise ValueError(f"key {key!r} has a value of layout {value.layout}; expected a dense tensor")
    if writable and any(not stride and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
        raise ValueError(f"key {key!r} is to be written into a tensor that holds an element many times; clone it first")
    return value.detach()


def _check_like(key: Key, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"key {key!r} has shape {tuple(shape)}, but a tensor of shape {tuple(tensor.shape)} came for it"
        )
    if tensor.dtype != dtype:
        raise ValueError(f"key {key!r} has dtype {dtype}, but a tensor of {tensor.dtype} came for it")


def merged(pairs: Pairs) -> Pairs:
    """One entry a key, with all tensors that came for it."""
    merged: dict[Key, list[torch.Tensor]] = {}
    for key, tensors in pairs:
        if key in merged:
            merged[key] = merged[key] + tensors
        else:
            merged[key] = tensors
    return list(merged.items())


Store = TypeVar("Store", bound=type[KVStore])
_registry: dict[str, type[KVStore]] = {}


def register(*names: str) -> Callable[[Store], Store]:
    """Class decorator: have `create` make this KVStore under each of ``names``.

    Raises:
        ValueError: a name is taken, or none is given.
        TypeError: a name is no str, or what is decorated is no KVStore class.
    """
    if not names:
        raise ValueError("register() got no name; expected one, such as @register('mystore')")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a store's name is {name!r}; expected a str")
        if name in _registry:
            raise ValueError(f"a store named {name!r} is registered already: {_registry[name].__qualname__}")

    def decorate(store: Store) -> Store:
        if not (isinstance(store, type) and issubclass(store, KVStore)):
            raise TypeError(f"{store!r} is no subclass of KVStore")
        _registry.update(dict.fromkeys(names, store))
        return store

    return decorate


def create(name: str = "local", **options: Any) -> KVStore:
    """Make a store by name; `kv.type` is the name given.

    Raises:
        TypeError: ``name`` is no str, or the store has no such option.
        ValueError: no store has that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"the store's name is {name!r}; expected a str")
    if name not in _registry:
        raise ValueError(f"there is no store named {name!r}; expected one of {sorted(_registry)}")
    return _registry[name](name, **options)
