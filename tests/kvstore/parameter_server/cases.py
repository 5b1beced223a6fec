"""Test cases that the workers of one parameter-server job run one after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gangline import kvstore
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


def check(name: str, workers: int, servers: int, cases: Sequence[Case], **options: Any) -> None:
    """Run a job's cases and check that each returns the same on all workers."""
    told = run_job(play, workers, servers, name, list(cases), options)
    for index, case in enumerate(cases):
        of_case = [of_rank[index] for of_rank in told]
        for rank, one in enumerate(of_case):
            if isinstance(one, Failure):
                pytest.fail(f"{case.__name__} on rank {rank}:\n{one}")
        assert all(one == of_case[0] for one in of_case), of_case
