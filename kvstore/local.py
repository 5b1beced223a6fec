"""The `local` store: one process; reduces and updates in the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from operator import attrgetter, itemgetter
from typing import Any, TypeVar, cast

import torch

from gangline.collectives.devices.backends import copies
from gangline.collectives.devices.device_group import Transfer, move, reduce
from gangline.collectives.streams import SideStreams
from gangline.collectives.work import Work, WorkQueue, nesting
from gangline.kvstore.arguments import (
    ByPosition,
    Pairs,
    Pushed,
    RowPulls,
    Value,
    by_key,
    keys_of,
    merged,
    tensors_of,
)
from gangline.kvstore.buckets import Bucket, BucketValues
from gangline.kvstore.compression import Compression
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.interface import KVStore, Updater
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState, checked
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.sparse import RowSparse, copy_rows, summed

_HOST = torch.device("cpu")
_stored, _is_small, _is_cpu, _device = map(attrgetter, ("stored", "is_small", "is_cpu", "device"))
_key = itemgetter(0)
_Result = TypeVar("_Result")


@dataclass
class _Entry:
    """A key's stored value, and a buffer for the sum of a push, allocated on first use."""

    stored: torch.Tensor
    sum: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.is_small = self.stored.is_cpu and copies.is_small(self.stored)

    def buffer(self) -> torch.Tensor:
        """Return `sum`, on the device of the stored value."""
        if self.sum is None or self.sum.device != self.stored.device:
            with torch.inference_mode(mode=False):
                self.sum = torch.empty_like(self.stored)
        return self.sum


