"""`gangline bench tune`: measures every algorithm at every size, and writes the table that Communicators choose by."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report import Row, check_outputs, print_table, spread

if TYPE_CHECKING:
    from gangline.collectives.tuner import Choice, Rule, TableKey

SIZES = tuple(1 << bits for bits in range(10, 25, 2))
"""Bytes of the tensor that a rank gives."""
_SEGMENTS = (1, 4, 16)
_LEAST_SEGMENT = 1 << 14  # bytes of a message: what is cut smaller is nothing but messages
_PASSES = 3
_RUN_SECONDS = 0.03
_MOST_STEPS = 2000
_ODD_COUNT = 1003  # elements: what does not divide by the ranks is looked at too
_WORTH_CHANGING = 1.05  # times as fast: less may be chance


def tune(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    transports: Annotated[str, typer.Option(help="Transports, with commas.")] = "shared_memory,ipc,tcp",
    output: Annotated[
        Path | None, typer.Option(help="Where the table goes; by default where gangline looks for it.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write what was measured here.")] = None,
) -> None:
    """Find the quickest algorithm of each collective for each size, here.

    The table keeps what it has of places that are not measured now. An algorithm whose result is wrong, or that fails,
    is reported and not chosen, however quick it is.
    """
    from gangline.bench.sweep import numbers, write
    from gangline.collectives.tuner import TUNED, Table, table_path

    check_outputs(json, None)
    path = output or table_path()
    rules = dict(Table.load(path).rules) if path.exists() else {}
    rows: list[Row] = []
    for transport in (word.strip() for word in transports.split(",")):
        for number in numbers(ranks):
            found = measure(transport, number, TUNED, SIZES)
            rules |= found.rules
            rows += found.rows
            for line in found.refused:
                print(f"refused: {line}")
            print_table(f"{number} ranks over {transport}", [_shown(*each) for each in found.rules.items()])
    Table(rules).dump(path)
    print(f"{path} has the table now")
    if json is not None:
        write(rows, json)


@dataclass
class Tuned:
    """What was found for one transport and number of ranks."""

    rules: dict[TableKey, list[Rule]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """A line for each algorithm that gave a wrong result, or failed."""
    rows: list[Row] = field(default_factory=list)


def measure(transport: str, ranks: int, collectives: Sequence[str], sizes: Sequence[int]) -> Tuned:
    """Measure all algorithms of some collectives between ranks of this host.

    Raises:
        ValueError: there is no such transport.
    """
    from gangline.collectives.tuner import TRANSPORTS, TableKey

    if transport not in TRANSPORTS[:-1]:
        raise ValueError(f"--transports has {transport!r}; expected names out of {', '.join(TRANSPORTS[:-1])}")
    found = Tuned()
    with _Ranks(transport, ranks) as gang:
        for collective in collectives:
            print(f"measuring {collective}, {ranks} ranks over {transport}", file=sys.stderr, flush=True)
            place = TableKey(collective, transport, ranks, 1)
            times: dict[int, dict[Choice, float]] = {size: {} for size in sizes}
            for choice, of_choice in _times(gang, place, sizes, found):
                for size, seconds in of_choice.items():
                    times[size][choice] = min(seconds)
                    found.rows.append(_row(place, size, choice, seconds))
            if all(times.values()):  # not so where every candidate was refused
                found.rules[place] = rules_from(times, partial(_usual, place))
    return found


def candidates(place: TableKey) -> list[Choice]:
    """What can be chosen at a place: algorithms with several numbers of segments, those that do the same only once.

    Of several that do the same (between two ranks most do), one that the built-in rules have is taken.
    """
    from gangline.collectives import algorithms
    from gangline.collectives.schedule import ROOTED
    from gangline.collectives.tuner import SHARED, Choice, built_in, names, shared_serves

    usual = [rule.choice for rule in built_in(place)]
    every = [Choice(name, segments) for name in names(place.collective) for segments in _SEGMENTS if name != SHARED]
    found = [Choice(SHARED)] if shared_serves(0, place.transport, place.hosts) else []
    seen = set()
    for choice in dict.fromkeys([*usual, *every]):
        if choice.algorithm == SHARED:
            continue
        schedule = algorithms.build(
            place.collective,
            choice.algorithm,
            place.ranks,
            root=0 if place.collective in ROOTED else None,
            segments=choice.segments,
        )
        does = schedule.chunks, *(schedule.program(rank) for rank in range(place.ranks))
        if does not in seen:
            seen.add(does)
            found.append(choice)
    return found


def rules_from(times: Mapping[int, Mapping[Choice, float]], usual: Callable[[int], Choice]) -> list[Rule]:
    """The rules that follow from what was measured.

    Args:
        times: for each size in bytes the seconds of each choice.
        usual: the built-in choice for a size.

    Returns:
        Rules whose limits lie between the sizes, on a logarithmic scale. The usual choice, then that of the size below,
        is taken until another one is quicker by more than chance.
    """
    from gangline.collectives.tuner import SHARED, SHARED_LIMIT, Rule

    sizes = sorted(times)
    best: list[Choice] = []
    for size in sizes:
        quickest = min(times[size], key=times[size].__getitem__)
        good = [choice for choice, seconds in times[size].items() if seconds < _WORTH_CHANGING * times[size][quickest]]
        best.append(next((choice for choice in (usual(size), *best[-1:]) if choice in good), quickest))
    rules: list[Rule] = []
    for size, larger, choice, following in zip(sizes, sizes[1:], best, best[1:], strict=False):
        if choice != following:
            between = math.isqrt(size * larger)
            rules.append(Rule(min(between, SHARED_LIMIT) if choice.algorithm == SHARED else between, choice))
    last = best[-1]
    if last.algorithm == SHARED:  # it takes no more than so much
        rules.append(Rule(SHARED_LIMIT, last))
        others = {choice: seconds for choice, seconds in times[sizes[-1]].items() if choice.algorithm != SHARED}
        last = min(others, key=others.__getitem__)
    return [*rules, Rule(None, last)]


def _usual(place: TableKey, size: int) -> Choice:
    from gangline.collectives.tuner import Table

    return Table().choose(place.collective, size, place.ranks, place.transport, place.hosts)


class _Ranks(ExitStack):
    """A gang that is started anew after it failed."""

    def __init__(self, transport: str, ranks: int) -> None:
        from gangline.bench.gangs import Gang, Way
        from gangline.bench.peers.installed import ways

        super().__init__()
        (own,) = ways("gangline", ranks)
        self._way = Way(own.module, env={**own.env, "BENCH_TRANSPORT": transport})
        self._ranks = ranks
        self._gang: Gang | None = None

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As `Gang.ask`."""
        from gangline.bench.gangs import Gang, GangError

        if self._gang is None:
            self._gang = self.enter_context(Gang(self._way, self._ranks))
        try:
            return self._gang.ask(request)
        except GangError:
            self._gang = None
            self.pop_all().close()
            raise


