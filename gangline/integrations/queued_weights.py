"""Balanced loader for loops that read batches ahead: each batch has its weight when the loop trains it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from gangline.models.balance.balanced_loader import BalancedLoader
from gangline.models.balance.loader_arguments import checked_loads
from gangline.models.balance.rank_balance import checked_caps
from gangline.models.balanced_batch import BalancedBatch


class QueuedWeights(BalancedLoader):
    """BalancedLoader whose loop says when it trains the next batch; batches are trained in the order of iteration."""

    current: BalancedBatch | None = None
    """The batch that is trained."""
    _queue: deque[BalancedBatch]
    _trains_as_read = False

    def next_weight(self) -> BalancedBatch:
        """Begin to train the next batch, and return it."""
        following = self._queue.popleft()
        self.train(following)
        return following

    def train(self, batch: BalancedBatch) -> None:
        """Train a batch with its weight."""
        self.current = batch
        super()._begin_training(batch)

    def _begin_training(self, batch: BalancedBatch) -> None:
        self._queue.append(batch)

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's batches of an epoch. Collective."""
        self._queue = deque()
        return super().__iter__()


def check_options(options: Mapping[str, Any], caller: str, left_out: Mapping[str, str] | None = None) -> None:
    """Check the names of options for `gangline.balance`, and the values that need no loader.

    Raises:
        TypeError: if ``caller`` has no such option; ``left_out`` says why it has not all those of `gangline.balance`.
        ValueError: if a value is invalid.
    """
    left_out = left_out or {}
    parameters = inspect.signature(BalancedLoader.__init__).parameters.values()
    names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in left_out]
    for name, value in options.items():
        if name not in names:
            reason = f" ({left_out[name]})" if name in left_out else ""
            raise TypeError(f"{caller} has no option {name!r}{reason}; expected {', '.join(names)}")
        if name == "stream" and value not in (None, "sharded", "replicated"):
            raise ValueError(f"stream is {value!r}; expected 'sharded', 'replicated' or None")
        if name == "group" and value is not None and not isinstance(value, dist.ProcessGroup):
            raise TypeError(f"group is {value!r}; expected a process group of torch.distributed, or None")
        if name == "max_share" and not (value is None or value == "auto" or isinstance(value, list | tuple)):
            raise TypeError(
                f"max_share is {value!r}; expected a maximum for each rank, such as [16, 4], 'auto' or None"
            )


def check_sizes(options: Mapping[str, Any], ranks: int, global_batch: int = 0) -> None:
    """Check that loads and max_share have a valid entry for each rank."""
    checked_loads(options.get("loads", "auto"), ranks)
    if isinstance(max_share := options.get("max_share"), Sequence) and not isinstance(max_share, str):
        checked_caps(max_share, ranks, global_batch)
