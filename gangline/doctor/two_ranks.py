"""Check of a small job on this host: two ranks that reduce."""

from __future__ import annotations

import time
from typing import Any

import torch

from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import GanglineError
from gangline.collectives.processes.spawning import spawn
from gangline.doctor.finding import Finding, Status

_ELEMENTS = 1 << 20
_SMALL_CALLS = 100
_LARGE_CALLS = 5
_LONG_SECONDS = 0.5


def two_ranks() -> list[Finding]:
    """Check that two ranks on this host reduce tensors to the right sum."""
    name = "all-reduce of 2 ranks"
    try:
        measured, _ = spawn(measure_all_reduce, 2, threads=1)
    except (GanglineError, OSError, RuntimeError, ValueError) as error:
        remedy = "the other lines say what is missing on this host; `gangline -v check --only two-ranks` shows more"
        return [Finding(Status.BROKEN, name, f"{type(error).__name__}: {error}", remedy)]
    return [finding_of_all_reduce(name, measured)]


def measure_all_reduce(comm: Communicator) -> dict[str, Any]:
    """Reduce a small and a large tensor over all ranks; return the seconds of a call and whether the sums were right.

    Collective: all ranks must call it.
    """
    small = torch.ones(1, dtype=torch.float64, device="cpu")
    given = torch.arange(_ELEMENTS, dtype=torch.float64, device="cpu") + comm.rank
    expected = torch.arange(_ELEMENTS, dtype=torch.float64, device="cpu") * comm.size + sum(range(comm.size))
    out = torch.empty_like(given)
    begin = time.perf_counter()
    comm.all_reduce(given, out=out)
    first = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device="cpu")
    comm.all_reduce(first, "max")  # all ranks must make equally many calls
    is_right = torch.equal(out, expected)
    seconds = []
    for tensor, result, calls in (
        (small, small, _SMALL_CALLS),
        (given, out, 1 if first.item() > _LONG_SECONDS else _LARGE_CALLS),
    ):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            comm.all_reduce(tensor, "mean" if tensor is small else "sum", out=result)
        seconds.append((time.perf_counter() - begin) / calls)
    is_right = is_right and torch.equal(out, expected) and small.item() == 1
    return {"transport": comm.transport, "small": seconds[0], "large": seconds[1], "is_right": is_right}


def finding_of_all_reduce(name: str, measured: dict[str, Any]) -> Finding:
    """Return the finding for what `measure_all_reduce` returned."""
    if not measured["is_right"]:
        remedy = (
            "the memory or a network card is faulty: run a memory test; report it with the output of `gangline env`"
        )
        return Finding(Status.BROKEN, name, f"the sum is wrong by {measured['transport']}", remedy)
    speed = f"8 B in {measured['small'] * 1e6:.0f} us, 8 MiB in {measured['large'] * 1e3:.1f} ms"
    return Finding(Status.OK, name, f"right by {measured['transport']}: {speed}")
