"""The `gangline` command, run in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from PIL import Image

from gangline.cli.main import main
from gangline.models.data.datasets import raw_digits


def gangline_command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run `gangline` with these arguments; return exit code, stdout and stderr."""
    with patch.object(sys, "argv", ["gangline", *map(str, words)]), pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


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
