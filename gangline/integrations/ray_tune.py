"""A function of `gangline.sweep` as a trainable of Ray Tune, for sweeps over several machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import tune

from gangline.collectives.context import Context, cpu, gpu
from gangline.sweeps.trial import Function, Trial


def trainable(function: Function) -> Callable[[dict[str, Any]], None]:
    """Return a function for `ray.tune.Tuner`.

    A trial trains on the GPUs that Ray gives to it, or on one CPU context. What it reports has the names "step" and
    "metric"; the metric that it returns is reported as well.

    Args:
        function: as for `gangline.sweep`. Ray's schedulers end trials in place of early stopping.
    """

    def run(parameters: dict[str, Any]) -> None:
        def send(step: int, value: float) -> bool:
            tune.report({"step": step, "metric": value})
            return False

        contexts: tuple[Context, ...] = tuple(gpu(index) for index in range(len(ray.get_gpu_ids()))) or (cpu(0),)
        found = function(Trial(0, parameters, contexts, Path.cwd(), send))
        if found is not None:
            tune.report({"metric": float(found)})

    return run
