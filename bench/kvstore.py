"""`gangline bench kvstore`: a network's gradients through the stores, after MXNet's tools/bandwidth/measure.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report import Row, check_outputs, publish, spread
from gangline.bench.workload import bytes_of, command_line, context_words, parameter_shapes, print_ratios

if TYPE_CHECKING:
    from gangline.bench.sides import Candidate, Measured

_PUSH_PULL = "push+pull"
_PUSHPULL = "pushpull"
_TRIAL_SECONDS = 0.15  # of a run that looks for the best setting


def kvstore(
    network: Annotated[str, typer.Option(help="The network of the zoo whose parameters are the keys.")] = "resnet50",
    stores: Annotated[str, typer.Option(help="Kinds of store, with commas.")] = "local,device",
    contexts: Annotated[
        str | None, typer.Option(help="Numbers of contexts, with commas; by default 2,4, or all of --gpus.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs as contexts, such as 0,1; one may stand twice. Else CPU contexts.")
    ] = None,
    peers: Annotated[str, typer.Option(help="What to measure beside gangline, with commas: mxnet, torch.")] = "",
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.", min=1)] = 7,
    run_seconds: Annotated[float, typer.Option(help="About how long a run takes.", min=0.0)] = 0.3,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this .png.")] = None,
) -> None:
    """Push every gradient from every context, and pull every sum into every context.

    seconds are those of one such round; gb_per_s_per_device is the bytes of one context's gradients over them, for
    gangline and its peers alike; error is the largest absolute difference from the sum in float64. Beside
    peers each side runs at its best setting, found first and named. p50, min, p99 and max are of seconds.
    """
    from gangline.bench.peers.installed import chosen

    check_outputs(json, plot)
    words = context_words(contexts, gpus, default=(2, 4))
    others = chosen(peers, "kvstore", on_gpus=gpus is not None)
    rows = measure(network, [store.strip() for store in stores.split(",")], words, others, runs, run_seconds)
    publish(command_line(), rows, json, plot)
    print_ratios(rows, ("store", "call", "contexts"))


def measure(
    network: str, stores: Sequence[str], contexts: dict[int, str], peers: Sequence[str], runs: int, run_seconds: float
) -> list[Row]:
    """Rows for each store and number of contexts; the sides of one such pair are measured in turn.

    Args:
        network: whose parameters are the keys.
        stores: kinds of store.
        contexts: numbers of contexts, each with the words that name them.
        peers: names out of "mxnet" and "torch".
        runs: of each side.
        run_seconds: about how long a run takes.

    Raises:
        ValueError: an unknown network.
        RuntimeError: a side failed, for instance for an unknown store.
    """
    from gangline.bench.sides import best_settings, measure_in_turn

    keys = parameter_shapes(network)
    cells = [(store, count) for store in stores for count in contexts]
    sides = [_sides({"keys": keys, "store": store, "contexts": contexts[count]}, peers) for store, count in cells]
    settings = iter(best_settings([side for of_cell in sides for side in of_cell], _TRIAL_SECONDS))
    rows: list[Row] = []
    for (store, count), of_cell in zip(cells, sides, strict=True):
        found = measure_in_turn(of_cell, [next(settings) for _ in of_cell], runs, run_seconds, check=True)
        calls = [side.options["call"] for side in of_cell]
        theirs = dict(zip(peers, found[-len(peers) :], strict=True)) if peers else {}
        rows += [
            _row(side, theirs, bytes_of(keys), store=store, call=call, contexts=count, network=network)
            for side, call in zip(found, calls, strict=True)
        ]
    return rows


def _sides(options: dict[str, Any], peers: Sequence[str]) -> list[Candidate]:
    """Gangline's two ways, then the peers in their order."""
    from gangline.bench.peers.installed import interpreter, settings
    from gangline.bench.sides import Candidate, Setting

    own = settings("gangline") if peers else [Setting()]
    return [
        *(Candidate("gangline_kvstore", {**options, "call": call}, own) for call in (_PUSH_PULL, _PUSHPULL)),
        *(
            Candidate(f"{peer}_kvstore", {**options, "call": _PUSH_PULL}, settings(peer), interpreter(peer))
            for peer in peers
        ),
    ]


def _row(side: Measured, peers: dict[str, Measured], size: int, **description: Any) -> Row:
    from gangline.bench.sides import ratio

    figures = spread(side.seconds)
    return {
        "who": side.who,
        "setting": str(side.setting) or None,
        **description,
        "seconds": figures["p50"],
        "gb_per_s_per_device": size / figures["p50"] / 1e9,
        "error": side.error,
        **{f"ratio_to_{peer}": ratio(side, theirs) for peer, theirs in peers.items()},
        **figures,
    }
