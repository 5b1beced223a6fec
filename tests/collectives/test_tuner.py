"""Table of algorithms: choices, distribution to ranks, and forced algorithms."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.bench.algorithms import tuning
from gangline.bench.driver.processes import Candidate
from gangline.collectives import algorithms
from gangline.collectives.algorithms import REGISTRY, direct
from gangline.collectives.communicator import open_communicator
from gangline.collectives.tuner import (
    SHARED_LIMIT,
    TRANSPORTS,
    TUNED,
    Choice,
    Rule,
    Table,
    TableKey,
    built_in,
    forced_algorithms,
    forced_transport,
    shared_serves,
    table_path,
)
from tests.collectives.processes import Processes, Rank

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
PLACE = TableKey("all_reduce", "tcp", 3, 1)
RULES = [Rule(100, Choice("one_shot")), Rule(5000, Choice("halving_doubling")), Rule(None, Choice("ring", 4))]
TABLE = Table({PLACE: RULES})


def test_a_rule_serves_up_to_and_with_its_limit() -> None:
    chosen = [TABLE.choose("all_reduce", nbytes, 3, "tcp") for nbytes in (0, 100, 101, 5000, 5001, 1 << 40)]
    assert chosen == [rule.choice for rule in RULES for _ in range(2)]


def test_collectives_up_to_the_first_limit_need_no_lookup_if_they_are_shared() -> None:
    shared, ring = Choice("shared"), Choice("ring")
    keys = [TableKey("all_reduce", "shared_memory", size, 1) for size in (2, 3)]
    table = Table({keys[0]: [Rule(5000, shared), Rule(None, ring)], keys[1]: [Rule(100, ring), Rule(None, ring)]})
    limits = [table.shared_up_to("all_reduce", size, "shared_memory", 1) for size in (2, 3, 4)]
    assert limits == [5000, -1, SHARED_LIMIT]
    assert table.shared_up_to("all_reduce", 2, "tcp", 1) == -1


@pytest.mark.parametrize(
    ("collective", "size", "transport", "hosts"),
    [
        ("all_gather", 3, "tcp", 1),
        ("all_reduce", 4, "tcp", 1),
        ("all_reduce", 3, "ipc", 1),
        ("all_reduce", 3, "tcp", 3),
    ],
)
def test_a_key_that_was_not_measured_gets_the_default(collective: str, size: int, transport: str, hosts: int) -> None:
    assert TABLE.choose(collective, 7, size, transport, hosts) == Table().choose(collective, 7, size, transport, hosts)


def test_small_tensors_are_shared_in_one_hosts_memory_and_only_there() -> None:
    table = Table()
    for collective in TUNED:
        for transport in ("shared_memory", "in_process"):
            large = "two_shot" if collective == "all_reduce" else "direct"
            for ranks, limit in ((4, SHARED_LIMIT), (5, 1 << 17)):
                assert table.choose(collective, limit, ranks, transport).algorithm == "shared"
                assert table.choose(collective, limit + 1, ranks, transport).algorithm == large
            assert table.choose(collective, 4, 2, transport, 2).algorithm != "shared"
        assert table.choose(collective, 4, 2, "tcp").algorithm != "shared"


def test_several_hosts_of_several_ranks_are_a_hierarchy() -> None:
    chosen = [Table().choose("all_reduce", 1 << 24, 8, "tcp", hosts).algorithm for hosts in (1, 2, 8)]
    assert chosen == ["ring", "hierarchical", "ring"]


@given(
    collective=st.sampled_from(TUNED),
    transport=st.sampled_from(TRANSPORTS),
    ranks=st.integers(2, 40),
    hosts=st.integers(1, 40),
    nbytes=st.integers(0, 1 << 30),
)
def test_default_choices_can_be_built(collective: str, transport: str, ranks: int, hosts: int, nbytes: int) -> None:
    hosts = min(hosts, ranks)
    choice = Table().choose(collective, nbytes, ranks, transport, hosts)
    rules = built_in(TableKey(collective, transport, ranks, hosts))
    Table({TableKey(collective, transport, ranks, hosts): rules})  # holds what a measured table must
    if choice.algorithm == "shared":
        assert shared_serves(nbytes, transport, hosts)
        return
    root = 0 if collective in ("reduce", "broadcast", "gather", "scatter") else None
    places = tuple(rank * hosts // ranks for rank in range(ranks))
    built = algorithms.build(collective, choice.algorithm, ranks, root=root, segments=choice.segments, hosts=places)
    assert built.size == ranks


def test_a_table_survives_text_and_file(tmp_path: Path) -> None:
    table = Table({PLACE: RULES, PLACE._replace(hosts=3): RULES[2:]}, {"broadcast": Choice("ring", 2)})
    assert Table.from_json(table.to_json()) == table
    path = tmp_path / "made" / "tuning.json"
    table.dump(path)
    with path.open() as before:  # while it is open, its inode is not reused
        table.dump(path)
        assert not os.path.samestat(os.fstat(before.fileno()), path.stat())
    assert Table.load(path) == table
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]
    assert Table.from_json(Table().to_json()) == Table()


def damaged(**changes: Any) -> str:
    """Return TABLE's text with changed fields."""
    data = json.loads(TABLE.to_json())
    data["places"][0] |= changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        (TABLE.to_json()[:-20], "delimiter"),
        ('{"gangline_tuning": 2, "places": [], "forced": {}}', "its 'gangline_tuning' is 2; expected 1"),
        ('{"gangline_tuning": 1, "forced": {}}', "KeyError: 'places'"),
        ('{"gangline_tuning": 1, "places": [], "forced": []}', "not laid out"),
        ('{"gangline_tuning": 1, "places": [], "forced": {"reduce": ["one_shot", 1]}}', "reduce has no algorithm"),
        (damaged(rules=[[None, "ring", 1, 1]]), "not laid out"),
    ],
)
def test_a_torn_or_foreign_file_is_named_and_stops_no_start(
    tmp_path: Path, text: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Table.load(path)
    assert str(caught.value).startswith(f"{path} is not a tuning table: ")
    assert "gangline bench tune" in str(caught.value)
    assert Table.from_environment({"GANGLINE_TUNING": str(path)}) == Table()
    assert caplog.messages == [f"the built-in choices of algorithms are used: {caught.value}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collective": "barrier"}, "'barrier' has no algorithms"),
        ({"rules": []}, r"the limits are \[\]; expected ascending"),
        ({"rules": [[100, "ring", 1]]}, "and null as the last"),
        ({"rules": [[9, "ring", 1], [9, "two_shot", 1], [None, "ring", 1]]}, r"\[9, 9, None\]; expected ascending"),
        ({"rules": [[None, "double_tree", 1]]}, "no algorithm 'double_tree'; expected one of shared, ring"),
        ({"rules": [[None, "ring", 0]]}, "segments is 0"),
        ({"rules": [[100, "shared", 1], [None, "ring", 1]]}, "shared takes up to 1048576 bytes in one host's memory"),
    ],
)
def test_unusable_rules_are_left_out_with_one_warning(
    changes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = json.loads(Table({PLACE: RULES, PLACE._replace(hosts=3): RULES}).to_json())
    data["places"] = [data["places"][0] | changes, {**data["places"][0], **changes, "ranks": 9}, data["places"][1]]
    assert Table.from_json(json.dumps(data)) == Table({PLACE._replace(hosts=3): RULES})
    (warning,) = caplog.messages
    assert warning.startswith("the table of algorithms has 2 unusable rules, which the built-in ones replace: ")
    assert re.search(message, warning)


def _with_a_table_of_its_own(rank: Rank, folder: str, is_home_closed: bool) -> None:
    os.environ.pop("GANGLINE_TUNING", None)
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank.rank}"
    if is_home_closed:
        "name".encode("idna")  # imports the codec: Python itself may be in root's home
        os.setuid(65534)
    with open_communicator(rank.rank, rank.size, rank.exchange, timeout=20) as comm:
        rank.tell(comm.all_reduce(torch.ones(3)).tolist())
    rank.hear()


