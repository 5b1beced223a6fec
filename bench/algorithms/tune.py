"""`gangline bench tune`: measure every algorithm at every size and write the table from which Communicators choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, write_json
from gangline.bench.report.rows import Row, spread
from gangline.bench.report.tables import format_size
from gangline.bench.workload.collective_shapes import IN_PLACE, ROWS_IN, tensor_options
from gangline.bench.workload.options import Json
from gangline.bench.workload.sizes import counts
from gangline.collectives.errors import UsageError

if TYPE_CHECKING:
    from gangline.bench.driver.rank_group import RankGroup
    from gangline.collectives.tuner import Choice, Rule, TableKey

SIZES = tuple(1 << bits for bits in range(10, 25, 2))
"""Bytes of a rank's input."""
_SEGMENTS = (1, 4, 16)
_LEAST_SEGMENT = 1 << 14  # bytes of a message: in smaller ones the latency dominates
_RUNS = 3
_RUN_SECONDS = 0.03
_MOST_STEPS = 2000
_ODD_COUNT = 1003  # elements: results are also checked for counts that the ranks do not divide
_WORTH_CHANGING = 1.05  # times as fast: less may be noise


def tune(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    transports: Annotated[str, typer.Option(help="Transports, with commas.")] = "shared_memory,ipc,tcp",
    output: Annotated[
        Path | None, typer.Option(help="File to write the table to; default: where gangline looks for it.")
    ] = None,
    json: Json = None,
) -> None:
    """Find the fastest algorithm of each collective for each size on this machine.

    The table keeps its entries for transports and numbers of ranks that are not measured now. An algorithm that fails
    or returns a wrong result is reported and never chosen.
    """
    from gangline.bench.driver.candidates import say
    from gangline.collectives.tuner import TUNED, Table, table_path

    check_outputs(json)
    path = output or table_path()
    rules = dict(Table.load(path).rules) if path.exists() else {}
    rows: list[Row] = []
    for transport in (word.strip() for word in transports.split(",")):
        for number in counts(ranks, "--ranks"):
            found = measure(transport, number, TUNED, SIZES)
            rules |= found.rules
            rows += found.rows
            for line in found.refused:
                say(f"refused: {line}")
            print(f"# {number} ranks over {transport}")
            print("\n".join(_line(*each) for each in found.rules.items()))
    Table(rules).dump(path)
    print(f"# written to {path}")
    if json is not None:
        write_json(command_line(), rows, json)


