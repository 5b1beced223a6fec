"""send and recv: tags in any order, many pending, messages that do not fit, and collectives in between."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gangline.collectives.communicator import Communicator
from gangline.collectives.engine import point_to_point
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.transports.base import ReceiveRequest
from gangline.collectives.transports.in_process import InProcessTransport
from gangline.collectives.transports.shm import transport as shm_transport
from tests.collectives.grid import Cell, check, values
from tests.collectives.ranks import in_threads, same
from tests.collectives.stage import WAITS, Actor, Stage

TRANSPORTS = ("shared_memory", "ipc", "tcp")
SIZES = (1, 0, 300_007, 17, 8_192, 8_193, 20_000)
"""Numbers of float32 elements: none, few, around and above the limit for copied messages."""


def _message(number: int, rank: int) -> Tensor:
    return values(SIZES[number % len(SIZES)], rank + number, torch.float32)


def _receive(comm: Communicator, source: int, tag: int, want: Tensor) -> None:
    got = torch.empty_like(want)
    assert comm.recv(got, source, tag) is got
    same(got, want, f"{comm}: tag {tag} from {source}")


def _tags_out_of_order(comm: Communicator) -> None:
    if comm.rank == 0:
        works = [comm.send(_message(tag, 0), 1, tag, async_op=True) for tag in range(7)]
        for work in works:
            work.wait()
            assert work.result is None
    else:
        for tag in (6, 1, 0, 2, 5, 4, 3):  # the large one is kept, and so are later ones
            _receive(comm, 0, tag, _message(tag, 0))


def _between_collectives(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number in range(6):
        sending = comm.send(_message(number, comm.rank), after, async_op=True)
        tensor = values(30_011, comm.rank, torch.int64)
        reducing = comm.all_reduce(tensor, async_op=True)
        _receive(comm, before, 0, _message(number, before))
        check(comm, Cell("broadcast", 5, root=number % comm.size))
        reducing.wait()
        sending.wait()


def _misfits(comm: Communicator, count: int) -> None:
    """A message that does not fit is kept for a recv that does."""
    sent = values(count, 0, torch.int32)
    if comm.rank == 0:
        works = [comm.send(sent + step, 1, tag, async_op=True) for tag, step in ((4, 0), (4, 1), (9, 2))]
        for work in works:
            work.wait()
    else:
        text = rf"rank 0 sent {count} x int32 with tag 4, and this rank's recv expects"
        for other in (torch.empty(count + 1, dtype=torch.int32), torch.empty(count)):
            expects = f"{other.numel()} x {str(other.dtype).removeprefix('torch.')}"
            with pytest.raises(MismatchError, match=f"{text} {expects}; the message is kept for a recv that fits"):
                comm.recv(other, 0, 4)
            with pytest.raises(ValueError, match=text):
                comm.recv(other, 0, 4, async_op=True).wait()
        _receive(comm, 0, 9, sent + 2)
        _receive(comm, 0, 4, sent)
        _receive(comm, 0, 4, sent + 1)
    check(comm, Cell("all_reduce", 6))


def _from_any_rank(comm: Communicator) -> None:
    """Collect messages of all other ranks, of which some have closed by then, and one has another tag and size."""
    others = range(1, comm.size)
    if comm.rank:
        comm.send(_message(2, comm.rank), 0, 7)  # large
        comm.send(_message(3, comm.rank), 0, 8)
        comm.barrier()
        return
    _receive(comm, 1, 8, _message(3, 1))  # keeps the message with tag 7 for later
    for tag, number in ((7, 2), (8, 3)):
        found = []
        for _ in others if tag == 7 else others[1:]:
            got = torch.empty_like(_message(number, 0))
            work = comm.recv(got, None, tag, async_op=True)
            work.wait()
            same(got, _message(number, work.source), f"tag {tag} from {work.source}")
            found.append(work.source)
        assert sorted(found) == list(others if tag == 7 else others[1:])
    comm.barrier()


def _written_again(comm: Communicator) -> None:
    """A send keeps its message until it is sent completely."""
    for number in range(3):
        size = (8 << 20) + 5 + number  # the last piece is small
        tensor = (torch.arange(251) + number).to(torch.uint8).repeat(size // 251 + 1)[:size]
        if comm.rank == 0:
            comm.send(tensor, 1)
            tensor.zero_()
        else:
            _receive(comm, 0, 0, tensor)


def _everything(comm: Communicator) -> None:
    _between_collectives(comm)
    _from_any_rank(comm)
    if comm.size == 2:
        _tags_out_of_order(comm)
        _misfits(comm, 5)
        _misfits(comm, 50_000)
        _written_again(comm)
    comm.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_messages_between_threads(size: int) -> None:
    in_threads(size, _everything)


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        ("shared_memory", 2),
        ("tcp", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ipc", 2), *product(TRANSPORTS, [3]))),
    ],
)
def test_messages_between_processes(transport: str, size: int) -> None:
    spawn(_everything, size, transport=transport, timeout=60)


@pytest.mark.parametrize("sources", [[0], [0, 2]], ids=["named", "any"])
def test_two_receives_of_a_tag_complete_in_order_if_a_message_arrives_between_polls(
    sources: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = InProcessTransport.poll
    looks = 0

    def late(transport: InProcessTransport, source: int) -> ReceiveRequest | None:
        nonlocal looks
        looks += transport.rank == 1
        return None if transport.rank == 1 and looks <= len(sources) else poll(transport, source)

    posted = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            works = [comm.send(values(3, step, torch.float32), 1, async_op=True) for step in (0, 1)]
            posted.set()
            for work in works:
                work.wait()
        elif comm.rank == 1:
            posted.wait()
            first, second = torch.empty(3), torch.empty(3)
            with monkeypatch.context() as patch:
                patch.setattr(InProcessTransport, "poll", late)
                messages = comm._messages  # recv itself would poll between the two
                works = [messages.receive(first, sources, 0), messages.receive(second, [0], 0)]
                for work in reversed(works):
                    messages.finish(work, async_op=False)
            same(first, values(3, 0, torch.float32), "first")
            same(second, values(3, 1, torch.float32), "second")

    in_threads(3, run)


def test_waiting_for_a_message_can_end_before_it() -> None:
    timed_out = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            timed_out.wait()
            comm.send(values(4, 0, torch.float32), 1)
        else:
            got = torch.empty(4)
            work = comm.recv(got, 0, async_op=True)
            with pytest.raises(TimeoutError, match=r"recv is still running after 0\.02 s"):
                work.wait(timeout=0.02)
            timed_out.set()
            work.wait()
            same(got, values(4, 0, torch.float32), "the message")

    in_threads(2, run)


def test_pending_receives_fail_at_close() -> None:
    def run(comm: Communicator) -> None:
        comm.barrier()
        work = comm.recv(torch.empty(3), 1 - comm.rank, async_op=True)
        comm.close()
        with pytest.raises(GanglineError, match="the communicator is closed"):
            work.wait()

    in_threads(2, run)


# Waiting


def _wait_for_any(comm: Communicator, path: str) -> tuple[int, str]:
    """Wait on rank 0 for any rank: rank 1 closes without a message, rank 2 sends one and dies."""
    actor = Actor(comm.rank, path)
    if comm.rank == 1:
        comm.close()
        actor.announce_waits(0)
        actor.hear()
        return 0, ""
    if comm.rank == 2:
        actor.hear()
        comm.send(torch.ones(3), 0)
        actor.hear()
        os.kill(os.getpid(), signal.SIGKILL)
    actor.announce_waits(2)
    work = comm.recv(torch.empty(3), None, async_op=True)
    work.wait()
    actor.tell("received")  # before rank 2 dies, whose message may not have left its process yet
    with pytest.raises(DeadNodeError, match="rank 2") as caught:
        comm.recv(torch.empty(3), None)
    return work.source, str(caught.value)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shared_memory", marks=pytest.mark.slow)])
def test_a_receive_from_any_rank_needs_no_rank_that_has_closed(transport: str) -> None:
    with Stage(_wait_for_any, 3, transport=transport) as stage:
        assert [stage.heard(0) for _ in range(2)] == [WAITS] * 2
        stage.say(2)
        assert stage.heard(0) == "received"
        stage.say(2)
        stage.say(1)
        first, _, _ = stage.outcomes()
        assert first.error is None
        assert first.value[0] == 2


def _wait_for_a_message(comm: Communicator, path: str, async_op: bool) -> int:
    """Return how often rank 1 looked for the messages until they came, 20 checks of its wait later."""
    actor = Actor(comm.rank, path)
    if comm.rank == 0:
        actor.hear()
        comm.send(torch.ones(3), 1, 5)
        comm.send(torch.ones(3), 1)
        return 0

    looks = Mock(wraps=comm._messages._advance)
    comm._messages._advance = looks
    actor.announce_waits(20)
    works = [comm.recv(torch.empty(3), 0, 5, async_op=True)] if async_op else []
    comm.recv(torch.empty(3), 0)
    for work in works:
        work.wait()
    return looks.call_count


@pytest.mark.parametrize(
    ("transport", "async_op"),
    [
        ("shared_memory", False),
        ("tcp", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("shared_memory", True), ("tcp", False))),
    ],
)
def test_a_pending_receive_sleeps_until_its_message_comes(transport: str, async_op: bool) -> None:
    with Stage(_wait_for_a_message, 2, async_op, transport=transport) as stage:
        assert [stage.heard(1) for _ in range(20)] == [WAITS] * 20
        stage.say(0)
        _, outcome = stage.outcomes()
    assert outcome.error is None
    assert outcome.value <= 2000  # without sleeps, several ten thousand


# Errors that are not gangline's


def _text_of(call: Callable[[], object]) -> str:
    with pytest.raises(GanglineError) as raised:
        call()
    return str(raised.value)


def _send_from_memory_that_goes_away(comm: Communicator, async_op: bool) -> list[str]:
    """Rank 0 sends from memory that no process may read when rank 1 receives it."""
    if comm.rank == 0:
        memory = mmap.mmap(-1, 1 << 20)
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        work = comm.send(tensor, 1, async_op=True)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(len(memory)), 0) == 0
        comm.barrier()
        return [_text_of(partial(work.wait, 30)), _text_of(comm.barrier)]
    shm_transport.PEER_LOST_SECONDS = 0.1  # nobody will report a reason
    comm.barrier()
    target = torch.empty(1 << 18)
    work, other = comm._messages.receive(target, [0], 0), comm._messages.receive(torch.empty(3), [0], 7)
    if async_op:
        comm._messages.finish(work, async_op=True)
    receive = partial(work.wait, 30) if async_op else partial(comm._messages.finish, work, async_op=False)
    later = (partial(other.wait, 30), partial(comm.recv, target, 0), partial(comm.send, target, 0), comm.barrier)
    return [_text_of(call) for call in (receive, *later)]


@pytest.mark.parametrize("async_op", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_that_cannot_be_read_fails_all_messages_of_both_ranks(async_op: bool) -> None:
    texts = spawn(_send_from_memory_that_goes_away, 2, async_op, transport="shared_memory", timeout=60)
    (text,) = {text for of_rank in texts for text in of_rank}
    assert text.startswith("rank 1 left recv(262144 x float32) by OSError: [Errno 14] reading 1048576 bytes of process")


@pytest.mark.parametrize("error", [MemoryError("no memory is left"), ValueError("3 is not the code of a call")])
def test_any_error_of_the_background_thread_fails_what_is_pending(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_to_point, "_read_early", Mock(side_effect=error))

    def run(comm: Communicator) -> list[str]:
        if comm.rank == 0:
            work = comm.send(torch.ones(3), 1, 1, async_op=True)
            return [_text_of(partial(work.wait, 30))]
        works = [comm._messages.receive(torch.empty(3), [0], tag) for tag in (0, 2)]
        comm._messages.finish(works[0], async_op=True)
        return [*(_text_of(partial(work.wait, 30)) for work in works), _text_of(comm.barrier)]

    (text,) = {text for of_rank in in_threads(2, run) for text in of_rank}
    assert text == f"rank 1 left recv(3 x float32) by {type(error).__name__}: {error}"


def test_an_interrupted_receive_takes_no_later_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> str:
        got = torch.zeros(3)
        if comm.rank == 1:
            with monkeypatch.context() as patch:
                patch.setattr(point_to_point.PointToPoint, "_pause", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    comm.recv(got, 0)
        text = _text_of(comm.barrier)
        assert not got.any()
        return text

    assert set(in_threads(2, run)) == {"rank 1 left recv(3 x float32) by KeyboardInterrupt"}
