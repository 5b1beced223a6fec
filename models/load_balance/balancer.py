"""Balancer: loads of contexts, workers or ranks that follow measured speeds, equal in all processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gangline.collectives.context import Context
from gangline.models.load_balance.memory_limits import MemoryLimits
from gangline.models.load_balance.speed_model import SpeedModel

_MOST = 64
"""Measured batches in a message, the newest: as many as the speed model waits for, and about two kilobytes."""


class Time(Protocol):
    """Time of a share, which a GPU may still compute."""

    def is_complete(self) -> bool:
        """Return True if the GPU has passed all events."""

    def seconds(self) -> float | None:
        """Wait for the GPU and return the time; None if the share did not run."""


class Balancer:
    """Feeds a speed model with the times of shares, which several processes may measure.

    Each process records the shares of its own members: all contexts of a module, or one worker or rank. What it has
    measured since the last exchange goes to all processes in one message, and all derive the same loads from the same
    messages: when the speed model says that they are due, and at the start of an epoch.
    """

    def __init__(
        self,
        speeds: SpeedModel,
        all_gather: Callable[[Any], list[Any]] = lambda message: [message],
        limits: MemoryLimits | None = None,
    ) -> None:
        """Start with equal loads.

        Args:
            speeds: derives the loads.
            all_gather: exchanges plain data between the processes; without it this one measures all members.
            limits: numbers of samples that fit into the members' memory, for `state`.
        """
        self.speeds = speeds
        self._all_gather = all_gather
        self.limits = limits or MemoryLimits(speeds.names)
        """Numbers of samples that fit into the members' memory."""
        self._pending: deque[tuple[int, list[int], list[Time]]] = deque()  # batches that a GPU may still compute
        self._unsent: deque[list[Any]] = deque(maxlen=_MOST)  # [step, samples, seconds]
        self._received: dict[int, dict[int, list[Any]]] = {}  # by step and process

    @property
    def loads(self) -> list[float]:
        """Current loads, one per member, for `split_batch`."""
        return list(self.speeds.loads)

    def record(self, step: int, samples: Sequence[int], times: Sequence[Time]) -> None:
        """Record a training batch.

        Args:
            step: number of the batch, equal in all processes.
            samples: samples of each member of this process.
            times: time of each of these shares.
        """
        self._pending.append((step, list(samples), list(times)))

    def measure(self, *, wait: bool = False) -> None:
        """Take the times of the batches that are complete; with ``wait``, of all batches."""
        while self._pending and (wait or all(time.is_complete() for time in self._pending[0][2])):
            step, samples, times = self._pending.popleft()
            self._unsent.append([step, samples, [time.seconds() or 0.0 for time in times]])

    def message(self, *, wait: bool = False) -> list[Any]:
        """Return what was measured since the last message, as plain data, to be gathered from all processes."""
        self.measure(wait=wait)
        message = list(self._unsent)
        self._unsent.clear()
        return message

    def receive(self, messages: Sequence[Any], *, now: bool = False) -> bool:
        """Take in the messages of all processes in order, and update the loads if it is due, or ``now``.

        Returns:
            True if the loads changed.
        """
        for process, measured in enumerate(messages):
            for step, *share in measured:
                self._received.setdefault(step, {})[process] = share
        complete = sorted(step for step, shares in self._received.items() if len(shares) == len(messages))
        for step in complete:
            shares = [self._received[step][process] for process in range(len(messages))]
            self.speeds.record([n for samples, _ in shares for n in samples], [s for _, took in shares for s in took])
        if complete:  # every process finishes its batches in order
            self._received = {step: shares for step, shares in self._received.items() if step > complete[-1]}
        return (now or self.speeds.due()) and self.speeds.update_loads()

    def begin_batch(self) -> None:
        """Update the loads if enough batches have been measured. Collective."""
        self.receive(self._all_gather(self.message()))

    def begin_epoch(self) -> bool:
        """Update the loads from all measurements; return True if a trial of idle members begins. Collective."""
        self.receive(self._all_gather(self.message(wait=True)))
        return self.speeds.begin_epoch()

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"speeds": self.speeds.state(), "most": list(self.limits.max_samples)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; with other members, start from equal loads and log a warning."""
        self.speeds.load_state(state["speeds"])
        if state["speeds"]["contexts"] == self.speeds.names:
            self.limits.max_samples = list(state["most"])


def balancer_of_contexts(contexts: Sequence[Context], logger: logging.Logger, minimum: int = 1) -> Balancer:
    """Return the balancer of a module's contexts.

    Args:
        contexts: contexts of the module.
        logger: receives one line per change of the loads, and a warning per limit of memory.
        minimum: smallest share that is not empty.
    """
    on_one_device = len({context.torch_device for context in contexts}) == 1
    names = [str(context) for context in contexts]
    speeds = SpeedModel(names, logger, minimum=minimum, on_one_device=on_one_device)
    return Balancer(speeds, limits=MemoryLimits(names, logger))
