"""Schedules: programs, bytes, prices, and damage that `verify` finds."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gangline.bench.algorithms.cost import by_host, cost
from gangline.collectives import algorithms
from gangline.collectives.engine.executor import EqualChunks, run
from gangline.collectives.errors import ProtocolError
from gangline.collectives.liveness.membership import ThreadMembership
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.schedule import (
    ROOTED,
    Receive,
    Reduce,
    Rounds,
    Schedule,
    Send,
    Step,
    Transfers,
    transfers,
)
from gangline.collectives.schedule.schedule import steps_by_rank
from gangline.collectives.transports.base import PIECE, MessageTag
from gangline.collectives.transports.in_process import InProcessTransport, ThreadGroup
from tests.collectives.ranks import combined, same, values
from tests.collectives.symbolic import verify

EVERY = [(collective, name) for collective in algorithms.REGISTRY for name in algorithms.names(collective)]


def rounds(*tables: list[Transfers]) -> Rounds:
    return Rounds(len(tables), tables.__getitem__)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_one_rank_s_program_equals_its_entry_in_all_programs(collective: str, name: str) -> None:
    schedule = built(collective, name, 6)
    together = steps_by_rank(schedule)
    assert [schedule.program(rank) for rank in range(6)] == [tuple(s for _, s in steps) for steps in together]
    with pytest.raises(ValueError, match="rank 6 is not in a schedule of 6 ranks"):
        schedule.program(6)


def test_unequal_chunks_cover_the_tensor_in_whole_bytes() -> None:
    schedule = Schedule("all_gather", "by_hand", 3, 3, Rounds(0, lambda _: ()))
    table = transfers(0, 1, [0, 1, 2])
    assert schedule.message_bytes(table, 10).tolist() == [3, 3, 4]
    assert schedule.message_bytes(transfers(0, 1, 1, 3), 10).tolist() == [7]


@pytest.mark.parametrize(
    ("tables", "combining", "price"),
    [
        ([[transfers(0, 1, 0), transfers(0, 2, 0)]], 100, 22),  # a port takes one message at a time
        ([[transfers(1, 0, 0), transfers(2, 0, 0)]], 100, 22),
        ([[transfers([0, 1], [1, 0], 0)]], 100, 11),  # sending and receiving do not wait for each other
        ([[transfers(0, 1, 0)], [transfers(1, 2, 0)], [transfers(2, 3, 0)]], 100, 33),  # messages of the last round
        ([[transfers(0, 1, 0)], [transfers(2, 3, 0)]], 100, 11),
        ([[transfers(1, 0, 0, reduce=True), transfers(2, 0, 0, reduce=True)]], 2, 22 + 2),  # beside the next message
        ([[transfers(1, 0, 0, reduce=True), transfers(2, 0, 0, reduce=True)]], 100, 11 + 2 * 100),
        ([[transfers(1, 0, 0, reduce=True)], [transfers(0, 1, 0)]], 100, 11 + 100 + 11),
    ],
)
def test_a_price_counts_what_ranks_wait_for(tables: list[list[Transfers]], combining: float, price: float) -> None:
    """A message costs 1, and its byte 10."""
    assert cost(Schedule("broadcast", "by_hand", 4, 1, rounds(*tables), root=0), 1, 1, 10, combining) == price


def test_links_between_hosts_have_their_own_price() -> None:
    schedule = algorithms.build("all_gather", "ring", 4)
    hosts = (0, 0, 1, 1)
    alone = cost(schedule, 4, by_host(hosts, 1, 1), 0, 0)
    mixed = cost(schedule, 4, by_host(hosts, 1, 100), by_host(hosts, 0, 1000), 0)
    assert (alone, mixed) == (3, 1100 * 3)


class TestVerifyFinds:
    def test_a_sum_that_is_complete_in_only_some_of_its_chunks(self) -> None:
        uneven = rounds([transfers(1, 0, 0, 2, reduce=True)], [transfers(1, 0, 1, reduce=True)])
        schedule = Schedule("reduce", "by_hand", 2, 2, uneven, root=0)
        assert schedule.program(0)[0] == Reduce((0, 1), 0, 2, complete=False)
        with pytest.raises(ValueError, match=r"chunk 0: holds ranks \[0, 1\], but is not marked complete"):
            verify(schedule)

    def test_messages_left_over_or_in_another_order(self) -> None:
        schedule = built("all_reduce", "ring", 4)
        programs = steps_by_rank(schedule)
        first, second, *_, last = [place for place, (_, step) in enumerate(programs[0]) if isinstance(step, Send)]
        with pytest.raises(ValueError, match=r"ring all_reduce, rank 0, .*: rank 1 never receives it"):
            verify(schedule, [[*programs[0], programs[0][last]], *programs[1:]])
        programs[0][first], programs[0][second] = programs[0][second], programs[0][first]
        with pytest.raises(ValueError, match=r"expects chunks 3 to 4 from rank 0, .* has chunks 2 to 3"):
            verify(schedule, programs)

    @pytest.mark.parametrize(("collective", "name"), EVERY)
    def test_any_message_missing(self, collective: str, name: str) -> None:
        schedule = built(collective, name, 5)
        for index in range(schedule.messages()):
            with pytest.raises(ValueError, match=f"{name} {collective}"):
                verify(damaged(schedule, index, 0))

    @pytest.mark.parametrize(("collective", "name"), [each for each in EVERY if "reduce" in each[0]])
    def test_any_contribution_added_twice(self, collective: str, name: str) -> None:
        schedule = built(collective, name, 5)
        for index, reduces in enumerate(
            table.reduce for tables in schedule.rounds for table in tables for _ in table.rows()
        ):
            if reduces:
                with pytest.raises(ValueError, match=f"{name} {collective}"):
                    verify(damaged(schedule, index, 2))


def test_the_documentation_shows_schedules_and_prices_as_they_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "collectives.md"
    examples = re.sub(r"^```.*$", "", page.read_text(), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    assert len(session.examples) > 10
    found: list[str] = []
    assert doctest.DocTestRunner().run(session, out=found.append).failed == 0, "".join(found)


def built(collective: str, name: str, size: int) -> Schedule:
    return algorithms.build(collective, name, size, root=0 if collective in ROOTED else None)


def damaged(schedule: Schedule, index: int, times: int) -> Schedule:
    """Return the schedule with one message, numbered over all tables, repeated ``times`` times."""

    def at(number: int) -> Iterator[Transfers]:
        before = sum(len(table) for tables in map(schedule.rounds.at, range(number)) for table in tables)
        for table in schedule.rounds.at(number):
            here = np.arange(before, before + len(table))
            before += len(table)
            yield table.where(here != index)
            for _ in range(times):
                yield table.where(here == index)

    return replace(schedule, rounds=Rounds(len(schedule.rounds), at))


# Execution: no memory is written while it is read, and foreign messages fail


TAG = MessageTag(7, 1234)


def transports(size: int) -> list[InProcessTransport]:
    """Return the transports of ranks that are threads of this process."""
    group = ThreadGroup(size)
    memberships = ThreadMembership.group(size)
    return [
        InProcessTransport(rank, group, Watchdog(membership, timeout=30, stall_warn=30))
        for rank, membership in enumerate(memberships)
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("count", [3, PIECE // 4 + 5])
def test_memory_is_not_written_before_a_slow_rank_has_read_it(is_reduced: bool, count: int) -> None:
    here, there = transports(2)
    own, others = values(count, 0, torch.float32), values(count, 1, torch.float32)
    mine = own.clone()
    step: Step = Reduce((0, 1), 0, 1, complete=True) if is_reduced else Receive(1, 0, 1)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, [Send(1, 0, 1), step], here, EqualChunks(mine, 1), TAG)
        there.send(0, as_bytes(others), TAG).wait()  # rank 0 has read all of it, and would have written by now
        late = torch.empty(count)
        receive_request = there.receive(0)
        assert (receive_request.message_tag, receive_request.nbytes) == (TAG, count * 4)
        assert not running.done()  # it waits until its message is read
        receive_request.into(as_bytes(late))
        running.result()
    same(late, own, "what rank 0 sent")
    same(mine, combined([own, others], "sum") if is_reduced else others, "what rank 0 has in the end")


def test_a_message_of_another_length_is_an_error() -> None:
    here, there = transports(2)
    there.send(0, as_bytes(torch.ones(4)), TAG)
    with pytest.raises(ProtocolError, match="rank 1 sent 16 bytes, expected 12"):
        run([Receive(1, 0, 1)], here, EqualChunks(torch.ones(3), 1), TAG)
