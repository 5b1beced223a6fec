"""A barrier at which threads exchange values, and between whose rounds they may run one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Condition
from typing import Any, TypeVar

import torch

from gangline.models.batchnorm.worker_rounds import WorkerRounds

Value = TypeVar("Value")


class Aborted(RuntimeError):  # noqa: N818 - it reports no error of its own
    """Raised in waiting threads after another participant failed; that participant's error is the cause."""


class ThreadBarrier:
    """Barrier for a fixed set of participants, one thread each; the n-th `exchange` of each closes round n.

    A participant finishes with `leave`, or with `abort` on failure, so that no other blocks on it forever. With
    ``one_after_another`` the participants run one at a time, in the order of their indices: a turn lasts from `begin`
    or an exchange to the next exchange or the end. Draws from a shared random generator then do not depend on which
    thread is faster. A barrier serves one pass over a batch.
    """

    def __init__(
        self, participants: Iterable[int], *, one_after_another: bool = False, rounds: WorkerRounds | None = None
    ) -> None:
        """Create the barrier; ``rounds`` exchanges with the barriers of other workers, if there are any."""
        self.participants = sorted(set(participants))
        self.rounds = rounds
        self.waited = dict.fromkeys(self.participants, 0.0)
        """Seconds each participant has waited for the others."""
        self._condition = Condition()
        self._calls = dict.fromkeys(self.participants, 0)
        self._values: dict[int, Any] = {}  # of the open round
        self._result: list[Any] = []  # of the round closed last
        self._rounds = 0
        self._left: set[int] = set()
        self._mismatch = ""
        self._error: BaseException | None = None
        self._takes_turns = one_after_another
        self._turn: int | None = self.participants[0] if self.participants else None
        self._generators: dict[int, torch.Generator | None] = {}
        self._own_states: dict[int, torch.Tensor] = {}
        self._state_before: torch.Tensor | None = None

    def begin(self, index: int, generator: torch.Generator | None = None) -> None:
        """Wait for the participant's first turn; without turns, return at once.

        Each turn continues a generator that is shared with other participants from the participant's own state, and
        restores it at the end.

        Raises:
            Aborted: if another participant failed.
            RuntimeError: if the participants called `exchange` a different number of times.
        """
        if self._takes_turns:
            with self._condition:
                self._generators[index] = generator
                self._wait_for(index, lambda: self._turn == index)
                self._begin_turn(index)

    def exchange(self, index: int, value: Value) -> list[Value]:
        """All-gather one value per participant; return them in the order of workers and indices.

        Raises:
            Aborted: if another participant failed.
            RuntimeError: if another participant left after fewer calls.
            Exception: if another worker failed.
        """
        with self._condition:
            self._calls[index] += 1
            call = self._calls[index]
            self._values[index] = value
            if self._left and not self._mismatch:
                self._mismatch = self._describe_mismatch()
            if len(self._values) == len(self.participants):
                self._result = [self._values[one] for one in self.participants]
                if self.rounds is not None:
                    began = time.perf_counter()
                    self._result = self.rounds.exchange(self._result)
                    self.waited[index] += time.perf_counter() - began
                self._values = {}
                self._rounds += 1
            if self._takes_turns:
                self._end_turn(index)
            self._condition.notify_all()
            self._wait_for(index, lambda: self._rounds >= call and (not self._takes_turns or self._turn == index))
            if self._takes_turns:
                self._begin_turn(index)
            return list(self._result)

    def leave(self, index: int) -> None:
        """Mark the participant as finished; any other that waits for another value of it gets an error."""
        with self._condition:
            self._left.add(index)
            if self._values and not self._mismatch:
                self._mismatch = self._describe_mismatch()
            if self._takes_turns:
                self._end_turn(index)
            self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """Raise `Aborted`, caused by ``error``, in all participants that wait now or later."""
        with self._condition:
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    def _wait_for(self, index: int, condition: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self._condition.wait_for(lambda: condition() or self._mismatch or self._error is not None)
        self.waited[index] += time.perf_counter() - began
        if condition():  # even after an error: the outcome of a closed round must not depend on thread speed
            return
        if self._mismatch:
            raise RuntimeError(self._mismatch)
        raise Aborted(f"another replica failed with {type(self._error).__name__}: {self._error}") from self._error

    def _describe_mismatch(self) -> str:
        ended = ", ".join(f"replica {index} after {self._calls[index]}" for index in sorted(self._left))
        waiting = ", ".join(f"replica {index} in call {self._calls[index]}" for index in sorted(self._values))
        return (
            "replicas called batch normalization a different number of times: "
            f"{ended} had ended when {waiting} waited; a network with synchronized batch statistics must call each "
            "layer equally often on every share of a batch"
        )

    def _begin_turn(self, index: int) -> None:
        generator = self._generators[index]
        if generator is not None:
            self._state_before = generator.get_state()
            if index in self._own_states:
                generator.set_state(self._own_states.pop(index))

    def _end_turn(self, index: int) -> None:
        """Pass the turn to the next index, or to the first one if the round has just closed."""
        generator = self._generators[index]
        if generator is not None and self._state_before is not None:
            self._own_states[index] = generator.get_state()
            generator.set_state(self._state_before)
        if index not in self._left and not self._values:
            self._turn = self.participants[0]
        else:
            self._turn = next((each for each in self.participants if each > index), None)
