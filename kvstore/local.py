"""The `local` store: one process; sums and updates in the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gangline.collectives.compression import Compression
from gangline.collectives.devices.device_group import Transfer, broadcast, move, reduce
from gangline.collectives.streams import SideStreams
from gangline.collectives.work import Work, WorkQueue
from gangline.kvstore.arguments import Pairs, Pushed, RowPulls, Value, by_key, merged
from gangline.kvstore.buckets import Bucket, BucketValue
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.interface import KVStore, Updater
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec, check_learning_rate
from gangline.kvstore.registry import register
from gangline.kvstore.sparse import RowSparse, give_rows, summed

_HOST = torch.device("cpu")


@dataclass
class _Entry:
    """One key: its value, and the sum of the latest push once an updater has needed one."""

    stored: torch.Tensor
    merged: torch.Tensor | None = None


@dataclass
class _Flat:
    """A bucket: the flat tensors that its keys' entries are views of."""

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
        self._flats: dict[Bucket, _Flat] = {}
        self._updater: Updater | None = None
        self._optimizer: KeyedOptimizer | None = None
        self._held: dict[Key, torch.Tensor | RowSparse] = {}  # sums that wait for `update`
        self._compressed: CompressedPushes | None = None
        self._queue = WorkQueue()
        weakref.finalize(self, self._queue.close)
        self._lanes = SideStreams()

    def set_updater(self, updater: Updater) -> None:  # noqa: D102  inherited
        self._check_open()
        if not callable(updater):
            raise TypeError(f"updater is {updater!r}; expected a function of (key, summed, stored)")
        self._change(lambda: self._use(updater, None))

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        self._change(lambda: self._use(None, KeyedOptimizer(spec)))

    def _use(self, updater: Updater | None, optimizer: KeyedOptimizer | None) -> None:
        self._updater, self._optimizer = updater, optimizer
        self._held.clear()

    @property
    def updates_wait(self) -> bool:  # noqa: D102  inherited
        return self._optimizer is not None and self._optimizer.spec.clip_global_norm is not None

    def _update(self) -> None:
        self._change(self._apply_held)

    def _drop_updates(self) -> None:
        self._change(self._held.clear)

    def _apply(self, sums: Sequence[tuple[Key, torch.Tensor | RowSparse]]) -> None:
        """Update by sums, or keep them for `update`: they lie in memory of the store's own then."""
        assert self._optimizer is not None
        if self.updates_wait:
            self._held.update(sums)
        else:
            self._optimizer.update(sums)

    def _apply_held(self) -> None:
        assert self._optimizer is not None
        held, self._held = self._held, {}
        known = [(key, entry.stored) for key, entry in self._entries.items() if key in held]  # in an order that stays
        self._optimizer.update([(key, held[key].to(stored.device)) for key, stored in known])

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

    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work:
        return self._start("push", lambda: self._merge(pairs), pairs, priority, async_op)

    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        return self._start("pull", lambda: self._give(pairs), pairs, priority, async_op)

    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work:
        def pushpull() -> None:
            replaces = self._updater is None and self._optimizer is None and self._compressed is None
            if replaces and _are_apart(values, outs):
                self._place(values)
                self._replace(values, dict(outs))
            else:
                self._merge(values)
                self._give(outs)

        return self._start("pushpull", pushpull, [*values, *outs], priority, async_op)

    def _row_sparse_pull(self, pulls: RowPulls, priority: int, async_op: bool) -> Work:
        def pull() -> None:
            for key, targets in pulls:
                for out, row_ids in targets:
                    give_rows(self._entries[key].stored, out, row_ids)

        pairs = [(key, [part for target in targets for part in target]) for key, targets in pulls]
        return self._start("row_sparse_pull", pull, pairs, priority, async_op)

    def _fuse(self, bucket: Bucket) -> None:
        def fuse() -> None:
            if self._optimizer is not None:
                for key in bucket.keys:
                    self._optimizer.check(key, self._entries[key].stored)
            flat = _Flat(bucket.empty(self._home_of(bucket)))
            for key, view in bucket.views(flat.stored).items():
                self._unfuse(key)
                self._entries[key] = _Entry(view.copy_(self._entries[key].stored))
                if self._optimizer is not None:
                    self._optimizer.add(key, view)
            self._flats[bucket] = flat

        self._start("fuse", fuse, [(key, []) for key in bucket.keys], 0, False)

    def _unfuse(self, key: Key) -> None:
        """Have no bucket speak for a key that is about to live elsewhere; its keys then move one by one."""
        self._flats = {bucket: flat for bucket, flat in self._flats.items() if key not in bucket}

    def _push_bucket(
        self, bucket: Bucket, values: Sequence[BucketValue], keys: Sequence[Key], priority: int, async_op: bool
    ) -> Work:
        tensors: list[Value] = []
        for value in values:
            tensors += [value] if isinstance(value, torch.Tensor) else value.values()
        first, *others = bucket.keys
        pairs: Pushed = [(first, tensors), *((key, []) for key in others)]
        return self._start("push", lambda: self._merge_bucket(bucket, values, keys), pairs, priority, async_op)

    def _pull_bucket(self, bucket: Bucket, outs: Sequence[torch.Tensor], priority: int, async_op: bool) -> Work:
        def pull() -> None:
            flat = self._flats.get(bucket)
            if flat is None:
                views = [bucket.views(out) for out in outs]
                self._give([(key, [view[key] for view in views]) for key in bucket.keys])
            else:
                broadcast(flat.stored, outs)

        return self._start("pull", pull, [(key, list(outs)) for key in bucket.keys], priority, async_op)

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
            self._flats.clear()
            self._compressed = None

    def _start(
        self,
        name: str,
        operation: Callable[[], None],
        pairs: Sequence[tuple[Key, Sequence[Value]]],
        priority: int,
        async_op: bool,
    ) -> Work:
        """Run the operation behind what touches the same keys; on GPUs, on lanes of the store's own."""
        tensors: list[torch.Tensor] = []
        for key, values in pairs:
            for value in values:
                tensors += [value.indices, value.values] if isinstance(value, RowSparse) else [value]
            if key in self._entries:
                tensors.append(self._entries[key].stored)
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

    def _merge(self, pairs: Pushed) -> None:
        self._place(pairs)
        pairs = merged(pairs)
        if self._optimizer is not None:
            for key, values in pairs:
                self._optimizer.check_kind(key, rows=all(isinstance(value, RowSparse) for value in values))
        if self._compressed is not None:
            pairs = self._compressed.through([(key, values, self._entries[key].stored.device) for key, values in pairs])
        if self._updater is None and self._optimizer is None:
            self._replace(pairs, {})
        elif self._optimizer is not None:
            for key, _ in pairs:
                self._optimizer.add(key, self._entries[key].stored)
            self._apply(self._sums(pairs, own=self._optimizer.modifies_gradient))
        elif self._updater is not None:
            for pair in pairs:  # one by one: an updater may call the store, and change the next key
                [(key, total)] = self._sums([pair], own=True)
                self._updater(key, total, self._entries[key].stored)

    def _merge_bucket(self, bucket: Bucket, values: Sequence[BucketValue], keys: Sequence[Key]) -> None:
        """`_merge` of a bucket's keys, in one sum over all of them where their values lie side by side."""
        flat = self._flats.get(bucket)
        flats = [value for value in values if isinstance(value, torch.Tensor)]
        if flat is None or len(flats) < len(values) or self._updater is not None or self._compressed is not None:
            self._merge(by_key(bucket, values, keys))
        elif self._optimizer is None and len(keys) == len(bucket.slots):
            reduce(flats, out=flat.stored)
        else:
            self._merge_flat(bucket, flat, flats, keys)

    def _merge_flat(self, bucket: Bucket, flat: _Flat, values: Sequence[torch.Tensor], keys: Sequence[Key]) -> None:
        total = values[0]
        own = self._optimizer is not None and self._optimizer.modifies_gradient
        if len(values) > 1 or own or total.device != flat.stored.device:
            if flat.merged is None:
                flat.merged = bucket.empty(flat.stored.device)
            total = flat.merged
            reduce(values, out=total)
        sums = bucket.views(total)
        if self._optimizer is None:
            for key in keys:
                self._entries[key].stored.copy_(sums[key])
        else:
            for key in keys:
                self._optimizer.add(key, self._entries[key].stored)
            self._apply([(key, sums[key]) for key in keys])

    def _replace(self, pairs: Pushed, outs: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        """Have the sums be the stored values, and copy them into ``outs``."""
        transfers: list[Transfer] = []
        for key, values in pairs:
            stored, dense = self._entries[key].stored, _dense(values)
            if dense is None:
                rows = summed(_rows(values), stored.device)
                stored.zero_().index_copy_(0, rows.indices, rows.values)
            transfers.append((dense or (), stored, outs.get(key, ())))
        move(transfers)

    def _sums(self, pairs: Pushed, own: bool) -> list[tuple[Key, torch.Tensor | RowSparse]]:
        """The sums, each where its key lives; with ``own``, in buffers that may be changed."""
        transfers: list[Transfer] = []
        sums: list[tuple[Key, torch.Tensor | RowSparse]] = []
        for key, values in pairs:
            entry, dense = self._entries[key], _dense(values)
            if dense is None:
                sums.append((key, summed(_rows(values), entry.stored.device)))
            elif len(dense) == 1 and not own and dense[0].device == entry.stored.device:
                sums.append((key, dense[0]))
            else:
                if entry.merged is None or entry.merged.device != entry.stored.device:
                    entry.merged = torch.empty_like(entry.stored)
                transfers.append((dense, entry.merged, ()))
                sums.append((key, entry.merged))
        move(transfers)
        return sums

    def _give(self, pairs: Pairs) -> None:
        self._place([(key, outs) for key, outs in pairs if len(outs) > 1])
        move([((), self._entries[key].stored, outs) for key, outs in pairs])

    def _first_home(self, value: torch.Tensor) -> torch.device:  # noqa: ARG002  other stores look at it
        """Where a key lives until its devices are known."""
        return _HOST

    def _place(self, pairs: Sequence[tuple[Key, Sequence[Value]]]) -> None:
        """Settle where these keys live from now on; the host, here."""

    def _home_of(self, bucket: Bucket) -> torch.device:  # noqa: ARG002  other stores look at it
        """Where the keys of a bucket live together."""
        return _HOST

    def _set_compression(self, compression: Compression | None) -> None:
        if compression is not None and compression.pull_codec is not None:
            raise ValueError(
                f"pull_type is {compression.params['pull_type']!r}, but a {self.type!r} store hands weights to devices "
                "of its own process, which compression would only round; expected None"
            )

        def change() -> None:
            self._compressed = CompressedPushes(compression) if compression is not None else None

        self._change(change)

    @property
    def compresses(self) -> bool:  # noqa: D102  inherited
        return self._compressed is not None

    def compression_residuals(self) -> dict[str, torch.Tensor]:  # noqa: D102  inherited
        self._check_open()
        found: dict[str, torch.Tensor] = {}
        if self._compressed is not None:
            compressed = self._compressed
            self._change(lambda: found.update(compressed.residuals()))
        return found

    def load_compression_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:  # noqa: D102  inherited
        self._check_open()
        if self._compressed is None:
            super().load_compression_residuals(residuals)
            return
        compressed, layout = self._compressed, self._layout
        self._change(lambda: compressed.load_residuals(residuals, layout))


def _shown(keys: Sequence[Any]) -> str:
    return f"key {keys[0]!r}" if len(set(keys)) == 1 else f"{len(set(keys))} keys"


def _dense(values: Sequence[Value]) -> list[torch.Tensor] | None:
    """The values as dense tensors; None where all are row-sparse."""
    if all(isinstance(value, RowSparse) for value in values):
        return None
    return [value.to_dense() if isinstance(value, RowSparse) else value for value in values]


def _rows(values: Sequence[Value]) -> list[RowSparse]:
    return [value for value in values if isinstance(value, RowSparse)]


def _are_apart(values: Pushed, outs: Pairs) -> bool:
    """Whether each key can be summed and handed out before the next: none comes twice, or writes what another reads."""
    keys = [key for key, _ in values]
    if len(set(keys)) < len(keys) or keys != [key for key, _ in outs]:
        return False
    written = {out.untyped_storage().data_ptr(): key for key, targets in outs for out in targets}
    return all(
        isinstance(value, torch.Tensor) and written.get(value.untyped_storage().data_ptr(), key) == key
        for key, of_key in values
        for value in of_key
    )
