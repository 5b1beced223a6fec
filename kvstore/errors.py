"""Errors of files and of names. Failures between processes: `gangline.collectives.errors`."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class DiskFullError(OSError):
    """A file does not fit on its disk; the file of that name is unchanged."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return " did you mean 'lenet'?" for a misspelt word, or "" if no known word is like it."""
    near = get_close_matches(word, known, n=1, cutoff=0.7)
    return f" did you mean {near[0]!r}?" if near else ""
