"""Ranks as threads, reproducible inputs, and the expected result of every collective."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.call_signature import DTYPES, OPS
from gangline.collectives.communicator import Communicator, in_process, open_communicator
from gangline.collectives.errors import DeadNodeError
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.tuner import SHARED_LIMIT
from gangline.collectives.work import Work

HALVES = (torch.float16, torch.bfloat16)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
SLOT_BYTES = SHARED_LIMIT
LARGE = SLOT_BYTES // 4 + 4_011
"""Number of 4-byte elements that exceed a slot and that no number of ranks divides."""
PIECE = 1 << 19  # bytes
PATIENT = SimpleNamespace(check=lambda missing: None)
"""Wait policy without limits."""

_UFUNCS = {"sum": np.add, "mean": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


def run_together(calls: Iterable[Callable[[], object]]) -> None:
    """Run each call in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_threads(
    ranks: int | Sequence[Communicator], function: Callable[..., Any], *arguments: Any, timeout: float = 60
) -> list[Any]:
    """Run ``function(comm, *arguments)`` in a thread for each rank; return the results, or raise an error.

    ``ranks`` is their number, or their communicators, which are closed.
    """
    results = outcomes_in_threads(ranks, function, *arguments, timeout=timeout)
    failed = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(failed, key=lambda error: isinstance(error, DeadNodeError)):  # a consequence of another error
        raise error
    return results


