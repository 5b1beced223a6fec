"""What a rank of `spawn` does in its process: find its function, open its communicator, tell how it went."""

from __future__ import annotations

import builtins
import io
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import prepare
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gangline.collectives import errors

importing_script = False
"""Whether this process is a rank that imports the script of its caller: then it must not start ranks of its own."""


class RankTask(NamedTuple):
    """What a rank is told first; function and arguments follow, packed, for they may need the caller's script."""

    rank: int
    size: int
    threads: int
    communicator: dict[str, Any]
    """Options of `open_communicator`."""
    preparation: dict[str, Any]
    """How to import the caller's script: what multiprocessing's own children get."""


class RankReport(NamedTuple):
    """An exception as plain data."""

    when: float
    """`time.monotonic`, which all processes of a machine share, in seconds."""
    name: str
    """Its class, or the nearest base class that is Python's or gangline's."""
    arguments: tuple[Any, ...]
    notes: tuple[str, ...]
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> RankReport:
        """Take down what an exception says."""
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
        """The exception again, without the objects it held."""
        known = getattr(errors, self.name, None) or getattr(builtins, self.name)
        try:
            error: Exception = known(*self.arguments)
        except TypeError:  # a class that wants other arguments than a text
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
    """A value as bytes; tensors are copied, for their memory may end with this process."""
    buffer = io.BytesIO()
    _Packer(buffer, 5).dump(value)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """The value of bytes that came through a pipe between a program and its own ranks, and from nowhere else."""
    return ForkingPickler.loads(packed)


class _Packer(ForkingPickler):
    """What multiprocessing sends objects by, but with storages as bytes: torch's own way hands over descriptors."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.UntypedStorage):
            return _storage, (torch.empty(0, dtype=torch.uint8).set_(value).numpy().tobytes(),)
        if type(value) not in (Tensor, Parameter) or value.layout != torch.strided:  # type: ignore[attr-defined]
            return NotImplemented
        assert isinstance(value, Tensor)
        data = value.detach().cpu()
        view = data.untyped_storage(), data.storage_offset(), tuple(data.shape), data.stride()
        return _tensor, (data.dtype, view, value.requires_grad, type(value) is Parameter)


def _storage(raw: bytes) -> torch.UntypedStorage:
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.untyped_storage()


def _tensor(dtype: torch.dtype, view: tuple[Any, ...], requires_grad: bool, is_parameter: bool) -> Tensor:
    values = torch.empty(0, dtype=dtype).set_(*view)
    return Parameter(values, requires_grad) if is_parameter else values.requires_grad_(requires_grad)


def run(connection: Connection) -> None:
    """Be a rank: the entry function of a `Family`."""
    job: RankTask = connection.recv()
    torch.set_num_threads(job.threads)
    comm = None
    try:
        _import_script(job)
        opener, fn, args = unpack(connection.recv_bytes())
        comm = opener(job.rank, job.size, partial(_exchange, connection), **job.communicator)
        returned = pack(fn(comm, *args))
        comm.close()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it was is the caller's to see
        # Told before the others can notice, so that the caller hears the cause before its consequences.
        _tell(connection, "failed", RankReport.of(error))
        if comm is not None:
            with suppress(Exception):
                comm.close()
    else:
        _tell(connection, "returned", returned)


def _import_script(job: RankTask) -> None:
    global importing_script
    importing_script = True
    try:
        prepare({**job.preparation, "name": f"rank {job.rank}"})
    finally:
        importing_script = False


def _exchange(connection: Connection, blob: bytes) -> list[bytes]:
    """`Exchange` by way of the caller, who hears all ranks."""
    connection.send(("exchange", blob))
    trouble, blobs = connection.recv()
    if trouble is not None:
        raise trouble.error()
    return list(blobs)


def _tell(connection: Connection, word: str, what: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with suppress(BrokenPipeError):  # nobody is interested any more
        connection.send((word, what))
