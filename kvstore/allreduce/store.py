"""The `allreduce` store: several workers and no server; collectives add up, and every worker updates."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from gangline.collectives.compression import Compression
from gangline.collectives.engine.reduction import check_dtype
from gangline.collectives.work import Work, WorkQueue
from gangline.kvstore.allreduce.negotiation import Meeting, WorkerGroup
from gangline.kvstore.allreduce.reduction import BucketPart, Payloads, summed_over_workers
from gangline.kvstore.allreduce.state_broadcast import first_state
from gangline.kvstore.arguments import Pairs, Pushed, Value, by_key, merged
from gangline.kvstore.buckets import Bucket, BucketValue
from gangline.kvstore.interface import KVStore
from gangline.kvstore.local import LocalStore
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.registry import register
from gangline.kvstore.sparse import RowSparse

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _telling(call: _Call) -> _Call:
    """Have a call that is refused before it begins be an error of all workers, who would wait for it else."""

    @wraps(call)
    def told(self: AllReduceStore, *arguments: Any, **options: Any) -> Any:
        begun = self._begun
        try:
            return call(self, *arguments, **options)
        except Exception as error:
            if self._begun == begun:
                self._refuse(call.__name__, error)
            raise

    return cast(_Call, told)


@register("allreduce")
class AllReduceStore(LocalStore):
    """Adds up over this worker's devices on the host, then over all workers, each of which updates the same weights.

    The workers' calls that move something between them (all but pulls, learning rates and what only asks) are the same
    in the same order on all; a difference, or a call that one of them has refused, is the same `MismatchError` on all,
    and leaves nothing behind. Calls run one after another in the order in which they were made, whatever their
    priority, asynchronous ones too; so one thread at a time makes them. Once a collective has failed each later call
    raises the same error.

    Every worker keeps the weights, the optimizer's state and a bucket's gradients; the latter in memory that the
    workers of a host share. What compression leaves out stays with the worker.
    """

    def __init__(self, name: str = "allreduce", communicator: Communicator | None = None) -> None:
        """Join the job of the environment, or use a communicator, which is left open then.

        Raises:
            RuntimeError: there is no job in the environment.
            GanglineError: a worker did not come.
        """
        self._owned = _connected() if communicator is None else None
        self._workers = WorkerGroup(communicator or self._owned)  # type: ignore[arg-type]  # one of them is there
        super().__init__(name)
        self._queue = _InTurn()
        weakref.finalize(self, self._queue.close)
        self._payloads: Payloads | None = None
        self._fused: list[Bucket] = []
        self._begun = 0  # how many calls have got as far as the queue

    @property
    def rank(self) -> int:  # noqa: D102  inherited
        return self._workers.rank

    @property
    def num_workers(self) -> int:  # noqa: D102  inherited
        return self._workers.size

    def barrier(self) -> None:  # noqa: D102  inherited
        def meet() -> None:
            self._meet("barrier", plan={})

        self._check_open()
        self._together("barrier", meet)

    def exchange(self, data: bytes) -> list[bytes]:
        """Give bytes to every worker, and get what each gave, in rank order; of one that has joined none."""
        self._check_open()
        found: list[bytes] = []

        def exchange() -> None:
            self._meet("exchange", plan={"exchange": True})
            found.extend(self._workers.exchange(data))

        self._together("exchange", exchange)
        return found

    def join(self) -> int:  # noqa: D102  inherited
        self._check_open()
        last: list[int] = []

        def take_part() -> None:
            while isinstance(meeting := self._workers.wait(self._rate()), Meeting):
                self._follow(meeting)
            last.append(meeting)

        self._together("join", take_part)
        return last[0]

    init = _telling(KVStore.init)
    broadcast = _telling(KVStore.broadcast)
    push = _telling(KVStore.push)
    push_weighted = _telling(KVStore.push_weighted)
    push_bucket = _telling(KVStore.push_bucket)
    pushpull = _telling(KVStore.pushpull)
    assign = _telling(KVStore.assign)
    fuse = _telling(KVStore.fuse)
    update = _telling(KVStore.update)
    drop_updates = _telling(KVStore.drop_updates)
    set_optimizer = _telling(KVStore.set_optimizer)
    set_gradient_compression = _telling(KVStore.set_gradient_compression)

    def _refuse(self, call: str, error: Exception) -> None:
        """Tell all workers that this one did not take ``call``'s arguments.

        Raises:
            Exception: ``error``, if all refuse for the same reason, else a `MismatchError` that is the same on all.
        """
        if not self._closed:
            self._together(call, lambda: self._workers.refuse(call, error))

    def _init(self, pairs: Pairs, async_op: bool) -> Work:
        make_entries = super()._init

        def init() -> None:
            try:
                self._meet("init")
                shapes = [(f"key {key!r}", f"{tuple(value.shape)} of {value.dtype}") for key, (value,) in pairs]
                self._workers.check_same("what is initialised", shapes)
                for _, (value,) in pairs:
                    check_dtype(value.dtype)
            except Exception:  # whatever it was is raised again, and the keys are unknown as before
                with self._layout_lock:
                    for key, _ in pairs:
                        del self._layout[key]
                raise
            make_entries(pairs, False)
            for key, _ in pairs:
                self._workers.take_first(self._entries[key].stored)

        return self._start("init", init, pairs, 0, async_op)

    def _assign(self, pairs: Pairs) -> None:
        def assign() -> None:
            self._meet(f"assign of {[key for key, _ in pairs]}")
            for key, (value,) in pairs:
                stored = self._entries[key].stored
                if not self.rank:
                    stored.copy_(value)
                self._workers.take_first(stored)

        self._start("assign", assign, pairs, 0, False)

    def _fuse(self, bucket: Bucket) -> None:
        make_flat = super()._fuse
        slots = [
            (f"key {slot.key!r}", f"{tuple(slot.shape)} with strides {slot.stride} at {slot.offset}")
            for slot in bucket.slots
        ]

        def fuse() -> None:
            self._meet("fuse")
            self._workers.check_same("the bucket", [*slots, ("size", f"{bucket.numel} of {bucket.dtype}")])
            make_flat(bucket)
            self._flats[bucket].merged = self._workers.shared_zeros(bucket.numel, bucket.dtype)
            self._fused.append(bucket)

        self._start("fuse", fuse, [(key, []) for key in bucket.keys], 0, False)

    def _push_weighted(self, pairs: Pushed, weight: float, priority: int, async_op: bool) -> Work:
        return self._start("push", lambda: self._add_pairs(pairs, weight), pairs, priority, async_op)

    def _push_bucket_weighted(
        self,
        bucket: Bucket,
        values: Sequence[BucketValue],
        keys: Sequence[Key],
        weight: float,
        priority: int,
        async_op: bool,
    ) -> Work:
        pairs = by_key(bucket, values, keys)
        return self._start("push", lambda: self._add_bucket(bucket, values, keys, weight), pairs, priority, async_op)

    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work:
        def pushpull() -> None:
            self._merge(values)
            self._give(outs)

        return self._start("pushpull", pushpull, [*values, *outs], priority, async_op)

    def _merge(self, pairs: Pushed) -> None:
        self._add_pairs(pairs, None)

    def _merge_bucket(self, bucket: Bucket, values: Sequence[BucketValue], keys: Sequence[Key]) -> None:
        self._add_bucket(bucket, values, keys, None)

    def _add_pairs(self, pairs: Pushed, weight: float | None) -> None:
        keys = list(dict.fromkeys(key for key, _ in pairs))

        def part() -> BucketPart:
            present = [(key, values) for key, values in merged(pairs) if values and weight != 0]
            return self._part(keys, dict(self._sums(present, own=False)))

        self._add(f"{_kind(weight)} of {keys}", {"keys": keys}, part, weight)

    def _add_bucket(
        self, bucket: Bucket, values: Sequence[BucketValue], keys: Sequence[Key], weight: float | None
    ) -> None:
        if bucket not in self._flats:
            of_keys = dict(by_key(bucket, values, keys))
            self._add_pairs([(key, of_keys.get(key, [])) for key in bucket.keys], weight)
            return

        def part() -> BucketPart:
            own = self._part_of(bucket)
            if weight != 0:
                own.take(values, by_key(bucket, values, keys))
            return own

        number = self._fused.index(bucket)
        call = f"{_kind(weight)} of bucket {number} of {bucket.keys}"
        self._add(call, {"bucket": number}, part, weight)

    def _add(self, call: str, plan: Mapping[str, Any], prepare: Callable[[], BucketPart], weight: float | None) -> None:
        """Add up all workers' parts and give the sums to the updater, once it is known that all of them can."""
        try:
            part = prepare()
            self._check_part(part)
        except Exception as error:
            self._workers.refuse(call, error)
            raise
        plan = {**plan, "is_mean": weight is not None}
        meeting = self._meet(call, plan, 1.0 if weight is None else weight, is_uneven=part.is_uneven)
        self._take(meeting, part, is_mean=weight is not None)

    def _check_part(self, part: BucketPart) -> None:
        if self._optimizer is not None:
            for key, value in part.values.items():
                self._optimizer.add(key, self._entries[key].stored)
                self._optimizer.check_kind(key, rows=isinstance(value, RowSparse))
        if self._payloads is not None:
            self._payloads.check(part)

    def _take(self, meeting: Meeting, part: BucketPart, *, is_mean: bool) -> None:
        """Sum with the others, and update."""
        sums = summed_over_workers(self._workers, meeting, part, self._payloads, is_mean=is_mean)
        if self._optimizer is not None:
            self._take_rate(meeting)
            for key, _ in sums:
                self._optimizer.add(key, self._entries[key].stored)
            self._apply(sums)
        elif self._updater is not None:
            for key, total in sums:
                self._updater(key, total, self._entries[key].stored)
        else:
            self._replace([(key, [total]) for key, total in sums], {})

    def _follow(self, meeting: Meeting) -> None:
        """Take part in what the others do, with nothing."""
        plan = meeting.plan
        if "exchange" in plan:
            self._workers.exchange(b"")
        elif "update" in plan:
            self._end_update(meeting, is_dropped=plan["update"] == "drop")
        elif plan:
            part = self._part_of(self._fused[plan["bucket"]]) if "bucket" in plan else self._part(plan["keys"], {})
            part.has_joined = True
            self._take(meeting, part, is_mean=plan["is_mean"])

    def _take_rate(self, meeting: Meeting) -> None:
        """Have rank 0's learning rate."""
        assert self._optimizer is not None
        if not math.isnan(meeting.learning_rate) and meeting.learning_rate != self._optimizer.learning_rate:
            self._optimizer.learning_rate = meeting.learning_rate

    def _update(self) -> None:
        self._together("update", lambda: self._end_update(self._meet("update", {"update": "apply"})))

    def _drop_updates(self) -> None:
        def drop() -> None:
            self._end_update(self._meet("drop_updates", {"update": "drop"}), is_dropped=True)

        self._together("drop_updates", drop)

    def _end_update(self, meeting: Meeting, *, is_dropped: bool = False) -> None:
        if is_dropped:
            self._held.clear()
        else:
            self._take_rate(meeting)
            self._apply_held()

    def _part(self, keys: list[Key], values: Mapping[Key, Value]) -> BucketPart:
        return BucketPart(keys, values, lambda key: self._entries[key].stored, self._buffer)

    def _buffer(self, key: Key) -> torch.Tensor:
        entry = self._entries[key]
        if entry.merged is None:
            entry.merged = torch.empty_like(entry.stored)
        return entry.merged

    def _part_of(self, bucket: Bucket) -> BucketPart:
        """A part of a bucket's keys in their shared memory; with no values yet."""
        flat = self._flats[bucket].merged
        assert flat is not None
        views = bucket.views(flat)
        return BucketPart(bucket.keys, {}, lambda key: self._entries[key].stored, views.__getitem__, flat)

    def _set_compression(self, compression: Compression | None) -> None:
        if compression is not None and compression.pull_codec is not None:
            raise ValueError(
                f"pull_type is {compression.params['pull_type']!r}, but in an {self.type!r} store pulls do not travel: "
                "every worker has the weights; expected None"
            )
        params = {} if compression is None else compression.params

        def change() -> None:
            self._meet("set_gradient_compression")
            self._workers.check_same("compression", [(name, repr(value)) for name, value in params.items()])
            self._compressed = self._payloads = Payloads(compression) if compression is not None else None

        self._change(change)

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        def agree() -> None:
            self._meet("set_optimizer")
            self._workers.check_same("the optimizer", [(name, repr(value)) for name, value in vars(spec).items()])

        self._together("set_optimizer", agree)
        super()._set_optimizer(spec)

    @_telling
    def load_optimizer_states(self, path: str | Path) -> None:
        """Take over the optimizer state of rank 0's file; the learning rate stays as it is set. All workers call it.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a torn or foreign file, another optimizer, unknown keys, or other shapes.
        """
        self._check_open()
        self._needs_optimizer("load_optimizer_states")
        if self.rank:
            self.load_optimizer_state(None)
        else:
            super().load_optimizer_states(path)

    @_telling
    def load_optimizer_state(self, state: OptimizerState | None) -> None:
        """Replace the optimizer's state by rank 0's; other workers' is not looked at. All workers call it."""
        self._check_open()
        self._needs_optimizer("load_optimizer_state")
        taken: list[OptimizerState] = []

        def take() -> None:
            self._meet("load_optimizer_state")
            taken.append(first_state(self._workers, state))

        self._together("load_optimizer_state", take)
        super().load_optimizer_state(taken[0])

    def close(self) -> None:  # noqa: D102  inherited
        super().close()
        if self._owned is not None:
            self._owned.close()

    def _start(
        self,
        name: str,
        operation: Callable[[], None],
        pairs: Sequence[tuple[Key, Sequence[Value]]],
        priority: int,
        async_op: bool,
    ) -> Work:
        self._workers.check()
        self._begun += 1
        return super()._start(name, operation, pairs, priority, async_op)

    def _together(self, name: str, operation: Callable[[], None]) -> None:
        self._start(name, operation, [], 0, False)

    def _meet(
        self, call: str, plan: Mapping[str, Any] | None = None, weight: float = 1.0, *, is_uneven: bool = False
    ) -> Meeting:
        return self._workers.meet(call, plan, weight=weight, is_uneven=is_uneven, learning_rate=self._rate())

    def _rate(self) -> float:
        return math.nan if self._optimizer is None else self._optimizer.learning_rate


class _InTurn(WorkQueue):
    """Runs operations in the order in which they are given, which is the same on all workers."""

    def submit(self, operation: Callable[[], None], work: Work, keys: Iterable[Hashable], priority: int) -> None:  # noqa: ARG002
        """Have the operation run behind all that came before it."""
        super().submit(operation, work, ("turn",), 0)


def _connected() -> Communicator:
    """The communicator of the job that the environment tells of."""
    from gangline.collectives.bootstrap.launcher_environment import find_rank_info
    from gangline.collectives.communicator import (
        connect,  # here, for who has no job pays nothing for its imports
    )

    try:
        find_rank_info(None, None, None, os.environ)
    except RuntimeError as error:
        raise RuntimeError(
            "an 'allreduce' store joins the workers of a job, and there is none in the environment; start the program "
            "with `gangline launch -n WORKERS -s 0 -- COMMAND` (torchrun, mpirun and srun do too), or give create() a "
            "communicator"
        ) from error
    return connect()


def _kind(weight: float | None) -> str:
    return "push" if weight is None else "weighted push"
