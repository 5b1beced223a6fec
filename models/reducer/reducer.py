"""Reducer: gradients gathered in flat buckets that are pushed to the store as soon as backward has filled them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from gangline.collectives.work import Work
from gangline.kvstore import KVStore
from gangline.kvstore.buckets import BUCKET_BYTES, Bucket, BucketValue, plan
from gangline.models.replicas import Replica

_log = logging.getLogger("gangline")


@dataclass(eq=False)
class BucketState:
    """A bucket with its flat tensors on every replica, and its progress in the current backward."""

    bucket: Bucket
    priority: int
    names: list[str]
    weights: list[torch.Tensor]
    """Flat weights, one tensor per replica."""
    gradients: list[torch.Tensor | None]
    """Flat gradients, one per replica; None on the host, where gradients stay where autograd accumulates them."""
    weight_views: list[dict[str, torch.Tensor]] = field(init=False)
    gradient_views: list[dict[str, torch.Tensor]] = field(init=False)
    pending: dict[int, set[str]] = field(default_factory=dict)
    """Names of gradients yet to arrive, by replica index; empty if the bucket is not pushed before `finish`."""
    events: list[torch.cuda.Event] = field(default_factory=list)
    """Events after which the flat gradients on GPUs are complete."""
    push: Work | None = None
    """The bucket's push in this step, if it was started."""

    def __post_init__(self) -> None:
        self.gradient_views = [_views(self.bucket, flat) if flat is not None else {} for flat in self.gradients]
        self.weight_views = [_views(self.bucket, flat) for flat in self.weights]