def _times(
    gang: _Ranks, place: TableKey, sizes: Sequence[int], found: Tuned
) -> Iterator[tuple[Choice, dict[int, list[float]]]]:
    """For each candidate whose results are right the seconds of a step at each size, run by run."""
    from gangline.bench.gangs import GangError

    times: dict[Choice, dict[int, list[float]]] = {choice: {} for choice in candidates(place)}
    for turn in range(_PASSES):
        for choice in list(times):
            try:
                if turn == 0:
                    _check(gang, place, choice, sizes)
                for size in sizes:
                    if _is_sensible(place, choice, size):
                        times[choice].setdefault(size, []).append(_seconds(gang, _options(place, choice, size)))
            except GangError as error:
                found.refused.append(
                    f"{place.collective} by {choice}, {place.ranks} ranks over {place.transport}: {error}"
                )
                del times[choice]
    yield from times.items()


def _check(gang: _Ranks, place: TableKey, choice: Choice, sizes: Sequence[int]) -> None:
    from gangline.bench.gangs import GangError

    for size in (4 * _ODD_COUNT * place.ranks, *sizes):
        if _is_sensible(place, choice, size):
            gang.ask({"prepare": _options(place, choice, size), "as": "checked"})
            wrong = sum(answer["wrong"] for answer in gang.ask({"check": "checked"}))
            gang.ask({"release": True})
            if wrong:
                raise GangError(f"{wrong} elements of {size} bytes are wrong")


def _seconds(gang: _Ranks, options: Mapping[str, Any]) -> float:
    answers = gang.ask({"prepare": options, "as": "timed"})
    fitting = math.ceil(_RUN_SECONDS / max(answer["seconds"] for answer in answers))
    steps = min(max(fitting, 2), _MOST_STEPS)
    answers = gang.ask({"measure": "timed", "steps": steps, "before": math.ceil(steps / 5)})
    gang.ask({"release": True})
    return float(max(answer["seconds"] for answer in answers))


def _is_sensible(place: TableKey, choice: Choice, size: int) -> bool:
    from gangline.collectives.tuner import SHARED, shared_serves

    if choice.algorithm == SHARED:
        return shared_serves(size, place.transport, place.hosts)
    return choice.segments == 1 or size >= _LEAST_SEGMENT * choice.segments


def _options(place: TableKey, choice: Choice, size: int) -> dict[str, Any]:
    """What the ranks are to prepare: float32 tensors of which a rank gives so many bytes."""
    from gangline.bench.sweep import IN_PLACE, ROWS_IN, ROWS_OUT

    collective, ranks = place.collective, place.ranks
    count = max(1, size // 4 // (ranks if collective in ROWS_IN else 1))
    return {
        "collective": collective,
        "dtype": "float32",
        "op": "sum",
        "root": 0,
        "in_place": True in IN_PLACE.get(collective, ()),
        "count": count,
        "inputs": count * (ranks if collective in ROWS_IN else 1),
        "outputs": count * (ranks if collective in ROWS_OUT else 1),
        "registered": False,
        "algorithm": f"{collective}={choice}",
    }


def _row(place: TableKey, size: int, choice: Choice, seconds: Sequence[float]) -> Row:
    figures = spread([1e6 * each for each in seconds])
    return {
        "who": "gangline",
        "collective": place.collective,
        "transport": place.transport,
        "ranks": place.ranks,
        "size": size,
        "dtype": "float32",
        "algorithm": str(choice),
        "time_us": figures["p50"],
        "wrong": 0,
        **figures,
    }


def _shown(place: TableKey, rules: Sequence[Rule]) -> Row:
    words = [f"{choice}" + ("" if nbytes is None else f" up to {nbytes}") for nbytes, choice in rules]
    return {"collective": place.collective, "choices": ", then ".join(words)}
