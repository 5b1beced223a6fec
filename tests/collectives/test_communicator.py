"""Communicator: values of every collective, layouts of tensors, asynchronous calls, groups, and refused calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gangline.collectives.call_signature import CallSignature, encode_signature
from gangline.collectives.communicator import Communicator, in_process
from gangline.collectives.errors import GanglineError, MismatchError
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.work import Work
from tests.collectives.grid import COLLECTIVES, Cell, call, check, combined, inputs_of, reference, values
from tests.collectives.ranks import LARGE, in_ranks, in_threads, open_again, outcomes_in_threads, run_together, same
from tests.collectives.situations import EVERY_CALL

ones = torch.ones


# Asynchronous calls


def _in_flight(comm: Communicator) -> None:
    works: list[tuple[Cell, Work]] = []
    for number, name in enumerate(COLLECTIVES * 2):
        cell = Cell(name, (3, LARGE, 0)[number % 3], torch.int32, root=number % comm.size, async_op=True)
        tensor = inputs_of(cell, comm.size)[comm.rank].clone()
        works.append((cell, call(comm, cell, tensor, tensor[0].clone() if name == "scatter" else None)))
        if number == 5:
            check(comm, Cell("all_reduce", 7))  # after all of them, and before the next
    barrier = comm.barrier(async_op=True)
    for cell, work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
        same(work.result, reference(cell, inputs_of(cell, comm.size), comm.rank), str(cell))
    barrier.wait()
    assert barrier.result is None


def test_an_async_call_raises_its_error_in_wait() -> None:
    def run(comm: Communicator) -> str:
        work = comm.all_reduce(values(4 + comm.rank, 0, torch.float32), async_op=True)
        with pytest.raises(MismatchError, match="ranks are at different calls") as caught:
            work.wait()
        assert str(work.exception()) == str(caught.value)
        for later in (lambda: comm.barrier(), lambda: comm.barrier(async_op=True)):
            with pytest.raises(MismatchError, match="ranks are at different calls"):
                later()
        return str(caught.value)

    assert len(set(in_threads(2, run))) == 1


def test_close_finishes_async_calls() -> None:
    def run(comm: Communicator) -> None:
        tensors = [values(LARGE, comm.rank + number, torch.float32) for number in range(5)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        comm.close()
        assert all(isinstance(work, Work) and work.exception() is None and work.is_completed() for work in works)
        for number, tensor in enumerate(tensors):
            same(tensor, combined([values(LARGE, rank + number, torch.float32) for rank in (0, 1)], "sum"), str(number))

    in_threads(2, run)


def _two_threads(comm: Communicator) -> None:
    other = comm.split(0)
    problems: list[BaseException] = []

    def use(which: Communicator, step: int) -> None:
        try:
            for number in range(40):
                check(which, Cell("all_reduce", number * step % 23, torch.int64))
                check(which, Cell("broadcast", LARGE if number % 20 == 0 else number, root=number % which.size))
        except BaseException as error:  # noqa: BLE001  told by the test's own thread
            problems.append(error)

    run_together(partial(use, which, step) for which, step in ((comm, 5), (other, 7)))
    other.close()
    assert not problems, problems


# Groups


def _groups(comm: Communicator) -> None:
    rank = comm.rank
    halves = comm.split(rank % 2, key=-rank)
    ranks = [other for other in reversed(range(comm.size)) if other % 2 == rank % 2]
    assert (halves.size, halves.rank) == (len(ranks), ranks.index(rank))
    for count in (3, LARGE):  # alternate between the group and all ranks
        for _ in range(2):
            tensor = values(count, rank, torch.float32)
            halves.all_reduce(tensor)
            same(tensor, combined([values(count, other, torch.float32) for other in ranks], "sum"), "in the group")
            check(comm, Cell("all_reduce", count))
    inner = halves.split(0 if halves.rank == 0 else None)
    assert (inner is None) == (halves.rank != 0)
    if inner is not None:
        assert (inner.size, inner.rank) == (1, 0)
        check(inner, Cell("all_gather", 4, torch.int16))
        inner.close()
    own = values(LARGE, rank, torch.float32)
    halves.broadcast(own, halves.size - 1)
    same(own, values(LARGE, ranks[-1], torch.float32), "broadcast in the group")
    halves.close()
    check(comm, Cell("all_to_all", 5))
    same_order = comm.split(7)
    assert (same_order.rank, same_order.size) == (rank, comm.size)
    same_order.close()
    assert comm.split(None) is None


# After close


def _after_close(comm: Communicator) -> None:
    comm.barrier()
    comm.close()
    comm.close()
    for later in EVERY_CALL:
        with pytest.raises(GanglineError, match="the communicator is closed"):
            later(comm)


# Refused calls


def test_a_call_too_large_for_its_signature_is_refused() -> None:
    """Before it becomes the signature of another call."""
    with pytest.raises(ValueError, match="root is 4095; broadcast supports roots below 4095"):
        encode_signature("broadcast", 3, torch.float32, None, 4095)
    assert CallSignature.from_code(encode_signature("broadcast", 3, torch.float32, None, 4094)).root == 4094
    with pytest.raises(ValueError, match=f"all_gather was given {1 << 40} elements; it supports fewer than {1 << 40}"):
        encode_signature("all_gather", 1 << 40, torch.uint8, None, None)


REFUSED: list[tuple[Callable[[Communicator], Any], type[Exception], str]] = [
    (lambda c: c.all_reduce(ones(2), "avg"), ValueError, r"op is 'avg'; expected one of sum, mean, product"),
    (
        lambda c: c.all_reduce(ones(2, dtype=torch.int32), "mean"),
        TypeError,
        r"the mean of torch\.int32 is not a torch\.int32; use op 'sum' and divide, or convert",
    ),
    (
        lambda c: c.broadcast(ones(2, dtype=torch.uint16)),
        TypeError,
        r"a tensor of torch\.uint16 was given; expected one of float32, float64",
    ),
    (lambda c: c.all_reduce([1.0]), TypeError, r"tensor is a list; expected a torch\.Tensor"),
    (lambda c: c.all_reduce(ones(2).to_sparse()), TypeError, r"tensor is torch\.sparse_coo on cpu; expected a dense"),
    (lambda c: c.all_gather(ones(2, device="meta")), TypeError, r"tensor is torch\.strided on meta; expected"),
    (
        lambda c: c.all_reduce(ones(2), out=ones(3)),
        ValueError,
        r"out has shape \(3,\) and torch\.float32; expected \(2,\) and torch\.float32",
    ),
    (lambda c: c.all_gather(ones(4), ones(4)), ValueError, r"out has shape \(4,\).*expected \(2, 4\)"),
    (lambda c: c.reduce_scatter(ones(3)), ValueError, r"tensor has shape \(3,\); expected a row for each of 2 ranks"),
    (lambda c: c.scatter(ones(3), ones(3)), ValueError, r"tensor has shape \(3,\).*expected \(2, 3\)"),
    (lambda c: c.scatter(None, ones(3)), TypeError, r"tensor is None at the root of a scatter"),
    (lambda c: c.broadcast(ones(2), 2), ValueError, r"root is 2; expected a rank from 0 to 1"),
    (lambda c: c.broadcast(ones(2), 1 << 32), ValueError, r"root is 4294967296; expected a rank from 0 to 1"),
    (lambda c: c.gather(ones(2), -1), ValueError, r"root is -1; expected a rank from 0 to 1"),
    (lambda c: c.reduce(ones(2), True), TypeError, r"root is True; expected a rank, an int"),
    (lambda c: c.all_reduce(ones(1).expand(3)), ValueError, r"tensor has shape \(3,\) and strides \(0,\), so that"),
    (lambda c: c.scatter(None, ones(1).expand(3), 1), ValueError, r"out has shape \(3,\) and strides \(0,\)"),
    (lambda c: c.recv(ones(1).expand(3), 1), ValueError, r"tensor has shape \(3,\) and strides"),
    (lambda c: c.broadcast(ones(5).unfold(0, 3, 1), 1), ValueError, "share memory"),
    (lambda c: c.broadcast(ones(4).as_strided((2, 3), (1, 1)), 1), ValueError, "share memory"),
    (lambda c: c.send(ones(2), 2), ValueError, r"to is 2; expected a rank from 0 to 1"),
    (lambda c: c.send(ones(2), 1, tag=-1), ValueError, r"tag is -1; expected a number from 0 to 2\*\*31 - 1"),
    (lambda c: c.send(ones(2), 1, tag=1.0), TypeError, r"tag is 1\.0; expected an int"),
    (lambda c: c.split("red"), TypeError, r"color is 'red'; expected an int or None"),
]


def _refuse(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(2))  # fills the cache of small all-reduces
    for refused, kind, text in REFUSED:
        before = comm._engine.sequence
        if comm.rank == 0:
            with pytest.raises(kind, match=text):
                refused(comm)
        assert comm._engine.sequence == before
        check(comm, Cell("all_reduce", 2))


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_wrong_arguments_are_named_before_communication(transport: str) -> None:
    with pytest.raises(ValueError, match="size is 0; expected at least 1"):
        in_process(0)
    in_ranks(transport, 2, _refuse)


# Mismatched calls

CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce(4 x float32, sum)": lambda c: c.all_reduce(ones(4)),
    "all_reduce(5 x float32, sum)": lambda c: c.all_reduce(ones(5)),
    "all_gather(4 x float32)": lambda c: c.all_gather(ones(4)),
    f"all_reduce({LARGE} x float32, sum)": lambda c: c.all_reduce(ones(LARGE)),
    f"all_reduce({LARGE + 1} x float32, sum)": lambda c: c.all_reduce(ones(LARGE + 1)),
    f"all_reduce({LARGE} x float32, max)": lambda c: c.all_reduce(ones(LARGE), "max"),
    f"all_reduce({LARGE} x float32, min)": lambda c: c.all_reduce(ones(LARGE), "min"),
    f"all_gather({LARGE} x uint8)": lambda c: c.all_gather(ones(LARGE, dtype=torch.uint8)),
    "reduce_scatter(2 x float32, sum)": lambda c: c.reduce_scatter(ones(c.size, 2)),
    "reduce_scatter(2 x int32, sum)": lambda c: c.reduce_scatter(ones(c.size, 2, dtype=torch.int32)),
    "broadcast(3 x float32, root 0)": lambda c: c.broadcast(ones(3), 0),
    "broadcast(3 x float32, root 1)": lambda c: c.broadcast(ones(3), 1),
    f"broadcast({LARGE} x float32, root 0)": lambda c: c.broadcast(ones(LARGE), 0),
    f"broadcast({LARGE} x float32, root 1)": lambda c: c.broadcast(ones(LARGE), 1),
    "barrier()": lambda c: c.barrier(),
}
"""Calls by the text that names them in errors."""

ODD = {
    "collective": ("all_reduce(4 x float32, sum)", "all_gather(4 x float32)"),
    "size": ("all_reduce(4 x float32, sum)", "all_reduce(5 x float32, sum)"),
    "size, by a schedule": (f"all_reduce({LARGE} x float32, sum)", f"all_reduce({LARGE + 1} x float32, sum)"),
    "slots and schedule": ("all_reduce(4 x float32, sum)", f"all_reduce({LARGE} x float32, sum)"),
    "dtype": ("reduce_scatter(2 x float32, sum)", "reduce_scatter(2 x int32, sum)"),
    "op": (f"all_reduce({LARGE} x float32, max)", f"all_reduce({LARGE} x float32, min)"),
    "root": ("broadcast(3 x float32, root 0)", "broadcast(3 x float32, root 1)"),
    "root, by a schedule": (f"broadcast({LARGE} x float32, root 0)", f"broadcast({LARGE} x float32, root 1)"),
    "barrier": ("barrier()", f"all_gather({LARGE} x uint8)"),
}
"""Calls of most ranks and of one."""


UNNOTICED = ("root", "root, by a schedule")
"""Cases in which a rank may succeed: the ranks that it exchanges data with agree with it, or it only sends."""


def _disagree(comm: Communicator, name: str, odd: int) -> str:
    usual, other = ODD[name]
    check(comm, Cell("all_reduce", 3))
    texts = []
    for attempt in (other if comm.rank == odd else usual, "barrier()", usual):
        try:
            CALLS[attempt](comm)
            texts.clear()
        except MismatchError as error:
            texts.append(str(error))
    assert len(texts) == 3 or (len(texts) == 2 and name in UNNOTICED), texts
    assert len(set(texts)) == 1, texts
    return texts[0]


def _check_texts(texts: list[str], name: str, odd: int, *, uses_slots: bool) -> None:
    """Check that all ranks' errors are one that names the calls, and all ranks if they were exchanged through slots."""
    (text,) = set(texts)
    usual, other = ODD[name]
    others = [rank for rank in range(len(texts)) if rank != odd]
    words = {
        odd: f"rank {odd}: {other}",
        min(others): f"{'ranks' if len(others) > 1 else 'rank'} {', '.join(map(str, others))}: {usual}",
    }
    if name == "root, by a schedule" or (name == "root" and not uses_slots):
        assert re.match("ranks are at different calls: .*broadcast", text)
    elif name in ("size, by a schedule", "slots and schedule", "op") or not uses_slots:
        assert words[odd] in text
        assert re.search(rf"ranks? [\d, ]+: {re.escape(usual)}", text)  # ranks that report late are left out
    else:
        assert text == f"ranks are at different calls: {'; '.join(words[rank] for rank in sorted(words))}"


