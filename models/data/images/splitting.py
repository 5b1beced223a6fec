"""Stratified splits: the same fraction, or number, of samples of every label in each part."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from gangline.models.data.batches import as_batch, num_samples, take
from gangline.models.random_streams import mixed_seed


def split_each_label(data: Any, *parts: float, seed: int = 0) -> list[Any]:
    """Split data so that each part has its fraction of every label, like MATLAB's ``splitEachLabel``.

    Args:
        data: a dataset with ``labels``, such as an `ImageFolder`, a Subset of one, or a tuple (data, labels).
        parts: size of each part but the last, per label: a fraction (a float below 1) or a number of samples (an int).
            The last part is the remainder.
        seed: seed of the selection.

    Returns:
        One part more than ``parts``: Subsets, or tuples (data, labels), in the order of ``data``. Every part has at
        least one sample of each label.

    Raises:
        ValueError: if the parts are invalid or a label has too few samples.
        TypeError: if a part is not a number, or the data have no labels.
    """
    wanted = _checked_parts(parts)
    labels, names = _labels_of(data)
    chosen: list[list[int]] = [[] for _ in range(len(parts) + 1)]
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        generator = torch.Generator().manual_seed(mixed_seed(seed, int(label)))
        shuffled = indices[torch.randperm(len(indices), generator=generator, device="cpu").numpy()]
        bounds = _bounds(len(indices), wanted, f"label {names[label] if names else label}")
        for part, begin, end in zip(chosen, [0, *bounds], [*bounds, len(indices)], strict=True):
            part += shuffled[begin:end].tolist()
    found = [torch.tensor(sorted(part), device="cpu") for part in chosen]
    if isinstance(data, tuple):
        return [(take(as_batch(data[0], "data"), part), take(as_batch(data[1], "labels"), part)) for part in found]
    return [Subset(data, part.tolist()) for part in found]


def _checked_parts(parts: Sequence[Any]) -> list[int | Fraction]:
    if not parts:
        raise ValueError("split_each_label() got no parts; expected a fraction such as 0.9, or a number of samples")
    wanted: list[int | Fraction] = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            raise TypeError(
                f"a part is {part!r}; expected a fraction such as 0.9, or a number of samples of each label"
            )
        if not (part >= 1 if isinstance(part, int) else 0 < part < 1):
            raise ValueError(f"a part is {part!r}; expected a fraction between 0 and 1, or 1 or more samples as an int")
        wanted.append(part if isinstance(part, int) else Fraction(repr(part)))  # of the decimal: 0.1 is exactly a tenth
    total = sum(part for part in wanted if isinstance(part, Fraction))
    if total >= 1:
        raise ValueError(f"the parts {', '.join(map(str, parts))} sum to {float(total):g}; expected less than 1")
    return wanted


def _bounds(samples: int, wanted: Sequence[int | Fraction], what: str) -> list[int]:
    """Return the end index of each part but the last, for a label with this number of samples."""
    counts = [part if isinstance(part, int) else 1 for part in wanted]
    if samples <= sum(counts):
        raise ValueError(
            f"{what} has {samples} sample{'s' * (samples != 1)}, too few for {len(wanted) + 1} parts; "
            f"expected at least {sum(counts) + 1}"
        )
    bounds: list[int] = []
    exact = Fraction(0)
    for number, part in enumerate(wanted):
        exact += part if isinstance(part, int) else part * samples
        least = (bounds[-1] if bounds else 0) + counts[number]
        most = samples - 1 - sum(counts[number + 1 :])
        if isinstance(part, int):
            most = min(most, least)
        bounds.append(min(max(int(exact + Fraction(1, 2)), least), most))
    return bounds


def _labels_of(data: Any) -> tuple[np.ndarray[Any, Any], list[str] | None]:
    """Return the labels as numbers, and the class names, if any."""
    if isinstance(data, Subset):
        labels, names = _labels_of(data.dataset)
        return labels[list(data.indices)], names
    if isinstance(data, tuple):
        if len(data) != 2:
            raise ValueError(f"data is a tuple of {len(data)}; expected (data, labels)")
        given: Any = as_batch(data[1], "labels")
        if num_samples(as_batch(data[0], "data"), "data") != len(given):
            raise ValueError(f"data has {num_samples(data[0], 'data')} samples, but {len(given)} labels")
    elif hasattr(data, "labels"):
        given = torch.as_tensor(data.labels, device="cpu")
    else:
        raise TypeError(f"data is a {type(data).__name__} without labels; expected an ImageFolder or (data, labels)")
    if not isinstance(given, torch.Tensor) or given.dim() != 1 or given.is_floating_point():
        raise TypeError("the labels are not one integer per sample; expected integer class numbers")
    return given.cpu().numpy(), getattr(data, "classes", None)
