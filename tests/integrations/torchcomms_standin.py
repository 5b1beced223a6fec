"""A stand-in for torchcomms: its Python interface for backends, without its C++ library.

`install` makes it importable. Names, arguments and defaults are those that torchcomms documents for backends in Python:
the class is registered by its module, made without arguments, and called with positional arguments; a call returns
None, or an object with ``wait()``.
"""

from __future__ import annotations

import sys
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RedOpType = Enum("RedOpType", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "AVG"])
backends: dict[str, type[TorchCommBackend]] = {}


class ReduceOp:
    """A reduction: ``type``, and the ``factor`` of PREMUL_SUM."""

    SUM: ReduceOp
    AVG: ReduceOp
    MAX: ReduceOp
    BXOR: ReduceOp

    def __init__(self, type_: RedOpType, factor: float | None = None) -> None:
        self.type, self.factor = type_, factor

    @classmethod
    def PREMUL_SUM(cls, factor: float) -> ReduceOp:  # noqa: N802
        return cls(RedOpType.PREMUL_SUM, factor)


for _name in ("SUM", "AVG", "MAX", "BXOR"):
    setattr(ReduceOp, _name, ReduceOp(RedOpType[_name]))


class TorchCommBackend:
    """The base class: every call raises unless a backend has it."""

    def _set_device_and_options(self, device: torch.device, options: Any) -> None:
        self.device, self.options = device, options

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the backend has no {name}")


class Work:
    """Handle that a call returns: complete, or waiting for the backend's object."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def is_completed(self) -> bool:
        return self._inner is None

    def wait(self) -> None:
        if self._inner is not None:
            self._inner.wait()
            self._inner = None


class TorchComm:
    """A communicator: passes calls on to the backend, ``async_op`` last."""

    def __init__(self, backend: TorchCommBackend) -> None:
        self._backend = backend

    def split(self, ranks: list[int], name: str) -> TorchComm | None:
        made = self._backend.split(ranks, name, SimpleNamespace(timeout=None, store=None, hints={}))
        return None if made is None else TorchComm(made)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") or name == "finalize":
            return getattr(self._backend, name)
        return lambda *arguments, async_op: Work(getattr(self._backend, name)(*arguments, async_op))


def new_comm(backend: str, device: torch.device, name: str, store: Any = None, timeout: Any = None) -> TorchComm:
    if backend not in backends:
        import_module("torchcomms_backend")  # in docs/examples; torchcomms loads the entry point of that name
    made = backends[backend]()
    options = SimpleNamespace(timeout=timeout, store=store, hints={})
    made.init(device, name, options)
    return TorchComm(made)


def install() -> ModuleType:
    """Make the stand-in importable as ``torchcomms``, and return it."""
    public, private = ModuleType("torchcomms"), ModuleType("torchcomms._comms")
    for module in (public, private):
        module.__dict__.update(
            TorchCommBackend=TorchCommBackend,
            ReduceOp=ReduceOp,
            RedOpType=RedOpType,
            new_comm=new_comm,
            register_backend=backends.__setitem__,
            _is_backend_registered=backends.__contains__,
        )
    sys.modules |= {"torchcomms": public, "torchcomms._comms": private}
    return public
