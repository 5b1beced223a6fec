"""A small disk of memory that tests can fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk of its own size")


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """Mount a disk of so many KiB below a folder inside the block."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> None:
    """Write to a disk until it is full."""
    with (disk / "filling").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return


def make_space(disk: Path) -> None:
    """Remove what `fill` wrote."""
    (disk / "filling").unlink()
