"""Which checkpoints a prefix has, what their files are called, and which of them are kept."""

from __future__ import annotations

import re
from pathlib import Path

BEST = "best"
"""What stands in the place of the number of the checkpoint with the best validation."""


def epochs(prefix: str | Path) -> list[int]:
    """The numbers of the checkpoints of a prefix, in order."""
    return _stems(Path(prefix), r"\.json")


def unexplained(prefix: str | Path) -> Path | None:
    """Weights whose JSON has gone, where a prefix has no checkpoint at all: no writer of ours leaves that."""
    lost = [] if epochs(prefix) else _stems(Path(prefix), r"\.safetensors")
    return paths_of(prefix, lost[-1])[0] if lost else None


def _stems(prefix: Path, suffix: str) -> list[int]:
    """The numbers for which there is a file that ends so, in order."""
    pattern = re.compile(re.escape(prefix.name) + r"-(\d{4,})" + suffix)
    names = [path.name for path in prefix.parent.iterdir()] if prefix.parent.is_dir() else []
    return sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))})


def remove_older(prefix: str | Path, epoch: int, keep: int) -> None:
    """Remove checkpoints before number ``epoch``, until ``keep`` with that one are left; never the best.

    The JSON goes first: what is cut off there has left weights that are no checkpoint, which the next call removes.
    """
    kept = [number for number in epochs(prefix) if number <= epoch][-keep:]
    for number in _stems(Path(prefix), r"(?:\.json|(?:\.state)?\.safetensors)"):
        if number < kept[0]:
            weights, state, description = paths_of(prefix, number)
            for path in (description, state, weights):
                path.unlink(missing_ok=True)


def number_of(epoch: int | str) -> str:
    """How a checkpoint's files are numbered."""
    if epoch == BEST:
        return BEST
    if isinstance(epoch, bool) or not isinstance(epoch, int):
        raise TypeError(f"epoch is {epoch!r}; expected an int, or {BEST!r}")
    if epoch < 0:
        raise ValueError(f"epoch is {epoch}; expected 0 or more")
    return f"{epoch:04d}"


def paths_of(prefix: str | Path, epoch: int | str) -> tuple[Path, Path, Path]:
    """The files of a checkpoint: weights, state, and the JSON, with which it exists.

    Raises:
        TypeError: ``epoch`` is no int.
        ValueError: it is below 0.
    """
    stem = f"{Path(prefix).name}-{number_of(epoch)}"
    folder = Path(prefix).parent
    return folder / f"{stem}.safetensors", folder / f"{stem}.state.safetensors", folder / f"{stem}.json"
