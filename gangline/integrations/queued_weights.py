"""Balanced loader for loops that read batches ahead: each batch has its weight when the loop trains it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from gangline.models.balance.balanced_loader import BalancedLoader, checked_loads
from gangline.models.balance.rank_balance import checked_caps


class QueuedWeight(NamedTuple):
    """Weight of a batch on this rank."""

    weight: float
    """Factor of the gradient."""
    samples: int
    """Samples of this rank; 0 if the batch is one repeated sample without weight."""


class QueuedWeights(BalancedLoader):
    """BalancedLoader whose loop says when it trains the next batch; batches are trained in the order of iteration."""

    current: QueuedWeight | None = None
    """Weight of the batch that is trained."""
    _queue: deque[QueuedWeight]
    _trains_as_read = False

    def next_weight(self) -> QueuedWeight:
        """Begin to train the next batch, and return its weight."""
        following = self._queue.popleft()
        self.use_weight(following)
        return following

    def use_weight(self, weight: QueuedWeight) -> None:
        """Train the current batch with this weight."""
        self.current = weight
        super()._begin_training(*weight)

    def _begin_training(self, weight: float, samples: int) -> None:
        self._queue.append(QueuedWeight(weight, samples))

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
        if name == "stream" and value not in (None, "own", "same"):
            raise ValueError(f"stream is {value!r}; expected 'own', 'same' or None")
        if name == "group" and value is not None and not isinstance(value, dist.ProcessGroup):
            raise TypeError(f"group is {value!r}; expected a process group of torch.distributed, or None")
        if name == "memory" and not (value is None or value == "auto" or isinstance(value, list | tuple)):
            raise TypeError(f"memory is {value!r}; expected a maximum for each rank, such as [16, 4], 'auto' or None")


def check_sizes(options: Mapping[str, Any], ranks: int, global_batch: int = 0) -> None:
    """Check that loads and memory have a valid entry for each rank."""
    checked_loads(options.get("loads", "auto"), ranks)
    if isinstance(memory := options.get("memory"), Sequence) and not isinstance(memory, str):
        checked_caps(memory, ranks, global_batch)