class Reducer:
    """Pushes the gradients of all replicas to a store, and pulls the new weights.

    The first backward is only recorded: the order in which its gradients arrive becomes that of the buckets, and
    parameters with sparse gradients stay out of them. From then on the replicas' parameters are views of flat tensors,
    into which the store's weights are copied whole, and hooks count the gradients of each bucket. On a GPU a hook
    copies each gradient into a flat tensor, so that a bucket is one transfer; on the host there is no transfer to
    save, and the store adds up gradients where autograd accumulated them.

    Autograd does not accumulate into the flat tensor, because it would have to be cleared and read first; one copy
    costs half of that, and no assignment to ``.grad`` by the user can detach a bucket.
    """

    def __init__(self, replicas: Sequence[Replica], store: KVStore) -> None:
        """Register hooks on the trained parameters."""
        self._replicas = list(replicas)
        self._store = store
        self._buckets: list[BucketState] = []
        self._bucket_of: dict[str, BucketState] = {}
        self._arrivals: dict[str, int] = {}  # arrivals of each gradient in the recorded backward, in order
        self._active: list[int] = []  # indices of the replicas that take part in this backward
        self._repeated: set[str] = set()  # parameters whose gradient arrives more than once
        self._warned: set[str] = set()
        self._handed_back: set[str] = set()  # parameters that are no views until the next step, see hand_back
        self._lock = threading.Lock()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index, name))  # type: ignore[no-untyped-call]
            for index, replica in enumerate(replicas)
            for name, parameter in replica.parameters.items()
        ]

    def begin(self, active: Iterable[int], *, push_early: bool) -> None:
        """Prepare for a backward.

        Args:
            active: indices of the replicas that take part in it.
            push_early: push each bucket as soon as all of them have filled it, instead of in `finish`.
        """
        self._active = list(active)
        if not self._buckets:
            self._arrivals.clear()
        for state in self._buckets:
            state.push = None
            state.events.clear()
            waits = not push_early or self._repeated.intersection(state.names)
            state.pending = {} if waits else {index: set(state.names) for index in self._active}

    def _on_gradient(self, index: int, name: str, parameter: torch.Tensor) -> None:
        """Count a gradient that autograd has just accumulated; runs in the autograd thread."""
        state = self._bucket_of.get(name)
        if state is None:
            if not self._buckets and self._active and index == self._active[0]:
                self._arrivals[name] = self._arrivals.get(name, 0) + 1
            return
        if state.push is not None:
            raise RuntimeError(
                f"parameter {name!r} got another gradient after its bucket was pushed, which happens if layers that "
                "share a weight are checkpointed with use_reentrant=True; call forward_backward() and update() "
                "instead of forward_backward_update()"
            )
        if not _copy_to_bucket(parameter, state.gradient_views[index].get(name)):
            return
        with self._lock:
            pending = state.pending.get(index)
            if pending is None:
                return
            pending.discard(name)
            if pending:
                return
            if parameter.is_cuda:
                state.events.append(torch.cuda.current_stream(parameter.device).record_event())
            del state.pending[index]
            if state.pending:
                return
        self._on_full(state)

    def _on_full(self, state: BucketState) -> None:
        """Push a bucket that has all gradients of this backward."""
        self._push(state, self._active, None, async_op=True)

    def _push(
        self, state: BucketState, indices: Sequence[int], names: Sequence[str] | None, *, async_op: bool = False
    ) -> None:
        for event in state.events:
            torch.cuda.current_stream(event.device).wait_event(event)
        if self._store.compresses:  # every replica must push, or residuals would be applied to other replicas
            indices = range(len(self._replicas))
        values = self._values(state, indices, names or state.names)
        state.push = self._store.push_bucket(state.bucket, values, names, state.priority, async_op=async_op)

    def _values(self, state: BucketState, indices: Sequence[int], names: Sequence[str]) -> list[BucketValue]:
        return [self._value(state, index, names) for index in indices]

    def _value(self, state: BucketState, index: int, names: Sequence[str]) -> BucketValue:
        """Return a replica's gradients of a bucket, with zeros for missing ones where all must be pushed."""
        flat, views = state.gradients[index], state.gradient_views[index]
        parameters = self._replicas[index].parameters
        if flat is not None:
            for name in names:
                if not _copy_to_bucket(parameters[name], views[name]):
                    views[name].zero_()
            return flat
        gradients = {name: parameters[name].grad for name in names}
        if self._store.compresses:
            return {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in gradients.items()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def finish(self) -> None:
        """Push what was not pushed yet, and pull all weights into the replicas.

        Parameters for which no replica has a gradient are left alone.
        """
        self._active = []
        unbucketed = [name for name in self._replicas[0].parameters if name not in self._bucket_of]
        for state in self._buckets:
            state.pending = {}  # a backward outside of a step must not push the bucket
            if state.push is None:
                unbucketed += self._push_incomplete(state)
        self._exchange_unbucketed(unbucketed)
        self._pull_buckets()
        if not self._buckets and self._arrivals:
            self._repeated = self._repeated_arrivals()
            self._form_buckets(list(self._arrivals), self._excluded())

    def _pull_buckets(self) -> None:
        for state in sorted(self._buckets, key=lambda state: -state.priority):
            if state.push is not None:
                state.push.wait()
                self._restore_views(state)
                self._store.pull_bucket(state.bucket, state.weights, state.priority)
                state.push = None

    def abandon(self) -> tuple[int, int]:
        """After a failed backward, pull the store's weights into the replicas.

        Returns:
            The number of buckets that had been pushed, and the number of buckets.
        """
        self._active = []
        pushed = [state for state in self._buckets if state.push is not None]
        if self._store.updates_wait:  # nothing has been updated
            self._store.drop_updates()
            pushed = []
        for state in self._buckets:
            state.pending = {}
            self._restore_views(state)
            self._store.pull_bucket(state.bucket, state.weights)  # ordered after its push, if there was one
            state.push = None
        unbucketed = [name for name in self._replicas[0].parameters if name not in self._bucket_of]
        self._store.pull(unbucketed, [self._weights(name) for name in unbucketed])
        return len(pushed), len(self._buckets)

    def _push_incomplete(self, state: BucketState) -> list[str]:
        """Push a bucket that backward did not fill; return names whose gradients turned out to be sparse."""
        sparse = [name for name in state.names if any(is_sparse(p.grad) for p in self._parameters(name))]
        present = [
            name
            for name in state.names
            if name not in sparse and any(parameter.grad is not None for parameter in self._parameters(name))
        ]
        if present:
            used = [
                index
                for index, replica in enumerate(self._replicas)
                if any(replica.parameters[name].grad is not None for name in present)
            ]
            self._push(state, used, present)
        return sparse

    def _exchange_unbucketed(self, names: Sequence[str]) -> None:
        """Push and pull parameters outside of buckets one by one."""
        dense: dict[str, list[torch.Tensor]] = {}
        rows: dict[str, torch.Tensor | None] = {}  # rows to pull; None: all
        for name in names:
            gradients = [p.grad for p in self._parameters(name) if p.grad is not None]
            if gradients and all(is_sparse(gradient) for gradient in gradients):
                self._store.push(name, gradients)
                own = [gradient._indices()[0].to(gradients[0].device) for gradient in gradients]
                rows[name] = torch.cat(own) if self._store.num_workers == 1 else None  # others changed other rows
            elif gradients and self._store.compresses:
                dense[name] = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters(name)]
            elif gradients:
                dense[name] = gradients
        self._exchange_dense(list(dense), list(dense.values()))
        for name, numbers in rows.items():
            if numbers is None:
                self._store.pull(name, self._weights(name))
            else:
                self._store.row_sparse_pull(name, self._weights(name), row_ids=numbers)

    def _exchange_dense(self, names: Sequence[str], values: Sequence[list[torch.Tensor]]) -> None:
        """Push and pull dense parameters after all other pushes; if updates wait, run them in between."""
        weights = [self._weights(name) for name in names]
        if not self._store.updates_wait:
            if names:
                self._store.pushpull(list(names), list(values), weights)
            return
        if names:
            self._store.push(list(names), list(values))
        for state in self._buckets:
            if state.push is not None:
                state.push.wait()  # a failed push must raise before any update
        self._store.update()
        if names:
            self._store.pull(list(names), weights)

    def _repeated_arrivals(self) -> set[str]:
        return {name for name, count in self._arrivals.items() if count > 1}

    def _excluded(self) -> set[str]:
        """Return the parameters that stay out of buckets."""
        on_gpu = any(replica.context.device_type == "gpu" for replica in self._replicas)
        excluded = _cudnn_weights(self._replicas[0]) if on_gpu else set()
        sparse = {n for n in self._replicas[0].parameters if any(is_sparse(p.grad) for p in self._parameters(n))}
        return excluded | sparse

    def _form_buckets(self, order: Sequence[str], excluded: Container[str]) -> None:
        """Create the buckets in the order of arrival, and make the parameters views of them."""
        first = self._replicas[0].parameters
        names = [name for name in order if name not in excluded]
        for number, bucket in enumerate(plan([(name, first[name].detach()) for name in names], BUCKET_BYTES)):
            self._store.fuse(bucket)
            devices = [replica.context.torch_device for replica in self._replicas]
            state = BucketState(
                bucket,
                number,  # the last to arrive belongs to the first layers, which the next forward needs first
                [str(key) for key in bucket.keys],
                [bucket.empty(device) for device in devices],
                [bucket.empty(device) if device.type == "cuda" else None for device in devices],
            )
            self._buckets.append(state)
            for replica, views in zip(self._replicas, state.weight_views, strict=True):
                for name, view in views.items():
                    parameter = replica.parameters[name]
                    view.copy_(parameter.detach())
                    parameter.data = view
                    self._bucket_of[name] = state

    def _restore_views(self, state: BucketState) -> None:
        """Make parameters views of the bucket again if user code gave them other memory."""
        for replica, views in zip(self._replicas, state.weight_views, strict=True):
            for name, view in views.items():
                parameter = replica.parameters[name]
                if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                    parameter.data = view
                    if name in self._handed_back:
                        self._handed_back.discard(name)
                    elif name not in self._warned:
                        self._warned.add(name)
                        _log.warning("parameter %r had moved to memory of its own; it is back in its bucket", name)

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [replica.parameters[name] for replica in self._replicas]

    def _weights(self, name: str) -> list[torch.Tensor]:
        return [parameter.data for parameter in self._parameters(name)]

    @torch.no_grad()
    def hand_back(self) -> None:
        """Give the parameters of the user's network memory of their own, until the next step.

        Saving a part of the network then does not write the whole buckets that its parameters would be views of.
        """
        parameters = dict(self._replicas[0].network.named_parameters(remove_duplicate=False))
        for state in self._buckets:
            for name, view in state.weight_views[0].items():
                parameter = parameters.get(name)  # also one that is frozen by now; None if the user removed it
                if parameter is not None and parameter.data_ptr() == view.data_ptr():
                    parameter.data = view.clone()
                    self._handed_back.add(name)

    def close(self) -> None:
        """Remove the hooks, and hand back the parameters."""
        self.hand_back()
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def _copy_to_bucket(parameter: torch.Tensor, view: torch.Tensor | None) -> bool:
    """Copy a gradient into its view of the bucket, if there is one; return False if it is None or sparse."""
    gradient = parameter.grad
    if gradient is None or is_sparse(gradient):
        return False
    if view is not None and (gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride()):
        view.copy_(gradient)
        parameter.grad = view.detach()  # a separate tensor object: a user's ``grad.data = ...`` must not move the view
    return True


def is_sparse(gradient: torch.Tensor | None) -> bool:
    """Return True if there is a gradient and it is sparse."""
    return gradient is not None and gradient.layout != torch.strided


def _views(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {str(key): view for key, view in bucket.views(flat).items()}


def _cudnn_weights(replica: Replica) -> set[str]:
    """Return the weights of recurrent layers, which cuDNN requires in one contiguous block."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in replica.network.named_modules()
        if isinstance(module, nn.RNNBase)
        for name, _ in module.named_parameters(recurse=False)
    }