@dataclass
class _Flat:
    """A fused bucket: the flat tensors that its keys' entries are views of."""

    bucket: Bucket
    stored: torch.Tensor
    are_small: bool
    """True if all keys are `copies.is_small`, real and on the host."""
    sum: torch.Tensor | None = None
    _known: list[tuple[torch.Tensor, int, dict[Key, torch.Tensor]]] = field(default_factory=list)

    def views(self, flat: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return `Bucket.views`, read only; those of two flat tensors, the sum and a gradient, are kept."""
        for known, address, views in self._known:
            if known is flat and address == flat.data_ptr():
                return views
        views = self.bucket.views(flat)
        self._known = [*self._known[-1:], (flat, flat.data_ptr(), views)]
        return views


class LocalStore(KVStore):
    """Store in host memory: sums over devices in their order, and holds weights and optimizer state.

    Host memory: one copy of the weights, one of the gradients once an updater is set, and the optimizer's state.
    """

    _serves_one_process = True
    _is_alone = True  # a push is the sum over this process's devices

    def __init__(self, name: str = "local", *, in_order: bool = False) -> None:
        """Create the store; with ``in_order``, calls run in the order in which they are made."""
        super().__init__(name)
        self._entries: dict[Key, _Entry] = {}
        self._flats: dict[Bucket, _Flat] = {}
        self._updater: Updater | None = None
        self._optimizers: dict[OptimizerGroup, KeyedOptimizer] = {}
        self._pending_sums: dict[Key, torch.Tensor | RowSparse] = {}  # kept for update(), in the store's own memory
        self._is_shared = False  # stored values may be in the user's memory
        self._queue = WorkQueue(in_order=in_order)
        weakref.finalize(self, self._queue.close)
        self._streams = SideStreams()

    def set_updater(self, updater: Updater) -> None:  # noqa: D102  inherited
        self._check_open()
        if not callable(updater):
            raise TypeError(f"updater is {updater!r}; expected a function of (key, summed, stored)")
        self._check_unattached("set_updater", None)
        for number in [*self._groups.all]:
            self._groups.remove(number)
        self._run_exclusive(lambda: self._use(updater, None))

    def _set_optimizer(self, group: OptimizerGroup) -> None:
        self._run_exclusive(lambda: self._use(None, group))

    def _use(self, updater: Updater | None, group: OptimizerGroup | None) -> None:
        self._updater = updater
        self._is_shared |= updater is not None
        replaced = [one for one in self._optimizers if group is None or one.number == group.number]
        for one in replaced:
            self._drop_sums(one)
            del self._optimizers[one]
        if group is not None:
            self._optimizers[group] = KeyedOptimizer(group.spec)

    def _update(self, group: OptimizerGroup) -> None:
        self._run_exclusive(lambda: self._apply_pending(group))

    def _drop_updates(self, group: OptimizerGroup) -> None:
        self._run_exclusive(lambda: self._drop_sums(group))

    def _drop_sums(self, group: OptimizerGroup) -> None:
        self._pending_sums = {key: one for key, one in self._pending_sums.items() if self._groups.of(key) is not group}

    def _optimizer_of(self, key: Key) -> KeyedOptimizer | None:
        if not self._optimizers:
            return None
        group = self._groups.of(key)
        return None if group is None else self._optimizers[group]

    def _apply(self, sums: Sequence[tuple[Key, torch.Tensor | RowSparse]]) -> None:
        """Update keys of one group with sums, or keep them until `update`, in the store's own memory then."""
        if not sums:
            return
        group = self._groups.of(sums[0][0])
        assert group is not None
        optimizer = self._optimizers[group]
        self._add_to(optimizer, map(_key, sums))
        if self._groups.updates_wait and group.updates_wait:
            self._pending_sums.update(sums)
        else:
            optimizer.update(sums, self._filter_of(group))

    def _add_to(self, optimizer: KeyedOptimizer, keys: Iterable[Key]) -> None:
        for key in keys:
            stored = self._entries[key].stored
            if optimizer.weights.get(key) is not stored:
                optimizer.add(key, stored)

    def _filter_of(self, group: OptimizerGroup) -> Callable[[Key], bool] | None:  # noqa: ARG002  other stores use it
        """Return a function that returns True for the keys that this worker updates; None: it updates all."""
        return None

    def _apply_pending(self, group: OptimizerGroup) -> None:
        sums = {key: one for key, one in self._pending_sums.items() if self._groups.of(key) is group}
        self._drop_sums(group)
        ordered = [(key, entry.stored) for key, entry in self._entries.items() if key in sums]  # a fixed order
        pairs = [(key, sums[key].to(stored.device)) for key, stored in ordered]
        self._optimizers[group].update(pairs, self._filter_of(group))

    def _rate_of(self, group: OptimizerGroup) -> float:
        return self._optimizers[group].learning_rate

    def _set_rate(self, group: OptimizerGroup, rate: float) -> None:
        self._run_exclusive(lambda: self._optimizers[group].set_learning_rate(rate))

    def _state_of(self, group: OptimizerGroup) -> OptimizerState:
        return self._run_exclusive(self._optimizers[group].state)

    def _load_state(self, group: OptimizerGroup, read: Callable[[], OptimizerState]) -> None:
        state, optimizer = read(), self._optimizers[group]

        def load() -> None:
            parts = {key: group.spec.find(key) for key in self._keys_of(group)}
            dtypes = {key: self._entries[key].stored.dtype for key in parts}  # of others the optimizer has no state
            self._add_to(optimizer, [key for key, part in parts.items() if part and not part.misfit(dtypes[key])])
            optimizer.load_state(state)

        self._run_exclusive(load)

    def _keys_of(self, group: OptimizerGroup) -> list[Key]:
        return [key for key in self._entries if self._groups.of(key) is group]

    def _init(self, pairs: Pairs, async_op: bool) -> Work:
        def init() -> None:
            try:
                self._make_entries(pairs)
            except BaseException:  # raised again, to the caller or by Work.wait
                self._forget([key for key, _ in pairs])
                raise

        return self._start("init", init, keys_of(pairs), tensors_of(pairs), 0, async_op)

    def _make_entries(self, pairs: Pairs) -> None:
        with torch.inference_mode(False):  # an inference tensor could never be updated
            for key, (value,) in pairs:
                self._entries[key] = _Entry(torch.empty_like(value, device=self._initial_device(value)).copy_(value))

    def _forget(self, keys: Iterable[Key]) -> None:
        super()._forget(keys)
        for key in keys:
            self._entries.pop(key, None)

    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work:
        return self._start("push", lambda: self._merge(pairs), keys_of(pairs), tensors_of(pairs), priority, async_op)

    def _push_weighted(self, pairs: Pushed, weight: float, priority: int, async_op: bool) -> Work:
        return self._start(
            "push", lambda: self._merge(pairs, weight), keys_of(pairs), tensors_of(pairs), priority, async_op
        )

    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        return self._start("pull", lambda: self._copy_out(pairs), keys_of(pairs), tensors_of(pairs), priority, async_op)

    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work:
        def pushpull() -> None:
            is_updated = self._optimizers and any(map(self._optimizer_of, islice(keys_of(values), 1)))
            is_plain = self._updater is None and self._compressed is None and not is_updated
            replaces = self._is_alone and is_plain
            if replaces:
                self._place(values)
                if self._moved_jointly(values, outs):
                    return
            pushed, targets = [*values], [*outs]  # made by each loop over a `ByPosition`
            if replaces and _are_apart(pushed, targets):
                self._replace(pushed, dict(targets))
            else:
                self._merge(values)
                self._copy_out(outs)

        return self._start(
            "pushpull", pushpull, keys_of(values), chain(tensors_of(values), tensors_of(outs)), priority, async_op
        )

    def _row_sparse_pull(self, pulls: RowPulls, priority: int, async_op: bool) -> Work:
        def pull() -> None:
            for key, targets in pulls:
                for out, row_ids in targets:
                    copy_rows(self._entries[key].stored, out, row_ids)

        pairs = [(key, [part for target in targets for part in target]) for key, targets in pulls]
        return self._start("row_sparse_pull", pull, keys_of(pairs), tensors_of(pairs), priority, async_op)

    def _fuse(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        given = flat

        def fuse() -> None:
            optimizer = self._optimizer_of(bucket.keys[0])
            if optimizer is not None:
                for key in bucket.keys:
                    checked(optimizer.spec.of(key), key, self._entries[key].stored)
            device = self._device_of(bucket)
            stored = given if given is not None and given.device == device else bucket.empty(device)
            if stored is given and given.is_cuda:  # the user may drop it while a call runs
                given.record_stream(torch.cuda.current_stream(device))
            views = bucket.views(stored)
            are_small = stored.is_cpu and bucket.dtype.is_floating_point and all(map(copies.is_small, views.values()))
            flat = _Flat(bucket, stored, are_small)
            for key, view in views.items():
                self._unfuse(key)
                self._entries[key] = _Entry(view.copy_(self._entries[key].stored))
                if optimizer is not None:
                    optimizer.add(key, view)
            self._flats[bucket] = flat
            self._is_shared |= flat.stored is given

        self._start("fuse", fuse, bucket.keys, (), 0, False)

    def _unfuse(self, key: Key) -> None:
        """Drop the bucket of a key whose memory is replaced; its keys are then transferred one by one."""
        self._flats = {bucket: flat for bucket, flat in self._flats.items() if key not in bucket}

    def _push_bucket(
        self, bucket: Bucket, values: BucketValues, keys: list[Key], weight: float | None, priority: int, async_op: bool
    ) -> Work:
        tensors = chain.from_iterable([one] if isinstance(one, torch.Tensor) else one.values() for one in values)
        merge = partial(self._merge_bucket, bucket, values, keys, weight)  # a lambda would be another frame
        return self._start("push", merge, bucket.keys, tensors, priority, async_op)

    def _pull_bucket(self, bucket: Bucket, outs: Sequence[torch.Tensor], priority: int, async_op: bool) -> Work:
        flat = self._flats.get(bucket)
        if flat is not None and not self._queue.counter[0] and not _others(outs, flat.stored):  # nothing to copy
            self._streams.join()
            return Work.finished("pull")

        def pull() -> None:
            flat = self._flats.get(bucket)
            if flat is None:
                views = [bucket.views(out) for out in outs]
                self._copy_out([(key, [view[key] for view in views]) for key in bucket.keys])
            else:
                move([((), flat.stored, _others(outs, flat.stored))])

        return self._start("pull", pull, bucket.keys, outs, priority, async_op)

    def _assign(self, pairs: Pairs) -> None:
        def assign() -> None:
            for key, (value,) in pairs:
                self._entries[key].stored.copy_(value)

        self._start("assign", assign, keys_of(pairs), tensors_of(pairs), 0, False)

    def _check_caller(self) -> None:
        self._queue.check_outermost(f"a {self.type!r} store")

    def close(self) -> None:  # noqa: D102  inherited
        if not self._closed:
            self._check_caller()
            super().close()
            self._queue.close()
            self._use(None, None)
            self._entries.clear()
            self._flats.clear()
            self._compressed = None

    def _start(
        self,
        name: str,
        operation: Callable[[], object],
        keys: Iterable[Key],
        tensors: Iterable[torch.Tensor],
        priority: int,
        async_op: bool,
    ) -> Work:
        """Run an operation on tensors after earlier ones that use the same keys, on the GPUs' side streams."""
        self._calls_begun += 1
        uses_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not async_op and not uses_gpus:
            was_enabled = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # torch.no_grad() makes nine Python calls
            try:
                if self._queue.run_now(operation, name):
                    return Work.finished(name)
            finally:
                torch._C._set_grad_enabled(was_enabled)
        keys = [*dict.fromkeys(keys)]
        section = self._streams.behind_caller(tensors) if uses_gpus else None

        def run() -> None:
            with torch.no_grad(), nullcontext() if section is None else section:
                operation()

        if async_op and torch.is_inference_mode_enabled():  # outs that were made in this mode are written in it
            run = torch.inference_mode()(run)
        work = Work(f"{name} of {_shown(keys)}", None if section is None else section.join)
        (self._queue.submit if async_op else self._queue.run)(run, work, keys, priority)
        return work

    def _run_exclusive(self, operation: Callable[[], _Result]) -> _Result:
        return self._run_after(self._layout, "change", operation)

    def _run_after(
        self, keys: Iterable[Key], name: str, operation: Callable[[], _Result], tensors: Sequence[torch.Tensor] = ()
    ) -> _Result:
        """Return the result of an operation on tensors, run after all earlier calls that use the keys."""
        results: list[_Result] = []
        self._start(name, lambda: results.append(operation()), keys, tensors, 0, False)
        return results[0]

    def _merge(self, pairs: Pushed, weight: float | None = None) -> None:
        """Sum a push over its devices, and update or replace the stored values with the sums."""
        if weight is not None:  # of the only worker: the mean over workers is its own value
            pairs = [pair for pair in pairs if pair[1] and weight]
        self._place(pairs)
        pairs = merged(pairs)
        optimizer = self._optimizer_of(keys_of(pairs)[0]) if pairs else None
        if optimizer is not None:
            optimizer.check_kinds(pairs)
        if self._compressed is not None:
            pairs = self._compressed.through([(key, values, self._entries[key].stored.device) for key, values in pairs])
        if optimizer is not None:
            self._apply(self._sums(pairs, own=optimizer.modifies_gradient))
        elif self._updater is not None:
            for pair in pairs:  # one by one: an updater may call the store, and change the next key
                [(key, total)] = self._sums([pair], own=True)
                with nesting():
                    self._updater(key, total, self._entries[key].stored)
        elif not self._moved_jointly(pairs, []):
            self._replace(pairs, {})

    def _merge_bucket(self, bucket: Bucket, values: BucketValues, keys: list[Key], weight: float | None) -> None:
        """Merge keys of a bucket, in one sum over all of them if every device gave a flat tensor."""
        if weight == 0:
            keys = []
        flat, optimizer = self._flats.get(bucket), self._optimizer_of(bucket.keys[0])
        if flat is not None and optimizer is not None and self._compressed is None:
            sums = self._sums_of_bucket(optimizer, flat, values, keys)
            if sums is not None:
                self._apply(sums)
                return
        flats = [value for value in values if isinstance(value, torch.Tensor)]
        if flat is None or len(flats) < len(values) or self._updater is not None or self._compressed is not None:
            self._merge(by_key(bucket, values, keys), weight)
        elif optimizer is None and len(keys) == len(bucket.slots):
            reduce(flats, out=flat.stored)
        else:
            self._merge_flat(optimizer, flat, flats, keys)

    def _sums_of_bucket(
        self, optimizer: KeyedOptimizer, flat: _Flat, values: BucketValues, keys: list[Key]
    ) -> list[tuple[Key, torch.Tensor]] | None:
        """Return `_sums` of keys that each device gave as dense tensors where the bucket is stored; None otherwise."""
        columns: list[tuple[Any, ...]] = [(*map(value.get, keys),) for value in values if isinstance(value, Mapping)]
        is_dense = {*map(type, chain(*columns))} == {torch.Tensor}
        if len(columns) < len(values) or not is_dense or {*map(_device, chain(*columns))} != {flat.stored.device}:
            return None
        if len(columns) == 1 and not optimizer.modifies_gradient:
            return [*zip(keys, columns[0], strict=True)]
        if flat.sum is None:
            self._place(by_key(flat.bucket, values, keys))
            flat.sum = flat.bucket.empty(flat.stored.device)
        totals = [*map(flat.views(flat.sum).__getitem__, keys)]
        if flat.are_small:
            copies.move_jointly(columns, totals, ())
        else:
            move([*zip(zip(*columns, strict=True), totals, repeat(()))])
        return [*zip(keys, totals, strict=True)]

    def _merge_flat(
        self, optimizer: KeyedOptimizer | None, flat: _Flat, values: Sequence[torch.Tensor], keys: Sequence[Key]
    ) -> None:
        total = values[0]
        own = optimizer is not None and optimizer.modifies_gradient
        if len(values) > 1 or own or total.device != flat.stored.device:
            if flat.sum is None:
                flat.sum = flat.bucket.empty(flat.stored.device)
            total = flat.sum
            reduce(values, out=total)
        sums = flat.views(total)
        if optimizer is not None:
            self._apply([(key, sums[key]) for key in keys])
        else:
            for key in keys:
                self._entries[key].stored.copy_(sums[key])

    def _replace(self, pairs: Pushed, outs: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        """Replace the stored values by the sums, and copy them into ``outs``."""
        transfers: list[Transfer] = []
        for key, values in pairs:
            stored, dense = self._entries[key].stored, _dense(values)
            if dense is None:
                rows = summed(_rows(values), stored.device)
                stored.zero_().index_copy_(0, rows.indices, rows.values)
            transfers.append((dense or (), stored, outs.get(key, ())))
        move(transfers)

    def _moved_jointly(self, values: Pushed, outs: Pairs) -> bool:
        """Replace values by their sums and copy these into ``outs``, for all keys at once; return False if impossible.

        Both have the same distinct keys; either may be empty.
        """
        if len(values or outs) < copies.LEAST_JOINT:
            return False
        given = [pairs for pairs in (values, outs) if type(pairs) is ByPosition]
        keys = keys_of(values or outs)
        if [pairs.key_list for pairs in given] != [keys] * (bool(values) + bool(outs)) or len({*keys}) < len(keys):
            return False
        entries = [*map(self._entries.__getitem__, keys)]
        totals, copied = [*map(_stored, entries)], given[-1].tensors if outs else ()
        summed = given[0].tensors if values else ()
        if not all(map(_is_small, entries)):
            return copies.move_compiled(summed, totals, copied)
        if torch.cuda.is_initialized() and not all(map(_is_cpu, chain(*summed, *copied))):  # type: ignore[no-untyped-call]
            return False
        if self._is_shared:
            read = {tensor.data_ptr() for tensor in chain(*summed)}
            if not read.isdisjoint(total.data_ptr() for total in totals):
                return False
        copies.move_jointly(summed, totals, copied)
        return True

    def _sums(self, pairs: Pushed, own: bool) -> list[tuple[Key, torch.Tensor | RowSparse]]:
        """Return the sums, each on its key's device; with ``own``, in buffers that may be changed."""
        transfers: list[Transfer] = []
        sums: list[tuple[Key, torch.Tensor | RowSparse]] = []
        has_rows = RowSparse in map(type, chain.from_iterable([values for _, values in pairs]))
        for key, values in pairs:
            entry = self._entries[key]
            dense: Sequence[torch.Tensor] | None = _dense(values) if has_rows else values  # type: ignore[assignment]
            if dense is None:
                sums.append((key, summed(_rows(values), entry.stored.device)))
            elif len(dense) == 1 and not own and dense[0].device == entry.stored.device:
                sums.append((key, dense[0]))
            else:
                transfers.append((dense, entry.buffer(), ()))
                sums.append((key, entry.buffer()))
        move(transfers)
        return sums

    def _copy_out(self, pairs: Pairs) -> None:
        self._place(pairs, pulled=True)
        if not self._moved_jointly([], pairs):
            move([((), self._entries[key].stored, outs) for key, outs in pairs])

    def _initial_device(self, value: torch.Tensor) -> torch.device:  # noqa: ARG002  other stores use it
        """Return the device that stores a key until `_place` moves it."""
        return _HOST

    def _place(self, pairs: Sequence[tuple[Key, Sequence[Value]]], *, pulled: bool = False) -> None:
        """Choose the device that stores each key from now on; in this store always the host."""

    def _device_of(self, bucket: Bucket) -> torch.device:  # noqa: ARG002  other stores use it
        """Return the device that stores a bucket."""
        return _HOST

    def _set_compression(self, compression: Compression | None) -> None:
        if compression is not None and compression.pull_codec is not None:
            raise ValueError(
                f"pull_type is {compression.params['pull_type']!r}, but a {self.type!r} store copies weights within a "
                "process, where compression would only round them; expected None"
            )

        def change() -> None:
            self._compressed = CompressedPushes(compression) if compression is not None else None

        self._run_exclusive(change)


def _others(tensors: Iterable[torch.Tensor], stored: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that are not ``stored`` itself."""
    return [tensor for tensor in tensors if tensor.data_ptr() != stored.data_ptr()]


def _shown(keys: Sequence[Any]) -> str:
    return f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys"


def _dense(values: Sequence[Value]) -> Sequence[torch.Tensor] | None:
    """Return the values as dense tensors; None if all are row-sparse."""
    if RowSparse not in map(type, values) and values:
        return cast(Sequence[torch.Tensor], values)
    rows = [isinstance(value, RowSparse) for value in values]
    if False not in rows:
        return None
    return [value.to_dense() if isinstance(value, RowSparse) else value for value in values]


def _rows(values: Sequence[Value]) -> list[RowSparse]:
    return [value for value in values if isinstance(value, RowSparse)]


def _are_apart(values: Pushed, outs: Pairs) -> bool:
    """Return True if no key occurs twice and no output shares memory with another key's value."""
    if len(values) == len(outs) == 1:
        return values[0][0] == outs[0][0] and RowSparse not in map(type, values[0][1])
    keys = [key for key, _ in values]
    if len(set(keys)) < len(keys) or keys != [key for key, _ in outs]:
        return False
    written = {out.untyped_storage().data_ptr(): key for key, targets in outs for out in targets}
    return all(
        isinstance(value, torch.Tensor) and written.get(value.untyped_storage().data_ptr(), key) == key
        for key, of_key in values
        for value in of_key
    )
