"""Rank exchange: small control messages between the ranks that average gradients."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives.errors import MismatchError

T = TypeVar("T")


class RankExchange:
    """Collective calls on plain data among the ranks of a process group, on the host.

    They use process groups of their own: the order of calls within one may then differ from that of the gradients, and
    a DataLoader that reads ahead by another number of batches on each rank disturbs nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Make the groups. Collective: all ranks must call it.

        Args:
            group: the ranks that average gradients; None: the default group.

        Raises:
            RuntimeError: if torch.distributed is not initialized.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group() before balance()"
            )
        found = dist.group.WORLD if group is None else group
        assert found is not None
        self.rank, self.size = dist.get_rank(found), dist.get_world_size(found)
        ranks = None if found is dist.group.WORLD else dist.get_process_group_ranks(found)
        backend = "gangline" if "gangline" in dist.get_backend(found) else "gloo"
        self._orders, self._counts = (
            dist.new_group(ranks, backend=backend, use_local_synchronization=ranks is not None) for _ in range(2)
        )

    def all_gather(self, data: Any) -> list[Any]:
        """Return every rank's data in rank order. Collective, in the order of the training steps."""
        return self._all_gather(data, self._counts)

    def all_gather_order(self, read: Callable[[], T]) -> list[T]:
        """Return what ``read`` returned on every rank. Collective, in the order in which batches are drawn.

        Raises:
            Exception: the error of ``read`` on this rank.
            RuntimeError: the error of ``read`` on another rank, with its traceback.
        """
        value, error = None, None
        try:
            value = read()
        except Exception as raised:  # noqa: BLE001  raised again below, on all ranks
            error = raised
        text = "" if error is None else "".join(traceback.format_exception(error))
        found = self._all_gather((value, text), self._orders)
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(found):
            if failure:
                last = failure.strip().splitlines()[-1]
                remote = RuntimeError(f"reading the order of samples failed on rank {rank}: {last}")
                remote.add_note(failure)
                raise remote
        return [value for value, _ in found]

    def check_same(self, items: Mapping[str, Any]) -> None:
        """Check that all ranks have the same settings. Collective.

        Raises:
            MismatchError: if they differ; the text is the same on all ranks.
        """
        gathered = self.all_gather(dict(items))
        for rank, other in enumerate(gathered[1:], 1):
            for name, value in gathered[0].items():
                if other.get(name) != value:
                    raise MismatchError(
                        f"balance: {name} is {value!r} on rank 0, but {other.get(name)!r} on rank {rank}; expected the "
                        f"same on all {self.size} ranks"
                    )

    def start_sum(self, count: float | torch.Tensor) -> Sum:
        """Start to add a number over all ranks. Collective, in the order of the training steps."""
        return Sum(count, self._counts)

    def _all_gather(self, data: Any, group: dist.ProcessGroup) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, data, group=group)
        return found


class Sum:
    """A sum over all ranks that is under way."""

    def __init__(self, count: float | torch.Tensor, group: dist.ProcessGroup) -> None:
        self.own = float(count)
        self._total = torch.tensor([self.own], dtype=torch.float64)
        self._work: dist.Work | None = dist.all_reduce(self._total, group=group, async_op=True)

    def wait(self) -> float:
        """Return the sum, once all ranks have started it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return float(self._total)


def group_of(model: Module) -> dist.ProcessGroup | None:
    """Return the process group of a DistributedDataParallel wrapper; None for other models: the default group."""
    return model.process_group if isinstance(model, DistributedDataParallel) else None
