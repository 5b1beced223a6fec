"""Compression with error feedback: the part of a gradient that was not sent is added to the next gradient."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch

from gangline.collectives.timeline import recorder
from gangline.kvstore.compression.codec import Codec, check_dtype


def compress(codec: Codec, gradient: torch.Tensor, residual: torch.Tensor | None, what: str) -> torch.Tensor:
    """Return the payload of ``gradient`` plus the residual, if any; the residual becomes the part not sent.

    ``residual += gradient; payload = encode(residual); residual -= decode(payload)``: error feedback (Seide et al.,
    1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019). Over all calls,
    the values sent and the residual add up to the gradients, up to rounding.

    Args:
        codec: the codec.
        gradient: float16, bfloat16, float32 or float64, any shape and strides; not modified.
        residual: None for no error feedback; else a tensor of the gradient's shape, dtype and device that the caller
            keeps between calls, initially zeros. Updated in place; must not overlap the gradient.
        what: the gradient's owner, for error messages: ``"key 'fc.weight'"``.

    Returns:
        A 1-D uint8 tensor of ``codec.payload_bytes(gradient.numel(), gradient.dtype)`` on the gradient's device.

    Raises:
        ValueError: if the gradient, the residual or their sum holds NaN or infinity, the residual does not fit, or the
            dtype is not supported. Nothing has changed then.
    """
    check(gradient, residual, what)
    return compress_checked(codec, gradient, residual)


@torch.no_grad()
def check(gradient: torch.Tensor, residual: torch.Tensor | None, what: str) -> None:
    """Raise any error that `compress` would raise, so that either all or none of several gradients are compressed."""
    check_dtype(gradient)
    if residual is None:
        _check_finite(gradient, f"the gradient of {what}")
    else:
        _check_fits(gradient, residual, what)
        _check_sum_finite(gradient, residual, what)


@torch.no_grad()
def compress_checked(codec: Codec, gradient: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Run `compress` on arguments that `check` has accepted."""
    timeline, span = recorder.current, nullcontext[dict[str, Any]]({})
    with span if timeline is None else timeline.span("compress", bytes=gradient.nbytes) as arguments:
        if residual is None:
            payload = codec.encode(gradient)
        else:
            flat = residual.reshape(-1)
            payload = codec.encode_with_feedback(gradient.reshape(-1), flat)
            if not residual.is_contiguous():  # then flat may be a copy
                residual.copy_(flat.view(residual.shape))
        arguments["payload_bytes"] = payload.nbytes
    return payload


def _check_fits(gradient: torch.Tensor, residual: torch.Tensor, what: str) -> None:
    for name in ("shape", "dtype", "device"):
        ours, theirs = getattr(residual, name), getattr(gradient, name)
        if ours != theirs:
            raise ValueError(f"the residual of {what} has {name} {ours}; expected its gradient's, {theirs}")


def _check_sum_finite(gradient: torch.Tensor, residual: torch.Tensor, what: str) -> None:
    most = _check_finite(gradient, f"the gradient of {what}") + _check_finite(residual, f"the residual of {what}")
    if most > torch.finfo(gradient.dtype).max and not bool(torch.isfinite(gradient + residual).all()):
        raise ValueError(
            f"the gradient of {what} and its residual add up to infinity in {gradient.dtype}; expected a sum within "
            f"{torch.finfo(gradient.dtype).max:.3g}: lower the learning rate or clip the gradient"
        )


def _check_finite(values: torch.Tensor, name: str) -> float:
    """Return the largest magnitude, or raise ValueError; NaN propagates through minimum and maximum."""
    if not values.numel():
        return 0.0
    low: float
    high: float
    low, high = torch.stack(torch.aminmax(values)).tolist()
    if not math.isfinite(low) or not math.isfinite(high):
        raise ValueError(
            f"{name} holds NaN or infinity, which no payload can carry; expected finite numbers: lower the learning "
            "rate, clip the gradient, or skip the step"
        )
    return max(-low, high)
