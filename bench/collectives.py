"""`gangline bench all_reduce`, `all_gather` and so on: collectives measured as nccl-tests does, beside gloo and MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gangline.bench.driver import installed
from gangline.bench.driver.harness import Side, fastest, in_turn, ratios_to_peers, say
from gangline.bench.driver.hosts import Hosts
from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import RankGroup
from gangline.bench.report.output import check_outputs, command_line, write_json
from gangline.bench.report.plots import draw_curves
from gangline.bench.report.rows import Row, is_noisy, spread
from gangline.bench.report.tables import LEGEND, format_size, print_ratios
from gangline.bench.workload.collective_shapes import (
    IN_PLACE,
    REDUCING,
    bus_factor,
    tensor_options,
)
from gangline.bench.workload.collective_shapes import rows as rows_in
from gangline.bench.workload.options import (
    DataType,
    Json,
    MaxBytes,
    MinBytes,
    Plot,
    ReduceOp,
    Runs,
    StepFactor,
    Transport,
)
from gangline.bench.workload.sizes import counts, sizes_between
from gangline.collectives.schedule import ROOTED
from gangline.collectives.tuner import forced_algorithms
from gangline.usage_error import UsageError

_RUN_SECONDS = 0.2


@dataclass(frozen=True)
class Sweep:
    """The options of the bench of a collective."""

    minbytes: MinBytes = "8"
    maxbytes: MaxBytes = "256M"
    stepfactor: StepFactor = 2
    iters: Annotated[int | None, typer.Option("-n", "--iters", help="Steps of a run; default: about 0.2 s.", min=1)] = (
        None
    )
    warmup_iters: Annotated[
        int | None, typer.Option("-w", "--warmup_iters", help="Unmeasured steps before a run; default: a fifth.", min=0)
    ] = None
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2"
    transport: Annotated[Transport, typer.Option(help="gangline's transport.")] = Transport.auto
    dtype: Annotated[DataType, typer.Option("-d", "--datatype", "--dtype", help="Data type.")] = DataType.float32
    op: Annotated[ReduceOp, typer.Option("-o", "--op", help="Reduction.")] = ReduceOp.sum
    root: Annotated[int, typer.Option("-r", "--root", help="Root of broadcast and reduce.", min=0)] = 0
    registered: Annotated[
        bool | None,
        typer.Option("--registered/--ordinary", help="Use gangline's tensors of comm.empty(), or not; default: both."),
    ] = None
    algo: Annotated[str | None, typer.Option(help="gangline's algorithm, such as ring or ring:8.")] = None
    check: Annotated[int, typer.Option("-c", "--check", help="1: check every element of the results; 0: do not.")] = 1
    peers: Annotated[str, typer.Option(help="Peers to measure beside gangline, with commas: gloo, mpi.")] = ""
    hosts: Annotated[int, typer.Option(help="Network namespaces to distribute the ranks over.", min=1)] = 1
    runs: Runs = 7
    json: Json = None
    plot: Plot = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def algorithm(self, collective: str) -> str | None:
        """Return the value of GANGLINE_ALGO; None: not set."""
        return f"{collective}={self.algo}" if self.algo else None

    def of_rank(self, collective: str, ranks: int, size: int, *, in_place: bool) -> dict[str, Any]:
        """Return the options of a rank for a size: the whole elements and rows that fit into it."""
        count = size // self.itemsize // rows_in(collective, ranks)
        given = {"dtype": self.dtype, "op": self.op, "root": self.root, "algorithm": self.algorithm(collective)}
        return tensor_options(collective, ranks, count, in_place=in_place, **given)


def collective(name: str, sweep: Sweep) -> None:
    """Measure a collective over a range of sizes, out of place and in place.

    size is that of the larger of a rank's tensors. time is that of a step: the mean over a run on the slowest rank, and
    the median over the runs. algbw is size / time; busbw, in nccl-tests' definition, does not depend on the number of
    ranks. Each peer runs at the fastest of several settings for each size. Options have nccl-tests' names; commands are
    spelled as in JSON, with an underscore.
    """
    check_outputs(sweep.json, sweep.plot)
    sizes = sizes_between(sweep.minbytes, sweep.maxbytes, sweep.stepfactor)
    peers = installed.available_peers(sweep.peers, "ranks")
    if sweep.algo:
        forced_algorithms(sweep.algorithm(name) or "")
    rows: list[Row] = []
    for number in counts(sweep.ranks, "--ranks"):
        for of_size in measure(name, sweep, sizes, peers, number):
            if not any(row["ranks"] == number for row in rows):
                print("\n".join(_head(name, sweep, of_size)))
            rows += of_size
            print("\n".join(_lines(of_size, {row["who"]: row["setting"] for row in reversed(rows)})), flush=True)
    print("\n".join(_closing(rows)))
    if sweep.json is not None:
        write_json(rows, sweep.json)
    if sweep.plot is not None:
        draw(command_line(), rows, sweep.plot)
    print_ratios(rows, "size", ("ranks", "in_place", "registered"))


def measure(
    collective: str, sweep: Sweep, sizes: Sequence[int], peers: Sequence[str], ranks: int
) -> Iterator[list[Row]]:
    """Yield for each size the rows of gangline and of the peers, out of place and in place.

    Raises:
        ValueError: if ``root`` is not a rank, or there are more hosts than ranks.
        GroupError: if gangline fails. A peer that fails is left out from then on, with a line on stderr.
    """
    if sweep.root >= ranks:
        raise UsageError(f"--root is {sweep.root}; expected a rank below {ranks}")
    if sweep.hosts > ranks:
        raise UsageError(f"--hosts is {sweep.hosts}; expected at most one for each of {ranks} ranks")
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(sweep.hosts)) if sweep.hosts > 1 else None
        say(f"starting gangline, {ranks} ranks")
        own = stack.enter_context(RankGroup(_own_candidate(sweep, ranks), hosts))
        started = {peer: installed.peer_groups(stack, peer, ranks, hosts=hosts) for peer in peers}
        others = {peer: groups for peer, groups in started.items() if groups}
        length = f"{sweep.iters} steps" if sweep.iters else f"about {_RUN_SECONDS} s"
        say(f"measuring {collective} at {len(sizes)} sizes: {sweep.runs} runs of {length} for each figure of a line")
        for size in sizes:
            rows: list[Row] = []
            for in_place in IN_PLACE.get(collective, (False,)):
                options = sweep.of_rank(collective, ranks, size, in_place=in_place)
                if options["count"]:
                    rows += _Case(collective, sweep, ranks, options).rows(own, others)
            if rows:
                yield rows


@dataclass(frozen=True)
class _Case:
    """One size, out of place or in place."""

    collective: str
    sweep: Sweep
    ranks: int
    options: Mapping[str, Any]

    def rows(self, own: RankGroup, others: dict[str, list[RankGroup]]) -> list[Row]:
        """Prepare all sides, measure them in turn, and free their memory."""
        kinds = (False, True) if self.sweep.registered is None else (self.sweep.registered,)
        sides = [self._prepared("gangline", own, registered) for registered in kinds]
        sides += fastest(list(others), others, self._prepared)
        seconds = in_turn({side: side.seconds for side in sides}, self.sweep.runs)
        rows = [self._row(side, seconds) for side in sides]
        for group in {own, *(group for groups in others.values() for group in groups)}:
            group.release()
        return rows

    def _prepared(self, who: str, group: RankGroup, registered: bool = False) -> Side:
        name = "registered" if registered else "ordinary"
        options = {**self.options, "registered": registered}
        group.prepare(options, name)
        steps = self.sweep.iters or group.steps_in(_RUN_SECONDS, name)
        return Side(who, group, options, name, steps, self.sweep.warmup_iters)

    def _row(self, side: Side, seconds: Mapping[Side, Sequence[float]]) -> Row:
        sweep, options = self.sweep, self.options
        size = options["count"] * rows_in(self.collective, self.ranks) * sweep.itemsize
        figures = spread([1e6 * each for each in seconds[side]])
        algbw = size / figures["p50"] / 1e3
        return {
            "who": side.group.who,
            "setting": side.group.candidate.setting or None,
            "collective": self.collective,
            "transport": side.group.transport,
            "ranks": self.ranks,
            "hosts": sweep.hosts if sweep.hosts > 1 else None,
            "size": size,
            "count": options["count"],
            "dtype": sweep.dtype,
            "redop": sweep.op if self.collective in REDUCING else None,
            "root": sweep.root if self.collective in ROOTED else None,
            "in_place": options["in_place"],
            "registered": side.options["registered"],
            "algorithm": options["algorithm"] if side.who == "gangline" else None,
            "time_us": figures["p50"],
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * bus_factor(self.collective, self.ranks),
            "wrong": side.group.wrong(side.name) if sweep.check else None,
            **ratios_to_peers(side, seconds),
            **figures,
        }


def _own_candidate(sweep: Sweep, ranks: int) -> Candidate:
    candidate, *_ = installed.collective_ranks("gangline", ranks)
    transport = "tcp" if sweep.hosts > 1 else sweep.transport
    insecure = {"GANGLINE_INSECURE": "1"} if sweep.hosts > 1 else {}  # the namespaces are isolated
    return replace(candidate, env={**candidate.env, "BENCH_TRANSPORT": transport, **insecure})


def _head(collective: str, sweep: Sweep, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines above a table: first the values common to all its lines."""
    row = rows[0]
    redop = [row["redop"]] if row["redop"] else []
    root = [f"root {row['root']}"] if row["root"] is not None else []
    hosts = [f"{sweep.hosts} hosts"] if sweep.hosts > 1 else []
    algorithm = [f"algorithm {sweep.algorithm(collective)}"] if sweep.algo else []
    over = f"{row['ranks']} ranks over {row['transport']}"
    words = [over, *hosts, row["dtype"], *redop, *root, *algorithm, f"{sweep.runs} runs"]
    yield f"# {collective}: {', '.join(words)}"
    for who, setting in {each["who"]: each["setting"] for each in rows if each["who"] != "gangline"}.items():
        yield f"# {_short(who)}: {', '.join(filter(None, [who, setting]))}"
    if any(each["registered"] for each in rows):
        yield "# registered: gangline with tensors of comm.empty()"
    yield "#             out-of-place               in-place"
    yield "#    size        time  algbw  busbw        time  algbw  busbw #wrong"
    yield "#                (us) (GB/s) (GB/s)        (us) (GB/s) (GB/s)"


