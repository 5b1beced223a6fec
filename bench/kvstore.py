"""`gangline bench kvstore`: a network's gradients through the stores, after MXNet's tools/bandwidth/measure.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gangline.bench.driver.harness import Entry, Measured, fastest_candidates, measure_in_turn
from gangline.bench.driver.installed import available_peers, single_process
from gangline.bench.driver.processes import Candidate
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.report.tables import print_ratios
from gangline.bench.workload.networks import bytes_of, context_words, parameter_shapes
from gangline.bench.workload.options import Gpus, Json, Runs, RunSeconds

_PUSH_PULL = "push+pull"
_PUSHPULL = "pushpull"
_TRIAL_SECONDS = 0.15  # of a run that searches for the best setting


def kvstore(
    network: Annotated[str, typer.Option(help="Network of the zoo whose parameters are the keys.")] = "resnet50",
    stores: Annotated[str, typer.Option(help="Kinds of store, with commas.")] = "local,device",
    contexts: Annotated[
        str | None, typer.Option(help="Numbers of contexts, with commas; default: 2,4, or all of --gpus.")
    ] = None,
    gpus: Gpus = None,
    peers: Annotated[str, typer.Option(help="Peers to measure beside gangline, with commas: mxnet, torch.")] = "",
    runs: Runs = 7,
    run_seconds: RunSeconds = 0.3,
    json: Json = None,
) -> None:
    """Push every gradient from every context, and pull every sum into every context.

    time is that of one such round. GB/s per device is the bytes of one context's gradients over the time. error is the
    largest absolute difference from the sum in float64. With --peers, gangline and its peers run at the fastest of
    several settings.
    """
    check_outputs(json)
    words = context_words(contexts, gpus, default=(2, 4))
    others = available_peers(peers, "kvstore", on_gpus=gpus is not None)
    rows = measure(network, [store.strip() for store in stores.split(",")], words, others, runs, run_seconds)
    publish(rows, json)
    print_ratios(rows, "contexts", ("store", "call"))


def measure(
    network: str, stores: Sequence[str], contexts: dict[int, str], peers: Sequence[str], runs: int, run_seconds: float
) -> list[Row]:
    """Measure each store on each number of contexts; gangline and the peers are measured in turn.

    The arguments are options of `kvstore`; ``contexts`` maps numbers of contexts to their names.
    """
    keys = parameter_shapes(network)
    entries = {
        (store, count, who, call): Entry(
            single_process(who, "kvstore") if peers else [Candidate("kvstore/gangline")],
            {"keys": keys, "store": store, "contexts": words, "call": call},
        )
        for store in stores
        for count, words in contexts.items()
        for who, call in (("gangline", _PUSH_PULL), ("gangline", _PUSHPULL), *((peer, _PUSH_PULL) for peer in peers))
    }
    chosen = fastest_candidates(entries, _TRIAL_SECONDS)
    rows: list[Row] = []
    for case in dict.fromkeys(key[:2] for key in entries):
        of_case = {key: entry for key, entry in entries.items() if key[:2] == case}
        found = measure_in_turn(of_case, chosen, runs, run_seconds, check=True)
        theirs = {who: measured for (_, _, who, _), measured in found.items() if who != "gangline"}
        rows += [
            _row(measured, theirs, bytes_of(keys), store=store, call=call, contexts=count, network=network)
            for (store, count, _, call), measured in found.items()
        ]
    return rows


def _row(measured: Measured, peers: dict[str, Measured], size: int, **description: Any) -> Row:
    figures = spread(measured.seconds)
    return {
        "who": measured.who,
        "setting": measured.setting or None,
        **description,
        "seconds": figures["p50"],
        "gb_per_s_per_device": size / figures["p50"] / 1e9,
        "error": measured.error,
        **{f"ratio_to_{peer}": times_as_fast(measured.seconds, theirs.seconds) for peer, theirs in peers.items()},
        **figures,
    }
