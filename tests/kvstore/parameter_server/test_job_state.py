"""State of the scheduler: places and records of restarted processes, and the views of elastic jobs."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.kvstore.parameter_server.protocol import ROUND, Collective, CollectiveFailed, CollectiveResult, Register
from gangline.kvstore.parameter_server.scheduler.job_state import JobState, Member, MemberState
from gangline.kvstore.parameter_server.scheduler.views import Views

FULL = (
    "the job has its 2 workers already; a worker has one dist_* store, for all its keys: give the first one to what "
    "needs one, for example Trainer(..., kvstore=first.kvstore) with names of its own for the parameters"
)


def register(rank: int, incarnation: int = 0) -> Register:
    return Register("worker", rank, ("elsewhere", 1, 1), "", "", incarnation)


def started(**options: Any) -> JobState:
    """Return the state of a started job of two workers."""
    state = JobState(2, 0, **options)
    for rank in range(2):
        identity = bytes([rank + 1]) * 16
        state.members[identity] = Member(identity, register(rank))
    assert state.assign_ranks()
    return state


@pytest.fixture
def state() -> JobState:
    return started(restarts=1)


def call(state: JobState, number: int, name: str = "barrier", ranks: tuple[int, ...] = (0, 1)) -> list[int]:
    """Call a collective on workers; return the numbers of those that have ended."""
    for rank in ranks:
        state.add(rank, Collective(number, name, -1, b"%d" % rank, ""))
    return state.complete()


def test_a_restarted_worker_takes_a_place_only_with_a_higher_number(state: JobState) -> None:
    assert state.rejection(register(1)) == FULL
    assert state.rejection(register(1, 1)) == ""
    assert state.rejection(register(2, 1)) == "worker 2 is not one of this job's 2 workers"
    old = state.predecessor(register(1, 1))
    assert old is not None
    state.enter(Member(b"new", register(1, 1)), old)
    assert (state.view, state.members[b"new"].rank, state.members[b"new"].is_restarted) == (2, 1, True)
    assert state.rejection(register(1, 1)) == "worker 1 is not one of this job's 2 workers"
    state.members[b"new"].state, state.members[b"new"].why = MemberState.DEAD, "was killed"
    assert state.rejection(register(1, 2)) == "worker 1 cannot be started again: it was killed"
    state.allows_restarts = False
    assert state.rejection(register(1, 2)) == FULL


@pytest.mark.parametrize(
    ("servers", "memory"),
    [
        ([("a", 8, True), ("b", 9, True)], [8, 9]),
        ([("a", 1000, False), ("b", 1400, False)], []),
        ([("a", 1000, False), ("b", 1600, False)], [1000, 1600]),
        ([("a", 1000, False), ("a", 1600, False), ("b", 1400, False)], [500, 500, 1400]),  # two share a host's memory
        ([("a", 1000, True), ("b", 1400, False)], []),
        ([("a", 0, False), ("b", 1000, False)], []),
        ([("a", 5, False)], []),
    ],
)
def test_servers_of_unequal_memory_are_told_apart(servers: list[tuple[str, int, bool]], memory: list[int]) -> None:
    def server(rank: int, incarnation: int, host: str, nbytes: int, is_set: bool) -> Register:
        return Register("server", rank, [host, 1, 1], "", "", incarnation, nbytes, is_set)

    state = JobState(0, len(servers), restarts=1)
    for rank, one in enumerate(servers):
        state.members[b"%d" % rank] = Member(b"%d" % rank, server(rank, 0, *one))
    assert state.assign_ranks()
    assert state.server_memory() == memory
    new = server(0, 1, "a", 7, False)  # a restarted server has the place of the former one
    state.enter(Member(b"new", new), state.predecessor(new))
    assert state.server_memory() == memory


def test_the_outcomes_of_the_start_and_of_the_last_two_rounds_are_kept(state: JobState) -> None:
    start, last = range(1, 21), range(9 * ROUND + 1, 9 * ROUND + 21)
    for number in [*start, *(step * ROUND + 1 for step in range(1, 9)), *last]:
        assert call(state, number) == [number]
    assert sorted(state.outcomes) == [*start, 8 * ROUND + 1, *last]
    again = state.add(1, Collective(3, "barrier", -1, b"", ""))
    assert again == CollectiveResult(3, [b"0", b"1"])
    over = state.add(1, Collective(5 * ROUND + 1, "barrier", -1, b"", ""))
    assert over == CollectiveFailed(
        5 * ROUND + 1, f"rank 1 called barrier as its collective {5 * ROUND + 1}, which is over"
    )
    other = state.add(1, Collective(3, "init", -1, b"", ""))
    assert isinstance(other, CollectiveFailed)
    assert "barrier" in other.text
    assert "init" in other.text


def test_collectives_behind_which_a_worker_was_restarted_go_on_without_it(state: JobState) -> None:
    assert call(state, 3 * ROUND + 1, ranks=(0,)) == []
    state.of_role("worker")[1].first_number = 4 * ROUND
    assert state.complete() == [3 * ROUND + 1]
    assert state.outcomes[3 * ROUND + 1].data == [b"0", b""]
    assert call(state, 1, "init", ranks=(0,)) == []  # all set up the store together
    assert call(state, 4 * ROUND + 1, ranks=(0,)) == []


def test_workers_that_wait_in_different_rounds_get_an_error(state: JobState) -> None:
    assert call(state, 2 * ROUND + 1, "evaluation", ranks=(0,)) == []
    assert call(state, 3 * ROUND + 1, "barrier", ranks=(1,)) == [2 * ROUND + 1]
    error = state.outcomes[2 * ROUND + 1].error
    assert "evaluation" in error
    assert "barrier, after another push" in error


# Views: requests, answers, first rounds, and what workers may know when


@pytest.fixture
def views() -> Views:
    return Views(1, 4, 2)


def agree(views: Views, begun: dict[int, int], servers: int = 1) -> tuple[int, frozenset[int]]:
    """Answer for workers and servers; return the new view."""
    assert views.ask()
    for rank, step in begun.items():
        views.answer("worker", rank, views.asked, step)
    assert views.make()
    for rank in range(servers):
        assert not views.confirm(range(servers))
        views.answer("server", rank, views.asked, 0)
    assert views.confirm(range(servers))
    return views.table[-1]


@pytest.mark.parametrize(("begun", "first"), [(0, 1), (1, 3), (2, 3), (3, 4), (7, 8)])
def test_a_view_begins_in_a_round_that_nobody_has_begun_and_not_in_round_2(
    views: Views, begun: int, first: int
) -> None:
    views.enter(2)
    assert agree(views, {0: begun, 1: 0}) == (first, {0, 1, 2})
    assert [views.of_round(number) for number in (0, first - 1, first, 90)] == [{0, 1}] * 2 + [{0, 1, 2}] * 2


def test_a_view_never_begins_before_the_one_that_it_follows(views: Views) -> None:
    views.enter(2)
    assert agree(views, {0: 9, 1: 3}) == (10, {0, 1, 2})
    assert views.refusal(0).startswith("worker 0 cannot leave")
    assert views.refusal(1) == ""
    assert agree(views, {0: 9, 1: 4, 2: 9}) == (10, {0, 2})
    assert views.of_round(10) == {0, 2}


def test_workers_do_not_know_a_view_before_all_servers_follow_it(views: Views) -> None:
    assert views.refusal(1) == ""
    assert views.ask()
    views.answer("worker", 0, 1, 4)
    views.answer("server", 0, 0, 0)  # that it follows view 0
    assert not views.make()
    views.answer("worker", 0, 1, 6)  # a repeat, which counts as the first one
    views.answer("worker", 1, 1, 4)
    assert views.make()
    assert (views.known_to("worker"), views.known_to("server")) == ([(1, [0, 1])], [(1, [0, 1]), (5, [0])])
    views.answer("server", 0, 0, 0)
    assert not views.confirm([0])
    views.answer("server", 0, 1, 0)
    assert views.confirm([0])
    assert views.known_to("worker") == views.known_to("server")


def test_requests_that_come_during_an_agreement_wait_for_the_next_one(views: Views) -> None:
    views.enter(2)
    assert views.ask()
    views.answer("worker", 0, 1, 3)
    views.enter(3)  # in time
    views.answer("worker", 1, 1, 3)
    assert views.make()
    assert views.table[-1] == (4, {0, 1, 2, 3})
    assert views.refusal(3) == ""  # too late
    assert not views.ask()
    views.answer("server", 0, 1, 0)
    assert views.confirm([0])
    assert agree(views, {0: 3, 1: 3, 2: 3, 3: 3}) == (4, {0, 1, 2})


def test_the_least_number_counts_those_that_are_leaving() -> None:
    views = Views(2, 4, 4)
    assert [views.refusal(rank) for rank in (3, 2)] == ["", ""]
    assert views.refusal(1) == "worker 1 cannot leave: the job needs 2 workers or more, and has 2"
    assert views.refusal(3) == ""  # a repeat
    with pytest.raises(ValueError, match="of 2 to 4 workers cannot begin with 1"):
        Views(2, 4, 1)


def test_a_worker_that_leaves_before_it_takes_part_is_never_waited_for(views: Views) -> None:
    views.enter(2)
    views.forget(2)
    assert not views.ask()
    assert not views.has_part(2)


def test_collectives_wait_for_the_workers_of_their_round() -> None:
    state = started(bounds=(1, 4))
    new = register(2)
    assert state.rejection(new) == ""
    state.enter(Member(b"new", new), None)
    assert state.rejection(new).startswith("rank 2 was given before")
    assert (state.view, state.workers, state.members[b"new"].is_restarted) == (2, 3, True)
    state.views.enter(2)
    assert agree(state.views, {0: 3, 1: 3}) == (4, {0, 1, 2})
    for number, ranks in ((2, (0, 1)), (3 * ROUND + 1, (0, 1)), (4 * ROUND + 1, (0, 1, 2))):
        for rank in ranks:
            assert call(state, number, ranks=(rank,)) == ([number] if rank == ranks[-1] else [])
