"""`Trainer`: the optimizer of a plain torch loop, over any store."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.kvstore.arguments import Value, check_weight
from gangline.kvstore.buckets import Bucket, plan
from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.registry import create
from gangline.kvstore.sparse import RowSparse, summed

_log = logging.getLogger("gangline")
_BUCKET_BYTES = 25 << 20
_REDUCTIONS = ("mean", "sum")

Parameters = nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Trainer:
    """Updates parameters from their ``.grad``, summed over all workers of a store; like gluon's, for torch.

    A plain loop moves to it by three lines: ``Trainer(model.parameters(), "sgd", {"learning_rate": 0.1}, "allreduce")``
    in place of the optimizer, ``trainer.zero_grad()``, and ``trainer.step(len(batch))``. At the start rank 0's
    parameters go to all workers.

    Each worker's ``.grad`` is that of its mean loss over the ``batch_size`` samples it gives to `step`. The update uses
    ``sum(n_i g_i) / sum(n_i)``: the gradient of the mean over all workers' samples, however many each had. Alone,
    ``step(n)`` is torch's ``optimizer.step()``. A parameter that no worker has a gradient for is left alone.

    Who writes into parameters between two steps (by ``load_state_dict``, say) does so on all workers: the next `step`
    takes over rank 0's, and waits for all.
    """

    def __init__(
        self,
        params: Parameters,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStore = "device",
        *,
        loss_reduction: str = "mean",
    ) -> None:
        """Give the parameters to the store; all workers call this with the same parameters.

        Args:
            params: a module, its ``parameters()`` or ``named_parameters()``, or a dict of the latter. Keys of the store
                are their names, or their numbers from 0.
            optimizer: a name or a class of torch.optim, as `KVStore.set_optimizer` takes it.
            optimizer_params: its arguments.
            kvstore: a store, or the name of one to be made.
            loss_reduction: "sum" where gradients are those of losses summed over the samples, not averaged.

        Raises:
            TypeError: what is given is of a wrong type.
            ValueError: no parameters, one that comes twice, a key that the store holds already, an unknown name, or an
                optimizer that does not take a parameter.
            MismatchError: the workers' parameters differ.
        """
        self._parameters = _named(params)
        if loss_reduction not in _REDUCTIONS:
            raise ValueError(f"loss_reduction is {loss_reduction!r}; expected one of {', '.join(_REDUCTIONS)}")
        if not isinstance(kvstore, (str, KVStore)):
            raise TypeError(f"kvstore is {kvstore!r}; expected a store, or its name")
        spec = OptimizerSpec.parse((optimizer, dict(optimizer_params or {})))
        spec.check_keys(self._parameters)
        self._is_sum = loss_reduction == "sum"
        self.kvstore = create(kvstore) if isinstance(kvstore, str) else kvstore
        """Where gradients are summed and weights are kept."""
        held = [key for key in self._parameters if key in self.kvstore]
        if held:
            raise ValueError(f"the {self.kvstore.type!r} store holds keys {held} already; give each trainer its own")
        self._buckets: list[Bucket] | None = None
        self._lone: list[Key] = []  # what stays out of buckets: its gradients are sparse
        self._made_dense: set[Key] = set()
        self._accumulates = False
        self._kept: dict[Key, Value] = {}  # sums over samples of the batches since the last update
        self._kept_samples = 0.0
        self.kvstore.set_optimizer(spec)
        weights = list(self._parameters.values())
        self.kvstore.broadcast(list(self._parameters), weights, weights)
        self._versions = self._current_versions()

    def step(self, batch_size: float) -> None:
        """Update the parameters from their gradients, or within `no_sync` keep the latter for the next update.

        Args:
            batch_size: how many samples ``.grad`` is the mean over (or the sum, as ``loss_reduction`` says); 0 for a
                worker that has none this time, whose gradients are not looked at.

        Raises:
            TypeError: it is no number.
            ValueError: it is negative or not finite; or a gradient cannot be compressed.
            GanglineError: a worker is dead, late, or makes another call.
        """
        check_weight(batch_size)
        if self._accumulates:
            self._keep(batch_size)
            return
        self._take_over_changes()
        gradients, weight = self._mean(batch_size)
        try:
            self._push(gradients, weight)
        except Exception:  # whatever it was is raised again
            if self.kvstore.num_workers == 1:  # else all workers would have to
                self.kvstore.drop_updates()
            raise
        self.kvstore.update()
        self._pull()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, `step` adds up: the next step outside updates once, with the mean over all their samples.

        The gradients go over to the trainer, and ``.grad`` is None then.
        """
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as torch's optimizers do; not those that `no_sync` has kept."""
        for parameter in self._parameters.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def join(self) -> int:
        """Have the others go on without this worker until all have joined; then take their weights.

        A worker that has no samples from the first step on calls ``step(0)`` instead.

        Returns:
            The rank that joined last.
        """
        last = self.kvstore.join()
        self._pull()
        return last

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate."""
        return self.kvstore.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next step on; rank 0's decides."""
        self.kvstore.set_learning_rate(learning_rate)

    def save_states(self, path: str | Path) -> None:
        """Have rank 0 write the optimizer's state; other workers write nothing."""
        if not self.kvstore.rank:
            self.kvstore.save_optimizer_states(path)

    def load_states(self, path: str | Path) -> None:
        """Take over the optimizer state of a file; all workers call this, and rank 0's file is taken.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a torn or foreign file, another optimizer, unknown keys, or other shapes.
        """
        self.kvstore.load_optimizer_states(path)

    @torch.no_grad()
    def _keep(self, batch_size: float) -> None:
        for key, gradient in self._own_gradients().items() if batch_size else ():
            total = _scaled(gradient, 1.0 if self._is_sum else batch_size)
            self._kept[key] = _sum(self._kept[key], total) if key in self._kept else total
        self._kept_samples += batch_size
        self.zero_grad()

    @torch.no_grad()
    def _mean(self, batch_size: float) -> tuple[dict[Key, Value], float]:
        """The gradients of the mean over this worker's samples since the last update, and their number."""
        samples = self._kept_samples + batch_size
        gradients = self._own_gradients() if batch_size else {}
        if self._kept_samples or self._is_sum:
            own = 1.0 if self._is_sum else batch_size
            kept, self._kept, self._kept_samples = self._kept, {}, 0.0
            totals = {key: _scaled(gradient, own / samples) for key, gradient in gradients.items()}
            for key, total in kept.items():
                share = _scaled(total, 1 / samples)
                totals[key] = _sum(share, totals[key]) if key in totals else share
            gradients = totals
        return gradients, samples

    def _own_gradients(self) -> dict[Key, Value]:
        return {key: _value(p.grad) for key, p in self._parameters.items() if p.grad is not None}

    def _push(self, gradients: dict[Key, Value], weight: float) -> None:
        if self._buckets is None:
            self._form(gradients)
        assert self._buckets is not None
        for bucket in self._buckets:
            own = {key: self._dense(key, gradients[key]) for key in bucket.keys if key in gradients}
            if own or self.kvstore.num_workers > 1:
                self.kvstore.push_bucket(bucket, [own], list(own), weight=weight)
        lone = [key for key in self._lone if key in gradients or self.kvstore.num_workers > 1]
        if lone:
            self.kvstore.push_weighted(lone, [gradients.get(key) for key in lone], weight)

    def _form(self, gradients: Mapping[Key, Value]) -> None:
        """Put what is dense on all workers into buckets, in the order of the parameters."""
        sparse = [place for place, key in enumerate(self._parameters) if isinstance(gradients.get(key), RowSparse)]
        everywhere = {
            place for told in self.kvstore.exchange(json.dumps(sparse).encode()) for place in json.loads(told)
        }
        keys = list(self._parameters)
        self._lone = [keys[place] for place in sorted(everywhere)]
        tensors = [(key, p.detach()) for key, p in self._parameters.items() if key not in self._lone]
        buckets = list(plan(tensors, _BUCKET_BYTES))
        for bucket in buckets:
            self.kvstore.fuse(bucket)
        self._buckets = buckets

    def _dense(self, key: Key, gradient: Value) -> torch.Tensor:
        if isinstance(gradient, RowSparse):
            if key not in self._made_dense:
                self._made_dense.add(key)
                _log.warning("the gradient of key %r is sparse, and was not at the first step: it travels dense", key)
            return gradient.to_dense()
        return gradient

    def _pull(self) -> None:
        self.kvstore.pull(list(self._parameters), list(self._parameters.values()))
        self._versions = self._current_versions()

    def _take_over_changes(self) -> None:
        """Have the store hold what somebody, such as load_state_dict, has written into parameters since the pull."""
        changed = [key for key, version in self._current_versions().items() if version != self._versions[key]]
        if changed:
            self.kvstore.assign(changed, [self._parameters[key] for key in changed])

    def _current_versions(self) -> dict[Key, int]:
        return {key: parameter._version for key, parameter in self._parameters.items()}


