"""Workers: what a module knows of the job it is trained in, and what workers tell each other."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from gangline.collectives.errors import MismatchError
from gangline.collectives.workload import check_work_load_list, split_batch
from gangline.kvstore import KVStore
from gangline.models.serialization import digest, pack, unpack

_LOADS = "GANGLINE_WORK_LOAD_LIST"


class Workers:
    """The workers of a job, as one of them sees them; a process without a job is one that is alone.

    What is called "a collective" here is called by all workers, in the same order.
    """

    def __init__(self, store: KVStore | None = None, num_contexts: int = 1) -> None:
        """Meet the others; a collective.

        Args:
            store: what joins the workers; None: this one is alone.
            num_contexts: how many contexts this worker has.

        Raises:
            ValueError: GANGLINE_WORK_LOAD_LIST makes no sense, or has not one number a worker.
        """
        self._store = store if store is not None and store.num_workers > 1 else None
        self.rank = self._store.rank if self._store is not None else 0
        self.count = self._store.num_workers if self._store is not None else 1
        self.in_step = self._store is not None and not self._store.is_async
        """Whether there are others, and every step of theirs is one of this worker's too."""
        self.stop: str | None = None
        """Why all workers are to stop, once one has asked for it and an exchange has told all; the same on all."""
        self._asks: str | None = None
        self._clock = 0.0
        self.loads = _loads(self.count) if self.count > 1 else [1.0]
        self.first_context = sum(self.exchange(num_contexts)[: self.rank])
        """The number, in the whole job, of this worker's first context."""

    @property
    def is_first(self) -> bool:
        """Whether this worker reports and writes files."""
        return self.rank == 0

    def share(self, samples: int) -> slice:
        """Which of a batch's samples are this worker's, by the loads; perhaps none."""
        return split_batch(samples, self.loads)[self.rank]

    def exchange(self, value: Any) -> list[Any]:
        """Give plain data and tensors, and get what each worker gave, in rank order; a collective.

        Beside it travel what this worker asks for and the time, so that neither costs a way of its own.
        """
        if self._store is None:
            return [value]
        told = self._store.exchange(pack([self._asks, time.monotonic(), value]))
        everybody = [unpack(data) for data in told]
        self._clock = everybody[0][1]
        self.stop = self.stop or next((asks for asks, _, _ in everybody if asks is not None), None)
        return [given for _, _, given in everybody]

    def ask_to_stop(self, reason: str) -> None:
        """Have `stop` say so on all workers, from the next exchange on; the first reason counts."""
        self._asks = self._asks or reason
        if self._store is None:
            self.stop = self.stop or reason

    def forget_stop(self) -> None:
        """Begin a run that nobody has asked to stop; all workers do it before the same exchange."""
        self.stop = self._asks = None

    @property
    def clock(self) -> float:
        """Seconds, as rank 0 had them in the last exchange: the same on all workers. Alone: now."""
        return time.monotonic() if self._store is None else self._clock

    def from_first(self, value: Any) -> Any:
        """What rank 0 gives; a collective."""
        return self.exchange(value if self.is_first else None)[0]

    def any(self, flag: bool) -> bool:
        """Whether any worker in step with this one says so; a collective of those."""
        return flag if not self.in_step else any(self.exchange(flag))

    def total(self, number: float) -> float:
        """The sum over the workers in step with this one, added in rank order; a collective of those."""
        return number if not self.in_step else sum(self.exchange(number))

    def agree_on_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rank 0's, on the host, of those tensors that are not equal on all workers; a collective."""
        if self.count == 1:
            return {}
        digests = self.exchange({name: digest(tensor) for name, tensor in tensors.items()})
        differing = [name for name in digests[0] if any(other.get(name) != digests[0][name] for other in digests[1:])]
        found: dict[str, torch.Tensor] = self.from_first({name: tensors[name] for name in differing if name in tensors})
        return {name: tensor for name, tensor in found.items() if name in tensors}

    def check_same(self, what: str, settings: Mapping[str, Any]) -> None:
        """See that all workers have the same settings; a collective.

        Raises:
            MismatchError: they have not; the same text on all workers.
        """
        everybody = self.exchange(dict(settings))
        first = everybody[0]
        for rank, theirs in enumerate(everybody):
            for name in first:
                if theirs[name] != first[name]:
                    raise MismatchError(
                        f"{what}: {name} is {first[name]!r} on rank 0, but {theirs[name]!r} on rank {rank}; expected "
                        f"the same on all {self.count} workers"
                    )


def _loads(count: int) -> list[float]:
    words = os.environ.get(_LOADS)
    if not words:
        return [1.0] * count
    try:
        loads: list[float] = [float(word) if "." in word or "e" in word else int(word) for word in words.split(",")]
    except ValueError:
        raise ValueError(f"{_LOADS} is {words!r}; expected one number a worker, such as 3,1") from None
    if len(loads) != count:
        raise ValueError(f"{_LOADS} is {words!r}, which has {len(loads)} entries for {count} workers")
    return check_work_load_list(loads, count)
