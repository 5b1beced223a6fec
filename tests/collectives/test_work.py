"""Work and WorkQueue: order, errors, timeouts and close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.collectives.errors import StallError
from gangline.collectives.torch_backend.work import GroupWork
from gangline.collectives.work import Work, WorkQueue
from tests.collectives.ranks import run_together

LIMIT = 20.0
"""Time limit of a wait, in seconds."""


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    made = WorkQueue()
    yield made
    made.close()


@contextmanager
def blocked(queue: WorkQueue) -> Iterator[threading.Event]:
    """Keep the queue's thread busy with an operation of the key "blocker" within the block, or until the event."""
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        assert release.wait(LIMIT)

    work = Work("blocker")
    queue.submit(block, work, ["blocker"], 0)
    assert started.wait(LIMIT)
    try:
        yield release
    finally:
        release.set()
    work.wait(LIMIT)


def appending(order: list[str], name: str) -> Callable[[], None]:
    return lambda: order.append(name)


# -- the handle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyError("lost"), SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_an_exception_reaches_each_waiter_and_the_queue_continues(queue: WorkQueue, error: BaseException) -> None:
    joined: list[str] = []
    work, after = Work("first", appending(joined, "first")), Work("second", appending(joined, "second"))
    queue.submit(Mock(side_effect=error), work, ["w"], 0)
    queue.submit(lambda: None, after, ["w"], 0)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            work.wait(LIMIT)
        assert caught.value is error
    after.wait(LIMIT)
    assert joined == ["first", "first", "second"]  # the waiter's streams follow the operation, which may have begun
    assert (work.is_completed(), work.exception(), after.exception()) == (True, error, None)
    assert "failed" in repr(work)


# -- the order --------------------------------------------------------------------------------------------------------


def submit_all(queue: WorkQueue, jobs: list[tuple[str, list[str], int]]) -> list[str]:
    """Submit operations (name, keys, priority) while the queue is busy; return the order in which they ran."""
    order: list[str] = []
    works = []
    with blocked(queue):
        for name, keys, priority in jobs:
            works.append(Work(name))
            queue.submit(appending(order, name), works[-1], keys, priority)
    for work in works:
        work.wait(LIMIT)
    return order


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd"), max_size=3), st.integers(-3, 3)), max_size=10))
def test_unblocked_operations_run_by_priority(drawn: list[tuple[set[str], int]]) -> None:
    jobs = [(str(index), [*keys, *keys], priority) for index, (keys, priority) in enumerate(drawn)]
    waiting, expected = list(jobs), []
    while waiting:
        free = [job for at, job in enumerate(waiting) if not any(set(job[1]) & set(b[1]) for b in waiting[:at])]
        expected.append(max(free, key=lambda job: (job[2], -int(job[0]))))
        waiting.remove(expected[-1])
    queue = WorkQueue()
    assert submit_all(queue, jobs) == [name for name, _, _ in expected]
    queue.close()


def test_one_operation_runs_at_a_time(queue: WorkQueue) -> None:
    alone = threading.Lock()
    overlaps: list[str] = []

    def operate() -> None:
        if not alone.acquire(blocking=False):
            overlaps.append("two at once")
            return
        for _ in range(100):
            assert alone.locked()
        alone.release()

    def use(thread: int) -> None:
        for index in range(20):
            work = Work(f"{thread} {index}")
            if index % 2:
                queue.run(operate, work, [thread], 0)
            else:
                queue.submit(operate, work, [thread], index)

    run_together(partial(use, index) for index in range(3))
    queue.close()
    assert overlaps == []


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_uses_the_callers_thread_if_the_queue_is_idle(queue: WorkQueue) -> None:
    before, threads = set(threading.enumerate()), []
    works = [Work(str(index)) for index in range(5)]
    for index, work in enumerate(works):
        queue.run(lambda: threads.append(threading.current_thread()), work, [index % 2], 0)
    assert threads == [threading.current_thread()] * 5
    assert all(work.is_completed() for work in works)
    assert set(threading.enumerate()) <= before


# -- calls that their waiter may run ----------------------------------------------------------------------------------


def test_a_waiter_runs_its_call_and_the_queue_one_that_nobody_waits_for(
    queue: WorkQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.collectives.work._POLL_SECONDS", 0.5)
    monkeypatch.setattr("gangline.collectives.work._POLLING_SECONDS", LIMIT)
    wakes: list[int] = []
    threads: list[threading.Thread] = []
    monkeypatch.setattr(queue._changed, "notify_all", lambda: wakes.append(1))

    def submitted() -> Work:
        queue.submit(lambda: threads.append(threading.current_thread()), work := Work("call"), ["w"], 0, by_waiter=True)
        return work

    submitted().wait(LIMIT)  # by the thread that it starts
    for _ in range(5):
        work = submitted()
        if work.queued is not None:  # the thread may look just now
            work.queued()
        work.wait(LIMIT)
    assert threading.current_thread() in threads
    submitted().wait(LIMIT)
    assert threads[-1] is queue._thread is not None
    assert len(wakes) == 1  # the thread looks by itself


def test_a_queue_that_has_looked_for_long_must_be_woken(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.collectives.work._POLLING_SECONDS", 0)
    for _ in range(3):
        queue.submit(lambda: None, work := Work("call"), ["w"], 0, by_waiter=True)
        work.wait(LIMIT)
    assert not queue._polls


def test_wake_starts_a_call_that_nobody_waits_for(queue: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.submit(lambda: None, first := Work("call"), ["w"], 0, by_waiter=True)
    first.wait(LIMIT)
    monkeypatch.setattr("gangline.collectives.work._POLL_SECONDS", 4 * LIMIT)
    queue.submit(lambda: None, second := Work("call"), ["w"], 0)
    second.wait(LIMIT)  # the thread sleeps for long from now on
    queue.submit(lambda: None, third := Work("call"), ["w"], 0, by_waiter=True)
    assert third.wake is not None
    third.wake()
    third.wait(LIMIT)


class _EndsAsItTimesOut(Work):
    def _wait_until_over(self, timeout: float | None) -> None:
        try:
            super()._wait_until_over(timeout)
        finally:
            self.complete()


def test_a_wait_of_torch_that_times_out_as_its_call_ends_raises_the_error_of_late_calls() -> None:
    with pytest.raises(StallError, match=r"late is still running after 0\.01 s"):
        GroupWork(_EndsAsItTimesOut("late"), []).wait(timedelta(seconds=0.01))


# -- close ------------------------------------------------------------------------------------------------------------


def test_an_operation_may_close_the_queue_it_runs_in() -> None:
    queue = WorkQueue()
    closing = Work("closing")
    queue.submit(queue.close, closing, ["w"], 0)
    closing.wait(LIMIT)
    queue.close()
    assert closing.exception() is None
    with pytest.raises(RuntimeError, match=r"late.*closed"):
        queue.run(lambda: None, Work("late"), ["w"], 0)
