"""Names of stores, those of MXNet and its calls, and the store chosen for the job in the environment."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Communicator, spawn
from gangline.kvstore import Trainer, create
from gangline.kvstore.default_store import default_store, job_store
from gangline.kvstore.parameter_server.store import DistStore

WORDS = [("dist", *others) for others in (("sync",), ("async",), ("device",), ("sync", "device"), ("async", "device"))]


@pytest.mark.parametrize("words", WORDS)
def test_the_words_of_a_store_may_have_any_order(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(DistStore, "__init__", lambda _, name: made.append(name))
    names = ["_".join(order) for order in permutations(words)]
    for name in names:
        store = create(name)
        store.type = name
        assert store.is_async == ("async" in words)
    assert made == names


@pytest.mark.parametrize("name", ["dist_sync_async", "dist_sync_sync", "dist_sync_p3", "sync", "dist_nccl"])
def test_other_words_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no store named '{name}'"):
        create(name)


def test_mxnets_calls_of_a_store() -> None:
    with create("local") as kv:
        kv.init("w", torch.zeros(2))
        kv._set_updater(lambda key, summed, stored: stored.sub_(summed))
        kv.push("w", torch.ones(2))
        kv._barrier()
        kv.pull("w", out := torch.empty(2), 0, False)
        assert out.tolist() == [-1, -1]
        kv.pull("w", out, ignore_sparse=True)


def test_gluons_loop_of_one_worker() -> None:
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    trainer = Trainer([weight, other], "sgd", {"learning_rate": 1.0}, "local", {"type": "fp16"}, False)
    assert trainer.kvstore.compresses
    (weight.sum() + other.sum()).backward()  # type: ignore[no-untyped-call]
    trainer.allreduce_grads()
    weight.grad.clamp_(max=0.5)  # type: ignore[union-attr]
    trainer.update(1, ignore_stale_grad=True)
    assert (weight.tolist(), other.tolist()) == ([-0.5, -0.5], [-1, -1])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    trainer.step(1, ignore_stale_grad=True)  # that of ``other`` is the last step's
    assert (weight.tolist(), other.tolist()) == ([-2, -2], [-1, -1])


def gluons_arguments(comm: Communicator) -> list[str]:
    found = []
    with create("allreduce", communicator=comm) as kv:
        weight = nn.Parameter(torch.zeros(2))
        for update_on_kvstore in (False, True):
            try:
                trainer = Trainer([weight], "sgd", {}, kv, update_on_kvstore=update_on_kvstore)
            except ValueError as error:
                found.append(str(error))
        calls: list[Any] = [trainer.allreduce_grads, lambda: trainer.update(1)]
        for call in calls:
            with pytest.raises(RuntimeError) as caught:
                call()
            found.append(str(caught.value))
    return found


def test_what_needs_gradients_on_the_workers_names_the_replacement() -> None:
    for found in spawn(gluons_arguments, 2, threads=1):
        assert [text.partition(" the store updates")[0] for text in found] == [
            "update_on_kvstore is False, but",
            "allreduce_grads() is for one worker:",
            "update() is for one worker:",
        ]
        assert all("gangline.DistributedOptimizer" in text and "clip_global_norm" in text for text in found)


# The store of a job


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
