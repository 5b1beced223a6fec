"""Distance between two sets of weights, as the equivalence guarantee defines it."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def distance(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Return the largest ||a - b|| / max(||b||, 1e-12) over all tensors, with norms in float64."""
    assert ours.keys() == reference.keys()
    return max(
        float((ours[name].double() - value.double()).norm()) / max(float(value.double().norm()), 1e-12)
        for name, value in reference.items()
    )
