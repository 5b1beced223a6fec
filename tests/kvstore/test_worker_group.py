"""Calls of all workers: names that differ, calls that one rank refuses, gather; in `allreduce` and `dist_sync`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gangline import Communicator, kvstore
from gangline.kvstore import KVStore
from tests.collectives.stage import Actor, Stage
from tests.kvstore.keyed import said
from tests.kvstore.parameter_server.cases import run
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(110)


# Names


def _different_calls(kv: KVStore) -> list[tuple[str, str]]:
    first = kv.rank == 0
    return [
        said(kv.barrier if first else lambda: kv.init("named", torch.zeros(2))),
        said(lambda: kv.exchange(b"1")) if first else said(kv.barrier),
        said(lambda: kv.group.all_gather(1, "end of epoch" if first else "step")),
        said(lambda: kv.group.gather(1, "parts") if first else kv.group.all_gather(1, "parts")),
        said(lambda: kv.group.broadcast(1, "save_checkpoint") if first else kv.group.broadcast(1, "step")),
        said(lambda: kv.init("named", torch.zeros(2))),  # works as before
    ]


NAMES = [
    "rank 0 called barrier, rank 1 called init",
    "rank 0 called exchange, rank 1 called barrier",
    "rank 0 called end of epoch, rank 1 called step",
    "rank 0 called parts, to rank 0, rank 1 called parts",
    "rank 0 called save_checkpoint, rank 1 called step; expected the same calls in the same order on all 3; call "
    "save_checkpoint on every worker, not only on rank 0: it writes on rank 0 alone",
]


def test_different_calls_that_meet_are_an_error_of_all_ranks_that_names_both(told: Told) -> None:
    results = told[_different_calls.__name__]
    for found in results:
        assert found == results[0]
        assert [kind for kind, _ in found] == ["MismatchError"] * 5 + ["returned"]
        for (_, text), words in zip(found, NAMES, strict=False):
            assert words in text.replace("rank 2", "rank 1")


# Refusals


def _refused(kv: KVStore) -> list[tuple[str, str]]:
    odd = kv.rank == 1
    kv.init("a", torch.zeros(2))
    return [
        said(lambda: kv.init("a" if odd else "b", torch.zeros(2))),
        said(lambda: kv.set_optimizer(("nothing" if odd else "sgd", {"learning_rate": 0.1}))),
        said(lambda: kv.assign("a", torch.zeros(3 if odd else 2))),
        said(lambda: kv.broadcast("c", torch.zeros(2), torch.zeros(3 if odd else 2))),
        said(lambda: kv.set_gradient_compression({"type": "nothing" if odd else "2bit"})),
        said(lambda: kv.load_optimizer_states("/nowhere")),
        said(lambda: kv.init("b", torch.zeros(2))),  # works as before
    ]


REFUSALS = [
    ("ValueError", "init was refused: key 'a' is initialised already"),
    ("ValueError", "set_optimizer was refused: "),
    ("ValueError", "assign was refused: key 'a' has shape (2,), but got a tensor of shape (3,)"),
    ("ValueError", "broadcast was refused: key 'c' has shape (2,), but got a tensor of shape (3,)"),
    ("ValueError", "set_gradient_compression was refused: "),
]


def test_a_call_that_one_rank_refuses_fails_on_all_ranks_with_the_reason(told: Told) -> None:
    for rank, found in enumerate(told[_refused.__name__]):
        for (kind, text), (own, words) in zip(found, REFUSALS, strict=False):
            if rank != 1 or told["name"] == ["allreduce"] * 3:
                assert (kind, f"rank 1 of 3: {words}" in text) == ("MismatchError", True), text
            else:
                assert (kind, text != "") == (own, True), text
        assert found[5][0] == "RuntimeError"  # all ranks refuse it for the same reason
        assert found[6][0] == "returned"


def _late_error() -> list[tuple[str, str]]:
    found = []
    with kvstore.create("dist_sync") as kv:
        for call in (kv.barrier, lambda: kv.set_optimizer("sgd"), lambda: kv.group.all_gather(1, "step")):
            if kv.rank == 1:
                kv._keep_late_error(ValueError("a push was lost"))  # type: ignore[attr-defined]
            found.append(said(call))
        kv.barrier()
    return found


def test_an_error_of_an_earlier_push_on_one_rank_fails_the_next_call_of_all() -> None:
    first, second = run_job(_late_error, 2, 1)
    assert second == [("ValueError", "a push was lost")] * 3
    for (kind, text), name in zip(first, ("barrier", "set_optimizer", "step"), strict=True):
        assert (kind, f"rank 1 of 2: {name} was refused: a push was lost" in text) == ("MismatchError", True)


# Data


def _gathered(kv: KVStore) -> list[Any]:
    group = kv.group
    value = {"rank": kv.rank, "tensor": torch.full((kv.rank + 1,), 2.0), "bytes": b"x" * kv.rank}
    whole = group.all_gather(value, "all")
    assert [one["rank"] for one in whole] == [0, 1, 2]
    assert [one["tensor"].tolist() for one in whole] == [[2.0] * (rank + 1) for rank in range(3)]
    parts = [group.gather(value, f"to {root}", root) for root in range(3)]
    assert [len(one) for one in parts] == [3 * (rank == kv.rank) for rank in range(3)]
    assert [one["bytes"] for one in parts[kv.rank]] == [b"", b"x", b"xx"]
    return [group.broadcast(kv.rank, "from 2", 2), group.broadcast([1, None] if kv.rank == 0 else None, "from 0")]


def test_plain_data_and_tensors_are_gathered_and_broadcast(told: Told) -> None:
    assert told[_gathered.__name__] == [[2, [1, None]]] * 3


def _watch_deaths(comm: Communicator, path: str) -> None:
    kv = kvstore.create("allreduce", communicator=comm)
    actor = Actor(comm.rank, path)
    while actor.hear() != "end":
        actor.tell([kv.dead_nodes(), kv.num_dead_nodes()])


@pytest.mark.slow
def test_a_dead_worker_of_an_allreduce_store_is_named() -> None:
    with Stage(_watch_deaths, 3, transport="auto") as stage:

        def dead() -> Any:
            stage.say(0, "dead")
            return stage.heard(0)

        assert dead() == [[], 0]
        stage.kill(2)
        while not (found := dead())[0]:  # asked first: the number may already be 1 while the names were still none
            pass
        assert found == [["worker 2"], 1]
        for rank in range(2):
            stage.say(rank, "end")
        stage.outcomes()


def _failing_rank(kv: KVStore) -> tuple[str, str]:
    def fail() -> None:
        raise FileNotFoundError("no such file: weights")

    return said(lambda: kv.group.run_on_rank(fail, "reading", 1))


def test_an_error_of_one_rank_keeps_its_type_on_the_others(told: Told) -> None:
    assert told[_failing_rank.__name__] == [("FileNotFoundError", "no such file: weights")] * 3


PLAYS = [_different_calls, _refused, _gathered, _failing_rank]
Told = dict[str, list[Any]]
"""Results of the three workers of a store, by the name of the play."""


def play_all(kv: KVStore) -> dict[str, Any]:
    return {"name": kv.type} | {play.__name__: play(kv) for play in PLAYS}


@pytest.fixture(scope="module", params=["allreduce", "dist_sync"])
def told(request: pytest.FixtureRequest) -> Told:
    found = run(request.param, 3, 1, [play_all])
    return {name: [of_rank[name] for (of_rank,) in found] for name in found[0][0]}
