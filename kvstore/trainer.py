"""`Trainer`: the optimizer of a plain torch loop, data-parallel over any store."""

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
from gangline.kvstore.buckets import BUCKET_BYTES, Bucket, plan
from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.registry import create
from gangline.kvstore.sparse import RowSparse, summed

_log = logging.getLogger("gangline")
_REDUCTIONS = ("mean", "sum")

Parameters = nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Trainer:
    """Optimizer for plain torch loops: reduces every ``.grad`` over the workers of a store and updates the parameters.

    It takes the place of a torch optimizer; the name and the calls are those of MXNet gluon's Trainer. On creation
    rank 0's parameters are broadcast.

    Each worker's ``.grad`` is the gradient of its mean loss over the n_i samples that it passes to `step`. The update
    uses sum(n_i * g_i) / sum(n_i), the gradient of the mean loss over all workers' samples, however unequal the n_i.
    With one worker ``step(n)`` equals torch's ``optimizer.step()``. A parameter without a gradient on any worker is not
    updated.

    Parameters written between two steps, by ``load_state_dict`` for example, must be written on all workers. The next
    `step` then takes rank 0's values.

    Attributes:
        kvstore: the store, which reduces gradients and holds the weights.

    For example:

        trainer = gangline.Trainer(model, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="allreduce")
        for data, label in loader:
            trainer.zero_grad()
            loss_function(model(data), label).backward()
            trainer.step(len(data))
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
        """Put the parameters into the store. Collective: all workers must call it, with the same parameters.

        Args:
            params: a module, its ``parameters()`` or ``named_parameters()``, or a dict of name to parameter. The keys
                in the store are the names, or numbers from 0 for parameters without names.
            optimizer: name or class of torch.optim, as for `KVStore.set_optimizer`.
            optimizer_params: arguments of the optimizer, as for `OptimizerSpec.parse`.
            kvstore: a store, or the name of one to create.
            loss_reduction: "mean", or "sum" if ``.grad`` is of a loss summed over the samples.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if there are no parameters, one occurs twice, the store holds one of the keys already, a name is
                unknown, or the optimizer does not support a parameter.
            MismatchError: if the workers' parameters differ.
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
        held = [key for key in self._parameters if key in self.kvstore]
        if held:
            raise ValueError(f"the {self.kvstore.type!r} store holds keys {held} already; give each trainer its own")
        self._buckets: list[Bucket] | None = None
        self._sparse: list[Key] = []  # not in buckets
        self._warned: set[Key] = set()
        self._is_accumulating = False
        self._accumulated: dict[Key, Value] = {}  # sums over the samples since the last update
        self._accumulated_samples = 0.0
        self.kvstore.set_optimizer(spec)
        weights = list(self._parameters.values())
        self.kvstore.broadcast(list(self._parameters), weights, weights)
        self._versions = self._current_versions()

    def step(self, batch_size: float) -> None:
        """Update the parameters from their gradients; within `no_sync` only accumulate the gradients.

        Collective: all workers must call it, except within `no_sync`.

        Args:
            batch_size: number of samples that ``.grad`` is the mean over (or the sum, by ``loss_reduction``); may be
                fractional. With 0 this worker has no samples in this step, and its gradients are ignored.

        Raises:
            TypeError: if ``batch_size`` is not a number.
            ValueError: if ``batch_size`` is negative or not finite, or a gradient to be compressed holds NaN or
                infinity.
            GanglineError: if a worker is dead, late or makes a different call.
        """
        check_weight(batch_size)
        if self._is_accumulating:
            self._accumulate(batch_size)
            return
        self._assign_changes()
        gradients, weight = self._mean(batch_size)
        try:
            self._push(gradients, weight)
        except Exception:  # whatever failed, what was pushed is dropped, and the error is raised again
            if self.kvstore.num_workers == 1:  # drop_updates is collective
                self.kvstore.drop_updates()
            raise
        self.kvstore.update()
        self._pull()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: `step` calls in this context add up, and the next step outside updates once.

        That update uses the mean over all their samples. Each `step` in the context sets ``.grad`` to None.

        For example:

            with trainer.no_sync():
                loss_function(model(data[:8]), label[:8]).backward()
                trainer.step(8)
            loss_function(model(data[8:]), label[8:]).backward()
            trainer.step(8)  # one update, from 16 samples
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset ``.grad``, to None or to zeros; gradients accumulated by `no_sync` stay."""
        for parameter in self._parameters.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def join(self) -> int:
        """Leave the updates until all workers have joined, then pull the weights.

        Call it when this worker has run out of data before the others.
        A worker without samples in the very first step must call ``step(0)`` first.

        Returns:
            The rank that joined last.
        """
        last = self.kvstore.join()
        self._pull()
        return last

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate."""
        return self.kvstore.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next step on; rank 0's counts.

        Raises:
            TypeError: if it is not a number.
            ValueError: if it is negative, NaN or infinite.
        """
        self.kvstore.set_learning_rate(learning_rate)

    def save_states(self, path: str | Path) -> None:
        """Write the optimizer's state to a safetensors file on rank 0; other ranks write nothing."""
        if not self.kvstore.rank:
            self.kvstore.save_optimizer_states(path)

    def load_states(self, path: str | Path) -> None:
        """Replace the optimizer's state by that of rank 0's file. Collective: all workers must call it.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged or not gangline's, or does not match the optimizer, keys or shapes.
        """
        self.kvstore.load_optimizer_states(path)

    @torch.no_grad()
    def _accumulate(self, batch_size: float) -> None:
        for key, gradient in self._own_gradients().items() if batch_size else ():
            total = _scaled(gradient, 1.0 if self._is_sum else batch_size)
            self._accumulated[key] = _sum(self._accumulated[key], total) if key in self._accumulated else total
        self._accumulated_samples += batch_size
        self.zero_grad()

    @torch.no_grad()
    def _mean(self, batch_size: float) -> tuple[dict[Key, Value], float]:
        """Return this worker's gradient of the mean over its samples since the last update, and their number."""
        samples = self._accumulated_samples + batch_size
        gradients = self._own_gradients() if batch_size else {}
        if self._accumulated_samples or self._is_sum:
            own = 1.0 if self._is_sum else batch_size
            accumulated, self._accumulated, self._accumulated_samples = self._accumulated, {}, 0.0
            totals = {key: _scaled(gradient, own / samples) for key, gradient in gradients.items()}
            for key, total in accumulated.items():
                share = _scaled(total, 1 / samples)
                totals[key] = _sum(share, totals[key]) if key in totals else share
            gradients = totals
        return gradients, samples

    def _own_gradients(self) -> dict[Key, Value]:
        return {key: _value(p.grad) for key, p in self._parameters.items() if p.grad is not None}

    def _push(self, gradients: dict[Key, Value], weight: float) -> None:
        if self._buckets is None:
            self._form_buckets(gradients)
        assert self._buckets is not None
        for bucket in self._buckets:
            own = {key: self._dense(key, gradients[key]) for key in bucket.keys if key in gradients}
            if own or self.kvstore.num_workers > 1:
                self.kvstore.push_bucket(bucket, [own], list(own), weight=weight)
        sparse = [key for key in self._sparse if key in gradients or self.kvstore.num_workers > 1]
        if sparse:
            self.kvstore.push_weighted(sparse, [gradients.get(key) for key in sparse], weight)

    def _form_buckets(self, gradients: Mapping[Key, Value]) -> None:
        """Put the keys that are dense on all workers into buckets, in the order of the parameters."""
        own = [index for index, key in enumerate(self._parameters) if isinstance(gradients.get(key), RowSparse)]
        everywhere = {index for data in self.kvstore.exchange(json.dumps(own).encode()) for index in json.loads(data)}
        keys = list(self._parameters)
        self._sparse = [keys[index] for index in sorted(everywhere)]
        tensors = [(key, p.detach()) for key, p in self._parameters.items() if key not in self._sparse]
        buckets = list(plan(tensors, BUCKET_BYTES))
        for bucket in buckets:
            self.kvstore.fuse(bucket)
        self._buckets = buckets

    def _dense(self, key: Key, gradient: Value) -> torch.Tensor:
        if isinstance(gradient, RowSparse):
            if key not in self._warned:
                self._warned.add(key)
                _log.warning("the gradient of key %r is sparse, but was not in the first step; it is sent dense", key)
            return gradient.to_dense()
        return gradient

    def _pull(self) -> None:
        self.kvstore.pull(list(self._parameters), list(self._parameters.values()))
        self._versions = self._current_versions()

    def _assign_changes(self) -> None:
        """Assign to the store the parameters that were written since the last pull, by load_state_dict for example."""
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
            raise ValueError(f"parameter {key!r} occurs twice; expected each once")
        named[key] = parameter
        seen[id(parameter)] = key
    if not named:
        raise ValueError("params has no parameters; expected at least one")
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
