"""Tests of the store chosen for the job in the environment."""

from __future__ import annotations

import pytest

from gangline.kvstore.default_store import job_store

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ROLE = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2"}


@pytest.mark.parametrize(
    ("environment", "store"),
    [
        (ROLE | {"DMLC_NUM_SERVER": "1"}, "dist_sync"),
        (ROLE | PLACE | {"DMLC_NUM_SERVER": "2"}, "dist_sync"),
        (ROLE | PLACE | {"DMLC_NUM_SERVER": "0"}, "allreduce"),
        (PLACE, "allreduce"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"} | PLACE, "allreduce"),
    ],
)
def test_servers_are_used_if_the_job_has_any(environment: dict[str, str], store: str) -> None:
    assert job_store(environment) == store


def test_without_a_job_the_error_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="there is none in the environment; start the program with `gangline launch"):
        job_store({})


def test_an_invalid_rank_is_named() -> None:
    with pytest.raises(ValueError, match="RANK"):
        job_store(PLACE | {"RANK": "five"})
