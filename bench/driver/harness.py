"""Programs measured in turn, each at the fastest of its settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.bench.report.rows import times_as_fast

TRIALS = 2
"""Number of runs per tried setting; the fastest run counts, because noise only adds time."""
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Entry:
    """A program before its setting is chosen."""

    candidates: Sequence[Candidate]
    """Ways to run the program; the fastest is measured."""
    options: Mapping[str, Any]
    """Options for its ``prepare``."""


@dataclass(frozen=True)
class Measured:
    """Results of a candidate, run by run."""

    who: str
    setting: str
    seconds: list[float]
    """Seconds of a step per run; run n of all candidates are adjacent in time."""
    error: float | None


@dataclass(frozen=True, eq=False)
class Side:
    """A group of ranks with prepared work."""

    who: str
    """"gangline", or the peer's short name."""
    group: RankGroup
    options: Mapping[str, Any]
    """Options of the prepared work."""
    name: str
    """Name of the prepared work."""
    steps: int
    """Steps of a run."""
    warmup: int | None = None
    """Unmeasured steps before a run; None: a fifth."""

    def seconds(self) -> float:
        """Return the mean seconds of a step in a run, on the slowest rank."""
        return self.group.seconds(self.steps, self.name, self.warmup)


def fastest(
    peers: Sequence[str], groups: dict[str, list[RankGroup]], prepare: Callable[[str, RankGroup], Side]
) -> list[Side]:
    """Prepare work in all groups of some peers and return each peer's fastest group; remove and end failed groups.

    A peer has a group for each of its settings.
    """
    found = []
    for peer in peers:
        try:
            sides = [prepare(peer, group) for group in groups[peer]]
            trials = {side: min(side.seconds() for _ in range(TRIALS)) for side in sides if len(sides) > 1}
            found.append(min(sides, key=lambda side: trials.get(side, 0.0)))
        except GroupError as error:
            say(f"skipping {peer}: {error}")
            for group in groups.pop(peer):
                group.close()
    return found


def ratios_to_peers(side: Side, seconds: Mapping[Side, Sequence[float]]) -> dict[str, float]:
    """Return the speed-up of gangline's side over each peer; nothing for a peer's side."""
    if side.who != "gangline":
        return {}
    peers = {other.who: theirs for other, theirs in seconds.items() if other.who != "gangline"}
    return {f"ratio_to_{peer}": times_as_fast(seconds[side], theirs) for peer, theirs in peers.items()}


def in_turn(measurements: Mapping[_Key, Callable[[], float]], runs: int) -> dict[_Key, list[float]]:
    """Measure one after another, ``runs`` times over: A B A B."""
    found: dict[_Key, list[float]] = {key: [] for key in measurements}
    for _ in range(runs):
        for key, measure in measurements.items():
            found[key].append(measure())
    return found


def fastest_candidates(entries: Mapping[_Key, Entry], run_seconds: float) -> dict[_Key, Candidate]:
    """Return the fastest candidate of each entry.

    Entries with the same program and environment share a process group. Raises a GroupError if a candidate fails.
    """
    trials: dict[str, list[tuple[_Key, Candidate]]] = {}
    for key, entry in entries.items():
        if len(entry.candidates) > 1:
            for candidate in entry.candidates:
                process = f"{candidate.file} {candidate.ranks} {sorted(candidate.env.items())}"
                trials.setdefault(process, []).append((key, candidate))
    best = {key: (math.inf, entry.candidates[0]) for key, entry in entries.items()}
    for of_process in trials.values():
        _, first = of_process[0]
        say(f"trying {first.file} with {' '.join(f'{name}={value}' for name, value in first.env.items())}")
        with RankGroup(replace(first, options={})) as group:
            for key, candidate in of_process:
                group.prepare({**entries[key].options, **candidate.options})
                seconds = min(group.seconds(group.steps_in(run_seconds)) for _ in range(TRIALS))
                if seconds < best[key][0]:
                    best[key] = (seconds, candidate)
    return {key: candidate for key, (_, candidate) in best.items()}


def measure_in_turn(
    entries: Mapping[_Key, Entry],
    chosen: Mapping[_Key, Candidate],
    runs: int,
    run_seconds: float,
    *,
    check: bool = False,
) -> dict[_Key, Measured]:
    """Measure a candidate of each entry, one after another, ``runs`` times over: A B A B.

    All other process groups are idle while one of them runs. With ``check`` results are checked too. Raises a
    GroupError if a candidate fails, ends or does not answer.
    """
    with ExitStack() as stack:
        groups = {key: stack.enter_context(RankGroup(chosen[key])) for key in entries}
        for key, group in groups.items():
            group.prepare(entries[key].options)
        say(f"measuring {', '.join(dict.fromkeys(group.who for group in groups.values()))}, {runs} runs each, in turn")
        measurements = {key: partial(_run, group, run_seconds) for key, group in groups.items()}
        return {
            key: Measured(groups[key].who, chosen[key].setting, seconds, groups[key].error() if check else None)
            for key, seconds in in_turn(measurements, runs).items()
        }


def say(progress: str) -> None:
    """Report progress on stderr."""
    print(progress, file=sys.stderr, flush=True)


def _run(group: RankGroup, run_seconds: float) -> float:
    return group.seconds(group.steps_in(run_seconds, least=2))
