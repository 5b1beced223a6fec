"""`gangline bench training`: samples per second of Module beside a torch loop, MXNet's Module and torch's DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer

from gangline.bench import scaling
from gangline.bench.driver.harness import Entry, Measured, fastest_candidates, measure_in_turn
from gangline.bench.driver.installed import available_peers, ddp, single_process
from gangline.bench.driver.processes import Candidate
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.report.tables import print_ratios
from gangline.bench.transfer import Plan
from gangline.bench.transfer import measure as measure_transfer
from gangline.bench.workload.networks import context_words, distinct_devices, images
from gangline.bench.workload.options import Gpus, Json, Runs, RunSeconds
from gangline.bench.workload.sizes import counts
from gangline.usage_error import UsageError

_STORES = ("local", "device")
_TRIAL_SECONDS = 0.3  # of a run that searches for the best setting
_PLAIN = "torch"
_transfer_option = partial(typer.Option, rich_help_panel="Transfer learning")


def training(
    network: Annotated[
        str | None, typer.Option(help="Network of the zoo; default: lenet, or resnet18 with --workers.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples in a batch over all contexts; default: 64, or 32 for colour images. With --workers: of each "
            "worker; default: 128.",
            min=1,
        ),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Numbers of contexts, with commas; default: 1,2, or 1 and all of --gpus.")
    ] = None,
    gpus: Gpus = None,
    kv_store: Annotated[
        str | None,
        typer.Option(
            help="Store that several contexts use; default: device. With --workers: stores, with commas; default: "
            "dist_sync,allreduce,apart. apart is no store: what the machine gives workers that share nothing else. ddp "
            "is torch's DDP over backend gangline."
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "-n", "--workers", "--scaling", help="Numbers of workers, such as 1,2,4: processes of one thread each."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Peers to measure beside gangline, with commas: torch (a plain loop), mxnet, ddp; default: torch. "
            "With --workers: ddp, which is the default."
        ),
    ] = None,
    transfer: Annotated[
        bool,
        _transfer_option(
            "--transfer",
            help="Measure accuracy and images/s of transfer learning by 1, 2 and 4 workers, or those of --workers; "
            "default network: alexnet, batch of a worker: 32.",
        ),
    ] = False,
    freeze_until: Annotated[str, _transfer_option(help="Layers before this one are fixed.")] = "classifier.6",
    epochs: Annotated[int, _transfer_option(help="Epochs on all digits.", min=1)] = 10,
    lr: Annotated[float, _transfer_option(help="Learning rate of one worker.")] = 0.001,
    scale_batch: Annotated[
        bool,
        _transfer_option(
            "--scale-batch/--same-batch", help="Multiply batch and learning rate by the number of workers."
        ),
    ] = True,
    runs: Runs = 7,
    run_seconds: RunSeconds = 1.0,
    json: Json = None,
) -> None:
    """Train on random images (28x28 or 64x64) with SGD and momentum.

    efficiency is samples/s over those of one context of the same candidate and over the number of devices; all CPU
    contexts are one device, the host. With --peers, every candidate runs at the fastest of several settings. ddp has a
    process for each context.

    With --workers there is a process for each worker, and a server for dist_sync; efficiency is samples/s over those of
    one worker of the same candidate and over the number of workers.

    With --transfer, a network trained on the digits 0 to 4 is adapted to all ten digits by each number of workers.
    accuracy is that on 360 held-out images, time that of all epochs with their scoring.
    """
    check_outputs(json)
    if transfer:
        plan = Plan(network or "alexnet", freeze_until, epochs, batch_size or 32, lr)
        rows = measure_transfer(plan, counts(workers or "1,2,4", "--workers"), scale_batch=scale_batch)
        publish(rows, json)
        return
    if workers is not None:
        if contexts is not None or gpus is not None:
            raise UsageError("--workers measures workers of one CPU context each; leave --contexts and --gpus out")
        others = available_peers("ddp" if peers is None else peers, "training", among=("ddp",))
        stores = scaling.STORES if kv_store is None else [store.strip() for store in kv_store.split(",")]
        samples, numbers = batch_size or scaling.SAMPLES, counts(workers, "--workers")
        rows = scaling.measure(network or "resnet18", samples, numbers, stores, others, runs, run_seconds)
        publish(rows, json)
        print("\n".join(scaling.speedups(rows)))
        print_ratios(rows, "workers", ("network", "store"))
        return
    network = network or "lenet"
    words = context_words(contexts, gpus, default=(1, 2))
    others = available_peers(_PLAIN if peers is None else peers, "training", on_gpus=gpus is not None)
    size = batch_size or (32 if images(network).shape[0] == 3 else 64)
    rows = measure(network, size, words, kv_store or "device", others, runs, run_seconds)
    publish(rows, json)
    print_ratios(rows, "contexts", ("network",))


def measure(
    network: str,
    batch_size: int,
    contexts: Mapping[int, str],
    store: str,
    peers: Sequence[str],
    runs: int,
    run_seconds: float,
) -> list[Row]:
    """Measure gangline and its peers on each number of contexts, all in turn.

    The arguments are options of `training`; ``contexts`` maps numbers of contexts to their names. MXNet's store is the
    faster of local and device.
    """
    shape = images(network)
    options = {
        "network": network,
        "batch_size": batch_size,
        "samples": batch_size,
        "image_shape": shape.shape,
        "classes": shape.classes,
        "store": store,
    }
    cases = _cases(contexts, peers)
    entries = {
        (who, count): Entry(_candidates(who, count, alone=not peers), {**options, "contexts": words})
        for (who, count), words in cases.items()
    }
    found = measure_in_turn(entries, fastest_candidates(entries, _TRIAL_SECONDS), runs, run_seconds)
    return [_row(case, found, cases, network, batch_size) for case in cases]


def _cases(contexts: Mapping[int, str], peers: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return the words that name the contexts, by program and number of contexts."""
    cases = {("gangline", count): words for count, words in contexts.items()}
    for peer in peers:
        if peer == _PLAIN:
            first, *_ = contexts.values()
            cases[peer, 1] = first.partition(",")[0]
        else:
            cases |= {(peer, count): words for count, words in contexts.items() if count > 1 or peer != "ddp"}
    return cases


def _candidates(who: str, count: int, *, alone: bool) -> list[Candidate]:
    if alone:
        return [Candidate(f"training/{who}")]
    return ddp(count) if who == "ddp" else single_process(who, "training", _STORES if count > 1 else ())


def _row(
    case: tuple[str, int],
    found: Mapping[tuple[str, int], Measured],
    words: Mapping[tuple[str, int], str],
    network: str,
    batch_size: int,
) -> Row:
    who, count = case
    own = found[case]

    def ratio(other: Measured | None) -> float | None:
        return times_as_fast(own.seconds, other.seconds) if other else None

    alone = ratio(found.get((who, 1)))
    figures = spread([batch_size / seconds for seconds in own.seconds])
    others = [name for name in ("mxnet", "ddp") if any(name == who for who, _ in found)]
    return {
        "who": own.who,
        "setting": own.setting or None,
        "network": network,
        "contexts": count,
        "batch_size": batch_size,
        "samples_per_s": figures["p50"],
        "efficiency": None if alone is None else alone / distinct_devices(words[case]),
        "ratio_to_plain": ratio(found.get((_PLAIN, 1))),
        **{f"ratio_to_{name}": ratio(found.get((name, count))) for name in others},
        **figures,
    }
