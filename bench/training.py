"""`gangline bench training`: samples per second of Module, beside a plain torch loop, MXNet's Module and torch's DDP.

The measured steps are in bench/peers, a file a side. With several workers it is `gangline.bench.scaling` that measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.bench.report import Row, check_outputs, publish, spread
from gangline.bench.workload import command_line, context_words, distinct_devices, images, print_ratios

if TYPE_CHECKING:
    from gangline.bench.sides import Candidate, Measured

_STORES = ("local", "device")
_TRIAL_SECONDS = 0.3  # of a run that looks for the best setting
_PLAIN = "torch"


def training(
    network: Annotated[
        str | None, typer.Option(help="A network of the zoo; by default lenet, or resnet18 with --scaling.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples in a batch, over all contexts; by default 64, or 32 of colour. With --scaling those of each "
            "worker; by default 128.",
            min=1,
        ),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Numbers of contexts, with commas; by default 1,2, or 1 and all of --gpus.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs as contexts, such as 0,1; one may stand twice. Else CPU contexts.")
    ] = None,
    kv_store: Annotated[
        str | None,
        typer.Option(
            help="The store that several contexts use, by default device; with --scaling those of the workers, with "
            "commas, by default dist_sync,allreduce,apart; apart is none, what the machine gives workers that share "
            "nothing else, and ddp is torch's DDP over backend gangline."
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(help="Numbers of workers, such as 1,2,4: processes of one thread, in place of contexts."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="What to measure beside gangline, with commas: torch (the plain loop), mxnet, ddp; by default torch, "
            "or ddp with --scaling, which has no other."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.", min=1)] = 7,
    run_seconds: Annotated[float, typer.Option(help="About how long a run takes.", min=0.0)] = 1.0,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this .png.")] = None,
) -> None:
    """Train on random images (28x28 or 64x64), with SGD and momentum.

    efficiency is samples_per_s over those of one context of the same side, for each device there is more: CPU
    contexts share the host, as one has all of it. Beside peers each side runs at its best setting, found first and
    named; ddp has a process for each context. p50, min, p99 and max are of samples_per_s.

    With --scaling there is a process for each worker, and a server for dist_sync; efficiency is samples_per_s over
    those of one worker of the same side, for each worker there is.
    """
    from gangline.bench.peers.installed import chosen

    check_outputs(json, plot)
    if scaling is not None:
        if contexts is not None or gpus is not None:
            raise ValueError("--scaling measures workers of one CPU context each; leave --contexts and --gpus out")
        rows = _scaled(scaling, network or "resnet18", batch_size, kv_store, peers, runs, run_seconds)
        publish(command_line(), rows, json, plot)
        print_ratios(rows, ("network", "store", "workers"))
        return
    network = network or "lenet"
    words = context_words(contexts, gpus, default=(1, 2))
    others = chosen(_PLAIN if peers is None else peers, "training", on_gpus=gpus is not None)
    size = batch_size or (32 if images(network).shape[0] == 3 else 64)
    rows = measure(network, size, words, kv_store or "device", others, runs, run_seconds)
    publish(command_line(), rows, json, plot)
    print_ratios(rows, ("network", "contexts"))


def measure(
    network: str,
    batch_size: int,
    contexts: Mapping[int, str],
    store: str,
    peers: Sequence[str],
    runs: int,
    run_seconds: float,
) -> list[Row]:
    """Rows of gangline and its peers on each number of contexts, all measured in turn.

    Args:
        network: of the zoo.
        batch_size: over all contexts.
        contexts: numbers of contexts, each with the words that name them.
        store: of gangline's Module; MXNet's is chosen among local and device.
        peers: names out of "torch", "mxnet" and "ddp".
        runs: of each side.
        run_seconds: about how long a run takes.

    Raises:
        ValueError: an unknown network.
        RuntimeError: a side failed, for instance for an unknown store.
    """
    from gangline.bench.sides import best_settings, measure_in_turn

    given = images(network)
    options = {"network": network, "batch_size": batch_size, "image_shape": given.shape, "classes": given.classes}
    cells = _cells(contexts, peers)
    sides = [
        _side(who, {**options, "store": store, "contexts": words}, alone=not peers) for (who, _), words in cells.items()
    ]
    found = measure_in_turn(sides, best_settings(sides, _TRIAL_SECONDS), runs, run_seconds)
    by_cell = dict(zip(cells, found, strict=True))
    return [_row(cell, by_cell, cells, network, batch_size) for cell in cells]


def _scaled(
    words: str,
    network: str,
    samples: int | None,
    stores: str | None,
    peers: str | None,
    runs: int,
    run_seconds: float,
) -> list[Row]:
    from gangline.bench import scaling
    from gangline.bench.peers.installed import chosen

    others = chosen("ddp" if peers is None else peers, "scaling", on_gpus=False)
    kinds = scaling.STORES if stores is None else [store.strip() for store in stores.split(",")]
    rows = scaling.measure(network, samples or scaling.SAMPLES, scaling.counts(words), kinds, others, runs, run_seconds)
    print("\n".join(scaling.speedups(rows)))
    return rows


def _cells(contexts: Mapping[int, str], peers: Sequence[str]) -> dict[tuple[str, int], str]:
    """Who is measured on how many contexts, and the words that name these."""
    cells = {("gangline", count): words for count, words in contexts.items()}
    for peer in peers:
        if peer == _PLAIN:
            first, *_ = contexts.values()
            cells[peer, 1] = first.partition(",")[0]
        else:
            cells |= {(peer, count): words for count, words in contexts.items() if count > 1 or peer != "ddp"}
    return cells


def _side(who: str, options: dict[str, Any], *, alone: bool) -> Candidate:
    from gangline.bench.peers.installed import interpreter, settings
    from gangline.bench.sides import Candidate

    if alone:
        return Candidate(f"{who}_training", options)
    stores = _STORES if who == "mxnet" and "," in options["contexts"] else ()
    return Candidate(f"{who}_training", options, settings(who, stores), interpreter(who))


def _row(
    cell: tuple[str, int],
    found: Mapping[tuple[str, int], Measured],
    words: Mapping[tuple[str, int], str],
    network: str,
    batch_size: int,
) -> Row:
    from gangline.bench.sides import ratio

    who, count = cell
    side, alone, plain = found[cell], found.get((who, 1)), found.get((_PLAIN, 1))
    figures = spread([batch_size / seconds for seconds in side.seconds])
    others = {name: found.get((name, count)) for name in ("mxnet", "ddp") if any(name == who for who, _ in found)}
    return {
        "who": side.who,
        "setting": str(side.setting) or None,
        "network": network,
        "contexts": count,
        "batch_size": batch_size,
        "samples_per_s": figures["p50"],
        "efficiency": ratio(side, alone) / distinct_devices(words[cell]) if alone else None,
        "ratio_to_plain": ratio(side, plain) if plain else None,
        **{f"ratio_to_{name}": ratio(side, other) if other else None for name, other in others.items()},
        **figures,
    }
