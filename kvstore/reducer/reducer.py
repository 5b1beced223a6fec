"""Reducer: gradients gathered in flat buckets that are pushed to the store as soon as backward has filled them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter, methodcaller, ne
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gangline.collectives.eager import run_eagerly
from gangline.collectives.errors import DeadNodeError, StallError
from gangline.collectives.timeline import recorder
from gangline.collectives.work import Work
from gangline.kvstore.arguments import Value
from gangline.kvstore.buckets import BUCKET_BYTES, Bucket, BucketValue, plan
from gangline.kvstore.interface import KVStore
from gangline.kvstore.nan_check import checks_finite, not_finite
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.sparse import RowSparse
from gangline.kvstore.torch_hooks import watch_torch

_log = logging.getLogger("gangline")
_grad, _layout = attrgetter("grad"), attrgetter("layout")
_data_ptr, _stride = methodcaller("data_ptr"), methodcaller("stride")
_ROWS = "sparse rows"  # name of a collective call
_Place = tuple[int, tuple[int, ...]]  # address and strides of a tensor
Parameters = Mapping[Any, torch.Tensor]
"""Trained parameters of a replica, by `Key`."""


@dataclass(eq=False)
class BucketState:
    """A bucket with its flat tensors on every replica, and its progress in the current backward."""

    bucket: Bucket
    priority: int
    """Number of the bucket: the last bucket holds the first layers, which the next forward needs first."""
    keys: list[Key]
    """The parameters' keys."""
    parameters: list[torch.Tensor]
    """The parameters of all replicas."""
    weights: list[torch.Tensor]
    """Flat weights, one tensor per replica; none if the store only has gradients."""
    gradients: list[torch.Tensor | None]
    """Flat gradients, one per replica; None on the host, where gradients stay where autograd accumulates them."""
    is_loose: bool = False
    """True if parameters keep memory of their own, into which the flat weights are copied."""
    weight_views: list[dict[Key, torch.Tensor]] = field(init=False)
    gradient_views: list[dict[Key, torch.Tensor]] = field(init=False)
    pending: dict[int, set[Key]] = field(default_factory=dict)
    """Keys of gradients yet to arrive, by replica index; empty if the bucket is not pushed before `finish`."""
    is_full: bool = False
    """True if all gradients of this backward have arrived."""
    events: list[torch.cuda.Event] = field(default_factory=list)
    """Events after which the flat gradients on GPUs are complete."""
    push: Work | None = None
    """The bucket's push in this step, if it was started."""

    def __post_init__(self) -> None:
        self.gradient_views = [self.bucket.views(flat) if flat is not None else {} for flat in self.gradients]
        self.weight_views = [self.bucket.views(flat) for flat in self.weights]
        self.weight_places = places_of(view for views in self.weight_views for view in views.values())


