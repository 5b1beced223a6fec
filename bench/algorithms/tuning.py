"""`gangline bench tune`: measure every algorithm at every size and write the table from which Communicators choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gangline.bench.driver.harness import say
from gangline.bench.driver.installed import collective_ranks
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.bench.report.output import check_outputs, write_json
from gangline.bench.report.rows import Row, spread
from gangline.bench.report.tables import format_size
from gangline.bench.workload.collective_shapes import ROWS_IN, tensor_options
from gangline.bench.workload.options import Json
from gangline.bench.workload.sizes import counts
from gangline.collectives import algorithms
from gangline.collectives.schedule import ROOTED
from gangline.collectives.tuner import (
    SHARED_LIMIT,
    SLOTS,
    TRANSPORTS,
    TUNED,
    Choice,
    Rule,
    Table,
    TableKey,
    built_in,
    names,
    shared_serves,
    table_path,
)
from gangline.usage_error import UsageError

SIZES = tuple(1 << bits for bits in range(10, 25, 2))
"""Bytes of a rank's input."""
_SEGMENTS = (1, 4, 16)
_LEAST_SEGMENT = 1 << 14  # bytes of a message: below, latency dominates
_RUNS = 3
_RUN_SECONDS = 0.03
_ODD_COUNT = 1003  # elements: results are also checked for counts not divisible by the ranks
_WORTH_CHANGING = 1.05  # speed-up: smaller ones may be noise
_ITEM = 4  # bytes of a float32


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
    check_outputs(json)
    path = output or table_path()
    rules = dict(Table.load(path).rules) if path.exists() else {}
    rows: list[Row] = []
    for transport in (word.strip() for word in transports.split(",")):
        for number in counts(ranks, "--ranks"):
            print(f"# {number} ranks over {transport}")
            found = measure(transport, number, TUNED, SIZES)
            rules |= found.rules
            rows += _rows(found)
            for line in found.refused:
                say(f"refused: {line}")
            for key, of_key in found.rules.items():
                print(_line(key, of_key), flush=True)
    Table(rules).dump(path)
    print(f"# written to {path}")
    if json is not None:
        write_json(rows, json)


@dataclass
class Tuned:
    """Results for one transport and number of ranks."""

    rules: dict[TableKey, list[Rule]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """A line for each algorithm that returned a wrong result or failed."""
    times: dict[TableKey, dict[int, dict[Choice, list[float]]]] = field(default_factory=dict)
    """Seconds of a step, run by run, by size in bytes and choice."""


def measure(transport: str, ranks: int, collectives: Sequence[str], sizes: Sequence[int]) -> Tuned:
    """Measure all algorithms of some collectives between ranks of this host.

    Raises:
        ValueError: if there is no such transport.
    """
    if transport not in TRANSPORTS[:-1]:
        raise UsageError(f"--transports has {transport!r}; expected names out of {', '.join(TRANSPORTS[:-1])}")
    found = Tuned()
    candidate, *_ = collective_ranks("gangline", ranks)
    with RankGroup(replace(candidate, env={**candidate.env, "BENCH_TRANSPORT": transport})) as group:
        for collective in collectives:
            key = TableKey(collective, transport, ranks, 1)
            usual = partial(Table().choose, collective, size=ranks, transport=transport)
            found.times[key] = times = _times(group, key, sizes, found.refused)
            if all(times.values()):  # not if every candidate was refused
                found.rules[key] = rules_from(
                    {size: {choice: min(runs) for choice, runs in of_size.items()} for size, of_size in times.items()},
                    usual,
                )
    return found


def candidates(key: TableKey) -> list[Choice]:
    """Return the algorithms to measure, with several numbers of segments.

    Of algorithms with equal schedules (as most have for two ranks) only one is returned, preferably a built-in choice.
    """
    usual = [rule.choice for rule in built_in(key)]
    every = [Choice(name, segments) for name in names(key.collective) for segments in _SEGMENTS if name != SLOTS]
    found = [Choice(SLOTS)] if shared_serves(0, key.transport, key.hosts) else []
    seen = set()
    for choice in dict.fromkeys([*usual, *every]):
        if choice.algorithm == SLOTS:
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
        smaller size, is kept unless another choice is faster by more than noise.
    """
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
            rules.append(Rule(min(between, SHARED_LIMIT) if choice.algorithm == SLOTS else between, choice))
    last = best[-1]
    if last.algorithm == SLOTS:  # it has an upper limit
        rules.append(Rule(SHARED_LIMIT, last))
        others = {choice: seconds for choice, seconds in times[sizes[-1]].items() if choice.algorithm != SLOTS}
        last = min(others, key=others.__getitem__)
    return [*rules, Rule(None, last)]


def _seconds(group: RankGroup, key: TableKey, choice: Choice, size: int, *, is_checked: bool) -> float:
    """Return the mean seconds of a step in a run.

    Raises:
        GroupError: if the step fails, or, with ``is_checked``, an element of a result is wrong.
    """
    count = max(1, size // _ITEM // (key.ranks if key.collective in ROWS_IN else 1))
    group.prepare(tensor_options(key.collective, key.ranks, count, algorithm=f"{key.collective}={choice}"))
    if is_checked and (wrong := group.wrong()):
        raise GroupError(f"{wrong} elements of {size} bytes are wrong")
    return group.seconds(group.steps_in(_RUN_SECONDS))


def _times(
    group: RankGroup, key: TableKey, sizes: Sequence[int], refused: list[str]
) -> dict[int, dict[Choice, list[float]]]:
    """Measure the candidates in turn, and report candidates that fail or return a wrong result."""
    times: dict[int, dict[Choice, list[float]]] = {size: {} for size in sizes}
    chosen = candidates(key)
    for turn in range(_RUNS):
        for choice in list(chosen):
            odd = [_ITEM * _ODD_COUNT * key.ranks] if turn == 0 else []
            try:
                for size in (*odd, *sizes):
                    if _is_sensible(key, choice, size):
                        seconds = _seconds(group, key, choice, size, is_checked=turn == 0)
                        if size in times:
                            times[size].setdefault(choice, []).append(seconds)
            except GroupError as error:
                refused.append(f"{key.collective} by {choice}, {key.ranks} ranks over {key.transport}: {error}")
                chosen.remove(choice)
                for of_size in times.values():
                    of_size.pop(choice, None)
    return times


def _is_sensible(key: TableKey, choice: Choice, size: int) -> bool:
    if choice.algorithm == SLOTS:
        return shared_serves(size, key.transport, key.hosts)
    return choice.segments == 1 or size >= _LEAST_SEGMENT * choice.segments


def _rows(found: Tuned) -> Iterator[Row]:
    for key, times in found.times.items():
        for size, of_size in times.items():
            for choice, seconds in of_size.items():
                figures = spread([1e6 * each for each in seconds])
                description = {**key._asdict(), "size": size, "dtype": "float32", "algorithm": str(choice)}
                yield {"who": "gangline", **description, "time_us": figures["p50"], **figures}


def _line(key: TableKey, rules: Sequence[Rule]) -> str:
    words = [f"{choice}" + ("" if nbytes is None else f" up to {format_size(nbytes)}") for nbytes, choice in rules]
    return f"{key.collective:>16}  {', then '.join(words)}"
