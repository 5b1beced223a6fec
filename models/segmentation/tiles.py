"""Prediction of whole images in overlapping tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class _Predicts(Protocol):
    def predict(self, data: Any, *, batch_size: int | None = None) -> Any: ...


def predict_image(
    module: _Predicts,
    image: torch.Tensor,
    tile: int | tuple[int, int],
    *,
    overlap: float = 0.5,
    batch_size: int = 16,
) -> torch.Tensor:
    """Return the class probabilities of each pixel of an image, which is cut into tiles that overlap.

    The tiles are batches of `Module.predict`, so all contexts compute them. A pixel gets the mean of its tiles,
    weighted by its distance from their edges, where a network sees least.

    Args:
        module: module whose network maps (batch, channels, *tile) to logits (batch, classes, *tile).
        image: (channels, height, width), normalised as in training.
        tile: side or (height, width) of the tiles; an image that is smaller is padded with 0.
        overlap: part of a tile that the next one covers again, from 0 to below 1.
        batch_size: tiles in a batch.

    Returns:
        (classes, height, width) on the host.

    Raises:
        ValueError: if an argument is out of range, or the network's output does not have the size of its input.
    """
    if image.dim() != 3:
        raise ValueError(f"image has shape {tuple(image.shape)}; expected (channels, height, width)")
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap is {overlap}; expected 0 to below 1")
    sides = (tile, tile) if isinstance(tile, int) else tile
    if min(sides) < 1:
        raise ValueError(f"tile is {tile}; expected 1 or more pixels")
    height, width = image.shape[1:]
    padding = (0, max(sides[1] - width, 0), 0, max(sides[0] - height, 0))
    padded = torch.nn.functional.pad(image, padding)
    places = [
        (top, left)
        for top in _starts(padded.shape[1], sides[0], overlap)
        for left in _starts(padded.shape[2], sides[1], overlap)
    ]
    tiles = torch.stack([padded[:, top : top + sides[0], left : left + sides[1]] for top, left in places])
    logits = module.predict(tiles, batch_size=batch_size)
    if not isinstance(logits, torch.Tensor) or logits.shape[2:] != tiles.shape[2:]:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"the network's output is {shape} for {tuple(tiles.shape)}; expected logits per pixel")
    weight = _ramp(sides[0])[:, None] * _ramp(sides[1])
    total = logits.new_zeros((logits.shape[1], *padded.shape[1:]))
    weights = logits.new_zeros(padded.shape[1:])
    for (top, left), own in zip(places, logits.softmax(1), strict=True):
        total[:, top : top + sides[0], left : left + sides[1]] += own * weight.to(own)
        weights[top : top + sides[0], left : left + sides[1]] += weight.to(own)
    return (total / weights)[:, :height, :width]


def _starts(length: int, side: int, overlap: float) -> Sequence[int]:
    """Return where tiles begin: evenly, the first at 0, the last one at the end."""
    step = max(int(side * (1 - overlap)), 1)
    count = -(-(length - side) // step) + 1
    return [round(number * (length - side) / max(count - 1, 1)) for number in range(count)]


def _ramp(side: int) -> torch.Tensor:
    """Return weights that rise from the edges to the middle."""
    places = torch.arange(side, dtype=torch.float64) + 0.5
    return torch.minimum(places, side - places) / side
