"""Rounds of a pass over a batch in which all workers of a job exchange values, or learn that one of them failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from gangline.kvstore.group.remote_errors import error_name, error_text, make_error
from gangline.kvstore.group.serialization import dtype_named, name_of_dtype
from gangline.models.batchnorm.joint_statistics import Moments
from gangline.models.workers import Workers

State = Literal["in a layer", "finished", "without samples", "failed"]


class WorkerRounds:
    """One pass over a batch on all workers: a round for each call of a layer, and one at the end.

    Every worker takes part in every round. If one fails, the next round raises its error on all others.
    """

    def __init__(
        self, workers: Workers, name: Literal["forward", "backward"], device: torch.device | None = None
    ) -> None:
        """Begin a pass of workers in step. Collective.

        Args:
            workers: the workers.
            name: what the pass is.
            device: GPU of this worker's only replica if all workers have one, and moments are to stay there.
        """
        self.rank = workers.rank
        self.device = device
        self._workers, self._name = workers, name
        self._is_over = False

    def exchange(self, values: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Return the values of all workers in rank order: label, direction, name of the layer and moments. Collective.

        Moments are on the host, or on the GPU that the rounds have.

        Raises:
            RuntimeError: on all workers, if another worker has finished the pass.
            Exception: the error of a worker that failed.
        """
        if self.device is None:
            return self._round("in a layer", list(values))
        ((label, direction, name, own),) = values
        kind = [own.size, len(own.mean), name_of_dtype(own.mean.dtype)]
        headers = self._round("in a layer", [[label, direction, name, [self.rank, *kind]]])
        return self._with_moments(headers, torch.cat([own.mean, own.squares]))

    def _with_moments(self, headers: list[Any], own: torch.Tensor | None = None) -> list[Any]:
        """Gather the moments on the GPUs, if the headers are of one layer; None: this worker has none. Collective."""
        if len({(direction, name) for _, direction, name, _ in headers}) > 1:
            return headers
        if own is None:
            _, _, channels, dtype = headers[0][-1]
            own = torch.zeros(2 * channels, dtype=dtype_named(dtype), device=self.device)
        gathered = self._workers.all_gather_tensor(own)
        return [
            [label, direction, name, Moments(size, *gathered[rank].chunk(2))]
            for label, direction, name, (rank, size, *_) in headers
        ]

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
                take(values if self.device is None else self._with_moments(values))

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