@pytest.mark.parametrize(
    "is_home_closed", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=AS_ROOT)]
)
def test_no_table_of_a_rank_stops_the_start(tmp_path: Path, is_home_closed: bool) -> None:
    for rank, text in enumerate((damaged(rules=[[None, "double_tree", 1]]), "torn")):
        (tmp_path / f"{rank}" / "gangline").mkdir(parents=True)
        (tmp_path / f"{rank}" / "gangline" / "tuning.json").write_text(text)
    tmp_path.chmod(0o700)
    with Processes(_with_a_table_of_its_own, 2, str(tmp_path), is_home_closed) as ranks:
        assert ranks.all_heard() == [[2.0] * 3] * 2


def _with_wrong_variables(rank: Rank, wrong: int, name: str) -> None:
    if rank.rank == wrong:
        os.environ[name] = "nosuch"
    with pytest.raises((ValueError, OSError)) as caught:
        open_communicator(rank.rank, rank.size, rank.exchange, timeout=20)
    rank.tell(str(caught.value))
    rank.hear()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(0, "GANGLINE_TUNING"), (0, "GANGLINE_ALGO"), (1, "GANGLINE_TRANSPORT"), (1, "GANGLINE_HEARTBEAT")],
)
def test_a_wrong_variable_of_one_rank_is_an_error_of_all(wrong: int, name: str) -> None:
    with Processes(_with_wrong_variables, 2, wrong, name) as ranks:
        texts = ranks.all_heard()
    assert name in texts[wrong]
    assert texts[1 - wrong].startswith(f"rank {wrong}: ")
    assert texts[1 - wrong].endswith(texts[wrong])


