"""Times to start: `gangline bench startup` of commands, and `gangline bench connect` of groups of ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.report.tables import print_ratios
from gangline.bench.workload.options import Json, Runs
from gangline.bench.workload.sizes import counts
from gangline.collectives.errors import UsageError

if TYPE_CHECKING:
    from gangline.bench.driver.rank_group import RankGroup

_COMMANDS = {
    "gangline --help": [sys.executable, "-m", "gangline", "--help"],
    "gangline train --help": [sys.executable, "-m", "gangline", "train", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}
_CALLS = ("connect", "split", "barrier")
_FOLDER = "group_calls"  # of bench/peers
_MPI_INIT = ("mpi", "connect")  # possible once in a process
_BARRIER_SECONDS = 0.2  # of a run of barriers; a run of another call is one call


def startup(runs: Runs = 9, json: Json = None) -> None:
    """Measure the seconds until `gangline --help` and `gangline train --help` have finished."""
    from gangline.bench.driver.candidates import in_turn

    check_outputs(json)
    seconds = in_turn({name: partial(_seconds, command) for name, command in _COMMANDS.items()}, runs)
    publish(command_line(), [{"who": name, **spread(values)} for name, values in seconds.items()], json)


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def connect(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,8,32",
    calls: Annotated[str, typer.Option(help=f"Calls to measure, with commas, out of {', '.join(_CALLS)}.")] = ",".join(
        _CALLS
    ),
    peers: Annotated[str, typer.Option(help="Peers to measure beside gangline, with commas: gloo, mpi.")] = "",
    runs: Runs = 7,
    json: Json = None,
) -> None:
    """Measure what ranks do beside moving data: connecting, splitting into a group of all ranks, and barriers.

    time is that of a call on the slowest rank. All ranks start a call of connect() or split() together, after a
    barrier. Of gloo these are init_process_group(), with a TCP store, and new_group(); of MPI Comm.Split(), for an MPI
    process connects only once. Each peer runs at the fastest of several settings.
    """
    from gangline.bench.driver.installed import available_peers

    check_outputs(json)
    chosen = [call.strip() for call in calls.split(",")]
    if unknown := [call for call in chosen if call not in _CALLS]:
        raise UsageError(f"--calls has {unknown[0]!r}; expected names out of {', '.join(_CALLS)}")
    others = available_peers(peers, _FOLDER)
    rows = [row for number in counts(ranks, "--ranks") for row in measure(chosen, number, others, runs)]
    publish(command_line(), rows, json)
    print_ratios(rows, "ranks", ("call",))


def measure(calls: Sequence[str], ranks: int, peers: Sequence[str], runs: int) -> list[Row]:
    """Measure calls of so many ranks; gangline and the peers are measured in turn.

    Args:
        calls: names out of "connect", "split" and "barrier".
        ranks: number of ranks.
        peers: names out of "gloo" and "mpi".
        runs: number of runs of each candidate.

    Raises:
        GroupError: if a candidate fails. A peer that cannot be started is left out, with a line on stderr.
    """
    from gangline.bench.driver.candidates import in_turn
    from gangline.bench.driver.installed import collective_ranks, peer_groups
    from gangline.bench.driver.rank_group import RankGroup

    rows = []
    with ExitStack() as stack:
        (own,) = collective_ranks("gangline", ranks, _FOLDER)
        groups = {"gangline": [stack.enter_context(RankGroup(own))]}
        groups |= {peer: peer_groups(stack, peer, ranks, _FOLDER) for peer in peers}
        for call in calls:
            sides = {
                who: _fastest(of_who, call) for who, of_who in groups.items() if of_who and (who, call) != _MPI_INIT
            }
            seconds = in_turn({who: partial(_run, group, call) for who, group in sides.items()}, runs)
            rows += [_row(who, group, call, ranks, seconds) for who, group in sides.items()]
    return rows


def _fastest(groups: Sequence[RankGroup], call: str) -> RankGroup:
    """Prepare a call in all groups of a peer, and return the group of its fastest setting."""
    from gangline.bench.driver.candidates import TRIALS

    for group in groups:
        group.prepare({"call": call}, call)
    if len(groups) == 1:
        return groups[0]
    return min(groups, key=lambda group: min(_run(group, call) for _ in range(TRIALS)))


def _run(group: RankGroup, call: str) -> float:
    if call == "barrier":
        return group.seconds(group.steps_in(_BARRIER_SECONDS, call), call)
    return group.seconds(1, call, 0)


def _row(who: str, group: RankGroup, call: str, ranks: int, seconds: Mapping[str, Sequence[float]]) -> Row:
    figures = spread(seconds[who])
    theirs = {peer: of_peer for peer, of_peer in seconds.items() if peer != "gangline"}
    ratios = {f"ratio_to_{peer}": times_as_fast(seconds[who], of_peer) for peer, of_peer in theirs.items()}
    return {
        "who": group.who,
        "call": call,
        "ranks": ranks,
        "setting": group.candidate.setting or None,
        "seconds": figures["p50"],
        **(ratios if who == "gangline" else {}),
        **figures,
    }
