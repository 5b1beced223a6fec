"""File names of checkpoints, the checkpoints that exist, and removal of old ones."""

from __future__ import annotations

import re
from pathlib import Path

BEST = "best"
"""Name, instead of a number, of the checkpoint with the best validation metric."""


def epochs(prefix: str | Path) -> list[int]:
    """Return the numbers of a prefix's checkpoints in ascending order."""
    return _numbers(Path(prefix), r"\.json")


def orphaned_weights(prefix: str | Path) -> Path | None:
    """Return weights without a JSON file, if the prefix has no checkpoint at all; no interrupted save leaves that."""
    orphans = [] if epochs(prefix) else _numbers(Path(prefix), r"\.safetensors")
    return paths_of(prefix, orphans[-1])[0] if orphans else None


def _numbers(prefix: Path, suffix: str) -> list[int]:
    """Return the numbers of files ``PREFIX-NUMBER`` with a suffix (a regular expression) in ascending order."""
    pattern = re.compile(re.escape(prefix.name) + r"-(\d{4,})" + suffix)
    names = [path.name for path in prefix.parent.iterdir()] if prefix.parent.is_dir() else []
    return sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))})


def remove_older(prefix: str | Path, epoch: int, keep: int) -> None:
    """Remove checkpoints before ``epoch`` until ``keep`` are left, including ``epoch``; never remove the best.

    The JSON file is removed first, so that an interrupted removal leaves no broken checkpoint; the next call removes
    the rest.
    """
    kept = [number for number in epochs(prefix) if number <= epoch][-keep:]
    for number in _numbers(Path(prefix), r"(?:\.json|(?:\.state)?\.safetensors)"):
        if number < kept[0]:
            weights, state, description = paths_of(prefix, number)
            for path in (description, state, weights):
                path.unlink(missing_ok=True)


def paths_of(prefix: str | Path, epoch: int | str) -> tuple[Path, Path, Path]:
    """Return the files of a checkpoint: weights, state, and the JSON file that makes it exist."""
    if epoch != BEST:
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise TypeError(f"epoch is {epoch!r}; expected an int, or {BEST!r}")
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; expected 0 or more")
    stem = f"{Path(prefix).name}-{BEST if epoch == BEST else f'{epoch:04d}'}"
    folder = Path(prefix).parent
    return folder / f"{stem}.safetensors", folder / f"{stem}.state.safetensors", folder / f"{stem}.json"
