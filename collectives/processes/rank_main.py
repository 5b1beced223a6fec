"""Entry function of a rank's process: import the function, open the communicator, call, report the outcome."""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gangline.collectives.bootstrap.store_all_gather import StoreAllGather
from gangline.collectives.bootstrap.unix_store import RemoteStore
from gangline.collectives.processes.function_call import ErrorReport, import_script, pack, unpack


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
    """Argument of `import_script`."""


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
        import_script(task.preparation, f"rank {task.rank}")
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
        _send(connection, "failed", ErrorReport.of(error))
        if comm is not None:
            with suppress(Exception):
                comm.close()
    else:
        _send(connection, "returned", returned)


def _send(connection: Connection, kind: str, value: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with suppress(BrokenPipeError):  # the caller no longer reads
        connection.send((kind, value))
