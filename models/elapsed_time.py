"""Elapsed time: working time of replicas and ranks, on the host or on the stream of a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Return a timestamp for `ElapsedTime.add`: host time, or an event on the GPU's current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@dataclass
class ElapsedTime:
    """Working time of a replica or rank: seconds of its thread on the host, or between events on its GPU's stream."""

    on_host: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event, float]] = field(default_factory=list)

    def add(self, begin: Any, end: Any, factor: float = 1.0) -> None:
        """Add the time between two results of `mark`, times a factor."""
        if isinstance(begin, float):
            self.on_host += (end - begin) * factor
        else:
            self.events.append((begin, end, factor))

    def is_complete(self) -> bool:
        """Return True if the GPU has passed all events."""
        return not self.events or all(bool(end.query()) for _, end, _ in self.events)  # type: ignore[no-untyped-call]

    def seconds(self) -> float | None:
        """Wait for the GPU and return the sum; None if nothing was measured."""
        for begin, end, factor in self.events:
            end.synchronize()
            self.on_host += begin.elapsed_time(end) / 1e3 * factor
        self.events = []
        return self.on_host if self.on_host > 0 else None


class Measurements:
    """Training batches with the working times of their shares, which a GPU may still compute."""

    def __init__(self) -> None:
        self._batches: deque[tuple[list[float], list[ElapsedTime]]] = deque()

    def add(self, costs: Sequence[float], times: Sequence[ElapsedTime]) -> None:
        """Add the costs of a batch's shares, such as numbers of samples, and their times."""
        self._batches.append((list(costs), list(times)))

    def take(self, *, wait: bool = False) -> Iterator[tuple[list[float], list[float]]]:
        """Return costs and seconds of the batches that are complete, in order; with ``wait``, of all batches."""
        while self._batches and (wait or all(map(ElapsedTime.is_complete, self._batches[0][1]))):
            costs, times = self._batches.popleft()
            yield costs, [time.seconds() or 0.0 for time in times]
