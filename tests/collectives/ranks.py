"""Ranks as threads, bootstrap exchanges, and comparison of tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gangline.collectives.communicator import Communicator, in_process, open_communicator
from gangline.collectives.errors import DeadNodeError
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.tuner import SHARED_LIMIT

HALVES = (torch.float16, torch.bfloat16)
SLOT_BYTES = SHARED_LIMIT
LARGE = SLOT_BYTES // 4 + 4_011
"""Number of 4-byte elements that exceed a slot and that no number of ranks divides."""
PATIENT = SimpleNamespace(check=lambda missing: None)
"""Wait policy without limits."""


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
    """Run as `in_threads`, but return errors as results.

    The threads share a processor, since they share Python's lock: on two they take four times as long.
    """
    processors = sorted(os.sched_getaffinity(0))
    processor = processors[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(processors)]
    comms = in_process(ranks, timeout=timeout) if isinstance(ranks, int) else ranks
    results: list[Any] = [None] * len(comms)

    def run(comm: Communicator) -> None:
        os.sched_setaffinity(0, [processor])  # of this thread
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
    plain = tensor.detach().resolve_neg().resolve_conj().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def open_files() -> dict[str, str]:
    """Return this process's file descriptors and what each is."""
    names = os.listdir("/proc/self/fd")
    return {name: os.readlink(f"/proc/self/fd/{name}") for name in names if os.path.lexists(f"/proc/self/fd/{name}")}
