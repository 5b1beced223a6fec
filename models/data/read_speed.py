"""How fast data can be read, with no training."""

from __future__ import annotations

import time
from typing import Any

from gangline.models.data.batches import num_samples
from gangline.models.data.sources import source


def read_speed(data: Any, batch_size: int | None = None, epochs: int = 1) -> float:
    """Read the data as `Module.fit` would, and return how many samples a second came.

    A network that trains faster than this waits for its data.

    Args:
        data: as `fit` takes it.
        batch_size: samples in a batch, for arrays and datasets.
        epochs: how often to read all of it; shuffled anew each time.

    Returns:
        Samples a second.

    Raises:
        TypeError: a wrong type.
        ValueError: epochs below 1, a missing or needless batch size, or data without batches.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; expected 1 or more")
    batches = source(data, batch_size, shuffle=True, seed=0, what="data")
    began = time.perf_counter()
    try:
        samples = sum(num_samples(item[0], "data") for epoch in range(epochs) for item in batches.epoch(epoch))
        if not samples:
            raise ValueError("the data has no batches; expected at least one")
        return samples / max(time.perf_counter() - began, 1e-9)
    finally:
        batches.close()
