"""The calls that gangline makes of NVIDIA's NCCL, by cupy's binding or pynccl's.

The two differ in names and in how they pass numbers; `CupyBinding` and `PyncclBinding` are called alike.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

VARIABLE = "GANGLINE_NCCL_BINDING"
"""The environment variable that chooses one of `BINDINGS`."""


class Binding(Protocol):
    """NCCL's communicators of one process, one for each place, and the calls that gangline makes of them.

    Addresses and streams are numbers; ``count`` is in elements; ``dtype`` and ``op`` are NCCL's.
    """

    name: ClassVar[str]

    def __init__(self, gpus: Sequence[int]) -> None: ...

    def start(self) -> None:
        """Begin a group of calls."""

    def end(self) -> None:
        """Start what was called since `start`."""

    def all_reduce(self, place: int, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """A place's part of ncclAllReduce."""

    def reduce(
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """A place's part of ncclReduce."""

    def broadcast(self, place: int, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        """A place's part of ncclBroadcast."""

    def all_gather(self, place: int, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        """A place's part of ncclAllGather; ``count`` is of ``source``."""

    def reduce_scatter(
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """A place's part of ncclReduceScatter; ``count`` is of ``target``."""


class CupyBinding:
    """`cupy.cuda.nccl`."""

    name: ClassVar[str] = "cupy"

    def __init__(self, gpus: Sequence[int]) -> None:
        self._nccl = import_module("cupy.cuda.nccl")
        self._communicators = self._nccl.NcclCommunicator.initAll(list(gpus))

    def start(self) -> None:  # noqa: D102  as Binding's, and so below
        self._nccl.groupStart()

    def end(self) -> None:  # noqa: D102
        self._nccl.groupEnd()

    def all_reduce(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._communicators[place].allReduce(source, target, count, dtype, op, stream)

    def reduce(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        self._communicators[place].reduce(source, target, count, dtype, op, root, stream)

    def broadcast(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        self._communicators[place].broadcast(source, target, count, dtype, root, stream)

    def all_gather(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, stream: int
    ) -> None:
        self._communicators[place].allGather(source, target, count, dtype, stream)

    def reduce_scatter(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._communicators[place].reduceScatter(source, target, count, dtype, op, stream)


class PyncclBinding:
    """`pynccl.Nccl`, which passes ctypes on and counts as C ints.

    Its `Nccl` opens the library that numba's search finds in NUMBA_NCCLLIB; where that is not set, it is shown the one
    that came with torch.
    """

    name: ClassVar[str] = "pynccl"
    _MOST = 2**31 - 1

    def __init__(self, gpus: Sequence[int]) -> None:
        with _library_shown():
            self._nccl = import_module("pynccl").Nccl()
        handles = (ctypes.c_void_p * len(gpus))()
        self._nccl.comm_init_all(handles, len(gpus), (ctypes.c_int * len(gpus))(*gpus))
        self._communicators = list(handles)

    def start(self) -> None:  # noqa: D102  as Binding's, and so below
        self._nccl.group_start()

    def end(self) -> None:  # noqa: D102
        self._nccl.group_end()

    def all_reduce(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._nccl.all_reduce(source, target, self.count(count), dtype, op, self._communicators[place], stream)

    def reduce(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        self._nccl.reduce(source, target, self.count(count), dtype, op, root, self._communicators[place], stream)

    def broadcast(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        self._nccl.broadcast(source, target, self.count(count), dtype, root, self._communicators[place], stream)

    def all_gather(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, stream: int
    ) -> None:
        self._nccl.all_gather(source, target, self.count(count), dtype, self._communicators[place], stream)

    def reduce_scatter(  # noqa: D102
        self, place: int, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._nccl.reduce_scatter(source, target, self.count(count), dtype, op, self._communicators[place], stream)

    def count(self, count: int) -> int:
        """A number of elements, once it is seen that pynccl can pass it.

        Raises:
            ValueError: it cannot.
        """
        if count > self._MOST:
            raise ValueError(
                f"a tensor has {count} elements, but pynccl passes at most {self._MOST}; expected {VARIABLE}=cupy"
            )
        return count


BINDINGS: dict[str, type[Binding]] = {"cupy": CupyBinding, "pynccl": PyncclBinding}


def chosen() -> str:
    """The name of the binding to use: GANGLINE_NCCL_BINDING, else "cupy".

    Raises:
        ValueError: the variable names none.
    """
    name = os.environ.get(VARIABLE, CupyBinding.name)
    if name not in BINDINGS:
        raise ValueError(f"{VARIABLE} is {name!r}; expected one of {', '.join(BINDINGS)}")
    return name


def missing(name: str) -> str:
    """What this machine lacks to use a binding; "" where it lacks nothing."""
    install = "pip install 'gangline[cuda12]' or 'gangline[cuda13]'"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cupy warns of what is said below
            module = import_module("cupy.cuda.nccl" if name == CupyBinding.name else "pynccl")
    except ImportError as error:
        return f"{name} cannot be imported ({error}): {install}"
    if name == CupyBinding.name and not module.available:
        return "cupy finds no NCCL library: pip install nvidia-nccl-cu12 (or -cu13)"
    return ""


@contextmanager
def _library_shown() -> Iterator[None]:
    """Have numba's search find the library that torch has brought, unless the user has named another."""
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
