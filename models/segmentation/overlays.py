"""A page of segmented images: each image, its mask, and what a network predicts, laid over it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from gangline.collectives.host_files import write_text
from gangline.models.reports.chart import page, table

_OPACITY = 0.55
_COLORS = np.array(  # of the classes, in turn; the ground, class 0, is not drawn
    [(11, 114, 133), (217, 72, 15), (138, 63, 252), (230, 167, 0), (43, 138, 62), (31, 111, 235), (194, 37, 92)],
    dtype=np.float64,
)


def segmentation_page(
    path: str | Path,
    images: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    predicted: Sequence[torch.Tensor],
    *,
    classes: Sequence[str] = (),
    metrics: Sequence[tuple[str, float]] = (),
) -> None:
    """Write an HTML page, one file without external resources.

    Args:
        path: path of the page; an earlier one is overwritten.
        images: (channels, height, width) each, any range of values.
        masks: true classes, (height, width) each; class 0 and negative ones are not drawn.
        predicted: predicted classes, (height, width) each.
        classes: names of the classes, for the legend.
        metrics: (name, value) of metrics.
    """
    sections = [table(["metric", "value"], [(name, f"{value:.4f}") for name, value in metrics])] if metrics else []
    legend = "".join(
        f'<span class="key" style="background:rgb({",".join(str(int(part)) for part in _color(number))})"></span>{name}'
        for number, name in enumerate(classes)
        if number
    )
    for image, mask, own in zip(images, masks, predicted, strict=True):
        pictures = (_picture(image, None), _picture(image, mask), _picture(image, own))
        shown = "".join(
            f'<figure style="margin:0"><img src="{source}" width="260" style="image-rendering:pixelated" alt="{name}">'
            f'<figcaption class="soft">{name}</figcaption></figure>'
            for source, name in zip(pictures, ("image", "mask", "predicted"), strict=True)
        )
        sections.append(
            f'<div style="display:flex;gap:12px;padding-top:10px">{shown}</div><p class="soft">{legend}</p>'
        )
    write_text(path, page("Segmentation", f"{len(images)} images", sections))


def _picture(image: torch.Tensor, labels: torch.Tensor | None) -> str:
    """Return an image, with its labels laid over it, as a data URL."""
    from PIL import Image

    pixels = image.detach().cpu().double().numpy().mean(0)
    low, high = pixels.min(), pixels.max()
    grey = np.repeat(((pixels - low) / (high - low or 1) * 255)[..., None], 3, axis=2)
    if labels is not None:
        values = labels.detach().cpu().numpy()
        drawn = values > 0
        grey[drawn] = grey[drawn] * (1 - _OPACITY) + _color(values[drawn]) * _OPACITY
    file = BytesIO()
    Image.fromarray(grey.astype(np.uint8)).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _color(number: int | np.ndarray) -> np.ndarray:
    """Return the color of classes from 1 on."""
    color: np.ndarray = _COLORS[(np.asarray(number) - 1) % len(_COLORS)]
    return color
