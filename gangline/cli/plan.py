"""`gangline plan`: decide how to split batches over devices of unequal speed."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from gangline.advise.split_plan import RankProfile, SplitPlan, plan_splits
from gangline.cli.options import JsonFile, numbers, print_table, write_json
from gangline.collectives.errors import UsageError


def plan(
    batch: Annotated[int, typer.Option(help="Samples in a global batch, over all ranks.", min=1)],
    speeds: Annotated[str, typer.Option(help="Samples per second of each rank, or relative speeds, such as 3,1.")],
    memory: Annotated[str | None, typer.Option(help="Memory of each rank's device in GiB, such as 24,11.")] = None,
    fixed_memory: Annotated[
        float, typer.Option(help="GiB that weights, gradients and optimizer take on each rank.", min=0)
    ] = 0.0,
    sample_memory: Annotated[
        float | None, typer.Option(help="GiB that each sample adds; the split then fits into the memory.", min=0)
    ] = None,
    json: JsonFile = None,
) -> None:
    """Compare the split of batches by speed with the equal one and with leaving out the slowest rank.

    Step times are those of forward and backward, without the exchange of gradients. With --memory and without
    --sample-memory the last column shows how much memory a sample may take at most.
    """
    found = numbers("--speeds", speeds, float)
    if not found or not all(0 < one < math.inf for one in found):
        raise UsageError(f"--speeds is {speeds!r}; expected a number above 0 for each rank, such as 3,1")
    sizes = numbers("--memory", memory, float, len(found)) or [None] * len(found)
    if sample_memory is not None and memory is None:
        raise UsageError("--sample-memory is given without --memory; expected the memory of each rank, such as 24,11")
    ranks = [RankProfile(speed, size, fixed_memory, sample_memory) for speed, size in zip(found, sizes, strict=True)]
    plans = plan_splits(batch, ranks)
    write_json(json, [_plain(each, plans[1]) for each in plans])
    if json is None:
        _show(plans)


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
