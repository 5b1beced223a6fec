"""Rounds of a pass over a batch in which all workers of a job exchange values, or learn that one of them failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from gangline.kvstore.group.remote_errors import error_name, error_text, make_error
from gangline.models.workers import Workers

State = Literal["in a layer", "finished", "without samples", "failed"]


class WorkerRounds:
    """One pass over a batch on all workers: a round for each call of a layer, and one at the end.

    Every worker takes part in every round. If one fails, the next round raises its error on all others.
    """

    def __init__(self, workers: Workers, name: Literal["forward", "backward"]) -> None:
        """Begin a pass of workers in step. Collective."""
        self.rank = workers.rank
        self._workers, self._name = workers, name
        self._is_over = False

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of all workers in rank order: plain data and tensors on the host. Collective.

        Raises:
            RuntimeError: on all workers, if another worker has finished the pass.
            Exception: the error of a worker that failed.
        """
        return self._round("in a layer", list(values))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context manager around the whole pass of a worker that has samples. Collective at its end."""
        with self._reporting_errors():
            yield
        self._round("finished", [])

    def follow(self, take: Callable[[list[Any]], None]) -> None:
        """Take part in a pass without samples; ``take`` receives the values of each round. Collective."""
        with self._reporting_errors():
            while values := self._round("without samples", []):
                take(values)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._is_over:  # otherwise all workers have an error already
                self._round("failed", [error_name(error), error_text(error)])
            raise

    def _round(self, state: State, payload: list[Any]) -> list[Any]:
        self._is_over = True  # also after an error in the exchange itself
        received = self._workers.all_gather([state, payload], f"sync_batchnorm, {self._name}")
        for rank, (theirs, failure) in enumerate(received):
            if theirs == "failed" and state != "failed":
                error = make_error(*failure)
                error.add_note(f"Rank {rank} raised this error in {self._name}.")
                raise error
        states = {rank: theirs for rank, (theirs, _) in enumerate(received) if theirs != "without samples"}
        if {"in a layer", "finished"} <= set(states.values()):
            raise RuntimeError(
                "workers called batch normalization a different number of times: in this round "
                f"{', '.join(f'rank {rank} is {theirs}' for rank, theirs in states.items())}; a network with "
                "synchronized batch statistics must call each layer equally often on every share of a batch"
            )
        self._is_over = "in a layer" not in states.values()
        return [] if self._is_over else [value for _, values in received for value in values]
