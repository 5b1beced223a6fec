"""Selection of the algorithm of each collective: a table, measured by `gangline bench tune` or built in.

All ranks get rank 0's table (`to_json`, `from_json`), which does not change within a job, so all ranks choose the same
algorithms and a run is bitwise reproducible.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gangline.collectives import algorithms
from gangline.collectives.host_files import write_text
from gangline.collectives.transports.base import SLOT_BYTES

SLOTS = "shared"
"""Shared exchange, for small tensors.

Every rank copies its tensor into shared memory and, after one synchronisation, reads the other ranks' tensors. The
engine implements it without a schedule.
"""
SHARED_LIMIT = SLOT_BYTES
"""Maximum bytes of a rank's tensor for the slots."""
TRANSPORTS = ("shared_memory", "ipc", "tcp", "in_process")
"""Names of the transports; `connect` also accepts "auto"."""
TUNED = tuple(algorithms.REGISTRY)
"""Collectives that have a choice of algorithms."""

_log = logging.getLogger("gangline")
_FORMAT = 1
_IN_MEMORY = ("shared_memory", "in_process")


class Choice(NamedTuple):
    """Algorithm, and its number of segments per chunk if it is pipelined."""

    algorithm: str
    segments: int = 1

    def __str__(self) -> str:
        return self.algorithm if self.segments == 1 else f"{self.algorithm}:{self.segments}"


class TableKey(NamedTuple):
    """Conditions of a measurement; results hold for one key only."""

    collective: str
    transport: str
    ranks: int
    hosts: int


class Rule(NamedTuple):
    """Choice for tensors of at most ``nbytes`` bytes; None: any number."""

    nbytes: int | None
    choice: Choice


