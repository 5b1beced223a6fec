"""The simulated GPUs themselves: each fault of a program that they are there to show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from gangline import Communicator
from gangline.collectives.devices import nccl_selection
from tests.collectives import simulated_gpus as simulation
from tests.collectives.ranks import outcomes_in_threads, run_together
from tests.collectives.simulated_gpus import (
    Event,
    HostRank,
    Stream,
    capture,
    counted,
    current_stream,
    on_simulated_gpu,
    side_streams_run,
    simulated_gpus,
)

CARD = torch.device("cuda", 0)


@pytest.fixture
def machine() -> Iterator[None]:
    with side_streams_run("late"), simulated_gpus():
        yield


def _on_side(side: Stream) -> Any:
    side.wait_event(current_stream(CARD).record_event())
    return torch.cuda.stream(side)


# -- freed memory ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("records", [True, False])
def test_memory_that_is_freed_before_another_stream_reads_it_is_poisoned(records: bool) -> None:
    side = Stream(CARD)
    value, out = on_simulated_gpu(torch.full((4,), 3.0)), on_simulated_gpu(torch.zeros(4))
    view = value[:2]
    with _on_side(side):
        out.copy_(value)
    if records:
        view.record_stream(side)  # it is the memory's, whichever view names it
    del value, view
    current_stream(CARD).wait_event(side.record_event())
    assert (out.host() == 3).all() == records


@pytest.mark.parametrize("records", [True, False])
def test_memory_that_another_stream_writes_after_it_is_freed_is_an_error(records: bool) -> None:
    error = nullcontext() if records else pytest.raises(AssertionError, match="freed memory was written")
    with error, side_streams_run("late"), simulated_gpus():
        value, side = on_simulated_gpu(torch.zeros(4)), Stream(CARD)
        with _on_side(side):
            value.fill_(1)
        if records:
            value.record_stream(side)
        del value
        on_simulated_gpu(torch.zeros(1)).host()  # work that gets the memory


# -- calls of NCCL that wait for each other -------------------------------------------------------------------------


@pytest.mark.usefixtures("machine")
def test_ranks_of_a_process_that_enter_nccl_in_turn_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, call = threading.Lock(), HostRank._call

    def in_turn(binding: HostRank, name: str, *arguments: int) -> None:
        with lock:
            call(binding, name, *arguments)

    monkeypatch.setattr(simulation, "LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(HostRank, "_call", in_turn)
    errors = outcomes_in_threads(2, lambda comm: comm.all_reduce(on_simulated_gpu(torch.ones(3), comm.rank)))
    assert any("0.3 s for ranks [0, 1] to be in a call of NCCL with rank" in str(error) for error in errors)


@pytest.mark.usefixtures("machine")
def test_a_group_of_messages_ends_when_the_peer_is_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LIMIT_SECONDS", 0.1)
    stream, unique_id = current_stream(CARD), HostRank.unique_id()
    ranks = [HostRank(CARD, unique_id, rank, 3) for rank in range(3)]
    values = [torch.zeros(2), torch.ones(2)]

    def exchange(rank: int) -> None:
        ranks[rank].start()
        call = ranks[rank].send if rank else ranks[rank].receive
        call(values[rank].data_ptr(), values[rank].nbytes, 1 - rank, stream.cuda_stream)
        ranks[rank].end()

    with pytest.raises(RuntimeError, match=r"waited 0.1 s for ranks \[1\] to be in a call of NCCL with rank 0"):
        exchange(0)
    monkeypatch.setattr(simulation, "LIMIT_SECONDS", 20)
    run_together(partial(exchange, rank) for rank in range(2))
    exchange(1)  # the two are connected now
    stream.synchronize()
    assert values[0].tolist() == [1.0, 1.0]


# -- capture --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("machine")
def test_a_capture_forbids_waits_and_queries() -> None:
    value, side = on_simulated_gpu(torch.ones(2)), Stream(CARD)
    event = current_stream(CARD).record_event()
    for call in (event.query, event.synchronize, value.sum().item, value.tolist):
        captured = capture(Stream(CARD))
        with pytest.raises(RuntimeError, match="previous error during capture"), captured:  # noqa: PT012
            assert torch.cuda.is_current_stream_capturing()
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                call()
    with capture(current_stream(CARD)), _on_side(side):
        assert torch.cuda.is_current_stream_capturing()  # it waits for the captured stream
    assert not torch.cuda.is_current_stream_capturing()
    assert value.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("machine")
def test_a_collective_in_a_capture_is_refused() -> None:
    def run(comm: Communicator) -> None:
        torch.cuda.set_device(comm.rank)
        tensor = on_simulated_gpu(torch.ones(3), comm.rank)
        with capture(current_stream(tensor.device)):
            comm.all_reduce(tensor)

    for error in outcomes_in_threads(2, run):
        assert "all_reduce was called while a CUDA graph is captured" in str(error)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("is_relaxed", [True, False])
def test_a_capture_beside_the_thread_that_watches_calls(monkeypatch: pytest.MonkeyPatch, is_relaxed: bool) -> None:
    query, ends, seen = Event.query, threading.Event(), threading.Event()

    def noted(event: Event) -> bool:
        if threading.current_thread().name == "gangline-nccl" and simulation._captured:
            seen.set()
        return query(event)

    def run(comm: Communicator) -> list[float]:
        tensor = on_simulated_gpu(torch.ones(1))
        current_stream(CARD).put(ends.is_set)  # a kernel that runs until then
        comm.all_reduce(tensor)
        try:
            with capture(Stream(CARD)):
                assert seen.wait(20)
        finally:
            ends.set()
        return [*tensor.tolist(), *comm.all_reduce(tensor).tolist()]

    monkeypatch.setattr(Event, "query", noted)
    if not is_relaxed:
        monkeypatch.setattr(nccl_selection, "_allow_queries_during_capture", lambda: None)
    [outcome] = outcomes_in_threads(1, run)
    assert outcome == [1.0, 1.0] if is_relaxed else "capture" in str(outcome)


# -- events and waits -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("machine")
def test_the_time_between_events_is_the_number_of_operations() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(current_stream(CARD))
    value = on_simulated_gpu(torch.ones(2))
    value.mul_(2).add_(1)
    end.record(current_stream(CARD))
    assert end.device == CARD
    end.synchronize()
    assert begin.elapsed_time(end) == 3.0
    with pytest.raises(ValueError, match="enable_timing=True"):
        begin.elapsed_time(current_stream(CARD).record_event())
    current_stream(CARD).put(bool)  # never ends
    end.record(current_stream(CARD))
    assert not end.query()
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)


@pytest.mark.usefixtures("machine")
def test_waits_and_copies_are_counted_by_gpu() -> None:
    value, other = on_simulated_gpu(torch.ones(2)), on_simulated_gpu(torch.ones(3), 1)
    host, thread = torch.zeros(2), threading.current_thread().name
    waits = [value.tolist, value.cpu, value[0].item, lambda: bool((value == value).all()), lambda: host.copy_(value)]
    waits += [current_stream(CARD).synchronize, current_stream(CARD).record_event().synchronize]
    waits += [lambda: value.copy_(host), lambda: host.to(CARD), lambda: torch.tensor([1.0], device=CARD)]
    for call in waits:
        with counted() as counts:
            call()
        assert counts.waits == [thread], call
    others = [lambda: value.add_(1), lambda: host.copy_(value, non_blocking=True), value.host]
    event = current_stream(CARD).record_event()
    others += [event.query, event.synchronize]  # it is complete
    others += [lambda: host.to(CARD, non_blocking=True), lambda: value.to(other.device), other.tolist]
    with counted() as counts:
        for call in others:
            call()
    assert (counts.waits, counts.to_host, counts.to_gpu) == ([], [2], [2])
