"""NCCL's calls through one of two Python bindings: cupy or pynccl."""
# ruff: noqa: D102  the methods are documented in `Binding`

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

VARIABLE = "GANGLINE_NCCL_BINDING"
"""Environment variable that selects one of `BINDINGS`."""

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_BYTE = 1  # ncclUint8 in nccl.h


class Binding(ABC):
    """NCCL communicators of one process, by position, and the calls that gangline makes on them.

    Addresses and streams are ints; ``count`` is in elements; ``dtype`` and ``op`` are the enumerators of nccl.h.
    """

    def __init__(self, nccl: Any, communicators: Sequence[Any]) -> None:
        self._nccl = nccl
        self._communicators = communicators

    @classmethod
    @abstractmethod
    def for_gpus(cls, gpus: Sequence[int]) -> Self:
        """Return the communicators of several GPUs of this process (ncclCommInitAll)."""

    @classmethod
    @abstractmethod
    def for_rank(cls, device: torch.device, unique_id: bytes, rank: int, size: int) -> Self:
        """Return the communicator of one rank, at position 0 (ncclCommInitRank); blocks until all ranks call it."""

    @staticmethod
    @abstractmethod
    def unique_id() -> bytes:
        """Return the 128 bytes that identify a new communicator; one rank calls this for all (ncclGetUniqueId)."""

    @abstractmethod
    def start(self) -> None:
        """Begin a group of calls (ncclGroupStart)."""

    @abstractmethod
    def end(self) -> None:
        """Launch the calls made since `start` (ncclGroupEnd)."""

    @abstractmethod
    def call(self, name: str, position: int, *arguments: int) -> None:
        """Call "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send" or "recv".

        Args:
            name: name of the call.
            position: position of the GPU.
            arguments: source, target, count, dtype, op (of reductions), root (of reduce and broadcast), stream. The
                count is that of one row of all_gather and reduce_scatter. Of "send" and "recv": address, count, dtype,
                peer, stream.
        """

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:
        """Call ncclSend on bytes, at position 0."""
        self.call("send", 0, source, nbytes, _BYTE, to, stream)

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:
        """Call ncclRecv on bytes, at position 0."""
        self.call("recv", 0, target, nbytes, _BYTE, source, stream)

    @abstractmethod
    def abort(self) -> None:
        """Call ncclCommAbort, from any thread: running calls end, regardless of other ranks. No call may follow."""

    @abstractmethod
    def destroy(self) -> None:
        """Call ncclCommDestroy for all positions, in a group if there are several; no call may be running."""


class CupyBinding(Binding):
    """``cupy.cuda.nccl``, whose communicators have NCCL's functions as methods."""

    @classmethod
    def for_gpus(cls, gpus: Sequence[int]) -> Self:
        nccl = import_module("cupy.cuda.nccl")
        return cls(nccl, nccl.NcclCommunicator.initAll(list(gpus)))

    @classmethod
    def for_rank(cls, device: torch.device, unique_id: bytes, rank: int, size: int) -> Self:
        nccl = import_module("cupy.cuda.nccl")
        with torch.cuda.device(device):
            try:
                communicator = nccl.NcclCommunicator(size, unique_id, rank)
            except TypeError:  # cupy below 14 takes a tuple of signed chars
                communicator = nccl.NcclCommunicator(size, struct.unpack(f"{_ID_BYTES}b", unique_id), rank)
        return cls(nccl, [communicator])

    @staticmethod
    def unique_id() -> bytes:
        unique_id: bytes | tuple[int, ...] = import_module("cupy.cuda.nccl").get_unique_id()
        return unique_id if isinstance(unique_id, bytes) else struct.pack(f"{_ID_BYTES}b", *unique_id)

    def start(self) -> None:
        self._nccl.groupStart()

    def end(self) -> None:
        self._nccl.groupEnd()

    def call(self, name: str, position: int, *arguments: int) -> None:
        first, *others = name.split("_")
        getattr(self._communicators[position], first + "".join(map(str.title, others)))(*arguments)

    def abort(self) -> None:
        self._communicators[0].abort()

    def destroy(self) -> None:
        for communicator in self._communicators:
            communicator.destroy()