@dataclass(frozen=True)
class Table:
    """Rules for each measured key, in ascending order of bytes; the built-in default for all other keys."""

    rules: Mapping[TableKey, Sequence[Rule]] = field(default_factory=dict)
    forced: Mapping[str, Choice] = field(default_factory=dict)
    """Algorithm to use for a collective wherever possible."""
    _ready: dict[tuple[str, str, int, int], tuple[list[int], list[Choice]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Limits and choices of each key used so far."""

    def __post_init__(self) -> None:
        for key, rules in self.rules.items():
            _check(key, rules)
        for collective, choice in self.forced.items():
            _check_choice(collective, choice)

    def choose(
        self, collective: str, nbytes: int, size: int, transport: str, hosts: int = 1, *, streams: bool = False
    ) -> Choice:
        """Return the algorithm for a call, "shared" or another one, always the same for the same arguments.

        Args:
            collective: one of `TUNED`.
            nbytes: bytes of a rank's input tensor, with all rows if it has one per rank; for broadcast and scatter, of
                the root's.
            size: number of ranks.
            transport: one of `TRANSPORTS`.
            hosts: number of hosts.
            streams: whether the slots can take tensors of any size; without a measurement, two ranks then do so.
        """
        key = (collective, transport, size, hosts)
        ready = self._ready.get(key)
        if ready is None:
            rules = self._rules_at(TableKey(*key))
            ready = [rule.nbytes for rule in rules if rule.nbytes is not None], [rule.choice for rule in rules]
            self._ready[key] = ready
        if streams and nbytes > SHARED_LIMIT and size == 2 and not (key in self.rules or collective in self.forced):
            return Choice(SLOTS)
        limits, choices = ready
        return choices[bisect_left(limits, nbytes)]

    def shared_up_to(self, collective: str, size: int, transport: str, hosts: int) -> int:
        """Return the bytes up to which `choose` returns "shared" for all tensors; -1 if for none."""
        self.choose(collective, 0, size, transport, hosts)
        limits, choices = self._ready[collective, transport, size, hosts]
        return limits[0] if choices[0].algorithm == SLOTS else -1

    def to_json(self) -> str:
        """Return the table as text for `from_json`."""
        return json.dumps(
            {
                "gangline_tuning": _FORMAT,
                "forced": {collective: list(choice) for collective, choice in self.forced.items()},
                "places": [
                    {**key._asdict(), "rules": [[rule.nbytes, *rule.choice] for rule in rules]}
                    for key, rules in self.rules.items()
                ],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Return the table that `to_json` serialized.

        Places whose rules cannot be used, such as those of an older version, are left out with one warning.

        Raises:
            ValueError: if the text is not a table; the message says why.
        """
        try:
            data = json.loads(text)
            if data["gangline_tuning"] != _FORMAT:
                raise ValueError(f"its 'gangline_tuning' is {data['gangline_tuning']!r}; expected {_FORMAT}")
            rules: dict[TableKey, list[Rule]] = {}
            unusable = []
            for each in data["places"]:
                key = TableKey(each["collective"], each["transport"], each["ranks"], each["hosts"])
                rules[key] = [Rule(nbytes, Choice(*choice)) for nbytes, *choice in each["rules"]]
                try:
                    _check(key, rules[key])
                except ValueError as error:
                    del rules[key]
                    unusable.append(str(error))
            if unusable:
                _log.warning(
                    "the table of algorithms has %d unusable rules, which the built-in ones replace: %s; measure again "
                    "with `gangline bench tune`",
                    len(unusable),
                    unusable[0],
                )
            return cls(rules, {collective: Choice(*choice) for collective, choice in data["forced"].items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not laid out as a tuning table ({type(error).__name__}: {error})") from None

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table from a file.

        Raises:
            ValueError: if the file is damaged or not a table; the message names it.
            OSError: if it cannot be read.
        """
        try:
            return cls.from_json(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"{path} is not a tuning table: {error}; make a new one with `gangline bench tune`, or remove it"
            ) from None

    def dump(self, path: Path) -> None:
        """Write the table to a temporary file and rename it; create the folder if needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            write_text(temporary, self.to_json() + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Table:
        """Return the table for a job: the file at `table_path`, if it exists, and the choices of GANGLINE_ALGO.

        A file that cannot be read, or is damaged or not a table, is left out with a warning.

        Raises:
            ValueError: if GANGLINE_ALGO has an unknown name.
            FileNotFoundError: if GANGLINE_TUNING names a file that does not exist.
        """
        path = table_path(environment)
        rules: Mapping[TableKey, Sequence[Rule]] = {}
        if os.path.exists(path):  # False if a folder on the way to it cannot be entered
            try:
                rules = cls.load(path).rules
            except (OSError, ValueError) as error:
                _log.warning("the built-in choices of algorithms are used: %s", error)
        elif "GANGLINE_TUNING" in environment:
            raise FileNotFoundError(f"GANGLINE_TUNING is {path}, which does not exist; run `gangline bench tune`")
        return cls(rules, forced_algorithms(environment.get("GANGLINE_ALGO", "")))

    def _rules_at(self, key: TableKey) -> Sequence[Rule]:
        rules = self.rules.get(key) or built_in(key)
        choice = self.forced.get(key.collective)
        if choice is None:
            return rules
        if choice.algorithm != SLOTS:
            return [Rule(None, choice)]
        if not shared_serves(SHARED_LIMIT, key.transport, key.hosts):
            return rules
        larger = [rule for rule in rules if rule.nbytes is None or rule.nbytes > SHARED_LIMIT]
        return [Rule(SHARED_LIMIT, choice), *larger]


def without_slots(collective: str) -> str:
    """Return the algorithm of ranks that share memory but no slots, or whose call the slots cannot take."""
    return "two_shot" if collective == "all_reduce" else "direct"


def shared_serves(nbytes: int, transport: str, hosts: int) -> bool:
    """Return whether the slots can take a tensor of ``nbytes`` bytes."""
    return nbytes <= SHARED_LIMIT and hosts == 1 and transport in _IN_MEMORY


def table_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the table, which `gangline bench tune` writes: GANGLINE_TUNING, else in the user's cache."""
    if "GANGLINE_TUNING" in environment:
        return Path(environment["GANGLINE_TUNING"])
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache if cache[0] != "~" else "/nonexistent") / "gangline" / "tuning.json"  # a user without a home


def forced_transport(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the transport that GANGLINE_TRANSPORT forces; None if it forces none.

    Raises:
        ValueError: if the transport is unknown.
    """
    word = environment.get("GANGLINE_TRANSPORT", "")
    if word in ("", "auto"):
        return None
    if word not in TRANSPORTS:
        raise ValueError(f"GANGLINE_TRANSPORT is {word!r}; expected auto or one of {', '.join(TRANSPORTS)}")
    return word


def forced_algorithms(words: str) -> dict[str, Choice]:
    """Return the choices that GANGLINE_ALGO forces, by collective.

    Args:
        words: an algorithm for every collective that has it ("ring"), or comma-separated algorithms for some
            ("all_reduce=ring:8,broadcast=binomial"); a number after a colon is the number of segments.

    Raises:
        ValueError: if a collective or its algorithm is unknown, or the number of segments is invalid.
    """
    forced: dict[str, Choice] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        collective, equals, named = word.rpartition("=")
        algorithm, colon, segments = named.partition(":")
        if colon and not (segments.isdecimal() and int(segments)):
            raise ValueError(f"GANGLINE_ALGO has {word!r}; expected a number of segments above 0 after the colon")
        choice = Choice(algorithm, int(segments) if colon else 1)
        if equals:
            _check_choice(collective, choice, "GANGLINE_ALGO: ")
            forced[collective] = choice
            continue
        having = [each for each in TUNED if algorithm in names(each)]
        if not having:
            every = sorted({name for each in TUNED for name in names(each)})
            raise ValueError(f"GANGLINE_ALGO has {word!r}; expected names out of {', '.join(every)}")
        forced.update(dict.fromkeys(having, choice))
    return forced


def names(collective: str) -> tuple[str, ...]:
    """Return the choices for a collective: the slots and its algorithms.

    Raises:
        ValueError: if the collective has none.
    """
    if collective not in TUNED:
        raise ValueError(f"{collective!r} has no algorithms to choose from; expected one of {', '.join(TUNED)}")
    return (SLOTS, *algorithms.names(collective))


def built_in(key: TableKey) -> Sequence[Rule]:
    """Return the default rules, tuned on machines with few cores and a network of one link."""
    return tuple(_built_in(key))


def _built_in(key: TableKey) -> Iterator[Rule]:
    if key.hosts == 1 and key.transport in _IN_MEMORY:
        limit = SHARED_LIMIT if key.ranks <= 4 else 1 << 17  # every rank reads all tensors
        yield Rule(limit, Choice(SLOTS))
        yield Rule(None, Choice(without_slots(key.collective)))
        return
    few, several_a_host = key.ranks <= 4, 1 < key.hosts < key.ranks
    match key.collective:
        case "all_reduce":
            limit = max(1 << 10, (1 << 22) // key.ranks**2)  # p (p - 1) tensors are in flight
            yield Rule(limit, Choice("one_shot"))
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
            if several_a_host:
                yield Rule(None, Choice("hierarchical"))
            else:
                yield Rule(None, Choice("ring", 4) if few else Choice("halving_doubling"))
        case "all_to_all":
            yield Rule(1 << 21, Choice("direct"))
            yield Rule(None, Choice("pairwise"))
        case _:  # gather and scatter: the root's link carries all rows in any case
            yield Rule(1 << 12, Choice("direct" if few else "binomial"))
            yield Rule(None, Choice("direct"))


def _check(key: TableKey, rules: Sequence[Rule]) -> None:
    where = f"{key.collective} of {key.ranks} ranks on {key.hosts} host(s), {key.transport}: "
    limits = [rule.nbytes for rule in rules]
    numbers = [limit for limit in limits[:-1] if isinstance(limit, int)]
    if not limits or [*sorted(set(numbers)), None] != limits:
        raise ValueError(f"{where}the limits are {limits}; expected ascending numbers of bytes, and null as the last")
    for rule in rules:
        _check_choice(key.collective, rule.choice, where)
        most = rule.nbytes if rule.nbytes is not None else SHARED_LIMIT + 1
        if rule.choice.algorithm == SLOTS and not shared_serves(most, key.transport, key.hosts):
            raise ValueError(f"{where}shared takes up to {SHARED_LIMIT} bytes in one host's memory, not {rule.nbytes}")


def _check_choice(collective: str, choice: Choice, where: str = "") -> None:
    if choice.algorithm not in names(collective):
        raise ValueError(
            f"{where}{collective} has no algorithm {choice.algorithm!r}; expected one of {', '.join(names(collective))}"
        )
    if choice.segments < 1:
        raise ValueError(f"{where}{collective} by {choice.algorithm}: segments is {choice.segments!r}, not above 0")
