"""Length of call paths: Python frames of a large all-reduce, and exchanges that open a communicator."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gangline import Communicator, spawn
from gangline.collectives.communicator import open_communicator
from gangline.collectives.compiled_core import has_collectives, problem
from gangline.collectives.transports.shm import cma, host_group, segments
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.tuner import SHARED_LIMIT
from tests.collectives.ranks import exchange_over, in_threads

FRAMES_TO_SEND = 6
FRAMES_TO_READ = 9
CALLS = 1
CALLS_IN_CHUNKS = 28
ROUNDS = {"auto": 4, "shared_memory": 4, "ipc": 4, "tcp": 4}
ROUNDS_OF_FALLBACK = 6


def _path(frame: FrameType | None) -> list[str]:
    """Return the functions from `Communicator.all_reduce` to this frame."""
    path = []
    while frame is not None:
        path.append(frame.f_code.co_qualname)
        if frame.f_code is Communicator.all_reduce.__code__:
            return path[::-1]
        frame = frame.f_back
    return []  # not inside an all_reduce


def _paths_of_a_large_all_reduce(comm: Communicator) -> dict[str, list[str]]:
    longest: dict[str, list[str]] = {"send": [], "read": []}

    def note(kind: str, name: str) -> None:
        path = [*_path(sys._getframe(2)), name]
        longest[kind] = max(longest[kind], path, key=len)

    send, read = SharedMemoryTransport.send, cma.read

    def noted_send(*arguments: Any) -> Any:
        note("send", "SharedMemoryTransport.send")
        return send(*arguments)

    def noted_read(*arguments: Any) -> None:
        note("read", "cma.read")
        read(*arguments)

    tensor = torch.ones(SHARED_LIMIT)  # four times the bytes of a slot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemoryTransport, "send", noted_send)
        patch.setattr(cma, "read", noted_read)
        comm.all_reduce(tensor)
    assert tensor.eq(comm.size).all()
    return longest


def test_a_large_all_reduce_of_three_ranks_reaches_the_bytes_in_few_frames() -> None:
    for longest in spawn(_paths_of_a_large_all_reduce, 3, transport="shared_memory", timeout=60):
        assert 1 < len(longest["send"]) <= FRAMES_TO_SEND, longest["send"]
        assert 1 < len(longest["read"]) <= FRAMES_TO_READ, longest["read"]


def _calls_of_small_collectives(comm: Communicator) -> dict[str, list[str]]:
    tensor, other = torch.ones(1000), torch.empty(1000)
    rows = torch.empty(comm.size, 1000)
    collectives: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "all_reduce with out": lambda: comm.all_reduce(tensor, "max", other),
        "broadcast": lambda: comm.broadcast(tensor, 1),
        "all_gather": lambda: comm.all_gather(tensor, rows),
        "reduce_scatter": lambda: comm.reduce_scatter(rows, out=other),
        "barrier": comm.barrier,
    }
    found: list[list[str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            found[-1].append(frame.f_code.co_qualname)

    shortest = {}
    gc.disable()  # other packages' callbacks are Python functions
    for name, collective in collectives.items():
        for _ in range(20):  # in one of them the other rank is not late, so that nothing is called while this one waits
            comm.barrier()
            found.append([])
            sys.setprofile(note)
            collective()
            sys.setprofile(None)
        shortest[name] = min(found, key=len)
        found.clear()
    gc.enable()
    return shortest


@pytest.mark.skipif(not has_collectives, reason=f"gangline._core is not here: {problem}")
def test_a_collective_through_the_compiled_core_takes_few_python_calls() -> None:
    for shortest in spawn(_calls_of_small_collectives, 2, transport="shared_memory", timeout=60):
        assert all(len(calls) == CALLS for calls in shortest.values()), shortest


def _calls_in_chunks(comm: Communicator) -> list[str]:
    tensor, found = torch.ones(1 << 22), list[list[str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[-1].append(frame.f_code.co_qualname)

    gc.disable()
    for _ in range(24):  # of which rank 0 chooses the path of eight at a time
        comm.barrier()
        found.append([])
        sys.setprofile(note)
        comm.all_reduce(tensor)
        sys.setprofile(None)
    gc.enable()
    return min((calls for calls in found if "_reduce" not in calls), key=len)


@pytest.mark.skipif(not has_collectives, reason=f"gangline._core is not here: {problem}")
def test_a_large_all_reduce_through_the_compiled_core_takes_few_python_calls() -> None:
    for calls in spawn(_calls_in_chunks, 2, transport="shared_memory", timeout=60, threads=1):
        assert 1 < len(calls) <= CALLS_IN_CHUNKS, calls


class _Copies(TorchDispatchMode):
    """Counts the bytes that this thread copies."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.nbytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


