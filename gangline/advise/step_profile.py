"""Measured speed and memory of each rank: the user's training step at a few batch sizes."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from gangline.advise.split_plan import RankProfile
from gangline.kvstore import create
from gangline.kvstore.default_store import num_workers
from gangline.models.balance.speed_model import fit_line
from gangline.models.executor.executor import is_out_of_memory

_GIB = float(2**30)


def measure_ranks(step: Callable[[int], object], sizes: Sequence[int], runs: int) -> list[RankProfile] | None:
    """Measure a step on every rank of this job at the same time. Collective in a job.

    ``step`` runs forward and backward of so many samples on this rank's device, without other ranks; its error is
    raised on all ranks. The median of the runs of each size counts.

    Returns:
        One profile per rank on rank 0, and None on the other ranks.
    """
    if num_workers() == 1:
        return [measure_step(step, sizes, runs)]
    with create("allreduce") as store:
        store.group.barrier("measure")  # ranks that share a machine run at the same time, as in training
        try:
            own: object = asdict(measure_step(step, sizes, runs))
        except Exception as error:  # also raised on all other ranks
            store.group.all_gather(f"{type(error).__name__}: {error}", "measure")
            raise
        rows = store.group.all_gather(own, "measure")
        for rank, row in enumerate(rows):
            if isinstance(row, str):
                raise RuntimeError(f"the step failed on rank {rank}: {row}")
        return [RankProfile(**row) for row in rows] if store.rank == 0 else None


def measure_step(step: Callable[[int], object], sizes: Sequence[int], runs: int) -> RankProfile:
    """Measure a step on this rank; a size that does not fit into memory ends the series."""
    times: list[tuple[float, float, float]] = []  # samples, seconds, weight
    peaks: list[tuple[float, float, float]] = []
    for size in sizes:
        try:
            step(size)  # warm-up
            if _uses_gpu():
                torch.cuda.reset_peak_memory_stats()
            seconds = statistics.median(_seconds(step, size) for _ in range(runs))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        times.append((float(size), seconds, 1.0))
        if _uses_gpu():
            peaks.append((float(size), torch.cuda.max_memory_reserved() / _GIB, 1.0))
    if len(times) < 2:
        raise RuntimeError(
            f"memory does not suffice for {sizes[len(times)]} samples; expected two sizes that fit: use smaller --sizes"
        )
    time_fit = fit_line(times)
    memory_fit = fit_line(peaks) if peaks else None
    largest = int(times[-1][0])
    return RankProfile(
        device=f"{socket.gethostname()} {_device_name()}",
        fixed=time_fit.fixed,
        per_sample=time_fit.per_sample,
        memory=torch.cuda.get_device_properties().total_memory / _GIB if peaks else None,
        fixed_memory=memory_fit.fixed if memory_fit else 0.0,
        sample_memory=memory_fit.per_sample if memory_fit else None,
        largest=largest,
        samples_per_second=largest / time_fit.seconds(largest),
    )


def _seconds(step: Callable[[int], object], size: int) -> float:
    begin = time.perf_counter()
    step(size)
    if _uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _device_name() -> str:
    if not _uses_gpu():
        return "cpu"
    return f"gpu({torch.cuda.current_device()}) {torch.cuda.get_device_name()}"
