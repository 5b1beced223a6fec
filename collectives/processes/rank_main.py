"""Entry function of a rank's process: import the function, open the communicator, call, report the outcome."""

from __future__ import annotations

import builtins
import io
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import prepare
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gangline.collectives import errors
from gangline.collectives.bootstrap.store_all_gather import StoreAllGather
from gangline.collectives.bootstrap.unix_store import RemoteStore

importing_script = False
"""True while a rank imports its caller's script, which must not spawn ranks then."""


class RankTask(NamedTuple):
    """First message to a rank. The pickled function and arguments follow, as they may need the caller's script."""

    rank: int
    size: int
    threads: int
    processes: list[tuple[str, int, int]]
    """Identity of each rank's process."""
    timeout: float
    """Seconds to wait for other ranks in the bootstrap exchange."""
    communicator: dict[str, Any]
    """Options of `open_communicator`."""
    preparation: dict[str, Any]
    """Data that multiprocessing sends to its children so that they can import the caller's script."""


class RankReport(NamedTuple):
    """Exception of a rank as plain data."""

    when: float
    """Time by `time.monotonic`, in seconds; its clock is common to all processes of a machine."""
    name: str
    """Name of its class, or of the nearest base class that is built in or gangline's."""
    arguments: tuple[Any, ...]
    notes: tuple[str, ...]
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> RankReport:
        """Convert an exception."""
        when = time.monotonic()
        own = type(error)
        name = next((base.__name__ for base in own.__mro__ if _is_known(base, own)), "RuntimeError")
        arguments: tuple[Any, ...] = (str(error),)
        if name != own.__name__:
            arguments = (f"{own.__module__}.{own.__qualname__}: {error}",)
        elif all(isinstance(argument, _PLAIN) for argument in error.__reduce__()[1]):
            arguments = tuple(error.__reduce__()[1])
        notes = tuple(str(note) for note in getattr(error, "__notes__", ()))
        return cls(when, name, arguments, notes, "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """Return the exception, without objects that it held."""
        known = getattr(errors, self.name, None) or getattr(builtins, self.name)
        try:
            error: Exception = known(*self.arguments)
        except TypeError:  # the class does not accept a text
            error = RuntimeError(f"{self.name}: {self.arguments[0]}")
        for note in self.notes:
            error.add_note(note)
        return error


_PLAIN = (str, bytes, int, float, type(None))


def _is_known(base: type, own: type) -> bool:
    if not issubclass(base, Exception) or (base is Exception and own is not Exception):
        return False
    return base.__module__ == errors.__name__ or getattr(builtins, base.__name__, None) is base


def pack(value: Any) -> bytes:
    """Pickle a value; tensors are copied, as their memory may end with this process."""
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """Unpickle a value; only for bytes from a pipe between a program and its own ranks."""
    return ForkingPickler.loads(packed)


class _Pickler(ForkingPickler):
    """multiprocessing's pickler, but with storages as bytes: torch's reductions would pass file descriptors."""

    def reducer_override(self, value: object) -> Any:
        return reduce_tensor(value)


def reduce_tensor(value: object) -> Any:
    """Return the reduction of a tensor or storage to bytes, for `reducer_override`; else NotImplemented."""
    if isinstance(value, torch.UntypedStorage):
        return _storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(value).numpy().tobytes(),)
    if type(value) not in (Tensor, Parameter) or value.layout != torch.strided:  # type: ignore[attr-defined]
        return NotImplemented
    assert isinstance(value, Tensor)
    data = value.detach().cpu()
    view = data.untyped_storage(), data.storage_offset(), tuple(data.shape), data.stride()
    return _tensor, (data.dtype, view, value.requires_grad, type(value) is Parameter)


def _storage(raw: bytes) -> torch.UntypedStorage:
    flat = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return flat.untyped_storage()


def _tensor(dtype: torch.dtype, view: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Tensor:
    values = torch.empty(0, dtype=dtype, device="cpu").set_(*view)
    return Parameter(values, requires_grad) if is_parameter else values.requires_grad_(requires_grad)


def run(connection: Connection) -> None:
    """Run one rank of `spawn`: the entry function of its `ProcessPool`.

    Its pipe to the caller carries the `RankTask`, requests to the caller's store and the result.
    """
    task: RankTask = connection.recv()
    torch.set_num_threads(task.threads)
    comm = None

    def ask(*request: Any) -> Any:
        connection.send(("ask", request))
        return connection.recv()

    try:
        _import_script(task)
        opener, fn, args = unpack(connection.recv_bytes())
        place = "the bootstrap exchange", "the program that called spawn"
        all_gather = StoreAllGather(
            RemoteStore(ask), task.rank, task.size, task.timeout, *place, processes=task.processes, deletes_keys=False
        )
        comm = opener(task.rank, task.size, all_gather, **task.communicator)
        returned = pack(fn(comm, *args))
        comm.close()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  every exception goes to the caller
        # Before closing, which the other ranks detect: the caller must get the cause before its consequences.
        _send(connection, "failed", RankReport.of(error))
        if comm is not None:
            with suppress(Exception):
                comm.close()
    else:
        _send(connection, "returned", returned)


def _import_script(task: RankTask) -> None:
    global importing_script
    importing_script = True
    try:
        prepare({**task.preparation, "name": f"rank {task.rank}"})
    finally:
        importing_script = False


def _send(connection: Connection, kind: str, value: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with suppress(BrokenPipeError):  # the caller no longer reads
        connection.send((kind, value))
