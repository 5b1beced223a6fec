"""The KVStore interface: what every store can do."""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from gangline.collectives.compression import Compression, parse
from gangline.collectives.work import Work
from gangline.kvstore.arguments import (
    Pairs,
    Pushed,
    RowPulls,
    Value,
    by_key,
    check_flat,
    check_like,
    check_mean,
    check_weight,
    checked_priority,
    outs,
    pushed,
    pushed_or_none,
    row_pulls,
    single,
)
from gangline.kvstore.buckets import Bucket, BucketValue
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.sparse import checked_rows, give_rows

Updater = Callable[[Key, Any, torch.Tensor], None]
"""(key, the sum of a push, the stored value); the sum is a `RowSparse` where only such were pushed."""


class KVStore(abc.ABC):
    """Keys to tensors: gradients go in with `push`, weights come out with `pull`.

    A key is a str or an int; ``3`` and ``"3"`` are two keys. Values are torch tensors or numpy arrays; what is pushed
    may be row-sparse too (`RowSparse`, torch.sparse_coo). Every method that moves tensors takes one key with its value,
    or a list of keys with a list of values; a value is a tensor or a list of tensors, one a device. It checks all its
    arguments before it changes anything.

    ``async_op=True`` returns at once with a `Work`; the tensors belong to the store until its ``wait()``.
    Without it the returned Work is over. Larger ``priority`` goes first among operations under way.

    Raises, throughout: KeyError for a key that was not initialised; ValueError for a wrong shape, dtype or
    name; TypeError for a wrong Python type; RuntimeError once the store is closed.
    """

    def __init__(self, name: str) -> None:
        self.type = name
        self._layout: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._layout_lock = threading.Lock()
        self._buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()  # whose keys are known to fit
        self._waiting: set[Key] = set()  # what was pushed, and waits for `update`
        self._closed = False

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return 1

    @property
    def is_async(self) -> bool:
        """Whether each push is applied when it comes, with no regard to what other workers push."""
        return False

    def barrier(self) -> None:
        """Return when every worker has come here."""
        self._check_open()

    def exchange(self, data: bytes) -> list[bytes]:
        """Give bytes to every worker, and get what each gave, in rank order; all workers call it."""
        self._check_open()
        return [data]

    def join(self) -> int:
        """Have rounds go on without this worker until all workers have joined; then everybody is in again.

        What the others push meanwhile is their sum alone; `barrier` counts this worker as present.

        Returns:
            The rank that joined last.
        """
        self._check_open()
        return self.rank

    def dead_nodes(self) -> list[str]:
        """Which workers and servers are known to be dead."""
        return []

    def num_dead_nodes(self, timeout: float = 60.0) -> int:  # noqa: ARG002  MXNet's signature
        """How many workers and servers have not been heard for ``timeout`` seconds."""
        return len(self.dead_nodes())

    def init(self, key: Any, value: Any, *, async_op: bool = False) -> Work:
        """Make ``key`` known with a copy of ``value`` as its stored value.

        Raises:
            ValueError: the key is known already, or twice in the list.
        """
        self._check_open()
        pairs = single(key, value)
        with self._layout_lock:
            seen = set(self._layout)
            for one, _ in pairs:
                if one in seen:
                    raise ValueError(f"key {one!r} is initialised already; expected a new key (push replaces a value)")
                seen.add(one)
            for one, (tensor,) in pairs:
                self._layout[one] = (tensor.shape, tensor.dtype)
        return self._init(pairs, async_op)

    def push(self, key: Any, value: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """Sum ``value`` over its devices; the sum goes to the updater, or without one replaces the stored value.

        A key that comes twice in one call counts as one push of the sum. Of a `RowSparse` only the rows named travel,
        and only they are updated.
        """
        self._check_open()
        pairs = pushed(key, value)
        self._check(pairs)
        priority = checked_priority(priority)
        self._have_wait([one for one, _ in pairs])
        return self._push(pairs, priority, async_op)

    def push_weighted(self, key: Any, value: Any, weight: float, priority: int = 0, *, async_op: bool = False) -> Work:
        """Push this worker's part of a mean: the sum over workers of weight times value, by the sum of the weights.

        What `push` would take the sum of a round for, this takes the mean for. A key that no worker with a weight above
        0 has a value for is left alone.

        Args:
            key: one, or a list; the same on all workers.
            value: as for `push`, of floating-point numbers; None for a key that this worker has nothing for.
            weight: of this worker's values, 0 or more: how many samples they are the mean of.
            priority: larger goes first.
            async_op: return at once.
        """
        self._check_open()
        pairs = pushed_or_none(key, value)
        self._check(pairs)
        check_weight(weight)
        for one, _ in pairs:
            check_mean(one, self._layout[one][1])
        priority = checked_priority(priority)
        self._have_wait([one for one, _ in pairs])
        return self._push_weighted(pairs, float(weight), priority, async_op)

    def pull(self, key: Any, out: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """Copy the stored value into each tensor of ``out``."""
        self._check_open()
        pairs = outs(key, out)
        self._check(pairs)
        self._check_updated([one for one, _ in pairs])
        return self._pull(pairs, checked_priority(priority), async_op)

    def row_sparse_pull(
        self, key: Any, out: Any, priority: int = 0, row_ids: Any = None, *, async_op: bool = False
    ) -> Work:
        """Copy the rows named of the stored value into each of ``out``.

        Args:
            key: one, or a list.
            out: a `RowSparse` of the key's shape, which becomes exactly these rows, in ascending order; or a tensor of
                the key's shape, of which these rows are written and the others left alone; or a list of those.
            priority: larger goes first.
            async_op: return at once.
            row_ids: integers of any shape, in any order, repeated or not; one for all of ``out``, or a list as long as
                ``out``. For a list of keys a list of those.

        Raises:
            ValueError: a row number outside the table.
            TypeError: ``row_ids`` are not given, or no integers.
        """
        self._check_open()
        if row_ids is None:
            raise TypeError("row_sparse_pull() got no row_ids; expected the rows' numbers (pull() gives all rows)")
        pulls = row_pulls(key, out, row_ids)
        self._check([(one, [target for target, _ in targets]) for one, targets in pulls])
        checked = [
            (one, [(target, checked_rows(ids, target.shape, f"key {one!r}")) for target, ids in targets])
            for one, targets in pulls
        ]
        self._check_updated([one for one, _ in pulls])
        return self._row_sparse_pull(checked, checked_priority(priority), async_op)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, async_op: bool = False) -> Work:
        """Push ``value`` and pull into ``out``, or into ``value`` itself, in one round trip."""
        self._check_open()
        values = pushed(key, value)
        targets = outs(key, value if out is None else out)
        self._check(values)
        self._check(targets)
        if self.updates_wait:
            raise ValueError(
                "pushpull() would pull before the update, which clip_global_norm has wait for update(); call push(), "
                "update() and pull()"
            )
        return self._pushpull(values, targets, checked_priority(priority), async_op)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """`init` with ``value`` and `pull` into ``out``."""
        self._check_open()
        priority = checked_priority(priority)
        values, pairs = single(key, value), outs(key, out)
        for (one, (tensor,)), (_, targets) in zip(values, pairs, strict=True):
            for target in targets:
                check_like(one, target, tensor.shape, tensor.dtype)
        self.init(key, value, async_op=async_op)
        return self._pull(pairs, priority, async_op)

    def assign(self, key: Any, value: Any) -> None:
        """Replace the stored value without an update; optimizer state stays."""
        self._check_open()
        pairs = single(key, value)
        self._check(pairs)
        self._assign(pairs)

    def fuse(self, bucket: Bucket) -> None:
        """Be told that these keys will come together, by `push_bucket` and `pull_bucket`; they stay keys as any other.

        Raises:
            KeyError: a key was not initialised.
            ValueError: one has another shape or dtype.
        """
        self._check_open()
        self._check_bucket(bucket)
        self._fuse(bucket)
        self._buckets.add(bucket)

    def push_bucket(
        self,
        bucket: Bucket,
        values: Sequence[BucketValue],
        keys: Collection[Key] | None = None,
        priority: int = 0,
        *,
        weight: float | None = None,
        async_op: bool = False,
    ) -> Work:
        """`push` those of the bucket's keys that are among ``keys`` (None: all), or `push_weighted` with a ``weight``.

        All workers push the bucket; a key that some of them leave out is the sum, or mean, of the others.

        Args:
            bucket: what was fused.
            values: one a device: a flat tensor, or the keys' tensors wherever they lie; a key that one device lacks is
                the sum of the others.
            keys: which.
            priority: larger goes first.
            weight: of this worker's values; None for a plain sum.
            async_op: return at once.
        """
        self._check_open()
        check_flat(bucket, values)
        if bucket not in self._buckets:
            self._check_bucket(bucket)
        present = bucket.keys if keys is None else [key for key in bucket.keys if key in keys]
        priority = checked_priority(priority)
        if weight is None:
            self._have_wait(present)
            return self._push_bucket(bucket, values, present, priority, async_op)
        check_weight(weight)
        check_mean(bucket.keys[0], bucket.dtype)
        self._have_wait(present)
        return self._push_bucket_weighted(bucket, values, present, float(weight), priority, async_op)

    def pull_bucket(
        self, bucket: Bucket, outs: Sequence[torch.Tensor], priority: int = 0, *, async_op: bool = False
    ) -> Work:
        """`pull` all keys of a bucket, into one flat tensor a device."""
        self._check_open()
        check_flat(bucket, outs)
        if bucket not in self._buckets:
            self._check_bucket(bucket)
        self._check_updated(bucket.keys)
        return self._pull_bucket(bucket, outs, checked_priority(priority), async_op)

    @property
    def updates_wait(self) -> bool:
        """Whether a push only sums, and `update` updates: with an optimizer that has ``clip_global_norm``."""
        return False

    def update(self) -> None:
        """Under ``clip_global_norm``: clip what was pushed since the last update by the norm of all of it, and update.

        All workers call it, and see the same norm: that of the sums. Under any other optimizer each push has updated
        when it came, and nothing is left to do.
        """
        self._check_open()
        if self.updates_wait:
            self._update()
            self._waiting.clear()

    def drop_updates(self) -> None:
        """Forget what was pushed and waits for `update`; all workers call it."""
        self._check_open()
        if self.updates_wait:
            self._drop_updates()
            self._waiting.clear()

    def set_gradient_compression(self, params: Mapping[str, Any] | None) -> None:
        """Compress what each device pushes before it travels; None ends it.

        What compression leaves out stays with the sender and goes with its next push (error feedback). Row-sparse
        values and integers travel as they are, and so do `init` and `assign`.

        Args:
            params: ``{"type": "2bit", "threshold": 0.5}``, fp16, bf16, topk.

        Raises:
            ValueError: an unknown type or option; or a store that does not compress.
        """
        self._check_open()
        self._set_compression(parse(params) if params is not None else None)

    @property
    def compresses(self) -> bool:
        """Whether what is pushed is compressed."""
        return False

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """What compression has left out so far, by ``<key as JSON>/<place of the sender>``: copies on the host."""
        return {}

    def load_compression_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Replace what compression has left out by what `compression_residuals` gave."""
        if residuals:
            raise ValueError(f"a {self.type!r} store keeps no compression residuals, but {len(residuals)} came for it")

    def set_updater(self, updater: Updater) -> None:  # noqa: ARG002  refused here
        """Have ``updater(key, summed, stored)`` change ``stored`` in place, once a push and key."""
        raise ValueError(f"a {self.type!r} store takes no updater; use set_optimizer")

    def set_optimizer(self, spec: Any) -> None:
        """Have each push update the stored value with an optimizer of torch.optim.

        Args:
            spec: as `OptimizerSpec.parse` takes it, e.g. ``("sgd", {"learning_rate": 0.1, "momentum": 0.9})``. With
                ``clip_global_norm`` in it pushes only sum, and `update` updates.

        Raises:
            ValueError: an unknown optimizer or argument, or a store that does not run it.
        """
        self._check_open()
        parsed = OptimizerSpec.parse(spec)
        if parsed.clip_global_norm is not None:
            self._check_clips_together()
        self._set_optimizer(parsed)
        self._waiting.clear()

    def save_optimizer_states(self, path: str | Path) -> None:
        """Write the optimizer's state to a safetensors file, aside first and then renamed."""
        from gangline.kvstore.optimizer import files

        state = self.optimizer_state()
        files.save(Path(path), state.tensors, state.header())

    def load_optimizer_states(self, path: str | Path) -> None:
        """Take over the optimizer state of a file; the learning rate stays as it is set.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a torn or foreign file, another optimizer, unknown keys, or other shapes.
        """
        self.load_optimizer_state(read_optimizer_states(path))

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate; RuntimeError without an optimizer."""
        raise RuntimeError(self._no_optimizer())

    def set_learning_rate(self, learning_rate: float) -> None:  # noqa: ARG002  refused here
        """Use this rate from the next push on."""
        raise RuntimeError(self._no_optimizer())

    def optimizer_state(self) -> OptimizerState:
        """A copy of the optimizer's state, on the host."""
        raise RuntimeError(self._no_optimizer())

    def load_optimizer_state(self, state: OptimizerState) -> None:  # noqa: ARG002  refused here
        """Replace the optimizer's state."""
        raise RuntimeError(self._no_optimizer())

    def _set_optimizer(self, spec: OptimizerSpec) -> None:  # noqa: ARG002  refused here
        raise ValueError(self._no_optimizer())

    def _check_clips_together(self) -> None:
        if self.is_async:
            raise ValueError(
                f"clip_global_norm wants the sums of all workers, but in a {self.type!r} store each push is an update "
                "of its own; expected a sync store, or clip_norm or clip_gradient"
            )
        if type(self)._update is KVStore._update:
            raise ValueError(f"a {self.type!r} store does not clip by clip_global_norm; use clip_norm or clip_gradient")

    def _have_wait(self, keys: Iterable[Key]) -> None:
        """Note what a push brings, where updates wait."""
        if not self.updates_wait:
            return
        new = set(keys)
        twice = new & self._waiting
        if twice:
            raise ValueError(
                f"keys {sorted(map(repr, twice))} were pushed already, and clip_global_norm has them wait for "
                "update(); call it, or drop_updates(), before the next push"
            )
        self._waiting |= new

    def _check_updated(self, keys: Iterable[Key]) -> None:
        early = self._waiting.intersection(keys) if self.updates_wait else ()
        if early:
            raise RuntimeError(
                f"the pull of keys {sorted(map(repr, early))} came before update(), for which clip_global_norm has "
                "their push wait; call update() first"
            )

    def _update(self) -> None:
        """Clip and apply what waits; a store that has `updates_wait` does it."""
        raise RuntimeError(self._no_optimizer())

    def _drop_updates(self) -> None:
        """Forget what waits; a store that has `updates_wait` does it."""
        raise RuntimeError(self._no_optimizer())

    def _no_optimizer(self) -> str:
        return f"a {self.type!r} store runs no optimizer; expected a store that does, such as 'local' or 'device'"

    @abc.abstractmethod
    def _init(self, pairs: Pairs, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work: ...

    def _push_weighted(self, pairs: Pushed, weight: float, priority: int, async_op: bool) -> Work:
        self._check_is_alone()
        return self._push([pair for pair in pairs if pair[1] and weight], priority, async_op)  # its mean is its own

    @abc.abstractmethod
    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work: ...

    def _row_sparse_pull(self, pulls: RowPulls, priority: int, async_op: bool) -> Work:  # noqa: ARG002  over at once
        for key, targets in pulls:
            for out, row_ids in targets:
                whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
                self._pull([(key, [whole])], priority, False).wait()
                give_rows(whole, out, row_ids)
        return Work.finished("row_sparse_pull")

    def _fuse(self, bucket: Bucket) -> None:  # noqa: B027  nothing is to be done where keys move one by one
        pass

    def _push_bucket(
        self, bucket: Bucket, values: Sequence[BucketValue], keys: Sequence[Key], priority: int, async_op: bool
    ) -> Work:
        return self._push(by_key(bucket, values, keys), priority, async_op)

    def _push_bucket_weighted(
        self,
        bucket: Bucket,
        values: Sequence[BucketValue],
        keys: Sequence[Key],
        weight: float,
        priority: int,
        async_op: bool,
    ) -> Work:
        self._check_is_alone()
        return self._push_bucket(bucket, values, keys if weight else (), priority, async_op)

    def _check_is_alone(self) -> None:
        if self.num_workers > 1:
            raise ValueError(f"a {self.type!r} store of {self.num_workers} workers takes no weights")

    def _pull_bucket(self, bucket: Bucket, outs: Sequence[torch.Tensor], priority: int, async_op: bool) -> Work:
        views = [bucket.views(out) for out in outs]
        return self._pull([(key, [view[key] for view in views]) for key in bucket.keys], priority, async_op)

    def _set_compression(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(f"a {self.type!r} store does not compress gradients")

    @abc.abstractmethod
    def _assign(self, pairs: Pairs) -> None: ...

    def close(self) -> None:
        """Finish what is under way and free what the store holds; closing again does nothing."""
        self._closed = True

    def __contains__(self, key: object) -> bool:
        return not self._closed and key in self._layout

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.type!r} store is closed; create a new one")

    def _check_bucket(self, bucket: Bucket) -> None:
        meta = bucket.empty(torch.device("meta"))
        self._check([(key, [view]) for key, view in bucket.views(meta).items()])

    def _check(self, pairs: Sequence[tuple[Key, Sequence[Value]]]) -> None:
        for key, tensors in pairs:
            if key not in self._layout:
                known = list(self._layout)
                shown = f"{known[:20]}{' ...' if len(known) > 20 else ''}"
                raise KeyError(f"key {key!r} was not initialised; known keys: {shown}")
            for tensor in tensors:
                check_like(key, tensor, *self._layout[key])


def read_optimizer_states(path: str | Path) -> OptimizerState:
    """The state in a file of `KVStore.save_optimizer_states`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a torn or foreign file.
    """
    from gangline.kvstore.optimizer import files

    tensors, header = files.load(Path(path))
    if "optimizer" not in header:
        raise ValueError(f"{path} holds no optimizer state; expected a file of save_optimizer_states")
    return OptimizerState.from_parts(header, tensors)
