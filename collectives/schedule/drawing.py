"""Schedules as text that a reader can follow."""

from __future__ import annotations

import textwrap
from string import ascii_lowercase
from typing import TYPE_CHECKING

from gangline.collectives.schedule.rounds import Round
from gangline.collectives.schedule.verification import start

if TYPE_CHECKING:
    from gangline.collectives.schedule.schedule import Schedule

_MOST_RANKS = 8  # beyond which nobody reads it
_GLUE = "\0"  # in place of spaces at which a line must not break
_WIDTH = 100
_WIDEST = 160  # of what ranks hold, which is not wrapped


def drawing(schedule: Schedule) -> str:
    """Who sends which chunk to whom in each round, and what each rank holds after it.

    The letters in a chunk are the ranks that contributed to it, a being rank 0; a dot is a chunk not written yet, a
    plus a message that is combined with what is there. Where that would be too wide, only the messages are drawn; of
    more than 8 ranks, only the first line.
    """
    lines = [_title(schedule)]
    if schedule.size <= _MOST_RANKS:
        held = start(schedule)
        is_narrow = len(_holdings(held)) <= _WIDEST
        lines += [f"start     {_holdings(held)}"] * is_narrow
        for number, tables in enumerate(schedule.rounds, start=1):
            lines += _wrapped(f"round {number:<4}", _apply(tables, held))
            lines += [" " * 10 + _holdings(held)] * is_narrow
    return "\n".join(line.rstrip() for line in lines)


def _title(schedule: Schedule) -> str:
    root = "" if schedule.root is None else f" with root {schedule.root}"
    counts = (schedule.size, "rank"), (schedule.chunks, "chunk"), (schedule.steps(), "round")
    words = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    return f"{schedule.algorithm} {schedule.collective}{root}: {words}"


def _apply(tables: Round, held: list[list[int]]) -> list[str]:
    """Do a round; the words for its messages, by sender."""
    before = [list(chunks) for chunks in held]
    words: list[tuple[int, str]] = []
    for table in tables:
        for source, target, first, last in table.rows():
            for chunk in range(first, last):
                already = held[target][chunk] if table.reduce else 0
                held[target][chunk] = already | before[source][chunk]
            chunks = str(first) if last == first + 1 else f"{first}-{last - 1}"
            words.append((source, f"{source}->{target} {'+' if table.reduce else ''}[{chunks}]"))
    return [word for _, word in sorted(words, key=lambda pair: pair[0])]


def _wrapped(head: str, words: list[str]) -> list[str]:
    """The words after the head, and under each other's beginning where a line is full."""
    text = textwrap.fill(
        "  ".join(word.replace(" ", _GLUE) for word in words),
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.replace(_GLUE, " ").splitlines()


def _holdings(held: list[list[int]]) -> str:
    width = len(held)
    return "  |  ".join(" ".join(f"{_letters(chunk):<{width}}" for chunk in chunks) for chunks in held)


def _letters(contributions: int) -> str:
    return "".join(ascii_lowercase[rank] for rank in range(_MOST_RANKS) if contributions >> rank & 1) or "."
