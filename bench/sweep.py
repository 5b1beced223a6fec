"""A collective over a range of sizes: gangline and its peers, each a gang of ranks, measured in turn."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.bench.gangs import Gang, GangError, Way
from gangline.bench.peers.installed import ways
from gangline.bench.report import Row, machine, spread
from gangline.bench.workload import command_line
from gangline.collectives.schedule import ROOTED

if TYPE_CHECKING:
    from gangline.bench.hosts import Hosts

IN_PLACE = {"all_reduce": (False, True), "reduce": (False, True), "broadcast": (True,)}
"""Which collectives can be in place, and which only so; the others are out of place."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROWS_IN = ("reduce_scatter", "all_to_all", "scatter")
"""Collectives whose input has a row for each rank."""
ROWS_OUT = ("all_gather", "all_to_all", "gather")
"""Collectives whose result has one."""

_RUN_SECONDS = 0.2
_TRIALS = 2  # runs of a setting that is tried
_LEAST_STEPS, _MOST_STEPS = 3, 20_000
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Sweep:
    """What is to be measured."""

    collective: str
    sizes: Sequence[int]
    """In bytes, of the larger of a rank's tensors."""
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    registered: Sequence[bool] = (False, True)
    """Whether gangline's tensors are of ``comm.empty()``: one, or both."""
    transport: str = "auto"
    algorithm: str | None = None
    """What GANGLINE_ALGO is set to; None: nothing."""
    steps: int | None = None
    """Of a run; None: as many as fit into it."""
    before: int | None = None
    """Steps of a run that are not measured; None: a fifth."""
    runs: int = 7
    check: bool = True
    percentiles: bool = False
    hosts: int = 1
    peers: Sequence[str] = ()

    def __post_init__(self) -> None:
        from gangline.collectives.call_signature import DTYPES, OPS
        from gangline.collectives.tuner import TRANSPORTS, forced_algorithms

        dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
        for name, value, expected in (
            ("--dtype", self.dtype, dtypes),
            ("--op", self.op, OPS),
            ("--transport", self.transport, ("auto", *TRANSPORTS[:-1])),
        ):
            if value not in expected:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(expected)}")
        if self.algorithm is not None:
            forced_algorithms(self.algorithm)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


def rows_of(sweep: Sweep, ranks: int) -> Iterator[list[Row]]:
    """For each size the rows of all sides, out of place and in place.

    Raises:
        ValueError: ``root`` is no rank, or there are more hosts than ranks.
        GangError: gangline failed. A peer that does is left out from there on, with a line that says so.
    """
    if sweep.root >= ranks:
        raise ValueError(f"--root is {sweep.root}; expected a rank below {ranks}")
    if sweep.hosts > ranks:
        raise ValueError(f"--hosts is {sweep.hosts}; expected at most one for each of {ranks} ranks")
    with ExitStack() as stack:
        hosts = None
        if sweep.hosts > 1:
            from gangline.bench.hosts import Hosts

            hosts = stack.enter_context(Hosts(sweep.hosts))
        own = stack.enter_context(Gang(_own_way(sweep, ranks), ranks, hosts))
        others = {peer: gangs for peer in sweep.peers if (gangs := _gangs(stack, peer, ranks, hosts))}
        for size in sweep.sizes:
            rows: list[Row] = []
            for in_place in IN_PLACE.get(sweep.collective, (False,)):
                options = options_of(sweep, ranks, size, in_place=in_place)
                if options["count"]:
                    rows += _Case(sweep, ranks, options).rows(own, others)
            if rows:
                yield rows


def options_of(sweep: Sweep, ranks: int, size: int, *, in_place: bool) -> dict[str, Any]:
    """What the ranks are to prepare for a size: as many whole elements, and rows, as fit into it."""
    collective = sweep.collective
    rows = ranks if collective in (*ROWS_IN, *ROWS_OUT) else 1
    count = size // sweep.itemsize // rows
    return {
        "collective": collective,
        "dtype": sweep.dtype,
        "op": sweep.op,
        "root": sweep.root,
        "in_place": in_place,
        "count": count,
        "inputs": count * (ranks if collective in ROWS_IN else 1),
        "outputs": count * (ranks if collective in ROWS_OUT else 1),
        "registered": False,
        "algorithm": sweep.algorithm,
    }


