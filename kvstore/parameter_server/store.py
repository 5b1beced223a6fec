"""The `dist_*` stores: a worker's key-value store on the parameter server."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import torch
from torch import Tensor

from gangline.collectives.environments.engines import Dmlc
from gangline.collectives.errors import DeadNodeError, GanglineError, StallError, nested_call
from gangline.collectives.limits import limits
from gangline.collectives.streams import SideStreams
from gangline.collectives.work import Work, WorkQueue
from gangline.kvstore.arguments import Pairs, Pushed, RowPulls, Value, by_key, merged, tensors_of
from gangline.kvstore.buckets import Bucket, BucketValues
from gangline.kvstore.compression import Compression
from gangline.kvstore.gradient_compression import CompressedPushes
from gangline.kvstore.group.remote_errors import error_text, make_error, refusal
from gangline.kvstore.group.serialization import name_of_dtype
from gangline.kvstore.group.worker_group import WorkerGroup
from gangline.kvstore.interface import KVStore, check_kept, refused_on_all_ranks
from gangline.kvstore.optimizer import clipping, state_parts
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.keyed import OptimizerState, checked
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server import environment
from gangline.kvstore.parameter_server.client.pending import RequestWork, command, request_all
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import CLOSE_SECONDS, ServerClient
from gangline.kvstore.parameter_server.pull import PullTargets, RowPull, wait_requests
from gangline.kvstore.parameter_server.push import PushEncoder, definition_requests
from gangline.kvstore.parameter_server.restart import Continuation
from gangline.kvstore.parameter_server.roles import serve_if_assigned
from gangline.kvstore.parameter_server.server import optimizer_shards
from gangline.kvstore.parameter_server.sharding import Sharding, ShardPlacement, agree_on_keys
from gangline.kvstore.parameter_server.torchrun import ChildServers, start_child_servers
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool
from gangline.kvstore.sparse import RowSparse

_log = logging.getLogger("gangline")
_Result = TypeVar("_Result")
MAX_GATHERED = 4 << 30
"""Bytes of optimizer state up to which worker 0 gathers it and writes a single file."""
_STEP_SECONDS = 0.1
_PUSHES = ("push", "push_weighted", "push_bucket", "pushpull")
_is_cuda = attrgetter("is_cuda")
_closed_jobs: set[tuple[str, str]] = set()
"""Jobs with servers of their own whose store this process, or one that it was forked from, has closed."""


class DistStore(KVStore):
    """Key-value store whose keys are sharded over servers; workers push to rounds and pull the results.

    A push returns once the caller's tensors may be overwritten. If a server rejects it later, or dies before it has
    received it, the next call raises the error. `barrier`, `exchange` and `close` return once servers have received all
    pushes; `close` raises if they have not within the timeout. After a push that failed with StallError or
    DeadNodeError, all later calls raise this error. A worker that is about two rounds of all keys ahead of the slowest
    blocks in its pushes, or in the next `barrier`, so that memory stays bounded. A process has one such store.

    In a process whose environment assigns it the role of scheduler or server, the constructor runs that role and then
    raises SystemExit(0).
    """

    def __init__(
        self, name: str = "dist_sync", *, max_staleness: int | None = None, timeout: float | None = None
    ) -> None:
        """Join the job of the environment: DMLC_* as set by `gangline launch`, or torchrun's variables.

        Args:
            name: name of the store.
            max_staleness: for async stores: number of pushes of a key by which this worker may be ahead of the slowest
                living worker; further pulls block. None: no bound.
            timeout: seconds that a call may wait for other processes; None: GANGLINE_TIMEOUT, by default 1800.

        Raises:
            RuntimeError: if the environment describes no job, or this process has closed its store of a job whose
                servers were started with it: they end when all workers have closed theirs.
            ValueError: if ``max_staleness`` is negative or given for a sync store, or the environment is invalid.
            MismatchError: if another worker's store has a different mode or ``max_staleness``.
            StallError: if a process does not take part within the timeout.
            DeadNodeError: if a process dies meanwhile.
        """
        super().__init__(name)
        is_async = "async" in name
        if max_staleness is not None and (not is_async or isinstance(max_staleness, bool) or max_staleness < 0):
            raise ValueError(
                f"max_staleness is {max_staleness!r}; expected 0 or more, of an async store (not {name!r})"
            )
        self.max_staleness = max_staleness
        self._timeout = limits().timeout if timeout is None else timeout
        mode = "async" if is_async else "sync"
        staleness = -1 if max_staleness is None else max_staleness
        job, child_servers = _find_job(self._timeout)
        own_job = (os.environ.get("GANGLINE_JOB_ID", ""), job.scheduler) if child_servers is None else None
        if own_job in _closed_jobs:
            raise RuntimeError(
                f"this process has closed its dist_* store of the job at {job.scheduler.removeprefix('tcp://')}, whose "
                f"servers end when all workers have closed theirs, so it cannot create another ({name!r}); keep one "
                "store for the whole program and pass it on, as in Module.fit(kvstore=store), start the job without "
                "servers (gangline launch -s 0), or use an 'allreduce' store"
            )
        with ExitStack() as stack:
            if child_servers is not None:
                stack.callback(child_servers.kill)
            self._scheduler = SchedulerClient("worker", job.scheduler, rank=job.rank, timeout=self._timeout)
            stack.callback(self._scheduler.close)
            stack.callback(self._scheduler.abandon)  # called first
            self._pool = _make_pool()
            if self._pool is not None:
                stack.callback(self._pool.close)
            self._servers = ServerClient(self._scheduler, mode, staleness, self._pool, self._timeout)
            stack.pop_all()
        self._queue = WorkQueue()
        self._streams = SideStreams()
        self._process = os.getpid()
        resources = own_job, self._queue, self._servers, self._scheduler, self._pool, child_servers
        self._finish = weakref.finalize(self, _finish_unclosed, self._process, *resources)
        self._sharding = Sharding(len(self._scheduler.servers), self._scheduler.server_memory)
        self._shards: dict[Key, list[ShardPlacement]] = {}
        self._rounds: dict[Key, int] = {}
        self._continuation = Continuation(self._scheduler, self._servers, self._shards, self._rounds, is_async=is_async)
        self._rates: dict[int, float] = {}  # learning rates by number of the group
        self._sent_rates: dict[int, float] = {}  # sent with pushes: on rank 0, and where set since the last join()
        self._version = -1  # the last one that was published
        self._late_error: Exception | None = None  # of a push that had already returned
        self._final_error: Exception | None = None  # raised by all later calls: a push may be lost, or join() failed
        self._encoder = PushEncoder(self._servers, self._scheduler, self._pool, on_device="device" in name)
        if self._scheduler.is_elastic:
            self._scheduler.leave_on_sigterm()

    _when_closed = "this worker has left the job: start the job again"

    @property
    def rank(self) -> int:  # noqa: D102  inherited
        return self._scheduler.rank

    @property
    def num_workers(self) -> int:  # noqa: D102  inherited
        return self._scheduler.num_workers

    @property
    def is_async(self) -> bool:  # noqa: D102  inherited
        return "async" in self.type

    def _exchange(self, data: bytes, name: str, root: int | None) -> list[bytes]:
        try:
            self._check_open()
            self._deliver()
        except Exception as error:  # of an earlier push: the others must not wait for this call
            if not self._is_nested(error):
                self._refuse(name, error)
            raise
        return self._exchange_now(data, name, root)

    def _exchange_now(self, data: bytes, name: str, root: int | None) -> list[bytes]:
        self._calls_begun += 1
        return self._scheduler.exchange(data, name, root)

    @property
    def _workers(self) -> WorkerGroup:
        """The workers, for calls that do not wait until servers have received this worker's pushes."""
        return WorkerGroup(self.rank, self.num_workers, self._exchange_now, self._scheduler.is_recorded)

    @property
    def group(self) -> WorkerGroup:  # noqa: D102  inherited
        return WorkerGroup(self.rank, self.num_workers, self._exchange, self._scheduler.is_recorded)

    # Restarts

    @property
    def is_restarted(self) -> bool:  # noqa: D102  inherited
        return self._scheduler.is_restarted

    @property
    def first_step(self) -> int:  # noqa: D102  inherited
        self._check_open()
        return self._continuation.first_step()

    @property
    def keeps_state(self) -> bool:  # noqa: D102  inherited
        return self._continuation.keeps_state

    def keep(self, state: Any) -> None:  # noqa: D102  inherited
        self._check_open()
        check_kept(state)
        self._continuation.keep(state)

    def kept(self) -> Any:  # noqa: D102  inherited
        self._check_open()
        return self._continuation.kept()

    def check_not_restarted(self, what: str) -> None:  # noqa: D102  inherited
        self._continuation.refuse(what)

    # Elastic jobs

    @property
    def is_elastic(self) -> bool:  # noqa: D102  inherited
        return self._scheduler.is_elastic

    @property
    def has_joined(self) -> bool:  # noqa: D102  inherited
        return self._continuation.has_joined

    def has_ended(self) -> bool:  # noqa: D102  inherited
        return self.is_elastic and self._scheduler.has_ended(0)

    def share(self, samples: int, step: int | None = None) -> slice | None:  # noqa: D102  inherited
        if not self._scheduler.is_elastic:
            return super().share(samples, step)
        self._check_open()
        return self._continuation.share(samples, step)

    def leave(self) -> None:  # noqa: D102  inherited
        self._check_open()
        if not self._scheduler.is_elastic:
            super().leave()
        if text := self._scheduler.ask_to_leave():
            raise RuntimeError(text)

    # Readers

    @property
    def address(self) -> str:  # noqa: D102  inherited
        return self._scheduler.address

    def _publish(self, version: int, extra: Mapping[Key, Tensor]) -> None:
        if self.rank:
            raise RuntimeError(
                f"publish() was called on worker {self.rank}; expected on worker 0, which does it for all"
            )
        if self.is_async:
            raise RuntimeError(f"a {self.type!r} store has no rounds of all workers to publish; expected dist_sync")
        if version <= self._version:
            raise ValueError(f"version {version} was published after version {self._version}; expected a higher one")
        self._check_not_pending(self._layout)
        self._queue.run(lambda: None, Work("publish"), list(self._layout), 0)  # earlier calls have begun their rounds
        self._raise_late_error()
        described: list[list[list[object]]] = [[] for _ in range(self._servers.count)]
        for key, shards in self._shards.items():
            for one in shards:
                layout = [one.layout.dtype, one.layout.shape, one.begin, one.numel]
                described[one.server].append([one.number, self._rounds[key], key, *layout])
        values = {key: one.detach().resolve_conj().resolve_neg().cpu().contiguous() for key, one in extra.items()}
        described[0] += [
            [-1, 0, key, name_of_dtype(one.dtype), one.shape, 0, one.numel()] for key, one in values.items()
        ]
        packed = [(msgpack.packb([version, of_server]), ()) for of_server in described]
        command(self._servers, "publish", {**dict(enumerate(packed)), 0: (packed[0][0], [*values.values()])})
        self._version = version

    def _refuse(self, call: str, error: Exception, keys: object = None) -> None:
        self._calls_begun += 1
        if error in (self._servers.told_error, self._final_error):  # the other workers know of it
            return
        if os.getpid() != self._process:  # a forked process has no part in the job
            return
        if call in _PUSHES:
            known = keys.keys if isinstance(keys, Bucket) else keys if isinstance(keys, (list, tuple)) else [keys]
            known = [key for key in known if isinstance(key, (str, int)) and key in self._rounds]
            self._continuation.count(dict.fromkeys(known))
            self._queue.run(lambda: self._refuse_rounds(known, error), Work(call), known, 0)
        elif not self._closed:
            self._scheduler.refuse(call, refusal(call, error))

    def dead_nodes(self) -> list[str]:  # noqa: D102  inherited
        dead = [f"{role} {rank}" for (role, rank), why in self._scheduler.gone.items() if why]
        return [*sorted(dead), *(["scheduler"] if self._scheduler.lost else [])]

    def _silent_nodes(self, seconds: float) -> list[str]:
        return self._scheduler.silent_members(seconds)

    @refused_on_all_ranks
    def join(self) -> int:  # noqa: D102  inherited
        self._check_open()
        if self._scheduler.is_elastic:
            self._continuation.refuse("join()")
        self._settle()
        command(self._servers, "join")
        try:
            result = self._scheduler.join(msgpack.packb([list(self._rounds.items()), list(self._sent_rates.items())]))
        except BaseException as error:  # rounds have closed without this worker, so it cannot push any more
            why = f"has given up join(): {str(error) or type(error).__name__}"
            kind = type(error) if isinstance(error, GanglineError) else GanglineError
            self._final_error = kind(f"worker {self.rank} {why}; only close() can follow")
            if not isinstance(error, DeadNodeError):  # else the others have the error of that death
                self._scheduler.leave(why)
            raise
        rates: dict[int, list[tuple[int, float]]] = {}  # pushes of a worker with a learning rate, and the rate
        for packed in result.data:
            rounds, sent = msgpack.unpackb(packed) if packed else ([], [])
            for group, rate in sent:
                rates.setdefault(group, []).append((sum(number for _, number in rounds), rate))
            for key, number in rounds:
                self._rounds[key] = max(self._rounds.get(key, 0), number)
        self._continuation.pushes.update(self._rounds)
        command(self._servers, "resume")
        for group, found in rates.items():
            # the rate of the worker with the most pushes; of equal ones, that of the lowest rank
            self._resume_rate(group, max(found, key=itemgetter(0))[1])
        self.barrier()
        return result.last

    # Keys

    _takes_tables = True

    def _init(self, pairs: Pushed, async_op: bool) -> Work:  # noqa: ARG002  always complete on return
        self._continuation.check_setting_up("init")
        layouts = [[key, name_of_dtype(one.dtype), list(one.shape), type(one) is RowSparse] for key, (one,) in pairs]
        gathered = self._workers.all_gather(layouts, "init")
        if self._scheduler.is_elastic:  # only workers of the start take part
            gathered = [one for one in gathered if one is not None]
        new = agree_on_keys(gathered, self._shards)
        groups = {layout.key: self._groups.of(layout.key) for layout in new}
        whole = {key for key, group in groups.items() if group is not None and group.spec.needs_whole(key)}
        placed = self._sharding.place([layout for layout in new if layout.key in whole], whole=True)
        placed |= self._sharding.place([layout for layout in new if layout.key not in whole])
        self._shards.update(placed)
        self._rounds.update(dict.fromkeys(placed, 0))
        self._continuation.pushes.update(dict.fromkeys(placed, 0))
        self._workers.run_on_rank(lambda: self._define(pairs), "init")
        return Work.finished("init")

    def _forget(self, keys: Iterable[Key]) -> None:
        super()._forget(keys)
        for key in keys:
            self._sharding.remove(self._shards.pop(key, []))
            self._rounds.pop(key, None)

    def _define(self, pairs: Sequence[tuple[Key, Sequence[Value]]]) -> None:
        """Send the values of these keys to the servers."""
        request_all(self._servers, definition_requests(pairs, self._shards), "init")

    # Push and pull

    def _push(self, pairs: Pushed, priority: int, async_op: bool) -> Work:
        return self._push_pull("push", pairs, None, priority, async_op)

    def _push_weighted(self, pairs: Pushed, weight: float, priority: int, async_op: bool) -> Work:
        weighted = pairs if weight else [(key, []) for key, _ in pairs]
        return self._push_pull("push", weighted, None, priority, async_op, weight)

    def _push_bucket(
        self, bucket: Bucket, values: BucketValues, keys: list[Key], weight: float | None, priority: int, async_op: bool
    ) -> Work:
        if weight == 0:
            keys = []

        def on_host() -> Pushed:
            return _of_all_keys(bucket, [self._encoder.on_host(values)], keys)

        on_gpus = all(isinstance(value, Tensor) and not value.is_cpu for value in values)
        pairs = _of_all_keys(bucket, values, keys)
        return self._push_pull("push", pairs, None, priority, async_op, weight, on_host if on_gpus else None)

    def _pushpull(self, values: Pushed, outs: Pairs, priority: int, async_op: bool) -> Work:
        return self._push_pull("pushpull", values, outs, priority, async_op)

    def _push_pull(
        self,
        name: str,
        pairs: Pushed,
        outs: Pairs | None,
        priority: int,
        async_op: bool,
        weight: float | None = None,
        on_host: Callable[[], Pushed] | None = None,
    ) -> Work:
        pairs = pairs if len(pairs) == 1 else merged(pairs)
        if self._scheduler.keeps_positions:
            self._continuation.count([key for key, _ in pairs])
        group = self._groups.of(pairs[0][0]) if pairs and self._sent_rates else None
        rate = None if group is None else self._sent_rates.get(group.number)
        merged_outs = None if outs is None else merged(outs)

        def push(work: RequestWork) -> None:
            self._servers.wait_for_room()
            targets = (
                None
                if merged_outs is None
                else PullTargets(merged_outs, self._shards, self._servers.memory_of, work.codec)
            )
            rounds = {key: self._rounds[key] + 1 for key, _ in pairs}
            try:
                values = self._encoder.encode(on_host() if on_host else pairs, self._shards, weight)
                requests = self._encoder.requests(values, rounds, rate, targets, work.name, priority, weight)
            except Exception as error:
                self._refuse_rounds([key for key, _ in pairs], error)
                raise
            self._begin_rounds(rounds)
            work.on_error = self._end_after_loss
            work.submit(requests, self._servers)

        return self._start(name, push, pairs if outs is None else [*pairs, *outs], priority, async_op)

    def _begin_rounds(self, rounds: Mapping[Key, int]) -> None:
        self._calls_begun += 1
        self._rounds.update(rounds)

    def _end_after_loss(self, error: BaseException) -> None:
        """Leave the job after a push that servers may have lost: its round could never close."""
        if isinstance(error, (StallError, DeadNodeError)) and self._final_error is None:
            self._final_error = error
            if isinstance(error, StallError):  # else the others have the error of that death
                self._scheduler.leave(f"has given up a push: {error}")

    def _refuse_rounds(self, keys: Sequence[Key], error: Exception) -> None:
        """Fail the next rounds of keys on all workers, which would otherwise wait for this worker's push."""
        keys = [key for key in dict.fromkeys(keys) if key in self._rounds]
        if self.is_async or not keys:
            return
        values = self._encoder.refusals((shard for key in keys for shard in self._shards[key]), error_text(error))
        rounds = {key: self._rounds[key] + 1 for key in keys}
        requests = self._encoder.requests(values, rounds, None, None, "push", 0)
        self._begin_rounds(rounds)
        RequestWork("push").submit(requests, self._servers)

    def _pull(self, pairs: Pairs, priority: int, async_op: bool) -> Work:
        self._continuation.before_pull()
        merged_outs = pairs if len(pairs) == 1 else merged(pairs)

        def pull(work: RequestWork) -> None:
            targets = PullTargets(merged_outs, self._shards, self._servers.memory_of, work.codec)
            work.submit(targets.requests(self._rounds, work.name, priority), self._servers)

        return self._start("pull", pull, pairs, priority, async_op)

    def _row_sparse_pull(self, pulls: RowPulls, priority: int, async_op: bool) -> Work:
        self._continuation.before_pull()

        def pull(work: RequestWork) -> None:
            for key, targets in pulls:
                rows = RowPull(self._shards[key], targets)
                work.submit(rows.requests(self._rounds[key], work.name, priority), self._servers)

        pairs = [(key, [tensor for target in targets for tensor in target]) for key, targets in pulls]
        return self._start("row_sparse_pull", pull, pairs, priority, async_op)

    def _start(
        self,
        name: str,
        prepare: Callable[[RequestWork], None],
        pairs: Sequence[tuple[Key, Sequence[Any]]],
        priority: int,
        async_op: bool,
    ) -> Work:
        """Prepare requests after earlier calls on the same keys; the Work completes when they are answered."""
        if self._late_error is not None or self._final_error is not None:
            self._raise_late_error()
        keys = list(dict(pairs))
        shown = f"{name} of " + (f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys")
        tensors = [*tensors_of(pairs)] if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        section = self._streams.behind_caller(tensors) if True in map(_is_cuda, tensors) else None
        codec = None if self._compressed is None else self._compressed.compression.pull_codec
        work = RequestWork(shown, section, codec, self._keep_late_error)
        if async_op:

            def run() -> None:
                work.run(prepare)
                self._servers.drive_in_background()

            self._queue.submit(run, Work(name), keys, priority)
            return work
        if not self._queue.run_now(partial(work.run, prepare), name):
            self._queue.run(partial(work.run, prepare), Work(name), keys, priority)
        work.is_awaited = True
        self._servers.wait(work.is_completed)
        self._servers.watch_connections()
        work.wait()
        return work

    def _settle(self) -> None:
        """Wait until servers have received all pushes, queued ones included."""
        self._queue.run(lambda: None, Work("settle"), list(self._layout), 0)
        self._servers.flush()
        self._raise_late_error()

    def _deliver(self) -> None:
        """Wait until servers have received the pushes that have returned."""
        self._servers.deliver()
        self._raise_late_error()

    def _keep_late_error(self, error: Exception) -> None:
        self._late_error = self._late_error or error

    def _raise_late_error(self) -> None:
        error, self._late_error = self._late_error or self._final_error, None
        if error is not None:
            raise error

    def _catch_up(self, call: str) -> None:
        """Wait until the rounds of all pushes are closed."""
        self._settle()
        rounds = [(shard, self._rounds[key]) for key, shards in self._shards.items() for shard in shards]
        request_all(self._servers, wait_requests([pair for pair in rounds if pair[1]], call), call)

    def _assign(self, pairs: Pairs) -> None:
        self._catch_up("assign")
        self._workers.barrier("assign")
        self._workers.run_on_rank(lambda: self._define(pairs), "assign")

    # Optimizer

    def _set_optimizer(self, group: OptimizerGroup) -> None:
        spec, number = group.spec, group.number
        self._continuation.check_setting_up("set_optimizer")
        if spec.clip_global_norm is not None:
            self.check_not_restarted("an optimizer with clip_global_norm")
        keys = None if group.keys is None else sorted(group.keys, key=repr)
        packed = optimizer_shards.pack_group(number, keys, spec)
        own = [key for key in self._shards if (key in group.keys if group.keys is not None else self._is_loose(key))]
        for key in own:
            checked(spec.of(key), key, self._shards[key][0].layout.empty(rows=1))
        self._catch_up("set_optimizer")
        self._workers.check_same({**{n: repr(v) for n, v in vars(spec).items()}, "keys": repr(keys)}, "set_optimizer")
        if whole := [key for key in own if spec.needs_whole(key)]:
            self._merge_shards(whole)
        self._workers.run_on_rank(lambda: command(self._servers, "optimizer", packed), "set_optimizer")
        rate = self._rates[number] = spec.rate
        self._sent_rates.pop(number, None)
        if not self.rank:
            self._sent_rates[number] = rate
            if self.is_async and self.is_restarted:
                self._send_rate(number, rate)  # servers have the rate of the former process

    def _is_loose(self, key: Key) -> bool:
        """Return True if a key is in no group with keys of its own."""
        group = self._groups.of(key)
        return group is None or group.keys is None

    def _merge_shards(self, keys: Sequence[Key]) -> None:
        """Replace the shards of each split key by one, for an optimizer that needs the whole tensor."""
        split = [key for key in keys if len(self._shards[key]) > 1]
        values: dict[Key, Tensor] = {}

        def pull() -> None:
            for key in split:
                values[key] = self._shards[key][0].layout.empty()
                self._pull([(key, [values[key]])], 0, False)

        self._workers.run_on_rank(pull, "set_optimizer")
        old = {key: self._shards[key] for key in split}
        for shards in old.values():
            self._sharding.remove(shards)
        self._shards.update(self._sharding.place([shards[0].layout for shards in old.values()], whole=True))
        self._rounds.update(dict.fromkeys(split, 0))
        self._continuation.pushes.update(dict.fromkeys(split, 0))

        def define() -> None:
            self._define([(key, [value]) for key, value in values.items()])
            numbers = _by_server(shard for shards in old.values() for shard in shards)
            command(self._servers, "remove", {server: (msgpack.packb(own), ()) for server, own in numbers.items()})

        self._workers.run_on_rank(define, "set_optimizer")

    def _update(self, group: OptimizerGroup) -> None:
        number, spec = msgpack.packb(group.number), group.spec

        def update(rate: float | None) -> None:
            assert spec.clip_global_norm is not None
            norms = [one for packed, _ in command(self._servers, "norms", number) for one in msgpack.unpackb(packed)]
            if norms:
                norm = clipping.norm_of_norms(torch.tensor(norms, dtype=torch.float64, device="cpu").unbind())
                factor = clipping.factor(norm * abs(spec.rescale_grad), spec.clip_global_norm)
                command(self._servers, "update", msgpack.packb([group.number, float(factor), rate]))

        self._end_updates(group, update, "update")

    def _drop_updates(self, group: OptimizerGroup) -> None:
        number = msgpack.packb(group.number)
        self._end_updates(group, lambda _: command(self._servers, "drop", number), "drop_updates")

    def _end_updates(self, group: OptimizerGroup, action: Callable[[float | None], object], what: str) -> None:
        """Run an action on the first worker that is not inside join(), with the learning rate; None: no change."""
        self._catch_up(what)
        gathered = self._workers.all_gather([self._sent_rates.get(group.number)], what)
        present = [rank for rank, one in enumerate(gathered) if one is not None]
        rate = next((gathered[rank][0] for rank in present if gathered[rank][0] is not None), None)
        self._workers.run_on_rank(lambda: action(rate), what, present[0])

    def _rate_of(self, group: OptimizerGroup) -> float:
        return self._rates[group.number]

    def _set_rate(self, group: OptimizerGroup, rate: float) -> None:
        """Set the learning rate from the next push on; that of the lowest rank outside `join` is used.

        In an async store it is sent to the servers at once, and applies to pushes of all workers that arrive later.
        """
        if self.is_async and rate != self._sent_rates.get(group.number):
            self._send_rate(group.number, rate)
        self._rates[group.number] = self._sent_rates[group.number] = rate

    def _send_rate(self, number: int, rate: float) -> None:
        """Set this worker's learning rate of a group on all servers, after its earlier pushes."""
        self._settle()
        command(self._servers, "learning_rate", msgpack.packb([number, rate]))

    def _resume_rate(self, number: int, rate: float) -> None:
        """Continue after join() with the same learning rate on all workers, which rank 0 sends."""
        if self.is_async and self.rank == 0 and rate != self._sent_rates.get(number):
            self._send_rate(number, rate)
        self._rates[number] = rate
        self._sent_rates.pop(number, None)
        if not self.rank:
            self._sent_rates[number] = rate

    def _shards_of(self, group: OptimizerGroup) -> dict[Key, list[ShardPlacement]]:
        return {key: shards for key, shards in self._shards.items() if self._groups.of(key) is group}

    def _state_of(self, group: OptimizerGroup) -> OptimizerState:
        self._catch_up("optimizer_state")
        return optimizer_shards.merge_states(
            group.spec, self._rates[group.number], self._shards_of(group), self._state_parts(group)
        )

    def _state_parts(self, group: OptimizerGroup) -> Iterator[tuple[bytes, list[Tensor]]]:
        """Yield the optimizer state of a group's shards, from each server in parts that messages can hold."""
        left = _by_server(shard for shards in self._shards_of(group).values() for shard in shards)
        while left:
            asked = {server: (msgpack.packb([group.number, own]), ()) for server, own in left.items()}
            for server, part in zip(sorted(left), command(self._servers, "state", asked), strict=True):
                del left[server][: len(optimizer_shards.unpack_part(*part)[0])]
                yield part
            left = {server: own for server, own in left.items() if own}

    def _load_state(self, group: OptimizerGroup, read: Callable[[], OptimizerState]) -> None:
        self._load(lambda: self._send_state(group, read()))

    def _load(self, load: Callable[[], None]) -> None:
        """Call a function on rank 0, once all workers have caught up."""
        self._catch_up("load_optimizer_state")
        self._workers.barrier("load_optimizer_state")
        self._workers.run_on_rank(load, "load_optimizer_state")

    def _send_state(self, group: OptimizerGroup, state: OptimizerState) -> None:
        for parts in optimizer_shards.split_state(group, state, self._shards_of(group)):
            command(self._servers, "load", parts)

    # Large optimizer state, which servers write and read themselves

    def save_optimizer_states(self, path: str | Path, *, group: OptimizerGroup | None = None) -> None:  # noqa: D102
        self._check_open()
        group = self._group_for("save_optimizer_states", group)
        self._catch_up("save_optimizer_states")
        path = Path(path).absolute()
        sizes = command(self._servers, "state_bytes", msgpack.packb([group.number]))
        if sum(msgpack.unpackb(size) for size, _ in sizes) <= MAX_GATHERED:
            super().save_optimizer_states(path, group=group)
            state_parts.remove_parts(path)
            return
        token = secrets.token_hex(4)
        names = [f"{path.name}.{token}-{server}.part" for server in range(self._servers.count)]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with state_parts.saving(path, token) as seen:
                folder = str(path.parent)
                self._command_in_steps("save", [[group.number, token, folder, name, seen] for name in names])
                of_keys = self._shards_of(group)
                shapes = {json.dumps(key): list(shards[0].layout.shape) for key, shards in of_keys.items()}
                spec, rate = group.spec, self._rates[group.number]
                state = OptimizerState(spec.name, spec.rate, rate, shapes, {}, {}, spec.names(of_keys))
                state_parts.save_index(path, names, state)
        except BaseException:
            for name in names:
                path.with_name(name).unlink(missing_ok=True)
            raise

    def _load_file(self, group: OptimizerGroup, path: Path) -> None:
        def load() -> None:
            state, names = state_parts.load(path.absolute(), MAX_GATHERED)
            if not names:
                self._send_state(group, state)
                return
            state.check(group.spec, {key: one[0].layout.shape for key, one in self._shards_of(group).items()})
            for is_check in (True, False):  # a damaged file changes nothing
                given = [group.number, secrets.token_hex(4), str(path.absolute().parent), names, is_check]
                self._command_in_steps("load_files", [given] * self._servers.count)

        self._load(load)

    def _command_in_steps(self, name: str, payloads: Sequence[list[Any]]) -> None:
        """Run a command that servers work on for a while; StallError if none goes on within the timeout."""
        packed = {server: (msgpack.packb(payload), ()) for server, payload in enumerate(payloads)}
        before: list[Any] = []
        since = time.monotonic()
        while True:
            told = [msgpack.unpackb(result) for result, _ in command(self._servers, name, packed)]
            is_over = all(is_over for is_over, *_ in told)
            is_late = told == before and time.monotonic() > since + self._timeout
            for _, _, error, text in told if is_over or is_late else ():  # no server writes or reads any more
                if error:
                    raise make_error(error, text)
            if is_over:
                return
            if is_late:
                late = [server for server, (is_over, *_) in enumerate(told) if not is_over]
                raise StallError(f"{name} of optimizer state: servers {late} have not gone on for {self._timeout:g} s")
            if told != before:
                before, since = told, time.monotonic()
            time.sleep(_STEP_SECONDS)

    # Compression

    def _set_compression(self, compression: Compression | None) -> None:
        if self._scheduler.is_elastic:
            self._continuation.refuse("compression")
        params = None if compression is None else compression.params
        self._settle()
        self._workers.check_same(params or {"compression": "none"}, "set_gradient_compression")
        packed = msgpack.packb(params)
        self._workers.run_on_rank(lambda: command(self._servers, "compression", packed), "set_gradient_compression")
        self._compressed = self._encoder.compressed = None if compression is None else CompressedPushes(compression)

    def _run_exclusive(self, operation: Callable[[], _Result]) -> _Result:
        self._settle()
        return operation()

    def _check_caller(self) -> None:
        if os.getpid() != self._process:
            raise GanglineError(
                f"this store belongs to process {self._process}, from which this one was forked: use it there, or "
                "start the child with multiprocessing's 'spawn' or 'forkserver' method"
            )
        if self._servers.waiting and threading.get_ident() in self._servers.waiting:
            raise nested_call(f"a {self.type!r} store")
        self._queue.check_outermost(f"a {self.type!r} store")

    def close(self) -> None:  # noqa: D102  inherited
        if not self._closed and os.getpid() == self._process:
            self._check_caller()
            super().close()
            is_failing = sys.exc_info()[0] is not None  # do not replace or delay the error in flight
            if is_failing:
                self._scheduler.abandon()
            detached = self._finish.detach()
            assert detached is not None
            _, _, (_, *resources), _ = detached
            seconds = min(self._timeout, CLOSE_SECONDS) if is_failing else self._timeout
            error = _finish(*resources, seconds=seconds) or self._late_error
            if error is None:
                return
            if not is_failing:
                raise error
            _log.error("worker %d leaves, and one of its pushes was lost: %s", self.rank, error)


def _of_all_keys(bucket: Bucket, values: BucketValues, keys: Sequence[Key]) -> Pushed:
    """Return the values of every key of a bucket; an empty list for keys that are not among ``keys``."""
    present = dict(by_key(bucket, values, keys))
    return [(key, present.get(key, [])) for key in bucket.keys]


def _make_pool() -> SharedMemoryPool | None:
    if os.environ.get("GANGLINE_TRANSPORT") in ("tcp", "ipc"):
        return None
    try:
        return SharedMemoryPool()
    except OSError:
        return None


def _find_job(timeout: float) -> tuple[environment.ServerJob, ChildServers | None]:
    """Read the job from the environment. If DMLC_ROLE is server or scheduler, run that role and raise SystemExit(0)."""
    if Dmlc.has_servers(os.environ):
        serve_if_assigned()
        return environment.from_environment(), None
    return start_child_servers(timeout)


def _finish(
    job: tuple[str, str] | None,
    queue: WorkQueue,
    servers: ServerClient,
    scheduler: SchedulerClient,
    pool: SharedMemoryPool | None,
    child_servers: ChildServers | None,
    *,
    seconds: float = CLOSE_SECONDS,
) -> Exception | None:
    """Close the resources of a store; return the error if servers may not have received all pushes in time."""
    if job is not None:
        _closed_jobs.add(job)
    try:
        queue.close()
        servers.close(seconds)
    except StallError as error:
        return error
    finally:
        scheduler.leave()
        if child_servers is not None:
            child_servers.close(lambda: scheduler.is_job_over)
        scheduler.close()
        if pool is not None:
            pool.close()
    return None


def _by_server(shards: Iterable[ShardPlacement]) -> dict[int, list[int]]:
    """Return the numbers of shards by server."""
    numbers: dict[int, list[int]] = {}
    for shard in shards:
        numbers.setdefault(shard.server, []).append(shard.number)
    return numbers


def _finish_unclosed(process: int, *resources: Any) -> None:
    """Close the resources of a dropped store; in a new thread if one of their own threads dropped it."""
    if os.getpid() != process:  # a forked one
        return
    if getattr(sys, "last_value", None) is not None:  # an error ends this process
        resources[3].abandon()

    def close_all() -> None:
        error = _finish(*resources)
        if error is not None:
            _log.error("%s; call close() to wait longer and to get this as an exception", error)

    if threading.current_thread().name.startswith("gangline-"):  # one of the store's own threads cannot join itself
        threading.Thread(target=close_all).start()
    else:
        close_all()
