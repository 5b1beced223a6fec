"""The flow of gradients to the store: gathered in flat buckets during backward, which leave as they fill."""

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
class Filling:
    """A bucket with its flat tensors on every replica, and how far it is filled in the backward that runs."""

    bucket: Bucket
    priority: int
    names: list[str]
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    """None where a replica's gradients stay where autograd puts them."""
    weight_of: list[dict[str, torch.Tensor]] = field(init=False)
    gradient_of: list[dict[str, torch.Tensor]] = field(init=False)
    awaited: dict[int, set[str]] = field(default_factory=dict)
    """The gradients that have yet to arrive, by the replica's place; empty where the bucket waits for the end."""
    filled: list[torch.cuda.Event] = field(default_factory=list)
    left: Work | None = None

    def __post_init__(self) -> None:
        self.gradient_of = [_by_name(self.bucket, flat) if flat is not None else {} for flat in self.gradients]
        self.weight_of = [_by_name(self.bucket, flat) for flat in self.weights]


class Reducer:
    """Takes the gradients of all replicas to a store, and the new weights back.

    The first backward is watched: its order becomes that of the buckets, and what it shows to be sparse stays out of
    them. From then on the replicas' parameters are views of flat tensors, into which the store's weights are copied
    whole, and hooks see a bucket's gradients arrive. On a GPU a hook moves each into a flat tensor, so that a bucket
    is one transfer; on the host there is none to be saved, and the store adds up gradients where autograd left them.

    Autograd does not accumulate into the flat tensor, which would have to be read and cleared first; one copy costs
    half of that, and whatever a user does to ``.grad`` cannot detach a bucket.
    """

    def __init__(self, replicas: Sequence[Replica], store: KVStore) -> None:
        """Hook into the parameters that are trained."""
        self._replicas = list(replicas)
        self._store = store
        self._fillings: list[Filling] = []
        self._home: dict[str, Filling] = {}
        self._arrivals: dict[str, int] = {}  # of the watched backward: how often each gradient arrived, in order
        self._places: list[int] = []  # of the replicas that take part in this backward
        self._repeated: set[str] = set()
        self._moved: set[str] = set()
        self._lock = threading.Lock()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, place, name))  # type: ignore[no-untyped-call]
            for place, replica in enumerate(replicas)
            for name, parameter in replica.parameters.items()
        ]

    def begin(self, places: Iterable[int], *, leave_early: bool) -> None:
        """Get ready for a backward.

        Args:
            places: of the replicas that take part in it.
            leave_early: hand each bucket to the store as soon as all of them have filled it; else `finish` does.
        """
        self._places = list(places)
        if not self._fillings:
            self._arrivals.clear()
        for filling in self._fillings:
            filling.left = None
            filling.filled.clear()
            waits = not leave_early or self._repeated.intersection(filling.names)
            filling.awaited = {} if waits else {place: set(filling.names) for place in self._places}

    def _arrived(self, place: int, name: str, parameter: torch.Tensor) -> None:
        """A gradient is complete: autograd calls this, in the thread that made it."""
        filling = self._home.get(name)
        if filling is None:
            if not self._fillings and self._places and place == self._places[0]:
                self._arrivals[name] = self._arrivals.get(name, 0) + 1
            return
        if filling.left is not None:
            raise RuntimeError(
                f"parameter {name!r} got another gradient when its bucket had gone to the store already, as happens "
                "where layers that share a weight are checkpointed with use_reentrant=True; call forward_backward() "
                "and update() instead of forward_backward_update()"
            )
        if not _gather(parameter, filling.gradient_of[place].get(name)):
            return
        with self._lock:
            awaited = filling.awaited.get(place)
            if awaited is None:
                return
            awaited.discard(name)
            if awaited:
                return
            if parameter.is_cuda:
                filling.filled.append(torch.cuda.current_stream(parameter.device).record_event())
            del filling.awaited[place]
            if filling.awaited:
                return
        self._filled(filling)

    def _filled(self, filling: Filling) -> None:
        """All that a backward was to bring has come."""
        self._leave(filling, self._places, None, async_op=True)

    def _leave(
        self, filling: Filling, places: Sequence[int], names: Sequence[str] | None, *, async_op: bool = False
    ) -> None:
        for event in filling.filled:
            torch.cuda.current_stream(event.device).wait_event(event)
        if self._store.compresses:  # all must send, or residuals would change hands
            places = range(len(self._replicas))
        values = self._values(filling, places, names or filling.names)
        filling.left = self._store.push_bucket(filling.bucket, values, names, filling.priority, async_op=async_op)

    def _values(self, filling: Filling, places: Sequence[int], names: Sequence[str]) -> list[BucketValue]:
        return [self._value(filling, place, names) for place in places]

    def _value(self, filling: Filling, place: int, names: Sequence[str]) -> BucketValue:
        """What a replica has for a bucket; zeros for what it lacks and has to send all the same."""
        flat, views, parameters = filling.gradients[place], filling.gradient_of[place], self._replicas[place].parameters
        if flat is not None:
            for name in names:
                if not _gather(parameters[name], views[name]):
                    views[name].zero_()
            return flat
        gradients = {name: parameters[name].grad for name in names}
        if self._store.compresses:
            return {n: torch.zeros_like(parameters[n]) if g is None else g for n, g in gradients.items()}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def finish(self) -> None:
        """Push what has not left, and pull all weights into the replicas.

        Parameters that no replica has a gradient for are left alone.
        """
        self._places = []
        apart = [name for name in self._replicas[0].parameters if name not in self._home]
        for filling in self._fillings:
            filling.awaited = {}  # a backward of somebody else's must not fill it
            if filling.left is None:
                apart += self._close(filling)
        self._move_apart(apart)
        self._pull_buckets()
        if not self._fillings and self._arrivals:
            self._repeated = self._repeated_here()
            self._form(list(self._arrivals), self._lone_here())

    def _pull_buckets(self) -> None:
        for filling in sorted(self._fillings, key=lambda filling: -filling.priority):
            if filling.left is not None:
                filling.left.wait()
                self._keep_views(filling)
                self._store.pull_bucket(filling.bucket, filling.weights, filling.priority)
                filling.left = None

    def abandon(self) -> tuple[int, int]:
        """After a failed backward: have the replicas hold what the store holds.

        Returns:
            How many buckets had gone to the store, of how many.
        """
        self._places = []
        gone = [filling for filling in self._fillings if filling.left is not None]
        if self._store.updates_wait:  # nothing has been updated
            self._store.drop_updates()
            gone = []
        for filling in self._fillings:
            filling.awaited = {}
            self._keep_views(filling)
            self._store.pull_bucket(filling.bucket, filling.weights)  # behind its push, if there was one
            filling.left = None
        apart = [name for name in self._replicas[0].parameters if name not in self._home]
        self._store.pull(apart, [self._weights(name) for name in apart])
        return len(gone), len(self._fillings)

    def _close(self, filling: Filling) -> list[str]:
        """Push a bucket that backward left open; returns the names whose gradients turned out to be sparse."""
        sparse = [name for name in filling.names if any(is_sparse(p.grad) for p in self._parameters(name))]
        present = [
            name
            for name in filling.names
            if name not in sparse and any(parameter.grad is not None for parameter in self._parameters(name))
        ]
        if present:
            used = [
                place
                for place, replica in enumerate(self._replicas)
                if any(replica.parameters[name].grad is not None for name in present)
            ]
            self._leave(filling, used, present)
        return sparse

    def _move_apart(self, names: Sequence[str]) -> None:
        """Push and pull key by key; between them, where updates wait, have all of them made."""
        dense: dict[str, list[torch.Tensor]] = {}
        rows: dict[str, torch.Tensor | None] = {}  # which to pull; None: all
        for name in names:
            gradients = [p.grad for p in self._parameters(name) if p.grad is not None]
            if gradients and all(is_sparse(gradient) for gradient in gradients):
                self._store.push(name, gradients)
                own = [gradient._indices()[0].to(gradients[0].device) for gradient in gradients]
                rows[name] = torch.cat(own) if self._store.num_workers == 1 else None  # others have changed others
            elif gradients and self._store.compresses:
                dense[name] = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters(name)]
            elif gradients:
                dense[name] = gradients
        self._move_dense(list(dense), list(dense.values()))
        for name, numbers in rows.items():
            if numbers is None:
                self._store.pull(name, self._weights(name))
            else:
                self._store.row_sparse_pull(name, self._weights(name), row_ids=numbers)

    def _move_dense(self, names: Sequence[str], values: Sequence[list[torch.Tensor]]) -> None:
        """Push and pull what is dense, behind all other pushes; where updates wait, have them made."""
        weights = [self._weights(name) for name in names]
        if not self._store.updates_wait:
            if names:
                self._store.pushpull(list(names), list(values), weights)
            return
        if names:
            self._store.push(list(names), list(values))
        for filling in self._fillings:
            if filling.left is not None:
                filling.left.wait()  # what it has failed with comes before any update
        self._store.update()
        if names:
            self._store.pull(list(names), weights)

    def _repeated_here(self) -> set[str]:
        return {name for name, count in self._arrivals.items() if count > 1}

    def _lone_here(self) -> set[str]:
        """What stays out of buckets."""
        on_gpu = any(replica.context.device_type == "gpu" for replica in self._replicas)
        lone = _fused_by_cudnn(self._replicas[0]) if on_gpu else set()
        return lone | {n for n in self._replicas[0].parameters if any(is_sparse(p.grad) for p in self._parameters(n))}

    def _form(self, order: Sequence[str], lone: Container[str]) -> None:
        """Make the buckets, in the order in which the watched backward finished."""
        first = self._replicas[0].parameters
        names = [name for name in order if name not in lone]
        for number, bucket in enumerate(plan([(name, first[name].detach()) for name in names], BUCKET_BYTES)):
            self._store.fuse(bucket)
            devices = [replica.context.torch_device for replica in self._replicas]
            filling = Filling(
                bucket,
                number,  # what is needed first in the next forward arrives last, and goes first
                [str(key) for key in bucket.keys],
                [bucket.empty(device) for device in devices],
                [bucket.empty(device) if device.type == "cuda" else None for device in devices],
            )
            self._fillings.append(filling)
            for place in range(len(self._replicas)):
                for name, view in filling.weight_of[place].items():
                    parameter = self._replicas[place].parameters[name]
                    view.copy_(parameter.detach())
                    parameter.data = view
                    self._home[name] = filling

    def _keep_views(self, filling: Filling) -> None:
        """Have the parameters be the bucket's views again where something gave them memory of their own."""
        for place in range(len(self._replicas)):
            for name, view in filling.weight_of[place].items():
                parameter = self._replicas[place].parameters[name]
                if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                    parameter.data = view
                    if name not in self._moved:
                        self._moved.add(name)
                        _log.warning("parameter %r had moved to memory of its own; it is back in its bucket", name)

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [replica.parameters[name] for replica in self._replicas]

    def _weights(self, name: str) -> list[torch.Tensor]:
        return [parameter.data for parameter in self._parameters(name)]

    def close(self) -> None:
        """Take the hooks away; parameters stay views of the flat tensors."""
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def _gather(parameter: torch.Tensor, view: torch.Tensor | None) -> bool:
    """Have ``parameter.grad`` be ``view``, if there is one, with its values; False where it is None or sparse."""
    gradient = parameter.grad
    if gradient is None or is_sparse(gradient):
        return False
    if view is not None and (gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride()):
        view.copy_(gradient)
        parameter.grad = view.detach()  # an object of its own, or a user's ``grad.data = ...`` would move the view
    return True


def is_sparse(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient, and it is a sparse one."""
    return gradient is not None and gradient.layout != torch.strided


def _by_name(bucket: Bucket, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {str(key): view for key, view in bucket.views(flat).items()}


def _fused_by_cudnn(replica: Replica) -> set[str]:
    """The weights of recurrent layers, which cuDNN wants in one piece of memory of its own."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in replica.network.named_modules()
        if isinstance(module, nn.RNNBase)
        for name, _ in module.named_parameters(recurse=False)
    }