@pytest.mark.parametrize("name", ODD)
def test_ranks_at_different_calls_all_get_the_same_error(name: str) -> None:
    for size, odd in ((2, 1), (3, 0), (4, 2)):
        _check_texts(in_threads(size, _disagree, name, odd), name, odd, uses_slots=False)


def _disagree_in_all_ways(comm: Communicator, transport: str) -> dict[str, str]:
    texts = {}
    for number, name in enumerate(ODD):
        with open_again(comm, transport) as again:
            texts[name] = _disagree(again, name, number % comm.size)
    check(comm, Cell("all_reduce", 3))  # other communicators still work
    return texts


@pytest.mark.parametrize(
    ("transport", "size"), [("shared_memory", 3), ("ipc", 2), pytest.param("tcp", 3, marks=pytest.mark.slow)]
)
def test_processes_at_different_calls_all_get_the_same_error(transport: str, size: int) -> None:
    texts = spawn(_disagree_in_all_ways, size, transport, transport=transport, timeout=60)
    for number, name in enumerate(ODD):
        _check_texts([each[name] for each in texts], name, number % size, uses_slots=transport == "shared_memory")


def test_an_extra_call_is_distinguished_from_earlier_calls() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(3))
        comm.all_reduce(torch.ones(3))
        comm.all_gather(torch.ones(3))

    errors = outcomes_in_threads(2, run)
    assert all(isinstance(error, MismatchError) for error in errors), errors
    assert str(errors[0]) == str(errors[1])