@dataclass
class Tuned:
    """Results for one transport and number of ranks."""

    rules: dict[TableKey, list[Rule]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """A line for each algorithm that returned a wrong result or failed."""
    rows: list[Row] = field(default_factory=list)


def measure(transport: str, ranks: int, collectives: Sequence[str], sizes: Sequence[int]) -> Tuned:
    """Measure all algorithms of some collectives between ranks of this host.

    Raises:
        ValueError: if there is no such transport.
    """
    from gangline.bench.driver.candidates import say
    from gangline.collectives.tuner import TRANSPORTS, TableKey

    if transport not in TRANSPORTS[:-1]:
        raise UsageError(f"--transports has {transport!r}; expected names out of {', '.join(TRANSPORTS[:-1])}")
    found = Tuned()
    with _Ranks(transport, ranks) as group:
        for collective in collectives:
            say(f"measuring {collective}, {ranks} ranks over {transport}")
            key = TableKey(collective, transport, ranks, 1)
            times: dict[int, dict[Choice, float]] = {size: {} for size in sizes}
            for choice, of_choice in _times(group, key, sizes, found):
                for size, seconds in of_choice.items():
                    times[size][choice] = min(seconds)
                    found.rows.append(_row(key, size, choice, seconds))
            if all(times.values()):  # not where every candidate was refused
                found.rules[key] = rules_from(times, partial(_usual, key))
    return found


def candidates(key: TableKey) -> list[Choice]:
    """Return the algorithms to measure, with several numbers of segments.

    Of several with equal schedules (between two ranks most are equal) only one is returned, preferably one of the
    built-in rules.
    """
    from gangline.collectives import algorithms
    from gangline.collectives.schedule import ROOTED
    from gangline.collectives.tuner import SHARED, Choice, built_in, names, shared_serves

    usual = [rule.choice for rule in built_in(key)]
    every = [Choice(name, segments) for name in names(key.collective) for segments in _SEGMENTS if name != SHARED]
    found = [Choice(SHARED)] if shared_serves(0, key.transport, key.hosts) else []
    seen = set()
    for choice in dict.fromkeys([*usual, *every]):
        if choice.algorithm == SHARED:
            continue
        schedule = algorithms.build(
            key.collective,
            choice.algorithm,
            key.ranks,
            root=0 if key.collective in ROOTED else None,
            segments=choice.segments,
        )
        steps = schedule.chunks, *(schedule.program(rank) for rank in range(key.ranks))
        if steps not in seen:
            seen.add(steps)
            found.append(choice)
    return found


def rules_from(times: Mapping[int, Mapping[Choice, float]], usual: Callable[[int], Choice]) -> list[Rule]:
    """Derive rules from measured times.

    Args:
        times: seconds of each choice, by size in bytes.
        usual: returns the built-in choice for a size.

    Returns:
        Rules with limits halfway between the sizes on a logarithmic scale. The built-in choice, then that of the next
        smaller size, is kept unless another one is faster by more than noise.
    """
    from gangline.collectives.tuner import SHARED, SHARED_LIMIT, Rule

    sizes = sorted(times)
    best: list[Choice] = []
    for size in sizes:
        fastest = min(times[size], key=times[size].__getitem__)
        good = [choice for choice, seconds in times[size].items() if seconds < _WORTH_CHANGING * times[size][fastest]]
        best.append(next((choice for choice in (usual(size), *best[-1:]) if choice in good), fastest))
    rules: list[Rule] = []
    for size, larger, choice, following in zip(sizes, sizes[1:], best, best[1:], strict=False):
        if choice != following:
            between = math.isqrt(size * larger)
            rules.append(Rule(min(between, SHARED_LIMIT) if choice.algorithm == SHARED else between, choice))
    last = best[-1]
    if last.algorithm == SHARED:  # it has an upper limit
        rules.append(Rule(SHARED_LIMIT, last))
        others = {choice: seconds for choice, seconds in times[sizes[-1]].items() if choice.algorithm != SHARED}
        last = min(others, key=others.__getitem__)
    return [*rules, Rule(None, last)]


def _usual(key: TableKey, size: int) -> Choice:
    from gangline.collectives.tuner import Table

    return Table().choose(key.collective, size, key.ranks, key.transport, key.hosts)


class _Ranks(ExitStack):
    """A group of ranks that is started again after a failure."""

    def __init__(self, transport: str, ranks: int) -> None:
        from gangline.bench.driver.installed import collective_ranks

        super().__init__()
        (own,) = collective_ranks("gangline", ranks)
        self._candidate = replace(own, env={**own.env, "BENCH_TRANSPORT": transport})
        self._group: RankGroup | None = None

    def prepare(self, options: Mapping[str, Any]) -> RankGroup:
        """Prepare a collective and return the group that runs it."""
        from gangline.bench.driver.rank_group import RankGroup

        if self._group is None:
            self._group = self.enter_context(RankGroup(self._candidate))
        self._group.prepare(options)
        return self._group

    def restart(self) -> None:
        """End the group; the next call starts another one."""
        self._group = None
        self.close()


def _times(
    group: _Ranks, key: TableKey, sizes: Sequence[int], found: Tuned
) -> Iterator[tuple[Choice, dict[int, list[float]]]]:
    """Yield for each candidate with correct results the seconds of a step at each size, run by run."""
    from gangline.bench.driver.rank_group import GroupError

    times: dict[Choice, dict[int, list[float]]] = {choice: {} for choice in candidates(key)}
    for turn in range(_RUNS):
        for choice in list(times):
            try:
                if turn == 0:
                    _check(group, key, choice, sizes)
                for size in sizes:
                    if _is_sensible(key, choice, size):
                        times[choice].setdefault(size, []).append(_seconds(group, _options(key, choice, size)))
            except GroupError as error:
                group.restart()
                found.refused.append(f"{key.collective} by {choice}, {key.ranks} ranks over {key.transport}: {error}")
                del times[choice]
    yield from times.items()


def _check(group: _Ranks, key: TableKey, choice: Choice, sizes: Sequence[int]) -> None:
    from gangline.bench.driver.rank_group import GroupError

    for size in (4 * _ODD_COUNT * key.ranks, *sizes):
        if _is_sensible(key, choice, size):
            prepared = group.prepare(_options(key, choice, size))
            wrong = prepared.wrong()
            prepared.release()
            if wrong:
                raise GroupError(f"{wrong} elements of {size} bytes are wrong")


def _seconds(group: _Ranks, options: Mapping[str, Any]) -> float:
    prepared = group.prepare(options)
    seconds = prepared.seconds(min(prepared.steps_in(_RUN_SECONDS, least=2), _MOST_STEPS))
    prepared.release()
    return seconds


def _is_sensible(key: TableKey, choice: Choice, size: int) -> bool:
    from gangline.collectives.tuner import SHARED, shared_serves

    if choice.algorithm == SHARED:
        return shared_serves(size, key.transport, key.hosts)
    return choice.segments == 1 or size >= _LEAST_SEGMENT * choice.segments


def _options(key: TableKey, choice: Choice, size: int) -> dict[str, Any]:
    """Return the options of a rank: float32 tensors, of which its input has so many bytes."""
    count = max(1, size // 4 // (key.ranks if key.collective in ROWS_IN else 1))
    return {
        **tensor_options(key.collective, key.ranks, count),
        "dtype": "float32",
        "op": "sum",
        "root": 0,
        "in_place": True in IN_PLACE.get(key.collective, ()),
        "registered": False,
        "algorithm": f"{key.collective}={choice}",
    }


def _row(key: TableKey, size: int, choice: Choice, seconds: Sequence[float]) -> Row:
    figures = spread([1e6 * each for each in seconds])
    return {
        "who": "gangline",
        "collective": key.collective,
        "transport": key.transport,
        "ranks": key.ranks,
        "size": size,
        "dtype": "float32",
        "algorithm": str(choice),
        "time_us": figures["p50"],
        "wrong": 0,
        **figures,
    }


def _line(key: TableKey, rules: Sequence[Rule]) -> str:
    """Return the choices of a collective as text."""
    words = [f"{choice}" + ("" if nbytes is None else f" up to {format_size(nbytes)}") for nbytes, choice in rules]
    return f"{key.collective:>16}  {', then '.join(words)}"
