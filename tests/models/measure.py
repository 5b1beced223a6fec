"""Distance between two sets of weights, as the equivalence guarantee defines it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gangline import Module


def distance(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Return the largest ||a - b|| / max(||b||, 1e-12) over all tensors, with norms in float64."""
    assert ours.keys() == reference.keys()
    return max(
        float((ours[name].double() - value.double()).norm()) / max(float(value.double().norm()), 1e-12)
        for name, value in reference.items()
    )


def same_bits(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == reference.keys() and all(torch.equal(ours[name], reference[name]) for name in reference)


def replicas_are_equal(module: Module) -> None:
    """Check that all replicas have the same bits, in parameters and buffers."""
    first, *others = [replica.network.state_dict() for replica in module.bound.replicas.all]
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] == []
