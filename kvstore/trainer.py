"""`Trainer`: the optimizer of a plain torch loop, data-parallel over any store."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.kvstore.arguments import Value, check_shard, check_weight
from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec
from gangline.kvstore.reducer.owned_keys import OwnedKeys
from gangline.kvstore.reducer.reducer import Reducer, check_frozen, cudnn_weights, sparse_tables
from gangline.kvstore.reducer.sharded_weights import ShardedWeights, load_whole_state, whole_state
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

    After the first step the parameters are views of flat buckets. With one worker the store updates them in place.

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
        shard: str | None = None,
        memory: Sequence[float] | str = "auto",
    ) -> None:
        """Put the parameters into the store. Collective: all workers must call it, with the same parameters.

        Args:
            params: a module, its ``parameters()`` or ``named_parameters()``, or a dict of name to parameter. The keys
                in the store are the names, or numbers from 0 for parameters without names.
            optimizer: name or class of torch.optim, as for `KVStore.set_optimizer`.
            optimizer_params: arguments of the optimizer, as for `OptimizerSpec.parse`.
            kvstore: a store, or the name of one to create.
            loss_reduction: "mean", or "sum" if ``.grad`` is of a loss summed over the samples.
            shard: "optimizer": the workers divide the optimizer's state, as for `KVStore.set_optimizer`. "weights":
                they divide weights and gradients too, as with `DistributedOptimizer`; ``params`` is a module then.
            memory: relative memory of the workers, as for `KVStore.set_optimizer`.

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
        check_shard(shard, or_weights=True)
        self._is_sum, self._is_sharded = loss_reduction == "sum", shard is not None
        if shard == "weights" and not isinstance(params, nn.Module):
            raise TypeError(
                f"params is a {type(params).__name__}; expected the torch.nn.Module whose weights to divide"
            )
        self.kvstore = create(kvstore) if isinstance(kvstore, str) else kvstore
        held = [key for key in self._parameters if key in self.kvstore]
        if held:
            raise ValueError(f"the {self.kvstore.type!r} store holds keys {held} already; give each trainer its own")
        self._is_accumulating = False
        self._accumulated: dict[Key, Value] = {}  # sums over the samples since the last update
        self._accumulated_samples = 0.0
        self._weight = 0.0
        self._warned = False  # of a step without gradients
        self._early_samples: float | None = None  # those of the `backward` that has pushed gradients
        self._trained = {key: one for key, one in self._parameters.items() if one.requires_grad}
        network = params if isinstance(params, nn.Module) else None
        self._network = network if shard == "weights" else None
        self._sharded: ShardedWeights | None = None
        self._reducer: Reducer | ShardedWeights
        if self._network is not None and self.kvstore.num_workers > 1:
            trained = list(self._trained.values())
            self._reducer = self._sharded = ShardedWeights(trained, self._network, self.kvstore, memory)
            self._owned = OwnedKeys(spec, self._sharded, self.kvstore)
            self._reducer.begin([0], push_early=False)
            return
        self.kvstore.set_optimizer(spec, shard=None if shard == "weights" else shard, memory=memory)
        weights = list(self._parameters.values())
        self.kvstore.broadcast(list(self._parameters), weights, weights)
        self._versions = self._current_versions()
        on_gpus = any(weight.is_cuda for weight in weights)
        keeps_memory = on_gpus and (network is None or len({weight.device for weight in weights}) > 1)
        self._reducer = Reducer(
            [self._trained],
            self.kvstore,
            loose=self._trained if keeps_memory else () if network is None else cudnn_weights(network),
            sparse=() if network is None else sparse_tables(network),
            in_place=self.kvstore.num_workers == 1,
        )
        self._reducer.begin([0], push_early=False)

    def backward(self, loss: torch.Tensor, batch_size: float) -> None:
        """Run ``loss.backward()`` and send gradients to the other workers meanwhile; `step` must follow directly.

        The gradients must not be changed before `step`. After it, ``.grad`` is that of the mean over the samples, also
        with ``loss_reduction="sum"``.

        Collective: all workers must call it, or ``step(0)`` alone if they have no samples.

        Args:
            loss: loss of this worker's samples.
            batch_size: as for `step`, which must get the same number.

        For example:

            trainer.zero_grad()
            trainer.backward(loss_function(model(data), label), len(data))
            trainer.step(len(data))
        """
        check_weight(batch_size)
        is_whole = not self._is_accumulating and not self._accumulated_samples and batch_size > 0
        is_early = is_whole and self.kvstore.num_workers > 1 and all(p.grad is None for p in self._parameters.values())
        if is_early:
            self._assign_changes()
        self._reducer.begin([0], push_early=is_early, weight=float(batch_size))
        if is_early and self._is_sum:
            loss = loss / batch_size
        loss.backward()  # type: ignore[no-untyped-call]
        self._early_samples, self._weight = (batch_size, float(batch_size)) if is_early else (None, 0.0)

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
            RuntimeError: if a parameter that was frozen when the trainer was made is no longer frozen.
            GanglineError: if a worker is dead, late or makes a different call.
        """
        check_weight(batch_size)
        check_frozen(self._parameters, self._trained, "Trainer")
        if batch_size and not self._warned:
            self._warn_without_gradients(batch_size)
        if self._is_accumulating:
            self._accumulate(batch_size)
            return
        early, self._early_samples = self._early_samples, None
        if early is None:
            self._assign_changes()
        elif early != batch_size:
            raise ValueError(f"step() got {batch_size} samples, but backward() got {early}; expected the same number")
        kept = self._set_means(batch_size) if early is None else {}
        try:
            self._reducer.finish(self._weight)
        except Exception:  # whatever failed, what was pushed is dropped, and the error is raised again
            if self.kvstore.num_workers == 1:  # drop_updates is collective
                self.kvstore.drop_updates()
            raise
        finally:
            for key, gradient in kept.items():
                self._parameters[key].grad = gradient
            self._reducer.begin([0], push_early=False)
        if self._sharded is not None:
            self._owned.update()
        self._versions = self._current_versions()

    def _warn_without_gradients(self, batch_size: float) -> None:
        """Log a warning, once, if no backward has computed a gradient for this step."""
        is_empty = self._sharded is None and not self._accumulated_samples and self._early_samples is None
        if is_empty and all(parameter.grad is None for parameter in self._parameters.values()):
            self._warned = True
            _log.warning(
                "step(%g) found no gradient, so it changes nothing: call backward() between zero_grad() and step(), or "
                "step(0) on a worker without samples",
                batch_size,
            )

    def skip(self) -> None:
        """Take part in a step without gradients, where this worker's forward or backward has failed.

            try:
                loss_function(model(data), label).backward()
            except torch.OutOfMemoryError:
                trainer.skip()
            else:
                trainer.step(len(data))

        The update uses the mean over the other workers' samples. Gradients that a failed backward left are dropped;
        those of `no_sync` stay. Collective: the other workers call `step` or `skip`.

        Raises:
            RuntimeError: if `backward` has sent a part of the gradients, or with ``shard="weights"``.
        """
        if self._sharded is not None:
            raise RuntimeError(
                "with shard='weights' the others need this worker's weights in each forward; expected a backward on "
                "any data and step(0) in place of skip()"
            )
        if isinstance(self._reducer, Reducer) and self._reducer.has_pushed():
            raise RuntimeError(
                "backward() sent a part of this step's gradients before it failed, so the step cannot be skipped; "
                "expected loss.backward(), which sends none before step()"
            )
        self._early_samples = None
        self.zero_grad()
        self.step(0)

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

        Raises:
            RuntimeError: with ``shard="weights"``, where the others need this worker's weights.
        """
        if self._sharded is not None:
            raise RuntimeError(
                "with shard='weights' the others need this worker's weights in each forward; expected a backward on "
                "any data and step(0) in place of join()"
            )
        last = self.kvstore.join()
        self._pull()
        return last

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate."""
        return self.kvstore.learning_rate if self._sharded is None else self._owned.optimizer.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next step on; rank 0's counts.

        Raises:
            TypeError: if it is not a number.
            ValueError: if it is negative, NaN or infinite.
        """
        if self._sharded is None:
            self.kvstore.set_learning_rate(learning_rate)
        else:
            self._owned.optimizer.learning_rate = learning_rate

    def save_states(self, path: str | Path) -> None:
        """Write the optimizer's state to a safetensors file on rank 0; with ``shard`` collective."""
        if self._sharded is not None:
            self._owned.save(path)
        elif not self.kvstore.rank or self._is_sharded:
            self.kvstore.save_optimizer_states(path)

    def load_states(self, path: str | Path) -> None:
        """Replace the optimizer's state by that of rank 0's file. Collective: all workers must call it.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged or not gangline's, or does not match the optimizer, keys or shapes.
        """
        if self._sharded is None:
            self.kvstore.load_optimizer_states(path)
        else:
            self._owned.load(path)

    def model_state_dict(self) -> dict[str, Any]:
        """Return the network's whole state on the host at rank 0, an empty dict elsewhere; for ``shard="weights"``.

        Collective: all workers must call it.
        """
        return whole_state(self._network, self._sharded)

    def load_model_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the network's state by rank 0's ``state``; others' is ignored; for ``shard="weights"``.

        Collective: all workers must call it.

        Raises:
            ValueError: if rank 0's names or shapes are not the network's; on all workers.
        """
        load_whole_state(self._network, self._sharded, state)

    @torch.no_grad()
    def _accumulate(self, batch_size: float) -> None:
        for key, gradient in self._own_gradients().items() if batch_size else ():
            total = _scaled(gradient, 1.0 if self._is_sum else batch_size)
            self._accumulated[key] = _sum(self._accumulated[key], total) if key in self._accumulated else total
        self._accumulated_samples += batch_size
        self.zero_grad()

    @torch.no_grad()
    def _set_means(self, batch_size: float) -> dict[Key, torch.Tensor | None]:
        """Make each ``.grad`` that of the mean over the samples since the last update; return those replaced."""
        samples = self._weight = self._accumulated_samples + batch_size
        if not self._accumulated_samples and not self._is_sum:
            return {}
        own = 1.0 if self._is_sum else batch_size
        accumulated, self._accumulated, self._accumulated_samples = self._accumulated, {}, 0.0
        gradients = self._own_gradients() if batch_size else {}
        kept = {key: parameter.grad for key, parameter in self._parameters.items()}
        for key, parameter in self._parameters.items():
            shares = [
                _scaled(total[key], factor / (samples or 1.0))
                for total, factor in ((accumulated, 1.0), (gradients, own))
                if key in total
            ]
            mean = None if not shares else shares[0] if len(shares) == 1 else _sum(*shares)
            parameter.grad = mean.to_coo() if isinstance(mean, RowSparse) else mean
        return {} if self._sharded is not None else kept  # then .grad is the mean over the workers

    def _own_gradients(self) -> dict[Key, Value]:
        return {key: _value(p.grad) for key, p in self._parameters.items() if p.grad is not None}

    def _pull(self) -> None:
        self.kvstore.pull(list(self._parameters), [parameter.data for parameter in self._parameters.values()])
        self._versions = self._current_versions()

    def _assign_changes(self) -> None:
        """Assign to the store the parameters that were written since the last pull, by load_state_dict for example."""
        if self._sharded is not None:  # which holds them itself
            return
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