def sizes_between(smallest: str, largest: str, factor: int) -> list[int]:
    """Sizes in bytes, each ``factor`` times the one before.

    Raises:
        ValueError: a word is no size, or the largest is below the smallest.
    """
    low, high = size_in_bytes(smallest, "-b"), size_in_bytes(largest, "-e")
    if low > high:
        raise ValueError(f"-b {smallest} is above -e {largest}")
    return [low * factor**power for power in range(math.floor(math.log(high / low, factor) + 1e-9) + 1)]


def numbers(words: str) -> list[int]:
    """The numbers of ``--ranks``.

    Raises:
        ValueError: a word is no number above 0.
    """
    found = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in found):
        raise ValueError(f"--ranks is {words!r}; expected numbers above 0 with commas, such as 2,4")
    return list(dict.fromkeys(int(word) for word in found))


def write(rows: Sequence[Row], path: Path) -> None:
    """Write rows, with the command and the machine, as JSON."""
    path.write_text(json.dumps({"command": command_line(), "machine": machine(), "rows": list(rows)}, indent=1) + "\n")


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it: the bytes that the busiest link must carry."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in (*ROWS_IN, *ROWS_OUT) else 1.0


@dataclass(frozen=True)
class _Side:
    """What takes part in a case."""

    who: str
    """Gangline, or the peer's short name."""
    gang: Gang
    name: str
    """Under which it was prepared."""
    steps: int


