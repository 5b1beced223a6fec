"""Tests of the store chosen for the job in the environment."""

from __future__ import annotations

import pytest

from gangline.kvstore.default_store import default_store, job_store

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ROLE = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1"}


@pytest.mark.parametrize(
    ("environment", "store"),
    [
        ({}, "device"),
        (PLACE, "allreduce"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"} | PLACE, "allreduce"),
        (ROLE | PLACE | {"DMLC_NUM_SERVER": "2"}, "dist_sync"),
        (ROLE | PLACE | {"DMLC_NUM_SERVER": "0"}, "allreduce"),
        (PLACE | {"WORLD_SIZE": "1"}, "device"),
        (ROLE | {"DMLC_NUM_SERVER": "1"}, "dist_sync"),
        (ROLE | {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}, "device"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "5000"}, "allreduce"),
        (SLURM | {"SLURM_STEP_ID": "0"}, "allreduce"),
        (SLURM, "device"),  # in the job's batch script
        (SLURM | PLACE, "allreduce"),  # torchrun in it
    ],
)
def test_processes_of_one_job_are_joined_by_default(environment: dict[str, str], store: str) -> None:
    assert default_store(environment) == store
    assert store == "device" or job_store(environment) == store


def test_without_a_job_the_error_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="there is none in the environment; start the program with `gangline launch"):
        job_store({})


def test_an_invalid_rank_is_named() -> None:
    with pytest.raises(ValueError, match="RANK"):
        job_store(PLACE | {"RANK": "five"})