class PyncclBinding(Binding):
    """``pynccl.Nccl``, which passes ctypes through and counts as C ints."""

    _MAX_COUNT = 2**31 - 1

    @classmethod
    def for_gpus(cls, gpus: Sequence[int]) -> Self:
        nccl = _open_pynccl()
        handles = (ctypes.c_void_p * len(gpus))()
        nccl.comm_init_all(handles, len(gpus), (ctypes.c_int * len(gpus))(*gpus))
        return cls(nccl, list(handles))

    @classmethod
    def for_rank(cls, device: torch.device, unique_id: bytes, rank: int, size: int) -> Self:
        with torch.cuda.device(device):
            nccl = _open_pynccl()
            handle = ctypes.c_void_p()
            identity = import_module("pynccl.binding").ncclUniqueId()  # longer than NCCL's, which reads its beginning
            ctypes.memmove(ctypes.addressof(identity), unique_id, _ID_BYTES)
            code = nccl.comm_init_rank(ctypes.byref(handle), size, identity, rank)
        if not handle.value:
            raise RuntimeError(f"ncclCommInitRank of rank {rank} of {size} on {device} failed with error {code}")
        return cls(nccl, [handle.value])

    @staticmethod
    def unique_id() -> bytes:
        identity: Any = _open_pynccl().get_unique_id()
        return ctypes.string_at(ctypes.addressof(identity), _ID_BYTES)

    def start(self) -> None:
        self._nccl.group_start()

    def end(self) -> None:
        self._nccl.group_end()

    def call(self, name: str, position: int, *arguments: int) -> None:
        *before, stream = arguments
        is_message = name in ("send", "recv")
        self.check_count(before[1 if is_message else 2])
        function = getattr(self._nccl, f"pp_{name}" if is_message else name)
        function(*before, self._communicators[position], stream)

    def abort(self) -> None:
        self._nccl.comm_abort(self._communicators[0])

    def destroy(self) -> None:
        for communicator in self._communicators:
            self._nccl.comm_destroy(communicator)

    def check_count(self, count: int) -> None:
        """Raise ValueError if a number of elements does not fit a C int."""
        if count > self._MAX_COUNT:
            raise ValueError(
                f"a tensor has {count} elements, but pynccl passes at most {self._MAX_COUNT}; expected {VARIABLE}=cupy"
            )


BINDINGS: dict[str, type[Binding]] = {"cupy": CupyBinding, "pynccl": PyncclBinding}


def selected() -> str:
    """Return the name of the binding to use: GANGLINE_NCCL_BINDING, else "cupy".

    Raises:
        ValueError: if the variable holds an unknown name.
    """
    name = os.environ.get(VARIABLE, "cupy")
    if name not in BINDINGS:
        raise ValueError(f"{VARIABLE} is {name!r}; expected one of {', '.join(BINDINGS)}")
    return name


def unavailable_reason(name: str) -> str:
    """Return what this machine lacks for a binding; "" if nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cupy warns about the missing library reported below
            module = import_module({"cupy": "cupy.cuda.nccl", "pynccl": "pynccl"}[name])
    except Exception as error:  # noqa: BLE001  a broken driver gives errors of the package's own
        return f"{name} cannot be imported ({error}): pip install 'gangline[cuda13]' or 'gangline[cuda12]'"
    if name == "cupy" and not module.available:
        return "cupy finds no NCCL library: torch for CUDA brings one"
    return ""


def _open_pynccl() -> Any:
    """Return a ``pynccl.Nccl`` with the NCCL library that torch installed, unless NUMBA_NCCLLIB names a folder."""
    variable = "NUMBA_NCCLLIB"  # the first place where pynccl searches
    with ExitStack() as stack:
        with suppress(ModuleNotFoundError):
            folder, *_ = import_module("nvidia.nccl").__path__
            if variable not in os.environ:
                os.environ[variable] = str(Path(folder, "lib"))
                stack.callback(os.environ.pop, variable)
        return import_module("pynccl").Nccl()
