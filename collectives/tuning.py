"""Measurement of every algorithm, for the table from which Communicators choose."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gangline.collectives import algorithms
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import UsageError
from gangline.collectives.processes.spawning import spawn
from gangline.collectives.schedule import ROOTED
from gangline.collectives.tuner import (
    SHARED,
    SHARED_LIMIT,
    TRANSPORTS,
    Choice,
    Rule,
    Table,
    TableKey,
    built_in,
    names,
    shared_serves,
)

SIZES = tuple(1 << bits for bits in range(10, 25, 2))
"""Bytes of a rank's input."""
_SEGMENTS = (1, 4, 16)
_LEAST_SEGMENT = 1 << 14  # bytes of a message: in smaller ones the latency dominates
_RUNS = 3
_RUN_SECONDS = 0.03
_MOST_STEPS = 2000
_ODD_COUNT = 1003  # elements: results are also checked for counts that the ranks do not divide
_WORTH_CHANGING = 1.05  # times as fast: less may be noise
_ROWS_IN = ("reduce_scatter", "all_to_all", "scatter")  # their input has a row for each rank


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
    for collective in collectives:
        key = TableKey(collective, transport, ranks, 1)
        usual = partial(Table().choose, collective, size=ranks, transport=transport)
        times = _times(key, sizes, found.refused)
        found.times[key] = times
        if all(times.values()):  # not where every candidate was refused
            fastest = {size: {choice: min(runs) for choice, runs in of_size.items()} for size, of_size in times.items()}
            found.rules[key] = rules_from(fastest, usual)
    return found


def candidates(key: TableKey) -> list[Choice]:
    """Return the algorithms to measure, with several numbers of segments.

    Of several with equal schedules (between two ranks most are equal) only one is returned, preferably one of the
    built-in rules.
    """
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


def _times(key: TableKey, sizes: Sequence[int], refused: list[str]) -> dict[int, dict[Choice, list[float]]]:
    """Measure the candidates in turn, and report those that fail or return a wrong result."""
    times: dict[int, dict[Choice, list[float]]] = {size: {} for size in sizes}
    chosen = candidates(key)
    for turn in range(_RUNS):
        for choice in list(chosen):
            sensible = [size for size in sizes if _is_sensible(key, choice, size)]
            odd = [size for size in (4 * _ODD_COUNT * key.ranks,) if _is_sensible(key, choice, size)]
            checked = [*odd, *sensible] if turn == 0 else []
            try:
                seconds = spawn(time_choice, key.ranks, key, choice, checked, sensible, transport=key.transport)[0]
            except Exception as error:  # noqa: BLE001  whatever fails is refused
                reason = str(error).partition("\n")[0]
                refused.append(f"{key.collective} by {choice}, {key.ranks} ranks over {key.transport}: {reason}")
                chosen.remove(choice)
                for of_size in times.values():
                    of_size.pop(choice, None)
                continue
            for size, of_step in zip(sensible, seconds, strict=True):
                times[size].setdefault(choice, []).append(of_step)
    return times


def _is_sensible(key: TableKey, choice: Choice, size: int) -> bool:
    if choice.algorithm == SHARED:
        return shared_serves(size, key.transport, key.hosts)
    return choice.segments == 1 or size >= _LEAST_SEGMENT * choice.segments


def time_choice(
    comm: Communicator, key: TableKey, choice: Choice, checked: Sequence[int], sizes: Sequence[int]
) -> list[float]:
    """Return the seconds of a step at each size, of the slowest rank.

    Raises:
        ValueError: if an element of a result is wrong at a size of ``checked``.
    """
    measured = comm.split(0)  # `comm` itself agrees on results and times
    assert measured is not None
    engine = measured._engine
    settings = engine.resources.settings._replace(table=Table(forced={key.collective: choice}))
    engine.resources = replace(engine.resources, settings=settings)
    with measured:
        for size in checked:
            given = _input(key, size, comm.rank)
            wrong = torch.tensor([_wrong(key, size, comm.rank, _call(measured, key.collective, given)())], device="cpu")
            comm.all_reduce(wrong)
            if wrong:
                raise ValueError(f"{int(wrong)} elements of {size} bytes are wrong")
        zeros = [torch.zeros_like(_input(key, size, 0)) for size in sizes]
        return [_seconds(comm, _call(measured, key.collective, given)) for given in zeros]


def _call(comm: Communicator, collective: str, given: torch.Tensor) -> Callable[[], Any]:
    """Return a function that runs the collective, in place where it can be, and returns its result."""
    call = getattr(comm, collective)
    if collective == "scatter":
        return partial(call, given if comm.rank == 0 else None, torch.empty_like(given[0]))
    if collective in ("all_reduce", "reduce", "broadcast"):
        return partial(call, given)
    if collective in ("all_gather", "gather"):
        out = given.new_empty(comm.size, *given.shape)
    else:
        out = torch.empty_like(given if collective == "all_to_all" else given[0])
    return partial(call, given, out=out)


def _input(key: TableKey, size: int, rank: int) -> torch.Tensor:
    """Return a rank's input: whole numbers whose sums are exact, none like another rank's."""
    rows = key.ranks if key.collective in _ROWS_IN else 1
    values = torch.arange(rows * max(1, size // 4 // rows), device="cpu") % 4093 * key.ranks + rank
    return values.float().view(key.ranks, -1) if rows > 1 else values.float()


def _wrong(key: TableKey, size: int, rank: int, result: torch.Tensor | None) -> int:
    """Return the number of wrong elements of a rank's result."""
    if key.collective in ("reduce", "gather") and rank != 0:
        return 0
    inputs = torch.stack([_input(key, size, other) for other in range(key.ranks)])
    expected = {
        "all_reduce": lambda: inputs.sum(0),
        "reduce": lambda: inputs.sum(0),
        "broadcast": lambda: inputs[0],
        "all_gather": lambda: inputs,
        "gather": lambda: inputs,
        "scatter": lambda: inputs[0, rank],
        "reduce_scatter": lambda: inputs[:, rank].sum(0),
        "all_to_all": lambda: inputs[:, rank],
    }[key.collective]()
    assert result is not None
    return int((result != expected).sum())


def _seconds(comm: Communicator, step: Callable[[], Any]) -> float:
    """Return the mean seconds of a step in a run, on the slowest rank."""
    steps = 2  # the first steps allocate
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        taken = torch.tensor([(time.perf_counter() - start) / steps], dtype=torch.float64, device="cpu")
        comm.all_reduce(taken, "max")
        steps = min(max(math.ceil(_RUN_SECONDS / float(taken)), 2), _MOST_STEPS)
    return float(taken)
