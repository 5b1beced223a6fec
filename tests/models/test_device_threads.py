"""DeviceThreads: the thread and the order in which calls run, and the number of torch's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from measure import spin

from gangline import Context, cpu
from gangline.models.executor.device_threads import DeviceThreads

CONTEXTS = [cpu(0), cpu(1)]
CALLERS = 6


@pytest.fixture(autouse=True)
def _threads_to_share() -> Iterator[None]:
    """Set a torch thread count that can be split into distinct shares; restore the old one afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(CALLERS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pair() -> Iterator[DeviceThreads]:
    device_threads = DeviceThreads(CONTEXTS)
    yield device_threads
    device_threads.close()


def both(function: Callable[[], object]) -> list[tuple[int, Callable[[], object]]]:
    return [(0, function), (1, function)]


def test_one_context_runs_in_the_callers_thread() -> None:
    before = threading.active_count()
    alone = DeviceThreads([cpu()])
    assert alone.run([(0, threading.get_ident)]) == [threading.get_ident()]
    assert alone.run([(0, torch.get_num_threads)]) == [CALLERS]
    assert threading.active_count() == before
    assert not alone.uses_threads
    alone.close()


def test_threads_are_named_after_their_contexts_one_for_each_place_and_end_with_close() -> None:
    contexts = [cpu(0), cpu(1), cpu(1)]
    device_threads = DeviceThreads(contexts)
    calls = [(number, threading.current_thread) for number in range(3)]
    threads = device_threads.run(calls)
    assert len({*threads, threading.current_thread()}) == 4
    assert device_threads.run(calls[::-1]) == threads[::-1]
    for thread, context in zip(threads, contexts, strict=True):
        assert thread.name.startswith(f"gangline-{context}")
        assert thread.is_alive()
    device_threads.close()
    assert not any(thread.is_alive() for thread in threads)


def test_all_calls_are_over_before_an_error_is_raised(pair: DeviceThreads) -> None:
    barrier = threading.Barrier(2)
    ended = []

    def fail() -> None:
        barrier.wait(30)
        raise ValueError("at once")

    def go_on() -> None:
        barrier.wait(30)
        spin(0.05)
        ended.append(True)

    for calls in ([(0, fail), (1, go_on)], [(0, go_on), (1, fail)]):
        ended.clear()
        with pytest.raises(ValueError, match="at once"):
            pair.run(calls)
        assert ended == [True]


def large_sum() -> None:
    torch.ones(2_000_000).add(1.0)


def backward_of_a_convolution() -> None:
    network = torch.nn.Conv2d(4, 8, 3)
    network(torch.randn(8, 4, 24, 24)).square().mean().backward()
    assert network.weight.grad is not None


@pytest.mark.parametrize(("contexts", "share"), [(CONTEXTS, 3), ([cpu(i) for i in range(8)], 1)])
def test_a_thread_uses_its_contexts_share_for_good(contexts: list[Context], share: int) -> None:
    device_threads = DeviceThreads(contexts)
    calls = lambda function: [(number, function) for number in range(len(contexts))]  # noqa: E731
    expected = [share] * len(contexts)
    try:
        assert device_threads.run(calls(torch.get_num_threads)) == expected
        for function in (large_sum, backward_of_a_convolution):
            device_threads.run(calls(function))
            assert device_threads.run(calls(torch.get_num_threads)) == expected
        for count in (2, 5):
            torch.set_num_threads(count)
            for function in (torch.get_num_threads, large_sum, backward_of_a_convolution):
                device_threads.run(calls(function))
                assert device_threads.run(calls(torch.get_num_threads)) == expected
            assert torch.get_num_threads() == count
    finally:
        device_threads.close()


def test_the_caller_and_a_thread_that_it_starts_later_keep_the_callers_count(pair: DeviceThreads) -> None:
    found = [torch.get_num_threads()]
    torch.set_num_threads(2)
    assert pair.run(both(torch.get_num_threads)) == [3, 3]  # of threads that never worked
    torch.set_num_threads(CALLERS)
    for function in (large_sum, backward_of_a_convolution):
        pair.run(both(function))
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        found.append(torch.get_num_threads())
    pair.close()
    assert [*found, torch.get_num_threads()] == [CALLERS] * 6
