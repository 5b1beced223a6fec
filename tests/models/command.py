"""The `gangline` command, run in this process by the fixture `run`, and images for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image

from gangline.models.data.datasets import raw_digits

Run = Callable[..., tuple[str, str]]
"""Runs `gangline` with these arguments; checks that the exit code is ``code``, or 0; returns stdout and stderr."""


def write_digits(folder: Path, classes: int = 3, images: int = 60) -> list[Path]:
    """Write real digits as PNG files, one sub-folder per class."""
    levels, labels = raw_digits()
    chosen = (labels < classes).nonzero().flatten()[:images]
    files = []
    for number, (image, label) in enumerate(zip(levels[chosen], labels[chosen].tolist(), strict=True)):
        file = folder / f"digit{label}" / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).numpy()).save(file)
        files.append(file)
    return files