def test_the_environment_gives_the_path_of_the_table(tmp_path: Path) -> None:
    assert table_path({"GANGLINE_TUNING": "/t.json", "XDG_CACHE_HOME": "/c"}) == Path("/t.json")
    assert table_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/gangline/tuning.json")
    assert table_path({}) == Path.home() / ".cache" / "gangline" / "tuning.json"
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    assert Table.from_environment(environment) == Table()
    TABLE.dump(tmp_path / "gangline" / "tuning.json")
    assert Table.from_environment(environment) == TABLE
    with pytest.raises(FileNotFoundError, match=r"GANGLINE_TUNING is /nosuch/t\.json, which does not exist"):
        Table.from_environment({**environment, "GANGLINE_TUNING": "/nosuch/t.json"})


def test_a_user_without_a_home_has_the_built_in_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # not in /etc/passwd, as in many containers
    assert Table.from_environment({}).rules == {}


def test_forced_algorithms_override_the_table_where_possible(tmp_path: Path) -> None:
    TABLE.dump(tmp_path / "gangline" / "tuning.json")
    environment = {"XDG_CACHE_HOME": str(tmp_path), "GANGLINE_ALGO": "all_reduce=two_shot, broadcast=ring:8"}
    table = Table.from_environment(environment)
    assert Table.from_json(table.to_json()) == table
    assert table.choose("all_reduce", 5, 3, "tcp") == Choice("two_shot")
    assert table.choose("broadcast", 5, 2, "shared_memory") == Choice("ring", 8)
    assert table.choose("all_gather", 5, 2, "shared_memory") == Choice("shared")
    shared = Table(TABLE.rules, forced_algorithms("shared"))
    assert shared.choose("all_reduce", 5, 3, "tcp") == Choice("one_shot")
    assert shared.choose("all_reduce", SHARED_LIMIT, 3, "shared_memory") == Choice("shared")
    assert shared.choose("all_reduce", SHARED_LIMIT + 1, 3, "shared_memory") == Choice("two_shot")


def test_a_bare_name_forces_every_collective_that_has_it() -> None:
    assert forced_algorithms("") == {}
    assert forced_algorithms("binomial") == dict.fromkeys(
        [collective for collective in TUNED if "binomial" in algorithms.names(collective)], Choice("binomial")
    )
    assert set(forced_algorithms("ring")) == {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"}
    later = forced_algorithms("ring:2,all_reduce=two_shot")
    assert (later["all_reduce"], later["broadcast"]) == (Choice("two_shot"), Choice("ring", 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rng", "GANGLINE_ALGO has 'rng'; expected names out of binomial, "),
        ("all_to_all=ring", "GANGLINE_ALGO: all_to_all has no algorithm 'ring'; expected one of shared, pairwise"),
        ("barrier=ring", "'barrier' has no algorithms to choose from; expected one of all_reduce"),
        ("ring:0", "'ring:0'; expected a number of segments above 0"),
        ("all_reduce=ring:two", "expected a number of segments above 0"),
    ],
)
def test_an_unknown_word_is_refused_with_the_list(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forced_algorithms(words)


def test_a_transport_is_forced_by_name() -> None:
    assert forced_transport({}) is None
    assert forced_transport({"GANGLINE_TRANSPORT": "auto"}) is None
    assert forced_transport({"GANGLINE_TRANSPORT": "ipc"}) == "ipc"
    with pytest.raises(
        ValueError, match="GANGLINE_TRANSPORT is 'udp'; expected auto or one of shared_memory, ipc, tcp"
    ):
        forced_transport({"GANGLINE_TRANSPORT": "udp"})


# `gangline bench tune`: candidates, rules, and the refusal of wrong results


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
    assert sorted(choice.segments for choice in found if choice.algorithm == "ring") == [1, 4, 16]
    assert [choice.segments for choice in found if choice.algorithm == "direct"] == [1]
    assert Choice("shared") not in tuning.candidates(TableKey("broadcast", "tcp", 4, 1))
    assert tuning.candidates(TableKey("all_to_all", "tcp", 2, 1)) == [Choice("direct")]  # pairwise is the same


LAZY_RANK = """
from gangline.bench.peers.ranks.gangline import join
from gangline.collectives.algorithms import REGISTRY, direct
REGISTRY["all_reduce"]["lazy"] = lambda request: direct.broadcast(request.size, 0)  # reduces nothing
"""


@pytest.mark.slow
def test_an_algorithm_with_a_wrong_sum_is_refused_however_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(REGISTRY["all_reduce"], "lazy", lambda request: direct.broadcast(request.size, 0))
    kept = ("lazy", "one_shot", "halving_doubling", "ring")
    monkeypatch.setitem(REGISTRY, "all_reduce", {name: REGISTRY["all_reduce"][name] for name in kept})
    (tmp_path / "lazy_rank.py").write_text(LAZY_RANK)
    monkeypatch.setattr(tuning, "collective_ranks", lambda _, ranks: [Candidate(str(tmp_path / "lazy_rank"), ranks)])
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
