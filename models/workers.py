"""The workers of a job: ranks, loads and exchanges of plain data."""

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
    """The workers of a job, seen from one of them; outside a job there is one worker, rank 0.

    Methods marked "Collective" must be called by all workers, in the same order.
    """

    def __init__(self, store: KVStore | None = None, num_contexts: int = 1) -> None:
        """Connect to the other workers. Collective.

        Args:
            store: store that joins the workers; None: this worker is alone.
            num_contexts: number of contexts of this worker.

        Raises:
            ValueError: if GANGLINE_WORK_LOAD_LIST is malformed, or does not have one number per worker.
        """
        self._store = store if store is not None and store.num_workers > 1 else None
        self.rank = self._store.rank if self._store is not None else 0
        self.count = self._store.num_workers if self._store is not None else 1
        self.in_step = self._store is not None and not self._store.is_async
        """True if there are other workers, and every worker takes part in every step."""
        self.stop: str | None = None
        """Reason why all workers must stop, equal on all of them; None while none has requested it."""
        self._stop_request: str | None = None
        self._clock = 0.0
        self.loads = _loads(self.count) if self.count > 1 else [1.0]
        self.first_context = sum(self.exchange(num_contexts)[: self.rank])
        """Job-wide index of this worker's first context."""

    @property
    def is_first(self) -> bool:
        """True on rank 0, which logs and writes files."""
        return self.rank == 0

    def share(self, samples: int) -> slice:
        """Return this worker's slice of a batch of ``samples``, split by the loads; it may be empty."""
        return split_batch(samples, self.loads)[self.rank]

    def exchange(self, value: Any) -> list[Any]:
        """All-gather plain data and tensors; return the values in rank order. Collective.

        Each message also carries this worker's stop request and its clock, which saves separate exchanges for them.
        """
        if self._store is None:
            return [value]
        messages = self._store.exchange(pack([self._stop_request, time.monotonic(), value]))
        received = [unpack(data) for data in messages]
        self._clock = received[0][1]
        self.stop = self.stop or next((request for request, _, _ in received if request is not None), None)
        return [theirs for _, _, theirs in received]

    def ask_to_stop(self, reason: str) -> None:
        """Request that all workers stop; `stop` is set at the next exchange, to the first reason given."""
        self._stop_request = self._stop_request or reason
        if self._store is None:
            self.stop = self.stop or reason

    def forget_stop(self) -> None:
        """Clear stop requests before a new run; all workers must call it before the same exchange."""
        self.stop = self._stop_request = None

    @property
    def clock(self) -> float:
        """Monotonic seconds of rank 0 at the last exchange, equal on all workers; without other workers, now."""
        return time.monotonic() if self._store is None else self._clock

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value. Collective."""
        return self.exchange(value if self.is_first else None)[0]

    def any(self, flag: bool) -> bool:
        """Return True if ``flag`` is set on any worker. Collective among workers in step; otherwise local."""
        return flag if not self.in_step else any(self.exchange(flag))

    def total(self, number: float) -> float:
        """Return the sum over workers, in rank order. Collective among workers in step; otherwise local."""
        return number if not self.in_step else sum(self.exchange(number))

    def agree_on_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return rank 0's values, on the host, of the tensors that differ between workers. Collective."""
        if self.count == 1:
            return {}
        digests = self.exchange({name: digest(tensor) for name, tensor in tensors.items()})
        differing = [name for name in digests[0] if any(other.get(name) != digests[0][name] for other in digests[1:])]
        found: dict[str, torch.Tensor] = self.from_first({name: tensors[name] for name in differing if name in tensors})
        return {name: tensor for name, tensor in found.items() if name in tensors}

    def check_same(self, what: str, settings: Mapping[str, Any]) -> None:
        """Check that all workers have the same settings. Collective.

        Args:
            what: call named at the start of the error message.
            settings: plain data by name.

        Raises:
            MismatchError: if a setting differs; the message is the same on all workers.
        """
        received = self.exchange(dict(settings))
        first = received[0]
        for rank, theirs in enumerate(received):
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
        raise ValueError(f"{_LOADS} is {words!r}; expected one number per worker, such as 3,1") from None
    if len(loads) != count:
        raise ValueError(f"{_LOADS} is {words!r}, which has {len(loads)} entries for {count} workers")
    return check_work_load_list(loads, count)
