"""The `dist_*` stores: what a worker sees of the parameter server."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from gangline.collectives.compression import Compression
from gangline.collectives.liveness.limits import limits
from gangline.collectives.work import Work, WorkQueue
from gangline.kvstore.arguments import Pairs, Pushed, RowPulls, by_key, merged
from gangline.kvstore.buckets import Bucket, BucketValue
from gangline.kvstore.interface import KVStore, read_optimizer_states
from gangline.kvstore.optimizer import clipping
from gangline.kvstore.optimizer.keyed import KeyedOptimizer, OptimizerState
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec, check_learning_rate
from gangline.kvstore.parameter_server import environment
from gangline.kvstore.parameter_server.client.collective_calls import CollectiveCalls, PendingRequests
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.key_agreement import empty, layout_of, new_keys, pack
from gangline.kvstore.parameter_server.protocol import Define
from gangline.kvstore.parameter_server.pull import Pulled, PulledRows, Target, closed
from gangline.kvstore.parameter_server.push import Contributions
from gangline.kvstore.parameter_server.server import optimizer_shards
from gangline.kvstore.parameter_server.sharding import Sharding, ShardPlacement
from gangline.kvstore.parameter_server.torchrun import ChildServers, start_child_servers
from gangline.kvstore.parameter_server.transport.frames import memory_of
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool

_log = logging.getLogger("gangline")
_DEFINED_AT_ONCE = 16 << 20


class DistStore(KVStore):
    """Keys live on servers, cut into parts; workers push to rounds and pull what they made.

    A push is over when what it carries has left the caller's tensors; should a server refuse it, or be lost before it
    has it, the next call says so. `barrier`, `exchange` and `close` return when servers have what was pushed.
    A worker that is about two rounds of all keys ahead of the slowest waits in its pushes, or in `barrier` behind them,
    and nobody's memory fills.

    A process whose environment gives it the role of scheduler or server serves here, and leaves by SystemExit(0) when
    the job is over.
    """

    def __init__(
        self, name: str = "dist_sync", *, max_staleness: int | None = None, timeout: float | None = None
    ) -> None:
        """Join the job that the environment describes: DMLC_* of `gangline launch`, or torchrun's RANK and others.

        Args:
            name: which of the stores.
            max_staleness: for async: a pull waits while this worker has pushed a key more often than the slowest
                living worker by more than this; None: it never waits for others.
            timeout: seconds that a call may wait for others; None: GANGLINE_TIMEOUT, else half an hour.

        Raises:
            RuntimeError: there is no job.
            ValueError: ``max_staleness`` is given for a sync store or is negative; or the environment is wrong.
            MismatchError: another worker's store is of another kind, or has another ``max_staleness``.
            StallError: somebody did not come.
            DeadNodeError: somebody died meanwhile.
        """
        super().__init__(name)
        is_async = name.endswith("async")
        if max_staleness is not None and (not is_async or isinstance(max_staleness, bool) or max_staleness < 0):
            raise ValueError(
                f"max_staleness is {max_staleness!r}; expected 0 or more, of an async store (not {name!r})"
            )
        self._on_device = "device" in name
        self._timeout = limits().timeout if timeout is None else timeout
        staleness = -1 if max_staleness is None else max_staleness
        job, embedded = _job(self._timeout)
        with ExitStack() as stack:
            if embedded is not None:
                stack.callback(embedded.kill)
            self._member = SchedulerClient("worker", job.scheduler, rank=job.rank, timeout=self._timeout)
            stack.callback(self._member.close)
            self._arena = _arena()
            if self._arena is not None:
                stack.callback(self._arena.close)
            self._wire = ServerClient(
                self._member, "async" if is_async else "sync", staleness, self._arena, self._timeout
            )
            stack.pop_all()
        self._team = CollectiveCalls(self._member, self._wire)
        self._queue = WorkQueue()
        self._finish = weakref.finalize(self, _finish, self._queue, self._wire, self._member, self._arena, embedded)
        self._sharding = Sharding(len(self._member.servers))
        self._parts: dict[Key, list[ShardPlacement]] = {}
        self._rounds: dict[Key, int] = {}
        self._spec: OptimizerSpec | None = None
        self._learning_rate: float | None = None
        self._late: Exception | None = None  # of a push that was over for its caller when it was sent
        self._contributions = Contributions(self._wire.shares, self._arena, on_device=self._on_device)

    @property
    def rank(self) -> int:  # noqa: D102  inherited
        return self._member.rank

    @property
    def num_workers(self) -> int:  # noqa: D102  inherited
        return self._member.num_workers

    @property
    def is_async(self) -> bool:  # noqa: D102  inherited
        return self.type.endswith("async")

    def barrier(self) -> None:  # noqa: D102  inherited
        self._check_open()
        self._deliver()
        self._team.meet("barrier()")

    def exchange(self, data: bytes) -> list[bytes]:  # noqa: D102  inherited
        self._check_open()
        self._deliver()
        return self._team.exchange(data)

    def dead_nodes(self) -> list[str]:  # noqa: D102  inherited
        dead = [f"{role} {rank}" for (role, rank), why in self._member.gone.items() if why]
        return [*sorted(dead), *(["scheduler"] if self._member.lost else [])]

    def join(self) -> int:
        """Take no further part: rounds close without this worker until all have joined, then everybody is in again.

        Returns:
            The rank that came last.
        """
        self._check_open()
        self._settle()
        self._team.command("rest")
        rested = self._member.rest(msgpack.packb(list(self._rounds.items())))
        for packed in rested.data:
            for key, number in msgpack.unpackb(packed) if packed else ():
                self._rounds[key] = max(self._rounds.get(key, 0), number)
        self._team.command("wake")
        self.barrier()
        return rested.last

    # Keys

    def _init(self, pairs: Pairs, async_op: bool) -> Work:  # noqa: ARG002  done when it returns
        layouts = [layout_of(key, value) for key, (value,) in pairs]
        try:
            new = new_keys(self._member.meet(pack(layouts), "init()"), self._parts)
        except BaseException:
            with self._layout_lock:
                for key, _ in pairs:
                    self._layout.pop(key, None)
            raise
        whole = self._spec is not None and self._spec.needs_whole_keys
        placed = self._sharding.place(new, whole=whole)
        self._parts.update(placed)
        self._rounds.update(dict.fromkeys(placed, 0))
        self._team.by_rank_0(lambda: self._define(pairs), "init()")
        return Work.finished("init")

    def _define(self, pairs: Sequence[tuple[Key, Sequence[Tensor]]]) -> None:
        """Give the servers the values of these keys."""
        requests: list[Request] = []
        for server in self._team.servers:
            group: list[tuple[ShardPlacement, Tensor]] = []
            for key, (value,) in pairs:
                flat = value.detach().cpu().contiguous().view(-1)
                for part in self._parts[key]:
                    if part.server == server:
                        group.append((part, flat[part.begin : part.begin + part.numel]))
                        if sum(one.nbytes for one, _ in group) >= _DEFINED_AT_ONCE:
                            requests.append(_definition(server, group))
                            group = []
            if group:
                requests.append(_definition(server, group))
        self._team.ask(requests, "init()")

    # Moving tensors

    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work:
        return self._move("push", pairs, None, priority, async_op)

    def _push_weighted(self, pairs: Pushed, weight: float, priority: int, async_op: bool) -> Work:
        given = pairs if weight else [(key, []) for key, _ in pairs]
        return self._move("push", given, None, priority, async_op, weight)

    def _push_bucket(
        self,
        bucket: Bucket,
        values: Sequence[BucketValue],
        keys: Sequence[Key],
        weight: float | None,
        priority: int,
        async_op: bool,
    ) -> Work:
        pairs = _all_keys(bucket, values, keys)
        if weight is None:
            return self._push(pairs, priority, async_op)
        return self._push_weighted(pairs, weight, priority, async_op)

    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work:
        return self._move("pushpull", values, outs, priority, async_op)

    def _move(
        self,
        name: str,
        pairs: Pushed,
        outs: Pairs | None,
        priority: int,
        async_op: bool,
        weight: float | None = None,
    ) -> Work:
        pairs = merged(pairs)
        wanted = None if outs is None else _merged_outs(outs)

        def move(work: PendingRequests) -> None:
            self._wire.wait_for_room()
            ready = self._contributions.prepare([(key, values, self._parts[key]) for key, values in pairs])
            rounds = {key: self._rounds[key] + 1 for key, _ in pairs}
            rate = self._learning_rate if self.rank == 0 else None
            targets = None if wanted is None else Pulled(self._targets(wanted), self._wire.memory_of, work.codec)
            requests = ready.requests(rounds, rate, targets, work.name, priority, weight)
            self._rounds.update(rounds)
            work.submit(requests, self._wire)

        return self._start(name, move, [*pairs, *(outs or ())], priority, async_op)

    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        wanted = _merged_outs(pairs)

        def pull(work: PendingRequests) -> None:
            targets = Pulled(self._targets(wanted), self._wire.memory_of, work.codec)
            work.submit(targets.requests(self._rounds, work.name, priority), self._wire)

        return self._start("pull", pull, pairs, priority, async_op)

    def _row_sparse_pull(self, pulls: RowPulls, priority: int, async_op: bool) -> Work:
        def pull(work: PendingRequests) -> None:
            for key, targets in pulls:
                rows = PulledRows(self._parts[key], targets)
                work.submit(rows.requests(self._rounds[key], work.name, priority), self._wire)

        pairs = [(key, [part for target in targets for part in target]) for key, targets in pulls]
        return self._start("row_sparse_pull", pull, pairs, priority, async_op)

    def _targets(self, pairs: Sequence[tuple[Key, Sequence[Any]]]) -> list[Target]:
        return [Target(part, outs) for key, outs in pairs for part in self._parts[key]]

    def _start(
        self,
        name: str,
        prepare: Callable[[PendingRequests], None],
        pairs: Sequence[tuple[Key, Sequence[Any]]],
        priority: int,
        async_op: bool,
    ) -> Work:
        """Prepare requests behind what touches the same keys, and have the returned Work end with their answers."""
        self._raise_late()
        keys = list(dict.fromkeys(key for key, _ in pairs))
        shown = f"{name} of " + (f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys")
        work = Work(shown)
        pending = PendingRequests(work, shown, self._contributions.pull_codec, self._keep_late)

        def run() -> None:
            with pending:
                prepare(pending)
            if async_op:
                self._wire.go_on()

        if async_op:
            self._queue.submit(run, Work(name), keys, priority)
            return work
        self._queue.run(run, Work(name), keys, priority)
        self._wire.wait(work.is_completed)
        work.wait()
        return work

    def _settle(self) -> None:
        """Return when servers have all that was pushed."""
        self._queue.run(lambda: None, Work("settle"), list(self._layout), 0)
        self._wire.flush()
        self._raise_late()

    def _deliver(self) -> None:
        """Return when servers have what was pushed by calls that are over."""
        self._wire.deliver()
        self._raise_late()

    def _keep_late(self, error: Exception) -> None:
        self._late = self._late or error

    def _raise_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            raise late

    def _catch_up(self) -> None:
        """Return when the rounds of all that was pushed are closed."""
        self._settle()
        rounds = [(part, self._rounds[key]) for key, parts in self._parts.items() for part in parts]
        self._team.ask(closed([(part, number) for part, number in rounds if number]), "the end of rounds")

    def _assign(self, pairs: Pairs) -> None:
        self._catch_up()
        self._team.meet("assign()")

        self._team.by_rank_0(lambda: self._define(pairs), "assign()")

    # Optimizer

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        packed = optimizer_shards.pack_spec(spec)
        for key, parts in self._parts.items():
            KeyedOptimizer(spec).check(key, empty(parts[0].layout))
        self._catch_up()
        self._team.agree(packed, optimizer_shards.read_spec, "set_optimizer()")
        if spec.needs_whole_keys:
            self._make_whole()
        self._team.by_rank_0(lambda: self._team.command("optimizer", packed), "set_optimizer()")
        self._spec = spec
        self._learning_rate = float(spec.arguments["lr"])

    def _make_whole(self) -> None:
        """Put keys that are cut together again, for an optimizer that must see all of them."""
        cut = [key for key, parts in self._parts.items() if len(parts) > 1]
        values: dict[Key, Tensor] = {}
        if self.rank == 0:
            for key in cut:
                layout = self._parts[key][0].layout
                values[key] = empty(layout)
                self._pull([(key, [values[key]])], 0, False)
        old = {key: self._parts[key] for key in cut}
        for parts in old.values():
            self._sharding.remove(parts)
        self._parts.update(self._sharding.place([parts[0].layout for parts in old.values()], whole=True))
        self._rounds.update(dict.fromkeys(cut, 0))

        def define() -> None:
            self._define([(key, [value]) for key, value in values.items()])
            numbers = [
                [part.number for parts in old.values() for part in parts if part.server == server]
                for server in self._team.servers
            ]
            self._team.command("forget", [msgpack.packb(of_server) for of_server in numbers])

        self._team.by_rank_0(define, "set_optimizer()")

    @property
    def updates_wait(self) -> bool:  # noqa: D102  inherited
        return self._spec is not None and self._spec.clip_global_norm is not None

    def _update(self) -> None:
        def update(rate: float) -> None:
            assert self._spec is not None
            assert self._spec.clip_global_norm is not None
            norms = [one for answer, _ in self._team.command("norms") for one in msgpack.unpackb(answer)]
            if norms:
                whole = clipping.norm_of_norms(torch.tensor(norms, dtype=torch.float64).unbind())
                factor = clipping.factor(whole * abs(self._spec.rescale_grad), self._spec.clip_global_norm)
                self._team.command("update", msgpack.packb([float(factor), rate]))

        self._end_updates(update, "update()")

    def _drop_updates(self) -> None:
        self._end_updates(lambda _: self._team.command("drop"), "drop_updates()")

    def _end_updates(self, action: Callable[[float], object], what: str) -> None:
        """Have the first worker that does not rest do something with the rounds that are closed, at its rate."""
        self._catch_up()
        rates = self._member.meet(msgpack.packb(self._learning_rate), what)
        first = next(rank for rank, packed in enumerate(rates) if packed)
        self._team.by_rank_0(lambda: action(msgpack.unpackb(rates[first])), what, first)

    @property
    def learning_rate(self) -> float:  # noqa: D102  inherited
        self._check_open()
        return self._with_optimizer("learning_rate")

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next push on; rank 0's travels to the servers, and decides."""
        self._check_open()
        check_learning_rate(learning_rate)
        self._with_optimizer("set_learning_rate")
        self._learning_rate = float(learning_rate)

    def _with_optimizer(self, call: str) -> float:
        if self._learning_rate is None:
            raise RuntimeError(f"{call} needs an optimizer; call set_optimizer first")
        return self._learning_rate

    def optimizer_state(self) -> OptimizerState:  # noqa: D102  inherited
        self._check_open()
        rate = self._with_optimizer("optimizer_state")
        assert self._spec is not None
        self._catch_up()
        answers = self._team.command("state")
        return optimizer_shards.joined(self._spec, rate, self._parts, answers)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Replace the optimizer's state by rank 0's; all workers call it."""
        self._load(lambda: state)

    def load_optimizer_states(self, path: str | Path) -> None:
        """Take over the optimizer state of rank 0's file; all workers call it, the others' paths are not looked at."""
        self._load(lambda: read_optimizer_states(path))

    def _load(self, state: Callable[[], OptimizerState]) -> None:
        self._check_open()
        self._with_optimizer("load_optimizer_state")
        assert self._spec is not None
        spec = self._spec
        self._catch_up()
        self._team.meet("load_optimizer_state()")

        def load() -> None:
            packed = optimizer_shards.split(spec, state(), self._parts, len(self._team.servers))
            self._team.command("load", [payload for payload, _ in packed], [datas for _, datas in packed])

        self._team.by_rank_0(load, "load_optimizer_state()")

    # Compression

    def _set_compression(self, compression: Compression | None) -> None:
        params = None if compression is None else compression.params
        packed = msgpack.packb(params)
        self._settle()
        self._team.agree(packed, msgpack.unpackb, "set_gradient_compression()")
        self._team.by_rank_0(lambda: self._team.command("compression", packed), "set_gradient_compression()")
        self._contributions.compress(compression)

    @property
    def compresses(self) -> bool:  # noqa: D102  inherited
        return self._contributions.compresses

    def compression_residuals(self) -> dict[str, Tensor]:  # noqa: D102  inherited
        self._check_open()
        self._settle()
        return self._contributions.residuals()

    def load_compression_residuals(self, residuals: Mapping[str, Tensor]) -> None:  # noqa: D102  inherited
        self._check_open()
        if not self.compresses:
            super().load_compression_residuals(residuals)
            return
        self._settle()
        self._contributions.load_residuals(residuals, self._layout)

    def close(self) -> None:  # noqa: D102  inherited
        if not self._closed:
            super().close()
            self._finish()
            if self._late is not None:
                _log.error("worker %d leaves, and a push of it was lost: %s", self.rank, self._late)


def _all_keys(bucket: Bucket, values: Sequence[BucketValue], keys: Sequence[Key]) -> Pushed:
    """What is pushed for each key of a bucket: for those that are not among ``keys``, nothing."""
    given = dict(by_key(bucket, values, keys))
    return [(key, given.get(key, [])) for key in bucket.keys]


def _merged_outs(pairs: Pairs) -> Pairs:
    outs: dict[Key, list[Tensor]] = {}
    for key, targets in pairs:
        outs[key] = outs.get(key, []) + targets
    return list(outs.items())


def _definition(server: int, group: Sequence[tuple[ShardPlacement, Tensor]]) -> Request:
    entries = [
        [
            part.number,
            part.layout.dtype,
            list(part.shape),
            part.width,
            msgpack.packb(part.layout.key),
            part.begin,
            part.is_whole,
        ]
        for part, _ in group
    ]
    return Request(
        server,
        lambda sequence: Define(sequence, entries, None),
        "init()",
        nbytes=sum(part.nbytes for part, _ in group),
        frames=[memory_of(value) for _, value in group],
    )


def _arena() -> SharedMemoryPool | None:
    if os.environ.get("GANGLINE_TRANSPORT") in ("tcp", "ipc"):
        return None
    try:
        return SharedMemoryPool()
    except OSError:
        return None


def _job(timeout: float) -> tuple[environment.ServerJob, ChildServers | None]:
    """This worker's job; serves in its place where the environment gives it another role."""
    if environment.is_set():
        environment.serve_if_told()
        return environment.from_environment(), None
    return start_child_servers(timeout)


def _finish(
    queue: WorkQueue,
    wire: ServerClient,
    member: SchedulerClient,
    arena: SharedMemoryPool | None,
    embedded: ChildServers | None,
) -> None:
    if threading.current_thread().name.startswith(
        "gangline-"
    ):  # it had the last hold on the store, and would wait for itself
        threading.Thread(target=_give_back, args=(queue, wire, member, arena, embedded)).start()
    else:
        _give_back(queue, wire, member, arena, embedded)


def _give_back(
    queue: WorkQueue,
    wire: ServerClient,
    member: SchedulerClient,
    arena: SharedMemoryPool | None,
    embedded: ChildServers | None,
) -> None:
    queue.close()
    wire.close()
    member.close()
    if arena is not None:
        arena.close()
    if embedded is not None:
        embedded.close()