@dataclass(frozen=True)
class _Case:
    """One size, out of place or in place."""

    sweep: Sweep
    ranks: int
    options: Mapping[str, Any]

    def rows(self, own: Gang, others: dict[str, list[Gang]]) -> list[Row]:
        """Prepare all sides, measure them in turn, and give their memory back."""
        sides = [self._prepared("gangline", own, registered) for registered in self.sweep.registered]
        for peer in list(others):
            try:
                sides.append(self._best(peer, others[peer]))
            except GangError as error:
                print(f"skipping {peer}: {error}")
                for gang in others.pop(peer):
                    gang.close()
        seconds: list[list[float]] = [[] for _ in sides]
        for _ in range(self.sweep.runs):
            for side, of_side in zip(sides, seconds, strict=True):
                of_side.append(self._seconds(side))
        theirs = {side.who: of_side for side, of_side in zip(sides, seconds, strict=True) if side.who != "gangline"}
        rows = [self._row(side, of_side, theirs) for side, of_side in zip(sides, seconds, strict=True)]
        for gang in {side.gang: None for side in sides}:
            gang.ask({"release": True})
        return rows

    def _prepared(self, who: str, gang: Gang, registered: bool = False) -> _Side:
        name = "registered" if registered else "ordinary"
        answers = gang.ask({"prepare": {**self.options, "registered": registered}, "as": name})
        fitting = math.ceil(_RUN_SECONDS / max(answer["seconds"] for answer in answers))
        return _Side(who, gang, name, self.sweep.steps or min(max(fitting, _LEAST_STEPS), _MOST_STEPS))

    def _best(self, peer: str, gangs: Sequence[Gang]) -> _Side:
        """The quickest of a peer's ways at this size."""
        best: tuple[float, _Side] | None = None
        for gang in gangs:
            side = self._prepared(peer, gang)
            seconds = min(self._seconds(side) for _ in range(_TRIALS)) if len(gangs) > 1 else 0.0
            if best is not None:
                (best[1] if seconds < best[0] else side).gang.ask({"release": True})
            if best is None or seconds < best[0]:
                best = seconds, side
        assert best is not None
        return best[1]

    def _seconds(self, side: _Side) -> float:
        before = self.sweep.before if self.sweep.before is not None else math.ceil(side.steps / 5)
        return side.gang.seconds(side.name, side.steps, before)

    def _row(self, side: _Side, seconds: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> Row:
        sweep, options = self.sweep, self.options
        rows = self.ranks if sweep.collective in (*ROWS_IN, *ROWS_OUT) else 1
        size = options["count"] * rows * sweep.itemsize
        figures = spread([1e6 * each for each in seconds])
        algbw = size / figures["p50"] / 1e3
        ours = side.who == "gangline"
        wrong = [answer["wrong"] for answer in side.gang.ask({"check": side.name})] if sweep.check else None
        return {
            "who": side.gang.who,
            "setting": side.gang.way.setting or None,
            "collective": sweep.collective,
            "transport": side.gang.transport,
            "ranks": self.ranks,
            "hosts": sweep.hosts if sweep.hosts > 1 else None,
            "size": size,
            "count": options["count"],
            "dtype": sweep.dtype,
            "redop": sweep.op if sweep.collective in REDUCING else None,
            "root": sweep.root if sweep.collective in ROOTED else None,
            "in_place": options["in_place"],
            "registered": side.name == "registered",
            "algorithm": sweep.algorithm if ours else None,
            "time_us": figures["p50"],
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * bus_factor(sweep.collective, self.ranks),
            "wrong": sum(wrong) if wrong is not None else None,
            **(_ratios(seconds, theirs) if ours else {}),
            **(_steps(side) if sweep.percentiles else {}),
            **figures,
        }


def _ratios(ours: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> Row:
    """How many times as fast ours is: the median over the runs, each beside its neighbour."""
    return {
        f"ratio_to_{who}": statistics.median(other / own for own, other in zip(ours, seconds, strict=True))
        for who, seconds in theirs.items()
    }


def _steps(side: _Side) -> Row:
    """How long single steps take, each by the rank that took longest."""
    answers = side.gang.ask({"spread": side.name, "steps": side.steps})
    longest = [max(of_step) for of_step in zip(*(answer["seconds"] for answer in answers), strict=True)]
    found = spread([1e6 * each for each in longest])
    return {f"step_{name}_us": found[name] for name in ("p50", "p99", "max")}


def _own_way(sweep: Sweep, ranks: int) -> Way:
    way, *_ = ways("gangline", ranks)
    transport = "tcp" if sweep.hosts > 1 else sweep.transport
    insecure = {"GANGLINE_INSECURE": "1"} if sweep.hosts > 1 else {}  # the namespaces are ours alone
    return replace(way, env={**way.env, "BENCH_TRANSPORT": transport, **insecure})


def _gangs(stack: ExitStack, peer: str, ranks: int, hosts: Hosts | None) -> list[Gang]:
    """A peer's gangs, one for each of its ways; none where it cannot be started, with a line that says why."""
    if hosts is not None and peer != "gloo":
        print(f"skipping {peer}: it is measured on one host only")
        return []
    _say(f"starting {peer}, {ranks} ranks")
    at = {} if hosts is None else {"GLOO_SOCKET_IFNAME": "eth0"}
    try:
        return [
            stack.enter_context(Gang(replace(way, env={**way.env, **at}), ranks, hosts)) for way in ways(peer, ranks)
        ]
    except GangError as error:
        print(f"skipping {peer}: {error}")
        return []


def size_in_bytes(word: str, flag: str) -> int:
    """A number of bytes from words such as 8, 64K or 256M.

    Raises:
        ValueError: the flag's words are none.
    """
    number, unit = (word[:-1], word[-1].upper()) if word[-1:].isalpha() else (word, "")
    if not number.isdecimal() or not int(number) or unit not in _UNITS:
        raise ValueError(f"{flag} is {word!r}; expected a number of bytes above 0, such as 8, 64K or 256M")
    return int(number) * _UNITS[unit]


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
