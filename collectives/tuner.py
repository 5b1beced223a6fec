"""Which algorithm a collective runs: a table, measured by `gangline bench tune` or built in, and what forces a choice.

The table is plain data. Rank 0's is sent to all ranks (`to_json`, `from_json`) and does not change within a job, so
that all ranks choose alike and a run gives the same bits each time.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gangline.collectives import algorithms
from gangline.collectives.transports.base import SLOT_BYTES

SHARED = "shared"
"""The exchange of small tensors: all copy theirs into memory that all can reach, and after one synchronisation each
takes what it needs. It is no schedule: the Communicator does it itself."""
SHARED_LIMIT = SLOT_BYTES
"""The most bytes of a rank's tensor that the shared exchange takes."""
TRANSPORTS = ("shared_memory", "ipc", "tcp", "in_process")
"""Names that a transport can have; the Communicator offers "auto" as well."""
TUNED = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""The collectives that have algorithms to choose from."""

_FORMAT = 1
_IN_MEMORY = ("shared_memory", "in_process")
_logger = logging.getLogger("gangline")


class Choice(NamedTuple):
    """An algorithm, and into how many segments it cuts what it pipelines."""

    algorithm: str
    segments: int = 1

    def __str__(self) -> str:
        return self.algorithm if self.segments == 1 else f"{self.algorithm}:{self.segments}"


class TableKey(NamedTuple):
    """Where a collective runs; what is best at one place says little of another."""

    collective: str
    transport: str
    ranks: int
    hosts: int


class Rule(NamedTuple):
    """Up to so many bytes (None: any number) this is chosen."""

    nbytes: int | None
    choice: Choice


@dataclass(frozen=True)
class Table:
    """For each measured place its rules, in ascending order of bytes; the built-in default for all other places."""

    rules: Mapping[TableKey, Sequence[Rule]] = field(default_factory=dict)
    forced: Mapping[str, Choice] = field(default_factory=dict)
    """For a collective: the algorithm that is taken wherever it can be."""
    _ready: dict[tuple[str, str, int, int], tuple[list[int], list[Choice]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """For each place that was asked for: the limits, and the choices up to them and above."""
    _seen: set[tuple[TableKey, int, Choice]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for place, rules in self.rules.items():
            _check(place, rules)
        for collective, choice in self.forced.items():
            _check_choice(collective, choice)

    def choose(self, collective: str, nbytes: int, size: int, transport: str, hosts: int = 1) -> Choice:
        """The algorithm for a call; the same for the same arguments, always.

        Args:
            collective: one of `TUNED`.
            nbytes: bytes of the tensor that a rank gives (where one has a row for each rank: of all its rows); of the
                root's for broadcast and scatter.
            size: number of ranks.
            transport: one of `TRANSPORTS`.
            hosts: on how many hosts the ranks are.

        Returns:
            "shared", or an algorithm that `gangline.collectives.algorithms.build` knows for the collective.
        """
        place = (collective, transport, size, hosts)
        found = self._ready.get(place)
        if found is None:
            rules = self._rules_at(TableKey(*place))
            found = [rule.nbytes for rule in rules if rule.nbytes is not None], [rule.choice for rule in rules]
            self._ready[place] = found
        limits, choices = found
        choice = choices[bisect_left(limits, nbytes)]
        if _logger.isEnabledFor(logging.DEBUG):
            self._log(TableKey(*place), nbytes, choice)
        return choice

    def to_json(self) -> str:
        """The table as text, from which `from_json` makes its equal."""
        return json.dumps(
            {
                "gangline_tuning": _FORMAT,
                "forced": {collective: list(choice) for collective, choice in self.forced.items()},
                "places": [
                    {**place._asdict(), "rules": [[rule.nbytes, *rule.choice] for rule in rules]}
                    for place, rules in self.rules.items()
                ],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Table:
        """The table that a text stands for.

        Raises:
            ValueError: it stands for none, or holds an algorithm that there is not; the message says what is wrong.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"no JSON ({error})") from None
        if not isinstance(data, dict) or data.get("gangline_tuning") != _FORMAT:
            raise ValueError(f"no 'gangline_tuning': {_FORMAT} in it")
        try:
            rules = {
                TableKey(each["collective"], each["transport"], each["ranks"], each["hosts"]): [
                    Rule(nbytes, Choice(*choice)) for nbytes, *choice in each["rules"]
                ]
                for each in data["places"]
            }
            forced = {collective: Choice(*choice) for collective, choice in data["forced"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not laid out as a tuning table ({type(error).__name__}: {error})") from None
        return cls(rules, forced)

    @classmethod
    def load(cls, path: Path) -> Table:
        """The table in a file.

        Raises:
            ValueError: the file is torn or foreign; the message names it.
            OSError: it cannot be read.
        """
        try:
            return cls.from_json(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is no tuning table: {error}; make a new one with `gangline bench tune`, or remove it"
            ) from None

    def dump(self, path: Path) -> None:
        """Write the table, aside and then renamed; the folder is made if it is not there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(self.to_json() + "\n")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Table:
        """The table a job uses: the file at `table_path` if there is one, and what GANGLINE_ALGO forces.

        Raises:
            ValueError: GANGLINE_ALGO names what there is not, or the file is torn or foreign.
            FileNotFoundError: GANGLINE_TUNING names a file that is not there.
        """
        path = table_path(environment)
        if path.exists():
            rules = cls.load(path).rules
        elif "GANGLINE_TUNING" in environment:
            raise FileNotFoundError(f"GANGLINE_TUNING is {path}, which is not there; `gangline bench tune` writes one")
        else:
            rules = {}
        return cls(rules, forced_algorithms(environment.get("GANGLINE_ALGO", "")))

    def _rules_at(self, place: TableKey) -> Sequence[Rule]:
        rules = self.rules.get(place) or built_in(place)
        choice = self.forced.get(place.collective)
        if choice is None:
            return rules
        if choice.algorithm != SHARED:
            return [Rule(None, choice)]
        if not shared_serves(SHARED_LIMIT, place.transport, place.hosts):
            return rules
        larger = [rule for rule in rules if rule.nbytes is None or rule.nbytes > SHARED_LIMIT]
        return [Rule(SHARED_LIMIT, choice), *larger]

    def _log(self, place: TableKey, nbytes: int, choice: Choice) -> None:
        seen = (place, nbytes.bit_length(), choice)
        if seen not in self._seen:
            self._seen.add(seen)
            _logger.debug(
                "%s of %d bytes, %d ranks, %d host(s), %s: %s",
                place.collective,
                nbytes,
                place.ranks,
                place.hosts,
                place.transport,
                choice,
            )


def shared_serves(nbytes: int, transport: str, hosts: int) -> bool:
    """Whether the shared exchange can take a tensor of so many bytes there."""
    return nbytes <= SHARED_LIMIT and hosts == 1 and transport in _IN_MEMORY


def table_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the table is looked for, and `gangline bench tune` writes it: GANGLINE_TUNING, or in the user's cache."""
    if "GANGLINE_TUNING" in environment:
        return Path(environment["GANGLINE_TUNING"])
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "gangline" / "tuning.json"


def forced_transport(environment: Mapping[str, str] = os.environ) -> str | None:
    """The transport that GANGLINE_TRANSPORT forces; None: it does not.

    Raises:
        ValueError: there is no such transport.
    """
    word = environment.get("GANGLINE_TRANSPORT", "")
    if word in ("", "auto"):
        return None
    if word not in TRANSPORTS:
        raise ValueError(f"GANGLINE_TRANSPORT is {word!r}; expected auto or one of {', '.join(TRANSPORTS)}")
    return word


def forced_algorithms(words: str) -> dict[str, Choice]:
    """What GANGLINE_ALGO forces, for each collective.

    Args:
        words: an algorithm for every collective that has it ("ring"), or algorithms for some, with commas
            ("all_reduce=ring:8,broadcast=binomial"); a number behind a colon is that of segments.

    Raises:
        ValueError: there is no such collective, it has no such algorithm, or the number of segments is none.
    """
    found: dict[str, Choice] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        collective, equals, named = word.rpartition("=")
        algorithm, colon, segments = named.partition(":")
        if colon and not (segments.isdecimal() and int(segments)):
            raise ValueError(f"GANGLINE_ALGO has {word!r}; expected a number of segments above 0 after the colon")
        choice = Choice(algorithm, int(segments) if colon else 1)
        if equals:
            _check_choice(collective, choice, "GANGLINE_ALGO: ")
            found[collective] = choice
            continue
        having = [each for each in TUNED if algorithm in names(each)]
        if not having:
            every = sorted({name for each in TUNED for name in names(each)})
            raise ValueError(f"GANGLINE_ALGO has {word!r}; expected names out of {', '.join(every)}")
        found.update(dict.fromkeys(having, choice))
    return found


def names(collective: str) -> tuple[str, ...]:
    """What can be chosen for a collective: the shared exchange and the algorithms that there are.

    Raises:
        ValueError: there is nothing to choose for it.
    """
    if collective not in TUNED:
        raise ValueError(f"{collective!r} has no algorithms to choose from; expected one of {', '.join(TUNED)}")
    return (SHARED, *algorithms.names(collective))


def built_in(place: TableKey) -> Sequence[Rule]:
    """The rules where nothing was measured: as they proved right on machines of few cores and a network of one link."""
    return tuple(_built_in(place))


def _built_in(place: TableKey) -> Iterator[Rule]:
    if place.hosts == 1 and place.transport in _IN_MEMORY:
        yield Rule(SHARED_LIMIT if place.ranks <= 4 else 1 << 17, Choice(SHARED))  # every rank reads what all give
        yield Rule(None, Choice("two_shot" if place.collective == "all_reduce" else "direct"))
        return
    few, several_a_host = place.ranks <= 4, 1 < place.hosts < place.ranks
    match place.collective:
        case "all_reduce":
            yield Rule(max(1 << 10, (1 << 22) // place.ranks**2), Choice("one_shot"))  # p (p - 1) tensors on their way
            if several_a_host:
                yield Rule(None, Choice("hierarchical"))
                return
            yield Rule(1 << 21, Choice("halving_doubling"))
            yield Rule(None, Choice("ring"))
        case "all_gather" | "reduce_scatter":
            yield Rule(1 << 21 if few else 1 << 12, Choice("direct"))
            if not few:
                yield Rule(1 << 19, Choice("halving_doubling"))
            yield Rule(None, Choice("ring"))
        case "broadcast" | "reduce":
            yield Rule(1 << 19, Choice("direct" if few else "binomial"))
            yield Rule(None, Choice("hierarchical") if several_a_host else Choice("double_tree", 4))
        case "all_to_all":
            yield Rule(1 << 21, Choice("direct"))
            yield Rule(None, Choice("pairwise"))
        case _:  # gather and scatter: the root's link has to carry all of it whatever the way
            yield Rule(1 << 12, Choice("direct" if few else "binomial"))
            yield Rule(None, Choice("direct"))


def _check(place: TableKey, rules: Sequence[Rule]) -> None:
    where = f"{place.collective} of {place.ranks} ranks on {place.hosts} host(s), {place.transport}"
    for name, count in (("ranks", place.ranks), ("hosts", place.hosts)):
        if not _is_count(count):
            raise ValueError(f"{where}: {name} is {count!r}; expected a number above 0")
    if place.transport not in TRANSPORTS:
        raise ValueError(f"{where}: expected one of the transports {', '.join(TRANSPORTS)}")
    limits: list[Any] = [rule.nbytes for rule in rules]
    if not limits or limits[-1] is not None:
        raise ValueError(f"{where}: the last rule must be for any number of bytes (null), but the limits are {limits}")
    if not all(_is_count(limit) for limit in limits[:-1]) or limits[:-1] != sorted(set(limits[:-1])):
        raise ValueError(f"{where}: the limits are {limits}; expected ascending numbers of bytes")
    for rule in rules:
        _check_choice(place.collective, rule.choice, f"{where}: ")
        most = rule.nbytes if rule.nbytes is not None else SHARED_LIMIT + 1
        if rule.choice.algorithm == SHARED and not shared_serves(most, place.transport, place.hosts):
            raise ValueError(
                f"{where}: shared takes up to {SHARED_LIMIT} bytes in one host's memory, not {rule.nbytes}"
            )


def _check_choice(collective: str, choice: Choice, where: str = "") -> None:
    if choice.algorithm not in names(collective):
        raise ValueError(
            f"{where}{collective} has no algorithm {choice.algorithm!r}; expected one of {', '.join(names(collective))}"
        )
    if not _is_count(choice.segments):
        raise ValueError(f"{where}{collective} by {choice.algorithm}: segments is {choice.segments!r}, not above 0")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
