"""`gangline bench tune`: candidates, rules, and the refusal of wrong results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gangline import Communicator
from gangline.collectives import tuning
from gangline.collectives.algorithms import REGISTRY, direct
from gangline.collectives.tuner import SHARED_LIMIT, TUNED, Choice, Rule, Table, TableKey

time_choice = tuning.time_choice


def test_rules_follow_from_times() -> None:
    shared, ring, shot = Choice("shared"), Choice("ring", 4), Choice("one_shot")
    times = {
        1024: {shared: 1.0, shot: 3.0, ring: 9.0},
        65536: {shared: 5.0, shot: 6.0, ring: 9.0},
        262144: {shot: 20.0, ring: 21.2},
        1 << 20: {shot: 99.0, ring: 98.0},  # no more than chance
        1 << 24: {shot: 999.0, ring: 800.0},
    }
    unusual = Choice("two_shot")
    assert tuning.rules_from(times, lambda size: unusual) == [
        Rule(1 << 17, shared),  # between 65,536 and 262,144
        Rule(1 << 22, shot),
        Rule(None, ring),
    ]
    assert tuning.rules_from(times, lambda size: ring) == [Rule(1 << 17, shared), Rule(1 << 19, shot), Rule(None, ring)]
    only_small = {size: times[size] for size in (1024, 65536)}
    assert tuning.rules_from(only_small, lambda size: unusual) == [Rule(SHARED_LIMIT, shared), Rule(None, shot)]
    Table({TableKey("all_reduce", "shared_memory", 2, 1): tuning.rules_from(times, lambda size: ring)})


def test_candidates_are_all_algorithms_with_segments_where_these_matter() -> None:
    found = tuning.candidates(TableKey("broadcast", "shared_memory", 4, 1))
    assert found[0] == Choice("shared")
    assert sorted(choice.segments for choice in found if choice.algorithm == "double_tree") == [1, 4, 16]
    assert [choice.segments for choice in found if choice.algorithm == "direct"] == [1]
    assert Choice("shared") not in tuning.candidates(TableKey("broadcast", "tcp", 4, 1))
    assert tuning.candidates(TableKey("all_to_all", "tcp", 2, 1)) == [Choice("direct")]  # pairwise is the same


def time_a_lazy_choice(
    comm: Communicator, key: TableKey, choice: Choice, checked: Sequence[int], sizes: Sequence[int]
) -> list[float]:
    """Time a choice in a process that knows an algorithm which reduces nothing."""
    REGISTRY["all_reduce"]["lazy"] = lambda request: direct.broadcast(request.size, 0)
    return time_choice(comm, key, choice, checked, sizes)


def test_an_algorithm_with_a_wrong_sum_is_refused_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY["all_reduce"], "lazy", lambda request: direct.broadcast(request.size, 0))
    kept = ("lazy", "one_shot", "halving_doubling", "ring")
    monkeypatch.setitem(REGISTRY, "all_reduce", {name: REGISTRY["all_reduce"][name] for name in kept})
    monkeypatch.setattr(tuning, "time_choice", time_a_lazy_choice)
    found = tuning.measure("ipc", 2, ["all_reduce"], [1024, 4096])
    place = TableKey("all_reduce", "ipc", 2, 1)
    assert {rule.choice.algorithm for rule in found.rules[place]} <= {"one_shot", "halving_doubling"}
    assert len(found.refused) == 1
    assert found.refused[0].startswith("all_reduce by lazy, 2 ranks over ipc: ")
    assert found.refused[0].endswith("elements of 8024 bytes are wrong")
    measured = {
        (choice.algorithm, size, len(runs))
        for size, of_size in found.times[place].items()
        for choice, runs in of_size.items()
    }
    assert measured == {(name, size, 3) for name in ("one_shot", "halving_doubling") for size in (1024, 4096)}


@pytest.mark.slow
def test_every_built_in_algorithm_is_right() -> None:
    found = tuning.measure("shared_memory", 3, TUNED, [4096])
    assert found.refused == []
    assert {key.collective for key in found.rules} == set(TUNED)
