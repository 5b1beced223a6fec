"""The workers of a job: ranks, loads and collective calls on plain data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gangline.kvstore import KVStore
from gangline.kvstore.allreduce.store import AllReduceStore
from gangline.kvstore.group.serialization import digest
from gangline.kvstore.group.worker_group import check_same
from gangline.kvstore.workload import check_work_load_list, split_batch

_AUTO, _EQUAL = "auto", "equal loads"
_LOADS = "GANGLINE_WORK_LOAD_LIST"


class Workers:
    """The workers of a job, seen from one of them; outside a job there is one worker, rank 0.

    Methods marked "Collective" must be called by all workers, in the same order.
    """

    is_elastic = False
    """True if workers come and go while the job runs; see `ElasticWorkers`."""
    has_left = False
    """True if this worker has left an elastic job."""
    has_begun = False
    """True if this worker trains in an elastic job."""

    def __init__(self, store: KVStore | None = None, num_contexts: int = 1, *, measures_loads: bool = False) -> None:
        """Connect to the other workers of a store; without one this worker is alone. Collective.

        With ``measures_loads`` the loads follow measured speeds unless GANGLINE_WORK_LOAD_LIST says otherwise.
        """
        if store is not None and not store.keeps_state:
            store.check_not_restarted("training by a Module")
        self._store = store if store is not None and store.num_workers > 1 else None
        self.rank = self._store.rank if self._store is not None else 0
        self.count = self._store.num_workers if self._store is not None else 1
        self.in_step = self._store is not None and not self._store.is_async
        """True if there are other workers, and every worker takes part in every step."""
        self.minimum = 1
        """Smallest share of a batch that is not empty."""
        self.share_cost: float | None = None
        """Cost of this worker's share of the batch to train next; None: its number of samples."""
        self.stop: str | None = None
        """Reason why all workers must stop, equal on all of them; None while none has requested it."""
        self._stop_request: str | None = None
        self._clock = 0.0
        words = os.environ.get(_LOADS) or (_AUTO if measures_loads else _EQUAL)
        gathered = self.all_gather([num_contexts, words], "init_optimizer")
        check_same([{_LOADS: theirs} for _, theirs in gathered], "init_optimizer")
        self.is_auto = self.count > 1 and words == _AUTO
        """True if the loads follow measured speeds."""
        self.loads = _loads(words, self.count) if self.count > 1 else [1.0]
        """Newest loads of the workers, equal on all of them."""
        self.reads_ahead = 0
        """Number of batches ahead at which the loads cut a batch, because a worker may read that far."""
        self.first_context = sum(contexts for contexts, _ in gathered[: self.rank])
        """Job-wide index of this worker's first context."""

    @property
    def is_first(self) -> bool:
        """True on rank 0, which logs and writes files."""
        return self.rank == 0

    @property
    def has_others(self) -> bool:
        """True if other workers may take part in a step, so that this one's share of a batch can be empty."""
        return self.count > 1

    def share(self, samples: int) -> slice:
        """Return this worker's slice of a batch; it can be empty."""
        return split_batch(samples, self.loads, self.minimum)[self.rank]

    def all_gather(self, value: Any, name: str) -> list[Any]:
        """Return every worker's plain data and tensors in rank order; calls are compared by name. Collective.

        Each message also carries this worker's stop request and its clock, which saves separate calls for them.
        """
        if self._store is None:
            return [value]
        received = self._store.group.all_gather([self._stop_request, time.monotonic(), value], name)
        self._clock = received[0][1]
        self.stop = self.stop or next((request for request, _, _ in received if request is not None), None)
        return [theirs for _, _, theirs in received]

    @property
    def gathers_tensors(self) -> bool:
        """True if the store has `all_gather_tensor`."""
        return isinstance(self._store, AllReduceStore)

    def all_gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every worker's tensor as `AllReduceStore.all_gather`. Collective."""
        assert isinstance(self._store, AllReduceStore)
        return self._store.all_gather(tensor)

    def gather(self, value: Any, name: str) -> list[Any]:
        """Return every worker's data in rank order on rank 0, and an empty list on the other ranks. Collective."""
        return [value] if self._store is None else self._store.group.gather(value, name)

    def broadcast(self, value: Any, name: str) -> Any:
        """Return rank 0's data. Collective."""
        return value if self._store is None else self._store.group.broadcast(value, name)

    def run_on_first(self, action: Callable[[], object], name: str) -> None:
        """Run an action on rank 0 while the others wait; if it raises, raise on all workers. Collective."""
        if self._store is None:
            action()
        else:
            self._store.group.run_on_rank(action, name)

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

    def any(self, flag: bool, name: str = "step") -> bool:
        """Return True if ``flag`` is set on any worker. Collective among workers in step; otherwise local."""
        return flag if not self.in_step else any(self.all_gather(flag, name))

    def total(self, number: float, name: str = "step") -> float:
        """Return the sum over workers, in rank order. Collective among workers in step; otherwise local."""
        return number if not self.in_step else sum(self.all_gather(number, name))

    def agree_on_tensors(self, tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        """Return rank 0's values, on the host, of the tensors that differ between workers. Collective."""
        if self.count == 1:
            return {}
        digests = self.all_gather({one: digest(tensor) for one, tensor in tensors.items()}, name)
        differing = [one for one in digests[0] if any(other.get(one) != digests[0][one] for other in digests[1:])]
        found: dict[str, torch.Tensor] = self.broadcast(
            {one: tensors[one] for one in differing if one in tensors}, name
        )
        return {one: tensor for one, tensor in found.items() if one in tensors}

    def check_same(self, settings: Mapping[str, Any], name: str) -> None:
        """Raise MismatchError on all workers if their settings, plain data by name, differ. Collective."""
        check_same(self.all_gather(dict(settings), name), name)


def _loads(words: str, count: int) -> list[float]:
    if words == _EQUAL:
        return [1.0] * count
    if words == _AUTO:
        return [round(1 / count, 4)] * count
    try:
        loads: list[float] = [float(word) if "." in word or "e" in word else int(word) for word in words.split(",")]
    except ValueError:
        raise ValueError(f"{_LOADS} is {words!r}; expected one number per worker, such as 3,1, or auto") from None
    if len(loads) != count:
        raise ValueError(f"{_LOADS} is {words!r}, which has {len(loads)} entries for {count} workers")
    return check_work_load_list(loads, count)
