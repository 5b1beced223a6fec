"""Compress a gradient and keep what was not sent, so that it is sent later."""

from __future__ import annotations

import math

import torch

from gangline.collectives.compression.codec import Codec, check_dtype


def compress(codec: Codec, gradient: torch.Tensor, residual: torch.Tensor | None, what: str) -> torch.Tensor:
    """The payload of ``gradient``; with a residual, of both together, and the residual keeps what was not sent.

    ``residual += gradient; payload = encode(residual); residual -= decode(payload)``: error feedback (Seide et al.,
    1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019). What was sent over
    all calls, and the residual, add up to the gradients, but for rounding.

    Args:
        codec: what makes the payload.
        gradient: float16, bfloat16, float32 or float64, any shape and strides; not changed.
        residual: None for no error feedback; else a tensor of the gradient's shape, dtype and device that the caller
            keeps from call to call, zeros at first. Changed in place; must not overlap the gradient.
        what: whose gradient it is, for messages: ``"key 'fc.weight'"``.

    Returns:
        A 1-D uint8 tensor of ``codec.payload_bytes(gradient.numel(), gradient.dtype)`` on the gradient's device.

    Raises:
        ValueError: NaN or infinity in the gradient, in the residual or in their sum; a residual that does not fit; a
            dtype that is not in the list. Nothing has changed then.
    """
    check(gradient, residual, what)
    return compress_checked(codec, gradient, residual)


@torch.no_grad()
def check(gradient: torch.Tensor, residual: torch.Tensor | None, what: str) -> None:
    """Raise what `compress` would raise; for who compresses several gradients, and wants all or none to go."""
    check_dtype(gradient)
    if residual is None:
        _check_finite(gradient, f"the gradient of {what}")
    else:
        _check_fits(gradient, residual, what)
        _check_sum_finite(gradient, residual, what)


@torch.no_grad()
def compress_checked(codec: Codec, gradient: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """`compress` of what `check` has let pass."""
    if residual is None:
        return codec.encode(gradient)
    flat = residual.reshape(-1)
    payload = codec.encode_with_feedback(gradient.reshape(-1), flat)
    if not residual.is_contiguous():  # then flat is a copy, or may be one
        residual.copy_(flat.view(residual.shape))
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
    """The largest magnitude; two numbers decide, since minimum and maximum hand NaN on."""
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
