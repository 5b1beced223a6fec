"""The `local` store: one process; sums and updates in the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives.device_group import broadcast, reduce
from collectives.lanes import Lanes
from collectives.work import Work, WorkQueue
from kvstore.base import KVStore, Pairs, Updater, merged, register
from kvstore.optimizer import KeyedOptimizer, OptimizerState
from kvstore.optimizer_spec import Key, OptimizerSpec, check_learning_rate

_HOST = torch.device("cpu")


@dataclass
class _Entry:
    """One key: its value, and the sum of the latest push once an updater has needed one."""

    stored: torch.Tensor
    merged: torch.Tensor | None = None


@register("local", "local_update_cpu", "local_allreduce_cpu")
class LocalStore(KVStore):
    """Sums on the host, in the order of the devices, and keeps the weights there.

    Memory: one copy of the weights, one of the gradients once an updater is set, and the optimizer's state.
    """

    def __init__(self, name: str = "local") -> None:
        super().__init__(name)
        self._entries: dict[Key, _Entry] = {}
        self._updater: Updater | None = None
        self._optimizer: KeyedOptimizer | None = None
        self._queue = WorkQueue()
        weakref.finalize(self, self._queue.close)
        self._lanes = Lanes()

    def set_updater(self, updater: Updater) -> None:  # noqa: D102  inherited
        self._check_open()
        if not callable(updater):
            raise TypeError(f"updater is {updater!r}; expected a function of (key, summed, stored)")
        self._change(lambda: self._use(updater, None))

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        self._change(lambda: self._use(None, KeyedOptimizer(spec)))

    def _use(self, updater: Updater | None, optimizer: KeyedOptimizer | None) -> None:
        self._updater, self._optimizer = updater, optimizer

    @property
    def learning_rate(self) -> float:  # noqa: D102  inherited
        self._check_open()
        return self._needs_optimizer("learning_rate").learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:  # noqa: D102  inherited
        self._check_open()
        check_learning_rate(learning_rate)
        optimizer = self._needs_optimizer("set_learning_rate")

        def change() -> None:
            optimizer.learning_rate = learning_rate

        self._change(change)

    def optimizer_state(self) -> OptimizerState:  # noqa: D102  inherited
        self._check_open()
        optimizer = self._needs_optimizer("optimizer_state")
        states: list[OptimizerState] = []
        self._change(lambda: states.append(optimizer.state()))
        return states[0]

    def load_optimizer_state(self, state: OptimizerState) -> None:  # noqa: D102  inherited
        self._check_open()
        optimizer = self._needs_optimizer("load_optimizer_state")

        def load() -> None:
            for key, entry in self._entries.items():
                optimizer.add(key, entry.stored)
            optimizer.load_state(state)

        self._change(load)

    def _needs_optimizer(self, call: str) -> KeyedOptimizer:
        if self._optimizer is None:
            raise RuntimeError(f"{call} needs an optimizer; call set_optimizer first")
        return self._optimizer

    def _init(self, pairs: Pairs, async_op: bool) -> Work:
        def init() -> None:
            with torch.inference_mode(False):  # or no update could ever change what is stored
                for key, (value,) in pairs:
                    self._entries[key] = _Entry(torch.empty_like(value, device=self._first_home(value)).copy_(value))

        return self._start("init", init, pairs, 0, async_op)

    def _push(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        return self._start("push", lambda: self._merge(pairs), pairs, priority, async_op)

    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        return self._start("pull", lambda: self._give(pairs), pairs, priority, async_op)

    def _pushpull(self, values: Pairs, outs: Pairs, priority: int, async_op: bool) -> Work:
        def pushpull() -> None:
            self._merge(values)
            self._give(outs)

        return self._start("pushpull", pushpull, [*values, *outs], priority, async_op)

    def _assign(self, pairs: Pairs) -> None:
        def assign() -> None:
            for key, (value,) in pairs:
                self._entries[key].stored.copy_(value)

        self._start("assign", assign, pairs, 0, False)

    def close(self) -> None:  # noqa: D102  inherited
        if not self._closed:
            super().close()
            self._queue.close()
            self._use(None, None)
            self._entries.clear()

    def _start(self, name: str, operation: Callable[[], None], pairs: Pairs, priority: int, async_op: bool) -> Work:
        """Run the operation behind what touches the same keys; on GPUs, on lanes of the store's own."""
        tensors = [tensor for _, many in pairs for tensor in many]
        tensors += [self._entries[key].stored for key, _ in pairs if key in self._entries]
        section = self._lanes.behind_caller(tensors)

        def run() -> None:
            with torch.no_grad(), section:
                operation()

        keys = [key for key, _ in pairs]
        work = Work(f"{name} of {_shown(keys)}", section.join)
        (self._queue.submit if async_op else self._queue.run)(run, work, keys, priority)
        return work

    def _change(self, operation: Callable[[], None]) -> None:
        """Change what all keys share, behind all that is under way."""
        self._start("change", operation, [(key, []) for key in self._layout], 0, False)

    def _merge(self, pairs: Pairs) -> None:
        self._place(pairs)
        pairs = merged(pairs)
        if self._updater is None and self._optimizer is None:
            for key, values in pairs:
                reduce(values, out=self._entries[key].stored)
        elif self._optimizer is not None:
            for key, _ in pairs:
                self._optimizer.add(key, self._entries[key].stored)
            own = self._optimizer.modifies_gradient
            self._optimizer.update([(key, self._sum(key, values, own=own)) for key, values in pairs])
        elif self._updater is not None:
            for key, values in pairs:
                self._updater(key, self._sum(key, values, own=True), self._entries[key].stored)

    def _sum(self, key: Key, values: Sequence[torch.Tensor], own: bool) -> torch.Tensor:
        """The sum, where the key lives; with ``own``, in a buffer that may be changed."""
        entry = self._entries[key]
        if len(values) == 1 and not own and values[0].device == entry.stored.device:
            return values[0]
        if entry.merged is None or entry.merged.device != entry.stored.device:
            entry.merged = torch.empty_like(entry.stored)
        reduce(values, out=entry.merged)
        return entry.merged

    def _give(self, pairs: Pairs) -> None:
        self._place([(key, outs) for key, outs in pairs if len(outs) > 1])
        for key, outs in pairs:
            broadcast(self._entries[key].stored, outs)

    def _first_home(self, value: torch.Tensor) -> torch.device:  # noqa: ARG002  other stores look at it
        """Where a key lives until its devices are known."""
        return _HOST

    def _place(self, pairs: Pairs) -> None:
        """Settle where these keys live from now on; the host, here."""


def _shown(keys: Sequence[Any]) -> str:
    return f"key {keys[0]!r}" if len(set(keys)) == 1 else f"{len(set(keys))} keys"
