"""`DistributedOptimizer`: a torch optimizer whose gradients are averaged over the workers of a store."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gangline.collectives.eager import run_eagerly
from gangline.kvstore.allreduce.store import AllReduceStore, with_owners
from gangline.kvstore.arguments import check_shard
from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer.spec import Key, check_not_negative
from gangline.kvstore.reducer.gradient_reducer import GradientReducer
from gangline.kvstore.reducer.reducer import check_frozen
from gangline.kvstore.reducer.sharded_weights import NetworkState, ShardedWeights
from gangline.kvstore.reducer.waits import waiting_for_ranks
from gangline.kvstore.registry import create

_LARGE = 1 << 16  # minimum bytes of a parameter that its owner broadcasts by itself
_REFUSED = {"LBFGS": "it searches along a line by the loss of each worker alone, so the workers' weights would differ"}


def _of_wrapped(name: str) -> Any:
    """Return a property for an attribute of the wrapped optimizer, so that a new value reaches its steps."""
    return property(lambda own: getattr(own._optimizer, name), lambda own, value: setattr(own._optimizer, name, value))


class WrappedOptimizer(Optimizer):
    """Torch optimizer inside a front of a store, for torch's schedulers and scalers, and its weight in means."""

    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    _step_supports_amp_scaling = False
    """GradScaler then unscales and skips steps itself; a fused optimizer would not find the scale that it sets here."""

    def _wrap(self, optimizer: Optimizer, kvstore: str | KVStore) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        if not isinstance(kvstore, (str, KVStore)):
            raise TypeError(f"kvstore is {kvstore!r}; expected a store, or its name")
        self._optimizer = optimizer  # before any attribute that is looked up there
        self._weight = 1.0
        self.kvstore = create(kvstore) if isinstance(kvstore, str) else kvstore

    @property
    def weight(self) -> float:
        """Weight of this worker's values in means, for example its number of samples; 0: they are ignored.

        Raises:
            TypeError: if it is set to something else than a number.
            ValueError: if it is set to a negative number, NaN or infinity.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        check_not_negative("weight", weight)
        self._weight = float(weight)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer; single worker only.

        Raises:
            RuntimeError: if the parameters are in a store of several workers, which has keys for the first ones only.
        """
        if self._has_keys():
            kind = type(self).__name__
            raise RuntimeError(
                f"add_param_group() came after {kind}() gave the parameters to the store; add all groups to the torch "
                "optimizer first (with requires_grad=True)"
            )
        self._optimizer.add_param_group(param_group)

    def _has_keys(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes on the wrapped optimizer, such as ``defaults``."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        """Show the wrapped optimizer and the store."""
        return f"{type(self).__name__}({self._optimizer!r}, kvstore={self.kvstore.type!r})"


@run_eagerly
class DistributedOptimizer(NetworkState, WrappedOptimizer):
    """Wraps a torch optimizer so that each backward replaces gradients by their weighted mean over all workers.

    When ``backward()`` returns, ``.grad`` is sum(w_i * g_i) / sum(w_i), where w_i is the `weight` of worker i: 1 each,
    or the number of samples that the worker's loss is a mean over. Gradients are sent in buckets while backward still
    runs. The optimizer itself runs on every worker and is not changed: ``param_groups``, ``state_dict``, closures,
    torch's learning rate schedulers, ``GradScaler`` and ``clip_grad_norm_`` work as without gangline (the last two not
    with ``shard="weights"``, where gradients are sharded: see `clip_grad_norm_`). Creating it broadcasts rank 0's
    parameters.

    All workers must run the same number of backwards, with the parameters in the same order. A parameter without a
    gradient on any worker is not changed. With a single worker nothing is changed or copied.

    After a backward that failed, out of memory for example, call `zero_grad` and continue. If it had sent some
    gradients, the other workers' backward raises a MismatchError, too.

    Attributes:
        kvstore: the store, which averages the gradients.
        weight: weight of this worker's gradients; set it before backward.

    For example:

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = gangline.DistributedOptimizer(optimizer, kvstore="allreduce")
        for data, label in loader:
            optimizer.zero_grad()
            optimizer.weight = len(data)
            loss_function(model(data), label).backward()
            optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kvstore: str | KVStore = "allreduce",
        *,
        shard: str | None = None,
        memory: Sequence[float] | str = "auto",
        network: nn.Module | None = None,
    ) -> None:
        """Wrap an optimizer. Collective: all workers must call it.

        Args:
            optimizer: optimizer over the same parameters, in the same order, on every worker.
            kvstore: a synchronous store without an optimizer of its own, or the name of one to create.
            shard: "optimizer": each worker owns some parameters, holds the optimizer's state of these only, updates
                them in `step` and broadcasts them. Needs an allreduce store; `state_dict` and `load_state_dict` become
                collective. "weights": also shard weights and gradients; a layer's weights are gathered while it
                computes. All workers must run the same layers in every step, evaluation included; see
                `model_state_dict`. None: no sharding.
            memory: relative memory of the workers, for sharding; "auto": the free memory of each worker's device.
            network: the network of the parameters; needed for "weights".

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if gradients averaged by the store would not be exact for this optimizer or store.
            MismatchError: if the workers' parameters differ.
        """
        self._wrap(optimizer, kvstore)
        self._is_syncing = True
        self._is_reduced = False  # all gradients since the last step are means over the workers
        self._has_local = False  # gradients of a backward inside `no_sync` wait for the next reduction
        self._backward = -1  # id of the backward that runs, or ran last
        self._end: weakref.ref[Any] | None = None  # callback at the end of the backward that runs; autograd holds it
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._parameters: dict[Key, nn.Parameter] = {}  # of several workers
        self._trained: dict[Key, nn.Parameter] = {}
        self._reducer: GradientReducer | ShardedWeights | None = None
        self._owned: _OwnedParameters | None = None
        self._sharded = None
        self._network = network if shard == "weights" else None
        check_shard(shard, or_weights=True)
        if shard == "weights" and not isinstance(network, nn.Module):
            raise TypeError(f"network is {network!r}; expected the torch.nn.Module whose weights to divide")
        if self.kvstore.num_workers > 1:
            try:
                self._join_workers(shard, memory)
            except BaseException:  # raised again
                self.close()
                raise
        else:
            self.kvstore.attach("DistributedOptimizer", (), None)

    def _join_workers(self, shard: str | None, memory: Sequence[float] | str) -> None:
        kind, store = type(self._optimizer).__name__, self.kvstore
        parameters: dict[Key, nn.Parameter] = dict(enumerate(p for group in self.param_groups for p in group["params"]))
        if kind in _REFUSED:
            raise ValueError(f"optimizer {kind} cannot be distributed: {_REFUSED[kind]}; expected another one")
        if store.is_async:
            raise ValueError(
                f"a {store.type!r} store adds up gradients of different steps, which have no mean; expected a "
                "synchronous store, such as 'allreduce' or 'dist_sync', or a gangline Trainer"
            )
        if len({parameter.device for parameter in parameters.values()}) > 1:
            raise ValueError("the parameters are on several devices; expected one device per worker")
        store.attach("DistributedOptimizer", parameters, None)
        self._parameters = parameters
        self._trained = trained = {key: one for key, one in parameters.items() if one.requires_grad}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in trained.values()
        ]
        if shard == "weights":
            assert self._network is not None
            self._reducer = self._sharded = ShardedWeights(list(parameters.values()), self._network, store, memory)
            self._owned = _OwnedParameters(self._optimizer, self._sharded.owners, with_owners(store))
            return
        tensors = [parameter.data for parameter in parameters.values()]
        store.broadcast(list(parameters), tensors, tensors)
        self._reducer = GradientReducer(trained, store)
        if shard is not None:
            owning = with_owners(store)
            owners = owning.owners_of([one.data for one in trained.values()], memory)
            self._owned = _OwnedParameters(self._optimizer, dict(zip(trained.values(), owners, strict=True)), owning)

    # Averaging

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: a backward in this context stays local; the next one outside averages the sums.

        For example:

            with optimizer.no_sync():
                loss_function(model(data[:8]), label[:8]).backward()
            loss_function(model(data[8:]), label[8:]).backward()
            optimizer.step()  # one update, from the sum of both gradients
        """
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def synchronize(self) -> None:
        """Average gradients that were not averaged since the last step, including assigned ones. Collective.

        `step` calls it. If workers read gradients before `step`, as ``clip_grad_norm_`` does, a worker without samples
        must call it where the others call ``backward()``.

        Raises:
            RuntimeError: if the last backward has failed after it had sent some gradients.
        """
        if self._end_failed_backward():
            raise RuntimeError(
                "the last backward failed after it had sent a part of the gradients; expected zero_grad() and the next "
                "step"
            )
        if self._reducer is not None and (self._has_local or not self._is_reduced):
            if not self._has_local:
                self._reducer.begin([0], push_early=False)
                self._has_local = isinstance(self._reducer, GradientReducer) and self._reducer.has_assigned()
            self._reduce(self._weight if self._has_local else None)

    def _on_gradient(self, _: torch.Tensor) -> None:
        """Prepare for a backward at its first gradient; runs in the autograd thread, before the reducer's hook."""
        assert self._reducer is not None
        number = torch._C._current_graph_task_id()
        with self._lock:
            if number == self._backward:
                return
            if self._end is not None and self._end() is not None:
                raise RuntimeError(
                    "a backward began inside another one; expected "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            self._end_failed_backward()
            self._backward = number
            self._has_local = True
            self._reducer.begin([0], push_early=self._is_syncing, weight=self._weight)
            if self._is_syncing:
                end = partial(self._on_backward_end)
                self._end = weakref.ref(end)
                torch.autograd.Variable._execution_engine.queue_callback(end)

    def _on_backward_end(self) -> None:
        self._end = None
        self._reduce(self._weight)

    def _end_failed_backward(self) -> bool:
        """If the last backward has failed, end it on all workers; return False if it had not sent anything."""
        is_inside = torch._C._current_graph_task_id() != -1
        if self._end is None or (is_inside and self._end() is not None):
            return False
        if isinstance(self._reducer, ShardedWeights):
            raise RuntimeError("the last backward failed; with shard='weights' the workers need a new job then")
        self._end = None
        return self._reducer is not None and self._reducer.refuse(RuntimeError("see that worker's own error"))

    def _reduce(self, weight: float | None) -> None:
        assert self._reducer is not None
        self._reducer.finish(weight)
        self._is_reduced, self._has_local = True, False

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients in place by their common 2-norm, after backward. Collective with ``shard="weights"``.

        With ``shard="weights"`` it replaces torch's function, which would see only this worker's gradients.

        Args:
            max_norm: maximum norm.

        Returns:
            The norm before clipping.
        """
        if self._sharded is not None:
            return self._sharded.clip_grad_norm_(max_norm)
        parameters = [one for group in self.param_groups for one in group["params"]]
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def close(self) -> None:
        """Remove the hooks from the parameters; the store stays open."""
        for hook in self._hooks:
            hook.remove()
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None

    # torch.optim.Optimizer

    @torch.inference_mode(mode=False)  # the optimizer's state is kept
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step, after `synchronize` if there is no closure.

        Raises:
            RuntimeError: if a parameter that was frozen when the workers joined is no longer frozen.
        """
        check_frozen(self._parameters, self._trained, "DistributedOptimizer")
        result = None
        if closure is not None and self._owned is None:
            result = self._optimizer.step(closure)
        else:
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self.synchronize()
            if self._sharded is not None:
                self._sharded.before_update()
            if self._owned is None:
                self._optimizer.step()
            else:
                self._owned.step()
                if self._sharded is None:
                    with waiting_for_ranks():
                        self._owned.copy_from_owners()
        self._is_reduced = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as the wrapped optimizer does."""
        self._end_failed_backward()
        if isinstance(self._reducer, GradientReducer):
            self._reducer.move_hooks_last()
        self._optimizer.zero_grad(set_to_none)
        self._has_local = False
        self._is_reduced = False  # also after a step that GradScaler has skipped
        if self._sharded is not None:
            self._sharded.forget_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which is the same on all workers; with ``shard`` collective."""
        return self._optimizer.state_dict() if self._owned is None else self._owned.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; all workers must load the same one."""
        self._optimizer.load_state_dict(state_dict)
        if self._owned is not None:
            self._owned.drop_others()

    def _has_keys(self) -> bool:
        return self._reducer is not None


class _OwnedParameters:
    """Steps of an optimizer over the parameters that a worker owns."""

    def __init__(self, optimizer: Optimizer, owners: Mapping[nn.Parameter, int], store: AllReduceStore) -> None:
        """Drop the optimizer's state of parameters that other workers own."""
        self._optimizer, self._owners, self._store = optimizer, owners, store
        self._others = [one for one, owner in owners.items() if owner != store.rank]
        self.drop_others()

    def step(self) -> None:
        """Update the owned parameters."""
        gradients = [one.grad for one in self._others]
        for one in self._others:
            one.grad = None  # optimizers skip parameters without a gradient
        try:
            self._optimizer.step()
        finally:
            for one, gradient in zip(self._others, gradients, strict=True):
                one.grad = gradient

    @torch.no_grad()
    def copy_from_owners(self) -> None:
        """Broadcast all weights from their owners: large ones in place, small ones concatenated. Collective."""
        small: dict[tuple[int, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        tensors, owners = [], []
        for one, owner in self._owners.items():
            if one.nbytes >= _LARGE and one.is_contiguous():
                torch.autograd.graph.increment_version(one)  # for graphs that need the old values
                tensors.append(one.data.view(-1))
                owners.append(owner)
            else:
                small[owner, one.dtype].append(one)
        joined = [torch.cat([one.flatten() for one in parameters]) for parameters in small.values()]
        self._store.copy_from_owners("updated parameters", tensors + joined, owners + [owner for owner, _ in small])
        for flat, ((owner, _), parameters) in zip(joined, small.items(), strict=True):
            if owner != self._store.rank:
                parts = torch.split(flat, [one.numel() for one in parameters])
                for one, part in zip(parameters, parts, strict=True):
                    one.copy_(part.view(one.shape))

    def drop_others(self) -> None:
        """Drop the state of parameters that other workers own."""
        for one in self._others:
            self._optimizer.state.pop(one, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, in torch's form, on the host. Collective."""
        own = self._optimizer.state_dict()
        state: dict[int, Any] = {}
        for theirs in self._store.group.all_gather(list(own["state"].items()), "state_dict"):
            state |= {int(number): values for number, values in theirs}
        return {**own, "state": dict(sorted(state.items()))}
