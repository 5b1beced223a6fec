"""Schedules drawn as text."""

from __future__ import annotations

import textwrap
from string import ascii_lowercase

from gangline.collectives.schedule import Round, Schedule
from tests.collectives.symbolic import initial

_MAX_RANKS = 8  # larger drawings are unreadable
_GLUE = "\0"  # in place of spaces at which a line must not break
_WIDTH = 100
_MAX_STATE_WIDTH = 160  # lines of contributions are not wrapped


def draw(schedule: Schedule) -> str:
    """Draw the messages of each round, and the contributions that each rank holds after it.

    The letters in a chunk are the ranks that contributed to it, a being rank 0; a dot is a chunk not written yet, a
    plus marks a message that is combined with the chunk. Contributions are omitted where they would be too wide. For
    more than 8 ranks, only the title is drawn.
    """
    root = "" if schedule.root is None else f" with root {schedule.root}"
    counts = (schedule.size, "rank"), (schedule.chunks, "chunk"), (schedule.steps(), "round")
    counted = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    lines = [f"{schedule.algorithm} {schedule.collective}{root}: {counted}"]
    if schedule.size <= _MAX_RANKS:
        held = initial(schedule)
        is_narrow = len(_state(held)) <= _MAX_STATE_WIDTH
        lines += [f"start     {_state(held)}"] * is_narrow
        for number, tables in enumerate(schedule.rounds, start=1):
            lines += _wrapped(f"round {number:<4}", _apply(tables, held))
            lines += [" " * 10 + _state(held)] * is_narrow
    return "\n".join(line.rstrip() for line in lines)


def _apply(tables: Round, held: list[list[int]]) -> list[str]:
    """Apply a round to ``held`` and return its messages as text, ordered by sender."""
    before = [list(chunks) for chunks in held]
    messages: list[tuple[int, str]] = []
    for table in tables:
        for source, target, first, last in table.rows():
            for chunk in range(first, last):
                already = held[target][chunk] if table.reduce else 0
                held[target][chunk] = already | before[source][chunk]
            chunks = str(first) if last == first + 1 else f"{first}-{last - 1}"
            messages.append((source, f"{source}->{target} {'+' if table.reduce else ''}[{chunks}]"))
    return [text for _, text in sorted(messages, key=lambda pair: pair[0])]


def _wrapped(head: str, messages: list[str]) -> list[str]:
    """Return the head and the messages, wrapped with a hanging indent."""
    text = textwrap.fill(
        "  ".join(message.replace(" ", _GLUE) for message in messages),
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text.replace(_GLUE, " ").splitlines()


def _state(held: list[list[int]]) -> str:
    width = len(held)
    return "  |  ".join(" ".join(f"{_letters(chunk):<{width}}" for chunk in chunks) for chunks in held)


def _letters(contributions: int) -> str:
    return "".join(ascii_lowercase[rank] for rank in range(_MAX_RANKS) if contributions >> rank & 1) or "."
