"""The steps of one rank's program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Send:
    """Send chunks ``first`` to ``last`` (exclusive), with their values from the beginning of the round."""

    to: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Replace chunks ``first`` to ``last`` (exclusive) by the message from ``source``."""

    source: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine the chunks ``first`` to ``last`` (exclusive) of all ``ranks`` in ascending order, rounding once.

    This rank is one of them and contributes its own values; the others' are received.
    """

    ranks: tuple[int, ...]
    first: int
    last: int
    complete: bool
    """True if the chunks now hold every rank's contribution. A mean is divided here."""


Step = Send | Receive | Reduce
NumberedStep = tuple[int, Step]
"""The number of a round, from 0, and a step of that round."""
