"""Jobs that run many cells of the grid in the same processes, each on a store of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gangline.horovod.torch as hvd
from gangline import Communicator, spawn, torch_backend
from gangline.kvstore import KVStore, create
from gangline.kvstore.parameter_server.store import _closed_jobs
from gangline.launcher.job import free_ports
from tests.fronts.fronts import FRONTS, SITUATIONS, Place, play
from tests.kvstore.parameter_server.in_process import Job

Cell = tuple[str, str]
"""Front and situation."""
Outcome = str | list[float] | None
"""Error, weights, or None on a worker that has none."""
OF_STORES = [name for name in FRONTS if name not in ("horovod", "balance")]
STORES: dict[str, list[str]] = {
    "local": OF_STORES,
    "device": OF_STORES,
    "dist_async": OF_STORES,  # of one worker: then it has a reference
    "allreduce": OF_STORES,
    "dist_sync": OF_STORES,
    "the default": [name for name in FRONTS if name not in ("KVStore", "balance")],
    "gloo": ["balance"],
    "gangline": ["balance"],
}
"""Stores, or for `balance` backends, with their fronts."""


def run(store: str, cells: Sequence[Cell], folder: Path) -> list[list[Outcome]]:
    """Return what each worker of a job has for each cell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_TIMEOUT", "30")
        if store in ("local", "device"):
            patch.chdir(folder)
            return [_all(cells, 0, 1, partial(_created, store))]
        workers = 1 if store == "dist_async" else 2
        ports = free_ports(len(cells)) if store == "the default" else []
        return spawn(_in_job, workers, store, cells, str(folder), ports, threads=1, timeout=60)


@contextmanager
def _created(name: str, *_: object) -> Iterator[Callable[[], KVStore]]:
    """Provide a function that makes stores, which are closed in the end."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(create(name))


def _in_job(comm: Communicator, store: str, cells: Sequence[Cell], folder: str, ports: list[int]) -> list[Outcome]:
    os.chdir(folder)
    all_cells = partial(_all, cells, comm.rank, comm.size)
    if store.startswith("dist_"):
        return all_cells(partial(_over_servers, comm, store))
    if store == "the default":
        return all_cells(partial(_in_environment, comm, iter(ports)))
    if store in ("gloo", "gangline"):
        assert torch_backend
        dist.init_process_group(store, init_method=f"file://{folder}/{store}", rank=comm.rank, world_size=comm.size)
        try:
            return all_cells(partial(_created, store))
        finally:
            dist.destroy_process_group()
    return all_cells(partial(_over_collectives, comm))


@contextmanager
def _over_collectives(comm: Communicator, *_: object) -> Iterator[Callable[[], KVStore]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(create("allreduce", communicator=comm))


@contextmanager
def _over_servers(comm: Communicator, name: str, *_: object) -> Iterator[Callable[[], KVStore]]:
    """Provide stores of a job, whose scheduler and server run in rank 0."""
    with ExitStack() as stack:
        job = stack.enter_context(Job(comm.size)) if not comm.rank else None
        port = int(comm.broadcast(torch.tensor(job.scheduler.port if job is not None else 0)))
        os.environ.update(DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT=str(port), DMLC_WORKER_ID=str(comm.rank))
        os.environ.update(DMLC_NUM_WORKER=str(comm.size), DMLC_NUM_SERVER="1")
        _closed_jobs.clear()  # a scheduler may get the port of an earlier one
        yield lambda: stack.enter_context(create(name))


@contextmanager
def _in_environment(comm: Communicator, ports: Iterator[int], front: str) -> Iterator[None]:
    """Set the environment as a launcher does."""
    variables = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": comm.rank, "MASTER_PORT": next(ports)}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    if front == "horovod":
        hvd.init()
    try:
        yield None
    finally:
        if front == "horovod":
            hvd.shutdown()


def _all(cells: Sequence[Cell], rank: int, workers: int, stores: Callable[[str], Any]) -> list[Outcome]:
    return [_outcome(front, situation, rank, workers, stores) for front, situation in cells]


def _outcome(front: str, situation: str, rank: int, workers: int, stores: Callable[[str], Any]) -> Outcome:
    with stores(front) as store:
        try:
            return play(FRONTS[front], SITUATIONS[situation], Place(rank, workers, store, f"{front}, {situation}"))
        except Exception as error:  # noqa: BLE001  the grid says which
            return f"{type(error).__name__}: {error}"
