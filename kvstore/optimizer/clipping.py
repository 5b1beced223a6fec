"""Gradient clipping: by value, by each key's norm, by the norm of all keys together.

MXNet has the first as ``clip_gradient``; MATLAB's GradientThresholdMethod calls the three "absolute-value", "l2norm"
and "global-l2norm". The formula for norms is that of torch.nn.utils.clip_grad_norm_, after Pascanu et al., "On the
difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

THRESHOLDS = ("clip_gradient", "clip_norm", "clip_global_norm")
"""Optimizer arguments that clip; at most one of them may be given."""
_EPSILON = 1e-6  # torch's; it avoids division by 0
_HALVES = (torch.float16, torch.bfloat16)


def check_thresholds(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if two thresholds are given, or one is not a finite number above 0; None: not given."""
    given = {name: arguments[name] for name in THRESHOLDS if arguments.get(name) is not None}
    for name, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; expected a number above 0")
    if len(given) > 1:
        shown = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{shown} are given; expected at most one of {', '.join(THRESHOLDS)}")


def clip_norm_(gradients: Sequence[torch.Tensor], threshold: float) -> None:
    """Scale all gradients by min(1, threshold / (the norm of all of them + 1e-6)), in place.

    They may be on several devices. If the norm is NaN, all gradients become NaN, as in torch.
    """
    if gradients:
        scale_(gradients, factor(norm(gradients), threshold))


def norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm over all elements, shape (), on the first gradient's device.

    It is the norm of the tensors' norms. Those are computed in each tensor's dtype, but in float32 for float16 and
    bfloat16, whose squares would overflow.
    """
    of_each = [
        torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.dtype in _HALVES else None)
        for gradient in gradients
    ]
    return norm_of_norms(of_each)


def norm_of_norms(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of tensors with these norms, each of shape (); on the first one's device."""
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
    return total


def factor(norm: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the factor that scales a norm down to the threshold: at most 1, and NaN for a NaN norm."""
    return torch.clamp(threshold / (norm + _EPSILON), max=1.0)


def scale_(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all gradients by ``factor``, in place; they may be on several devices."""
    of_devices: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        of_devices.setdefault(gradient.device, []).append(gradient)
    for device, group in of_devices.items():
        torch._foreach_mul_(group, factor.to(device))
