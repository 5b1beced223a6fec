"""The `allreduce` store: collectives reduce over the workers, and every worker updates its own weights."""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from gangline.collectives import environments
from gangline.collectives.devices.device_group import reduce
from gangline.collectives.engine.reduction import check_dtype
from gangline.collectives.work import Work, nesting
from gangline.kvstore import arguments
from gangline.kvstore.allreduce.negotiation import NO_REPLICAS, Negotiation, Negotiator, Replicas
from gangline.kvstore.allreduce.owners import Owners, Run
from gangline.kvstore.allreduce.reduction import BucketPart, reduce_over_workers
from gangline.kvstore.arguments import Pairs, Pushed, Value
from gangline.kvstore.buckets import Bucket, BucketValues
from gangline.kvstore.compression import Compression
from gangline.kvstore.group.serialization import bytes_of, dtype_named, name_of_dtype
from gangline.kvstore.group.worker_group import check_same
from gangline.kvstore.interface import KVStore, refused_on_all_ranks
from gangline.kvstore.local import LocalStore
from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.replica_check import check_interval, is_due

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator

_log = logging.getLogger("gangline")
_HOST = torch.device("cpu")
_END = {"end": True}
_Result = TypeVar("_Result")
Owned = tuple[Sequence[torch.Tensor], Sequence[int]]
"""Flat tensors, and the rank that owns each."""


class CopyResult(NamedTuple):
    """Answers of the workers in `AllReduceStore.copy_from_owners`."""

    missing: int
    """Their bit masks, combined with OR."""
    weight: float
    """Sum of their weights."""
    has_followers: bool
    """True if a worker is in `AllReduceStore.follow_owners`."""


