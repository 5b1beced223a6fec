"""`gangline bench connect` and `gangline bench backend`: single calls of ranks, beside gloo and MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from gangline.bench.driver.harness import Side, fastest, in_turn, ratios_to_peers
from gangline.bench.driver.installed import available_peers, collective_ranks, peer_groups
from gangline.bench.driver.rank_group import RankGroup
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.report.tables import print_ratios
from gangline.bench.workload.collective_shapes import rows as rows_in
from gangline.bench.workload.collective_shapes import tensor_options
from gangline.bench.workload.options import Json, Runs, RunSeconds
from gangline.bench.workload.sizes import counts, size_in_bytes
from gangline.usage_error import UsageError

_CONNECTING = ("connect", "split", "barrier")
_SIZED = ("all_reduce", "all_gather", "broadcast")
_SINGLE = (*_SIZED, "barrier")
_BACKEND = (*_SINGLE, "ddp", "fsdp2", "embeddings", "in_flight", "groups")
_ONCE = ("connect", "split")  # a run is one call, started by all ranks together
_BARRIER_SECONDS = 0.2


def connect(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,8,32",
    calls: Annotated[str, typer.Option(help=f"Calls to measure, out of {', '.join(_CONNECTING)}.")] = ",".join(
        _CONNECTING
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
    check_outputs(json)
    cases = [{"call": call} for call in _chosen(calls, _CONNECTING)]
    rows = _measure("ranks", cases, counts(ranks, "--ranks"), peers, runs, _BARRIER_SECONDS)
    publish(rows, json)
    print_ratios(rows, "ranks", ("call",))


def backend(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,8",
    calls: Annotated[str, typer.Option(help=f"What to measure, with commas, out of {', '.join(_BACKEND)}.")] = ",".join(
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
    check_outputs(json)
    nbytes = [size_in_bytes(size.strip(), "--sizes") for size in sizes.split(",")]
    chosen = _chosen(calls, _BACKEND)
    cases = [{"call": call, "size": size} for call in chosen for size in (nbytes if call in _SIZED else [0])]
    rows = _measure("backend", cases, counts(ranks, "--ranks"), peers, runs, run_seconds)
    publish(rows, json)
    print_ratios([row for row in rows if row["size"]], "size", ("ranks", "call"))
    print_ratios([row for row in rows if not row["size"]], "call", ("ranks",))


def _chosen(words: str, among: Sequence[str]) -> list[str]:
    chosen = [word.strip() for word in words.split(",")]
    if unknown := [word for word in chosen if word not in among]:
        raise UsageError(f"--calls has {unknown[0]!r}; expected names out of {', '.join(among)}")
    return chosen


def _measure(
    folder: str, cases: Sequence[Mapping[str, Any]], ranks: Sequence[int], peers: str, runs: int, run_seconds: float
) -> list[Row]:
    """Measure gangline and the peers of a folder of bench/peers in turn.

    A case is a call, and the bytes of the larger of a rank's tensors (0: not chosen). A failure of gangline is a
    GroupError; a peer that fails is skipped from then on, with a line on stderr.
    """
    others = available_peers(peers, folder)
    rows: list[Row] = []
    for number in ranks:
        with ExitStack() as stack:
            own = stack.enter_context(RankGroup(collective_ranks("gangline", number, folder)[0]))
            groups = {peer: found for peer in others if (found := peer_groups(stack, peer, number, folder))}
            for case in cases:
                rows += _rows(own, groups, case, runs, run_seconds)
    return rows


def _rows(
    own: RankGroup, groups: dict[str, list[RankGroup]], case: Mapping[str, Any], runs: int, run_seconds: float
) -> Iterator[Row]:
    def prepare(who: str, group: RankGroup) -> Side:
        options = _options(case, group.candidate.ranks)
        group.prepare(options)
        if case["call"] in _ONCE:
            return Side(who, group, options, "bench", 1, warmup=0)
        return Side(who, group, options, "bench", group.steps_in(run_seconds, least=2))

    able = [who for who in groups if who != "mpi" or case["call"] in (*_SINGLE, "split")]
    sides = [prepare("gangline", own), *fastest(able, groups, prepare)]
    seconds = in_turn({side: side.seconds for side in sides}, runs)
    for side in sides:
        figures = spread([1e6 * each for each in seconds[side]])
        size = case.get("size")
        yield {
            "who": side.group.who,
            **case,
            "ranks": own.candidate.ranks,
            "setting": side.group.candidate.setting or None,
            "time_us": figures["p50"],
            "algbw_gbs": size / figures["p50"] / 1e3 if size else None,
            **ratios_to_peers(side, seconds),
            **figures,
        }
    for group in (own, *(group for of_peer in groups.values() for group in of_peer)):
        group.release()


def _options(case: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    call = case["call"]
    if not case.get("size"):
        return {"call": call}
    return tensor_options(call, ranks, case["size"] // 4 // rows_in(call, ranks))
