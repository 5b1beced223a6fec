"""Test cases that the workers of one job of any store run one after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gangline import Communicator, kvstore, spawn
from gangline.kvstore import KVStore
from tests.kvstore.parameter_server.processes import run_job

Case = Callable[[KVStore], Any]


class Failure(str):
    """Traceback of a failed case."""

    __slots__ = ()


def play(name: str, cases: Sequence[Case], options: dict[str, Any]) -> list[Any]:
    """Run cases on one store; return the result of each, or its failure."""
    told: list[Any] = []
    with kvstore.create(name, **options) as kv:
        for case in cases:
            try:
                told.append(case(kv))
            except Exception:  # noqa: BLE001  reported to the test
                told.append(Failure(traceback.format_exc()))
            kv.barrier()
    return told


def play_in(comm: Communicator, cases: Sequence[Case]) -> list[Any]:
    return play("allreduce", cases, {"communicator": comm})


def run(name: str, workers: int, servers: int, cases: Sequence[Case], **options: Any) -> list[list[Any]]:
    """Run a job's cases and return their results by worker; an allreduce store has no servers."""
    if name == "allreduce":
        told = spawn(play_in, workers, list(cases), threads=1)
    else:
        told = run_job(play, workers, servers, name, list(cases), options)
    for rank, of_rank in enumerate(told):
        for case, one in zip(cases, of_rank, strict=True):
            if isinstance(one, Failure):
                pytest.fail(f"{case.__name__} on rank {rank}:\n{one}")
    return told


def check(name: str, workers: int, servers: int, cases: Sequence[Case], **options: Any) -> None:
    """Run a job's cases and check that each returns the same on all workers."""
    told = run(name, workers, servers, cases, **options)
    for index in range(len(cases)):
        of_case = [of_rank[index] for of_rank in told]
        assert all(one == of_case[0] for one in of_case), of_case
