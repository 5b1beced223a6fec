"""The KVStore interface: calls of users and frameworks, argument checks, and what a store must implement."""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from gangline.collectives.eager import run_eagerly
from gangline.collectives.errors import NestedCallError
from gangline.collectives.work import GuardedLock, Work
from gangline.kvstore import arguments
from gangline.kvstore.arguments import Pairs, Pushed, RowPulls
from gangline.kvstore.buckets import Bucket, BucketValues
from gangline.kvstore.compression import Compression, parse
from gangline.kvstore.default_store import num_workers
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.group.worker_group import WorkerGroup
from gangline.kvstore.optimizer import files, state_parts
from gangline.kvstore.optimizer.group import OptimizerGroup, OptimizerGroups
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec, check_learning_rate, check_not_negative
from gangline.kvstore.sparse import checked_rows, copy_rows
from gangline.kvstore.workload import split_batch

_log = logging.getLogger("gangline")
_Call = TypeVar("_Call", bound=Callable[..., Any])
_Result = TypeVar("_Result")

_NO_OPTIMIZER = "runs no optimizer; expected a store that does, such as 'local' or 'device'"
Updater = Callable[[Key, Any, torch.Tensor], None]
"""(key, sum of a push, stored value); the sum is a `RowSparse` if only row-sparse values were pushed."""


def refused_on_all_ranks(call: _Call) -> _Call:
    """Decorate a store's call: if argument checks fail on this rank, raise on every rank, so that no other rank blocks.

    ``_calls_begun`` counts calls that have communicated with other workers; these report later errors themselves.
    """

    @wraps(call)
    def checked(self: KVStore, *arguments: Any, **options: Any) -> Any:
        begun = self._calls_begun
        try:
            return call(self, *arguments, **options)
        except Exception as error:
            if self._calls_begun == begun and not self._closed and not self._is_nested(error):
                keys = arguments[0] if arguments else options.get("key", options.get("bucket"))
                self._refuse(call.__name__, error, keys)
            raise

    return cast(_Call, checked)