# All-to-all of rows that differ in size: results, errors, and how many exchanges and messages it takes


def _counts(comm: Communicator, scale: int) -> tuple[int, int]:
    """Return the slot exchanges and the messages that this rank needs."""
    engine, transport = comm._engine, comm._resources.transport
    exchanges = patch.object(engine, "exchange_slots", wraps=engine.exchange_slots)
    with exchanges as exchanged, patch.object(transport, "send", wraps=transport.send) as sent:
        check(comm, Cell("all_to_all_uneven", scale, out="out"))
    return exchanged.call_count, sent.call_count


def _only_rank_0_sends_much(comm: Communicator) -> None:
    count = 200_000 if comm.rank == 0 else 3
    outs = [torch.zeros(200_000 if source == 0 else 3) for source in range(comm.size)]
    comm.all_to_all_uneven([torch.full((count,), comm.rank + 1.0)] * comm.size, outs)
    assert [out.unique().tolist() for out in outs] == [[source + 1.0] for source in range(comm.size)]


def _sizes_that_differ(comm: Communicator) -> None:
    rows = [torch.zeros(3 if (comm.rank, to) == (1, 0) else 2) for to in range(comm.size)]
    with pytest.raises(MismatchError, match="rank 1 sends 3 elements to rank 0, which expects 2"):
        comm.all_to_all_uneven(rows, [torch.zeros(2) for _ in rows])
    check(comm, Cell("all_to_all_uneven", 2, out="out"))
    with pytest.raises(ValueError, match=f"1 outs were given; expected one for each of {comm.size} ranks"):
        comm.all_to_all_uneven(rows, [torch.zeros(2)])
    dtype = torch.float64 if comm.rank == 1 else torch.float32
    with pytest.raises(MismatchError, match=r"all_to_all_uneven\(float64\)"):
        comm.all_to_all_uneven(*([torch.zeros(2, dtype=dtype)] * comm.size,) * 2)


def _many_calls(comm: Communicator) -> list[tuple[int, int]]:
    """Make asynchronous and uneven calls and calls of groups; return the counts of uneven all-to-alls."""
    _in_flight(comm)
    _two_threads(comm)
    _groups(comm)
    comm.barrier()
    counts = [_counts(comm, scale) for scale in (0, 1, 1000, 100_000)]
    _only_rank_0_sends_much(comm)
    with comm.split(0) as group:
        _sizes_that_differ(group)
    _after_close(comm)
    return counts


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        ("shared_memory", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("in_process", 5), ("ipc", 3), ("tcp", 3))),
    ],
)
def test_calls_in_flight_and_of_groups_are_right_and_small_rows_take_one_exchange(transport: str, size: int) -> None:
    for few, more, small, large in in_ranks(transport, size, _many_calls):
        if transport == "shared_memory":
            assert few == more == small == (1, 0)
            assert large == (1, 2)  # a message to each other rank
