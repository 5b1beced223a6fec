"""A meeting: threads that exchange values at matching points, and may take turns between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Condition
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")


class Aborted(RuntimeError):  # noqa: N818 - it reports no error of its own
    """An error of another party ended the meeting; that error, not this one, says what went wrong."""


class ThreadBarrier:
    """Parties, each in a thread of its own, that call `exchange` equally often; the n-th calls meet.

    Every party ends with `leave`, or with `abort` if it fails, and then nobody waits for it in vain. With
    ``one_after_another`` the parties run one at a time: a turn lasts from `begin` or an exchange to the next exchange
    or the end, and turns go in the order of places, so that what the parties draw from a shared random generator does
    not depend on which thread is quicker. A meeting serves for one pass over a batch; the next pass begins when all
    parties have ended this one.
    """

    def __init__(self, places: Iterable[int], *, one_after_another: bool = False) -> None:
        """Name the parties.

        Args:
            places: a number for each party, in any order.
            one_after_another: whether they take turns; each must then call `begin` first.
        """
        self.places = sorted(set(places))
        self.waited = dict.fromkeys(self.places, 0.0)
        """Seconds that each party has waited for the others."""
        self._condition = Condition()
        self._calls = dict.fromkeys(self.places, 0)
        self._values: dict[int, Any] = {}  # of the round that is open
        self._met: list[Any] = []  # of the round that closed last
        self._rounds = 0
        self._left: set[int] = set()
        self._mismatch = ""
        self._error: BaseException | None = None
        self._takes_turns = one_after_another
        self._turn: int | None = self.places[0] if self.places else None
        self._generators: dict[int, torch.Generator | None] = {}
        self._own_states: dict[int, torch.Tensor] = {}
        self._state_before: torch.Tensor | None = None

    def begin(self, place: int, generator: torch.Generator | None = None) -> None:
        """Wait for the first turn; without turns there is nothing to wait for.

        Args:
            place: who begins.
            generator: what the party draws from, if others draw from it too. Each turn goes on from the state that
                the party's last turn ended with, and leaves the generator as it found it.

        Raises:
            Aborted: another party failed.
            RuntimeError: the parties that began called `exchange` a different number of times.
        """
        if self._takes_turns:
            with self._condition:
                self._generators[place] = generator
                self._wait_for(place, lambda: self._turn == place)
                self._begin_turn(place)

    def exchange(self, place: int, value: Value) -> list[Value]:
        """Give a value, and return those of all parties in the order of places, once all have given theirs.

        Raises:
            Aborted: another party failed.
            RuntimeError: another party left, having called this fewer times.
        """
        with self._condition:
            self._calls[place] += 1
            call = self._calls[place]
            self._values[place] = value
            if self._left and not self._mismatch:
                self._mismatch = self._describe_mismatch()
            if len(self._values) == len(self.places):
                self._met = [self._values[each] for each in self.places]
                self._values = {}
                self._rounds += 1
            if self._takes_turns:
                self._end_turn(place)
            self._condition.notify_all()
            self._wait_for(place, lambda: self._rounds >= call and (not self._takes_turns or self._turn == place))
            if self._takes_turns:
                self._begin_turn(place)
            return list(self._met)

    def leave(self, place: int) -> None:
        """Say that the party's part is over; whoever waits for another value of it gets an error."""
        with self._condition:
            self._left.add(place)
            if self._values and not self._mismatch:
                self._mismatch = self._describe_mismatch()
            if self._takes_turns:
                self._end_turn(place)
            self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """Wake all who wait, now or later, with `Aborted`: a party failed with ``error`` and will not come."""
        with self._condition:
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    def _wait_for(self, place: int, condition: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self._condition.wait_for(lambda: condition() or self._mismatch or self._error is not None)
        self.waited[place] += time.perf_counter() - began
        if condition():  # even after an error, so that what a party makes of what it met does not depend on its speed
            return
        if self._mismatch:
            raise RuntimeError(self._mismatch)
        raise Aborted(f"another replica failed with {type(self._error).__name__}: {self._error}") from self._error

    def _describe_mismatch(self) -> str:
        ended = ", ".join(f"replica {place} after {self._calls[place]}" for place in sorted(self._left))
        waiting = ", ".join(f"replica {place} in call {self._calls[place]}" for place in sorted(self._values))
        return (
            "replicas called batch normalisation a different number of times: "
            f"{ended} had ended when {waiting} waited; a network whose batch statistics are joined must call each "
            "layer equally often on every share of a batch"
        )

    def _begin_turn(self, place: int) -> None:
        generator = self._generators[place]
        if generator is not None:
            self._state_before = generator.get_state()
            if place in self._own_states:
                generator.set_state(self._own_states.pop(place))

    def _end_turn(self, place: int) -> None:
        """Hand the turn on: to the next place, and to the first one again when all have given a value."""
        generator = self._generators[place]
        if generator is not None and self._state_before is not None:
            self._own_states[place] = generator.get_state()
            generator.set_state(self._state_before)
        if place not in self._left and not self._values:
            self._turn = self.places[0]
        else:
            self._turn = next((each for each in self.places if each > place), None)
