"""Schedules: programs, bytes, prices, and damage that `verify` finds."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangline.bench.algorithms.cost import by_host, cost
from gangline.collectives import algorithms
from gangline.collectives.schedule import (
    ROOTED,
    NumberedStep,
    Receive,
    Reduce,
    Rounds,
    Schedule,
    Send,
    Transfers,
    cyclic,
    in_parallel,
    transfers,
)
from tests.collectives.drawing import draw
from tests.collectives.symbolic import verify

Programs = list[list[NumberedStep]]
EVERY = [(collective, name) for collective in algorithms.REGISTRY for name in algorithms.names(collective)]


def rounds(*tables: list[Transfers]) -> Rounds:
    return Rounds(len(tables), tables.__getitem__)


def rows(of: Rounds) -> list[list[tuple[int, int, int, int]]]:
    return [sorted(row for table in tables for row in table.rows()) for tables in of]


def sum_at_zero_and_back(size: int = 3) -> Schedule:
    """Return an all-reduce of one chunk: rank 0 sums and sends the sum back."""
    up = [transfers(rank, 0, 0, reduce=True) for rank in range(1, size)]
    down = [transfers(0, rank, 0) for rank in range(1, size)]
    return Schedule("all_reduce", "by_hand", size, 1, rounds(up, down))


class TestProgram:
    def test_sends_precede_receives_and_simultaneous_sums_are_one_reduce(self) -> None:
        schedule = sum_at_zero_and_back()
        assert schedule.program(0) == (Reduce((0, 1, 2), 0, 1, complete=True), Send(1, 0, 1), Send(2, 0, 1))
        assert schedule.program(2) == (Send(0, 0, 1), Receive(0, 0, 1))

    def test_programs_are_cached(self) -> None:
        schedule = sum_at_zero_and_back()
        assert schedule.program(1) is schedule.program(1)

    def test_a_reduce_is_complete_only_with_every_contribution(self) -> None:
        chain = rounds([transfers(2, 1, 0, reduce=True)], [transfers(1, 0, 0, reduce=True)])
        schedule = Schedule("reduce", "by_hand", 3, 1, chain, root=0)
        verify(schedule)
        assert schedule.program(1)[0] == Reduce((1, 2), 0, 1, complete=False)
        assert schedule.program(0) == (Reduce((0, 1), 0, 1, complete=True),)

    @pytest.mark.parametrize(("collective", "name"), EVERY)
    def test_one_rank_s_program_equals_its_entry_in_all_programs(self, collective: str, name: str) -> None:
        schedule = built(collective, name, 6)
        together = schedule.numbered_programs()
        assert [schedule.program(rank) for rank in range(6)] == [tuple(s for _, s in steps) for steps in together]

    def test_a_rank_out_of_range_is_refused(self) -> None:
        with pytest.raises(ValueError, match="rank 3 is not in a schedule of 3 ranks"):
            sum_at_zero_and_back().program(3)


class TestBytes:
    def test_unequal_chunks_cover_the_tensor_in_whole_bytes(self) -> None:
        schedule = Schedule("all_gather", "by_hand", 3, 3, Rounds(0, lambda _: ()))
        table = transfers(0, 1, [0, 1, 2])
        assert schedule.message_bytes(table, 10).tolist() == [3, 3, 4]
        assert schedule.message_bytes(transfers(0, 1, 1, 3), 10).tolist() == [7]

    def test_bytes_of_an_all_to_all_are_those_of_one_rank_s_rows(self) -> None:
        schedule = algorithms.build("all_to_all", "direct", 4)
        assert schedule.bytes_on_wire(400) == 300
        assert schedule.total_bytes(400) == 1200

    def test_bytes_on_wire_are_the_maximum_and_total_bytes_the_sum(self) -> None:
        schedule = sum_at_zero_and_back()
        assert (schedule.bytes_on_wire(7), schedule.total_bytes(7), schedule.messages()) == (14, 28, 4)


class TestCost:
    """Prices in units in which a message costs 1, a byte 10 and a combined byte 100."""

    @staticmethod
    def of(*tables: list[Transfers], size: int = 4, nbytes: int = 1, gamma: float = 100) -> float:
        return cost(Schedule("broadcast", "by_hand", size, 1, rounds(*tables), root=0), nbytes, 1, 10, gamma)

    def test_distinct_pairs_send_concurrently(self) -> None:
        assert self.of([transfers([0, 2], [1, 3], 0)]) == 11

    def test_a_port_takes_one_message_at_a_time(self) -> None:
        assert self.of([transfers(0, 1, 0), transfers(0, 2, 0)]) == 22
        assert self.of([transfers(1, 0, 0), transfers(2, 0, 0)]) == 22

    def test_sending_and_receiving_do_not_wait_for_each_other(self) -> None:
        assert self.of([transfers([0, 1], [1, 0], 0)]) == 11

    def test_a_round_waits_for_the_messages_of_the_previous_one(self) -> None:
        assert self.of([transfers(0, 1, 0)], [transfers(1, 2, 0)], [transfers(2, 3, 0)]) == 33
        assert self.of([transfers(0, 1, 0)], [transfers(2, 3, 0)]) == 11

    def test_combining_overlaps_the_next_message_and_delays_the_next_round(self) -> None:
        both = [transfers(1, 0, 0, reduce=True), transfers(2, 0, 0, reduce=True)]
        assert self.of(both, gamma=2) == 22 + 2
        assert self.of(both, gamma=100) == 11 + 2 * 100
        assert self.of([transfers(1, 0, 0, reduce=True)], [transfers(0, 1, 0)]) == 11 + 100 + 11

    def test_links_between_hosts_have_their_own_cost(self) -> None:
        schedule = algorithms.build("all_gather", "ring", 4)
        hosts = (0, 0, 1, 1)
        alone = cost(schedule, 4, by_host(hosts, 1, 1), 0, 0)
        mixed = cost(schedule, 4, by_host(hosts, 1, 100), by_host(hosts, 0, 1000), 0)
        assert (alone, mixed) == (3, 1100 * 3)
        assert cost(schedule, 4, by_host((0, 0, 0, 0), 1, 100), 0, 0) == 3


class TestRounds:
    def test_backwards_reverses_rounds_and_messages(self) -> None:
        there = rounds([transfers([0, 1], [1, 2], [5, 6])], [transfers(2, 0, 7)])
        back = there.backwards(reduce=True)
        assert rows(back) == [[(0, 2, 7, 8)], [(1, 0, 5, 6), (2, 1, 6, 7)]]
        assert all(table.reduce for tables in back for table in tables)

    def test_rounds_are_concatenated(self) -> None:
        first, second = rounds([transfers(0, 1, 0)]), rounds([transfers(1, 0, 1)], [transfers(1, 2, 2)])
        assert rows(first + second) == [[(0, 1, 0, 1)], [(1, 0, 1, 2)], [(1, 2, 2, 3)]]

    def test_among_renames_ranks_and_shifts_chunks(self) -> None:
        assert rows(rounds([transfers([0, 1], [1, 0], [0, 1])]).among([7, 4], first_chunk=10)) == [
            [(4, 7, 11, 12), (7, 4, 10, 11)]
        ]

    def test_side_by_side_lasts_as_long_as_the_longest_group(self) -> None:
        short, long = rounds([transfers(0, 1, 0)]), rounds([transfers(2, 3, 0)], [transfers(3, 2, 0)])
        assert rows(in_parallel([short, long])) == [[(0, 1, 0, 1), (2, 3, 0, 1)], [(3, 2, 0, 1)]]

    def test_side_by_side_keeps_the_tables_that_only_some_have(self) -> None:
        one, two = rounds([transfers(0, 1, 0)]), rounds([transfers(2, 3, 0), transfers(2, 4, 0)])
        ((first, second),) = [list(tables) for tables in in_parallel([one, two])]
        assert [list(table.rows()) for table in (first, second)] == [[(0, 1, 0, 1), (2, 3, 0, 1)], [(2, 4, 0, 1)]]

    def test_a_cyclic_range_is_split_where_it_wraps_around(self) -> None:
        found = cyclic([0, 1], [2, 3], np.array([1, 3]), 3, 5)
        assert [list(table.rows()) for table in found] == [[(0, 2, 1, 4), (1, 3, 3, 5)], [(1, 3, 0, 1)]]


Damage = Callable[[Programs], None]


def lost(rank: int, kind: type, which: int) -> Damage:
    return lambda programs: programs[rank].__delitem__(places(programs, rank, kind)[which])


def changed(rank: int, kind: type, which: int, **fields: Any) -> Damage:
    """Return a damage that replaces fields of a step."""

    def damage(programs: Programs) -> None:
        place = places(programs, rank, kind)[which]
        number, step = programs[rank][place]
        programs[rank][place] = (number, replace(step, **fields))

    return damage


def swapped(ranks: Sequence[int], kind: type) -> Damage:
    """Return a damage that swaps the first two steps of some ranks."""

    def damage(programs: Programs) -> None:
        for rank in ranks:
            first, second = places(programs, rank, kind)[:2]
            programs[rank][first], programs[rank][second] = programs[rank][second], programs[rank][first]

    return damage


def added_twice(programs: Programs) -> None:
    for rank, kind in ((1, Send), (0, Reduce)):
        place = places(programs, rank, kind)[0]
        programs[rank].insert(place, programs[rank][place])
    changed(0, Reduce, 1, ranks=(0, 1), complete=True)(programs)


def without_rank_3(programs: Programs) -> None:
    lost(3, Send, 0)(programs)
    changed(0, Reduce, 0, ranks=(0, 1, 2), complete=False)(programs)


DAMAGES: dict[str, tuple[str, str, Damage, str]] = {
    "a lost send": (
        *("all_gather", "ring", lost(0, Send, 0)),
        "rank 1, round 0, chunk 0: expects chunks 0 to 1 from rank 0, .* of round 1, has chunks 3 to 4",
    ),
    "a lost last send": (
        *("all_gather", "ring", lost(0, Send, -1)),
        "rank 1, round 2, chunk 2: waits forever for a message from rank 0; waiting ranks: 1",
    ),
    "a message that is never received": (
        *("all_gather", "ring", lost(1, Receive, -1)),
        "rank 0, round 2, chunk 2: rank 1 never receives it",
    ),
    "a message sent twice": (
        *("all_gather", "ring", lambda programs: programs[0].append(programs[0][places(programs, 0, Send)[-1]])),
        "rank 0, round 2, chunk 2: rank 1 never receives it",
    ),
    "sends in another order": (
        *("all_reduce", "ring", swapped([0], Send)),
        "expects chunks 3 to 4 from rank 0, .* has chunks 2 to 3",
    ),
    "another chunk at one end": (
        *("all_reduce", "two_shot", changed(2, Send, 0, first=0, last=1)),
        "rank 1, round 0, chunk 1: expects chunks 1 to 2 from rank 2, .* has chunks 0 to 1",
    ),
    "a message of another round": (
        *("all_gather", "ring", lambda programs: programs[0].__setitem__(0, (1, programs[0][0][1]))),
        "rank 1, round 0, chunk 0: .* rank 0, whose next message, of round 1",
    ),
    "a chunk read before it was written": (
        *("all_gather", "ring", changed(0, Send, 0, first=2, last=3)),
        "rank 0, round 0, chunk 2: read before it was written",
    ),
    "ranks that wait for each other": (
        *("all_gather", "ring", swapped(range(4), object)),
        "waits forever .*; waiting ranks: 0, 1, 2, 3",
    ),
    "a contribution added twice": (
        *("reduce", "direct", added_twice),
        r"rank 0, round 0, chunk 0: adds ranks \[1\] twice",
    ),
    "a sum that lacks a rank": (
        *("reduce", "direct", without_rank_3),
        r"rank 0, round 1, chunk 0: ends with ranks \[0, 1, 2\]; expected",
    ),
    "a sum marked complete too early": (
        *("all_reduce", "ring", changed(0, Reduce, 0, complete=True)),
        "marked complete",
    ),
    "a complete sum that is not marked": (
        *("all_reduce", "ring", changed(0, Reduce, -1, complete=False)),
        "not marked complete",
    ),
    "a reduce without its own rank": (
        *("all_reduce", "one_shot", changed(0, Reduce, 0, ranks=(1, 2, 3))),
        "expected this rank among them",
    ),
    **{
        f"chunks {first} to {last}": (
            *("all_gather", "ring", changed(0, Send, 0, first=first, last=last)),
            f"chunks {first} to {last} are out of range; the tensor has 4",
        )
        for first, last in ((-1, 1), (2, 2), (3, 5))
    },
    **{
        f"a send to rank {to}": (
            *("all_gather", "ring", changed(0, Send, 0, to=to, first=0, last=1)),
            f"sends to rank {to}; expected another rank",
        )
        for to in (0, 4)
    },
}
"""Damages to the programs of a valid schedule for 4 ranks, and the texts of the errors."""


class TestVerifyFinds:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_programs(self, damage: str) -> None:
        collective, name, spoil, message = DAMAGES[damage]
        schedule = built(collective, name, 4)
        programs = schedule.numbered_programs()
        verify(schedule, programs)
        spoil(programs)
        with pytest.raises(ValueError, match=message) as caught:
            verify(schedule, programs)
        assert f"{name} {collective}, rank" in str(caught.value)

    def test_a_sum_that_is_complete_in_only_some_of_its_chunks(self) -> None:
        uneven = rounds([transfers(1, 0, 0, 2, reduce=True)], [transfers(1, 0, 1, reduce=True)])
        schedule = Schedule("reduce", "by_hand", 2, 2, uneven, root=0)
        assert schedule.program(0)[0] == Reduce((0, 1), 0, 2, complete=False)
        with pytest.raises(ValueError, match=r"chunk 0: holds ranks \[0, 1\], but is not marked complete"):
            verify(schedule)

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


def test_a_drawing_of_many_ranks_is_its_title() -> None:
    assert draw(algorithms.build("reduce", "binomial", 9, root=2)) == (
        "binomial reduce with root 2: 9 ranks, 1 chunk, 4 rounds"
    )


def test_the_documentation_shows_schedules_and_prices_as_they_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "collectives.md"
    examples = re.sub(r"^```.*$", "", page.read_text(), flags=re.MULTILINE)
    session = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    assert len(session.examples) > 10
    found: list[str] = []
    assert doctest.DocTestRunner().run(session, out=found.append).failed == 0, "".join(found)


def built(collective: str, name: str, size: int) -> Schedule:
    return algorithms.build(collective, name, size, root=0 if collective in ROOTED else None)


def places(programs: Programs, rank: int, kind: type) -> list[int]:
    return [place for place, (_, step) in enumerate(programs[rank]) if isinstance(step, kind)]


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