class AllReduceStore(LocalStore):
    """Store that sums over this worker's devices, then over all workers by collectives.

    A key is summed and updated on the device of the value given to `init`, by NCCL where the communicator uses it. If
    that is a GPU on some workers only, all workers use the host: GPU and host arithmetic differ in the last bits, so
    weights would diverge.

    Every worker must make the same calls in the same order, except pulls, learning rates and queries. If calls differ,
    or a worker's arguments are refused, all workers raise the same `MismatchError` and nothing has changed. Calls,
    asynchronous ones too, run in the order in which they are made, whatever their priority; only one thread at a time
    may make them. After a failed collective, or an update that failed on one worker and may have left different weights
    there, every later call raises the same error on all workers.

    Every worker holds the weights, the optimizer's state (with ``shard="optimizer"`` a part of it) and the gradients of
    its buckets. Compression residuals stay with the worker.
    """

    _serves_one_process = False
    _is_alone = False

    def __init__(self, name: str = "allreduce", communicator: Communicator | None = None) -> None:
        """Join the job of the environment, or use a communicator. Collective: all workers must call it.

        Args:
            name: the store's name.
            communicator: communicator of all workers; `close` leaves it open. None: connect from the environment.

        Raises:
            RuntimeError: if the environment describes no job.
            GanglineError: if a worker does not connect in time.
        """
        self._owned = _connected() if communicator is None else None
        self._workers = Negotiator(communicator or self._owned)  # type: ignore[arg-type]  # one of them is not None
        super().__init__(name, in_order=True)
        self._fused: list[Bucket] = []
        self._pushes: Counter[Bucket] = Counter()
        self._check_interval = check_interval() if self.num_workers > 1 else 0
        self.outside: MutableMapping[Key, torch.Tensor] = weakref.WeakValueDictionary()
        """Weights outside of the store whose gradients it sums, by key: they must be equal on all workers."""
        self._sets_rate: set[OptimizerGroup] = set()  # set_learning_rate was called here, and no update has used it yet
        self._owners: dict[OptimizerGroup, Owners] = {}  # where state is sharded
        self._wanted_memory: Sequence[float] | str | None = None

    @property
    def rank(self) -> int:  # noqa: D102  inherited
        return self._workers.rank

    @property
    def num_workers(self) -> int:  # noqa: D102  inherited
        return self._workers.size

    def dead_nodes(self) -> list[str]:  # noqa: D102  inherited
        return [f"worker {rank}" for rank in self._workers.dead_ranks()]

    def _exchange(self, data: bytes, name: str, root: int | None) -> list[bytes]:
        LocalStore._check_open(self)  # an error of this rank alone is one of all, see Negotiator.final_errors
        return self._run_in_order(name, partial(self._workers.exchange, data, name, root, takes_joined=True))

    def join(self) -> int:  # noqa: D102  inherited
        LocalStore._check_open(self)
        groups = [*self._groups.all.values()]
        if self._sets_rate and not self.rank and len(groups) > 1:
            raise RuntimeError(
                "join() comes after set_learning_rate() without a step between them, and the others could not learn of "
                f"the rate, because the store has {len(groups)} optimizers; expected a step before join()"
            )

        def take_part() -> int:
            rate = self._rate(groups[0]) if len(groups) == 1 else math.nan  # the next call may be of any group
            while isinstance(result := self._workers.join(rate), Negotiation):
                self._take_part(result)
            return result

        return self._run_in_order("join", take_part)

    def _refuse(self, call: str, error: Exception, keys: object = None) -> None:  # noqa: ARG002
        """Refuse a call on this rank, so that all ranks raise; see `Negotiator.refuse`."""
        if not self._closed:
            self._run_in_order(call, lambda: self._workers.refuse(call, error))

    def _make_entries(self, pairs: Pairs) -> None:
        shapes = {f"key {key!r}": f"{tuple(value.shape)} of {value.dtype}" for key, (value,) in pairs}
        own = [shapes, [value.device.type for _, (value,) in pairs]]
        gathered = self._workers.group.all_gather(own, "init")
        check_same([theirs for theirs, _ in gathered], "init")
        for _, (value,) in pairs:
            check_dtype(value.dtype)
        kinds = zip(*(devices for _, devices in gathered), strict=True)
        placed = [
            (key, [value if len(set(of_key)) == 1 else value.to(_HOST)])
            for (key, (value,)), of_key in zip(pairs, kinds, strict=True)
        ]
        keys = [key for key, _ in pairs]
        try:
            super()._make_entries(placed)
        except Exception as error:  # out of memory, for example
            self._workers.refuse("init", error)
            raise
        self._negotiate(f"init of {keys}")
        self._broadcast(keys)

    def _assign(self, pairs: Pairs) -> None:
        def assign() -> None:
            self._negotiate(f"assign of {[key for key, _ in pairs]}")
            if not self.rank:
                for key, (value,) in pairs:
                    self._entries[key].stored.copy_(value)
            self._broadcast([key for key, _ in pairs])

        self._start("assign", assign, arguments.keys_of(pairs), arguments.tensors_of(pairs), 0, False)

    def _broadcast(self, keys: Sequence[Key]) -> None:
        with self._workers.communicator() as communicator:
            for key in keys:
                communicator.broadcast(self._entries[key].stored)

    def _initial_device(self, value: torch.Tensor) -> torch.device:
        return value.device

    def _device_of(self, bucket: Bucket) -> torch.device:
        return self._entries[bucket.keys[0]].stored.device

    def _fuse(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        make_flat = super()._fuse
        slots = {
            f"key {slot.key!r}": f"{tuple(slot.shape)} with strides {slot.stride} at {slot.offset}"
            for slot in bucket.slots
        }

        def fuse() -> None:
            self._workers.group.check_same({**slots, "size": f"{bucket.numel} of {bucket.dtype}"}, "fuse")
            with nesting():
                make_flat(bucket, flat)
            made = self._flats[bucket]
            made.sum = bucket.empty(made.stored.device)
            self._fused.append(bucket)

        self._start("fuse", fuse, bucket.keys, (), 0, False)

    def _merge(self, pairs: Pushed, weight: float | None = None) -> None:
        keys = list(dict.fromkeys(key for key, _ in pairs))

        def part() -> BucketPart:
            present = [(key, values) for key, values in arguments.merged(pairs) if values and weight != 0]
            return self._part(keys, dict(self._sums(present, own=False)))

        negotiation, own = self._prepare(f"{_kind(weight)} of {keys}", {"keys": keys}, part, weight)
        self._reduce_and_update(negotiation, own, None, is_mean=weight is not None)

    def _merge_bucket(self, bucket: Bucket, values: BucketValues, keys: list[Key], weight: float | None) -> None:
        if bucket not in self._flats:
            of_keys = dict(arguments.by_key(bucket, values, keys))
            self._merge([(key, of_keys.get(key, [])) for key in bucket.keys], weight)
            return

        def part() -> BucketPart:
            own = self._part_of(bucket)
            if weight != 0:
                own.take(bucket, values, keys, self._flats[bucket].views)
            return own

        number = self._fused.index(bucket)
        call = f"{_kind(weight)} of bucket {number} of {bucket.keys}"
        negotiation, own = self._prepare(call, {"bucket": number}, part, weight)
        self._reduce_and_update(negotiation, own, bucket, is_mean=weight is not None)

    def _prepare(
        self, call: str, plan: Mapping[str, Any], prepare: Callable[[], BucketPart], weight: float | None
    ) -> tuple[Negotiation, BucketPart]:
        """Return this worker's part, and the negotiation in which all ranks have accepted theirs."""
        try:
            part = prepare()
            self._check_part(part)
        except Exception as error:
            self._workers.refuse(call, error)
            raise
        plan = {**plan, "is_mean": weight is not None}
        tensors = () if part.flat is None else (part.flat,)
        group = self._groups.of(part.keys[0]) if part.keys else None
        own, replicas = 1.0 if weight is None else weight, self._replicas_of(plan, group)
        return self._negotiate(call, plan, own, part.dense, tensors, group, replicas), part

    def _replicas_of(self, plan: Mapping[str, Any], group: OptimizerGroup | None) -> Replicas:
        """Return the weights of a fused bucket, if this push compares them with those of the other workers."""
        bucket = self._fused[plan["bucket"]] if "bucket" in plan else None
        if bucket is None or not is_due(number := self._pushes[bucket], self._check_interval):
            return NO_REPLICAS
        weights = self._flats[bucket].views(self._flats[bucket].stored)
        if group is None:
            weights = {key: one.data for key in bucket.keys if (one := self.outside.get(key)) is not None}
        return f"before push {number} of a bucket", weights

    def _check_part(self, part: BucketPart) -> None:
        optimizer = self._optimizer_of(part.keys[0]) if part.keys else None
        if optimizer is not None:
            self._add_to(optimizer, part.values)
            optimizer.check_kinds([(key, [value]) for key, value in part.values.items()])
        if self._compressed is not None:
            for key, value in part.values.items():
                self._compressed.check(key, value)

    def _reduce_and_update(
        self, negotiation: Negotiation, part: BucketPart, bucket: Bucket | None = None, *, is_mean: bool
    ) -> None:
        with self._workers.final_errors():
            self._update_by(negotiation, part, bucket, is_mean=is_mean)

    def _update_by(self, negotiation: Negotiation, part: BucketPart, bucket: Bucket | None, *, is_mean: bool) -> None:
        group = self._groups.of(part.keys[0]) if part.keys else None
        owners = self._owners.get(group) if group is not None else None
        waits = group is not None and group.updates_wait
        if owners is not None and group is not None:
            keys = self._keys_of(group)
            if owners.count < len(keys):
                owners.assign((key, self._entries[key].stored) for key in keys)
        runs = owners.runs(bucket) if owners is not None and bucket is not None and part.flat is not None else None
        reduced = None if waits else runs  # a global norm needs all gradients
        sums = reduce_over_workers(self._workers, negotiation, part, self._compressed, is_mean=is_mean, runs=reduced)
        if group is not None:
            self._use_rate(group, negotiation)
            self._apply(sums)
            if owners is not None and sums and not waits:
                self._share_updates(owners, [key for key, _ in sums], part.flat_stored, runs)
        elif self._updater is not None:
            for key, total in sums:
                with nesting():
                    self._updater(key, total, self._entries[key].stored)
        elif part.flat is not None and part.flat_stored is not None and len(sums) == len(part.keys):
            reduce([part.flat], out=part.flat_stored)
        else:
            self._replace([(key, [total]) for key, total in sums], {})

    def _share_updates(
        self, owners: Owners, keys: Sequence[Key], flat: torch.Tensor | None = None, runs: Sequence[Run] | None = None
    ) -> None:
        """Copy the weights of keys, or of a flat tensor, from their owners to all workers. Collective."""
        with self._workers.communicator() as communicator:
            if flat is not None and runs is not None:
                parts = [flat[run.begin : run.end] for run in runs]
                communicator.broadcast_each(parts, [run.owner for run in runs])
            else:
                communicator.broadcast_each([self._entries[key].stored for key in keys], [*map(owners.of, keys)])

    def _take_part(self, negotiation: Negotiation) -> None:
        """Take part in the other workers' call, by its plan and without values."""
        plan = negotiation.plan
        if "exchange" in plan:
            lengths = [int(weight) for weight in negotiation.weights]
            self._workers.gather_bytes(b"", lengths, plan["exchange"])
        elif "update" in plan:
            group = self._groups.all[plan["group"]]
            if plan["update"] == "drop":
                self._drop_sums(group)
            else:
                self._end_update(group, negotiation)
        elif not {"copy", "reduce", "end"}.isdisjoint(plan):
            raise RuntimeError(
                "this worker called join(), but the others need the weights that it owns in each forward and backward; "
                "expected the same steps on all workers"
            )
        elif plan:
            bucket = self._fused[plan["bucket"]] if "bucket" in plan else None
            part = self._part_of(bucket) if bucket is not None else self._part(plan["keys"], {})
            part.has_joined = True
            self._reduce_and_update(negotiation, part, bucket, is_mean=plan["is_mean"])

    def _use_rate(self, group: OptimizerGroup, negotiation: Negotiation) -> None:
        """Set the learning rate that counts: that of rank 0, or of the lowest rank outside join() that has set one."""
        optimizer = self._optimizers[group]
        rate, own = negotiation.learning_rate, optimizer.learning_rate
        if not math.isnan(rate) and rate != own:
            if group in self._sets_rate:
                _log.warning(
                    "set_learning_rate(%g) on rank %d has no effect: rank %d's learning rate %g counts; set it there",
                    *(own, self.rank, negotiation.rate_of, rate),
                )
            optimizer.set_learning_rate(rate)
        self._sets_rate.discard(group)

    def _set_rate(self, group: OptimizerGroup, rate: float) -> None:
        super()._set_rate(group, rate)
        self._sets_rate.add(group)

    def _update(self, group: OptimizerGroup) -> None:
        plan = {"update": "apply", "group": group.number}

        def update() -> None:
            call = f"update{f' of group {group.number}' if group.number else ''}"
            self._end_update(group, self._negotiate(call, plan, group=group))

        self._run_in_order("update", update)

    def _drop_updates(self, group: OptimizerGroup) -> None:
        plan = {"update": "drop", "group": group.number}
        self._run_in_order("drop_updates", lambda: self._negotiate("drop_updates", plan))
        self._drop_sums(group)

    def _end_update(self, group: OptimizerGroup, negotiation: Negotiation) -> None:
        with self._workers.final_errors():
            self._use_rate(group, negotiation)
            changed = [key for key in self._keys_of(group) if key in self._pending_sums]
            self._apply_pending(group)
            if owners := self._owners.get(group):
                self._share_updates(owners, changed)

    def _part(self, keys: list[Key], values: Mapping[Key, Value]) -> BucketPart:
        return BucketPart(keys, values, lambda key: self._entries[key].stored, self._buffer)

    def _buffer(self, key: Key) -> torch.Tensor:
        return self._entries[key].buffer()

    def _part_of(self, bucket: Bucket) -> BucketPart:
        """Return this worker's part of a bucket, without values; its buffers are views of one tensor."""
        self._pushes[bucket] += 1
        flat = self._flats[bucket]
        assert flat.sum is not None
        buffer = flat.views(flat.sum).__getitem__
        return BucketPart(bucket.keys, {}, lambda key: self._entries[key].stored, buffer, flat.sum, flat.stored)

    def _set_compression(self, compression: Compression | None) -> None:
        items = {"compression": "none"} if compression is None else compression.params
        call = "set_gradient_compression"
        self._run_in_order(call, lambda: self._workers.group.check_same(items, call))
        super()._set_compression(compression)

    def _check_shard(self, shard: str | None, memory: Sequence[float] | str) -> None:
        if shard is not None:
            arguments.check_memory(memory, self.num_workers)
        self._wanted_memory = memory if shard is not None else None

    def _set_optimizer(self, group: OptimizerGroup) -> None:
        wanted = self._wanted_memory
        items = {name: repr(value) for name, value in vars(group.spec).items()}
        if group.keys is not None:
            items["keys"] = repr(sorted(map(repr, group.keys)))
        device = self._any_device() if wanted == "auto" else _HOST
        memory = self._agreed_memory("set_optimizer", {**items, "shard": repr(wanted)}, wanted, device)
        super()._set_optimizer(group)
        self._owners = {one: owners for one, owners in self._owners.items() if one in self._optimizers}
        if wanted is not None and self.num_workers > 1:
            self._owners[group] = Owners(memory)

    def _filter_of(self, group: OptimizerGroup) -> Callable[[Key], bool] | None:
        owners = self._owners.get(group)
        return None if owners is None else lambda key: owners.of(key) == self.rank

    def owners_of(self, tensors: Sequence[torch.Tensor], memory: Sequence[float] | str) -> list[int]:
        """Assign an owner rank to each tensor, in proportion to the workers' memory. Collective.

        ``memory`` is as for `set_optimizer`.
        """
        arguments.check_memory(memory, self.num_workers)
        device = tensors[0].device if tensors else _HOST
        owners = Owners(self._agreed_memory("owners_of", {"memory": repr(memory)}, memory, device))
        owners.assign(enumerate(tensors))
        return [owners.of(number) for number in range(len(tensors))]

    def _agreed_memory(
        self, call: str, items: Mapping[str, str], memory: Sequence[float] | str | None, device: torch.device
    ) -> Sequence[float]:
        """Check that all workers give the same items; return each worker's memory, that of its device for "auto"."""

        def agree() -> list[float]:
            self._workers.group.check_same(items, call)
            own = arguments.free_memory(device) if memory == "auto" else 0.0
            return [float(one) for one in self._workers.group.all_gather(own, call)]

        free = self._run_in_order(call, agree)
        return free if memory is None or isinstance(memory, str) else memory

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every worker's tensor, shape (workers, *tensor.shape), on the device of this one's. Collective.

        All workers must know that the others make this call, with a tensor of the same shape and dtype. The host does
        not wait for a GPU if the communicator uses NCCL.
        """
        gathered = torch.empty((self.num_workers, *tensor.shape), dtype=tensor.dtype, device=tensor.device)

        def gather() -> None:
            with self._workers.communicator() as communicator:
                communicator.all_gather(tensor, gathered)

        self._run_after(("all_gather",), "all_gather", gather, [tensor, gathered])
        return gathered

    def copy_from_owners(
        self,
        names: str,
        tensors: Sequence[torch.Tensor],
        owners: Sequence[int],
        missing: int = 0,
        weight: float = 0.0,
        *,
        numbers: Sequence[int] = (),
        async_op: bool = False,
    ) -> Callable[[], CopyResult]:
        """Copy each flat tensor from the rank that owns it to all workers, in place. Collective.

        If the description ``names`` differs between workers, all raise a `MismatchError`. The bits of ``missing``, 511
        or fewer, are combined by OR, and ``weight`` is summed over the workers. ``numbers`` tell workers in
        `follow_owners` which tensors these are. Return a function that waits for the copies and returns both.
        """
        negotiations: list[Negotiation] = []

        def copy() -> None:
            call, plan = f"copy of {names} from their owners", {"copy": list(numbers)}
            negotiations.append(self._negotiate(call, plan, weight, missing, tensors))
            with self._workers.communicator(on_gpus=negotiations[0].on_gpus) as communicator:
                communicator.broadcast_each(tensors, owners)

        work = self._start("copy_from_owners", copy, [names], tensors, 0, async_op)

        def wait() -> CopyResult:
            work.wait()
            [negotiation] = negotiations
            return CopyResult(negotiation.dense or 0, sum(negotiation.weights), any(negotiation.has_joined))

        return wait

    def reduce_to_owners(
        self, names: str, tensors: Sequence[torch.Tensor], owners: Sequence[int], *, numbers: Sequence[int] = ()
    ) -> Work:
        """Begin to sum tensors over the workers, each in place at its owner; as `copy_from_owners`. Collective."""

        def reduce() -> None:
            call, plan = f"reduction of the gradients of {names} to their owners", {"reduce": list(numbers)}
            negotiation = self._negotiate(call, plan, tensors=tensors)
            with self._workers.communicator(on_gpus=negotiation.on_gpus) as communicator:
                communicator.reduce_each(tensors, owners)

        return self._start("reduce_to_owners", reduce, [names], tensors, 0, True)

    def follow_owners(
        self,
        copied: Callable[[Sequence[int]], Owned],
        reduced: Callable[[Sequence[int]], AbstractContextManager[Owned]],
    ) -> None:
        """Take part in the other workers' `copy_from_owners` and `reduce_to_owners` until `end_following`. Collective.

        ``copied`` and ``reduced`` map the ``numbers`` of these calls to tensors and their owners; ``reduced`` returns a
        context manager, inside which the tensors are reduced.
        """

        def follow() -> None:
            while isinstance(result := self._workers.join(), Negotiation) and result.plan != _END:
                if "copy" in result.plan:
                    with self._workers.communicator() as communicator:
                        communicator.broadcast_each(*copied(result.plan["copy"]))
                elif "reduce" in result.plan:
                    with reduced(result.plan["reduce"]) as parts, self._workers.communicator() as communicator:
                        communicator.reduce_each(*parts)
                else:
                    raise RuntimeError(
                        f"this worker has no samples and follows a forward or backward of the others, but they call "
                        f"{', '.join(result.plan)}; expected the same steps on all workers"
                    )

        self._run_in_order("follow_owners", follow)

    def end_following(self, error: Exception | None = None) -> None:
        """Make the workers in `follow_owners` return; after an error of this worker, all others raise. Collective."""
        if error is not None:
            self._refuse("forward or backward", error)
        else:
            self._run_in_order("end_following", lambda: self._negotiate("end of forward or backward", _END))

    def _any_device(self) -> torch.device:
        """Return the device of the first key; without keys, the current GPU or else the host."""
        for entry in self._entries.values():
            return entry.stored.device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _HOST

    @property
    def owned_bytes(self) -> list[int]:
        """Bytes of the weights that each worker updates, with ``shard="optimizer"``, after the first update."""
        return [*map(sum, zip(*(owners.nbytes for owners in self._owners.values()), strict=True))]

    def save_optimizer_states(self, path: str | Path, *, group: OptimizerGroup | None = None) -> None:  # noqa: D102
        state = self.optimizer_state(group=self._group_for("save_optimizer_states", group))
        if not self.rank:
            files.save(Path(path), state.tensors, state.header())

    def _state_of(self, group: OptimizerGroup) -> OptimizerState:
        return self._gather_state(group) if group in self._owners else super()._state_of(group)

    @refused_on_all_ranks
    def _gather_state(self, group: OptimizerGroup) -> OptimizerState:
        own = super()._state_of(group)

        def gather() -> list[OptimizerState]:
            states = [own if rank == self.rank else None for rank in range(self.num_workers)]
            return [_broadcast_state(self._workers, state, rank) for rank, state in enumerate(states)]

        return OptimizerState.merged(self._run_in_order("optimizer_state", gather))

    def _load_state(self, group: OptimizerGroup, read: Callable[[], OptimizerState]) -> None:
        state = None if self.rank else read()
        whole = self._run_in_order("load_optimizer_state", partial(_broadcast_state, self._workers, state))
        if owners := self._owners.get(group):
            owners.assign((key, self._entries[key].stored) for key in self._keys_of(group))
            whole = whole.of_keys(lambda key: owners.of(key) == self.rank)
        super()._load_state(group, lambda: whole)

    def close(self) -> None:  # noqa: D102  inherited
        super().close()
        if self._owned is not None:
            self._owned.close()

    def _check_open(self) -> None:
        super()._check_open()
        self._workers.check()

    def _run_in_order(self, name: str, operation: Callable[[], _Result]) -> _Result:
        return self._run_after((), name, operation)

    def _negotiate(
        self,
        call: str,
        plan: Mapping[str, Any] | None = None,
        weight: float = 1.0,
        dense: int | None = -1,
        tensors: Sequence[torch.Tensor] = (),
        group: OptimizerGroup | None = None,
        replicas: Replicas = NO_REPLICAS,
    ) -> Negotiation:
        rate = math.nan if group is None else self._rate(group)
        return self._workers.negotiate(
            call, plan, weight=weight, dense=dense, learning_rate=rate, tensors=tensors, replicas=replicas
        )

    def _rate(self, group: OptimizerGroup) -> float:
        """Return the learning rate to send: rank 0's, or one that was set here since the last update; else NaN."""
        if self.rank and group not in self._sets_rate:
            return math.nan
        return self._optimizers[group].learning_rate


def with_owners(store: KVStore) -> AllReduceStore:
    """Return the store if its workers can own parameters; raise ValueError otherwise."""
    if not isinstance(store, AllReduceStore):
        raise ValueError(f"a {store.type!r} store has no owners of parameters; shard is for 'allreduce'")
    return store


def _connected() -> Communicator:
    """Return a communicator of the job in the environment."""
    from gangline.collectives.communicator import connect  # only needed within a job, and slow to import

    if environments.find() is None:
        raise RuntimeError(
            "an 'allreduce' store needs a job, and there is none in the environment; start the program "
            "with `gangline launch -n WORKERS -s 0 -- COMMAND` (or torchrun, mpirun, srun), or give create() a "
            "communicator"
        )
    return connect()


def _broadcast_state(workers: Negotiator, state: OptimizerState | None, root: int = 0) -> OptimizerState:
    """Return the root's optimizer state on every rank. Collective: all workers must call it.

    Tensors are broadcast one by one, as bytes: collectives do not support all of their dtypes.
    """
    header: dict[str, Any] = {}
    if workers.rank == root:
        assert state is not None
        layout = {name: [name_of_dtype(t.dtype), list(t.shape)] for name, t in state.tensors.items()}
        header = {**state.header(), "layout": layout}
    header = workers.group.broadcast(header, "broadcast of the optimizer's state", root)
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in header.pop("layout").items():
        if state is not None and workers.rank == root:
            tensors[name] = state.tensors[name].contiguous()
        else:
            tensors[name] = torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
        with workers.communicator() as communicator:
            communicator.broadcast(bytes_of(tensors[name]), root)
    return OptimizerState.from_parts(header, tensors)


def _kind(weight: float | None) -> str:
    return "push" if weight is None else "weighted push"
