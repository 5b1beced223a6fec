"""`gangline bench backend`: torch.distributed over backend "gangline", beside gloo and MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.report.tables import print_ratios
from gangline.bench.workload.options import Json, Runs, RunSeconds
from gangline.bench.workload.sizes import counts, size_in_bytes
from gangline.collectives.errors import UsageError

if TYPE_CHECKING:
    from gangline.bench.driver.rank_group import RankGroup

_FOLDER = "backend"  # of bench/peers
_SIZED = ("all_reduce", "all_gather", "broadcast")
_SINGLE = (*_SIZED, "barrier")
_PROGRAMS = ("ddp", "fsdp2", "embeddings", "in_flight", "groups")
_CALLS = (*_SINGLE, *_PROGRAMS)


def backend(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,8",
    calls: Annotated[str, typer.Option(help=f"What to measure, with commas, out of {', '.join(_CALLS)}.")] = ",".join(
        _SINGLE
    ),
    sizes: Annotated[
        str, typer.Option(help="Bytes of the larger of a rank's tensors, with commas.")
    ] = "64,4K,64K,1M,16M,100M",
    peers: Annotated[str, typer.Option(help="Peers to measure beside gangline, with commas: gloo, mpi.")] = "gloo,mpi",
    runs: Runs = 5,
    run_seconds: RunSeconds = 0.1,
    json: Json = None,
) -> None:
    """Measure collectives and programs of torch.distributed over backend "gangline".

    time is that of a step on the slowest rank. The programs, which gloo alone is measured with: ddp trains with 24
    buckets of 1 MiB, fsdp2 with 12 layers of 1 MiB, embeddings exchanges the rows of 26 features as DLRM does,
    in_flight starts 64 all-reduces of 64 KiB before it waits, groups starts one of 1 MiB in each of 4 groups. Each peer
    runs at the fastest of several settings, and each rank in one thread.
    """
    from gangline.bench.driver.installed import available_peers

    check_outputs(json)
    chosen = [call.strip() for call in calls.split(",")]
    if unknown := [call for call in chosen if call not in _CALLS]:
        raise UsageError(f"--calls has {unknown[0]!r}; expected names out of {', '.join(_CALLS)}")
    nbytes = [size_in_bytes(size.strip(), "--sizes") for size in sizes.split(",")]
    cases = [{"call": call, "size": size} for call in chosen for size in (nbytes if call in _SIZED else [0])]
    others = available_peers(peers, _FOLDER)
    rows = [row for number in counts(ranks, "--ranks") for row in measure(cases, number, others, runs, run_seconds)]
    publish(command_line(), rows, json)
    print_ratios([row for row in rows if row["size"]], "size", ("ranks", "call"))
    print_ratios([row for row in rows if not row["size"]], "call", ("ranks",))


def measure(
    cases: Sequence[Mapping[str, Any]], ranks: int, peers: Sequence[str], runs: int, run_seconds: float
) -> Iterator[Row]:
    """Yield the rows of gangline and the peers, which are measured in turn.

    Args:
        cases: a name, and the bytes of the larger of a rank's tensors (0: not chosen), each.
        ranks: number of ranks.
        peers: names out of "gloo" and "mpi".
        runs: number of runs of each candidate.
        run_seconds: approximate length of a run.

    Raises:
        GroupError: if a candidate fails. A peer that cannot be started is left out, with a line on stderr.
    """
    from gangline.bench.driver.candidates import in_turn
    from gangline.bench.driver.installed import collective_ranks, peer_groups
    from gangline.bench.driver.rank_group import RankGroup

    with ExitStack() as stack:
        (own,) = collective_ranks("gangline", ranks, _FOLDER)
        groups = {"gangline": [stack.enter_context(RankGroup(own))]}
        groups |= {peer: peer_groups(stack, peer, ranks, _FOLDER) for peer in peers}
        for case in cases:
            taking_part = [who for who in groups if groups[who] and (who != "mpi" or case["call"] in _SINGLE)]
            sides = {who: _fastest(groups[who], case, run_seconds) for who in taking_part}
            measurements = {who: partial(_run, group, run_seconds) for who, group in sides.items()}
            seconds = in_turn(measurements, runs)
            for who, group in sides.items():
                yield _row(who, group, case, ranks, seconds)
            for who in taking_part:
                for group in groups[who]:
                    group.release()


def _fastest(groups: Sequence[RankGroup], case: Mapping[str, Any], run_seconds: float) -> RankGroup:
    """Prepare a case in all groups of a peer, and return the group of its fastest setting."""
    for group in groups:
        group.prepare(case)
    if len(groups) == 1:
        return groups[0]
    return min(groups, key=lambda group: _run(group, run_seconds))


def _run(group: RankGroup, run_seconds: float) -> float:
    return group.seconds(group.steps_in(run_seconds, least=2))


def _row(
    who: str, group: RankGroup, case: Mapping[str, Any], ranks: int, seconds: Mapping[str, Sequence[float]]
) -> Row:
    figures = spread([1e6 * each for each in seconds[who]])
    theirs = {peer: of_peer for peer, of_peer in seconds.items() if peer != "gangline"}
    ratios = {f"ratio_to_{peer}": times_as_fast(seconds[who], of_peer) for peer, of_peer in theirs.items()}
    return {
        "who": group.who,
        **case,
        "ranks": ranks,
        "setting": group.candidate.setting or None,
        "time_us": figures["p50"],
        "algbw_gbs": case["size"] / figures["p50"] / 1e3 if case["size"] else None,
        **(ratios if who == "gangline" else {}),
        **figures,
    }