def _lines(rows: Sequence[Row], settings: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a line for each side of one size; show a setting if it is not the side's first."""
    sides: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        sides.setdefault((row["who"], row["registered"]), []).append(row)
    for (who, registered), of_side in sides.items():
        out, inside = (next((row for row in of_side if row["in_place"] is place), None) for place in (False, True))
        wrong = [row["wrong"] for row in of_side if row["wrong"] is not None]
        setting = of_side[0]["setting"] if of_side[0]["setting"] != settings[who] else None
        name = " ".join(filter(None, ["registered" if registered else _short(who), setting]))
        counted = str(sum(wrong)) if wrong else "N/A"
        yield f"{format_size(of_side[0]['size']):>9} {_figures(out)} {_figures(inside)} {counted:>6} {name}"


def _figures(row: Row | None) -> str:
    if row is None:
        return " " * 25
    time = f"{row['time_us']:.{1 if row['time_us'] < 1e4 else 0}f}{'~' if is_noisy(row) else ' '}"
    return f"{time:>11} {row['algbw_gbs']:6.2f} {row['busbw_gbs']:6.2f}"


def _closing(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines with which nccl-tests ends."""
    if any(is_noisy(row) for row in rows):
        yield f"# {LEGEND}"
    wrong = [row["wrong"] for row in rows if row["wrong"] is not None]
    if wrong:
        yield f"# Out of bounds values : {sum(wrong)} {'FAILED' if sum(wrong) else 'OK'}"
    sides: dict[str, list[float]] = {}
    for row in rows:
        sides.setdefault("registered" if row["registered"] else _short(row["who"]), []).append(row["busbw_gbs"])
    for name, of_side in sides.items():
        yield f"# Avg bus bandwidth    : {sum(of_side) / len(of_side):.6g} ({name})"


def _short(who: str) -> str:
    """Return a name without its version: "gloo" for "gloo, torch 2.11", "MPICH" for "MPICH 5.0.2"."""
    return who.partition(",")[0].rstrip("0123456789.").strip()


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Draw rows as curves over sizes, as `draw_curves`."""
    draw_curves(
        title,
        rows,
        path,
        panels=lambda row: f"{row['ranks']} ranks, {'in place' if row['in_place'] else 'out of place'}",
        curves=lambda row: f"{row['who']}, registered" if row["registered"] else str(row["who"]),
        figures=("time_us", "busbw_gbs"),
    )