@run_eagerly
class KVStore(abc.ABC):
    """Key-value store for gradients and weights: `push` reduces gradients, `pull` returns weights.

    Create one with `gangline.create`. Methods have the names and semantics of MXNet's KVStore.

    - A key is a str or an int; ``3`` and ``"3"`` are different keys.
    - A value is a torch tensor or a numpy array, or a list of them, one per device. `push` and `pushpull` also take
      row-sparse values (`RowSparse`, torch.sparse_coo with one sparse axis). Shape and dtype are those given to `init`.
    - Every call that moves tensors takes one key with its value, or a list of keys with a list of values. It checks all
      arguments before it changes anything.
    - ``priority``: an int; pending calls of higher priority run first.
    - ``async_op=True`` returns at once with a `Work`. The tensors must not be read or written until ``Work.wait()``
      returns. With ``async_op=False`` the returned Work is complete. On GPUs, calls are ordered with the caller's
      current stream.

    Raises, in all calls: KeyError for a key that was not initialised; ValueError for a wrong shape, dtype or option;
    TypeError for a wrong Python type; RuntimeError after `close`, and in a call for one optimizer if there is none, or
    there are several and it names no group; and in stores of several processes GanglineError if a worker or server is
    dead, late or makes a different call.

    Attributes:
        type: name under which the store was created.

    For example:

        with gangline.create("device") as kv:
            kv.init("weight", torch.ones(2, 3))
            kv.set_optimizer(("sgd", {"learning_rate": 0.1}))
            kv.push("weight", [torch.ones(2, 3), torch.ones(2, 3)])  # gradients of two devices
            weight = torch.empty(2, 3)
            kv.pull("weight", weight)  # all elements are 1 - 0.1 * 2 = 0.8
    """

    def __init__(self, name: str) -> None:
        self.type = name
        self._layout: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._layout_lock = GuardedLock()
        self._buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()  # fused, so checked against the layout
        self._compressed: CompressedPushes | None = None
        self._groups = OptimizerGroups()
        self._attached: dict[Key, str] = {}  # the kind of front that has attached a key
        self._compresses_by_front = False
        self._calls_begun = 0
        self._closed = False

    # The job

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return 1

    @property
    def is_async(self) -> bool:
        """True if each push updates the stored value at once, without waiting for other workers."""
        return False

    @property
    def is_restarted(self) -> bool:
        """True if only this worker was restarted while the others waited (`gangline launch --restart-processes`).

        Calls before the first push, such as `init` and `set_optimizer`, then return what they returned to the other
        workers, and leave stored values unchanged.
        """
        return False

    @property
    def is_elastic(self) -> bool:
        """True if workers come and go while the job runs (`gangline launch --elastic`)."""
        return False

    @property
    def has_joined(self) -> bool:
        """True if this worker joined an elastic job after the job's start."""
        return False

    def has_ended(self) -> bool:
        """Return whether an elastic job is over: worker 0 has closed its store. Call it after a DeadNodeError."""
        return False

    @property
    def first_step(self) -> int:
        """Number of pushes of each key before this worker's restart; 0 without a restart.

        Read it after `init` and `set_optimizer`. A loop that pushes every key once per step continues from it:

            for step in range(kv.first_step, steps):
                kv.pushpull(keys, gradients(step), weights)
        """
        self._check_open()
        return 0

    @property
    def keeps_state(self) -> bool:
        """True if `keep` has an effect: under `gangline launch --restart-processes`."""
        return False

    def keep(self, state: Any) -> None:
        """Save this worker's state between two steps, for its restart; replaces the state saved before.

        The state must hold all that the next step depends on: weights, random states, the position in the data. A
        worker that is killed and restarted gets the state from `kept` and repeats the step: its pushes count once, and
        results that depend on the state alone are bitwise equal.

        Args:
            state: anything that can be pickled, of any size; it is copied.

        Raises:
            ValueError: if the state is None, which `kept` returns in a first start.
        """
        check_kept(state)

    def kept(self) -> Any:
        """Return the state that `keep` saved before this worker's restart, and continue from there; None without one.

        Call it right before the loop; until the next `keep` it returns the same again. Earlier calls, such as `init`
        and `set_optimizer`, must be the same in every start; pushes and collectives then continue as after `keep`.
        """
        return None

    def check_not_restarted(self, what: str) -> None:  # noqa: B027  stores without restarts have nothing to check
        """Fail the job if this worker was restarted alone.

        Args:
            what: what a restarted worker cannot continue, for the error message.

        Raises:
            RuntimeError: if this worker was restarted alone; the other workers get a DeadNodeError.
        """

    def share(self, samples: int, step: int | None = None) -> slice | None:  # noqa: ARG002
        """Begin the next step, and return this worker's share of its global batch.

        In an elastic job (`gangline launch --elastic`) call it once per step, before the pushes, and push each key once
        per step. The shares of all active workers make up the global batch.

        Args:
            samples: number of samples in the global batch, the same on all workers.
            step: number of the step from 0, to be checked; None: no check.

        Returns:
            Slice of the batch, possibly empty; None if this worker has left the job before this step.

        Raises:
            RuntimeError: in an elastic job, if this worker did not push each key once in each earlier step.
        """
        self._check_open()
        return split_batch(samples, [1.0] * self.num_workers)[self.rank]

    def leave(self) -> None:
        """Ask to leave an elastic job; go on until `share` returns None, then close the store.

        Raises:
            RuntimeError: if the job is not elastic, would have too few workers, or this is worker 0.
        """
        raise RuntimeError(
            f"a worker cannot leave this {self.type!r} store; expected a dist_* store, and gangline launch --elastic"
        )

    def barrier(self) -> None:
        """Wait until every worker has called `barrier`; workers in `join` count as present."""
        self.group.barrier("barrier")

    _barrier = barrier  # MXNet's name

    def join(self) -> int:
        """Stop taking part in reductions until all workers have called `join`.

        Until then the other workers' pushes are reduced without this worker. Call it when this worker runs out of data
        before the others.

        Returns:
            The rank that joined last.

        Raises:
            GanglineError: if a worker is dead, or does not call `join` within the timeout. In a ``dist_*`` store this
                worker has left the job then, because rounds have closed without it, and only `close` can follow.
        """
        self._check_open()
        return self.rank

    @property
    def address(self) -> str:
        """Address for `gangline.Reader`, HOST:PORT; "" if the store has no servers."""
        return ""

    def publish(self, version: int, extra: Mapping[Key, torch.Tensor] | None = None) -> None:
        """Keep the current values of all keys on the servers, for readers: `gangline.Reader`. Worker 0 alone calls it.

        They are the values after this worker's last push of each key, and after `update`. The call does not wait for
        the other workers' pushes. Servers keep the two newest versions that are whole.

        Args:
            version: number of the version, 0 or more, above those before. A worker 0 that was restarted alone may
                repeat versions, without an effect.
            extra: host tensors of further names that belong to the version, such as a network's buffers.

        Raises:
            RuntimeError: on another worker than 0, in stores other than ``dist_sync``, and if a push waits for
                `update`.
            ValueError: if the version is not above the last one, or a name of ``extra`` is a key of the store.

        For example:

            for step in range(steps):
                kv.pushpull(keys, gradients(step), weights)
                if step % 100 == 0 and kv.rank == 0:
                    kv.publish(step, dict(network.named_buffers()))
        """
        self._check_open()
        if type(version) is not int:
            raise TypeError(f"version is {version!r}; expected an int")
        if not 0 <= version < 1 << 62:
            raise ValueError(f"version is {version}; expected 0 or more")
        extra = {} if extra is None else extra
        for key, value in extra.items():
            if not isinstance(key, (str, int)) or not isinstance(value, torch.Tensor):
                raise TypeError(f"extra has {key!r}: a {type(value).__name__}; expected tensors by str or int")
            if key in self._layout:
                raise ValueError(f"extra has key {key!r}, which the store holds; expected other names")
        self._publish(version, extra)

    def _publish(self, version: int, extra: Mapping[Key, torch.Tensor]) -> None:  # noqa: ARG002
        raise RuntimeError(
            f"a {self.type!r} store has no servers that keep version {version} for readers; expected dist_sync"
        )

    def dead_nodes(self) -> list[str]:
        """Return the names of workers and servers known to be dead, such as ``"worker 1"``."""
        return []

    def num_dead_nodes(self, timeout: float = 60.0) -> int:
        """Return the number of workers and servers that are dead or, in ``dist_*`` stores, silent for ``timeout``.

        Args:
            timeout: seconds without a sign of life. A process is dead after GANGLINE_HEARTBEAT_LIMIT, 10 s by default,
                regardless of ``timeout``; ``allreduce`` counts dead workers only.
        """
        return len({*self.dead_nodes(), *self._silent_nodes(timeout)})

    # Values

    @refused_on_all_ranks
    def init(self, key: Any, value: Any, *, async_op: bool = False) -> Work:
        """Initialise a key with a copy of ``value``; with several workers, with rank 0's.

        Collective: all workers must call it, with the same keys, shapes and dtypes.

        Args:
            key: one key or a list of keys.
            value: one tensor per key, of any shape; a sparse one is stored dense. In a dist_* store a `RowSparse` makes
                a table, of which calls cost in proportion to the rows that they move; a part of it that a server holds
                takes no memory until rows of it are not 0.
            async_op: return at once.

        Raises:
            ValueError: if the key is initialised already, or occurs twice in the list.
            MismatchError: if the workers' keys, shapes or dtypes differ.

        For example:

            kv.init(["weight", "bias"], [torch.randn(4, 3), torch.zeros(4)])
        """
        self._check_open()
        pairs = arguments.single(key, value)
        with self._layout_lock:
            seen = set(self._layout)
            for one, _ in pairs:
                if one in seen:
                    raise ValueError(f"key {one!r} is initialised already; expected a new key (push replaces a value)")
                seen.add(one)
            for one, (tensor,) in pairs:
                self._layout[one] = (tensor.shape, tensor.dtype)
        try:
            return self._init(pairs if self._takes_tables else arguments.dense(pairs), async_op)
        except BaseException:  # raised again
            self._forget([one for one, _ in pairs])
            raise

    @refused_on_all_ranks
    def push(self, key: Any, value: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """Sum ``value`` over devices and workers, and update the stored value with the sum.

        An optimizer or updater, if set, runs once per key. Without one, the sum replaces the stored value
        (``dist_async`` and ``dist_device_async`` add it instead). A key that occurs twice in one call is pushed once,
        with the sum. Only the rows of a row-sparse value are sent and updated.

        Args:
            key: one key or a list of keys.
            value: tensor, `RowSparse`, or a list of them, one per device; for a list of keys a list of these.
            priority: calls of higher priority run first.
            async_op: return at once.

        Raises:
            ValueError: if the optimizer does not support a value, or a value to be compressed holds NaN or infinity.

        For example:

            kv.push("weight", [network.weight.grad for network in replicas])
        """
        self._check_open()
        pairs = arguments.checked(arguments.pushed, key, value, self._layout)
        if type(priority) is not int:
            priority = arguments.checked_priority(priority)
        if not self._groups.all:
            return self._push(pairs, priority, async_op)
        self._groups.of_keys(keys := arguments.keys_of(pairs))
        return self._push_once(keys, partial(self._push, pairs, priority, async_op))

    def pull(
        self,
        key: Any,
        out: Any,
        priority: int = 0,
        ignore_sparse: bool = True,  # noqa: ARG002  MXNet's
        *,
        async_op: bool = False,
    ) -> Work:
        """Copy the stored value into ``out``, after this worker's last push of the key has been applied.

        Args:
            key: one key or a list of keys.
            out: tensor of the key's shape and dtype, or a list of them, one per device; for a list of keys a list of
                those.
            priority: calls of higher priority run first.
            ignore_sparse: MXNet's argument; without effect, because stored values are dense.
            async_op: return at once.

        Raises:
            RuntimeError: if a push of the key still waits for `update`.

        For example:

            kv.pull("weight", [network.weight for network in replicas])
        """
        self._check_open()
        pairs = arguments.checked(arguments.outs, key, out, self._layout)
        if self._groups.updates_wait:
            self._check_not_pending(arguments.keys_of(pairs))
        if type(priority) is not int:
            priority = arguments.checked_priority(priority)
        return self._pull(pairs, priority, async_op)

    @refused_on_all_ranks
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, async_op: bool = False) -> Work:
        """Push ``value`` and pull into ``out``, in one round trip.

        Args:
            key: one key or a list of keys.
            value: as for `push`.
            out: as for `pull`; None writes into ``value``.
            priority: calls of higher priority run first.
            async_op: return at once.

        Raises:
            ValueError: if the optimizer has ``clip_global_norm``, which needs `update` between push and pull.

        For example:

            kv.pushpull("gradient", [a, b])  # all-reduce: a and b both become a + b
        """
        self._check_open()
        values = arguments.checked(arguments.pushed, key, value, self._layout)
        targets = arguments.checked(arguments.outs, key, value if out is None else out, self._layout)
        group = self._groups.of_keys(arguments.keys_of(values)) if self._groups.all else None
        if group is not None and group.updates_wait:
            raise ValueError(
                "pushpull() would pull before the update, because clip_global_norm delays updates until update(); call "
                "push(), update() and pull()"
            )
        return self._pushpull(values, targets, arguments.checked_priority(priority), async_op)

    @refused_on_all_ranks
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0, *, async_op: bool = False) -> Work:
        """Initialise a key and pull it into ``out``: `init` and `pull` in one call.

        Collective: all workers must call it; rank 0's value is broadcast.

        Args:
            key: one key or a list of keys.
            value: as for `init`.
            out: as for `pull`; may be ``value``.
            priority: calls of higher priority run first.
            async_op: return at once.

        For example:

            kv.broadcast("weight", network.weight, network.weight)  # every rank has rank 0's weight
        """
        self._check_open()
        priority = arguments.checked_priority(priority)
        values, pairs = arguments.single(key, value), arguments.outs(key, out)
        for (one, (tensor,)), (_, targets) in zip(values, pairs, strict=True):
            for target in targets:
                arguments.check_like(one, target, tensor.shape, tensor.dtype)
        started = self.init(key, value, async_op=async_op)
        return self._pull(pairs, priority, async_op).fail_with(started)

    def row_sparse_pull(
        self, key: Any, out: Any, priority: int = 0, row_ids: Any = None, *, async_op: bool = False
    ) -> Work:
        """Copy some rows of the stored value into ``out``.

        Args:
            key: one key or a list of keys.
            out: `RowSparse` of the key's shape, replaced by these rows in ascending order; a dense tensor of the key's
                shape, in which only these rows are written; or a list of them.
            priority: calls of higher priority run first.
            async_op: return at once.
            row_ids: row numbers, of any shape and in any order, with or without duplicates; or a list of them, one per
                entry of ``out``. For a list of keys a list of these.

        Raises:
            ValueError: if a row number is outside the table.
            TypeError: if ``row_ids`` is missing or does not hold integers.

        For example:

            rows = gangline.RowSparse([], torch.empty(0, 16), (1000, 16))
            kv.row_sparse_pull("embedding", rows, row_ids=[5, 2, 5])  # rows.indices is [2, 5]
        """
        self._check_open()
        if row_ids is None:
            raise TypeError("row_sparse_pull() got no row_ids; expected the rows' numbers (pull() gives all rows)")
        pulls = arguments.row_pulls(key, out, row_ids)
        arguments.check_pairs([(one, [target for target, _ in targets]) for one, targets in pulls], self._layout)
        checked = [
            (one, [(target, checked_rows(ids, target.shape, f"key {one!r}")) for target, ids in targets])
            for one, targets in pulls
        ]
        self._check_not_pending(arguments.keys_of(pulls))
        return self._row_sparse_pull(checked, arguments.checked_priority(priority), async_op)

    # Optimizer

    @refused_on_all_ranks
    def set_optimizer(
        self,
        spec: Any,
        *,
        keys: Iterable[Key] | None = None,
        shard: str | None = None,
        memory: Sequence[float] | str = "auto",
    ) -> OptimizerGroup:
        """Update stored values with an optimizer of torch.optim at every push.

        Collective: all workers must call it, with the same optimizer.

        Args:
            keys: keys that the optimizer updates, initialised or not. Each such group has an optimizer, learning rate
                and state of its own, and a push needs a call for each group. None: all keys that are in no group; the
                optimizer replaces the one that was set so before.
            spec: as for `OptimizerSpec.parse`: a name or class of torch.optim, or ``(name or class, arguments)``, or a
                dict of these by patterns of keys. With ``clip_global_norm`` among the arguments a push only sums, and
                `update` updates.
            shard: "optimizer": each worker of an allreduce store, or each device of a device store, owns keys in
                proportion to its memory. It holds the optimizer's state of these keys only, updates them, and
                broadcasts the new weights. None: every worker updates all keys, and devices update equal parts.
            memory: relative memory of each worker or device, for sharding; "auto": free memory of workers at this call,
                and of devices at their first use.

        Returns:
            The group, whose learning rate and state can be read and set.

        Raises:
            ValueError: if the optimizer or an argument is unknown, the store does not support it, or keys have an
                optimizer of their own already.

        For example:

            kv.set_optimizer(("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}))
        """
        self._check_open()
        own = None if keys is None else frozenset(keys)
        self._check_unattached("set_optimizer", own)
        spec = OptimizerSpec.parse(spec)
        if own is not None and spec.parts:
            spec.check_keys(own, own)
        return self._add_group(spec, own, shard, memory)

    def _check_unattached(self, call: str, keys: frozenset[Key] | None) -> None:
        """Raise ValueError if a `Trainer`, for example, has attached one of the keys (None: any), or a group has it."""
        taken = {key: owner for key, owner in self._attached.items() if keys is None or key in keys}
        if taken:
            raise ValueError(
                f"{call} would change keys {list(taken)[:20]} of a {next(iter(taken.values()))}, which has set their "
                f"optimizer; expected {'' if keys is None else 'other '}keys of your own"
            )
        again = [key for key in keys or () if (group := self._groups.of(key)) is not None and group.keys is not None]
        if again:
            raise ValueError(f"keys {again[:20]} have an optimizer of their own already; expected other keys")

    def _add_group(
        self,
        spec: OptimizerSpec,
        keys: frozenset[Key] | None,
        shard: str | None,
        memory: Sequence[float] | str,
        owner: str = "",
        number: int | None = None,
    ) -> OptimizerGroup:
        if spec.clip_global_norm is not None:
            self._check_clips_together()
        arguments.check_shard(shard)
        self._check_shard(shard, memory)
        if number is None:
            number = 0 if keys is None else max(self._groups.all, default=0) + 1
        group = OptimizerGroup(self, number, spec, keys, owner)
        self._set_optimizer(group)
        self._groups.add(group)
        return group

    def set_updater(self, updater: Updater) -> None:  # noqa: ARG002  refused here
        """Update stored values with a custom function at every push; single-process stores only.

        Args:
            updater: called as ``updater(key, summed, stored)`` once per push and key; it changes ``stored`` in place.

        Raises:
            TypeError: if it is not callable.
            ValueError: if the store takes no updater.

        For example:

            kv.set_updater(lambda key, gradient, weight: weight.sub_(0.1 * gradient))
        """
        raise ValueError(f"a {self.type!r} store takes no updater; use set_optimizer")

    def _set_updater(self, updater: Updater) -> None:
        """Call `set_updater`; MXNet's name."""
        self.set_updater(updater)

    @refused_on_all_ranks
    def update(self, *, group: OptimizerGroup | None = None) -> None:
        """Clip the gradients pushed since the last update to a global norm and apply them; ``clip_global_norm`` only.

        The norm is that of the sums over all workers, of the keys of a group. Without ``clip_global_norm`` this call
        does nothing. Collective: all workers must call it.

        Args:
            group: group to update; None: all groups.
        """
        self._end_pending(group, self._update)

    def _end_pending(self, group: OptimizerGroup | None, action: Callable[[OptimizerGroup], None]) -> None:
        self._check_open()
        for one in [*self._groups.all.values()] if group is None else [group]:
            if one.updates_wait:
                action(one)
                one.pending.clear()

    @property
    def learning_rate(self) -> float:
        """The only optimizer's learning rate."""
        return self.learning_rate_of(None)

    def learning_rate_of(self, group: OptimizerGroup | None) -> float:
        """Return the learning rate of a group; None: of the only optimizer."""
        self._check_open()
        group = self._group_for("learning_rate", group)
        return self._rate_of(group)

    def set_learning_rate(self, learning_rate: float, *, group: OptimizerGroup | None = None) -> None:
        """Set the learning rate from the next push on; with several workers, rank 0's value is used.

        While rank 0 is inside `join`, the value of the lowest rank outside it that has set one is used; after `join`
        it is rank 0's value. With ``dist_async`` the servers have the value when the call returns, so that it also
        applies to pushes that other workers begin afterwards.

        Raises:
            TypeError: if it is not a number.
            ValueError: if it is negative, NaN or infinite.
            StallError: if a server of an async store does not answer within the timeout.
            DeadNodeError: if a server of an async store has died.
        """
        self._check_open()
        check_learning_rate(learning_rate)
        group = self._group_for("set_learning_rate", group)
        self._set_rate(group, float(learning_rate))

    def save_optimizer_states(self, path: str | Path, *, group: OptimizerGroup | None = None) -> None:
        """Write the optimizer's state to a safetensors file; an existing file is replaced atomically.

        Collective with ``shard="optimizer"``; rank 0 writes. In a ``dist_*`` store each server writes a part beside the
        file above 4 GiB, and the file names the parts; other workers are answered meanwhile. The path must then be on a
        disk that this worker's host and the servers' share. Parts have names such as FILE.1f2e3d4c-0.part: move them
        with the file.

        Args:
            path: the file.
            group: group of keys, as `set_optimizer` returns it; None: the only one.

        Raises:
            OSError: if the file cannot be written.
            StallError: if a server does not go on within the timeout.
        """
        state = self.optimizer_state(group=group)
        files.save(Path(path), state.tensors, state.header())

    @refused_on_all_ranks
    def load_optimizer_states(self, path: str | Path, *, group: OptimizerGroup | None = None) -> None:
        """Load the optimizer's state from a file; the learning rate does not change.

        Collective: all workers must call it; rank 0's file is used.

        Args:
            path: the file.
            group: group of keys, as `set_optimizer` returns it; None: the only one.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged or not gangline's, or does not match the optimizer, keys or shapes.
        """
        self._check_open()
        self._load_file(self._group_for("load_optimizer_states", group), Path(path))

    # Compression

    @refused_on_all_ranks
    def set_gradient_compression(self, params: Mapping[str, Any] | None) -> None:
        """Compress the gradients that each device or worker pushes; None turns compression off.

        The rounding error stays with the sender and is added to its next push (error feedback). Row-sparse values,
        integers, and the values of `init` and `assign` are not compressed. Collective: all workers must call it.

        Args:
            params: ``{"type": "2bit", "threshold": 0.5}``; the types are 2bit, fp16, bf16 and topk.

        Raises:
            ValueError: if the type or an option is unknown, or the store does not compress.
            MismatchError: if the workers' parameters differ.
        """
        self._check_open()
        self._set_compression(parse(params) if params is not None else None)

    # Lifetime

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Finish pending calls and release the store's memory; a second call does nothing."""
        self._closed = True

    def __contains__(self, key: object) -> bool:
        return not self._closed and key in self._layout

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For Module, Trainer and other frameworks: weighted means, buckets, checkpoints. MXNet has none of these.

    _serves_one_process = False

    @refused_on_all_ranks
    def attach(
        self,
        owner: str,
        keys: Collection[Key],
        spec: OptimizerSpec | None,
        *,
        shard: str | None = None,
        memory: Sequence[float] | str = "auto",
        compression: Mapping[str, Any] | None = None,
        replaces: OptimizerGroup | None = None,
    ) -> OptimizerGroup | None:
        """Take keys and set their optimizer for a front, which then initialises the keys. Collective.

        Args:
            owner: kind of front, for error messages: "Trainer", "Module" or "DistributedOptimizer".
            keys: keys of the front; none if the store needs no values of it.
            spec: optimizer of the keys; None if the front updates the weights and the store must return sums.
            shard: as for `set_optimizer`.
            memory: as for `set_optimizer`.
            compression: as for `set_gradient_compression`; None: unchanged.
            replaces: an earlier group of the same front, whose keys and optimizer it takes again.

        Returns:
            The group of the keys; None without ``spec``.

        Raises:
            ValueError: if the store holds one of the keys already, or has an optimizer or compression that this front
                cannot use.
            RuntimeError: if this worker was restarted alone, or the job is elastic, and the front cannot continue then.
        """
        self._check_open()
        if self._serves_one_process and (workers := num_workers()) > 1:
            _log.warning(
                "a %s uses a %r store, which serves this process alone, in a job of %d workers: each trains its own "
                "weights; leave kvstore out, or name 'allreduce' or a dist_* store",
                *(owner, self.type, workers),
            )
        known = (replaces.keys if replaces is not None else None) or frozenset()
        held = [key for key in keys if key in self and key not in known]
        if held:
            raise ValueError(
                f"the {self.type!r} store holds keys {held} already; give the {owner} others, or a store of its own"
            )
        others = {owner for key, owner in self._attached.items() if key not in known}
        if others and keys:
            [other, *_] = others
            self.check_not_restarted(f"training by a {other} and a {owner} on one store")
            given = None if compression is None else parse(compression)
            current = None if self._compressed is None else self._compressed.compression
            if given != current and (given is not None or self._compresses_by_front):
                raise ValueError(
                    f"the {self.type!r} store serves a {other} with other compression, which is that of all keys; give "
                    f"the {owner} the same compression, or a store of its own"
                )
        elif compression is not None:
            self.set_gradient_compression(compression)
            self._compresses_by_front = True
        group = None
        if spec is not None:
            number = replaces.number if replaces is not None else None
            group = self._add_group(spec, known.union(keys), shard, memory, owner, number)
        elif keys:
            if 0 in self._groups.all:
                raise ValueError(f"the {self.type!r} store runs an optimizer of its own; expected one without")
            self.check_not_restarted(f"a {owner}")
        self._attached.update(dict.fromkeys(keys, owner))
        return group

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather bytes; return them in rank order, with b"" for workers in `join`.

        Collective: all workers must call it.
        """
        return [b"" if one is None else one for one in self.group.all_gather(data, "exchange")]

    @property
    def group(self) -> WorkerGroup:
        """Collectives of all workers on plain data."""
        return WorkerGroup(self.rank, self.num_workers, self._exchange)

    @refused_on_all_ranks
    def assign(self, key: Any, value: Any) -> None:
        """Overwrite the stored value with rank 0's ``value``; the optimizer does not run and keeps its state.

        Collective: all workers must call it. The arguments are those of `init`.
        """
        self._check_open()
        pairs = arguments.dense(arguments.single(key, value))
        arguments.check_pairs(pairs, self._layout)
        self._assign(pairs)

    @refused_on_all_ranks
    def push_weighted(self, key: Any, value: Any, weight: float, priority: int = 0, *, async_op: bool = False) -> Work:
        """Push this worker's part of a weighted mean over workers: sum(weight * value) / sum(weight).

        Like `push`, with the mean in place of the sum. A key is not updated if no worker with weight has a value.

        Args:
            key: one key or a list of keys; the same on all workers.
            value: as for `push`, of floating-point numbers; None if this worker has no value for a key.
            weight: weight of this worker's values, 0 or more, such as the number of samples that they average.
            priority: calls of higher priority run first.
            async_op: return at once.

        Raises:
            TypeError: if the weight is not a number.
            ValueError: if the weight is negative or not finite, or a key's dtype has no mean.
        """
        self._check_open()
        pairs = arguments.pushed_or_none(key, value)
        arguments.check_pairs(pairs, self._layout)
        check_not_negative("weight", weight)
        for one, _ in pairs:
            arguments.check_mean(one, self._layout[one][1])
        priority = arguments.checked_priority(priority)
        self._groups.of_keys(keys := arguments.keys_of(pairs))
        return self._push_once(keys, partial(self._push_weighted, pairs, float(weight), priority, async_op))

    @refused_on_all_ranks
    def fuse(self, bucket: Bucket, flat: torch.Tensor | None = None) -> None:
        """Store the keys of a bucket contiguously, for `push_bucket` and `pull_bucket`; each key stays usable alone.

        Collective: all workers must call it.

        Args:
            bucket: keys to store together.
            flat: tensor of shape (bucket.numel,) in which the store may hold the values, if it stores them in this
                process and on this device; updates then write to it.

        Raises:
            KeyError: if a key was not initialised.
            ValueError: if a key has another shape or dtype than in the bucket.
        """
        self._check_open()
        self._check_bucket(bucket)
        self._groups.of_keys(bucket.keys)
        self._fuse(bucket, flat)
        self._buckets.add(bucket)

    @refused_on_all_ranks
    def push_bucket(
        self,
        bucket: Bucket,
        values: BucketValues,
        keys: Collection[Key] | None = None,
        priority: int = 0,
        *,
        weight: float | None = None,
        async_op: bool = False,
    ) -> Work:
        """Push the keys of a bucket, as `push` or, with a ``weight``, as `push_weighted`.

        Collective. A key that some workers leave out is reduced over the other workers.

        Args:
            bucket: bucket to push. Without an earlier `fuse` its keys are sent one by one.
            values: one value per device: a flat tensor of shape (bucket.numel,), or the keys' tensors. A key that a
                device lacks is summed over the other devices.
            keys: keys to push; None for all.
            priority: calls of higher priority run first.
            weight: weight of this worker's values, 0 or more; None for a plain sum.
            async_op: return at once.
        """
        self._check_open()
        arguments.check_flat(bucket, values)
        if bucket not in self._buckets:
            self._check_bucket(bucket)
        present = bucket.keys
        if keys is not None and keys != present:
            chosen = set(keys)
            present = [key for key in present if key in chosen]
        priority = arguments.checked_priority(priority)
        if weight is not None:
            check_not_negative("weight", weight)
            arguments.check_mean(bucket.keys[0], bucket.dtype)
            weight = float(weight)
        if not self.updates_wait:
            return self._push_bucket(bucket, values, present, weight, priority, async_op)
        push = partial(self._push_bucket, bucket, values, present, weight, priority, async_op)
        return self._push_once(present, push)

    def refuse(self, call: str, error: Exception, keys: Bucket | Key | None = None) -> None:
        """Report that this worker cannot make a call; the workers that make it raise the error. Collective.

        Args:
            call: name of the call.
            error: reason.
            keys: bucket or key of the call, if the call is a push.

        Raises:
            MismatchError: in ``allreduce`` stores, as on the other workers.
        """
        self._check_open()
        self._refuse(call, error, keys)

    def pull_bucket(
        self, bucket: Bucket, outs: Sequence[torch.Tensor], priority: int = 0, *, async_op: bool = False
    ) -> Work:
        """Pull all keys of a bucket into one flat tensor of shape (bucket.numel,) per device."""
        self._check_open()
        arguments.check_flat(bucket, outs)
        if bucket not in self._buckets:
            self._check_bucket(bucket)
        self._check_not_pending(bucket.keys)
        return self._pull_bucket(bucket, outs, arguments.checked_priority(priority), async_op)

    @property
    def updates_wait(self) -> bool:
        """True if pushed gradients wait for `update`: an optimizer has ``clip_global_norm``."""
        return self._groups.updates_wait

    @refused_on_all_ranks
    def drop_updates(self, *, group: OptimizerGroup | None = None) -> None:
        """Discard the pushes that wait for `update`, which takes the same argument. Collective."""
        self._end_pending(group, self._drop_updates)

    @property
    def compresses(self) -> bool:
        """True if pushes are compressed."""
        return self._compressed is not None

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """Return copies of this worker's compression residuals on the host; names are ``<key as JSON>/<sender>``."""
        self._check_open()
        return {} if self._compressed is None else self._run_exclusive(self._compressed.residuals)

    def load_compression_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Load compression residuals that `compression_residuals` returned on this worker.

        Raises:
            ValueError: if the store does not compress, or a key or shape does not match.
        """
        self._check_open()
        if compressed := self._compressed:
            self._run_exclusive(lambda: compressed.load_residuals(residuals, self._layout))
        elif residuals:
            raise ValueError(f"a {self.type!r} store keeps no compression residuals, but got {len(residuals)}")

    def optimizer_state(self, *, group: OptimizerGroup | None = None) -> OptimizerState:
        """Return a copy of the optimizer's state on the host. Collective with ``shard="optimizer"``.

        Args:
            group: group of keys, as `set_optimizer` returns it; None: the only one.
        """
        self._check_open()
        group = self._group_for("optimizer_state", group)
        return self._state_of(group)

    @refused_on_all_ranks
    def load_optimizer_state(self, state: OptimizerState, *, group: OptimizerGroup | None = None) -> None:
        """Load the optimizer's state. Collective: all workers must call it; rank 0's state is used.

        Args:
            state: the state.
            group: group of keys, as `set_optimizer` returns it; None: the only one.

        Raises:
            ValueError: if the state does not match the optimizer, keys or shapes.
        """
        self._check_open()
        group = self._group_for("load_optimizer_state", group)
        self._load_state(group, lambda: state)

    # What a store implements; arguments are checked already

    @abc.abstractmethod
    def _init(self, pairs: Any, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work: ...

    @abc.abstractmethod
    def _assign(self, pairs: Pairs) -> None: ...

    # Optional for a store: optimizer, compression, several workers, fused buckets

    def _exchange(self, data: bytes, name: str, root: int | None) -> list[bytes]:  # noqa: ARG002  of several workers
        """All-gather bytes, see `worker_group.Exchange`."""
        self._check_open()
        return [data]

    def _run_exclusive(self, operation: Callable[[], _Result]) -> _Result:
        """Return the result of an operation on state that all keys share, run after all pending operations."""
        return operation()

    def _silent_nodes(self, seconds: float) -> list[str]:  # noqa: ARG002  where a scheduler watches them
        """Return the names of processes that have been silent for ``seconds``."""
        return []

    def _refuse(self, call: str, error: Exception, keys: object = None) -> None:  # noqa: B027  one worker tells nobody
        """Report to the other workers that this rank refuses a call because of an error; may raise another error.

        Args:
            call: name of the call.
            error: reason.
            keys: first argument of the call, not checked: a key, a list of keys or a bucket.
        """

    def _push_weighted(self, pairs: Pushed, weight: float, priority: int, async_op: bool) -> Work:
        if self.num_workers > 1:
            raise ValueError(f"a {self.type!r} store of {self.num_workers} workers takes no weights")
        return self._push([pair for pair in pairs if pair[1] and weight], priority, async_op)  # the mean of one worker

    def _row_sparse_pull(self, pulls: RowPulls, priority: int, async_op: bool) -> Work:  # noqa: ARG002
        for key, targets in pulls:
            for out, row_ids in targets:
                whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
                self._pull([(key, [whole])], priority, False).wait()
                copy_rows(whole, out, row_ids)
        return Work.finished("row_sparse_pull")

    def _fuse(self, bucket: Bucket, flat: torch.Tensor | None) -> None:  # noqa: B027  optional: keys can be sent one by one
        pass

    def _push_bucket(
        self, bucket: Bucket, values: BucketValues, keys: list[Key], weight: float | None, priority: int, async_op: bool
    ) -> Work:
        pairs = arguments.by_key(bucket, values, keys)
        if weight is None:
            return self._push(pairs, priority, async_op)
        return self._push_weighted(pairs, weight, priority, async_op)

    def _pull_bucket(self, bucket: Bucket, outs: Sequence[torch.Tensor], priority: int, async_op: bool) -> Work:
        views = [bucket.views(out) for out in outs]
        return self._pull([(key, [view[key] for view in views]) for key in bucket.keys], priority, async_op)

    def _check_shard(self, shard: str | None, memory: Sequence[float] | str) -> None:  # noqa: ARG002  refused here
        """Prepare the next optimizer's sharding; refused with several workers by stores that have none."""
        if shard is not None and self.num_workers > 1:
            raise ValueError(
                f"a {self.type!r} store keeps the optimizer's state on its servers; shard is for 'allreduce'"
            )

    def _set_optimizer(self, group: OptimizerGroup) -> None:  # noqa: ARG002  refused here
        raise ValueError(f"a {self.type!r} store {_NO_OPTIMIZER}")

    def _load_file(self, group: OptimizerGroup, path: Path) -> None:
        """Load a group's state from rank 0's file."""
        self._load_state(group, lambda: state_parts.load_whole(path))

    # Of a store with an optimizer, once `_set_optimizer` has returned
    _rate_of: Callable[[OptimizerGroup], float]
    _set_rate: Callable[[OptimizerGroup, float], None]
    _state_of: Callable[[OptimizerGroup], OptimizerState]
    _load_state: Callable[[OptimizerGroup, Callable[[], OptimizerState]], None]
    """Load the state that the function returns on rank 0."""
    _update: Callable[[OptimizerGroup], None]
    """Clip and apply the pending pushes of a group; missing in a store without ``clip_global_norm``."""
    _drop_updates: Callable[[OptimizerGroup], None]
    """Discard the pending pushes of a group."""

    def _set_compression(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(f"a {self.type!r} store does not compress gradients")

    # Checks

    _when_closed = "create a new one"
    _takes_tables = False  # True if `_init` takes a `RowSparse` as well

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.type!r} store is closed; {self._when_closed}")
        self._check_caller()

    def _check_caller(self) -> None:  # noqa: B027  for stores whose calls wait
        """Raise NestedCallError if this thread is inside a call of this store, and not in an updater.

        In a process that was forked from the store's, raise GanglineError.
        """

    def _is_nested(self, error: Exception) -> bool:
        """Return whether this call raises an error because it is inside another one, of which it must not tell."""
        if isinstance(error, NestedCallError):
            with suppress(NestedCallError):
                self._check_caller()
                return False
            return True
        return False

    def _check_bucket(self, bucket: Bucket) -> None:
        meta = bucket.empty(torch.device("meta"))
        arguments.check_pairs([(key, [view]) for key, view in bucket.views(meta).items()], self._layout)

    def _check_clips_together(self) -> None:
        if self.is_async:
            raise ValueError(
                f"clip_global_norm needs the sums of all workers, but in a {self.type!r} store each push updates by "
                "itself; expected a sync store, or clip_norm or clip_gradient"
            )
        if not hasattr(self, "_update"):
            raise ValueError(f"a {self.type!r} store does not clip by clip_global_norm; use clip_norm or clip_gradient")

    def _push_once(self, keys: Collection[Key], push: Callable[[], Work]) -> Work:
        """Make a push of keys; with ``clip_global_norm`` they then wait for `update`, and only one push each may."""
        if twice := self._pending_among(keys):
            raise ValueError(
                f"keys {twice} were pushed already, and clip_global_norm delays their update until update(); call it, "
                "or drop_updates(), before the next push"
            )
        work = push()
        for key in keys if self.updates_wait else ():
            if (group := self._groups.of(key)) is not None and group.updates_wait:
                group.pending[key] = work
        return work

    def _check_not_pending(self, keys: Iterable[Key]) -> None:
        if pending := self._pending_among(keys):
            raise RuntimeError(
                f"keys {pending} were pulled before update(), which their push waits for because of clip_global_norm; "
                "call update() first"
            )

    def _pending_among(self, keys: Iterable[Key]) -> list[str]:
        if not self.updates_wait:
            return []
        pending = {key: group.pending.get(key) for key in keys if (group := self._groups.of(key)) is not None}
        return sorted(repr(key) for key, work in pending.items() if work is not None and work.exception() is None)

    def _forget(self, keys: Iterable[Key]) -> None:
        """Drop keys whose `init` has failed, so that `init` can be called again."""
        with self._layout_lock:
            for key in keys:
                self._layout.pop(key, None)

    def _group_for(self, call: str, group: OptimizerGroup | None) -> OptimizerGroup:
        """Return the group that a call is for; None: the only one. RuntimeError if there are several or none."""
        if not self._groups.all and type(self)._set_optimizer is KVStore._set_optimizer:
            raise RuntimeError(f"a {self.type!r} store {_NO_OPTIMIZER}")
        return self._groups.only(call) if group is None else group


def check_kept(state: Any) -> None:
    """Raise ValueError if a state for `KVStore.keep` is None."""
    if state is None:
        raise ValueError(
            "keep() got None, which kept() returns in a first start; expected what the next step depends on, at least "
            "its number"
        )
