"""Micro-batches: parts of each rank's share, equally many on all ranks, whose gradients add up to the batch's."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gangline.models.balance.rank_exchange import parameter_groups
from gangline.models.balanced_batch import NOTHING_COUNTS, BalancedBatch, BatchesOfNetworks
from gangline.models.data.joined_batches import JoinedBatches


class MicroBatches:
    """The parts of a rank's batch; an iteration weights their gradients and synchronizes these with the last part."""

    def __init__(
        self,
        trained: BatchesOfNetworks,
        whole: BalancedBatch,
        batch: Any,
        minimum: int,
        count: Callable[[Any], Any] | None,
        begin: Callable[[BalancedBatch], None],
        *,
        is_sum: bool,
    ) -> None:
        """Prepare to cut ``batch`` to parts of at least ``minimum`` rows; ``begin`` makes a part the current batch.

        Weights are in proportion to what ``count`` returns for a part, None: to its rows; or equal if the loss is a
        sum.
        """
        self._trained, self._whole, self._batch, self._begin = trained, whole, batch, begin
        self._minimum, self._count, self._is_sum = minimum, count, is_sum
        self._cutter = JoinedBatches((), whole.samples or minimum)

    def needed(self, returned: Any, max_size: int | None, max_cost: float | None) -> int:
        """Return the number of parts that this rank needs; the loader has ``returned`` the batch last."""
        whole, count = self._whole, self._count
        limit, kind = (max_cost, int | float) if max_size is None else (max_size, int)
        is_one = max_size is None or max_cost is None
        if not is_one or isinstance(limit, bool) or not isinstance(limit, kind) or not limit > 0:
            raise ValueError(
                f"micro_batches() got max_size={max_size!r} and max_cost={max_cost!r}; expected one of them: a number "
                "of samples, 1 or more, or a cost above 0"
            )
        rows, expected = self._cutter.length(self._batch), self._cutter.length(returned)
        if rows != expected:
            raise ValueError(
                f"micro_batches() got a batch of {rows} rows for {expected}; expected the batch that the loader has "
                "returned last, with one entry for each sample"
            )
        costs: Sequence[Any] | None = [1.0] * rows if max_size is not None else whole.costs
        if costs is None and count is not None:
            costs = [count(self._cutter.cut(self._batch, row, row + 1)) for row in range(rows)]
        if whole.samples and (costs is None or len(costs) != rows):
            raise ValueError(
                f"max_cost is {max_cost}, but the costs of the batch's rows are not known; expected lengths= or count= "
                "of balance(), and with lengths= a row for each sample, of which collate drops none; or max_size="
            )
        self._limit, self._costs = float(limit), [float(cost) for cost in costs or ()] if whole.samples else []
        return len(self._ends(self._limit)) or 1

    def cut(self, number: int) -> None:
        """Cut to so many parts; those that this rank lacks repeat rows with weight 0."""
        low, limit = min(self._limit, sum(self._costs) / number), self._limit
        for _ in range(20):  # bisect to the smallest limit that needs no more parts, which are then nearly equal
            middle = (low + limit) / 2
            low, limit = (low, middle) if len(self._ends(middle)) <= number else (middle, limit)
        spans = [*pairwise([0, *self._ends(limit)])]
        parts = [self._cutter.cut(self._batch, *span) for span in spans]
        sizes, count = [end - begin for begin, end in spans], self._count
        counted = [1.0] * len(parts) if self._is_sum else [float(count(part)) for part in parts] if count else sizes
        total, whole = 1.0 if self._is_sum else sum(counted) or 1.0, self._whole
        repeated = self._cutter.cut(self._batch, 0, self._minimum), replace(whole, samples=0, share=0.0, weight=0.0)
        self._parts = [repeated] * number
        for place, (part, size, each) in enumerate(zip(parts, sizes, counted, strict=True)):
            share, weight = whole.share * each / total, whole.weight * each / total or NOTHING_COUNTS
            self._parts[place] = part, replace(whole, samples=size, share=share, weight=weight)

    def _ends(self, limit: float) -> list[int]:
        """Return the ends of consecutive parts up to a cost; those of the minimum of rows may cost more."""
        begins, cost, rows, minimum = [0], 0.0, len(self._costs), self._minimum
        for row, added in enumerate(self._costs):
            if row - begins[-1] >= minimum and cost + added > limit:
                begins.append(row)
                cost = 0.0
            cost += added
        if len(begins) > 1 and rows - begins[-1] < minimum:
            begins.pop()
            begins += [rows - minimum] if rows - begins[-1] >= 2 * minimum else []
        return [*begins[1:], rows] if rows else []

    def __len__(self) -> int:
        """Return the number of parts, equal on all ranks."""
        return len(self._parts)

    def __iter__(self) -> Generator[Any]:
        """Return the parts, of which each is current until the next one is asked for."""
        self._trained.end_parts()
        if self._trained.handed_out is not self._whole:
            raise RuntimeError("micro_batches(): the loop has left the batch of these parts; cut the current one")
        iteration = self._iterate()
        self._trained.parts = weakref.ref(iteration)
        return iteration

    def _iterate(self) -> Generator[Any]:
        switches = [(owner, name, getattr(owner, name)) for owner, name in _switches(self._trained.networks)]
        try:
            for number, (data, part) in enumerate(self._parts, 1):
                is_last = number == len(self._parts) and self._whole.ends_update
                for owner, name, synchronizes in switches:  # False in a no_sync() of the loop around all parts
                    setattr(owner, name, synchronizes and is_last)
                self._begin(part)
                yield data
                if self._trained.lacks_backward:
                    raise RuntimeError(
                        f"micro_batches(): part {number} of {len(self._parts)} ran forward without a backward, so its "
                        "gradient would get the weight of another part; expected backward before the loop asks for "
                        "the next part, or forward in torch.no_grad()"
                    )
        finally:
            for owner, name, synchronizes in switches:
                setattr(owner, name, synchronizes)
            self._begin(self._whole)


def _switches(networks: Sequence[nn.Module]) -> list[tuple[Any, str]]:
    """Return the attributes that decide whether a backward synchronizes gradients; those of FSDP are private names."""
    found: list[tuple[Any, str]] = []
    for module in (module for network in networks for module in network.modules()):
        if isinstance(module, DistributedDataParallel):
            found.append((module, "require_backward_grad_sync"))
        elif isinstance(module, FullyShardedDataParallel):
            found.append((module, "_sync_gradients"))
        elif isinstance(module, FSDPModule):
            groups = parameter_groups(module)
            found += [(group, name) for group in groups for name in ("reduce_grads", "all_reduce_grads")]
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.GradientState._shared_state:  # there is an Accelerator
        found.append((accelerate.GradientState(), "sync_gradients"))  # else its optimizers do not step
    return found