def _named(params: Any) -> dict[Key, torch.Tensor]:
    if isinstance(params, torch.Tensor):
        raise TypeError("params is a single tensor; expected a module, its parameters() or named_parameters()")
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    elif isinstance(params, Mapping):
        params = params.items()
    given = [one if isinstance(one, tuple) else (number, one) for number, one in enumerate(params)]
    named: dict[Key, torch.Tensor] = {}
    seen: dict[int, Key] = {}
    for key, parameter in given:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameter {key!r} is a {type(parameter).__name__}; expected a torch.nn.Parameter")
        if key in named or id(parameter) in seen:
            raise ValueError(f"parameter {key!r} comes twice; expected each once")
        named[key] = parameter
        seen[id(parameter)] = key
    if not named:
        raise ValueError("params has no parameters; expected a module's")
    return named


def _value(gradient: torch.Tensor) -> Value:
    if gradient.layout == torch.strided:
        return gradient.detach()
    return summed([RowSparse.from_coo(gradient)], gradient.device)


def _scaled(value: Value, factor: float) -> Value:
    if isinstance(value, RowSparse):
        return RowSparse(value.indices, value.values * factor, value.shape)
    return value * factor


def _sum(first: Value, second: Value) -> Value:
    if isinstance(first, RowSparse) and isinstance(second, RowSparse):
        return summed([first, second], first.device)
    dense = [value.to_dense() if isinstance(value, RowSparse) else value for value in (first, second)]
    return dense[0] + dense[1]