def in_ranks(transport: str, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run as `in_threads` if the transport is "in_process", else in processes."""
    if transport == "in_process":
        return in_threads(size, function, *arguments)
    return spawn(function, size, *arguments, transport=transport, timeout=60)


def outcomes_in_threads(
    ranks: int | Sequence[Communicator], function: Callable[..., Any], *arguments: Any, timeout: float = 60
) -> list[Any]:
    """Run as `in_threads`, but return errors as results."""
    comms = in_process(ranks, timeout=timeout) if isinstance(ranks, int) else ranks
    results: list[Any] = [None] * len(comms)

    def run(comm: Communicator) -> None:
        try:
            with comm:
                results[comm.rank] = function(comm, *arguments)
        except BaseException as error:  # noqa: BLE001  the caller raises it
            results[comm.rank] = error

    run_together(partial(run, comm) for comm in comms)
    return results


def with_exchange(*functions: Callable[[int, BootstrapAllGather], Any]) -> list[Any]:
    """Call ``function(rank, exchange)`` of each rank in a thread; return results, and errors as results."""
    size = len(functions)
    barrier = threading.Barrier(size)
    blobs: list[bytes] = [b""] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait(30)
            everybody = list(blobs)
            barrier.wait(30)
            return everybody

        try:
            results[rank] = functions[rank](rank, exchange)
        except Exception as error:  # noqa: BLE001  the test looks at it
            results[rank] = error

    run_together(partial(run, rank) for rank in range(size))
    return results


def exchange_over(comm: Communicator) -> Callable[[bytes], list[bytes]]:
    """Return a `BootstrapAllGather` that uses a communicator, to open another one between the same ranks."""

    def exchange(blob: bytes) -> list[bytes]:
        lengths = comm.all_gather(torch.tensor([len(blob)]))
        padded = torch.zeros(int(lengths.max()) + 1, dtype=torch.uint8)
        padded[: len(blob)] = torch.tensor(list(blob), dtype=torch.uint8)
        rows = comm.all_gather(padded)
        return [bytes(row[: int(length)].tolist()) for row, length in zip(rows, lengths.view(-1), strict=True)]

    return exchange


def open_again(comm: Communicator, transport: str, timeout: float | None = 60) -> Communicator:
    """Open another communicator between the same ranks, with the present environment."""
    return open_communicator(comm.rank, comm.size, exchange_over(comm), transport=transport, timeout=timeout)


def ops_for(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return ("sum", "mean")
    return OPS if dtype.is_floating_point else tuple(op for op in OPS if op != "mean")


def cases() -> Iterator[tuple[str, torch.dtype, str]]:
    """Yield every supported combination of collective, dtype and operation."""
    for dtype in DTYPES:
        yield from ((collective, dtype, op) for collective in REDUCING for op in ops_for(dtype))
        yield from ((collective, dtype, "sum") for collective in MOVING)


def values(count: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return ``count`` different values per rank, within the dtype's range; floats have both signs and inexact sums."""
    if dtype.is_complex:
        return torch.view_as_complex(values(2 * count, rank, dtype.to_real()).view(count, 2))
    period = 1009 if dtype.is_floating_point else 3 if dtype == torch.bool else count
    numbers = torch.arange(min(count, period), dtype=torch.int64) * 37 + rank * 11
    if dtype == torch.bool:
        one = numbers % 3 == 0
    elif dtype.is_floating_point:
        one = ((numbers % 1009 - 504).double() / 8 / (1 + rank)).to(dtype)
    else:
        return numbers.to(dtype)
    return one.repeat(-(-count // period))[:count] if count > period else one


Values = Callable[[int, int, torch.dtype], Tensor]
"""Function like `values`."""


def given(collective: str, count: int, rank: int, size: int, dtype: torch.dtype, make: Values = values) -> Tensor:
    """Return a rank's input: ``count`` elements, or rows of ``count`` if the collective takes a row per rank."""
    if collective in ("reduce_scatter", "all_to_all", "scatter"):
        return make(count * size, rank, dtype).view(size, count)
    return make(count, rank, dtype)


def combined(rows: Sequence[Tensor], op: str) -> Tensor:
    """Reduce the rows in rank order; 16-bit floats are reduced in float32 and rounded once."""
    dtype = rows[0].dtype
    arrays = [row.float().numpy() if dtype in HALVES else row.numpy() for row in rows]
    with np.errstate(all="ignore"):
        total = reduce(_UFUNCS[op], arrays)
        if op == "mean":
            parts = total.view(np.dtype(f"f{total.itemsize // 2}")) if dtype.is_complex else total
            total = (parts / np.asarray(len(rows), parts.dtype)).astype(parts.dtype).view(total.dtype)
    return torch.from_numpy(np.array(total)).to(dtype)


def expected(
    collective: str, count: int, rank: int, size: int, dtype: torch.dtype, op: str, root: int, make: Values = values
) -> Tensor | None:
    """Return a rank's expected result."""
    everybody = [given(collective, count, other, size, dtype, make) for other in range(size)]
    match collective:
        case "all_reduce":
            return combined(everybody, op)
        case "reduce":
            return combined(everybody, op) if rank == root else None
        case "broadcast":
            return everybody[root]
        case "all_gather":
            return torch.stack(everybody)
        case "gather":
            return torch.stack(everybody) if rank == root else None
        case "scatter":
            return everybody[root][rank]
        case "reduce_scatter":
            return combined([rows[rank] for rows in everybody], op)
        case "all_to_all":
            return torch.stack([rows[rank] for rows in everybody])
    raise ValueError(collective)


def call(comm: Communicator, collective: str, tensor: Tensor, op: str, root: int, **options: Any) -> Any:
    """Call a collective; scatter receives into a new tensor unless ``out`` is given."""
    if collective in REDUCING:
        options["op"] = op
    if collective in ROOTED:
        options["root"] = root
    if collective == "scatter":
        out = options.pop("out", None)
        out = torch.empty(tensor.shape[1:], dtype=tensor.dtype) if out is None else out
        return comm.scatter(tensor if comm.rank == root else None, out, **options)
    return getattr(comm, collective)(tensor, **options)


def check(
    comm: Communicator,
    collective: str,
    count: int,
    dtype: torch.dtype,
    op: str,
    root: int,
    *,
    make: Values = values,
    is_inexact: bool | None = None,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **options: Any,
) -> Tensor | None:
    """Call a collective with `given` tensors, check that inputs are unchanged and the result is `expected`; return it.

    Results must be equal bit by bit, except if ``is_inexact``: by default floats reduced over sockets, whose algorithms
    round at each hop. ``place`` moves a tensor to the device of the call, and ``read`` back.
    """
    tensor = place(given(collective, count, comm.rank, comm.size, dtype, make))
    got = call(comm, collective, tensor, op, root, **options)
    if isinstance(got, Work):
        got.wait()
        got = got.result
    name = f"{comm}: {collective} of {count} x {dtype}, {op}, root {root}"
    want = expected(collective, count, comm.rank, comm.size, dtype, op, root, make)
    assert got is None or got.device == tensor.device, name
    found = None if got is None else read(got)
    if is_inexact is None:
        is_inexact = comm.transport in ("ipc", "tcp") and (dtype.is_floating_point or dtype.is_complex)
    if want is not None and is_inexact and collective in REDUCING and op in ("sum", "mean", "product"):
        everybody = [given(collective, count, rank, comm.size, dtype, make) for rank in range(comm.size)]
        rows = [each[comm.rank] for each in everybody] if collective == "reduce_scatter" else everybody
        near(found, rows, op, name)
    else:
        same(found, want, name)
    if got is not tensor and collective != "broadcast":
        same(read(tensor), given(collective, count, comm.rank, comm.size, dtype, make), f"{name}: its input")
    return got


def near(got: Tensor, rows: Sequence[Tensor], op: str, name: str) -> None:
    """Check that the error is at most one rounding per rank: (p - 1) eps sum|x|, and one eps more for a mean."""
    wide = torch.complex128 if got.is_complex() else torch.float64
    exact = torch.stack([row.to(wide) for row in rows])
    size, eps = len(rows), torch.finfo(got.dtype).eps
    if op == "product":
        want, bound = exact.prod(0), exact.prod(0).abs() * size * eps
    else:
        divisor = size if op == "mean" else 1
        want, bound = exact.sum(0) / divisor, exact.abs().sum(0) * size * eps / divisor
    want = want.to(got.dtype).to(wide)  # overflow gives infinity
    bad = ((got.to(wide) - want).abs() > bound + torch.finfo(got.dtype).tiny).nonzero().view(-1)
    assert got.dtype == rows[0].dtype, f"{name}: got {got.dtype}"
    assert not len(bad), f"{name}: {len(bad)} elements are too far off, the first is {bad[:1]}: {got[bad[:1]]}"


def same(got: Tensor | None, want: Tensor | None, name: str) -> None:
    """Check that two tensors are equal in shape, dtype and bits."""
    if got is None or want is None:
        assert got is want, f"{name}: got {got}, expected {want}"
        return
    assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{name}: got {got.shape} of {got.dtype}"
    if not torch.equal(bits(got), bits(want)):
        different = (bits(got) != bits(want)).nonzero().view(-1)
        first = int(different[0]) // got.element_size()
        flat = got.detach().reshape(-1)[first], want.reshape(-1)[first]
        raise AssertionError(f"{name}: {len(different)} bytes differ, the first in element {first}: {flat}")


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def small_sizes(size: int) -> list[int]:
    return sorted({0, 1, 2, size - 1, size, size + 1, 17})


def edge_sizes(dtype: torch.dtype) -> list[int]:
    """Return numbers of elements around a slot and around a piece of a message, and an odd one."""
    slot, piece = SLOT_BYTES // dtype.itemsize, PIECE // dtype.itemsize
    return [slot - 1, slot, slot + 1, piece - 1, piece, piece + 1, 2 * piece + 3, 100_003]


def open_files() -> dict[str, str]:
    """Return this process's file descriptors and what each is."""
    names = os.listdir("/proc/self/fd")
    return {name: os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")}
