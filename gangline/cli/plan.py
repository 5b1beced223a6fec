"""`gangline plan`: decide how to split batches over unequal devices, from given or measured speeds."""

from __future__ import annotations

import json as json_format
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.advise.split_plan import RankProfile, SplitPlan, plan_splits
from gangline.cli.options import JsonFile, numbers, print_table, write_json
from gangline.collectives.errors import UsageError


def plan(
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="Your training step, to measure: a function of the number of samples that runs forward and backward "
            "on this rank's device, without exchanging gradients.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in a global batch, over all ranks.", min=1)] = None,
    speeds: Annotated[
        str | None, typer.Option(help="Samples per second of each rank, or relative speeds, such as 3,1.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Speeds and memory as `gangline plan MODULE:FUNCTION --json FILE` wrote them."
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each rank's device in GiB, such as 24,11.")] = None,
    fixed_memory: Annotated[
        float, typer.Option(help="GiB that weights, gradients and optimizer take on each rank.", min=0)
    ] = 0.0,
    sample_memory: Annotated[
        float | None, typer.Option(help="GiB that each sample adds; the split then fits into the memory.", min=0)
    ] = None,
    sizes: Annotated[str, typer.Option(help="Numbers of samples to run the step with, such as 1,8,32.")] = "1,4,16,64",
    runs: Annotated[int, typer.Option(help="Runs of each size; the median counts.", min=1)] = 5,
    json: JsonFile = None,
) -> None:
    """Compare the split of batches by speed with the equal one and with leaving out the slowest rank.

    With MODULE:FUNCTION your step is run at a few sizes in each rank instead, and time and memory are fitted by the
    number of samples, for --measured. Start it as the training is started, on all ranks: `torchrun --nproc-per-node 2
    --no-python gangline plan train:step --json speeds.json`, or alone for one device. A size that does not fit into
    memory ends the series.

    Step times are those of forward and backward, without the exchange of gradients. With --memory and without
    --sample-memory the last column shows how much memory a sample may take at most.
    """
    if step is not None:
        _measure(step, sizes, runs, json)
        return
    if batch is None:
        raise UsageError("--batch is missing; expected the number of samples in a global batch, or MODULE:FUNCTION")
    if (speeds is None) == (measured is None):
        raise UsageError("expected either --speeds, such as --speeds 3,1, or --measured FILE")
    if measured is not None:
        ranks = _measured(measured, memory)
    else:
        ranks = _given(speeds or "", memory, fixed_memory, sample_memory)
    plans = plan_splits(batch, ranks)
    write_json(json, [_plain(each, plans[1]) for each in plans])
    if json is None:
        _show(plans)


def _given(speeds: str, memory: str | None, fixed_memory: float, sample_memory: float | None) -> list[RankProfile]:
    found = numbers("--speeds", speeds, float)
    if not found or not all(0 < one < math.inf for one in found):
        raise UsageError(f"--speeds is {speeds!r}; expected a number above 0 for each rank, such as 3,1")
    sizes = numbers("--memory", memory, float, len(found)) or [None] * len(found)
    if sample_memory is not None and memory is None:
        raise UsageError("--sample-memory is given without --memory; expected the memory of each rank, such as 24,11")
    return [
        RankProfile(0.0, 1 / speed, size, fixed_memory, sample_memory) for speed, size in zip(found, sizes, strict=True)
    ]


def _measured(path: Path, memory: str | None) -> list[RankProfile]:
    try:
        rows: list[dict[str, Any]] = json_format.loads(path.read_text())["ranks"]
        sizes = numbers("--memory", memory, float, len(rows)) or [row["memory"] for row in rows]
        return [
            RankProfile(row["fixed"], row["per_sample"], size, row["fixed_memory"], row["sample_memory"])
            for row, size in zip(rows, sizes, strict=True)
        ]
    except (KeyError, TypeError, json_format.JSONDecodeError) as error:
        raise UsageError(
            f"--measured {path} is not a file that `gangline plan MODULE:FUNCTION --json FILE` wrote: {error!r}"
        ) from error


def _plain(each: SplitPlan, equal: SplitPlan) -> dict[str, Any]:
    return {
        "split": each.name,
        "counts": each.counts,
        "seconds": each.seconds,
        "samples_per_s": each.samples_per_second,
        "times_equal": equal.seconds / each.seconds,
        "fits": each.fits,
        "sample_memory_max": each.room,
    }


def _show(plans: list[SplitPlan]) -> None:
    equal = plans[1]
    print_table(
        {
            "split": [each.name for each in plans],
            **{f"rank {index}": [str(each.counts[index]) for each in plans] for index in range(len(equal.counts))},
            "step": [f"{each.seconds:.4g} s" if each.fits else "out of memory" for each in plans],
            "samples/s": [f"{each.samples_per_second:.4g}" if each.fits else "" for each in plans],
            "x equal": [f"{equal.seconds / each.seconds:.2f}" if each.fits else "" for each in plans],
            "max GiB/sample": ["" if each.room is None else f"{each.room:.3g}" for each in plans],
        }
    )


def _measure(step: str, sizes: str, runs: int, json: JsonFile) -> None:
    """Run a step at a few sizes in each rank; rank 0 prints and writes time and memory by the number of samples."""
    from gangline.advise.step_profile import measure_ranks
    from gangline.models.import_by_name import resolve

    counts = sorted(set(numbers("--sizes", sizes, int)))
    if len(counts) < 2 or counts[0] < 1:
        raise UsageError(f"--sizes is {sizes!r}; expected two or more numbers of samples above 0, such as 1,8,32")
    rows = measure_ranks(resolve(step), counts, runs)
    if rows is None:
        return  # rank 0 prints
    write_json(json, {"ranks": [asdict(row) for row in rows]})
    if json is None or str(json) != "-":
        print_table(
            {
                "rank": [str(rank) for rank in range(len(rows))],
                "device": [row.device for row in rows],
                "samples/s": [f"{row.samples_per_second:.4g}" for row in rows],
                "fixed": [f"{row.fixed:.3g} s" for row in rows],
                "per sample": [f"{row.per_sample:.3g} s" for row in rows],
                "GiB/sample": ["" if row.sample_memory is None else f"{row.sample_memory:.3g}" for row in rows],
                "largest size": [str(row.largest) for row in rows],
            }
        )