@run_eagerly
class Reducer:
    """Pushes the gradients of all replicas to a store, and pulls the new weights.

    The first backward is only recorded: the order in which gradients arrive on rank 0 becomes the order of the buckets;
    parameters with sparse gradients are in no bucket. From then on the replicas' parameters are views of flat tensors,
    into which the store's weights are copied, and hooks count the gradients of each bucket. On a GPU the gradients of a
    bucket are copied into a flat tensor, to need only one transfer. On the host, and with ``in_place``, the store reads
    gradients where autograd accumulated them.

    Autograd does not accumulate into the flat tensor, because accumulation also clears and reads it. One copy costs
    half of that, and assigning to ``.grad`` cannot detach a bucket.

    Workers of a synchronous store push every bucket in every step, in one order, with their weight and the keys that
    they have gradients for. They exchange nothing else, except the bucket order after the first backward and the row
    numbers of sparse gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Parameters],
        store: KVStore,
        *,
        loose: Collection[Any] = (),
        sparse: Collection[Any] = (),
        in_place: bool = False,
        group: OptimizerGroup | None = None,
        continues_by: str = "a Trainer whose loop does not call kept()",
    ) -> None:
        """Register hooks on the trained parameters of each replica, whose weights the store holds already.

        Parameters of ``loose`` keys keep memory of their own; gradients of ``sparse`` keys may be sparse. ``in_place``
        lets the store update the parameters of a single replica in place, which it must not do during backward.
        ``group`` is the optimizer of the keys; None: the store returns sums. ``continues_by`` says whose training
        cannot go on in a restarted worker without a call of `kept`.
        """
        watch_torch()
        self._parameters: list[dict[Key, torch.Tensor]] = [dict(of_replica) for of_replica in parameters]
        self._store = store
        self._in_step = store.num_workers > 1 and not store.is_async
        self._buckets: list[BucketState] = []
        self._bucket_of: dict[Key, BucketState] = {}
        self._loose = set(loose)
        self._in_place = in_place
        self.group = group
        self._updates_wait = group is not None and group.updates_wait
        self._continues_by = continues_by
        self._must_continue = store.is_restarted and not store.is_elastic  # where `share` does it
        self.sparse_keys = set(sparse).intersection(parameters[0])  # their gradients are pushed as rows
        self._arrivals: dict[Key, int] = {}  # arrivals of each gradient in the recorded backward, in order
        self._order: list[list[Key]] = []  # keys in bucket order, repeated and sparse ones
        self._active: list[int] = []  # indices of the replicas that take part in this backward
        self._weight: float | None = None
        self._is_rerun = False  # whether this backward repeats one that failed
        self._repeated: set[Key] = set()  # parameters whose gradient arrives more than once
        self._warned: set[Key] = set()
        self._released: set[Key] = set()  # parameters that are not views until the next step
        self._checks_finite = checks_finite()
        self._keeps_hooks = self._checks_finite
        self._lock = threading.Lock()
        self._push_lock = threading.Lock()
        self._hooks: list[RemovableHandle] = []
        self._is_early = False
        self.before_rows: Callable[[Key, torch.Tensor | None], object] = _ignore
        """Called with a key and row numbers (None: all rows) before the gradients of these rows are pushed."""
        self.after_rows: Callable[[Key, torch.Tensor | None], object] = _ignore
        """Called when the store's values have replaced these rows."""
        self._add_hooks()

    def _add_hooks(self) -> None:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index, key))  # type: ignore[no-untyped-call]
            for index, of_replica in enumerate(self._parameters)
            for key, parameter in of_replica.items()
        ]

    def move_hooks_last(self) -> None:
        """Order this reducer's hooks, which push the gradients, after those that the user has registered since."""
        for hook in self._hooks:
            hooks = hook.hooks_dict_ref()
            if hooks and next(reversed(hooks)) != hook.id:
                hooks[hook.id] = hooks.pop(hook.id)  # autograd does not follow OrderedDict.move_to_end

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(
        self, active: Iterable[int], *, push_early: bool, weight: float | None = None, rerun: bool = False
    ) -> None:
        """Prepare for a backward.

        With ``push_early`` each bucket is pushed as soon as the ``active`` replicas have filled it, instead of in
        `finish`, whose weight is the same. ``rerun``: the backward computes gradients of the same batch again after an
        earlier one has failed. Buckets that were pushed then held the gradients of all replicas: they count, and are
        not pushed again.
        """
        if push_early and self._must_continue:
            self._check_continued()
        self._active = list(active)
        self._weight = weight
        self._is_rerun = rerun
        if not self._buckets:
            self._arrivals.clear()
        elif push_early and not self._hooks:
            self._add_hooks()
        elif push_early:
            self.move_hooks_last()
        elif self._hooks and not (self._is_early or self._keeps_hooks):  # in a plain loop no bucket is pushed early
            self._remove_hooks()
        self._is_early = push_early
        push_early = push_early and (self._in_step or weight != 0)
        for state in self._buckets:
            if not rerun:
                state.push = None
            state.is_full = False
            state.events.clear()
            waits = not push_early or self._repeated.intersection(state.keys)
            state.pending = {} if waits else {index: set(state.keys) for index in self._active}

    def refuse(self, error: BaseException) -> bool:
        """After a failed backward, fail the step on all workers if some of its buckets have been pushed.

        The weights become those of the store, to which the pushed buckets may have been applied. Collective: the other
        workers are in the same step. Return False if no bucket was pushed; the others then wait for this worker's next
        step.
        """
        self._active = []
        left = [state for state in self._buckets if state.push is None]
        count = len(self._buckets)
        if len(left) == count:
            return False
        reason = RuntimeError(
            f"backward failed on rank {self._store.rank} after {count - len(left)} of {count} buckets of gradients had "
            f"been sent: {type(error).__name__}: {error}"
        )
        calls: list[tuple[str, Bucket | None]] = [("push_bucket", state.bucket) for state in left]
        if self.sparse_keys:
            calls.append((_ROWS, None))
        if self._in_step:
            _make_calls(partial(self._store.refuse, call, reason, bucket) for call, bucket in calls)
        self._drop_updates()
        self._reload()
        for state in self._buckets:
            state.push, state.pending = None, {}
        return True

    def keep(self, state: Any) -> None:
        """Save the weights and a state of the caller between two steps; see `KVStore.keep`."""
        if self._store.keeps_state:
            weights = {key: parameter.detach() for key, parameter in self._parameters[0].items()}
            residuals = self._store.compression_residuals()
            assert self.group is not None
            self._store.keep([state, self._order, weights, residuals, self.group.learning_rate])

    @torch.no_grad()
    def kept(self) -> Any:
        """Restore the weights saved before a restart, and return the caller's state; None if there is none.

        RuntimeError if nothing was saved before this worker's first push.
        """
        found = self._store.kept()
        if found is None:
            if self._must_continue and self._store.first_step:
                self._store.check_not_restarted("training of which nothing was kept")
            self._must_continue = False
            return None
        self._must_continue = False
        state, order, weights, residuals, learning_rate = found
        if order and not self._buckets:
            self._use_order(order)
        for of_replica in self._parameters:
            for key, value in weights.items():
                of_replica[key].copy_(value)
        if self._store.compresses:
            self._store.load_compression_residuals(residuals)
        self._store.set_learning_rate(learning_rate, group=self.group)
        return state

    def _drop_updates(self) -> None:
        """After a failed push, drop the pushes that wait for an update; other workers drop or refuse them."""
        if self._updates_wait:
            _make_calls([partial(self._store.drop_updates, group=self.group)])

    def _reload(self) -> None:
        """After a failed step, pull the weights of all buckets, ignoring errors."""
        _make_calls(partial(self._pull, state) for state in self._buckets)

    def _on_gradient(self, index: int, key: Key, parameter: torch.Tensor) -> None:
        """Count a gradient that autograd has just accumulated; runs in the autograd thread."""
        if self._checks_finite and not _is_finite(parameter.grad):
            raise not_finite(key, self._store.rank)
        state = self._bucket_of.get(key)
        if state is None:
            if not self._buckets and self._active and index == self._active[0]:
                self._arrivals[key] = self._arrivals.get(key, 0) + 1
            return
        if state.push is not None:
            if self._is_rerun:
                return
            raise RuntimeError(
                f"parameter {key!r} got another gradient after its bucket was pushed, which happens if layers that "
                "share a weight are checkpointed with use_reentrant=True; call forward_backward() and update() "
                "instead of forward_backward_update(), or checkpoint with use_reentrant=False"
            )
        gradient = parameter.grad
        if not state.pending or gradient is None or gradient.layout is not torch.strided:
            return
        with self._lock:
            pending = state.pending.get(index)
            if pending is None:
                return
            pending.discard(key)
            if pending:
                return
            if parameter.is_cuda:
                state.events.append(torch.cuda.current_stream(parameter.device).record_event())
            del state.pending[index]
            if state.pending:
                return
            state.is_full = True
        if self._in_step:
            self._push_full()
        else:
            self._push(state, self._active, state.keys, async_op=True)

    def _push_full(self) -> None:
        """Push full buckets in order, up to the first that is not full."""
        with self._push_lock:
            for state in self._buckets:
                if not state.is_full:
                    return
                if state.push is None:
                    self._push(state, self._active, state.keys, async_op=True)

    def _push(self, state: BucketState, indices: Iterable[int], keys: Sequence[Key], *, async_op: bool = False) -> None:
        """Push a bucket's gradients of these replicas; ``keys`` have a gradient on some of them."""
        if recorder.current is not None:
            recorder.current.add_instant(f"bucket {state.priority} ready", bytes=state.bucket.nbytes)
        for event in state.events:
            torch.cuda.current_stream(event.device).wait_event(event)
        if self._store.compresses and keys:  # every replica pushes, or residuals would be applied to other replicas
            indices = range(len(self._parameters))
        values: list[BucketValue] = [self._value(state, index, keys) for index in indices] if keys else [{}]
        self._push_values(state, values, keys, self._weight if self._in_step else None, async_op=async_op)

    def _push_values(
        self,
        state: BucketState,
        values: Sequence[BucketValue],
        keys: Sequence[Key],
        weight: float | None,
        *,
        async_op: bool,
    ) -> None:
        """Push a bucket; errors are raised by `finish`, because other workers wait for a push of every bucket."""
        try:
            state.push = self._store.push_bucket(
                state.bucket, values, keys, state.priority, weight=weight, async_op=async_op
            )
        except Exception as error:  # noqa: BLE001  `finish` raises it
            state.push = Work(f"push of bucket {state.priority}")
            state.push.complete(error)

    def _value(self, state: BucketState, index: int, keys: Sequence[Key]) -> BucketValue:
        """Return a replica's gradients of a bucket, with zeros for missing ones where all must be pushed."""
        flat, views = state.gradients[index], state.gradient_views[index]
        parameters = self._parameters[index]
        if flat is not None:
            _copy_to_bucket(parameters, views, keys)
            return flat
        gradients = dict(zip(keys, map(_grad, map(parameters.__getitem__, keys)), strict=True))
        if {*map(type, gradients.values())} == {torch.Tensor}:
            return gradients
        if self._store.compresses:
            return {key: torch.zeros_like(parameters[key]) if g is None else g for key, g in gradients.items()}
        return {key: gradient for key, gradient in gradients.items() if gradient is not None}

    def finish(self, weight: float | None = None) -> None:
        """Push what was not pushed yet, and pull all weights into the replicas.

        Parameters without a gradient on any replica of any worker are not changed.

        Args:
            weight: None: gradients are summed over the workers. A number: the gradients are this worker's mean over
                this weight, and the update uses the weighted mean over the workers. With weight 0 the gradients are
                ignored; if all workers have weight 0, nothing is updated.
        """
        with recorder.current.span("exchange") if recorder.current is not None else nullcontext():
            if self._must_continue:
                self._check_continued()
            self._active = []
            self._weight = weight
            try:
                if self._in_step or weight != 0:
                    self._push_all()
                for state in reversed(self._buckets):
                    if state.push is not None:
                        self._pull(state)
                        state.push = None
            except (DeadNodeError, StallError):
                raise
            except Exception:  # whatever failed, weights must be the store's; raised again
                self._reload()
                raise

    def _check_continued(self) -> None:
        """Fail the job if this worker was restarted, and its loop begins anew."""
        self._store.check_not_restarted(f"training by {self._continues_by}")

    def _push_all(self) -> None:
        """Push what was not pushed yet, and update."""
        if not self._buckets:
            self._form_buckets()
        for state in self._buckets:
            state.pending = {}  # a backward outside of a step must not push the bucket
            if state.push is None:
                self._push_incomplete(state)
        try:
            rows = self._push_rows() if self.sparse_keys else {}
            for state in self._buckets:  # a failed push must raise before any update
                if state.push is not None:
                    state.push.wait()
        except (DeadNodeError, StallError):
            raise
        except Exception:  # whatever failed, no later update may use what was pushed; raised again
            self._drop_updates()
            raise
        if self._updates_wait:
            self._store.update(group=self.group)
        if rows:
            self._pull_rows(rows)

    def _push_incomplete(self, state: BucketState) -> None:
        """Push a bucket that backward did not fill, with the keys that have gradients."""
        if are_dense([*map(_grad, state.parameters)]):
            self._push(state, range(len(self._parameters)), state.keys)
            return
        self._make_dense(state.keys)
        by_replica = [{key for key in state.keys if of[key].grad is not None} for of in self._parameters]
        on_any = set().union(*by_replica)
        present = [key for key in state.keys if key in on_any]
        if present or self._in_step:
            self._push(state, [index for index, found in enumerate(by_replica) if found], present)

    def _pull(self, state: BucketState) -> None:
        if not state.is_loose and places_of(state.parameters) != state.weight_places:
            self._restore_views(state)
        self._store.pull_bucket(state.bucket, state.weights, state.priority)
        if state.is_loose:
            for of_replica, views in zip(self._parameters, state.weight_views, strict=True):
                torch._foreach_copy_([of_replica[key].data for key in views], list(views.values()))

    def abandon(self) -> tuple[int, int]:
        """After a failed backward, pull the store's weights into the replicas.

        Return the number of buckets that had been pushed, and the number of buckets.
        """
        self._active = []
        pushed = [state for state in self._buckets if state.push is not None]
        if self._updates_wait:  # nothing has been updated
            self._store.drop_updates(group=self.group)
            pushed = []
        for state in self._buckets:
            state.pending = {}
            self._pull(state)  # ordered after its push, if there was one
            state.push = None
        unbucketed = [key for key in self._parameters[0] if key not in self._bucket_of]
        self._store.pull(unbucketed, [self._weights(key) for key in unbucketed])
        return len(pushed), len(self._buckets)

    # Sparse gradients

    def _push_rows(self) -> dict[Key, torch.Tensor | None]:
        """Push sparse gradients; return the numbers of the rows to pull, by key (None: all rows)."""
        rows: dict[Key, torch.Tensor | None] = {}
        for key in self._parameters[0]:
            if key not in self.sparse_keys:
                continue
            gradients = [rows_of(p[key].grad) for p in self._parameters if p[key].grad is not None]  # type: ignore[arg-type]
            if self._in_step:
                numbers = _numbers_of(gradients if self._weight != 0 else [])
                rows[key] = _distinct(self._gather_rows(numbers))  # rows that any worker pushes
                self._check_rows(key, rows[key])
                if self._weight is None:
                    self._store.push(key, gradients or [rows_of(self._parameters[0][key].detach(), 0)])
                else:
                    self._store.push_weighted(key, gradients or None, self._weight)
            elif gradients:
                is_alone = self._store.num_workers == 1  # else other workers push other rows
                rows[key] = _numbers_of(gradients) if is_alone else None
                self._check_rows(key, rows[key])
                self._store.push(key, gradients)
        return rows

    def _check_rows(self, key: Key, numbers: torch.Tensor | None) -> None:
        try:
            self.before_rows(key, numbers)
        except RuntimeError as error:
            if self._in_step:
                self._store.refuse("push_weighted", error, key)
            raise

    def _gather_rows(self, own: Any) -> list[Any]:
        """All-gather an object about the rows, without workers inside `join`. Collective."""
        for state in self._buckets:  # keeps the workers' collective calls in one order
            if state.push is not None:
                with suppress(Exception):  # raised after this call, which the other workers make too
                    state.push.wait()
        return [theirs for theirs in self._store.group.all_gather(own, _ROWS) if theirs is not None]

    def _pull_rows(self, rows: Mapping[Key, torch.Tensor | None]) -> None:
        for key, numbers in rows.items():
            if numbers is None:
                self._store.pull(key, self._weights(key))
            else:
                self._store.row_sparse_pull(key, self._weights(key), row_ids=numbers)
            self.after_rows(key, numbers)

    def _make_dense(self, keys: Iterable[Key]) -> None:
        """Convert sparse gradients of parameters whose first gradient was dense."""
        for of_replica in self._parameters:
            for key in keys:
                gradient = of_replica[key].grad
                if gradient is not None and gradient.layout != torch.strided:
                    of_replica[key].grad = gradient.to_dense()
                    self._warn_once(key, "the gradient of parameter %r became sparse; it is sent dense")

    # Buckets

    def _form_buckets(self) -> None:
        """Create the buckets in the order of arrival, and make the parameters views of them.

        Collective among synchronous workers: rank 0's order is used, then the others' for parameters that rank 0 lacks.
        Parameters without a gradient are in separate buckets at the end.
        """
        repeated = [key for key, count in self._arrivals.items() if count > 1]
        sparse = [key for key in self._parameters[0] if any(is_sparse(p[key].grad) for p in self._parameters)]
        unseen = [
            key for key in reversed(self._parameters[0]) if any(p[key].grad is not None for p in self._parameters)
        ]
        own = [list(dict.fromkeys([*self._arrivals, *unseen])), repeated, sparse]
        received = [own]
        if self._in_step:
            gathered = self._store.group.all_gather(own, "order of buckets")
            received = [theirs for theirs in gathered if theirs is not None]
        self._use_order([list(dict.fromkeys(key for theirs in received for key in theirs[part])) for part in range(3)])

    def _use_order(self, orders: list[list[Key]]) -> None:
        order, repeated, sparse = orders
        if not order:  # no worker had samples
            return
        self._order = orders
        self._repeated.update(repeated)
        self.sparse_keys.update(sparse)
        others = [key for key in self._parameters[0] if key not in order]
        for keys in (order, others):
            dense = [key for key in keys if key not in self.sparse_keys]
            self._add_buckets([key for key in dense if key not in self._loose], is_loose=False)
            self._add_buckets([key for key in dense if key in self._loose], is_loose=True)

    def _add_buckets(self, keys: Sequence[Key], *, is_loose: bool) -> None:
        devices = [next(iter(of_replica.values())).device for of_replica in self._parameters]
        for bucket in self._plan(keys):
            weights = [bucket.empty(device) for device in devices]
            self._store.fuse(bucket, weights[0] if self._in_place else None)
            copies = [device.type == "cuda" and not self._in_place for device in devices]
            gradients = [bucket.empty(device) if copy else None for device, copy in zip(devices, copies, strict=True)]
            state = self._add_state(bucket, weights, gradients, is_loose=is_loose)
            for of_replica, views in zip(self._parameters, state.weight_views, strict=True):
                for key, view in views.items():
                    view.copy_(of_replica[key].detach())
                    if not is_loose:
                        of_replica[key].data = view

    def _plan(self, keys: Sequence[Key]) -> Iterator[Bucket]:
        return plan([(key, self._parameters[0][key].detach()) for key in keys], BUCKET_BYTES)

    def _add_state(
        self,
        bucket: Bucket,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
        *,
        is_loose: bool = False,
        keys: list[Key] | None = None,
    ) -> BucketState:
        keys = bucket.keys if keys is None else keys
        parameters = [of_replica[key] for of_replica in self._parameters for key in keys]
        state = BucketState(bucket, len(self._buckets), keys, parameters, weights, gradients, is_loose)
        self._buckets.append(state)
        self._bucket_of.update(dict.fromkeys(keys, state))
        return state

    def flat_weights(self) -> list[tuple[list[Key], torch.Tensor]]:
        """Return the keys and the first replica's flat weights of the buckets whose parameters are views of them."""
        return [(state.keys, state.weights[0]) for state in self._buckets if state.weights and not state.is_loose]

    def view_of(self, key: Key) -> torch.Tensor | None:
        """Return the first replica's view of a key in its flat weights, as last pulled; None without a bucket."""
        state = self._bucket_of.get(key)
        return state.weight_views[0][key] if state is not None and state.weight_views else None

    def expect_moved(self, key: Key) -> None:
        """Accept that a parameter has moved, whose values the store has: it returns to its bucket without a warning."""
        self._released.add(key)

    def _restore_views(self, state: BucketState) -> None:
        """Make parameters views of the bucket again if user code replaced their memory."""
        for of_replica, views in zip(self._parameters, state.weight_views, strict=True):
            for key, view in views.items():
                parameter = of_replica[key]
                if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                    parameter.data = view
                    if key in self._released:
                        self._released.discard(key)
                    else:
                        self._warn_once(key, "parameter %r had moved to memory of its own; it is back in its bucket")

    def _warn_once(self, key: Key, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(message, key)

    def _weights(self, key: Key) -> list[torch.Tensor]:
        return [of_replica[key].data for of_replica in self._parameters]

    @torch.no_grad()
    def release_parameters(self) -> None:
        """Move the parameters of the user's network out of their buckets, until the next step.

        Otherwise torch.save of some parameters would write their whole buckets.
        """
        for state in self._buckets:
            for key, view in state.weight_views[0].items() if state.weight_views else ():
                parameter = self._parameters[0][key]
                if parameter.data_ptr() == view.data_ptr():
                    parameter.data = view.clone()
                    self._released.add(key)

    def close(self) -> None:
        """Remove the hooks, and hand back the parameters."""
        self.release_parameters()
        self._remove_hooks()


def places_of(tensors: Iterable[torch.Tensor]) -> list[_Place]:
    """Return the address and strides of each tensor."""
    given = [*tensors]
    return [*zip(map(_data_ptr, given), map(_stride, given), strict=True)]


def _ignore(*_: object) -> None:
    pass


def _make_calls(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls after an error and ignore their errors; stop if a process is dead or late."""
    for call in calls:
        try:
            call()
        except (DeadNodeError, StallError):
            return
        except Exception as error:  # noqa: BLE001  the first error is the one to raise
            _log.debug("after a failed step: %s", error)


@torch.no_grad()
def _copy_to_bucket(parameters: Parameters, views: Mapping[Key, torch.Tensor], keys: Sequence[Key]) -> None:
    """Copy gradients into their views of a bucket, in one kernel; views of missing gradients become 0."""
    trained, targets = [*map(parameters.__getitem__, keys)], [*map(views.__getitem__, keys)]
    gradients = [*map(_grad, trained)]
    if not are_dense(gradients):
        missing = [gradient is None or is_sparse(gradient) for gradient in gradients]
        for target in compress(targets, missing):
            target.zero_()
        found = [not one for one in missing]
        trained, targets, gradients = ([*compress(ones, found)] for ones in (trained, targets, gradients))
    moved = [*map(ne, places_of(gradients), places_of(targets))]
    if not any(moved):
        return
    trained, targets, gradients = ([*compress(ones, moved)] for ones in (trained, targets, gradients))
    if gradients[0].is_cuda:  # other streams must not reuse their memory before the copy
        stream = torch.cuda.current_stream(gradients[0].device)  # all gradients are on one device
        for gradient in gradients:
            gradient.record_stream(stream)
    torch._foreach_copy_(targets, gradients)
    for parameter, target in zip(trained, targets, strict=True):
        parameter.grad = target.detach()  # a separate tensor: a user's ``grad.data = ...`` must not move the view


def are_dense(gradients: list[torch.Tensor | None]) -> TypeGuard[list[torch.Tensor]]:
    """Return True if none is missing or sparse."""
    return {*map(type, gradients)} == {torch.Tensor} and {*map(_layout, gradients)} == {torch.strided}


def _is_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient._values() if is_sparse(gradient) else gradient
    return bool(values.isfinite().all())


def is_sparse(gradient: torch.Tensor | None) -> bool:
    """Return True if there is a gradient and it is sparse."""
    return gradient is not None and gradient.layout != torch.strided


def rows_of(gradient: torch.Tensor, count: int | None = None) -> RowSparse:
    """Return a gradient as rows; for a dense gradient the first ``count`` rows (None: all)."""
    if is_sparse(gradient):
        return RowSparse.from_coo(gradient)
    values = gradient[:count]
    return RowSparse(torch.arange(len(values), device=gradient.device), values, gradient.shape)


def _numbers_of(gradients: Sequence[RowSparse]) -> torch.Tensor:
    """Return the distinct row numbers of all gradients, ascending, on the host."""
    return _distinct([one.indices.cpu() for one in gradients])


def _distinct(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *numbers]))
    return found


def check_frozen(parameters: Parameters, trained: Collection[Any], owner: str) -> None:
    """Raise RuntimeError if a parameter was frozen, and so got no hook, when its owner was created, and is trained now.

    Its gradients would stay on this worker.
    """
    unfrozen = [key for key, parameter in parameters.items() if parameter.requires_grad and key not in trained]
    if unfrozen:
        raise RuntimeError(
            f"parameters {unfrozen} have requires_grad=True, but had False when the {owner} was made, so their "
            f"gradients reach no other worker; make a new {owner} after unfreezing them"
        )


def cudnn_weights(network: nn.Module) -> set[str]:
    """Return the weights of recurrent layers, which cuDNN requires in one contiguous block."""
    return _weights_of(network, lambda layer: isinstance(layer, nn.RNNBase))


def sparse_tables(network: nn.Module) -> set[str]:
    """Return the weights of embedding layers with sparse gradients."""
    return _weights_of(network, lambda layer: isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse)


def as_tables(store: KVStore, weights: Mapping[Any, torch.Tensor], tables: Collection[Any]) -> list[Value]:
    """Return initial values of weights with which the keys in ``tables`` become row tables of a store that has them."""
    return [
        RowSparse(torch.arange(len(weight), device=weight.device), weight, weight.shape)
        if key in tables and store._takes_tables
        else weight
        for key, weight in weights.items()
    ]


def _weights_of(network: nn.Module, is_chosen: Callable[[nn.Module], bool]) -> set[str]:
    """Return the names of the chosen layers' own parameters."""
    own = {id(parameter) for layer in network.modules() if is_chosen(layer) for parameter in layer.parameters(False)}
    return {name for name, parameter in network.named_parameters() if id(parameter) in own}
