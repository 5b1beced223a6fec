"""NCCL's calls through one of two Python bindings: cupy or pynccl."""
# ruff: noqa: D102  the methods are documented in `Binding`

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch

VARIABLE = "GANGLINE_NCCL_BINDING"
"""Environment variable that selects one of `BINDINGS`."""

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_BYTE = 1  # ncclUint8 in nccl.h


class Binding(Protocol):
    """NCCL communicators of one process, by position, and the calls that gangline makes on them.

    Addresses and streams are ints; ``count`` is in elements; ``dtype`` and ``op`` are the enumerators of nccl.h.
    """

    name: ClassVar[str]

    @classmethod
    def for_gpus(cls, gpus: Sequence[int]) -> Self:
        """Return the communicators of several GPUs of this process (ncclCommInitAll)."""

    @classmethod
    def for_rank(cls, device: torch.device, unique_id: bytes, rank: int, size: int) -> Self:
        """Return the communicator of one rank, at position 0 (ncclCommInitRank); blocks until all ranks call it."""

    @staticmethod
    def unique_id() -> bytes:
        """Return the 128 bytes that identify a new communicator; one rank calls this for all (ncclGetUniqueId)."""

    def start(self) -> None:
        """Begin a group of calls (ncclGroupStart)."""

    def end(self) -> None:
        """Launch the calls made since `start` (ncclGroupEnd)."""

    # The arguments of collectives are: position, source, target, count, dtype, op (reductions), root (reduce and
    # broadcast), stream. ``count`` is that of one row of all_gather and reduce_scatter.
    all_reduce: Callable[..., None]
    reduce: Callable[..., None]
    broadcast: Callable[..., None]
    all_gather: Callable[..., None]
    reduce_scatter: Callable[..., None]

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:
        """Call ncclSend on bytes, at position 0."""

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:
        """Call ncclRecv on bytes, at position 0."""

    def abort(self) -> None:
        """Call ncclCommAbort, from any thread: running calls end, regardless of other ranks. No call may follow."""

    def destroy(self) -> None:
        """Call ncclCommDestroy for all positions, in a group if there are several; no call may be running."""


def _method_of_communicator(name: str) -> Callable[..., None]:
    """Return the call of a collective by a method of cupy's communicators, which takes the same arguments."""

    def call(self: CupyBinding, position: int, *arguments: int) -> None:
        getattr(self._communicators[position], name)(*arguments)

    return call


class CupyBinding:
    """``cupy.cuda.nccl``, whose communicators have NCCL's functions as methods."""

    name: ClassVar[str] = "cupy"

    def __init__(self, nccl: Any, communicators: Sequence[Any]) -> None:
        self._nccl = nccl
        self._communicators = communicators

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
        found: bytes | tuple[int, ...] = import_module("cupy.cuda.nccl").get_unique_id()
        return found if isinstance(found, bytes) else struct.pack(f"{_ID_BYTES}b", *found)

    def start(self) -> None:
        self._nccl.groupStart()

    def end(self) -> None:
        self._nccl.groupEnd()

    all_reduce: Any = _method_of_communicator("allReduce")
    reduce: Any = _method_of_communicator("reduce")
    broadcast: Any = _method_of_communicator("broadcast")
    all_gather: Any = _method_of_communicator("allGather")
    reduce_scatter: Any = _method_of_communicator("reduceScatter")

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:
        self._communicators[0].send(source, nbytes, _BYTE, to, stream)

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:
        self._communicators[0].recv(target, nbytes, _BYTE, source, stream)

    def abort(self) -> None:
        self._communicators[0].abort()

    def destroy(self) -> None:
        for communicator in self._communicators:
            communicator.destroy()


def _function_of_library(name: str) -> Callable[..., None]:
    """Return the call of a collective by a function of pynccl, which takes the communicator before the stream."""

    def call(self: PyncclBinding, position: int, source: int, target: int, count: int, *options: int) -> None:
        *before, stream = options
        function = getattr(self._nccl, name)
        function(source, target, self.checked_count(count), *before, self._communicators[position], stream)

    return call


class PyncclBinding:
    """``pynccl.Nccl``, which passes ctypes through and counts as C ints."""

    name: ClassVar[str] = "pynccl"
    _MAX_COUNT = 2**31 - 1

    def __init__(self, nccl: Any, communicators: Sequence[int]) -> None:
        self._nccl = nccl
        self._communicators = communicators

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

    all_reduce: Any = _function_of_library("all_reduce")
    reduce: Any = _function_of_library("reduce")
    broadcast: Any = _function_of_library("broadcast")
    all_gather: Any = _function_of_library("all_gather")
    reduce_scatter: Any = _function_of_library("reduce_scatter")

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:
        self._nccl.pp_send(source, self.checked_count(nbytes), _BYTE, to, self._communicators[0], stream)

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:
        self._nccl.pp_recv(target, self.checked_count(nbytes), _BYTE, source, self._communicators[0], stream)

    def abort(self) -> None:
        self._nccl.comm_abort(self._communicators[0])

    def destroy(self) -> None:
        for communicator in self._communicators:
            self._nccl.comm_destroy(communicator)

    def checked_count(self, count: int) -> int:
        """Return a number of elements that fits a C int.

        Raises:
            ValueError: if it does not.
        """
        if count > self._MAX_COUNT:
            raise ValueError(
                f"a tensor has {count} elements, but pynccl passes at most {self._MAX_COUNT}; expected {VARIABLE}=cupy"
            )
        return count


BINDINGS: dict[str, type[Binding]] = {"cupy": CupyBinding, "pynccl": PyncclBinding}


def selected() -> str:
    """Return the name of the binding to use: GANGLINE_NCCL_BINDING, else "cupy".

    Raises:
        ValueError: if the variable holds an unknown name.
    """
    name = os.environ.get(VARIABLE, CupyBinding.name)
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
    if name == CupyBinding.name and not module.available:
        return "cupy finds no NCCL library: torch for CUDA brings one"
    return ""


def _open_pynccl() -> Any:
    """Return a ``pynccl.Nccl``, which loads the library found by numba's search path."""
    with _torch_library_in_search_path():
        return import_module("pynccl").Nccl()


@contextmanager
def _torch_library_in_search_path() -> Iterator[None]:
    """Set NUMBA_NCCLLIB to the NCCL library that torch installed, unless the user has set it."""
    name = "NUMBA_NCCLLIB"
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if name in os.environ or not folders:
        yield
        return
    os.environ[name] = str(Path(folders[0]) / "lib")
    try:
        yield
    finally:
        del os.environ[name]
