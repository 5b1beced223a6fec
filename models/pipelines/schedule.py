"""The order in which a stage of a pipeline runs forward and backward of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Pass(NamedTuple):
    """Forward or backward of a micro-batch."""

    micro_batch: int
    is_forward: bool


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a stage in the order of 1F1B (PipeDream-Flush; Narayanan and others, 2021).

    A stage runs forward until the first gradient can come back, then forward and backward in turn, so it keeps the
    activations of at most ``stages - stage`` micro-batches.
    """
    ahead = min(stages - stage - 1, micro_batches)
    order = [Pass(number, True) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [Pass(number + ahead, True), Pass(number, False)]
    return order + [Pass(number, False) for number in range(micro_batches - ahead, micro_batches)]


def cut(
    seconds: Sequence[float],
    nbytes: Sequence[float],
    speeds: Sequence[float],
    memory: Sequence[float | None],
) -> list[int]:
    """Return the first layer of each stage such that the slowest stage is as fast as possible.

    The seconds are those of a layer's forward and backward on a device of speed 1. The memory of a device is in bytes;
    None: no limit.

    Raises:
        ValueError: if there are fewer layers than stages, a speed is not above 0, or no cut fits into the memory.
    """
    layers, stages = len(seconds), len(speeds)
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds are {list(speeds)}; expected numbers above 0")
    if layers < stages:
        raise ValueError(f"there are {layers} layers for {stages} contexts; expected a layer for each")
    # cheapest[end]: slowest stage and begins of the first stages over the layers before ``end``; PipeDream's partition
    cheapest: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for speed, limit in zip(speeds, memory, strict=True):
        following: dict[int, tuple[float, list[int]]] = {}
        for begin, (slowest, begins) in cheapest.items():
            for end in range(begin + 1, layers + 1):
                if limit is not None and sum(nbytes[begin:end]) > limit:
                    break
                found = max(slowest, sum(seconds[begin:end]) / speed)
                if end not in following or found < following[end][0]:
                    following[end] = found, [*begins, begin]
        cheapest = following
    best = cheapest.get(layers)
    if best is None:
        raise ValueError(
            f"the layers need {_megabytes(nbytes)} MB, in this order, and the contexts have {_megabytes(memory)}: they "
            "cannot be divided such that each context has one layer or more and room for its own; use larger or fewer "
            "contexts, or smaller micro-batches"
        )
    return best[1]


def _megabytes(sizes: Sequence[float | None]) -> str:
    return ", ".join("enough" if size is None else f"{size / 1e6:.3g}" for size in sizes)