def _bytes_copied(comm: Communicator) -> int:
    tensor, result = torch.ones(3 * SHARED_LIMIT), torch.zeros(3 * SHARED_LIMIT)
    with _Copies() as copies:
        comm.all_reduce(tensor, "sum", result)
    assert tensor.eq(1).all()
    assert result.eq(comm.size).all()
    return copies.nbytes


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "halving_doubling", "one_shot"])
def test_an_all_reduce_into_another_tensor_copies_only_what_it_receives(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_ALGO", algorithm)
    received = 0 if algorithm == "one_shot" else 3 * SHARED_LIMIT * 4 // 2
    assert in_threads(2, _bytes_copied) == [received] * 2


def _rounds(comm: Communicator) -> dict[str, int]:
    rounds = {}
    for transport in ROUNDS:
        exchange = Mock(wraps=exchange_over(comm))
        with open_communicator(comm.rank, comm.size, exchange, transport=transport, timeout=60) as other:
            assert other.all_reduce(torch.ones(1)).item() == comm.size
        rounds[transport] = exchange.call_count
    return rounds


def test_a_communicator_on_one_host_opens_in_few_exchanges() -> None:
    assert spawn(_rounds, 3, transport="ipc", timeout=60) == [ROUNDS] * 3


def _no_memory_on_rank_1(comm: Communicator, transport: str, without_core: bool = False) -> tuple[str, int, list[str]]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("gangline").addHandler(handler)

    exchange = Mock(wraps=exchange_over(comm))
    with pytest.MonkeyPatch.context() as patch:
        if without_core:
            patch.setattr(segments, "has_collectives", comm.rank != comm.size - 1)
        elif comm.rank == 1:
            patch.setattr(host_group, "Offer", Mock(side_effect=OSError("no memory")))
        with open_communicator(comm.rank, comm.size, exchange, transport=transport, timeout=60) as other:
            assert other.all_reduce(torch.ones(3)).tolist() == [comm.size] * 3
            return other.transport, exchange.call_count, texts


def test_all_ranks_use_sockets_if_one_cannot_share_memory_and_each_warns_once() -> None:
    reason = "rank 1 cannot offer memory: no memory"
    warning = f"ranks communicate through sockets instead of shared memory: {reason}"
    found = spawn(_no_memory_on_rank_1, 3, "auto", transport="ipc", timeout=60)
    assert found == [("ipc", ROUNDS_OF_FALLBACK, [warning])] * 3
    with pytest.raises(OSError, match=f"transport is 'shared_memory': {reason}"):
        spawn(_no_memory_on_rank_1, 3, "shared_memory", transport="ipc", timeout=60)


def test_all_ranks_use_sockets_if_one_lacks_the_core() -> None:
    reason = f"gangline._core, which shared memory needs, is not used: {problem or segments.NO_TENSORS}"
    warning = f"ranks communicate through sockets instead of shared memory: rank 1 cannot offer memory: {reason}"
    found = spawn(_no_memory_on_rank_1, 2, "auto", True, transport="ipc", timeout=60)
    assert found == [("ipc", ROUNDS_OF_FALLBACK, [warning])] * 2


def test_a_single_rank_that_lacks_the_core_warns_of_nothing() -> None:
    [(transport, _, warnings)] = spawn(_no_memory_on_rank_1, 1, "auto", True, transport="ipc", timeout=60)
    assert (transport, warnings) == ("ipc", [])


def _with_atomic_words(comm: Communicator) -> list[float]:
    peer, found = 1 - comm.rank, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_KEEPS_ORDER", False)
        with open_communicator(comm.rank, 2, exchange_over(comm), transport="shared_memory", timeout=60) as other:
            for count in (3, 1 << 20):
                given, taken = torch.full((count,), float(comm.rank + 1)), torch.empty(count)
                work = other.send(given, peer, async_op=True)
                if comm.rank:
                    time.sleep(0.05)  # the other one sleeps, and is woken
                other.recv(taken, peer)
                assert work is not None
                work.wait()
                found += [float(taken.mean()), float(other.all_reduce(given).mean())]
    return found


@pytest.mark.skipif(not has_collectives, reason=f"gangline._core is not here: {problem}")
def test_ranks_share_memory_by_atomic_words_where_stores_may_be_reordered() -> None:
    found = spawn(_with_atomic_words, 2, transport="ipc", timeout=60)
    assert found == [[2.0, 3.0] * 2, [1.0, 3.0] * 2]
