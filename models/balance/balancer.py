"""Balancer: loads of contexts, workers or ranks that follow measured speeds, and limits of their memory."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gangline.collectives.context import Context
from gangline.models.balance.speed_model import SpeedModel

_MOST = 64
"""Maximum number of batches in a message, about 2 KB."""
_USED = 0.9  # part of the free memory for growing shares; the remainder is for fragmentation


Together = Callable[[Sequence[int], Sequence[float]], float]
"""Returns the time of several shares that count as one share, from their samples and seconds; 0: not run."""


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
        return all(bool(end.query()) for _, end, _ in self.events)  # type: ignore[no-untyped-call]

    def seconds(self) -> float | None:
        """Wait for the GPU and return the sum; None if nothing was measured."""
        for begin, end, factor in self.events:
            end.synchronize()
            self.on_host += begin.elapsed_time(end) / 1e3 * factor
        self.events = []
        return self.on_host if self.on_host > 0 else None


class Balancer:
    """Feeds a speed model with the times of shares, which several processes may measure.

    Each process records the shares of its own members: all contexts of a module, or one worker. Processes exchange
    their measurements in messages, and all derive the same loads from these.
    """

    def __init__(
        self,
        speeds: SpeedModel,
        all_gather: Callable[[Any], list[Any]] = lambda message: [message],
        limits: MemoryLimits | None = None,
    ) -> None:
        """Start with equal loads; without ``all_gather`` this process measures all members."""
        self.speeds = speeds
        self._all_gather = all_gather
        self.limits = limits or MemoryLimits(speeds.names)
        """Numbers of samples that fit into the members' memory."""
        # Batches that a GPU may still compute.
        self._pending: deque[tuple[list[int], list[ElapsedTime], Together | None]] = deque()
        self._unsent: deque[list[Any]] = deque(maxlen=_MOST)  # [samples, seconds] of each batch
        self._received: list[deque[list[Any]]] = []  # by process

    @property
    def loads(self) -> list[float]:
        """Current loads, one per member, for `split_batch`."""
        return list(self.speeds.loads)

    def record(self, samples: Sequence[int], times: Sequence[ElapsedTime], together: Together | None = None) -> None:
        """Record samples and times of this process's members in a training batch; all processes record each batch.

        With ``together`` they are of the replicas of one member.
        """
        self._pending.append((list(samples), list(times), together))

    def measure(self, *, wait: bool = False) -> None:
        """Take the times of the batches that are complete; with ``wait``, of all batches."""
        while self._pending and (wait or all(time.is_complete() for time in self._pending[0][1])):
            samples, times, together = self._pending.popleft()
            seconds = [time.seconds() or 0.0 for time in times]
            if together is not None:
                samples, seconds = [sum(samples)], [together(samples, seconds)]
            self._unsent.append([samples, seconds])

    def message(self, *, wait: bool = False) -> list[Any]:
        """Return the measurements since the last message, as plain data, to be gathered from all processes."""
        self.measure(wait=wait)
        message = list(self._unsent)
        self._unsent.clear()
        return message

    def receive(self, messages: Sequence[Any]) -> bool:
        """Record the messages of all processes; return True if the loads changed."""
        self._received = self._received or [deque(maxlen=_MOST) for _ in messages]
        for received, message in zip(self._received, messages, strict=True):
            received.extend(message)
        changed = False
        while all(self._received):
            shares = [received.popleft() for received in self._received]
            samples, seconds = ([one for share in shares for one in share[part]] for part in (0, 1))
            changed |= self.speeds.record(samples, seconds)
        return changed

    def begin_batch(self) -> None:
        """Update the loads from the batches whose times are known. Collective."""
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
    """Create the balancer of a module's contexts; ``minimum`` is the smallest share that is not empty.

    It logs one line per change of the loads, and a warning per limit of memory.
    """
    on_one_device = len({context.torch_device for context in contexts}) == 1
    names = [str(context) for context in contexts]
    speeds = SpeedModel(names, logger, minimum=minimum, on_one_device=on_one_device)
    return Balancer(speeds, limits=MemoryLimits(names, logger))


class MemoryLimits:
    """The maximum number of samples each context or rank processes at once, halved when it runs out of memory.

    Larger shares of contexts run in micro-steps; larger shares of ranks are cut.
    """

    def __init__(
        self,
        names: Sequence[str],
        logger: logging.Logger | None = None,
        max_samples: Sequence[int | None] | None = None,
    ) -> None:
        """Start with these limits; each halved limit is logged as a warning."""
        self._names, self._logger = list(names), logger
        self.max_samples: list[int | None] = [None] * len(names) if max_samples is None else list(max_samples)
        """One per context or rank; None: no limit is known."""

    def micro_steps(self, slices: Sequence[slice]) -> list[list[slice]]:
        """Return the slices of each micro-step: equal parts of each context's slice that fit, padded by empty ones."""
        cuts = [_cut(part, limit) for part, limit in zip(slices, self.max_samples, strict=True)]
        return [
            [cut[number] if number < len(cut) else slice(0, 0) for cut in cuts] for number in range(max(map(len, cuts)))
        ]

    def lower(self, indices: Sequence[int], micro_steps: Sequence[Sequence[slice]]) -> bool:
        """Halve the limits of contexts that may have run out of memory; return False if no limit can be halved."""
        tried = {index: max(parts[index].stop - parts[index].start for parts in micro_steps) for index in indices}
        if not tried or max(tried.values()) < 2:
            return False
        self.halve(tried)
        return True

    def halve(self, tried: Mapping[int, int]) -> None:
        """Halve the limits of contexts or ranks that ran out of memory with these numbers of samples."""
        for index, samples in tried.items():
            limit = self.max_samples[index]
            self.max_samples[index] = max(1, samples // 2 if limit is None else min(limit, samples // 2))
            if self._logger is not None:
                self._logger.warning(
                    "%s ran out of memory with %d samples; the batch is run again, and from now on its share runs in "
                    "micro-steps of at most %d samples",
                    self._names[index],
                    samples,
                    self.max_samples[index],
                )


def _cut(part: slice, limit: int | None) -> list[slice]:
    samples = part.stop - part.start
    pieces = math.ceil(samples / limit) if limit else 1
    ends = [part.start + samples * (number + 1) // pieces for number in range(pieces)]
    return [slice(begin, end) for begin, end in zip([part.start, *ends], ends, strict=False)]


def samples_that_fit(device: torch.device, samples: int) -> int | None:
    """Predict from the memory peak of real training steps the largest share that fits; call it between two steps.

    Memory allocated between steps, such as weights and optimizer state, does not grow with the share. Memory that a
    step adds is assumed to grow in proportion, although a part of it does not.

    Returns:
        At least ``samples``, the largest share that this rank has trained; None: no limit is known, as on CPUs.
    """
    if device.type != "cuda" or not samples:
        return None
    peak, fixed = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - peak
    return samples + max(0, int(_USED * room * samples / max(peak - fixed, 1)))
