"""`gangline plan`: decide how to split batches, or the layers of a network, over devices of unequal speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import JsonFile, numbers, print_table, write_json
from gangline.kvstore.parameter_server.environment import parse_bytes
from gangline.models.balance.speed_model import shortest_step, step_seconds
from gangline.usage_error import UsageError


def plan(
    speeds: Annotated[str, typer.Option(help="Samples per second of each rank, or relative speeds, such as 3,1.")],
    batch: Annotated[int | None, typer.Option(help="Samples in a global batch, over all ranks.", min=1)] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each device in GiB, such as 24,11, or 800M,1G.")] = None,
    fixed_memory: Annotated[
        float, typer.Option(help="GiB that weights, gradients and optimizer take on each rank.", min=0)
    ] = 0.0,
    sample_memory: Annotated[
        float | None, typer.Option(help="GiB that each sample adds; the split then fits into the memory.", min=0)
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Function that returns (network, micro-batch).")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Compare the split of batches by speed with the equal one and with leaving out the slowest rank.

    With --network, measure its layers, and print how to cut them into stages of a pipeline, the slowest as fast as
    possible. A micro-batch is a tensor, a tuple of arguments or a dict of arguments by name.

    Step times are those of forward and backward, without the exchange of gradients. With --memory and without
    --sample-memory the last column shows how much memory a sample may take at most.
    """
    found = numbers("--speeds", speeds, float)
    if not found or not all(0 < one < math.inf for one in found):
        raise UsageError(f"--speeds is {speeds!r}; expected a number above 0 for each rank, such as 3,1")
    limits = numbers("--memory", memory, _bytes, len(found))
    if network is not None:
        _plan_stages(network, found, limits or [None] * len(found), json)
        return
    if batch is None:
        raise UsageError("expected --batch, whose samples to split, or --network, whose layers to split")
    if sample_memory is not None and memory is None:
        raise UsageError("--sample-memory is given without --memory; expected the memory of each rank, such as 24,11")
    splits = _splits(batch, found, [limit / 2**30 - fixed_memory for limit in limits], sample_memory)
    equal = splits[1].seconds
    rows = [
        {
            "split": one.name,
            "counts": one.counts,
            "seconds": one.seconds,
            "samples_per_s": batch / one.seconds,
            "times_equal": equal / one.seconds,
            "fits": one.fits,
            "sample_memory_max": one.room,
        }
        for one in splits
    ]
    write_json(json, rows)
    if json is not None:
        return
    print_table(
        {
            "split": [one.name for one in splits],
            "samples": [", ".join(map(str, one.counts)) for one in splits],
            "step in s": [f"{one.seconds:.4g}" if one.fits else "out of memory" for one in splits],
            "samples/s": [f"{batch / one.seconds:.4g}" if one.fits else "" for one in splits],
            "x equal": [f"{equal / one.seconds:.2f}" if one.fits else "" for one in splits],
            "max GiB/sample": ["" if one.room is None else f"{one.room:.3g}" for one in splits],
        }
    )
    print("Seconds and samples/s hold if --speeds are in samples per second.")


def _bytes(words: str) -> int:
    return parse_bytes(words if words.strip()[-1:].isalpha() else f"{words}G", "--memory")


def _plan_stages(name: str, speeds: Sequence[float], memory: Sequence[float | None], json: Path | None) -> None:
    """Print the stages of a network, for torch's pipelines and for `Pipeline`."""
    from torch import nn  # slow to import

    from gangline.models.import_by_name import resolve
    from gangline.models.pipelines.measured_parts import layers_of, measured_parts
    from gangline.models.pipelines.pipeline import cut

    built = resolve(name)()
    network, given = built if isinstance(built, tuple) else (built, getattr(built, "dummy_inputs", None))
    if not isinstance(network, nn.Module) or given is None:
        raise UsageError(f"{name} returned a {type(built).__name__}; expected (network, micro-batch)")
    layers = layers_of(network)
    arguments, named = ((), given) if isinstance(given, Mapping) else (given if type(given) is tuple else (given,), {})
    seconds, nbytes = measured_parts(network, layers, arguments, named, kept=len(speeds))
    begins = cut(seconds, nbytes, speeds, memory)
    ends = [*begins[1:], len(layers)]
    used = [sum(seconds[begin:end]) / speed for begin, end, speed in zip(begins, ends, speeds, strict=True)]
    sizes = [sum(nbytes[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    firsts, lasts = [layers[begin] for begin in begins], [layers[end - 1] for end in ends]
    write_json(json, {"first": firsts, "last": lasts, "seconds": used, "bytes": sizes})
    if json is not None:
        return
    print_table(
        {
            "first layer": firsts,
            "last layer": lasts,
            "step in s": [f"{one:.3g}" for one in used],
            "GiB": [f"{size / 2**30:.3g}" for size in sizes],
        }
    )
    print("split_spec = {" + ", ".join(f'"{name}": SplitPoint.BEGINNING' for name in firsts[1:]) + "}")
    if isinstance(network, nn.Sequential) and firsts[0] in network._modules:
        print("group2ctxs = {" + ", ".join(f'"{name}": gpu({number})' for number, name in enumerate(firsts)) + "}")


@dataclass(frozen=True)
class _Split:
    """A split of the global batch."""

    name: str
    counts: list[int]
    """Samples of each rank."""
    seconds: float
    """Expected time of a step, without the exchange of gradients."""
    fits: bool
    """True if no rank has more samples than fit into its memory."""
    room: float | None
    """GiB that a sample may take at most; None: without a limit."""


def _splits(batch: int, speeds: Sequence[float], memory: Sequence[float], sample_memory: float | None) -> list[_Split]:
    """Return the balanced split, the equal one, and the best one without the slowest rank if there are others.

    ``memory``: GiB for the samples of each rank; empty: without a limit.
    """
    rates, ranks = [1 / speed for speed in speeds], range(len(speeds))
    floors = [0 for _ in ranks]
    caps: list[int | None] = [None for _ in ranks]
    if memory and sample_memory:
        caps = [max(0, math.floor(size / sample_memory + 1e-9)) for size in memory]
    if not _holds(batch, caps):
        most = ", ".join(f"rank {index}: {cap}" for index, cap in enumerate(caps))
        raise ValueError(
            f"a global batch of {batch} samples does not fit: the ranks hold at most {most}; use a smaller batch and "
            "accumulate gradients over more steps, or recompute activations"
        )
    found = {
        "balanced": shortest_step(batch, rates, caps, floors),
        "equal": [batch // len(ranks) + (index < batch % len(ranks)) for index in ranks],
    }
    if len(ranks) > 1:
        slowest = min(ranks, key=lambda index: speeds[index])
        others = [0 if index == slowest else cap for index, cap in enumerate(caps)]
        if not _holds(batch, others):  # shown although it does not fit
            others = [0 if index == slowest else None for index in ranks]
        found[f"without rank {slowest}"] = shortest_step(batch, rates, others, floors)
    return [
        _Split(
            name,
            counts,
            step_seconds(counts, rates),
            all(cap is None or count <= cap for count, cap in zip(counts, caps, strict=True)),
            min((size / count for count, size in zip(counts, memory, strict=False) if count), default=None),
        )
        for name, counts in found.items()
    ]


def _holds(batch: int, caps: Sequence[int | None]) -> bool:
    return any(cap is None for cap in caps) or sum(cap or 0 for cap in caps) >= batch
