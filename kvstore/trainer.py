"""`Trainer`: the optimizer of a plain torch loop, data-parallel over any store."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.collectives.eager import run_eagerly
from gangline.kvstore.arguments import Value, check_shard
from gangline.kvstore.interface import KVStore, check_kept
from gangline.kvstore.optimizer.group import OptimizerGroup
from gangline.kvstore.optimizer.spec import Key, OptimizerSpec, check_not_negative
from gangline.kvstore.reducer.owned_keys import OwnedKeys
from gangline.kvstore.reducer.reducer import Reducer, as_tables, check_frozen, cudnn_weights, sparse_tables
from gangline.kvstore.reducer.sharded_weights import NetworkState, ShardedWeights
from gangline.kvstore.reducer.written_gradients import WrittenGradients
from gangline.kvstore.reducer.written_weights import WrittenWeights
from gangline.kvstore.registry import create
from gangline.kvstore.sparse import RowSparse, of_gradient, summed

_log = logging.getLogger("gangline")
_grad = attrgetter("grad")
_REDUCTIONS = ("mean", "sum")
_ON_STORE = (
    "the store updates the weights at each push, so gradients cannot be changed in between; expected clip_global_norm, "
    "clip_norm or clip_gradient in optimizer_params, or gangline.DistributedOptimizer over a torch optimizer, whose "
    "backward leaves the workers' mean in .grad"
)

Parameters = nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@run_eagerly
class Trainer(NetworkState):
    """Optimizer for plain torch loops: reduces every ``.grad`` over the workers of a store and updates the parameters.

    It replaces a torch optimizer and has the interface of MXNet gluon's Trainer. Creating it broadcasts rank 0's
    parameters.

    Each worker's ``.grad`` is the gradient of its mean loss over the n_i samples that it passes to `step`. The update
    uses sum(n_i * g_i) / sum(n_i), the gradient of the mean loss over all workers' samples, for any n_i. With one
    worker ``step(n)`` equals torch's ``optimizer.step()``. A parameter without a gradient on any worker is not updated.

    Parameters written between two steps, by ``load_state_dict`` or ``p.data = x`` for example, must be written on all
    workers. The next `step` then takes rank 0's values. In-place writes through ``.data``, such as ``p.data.clamp_()``,
    are a RuntimeError of a later step in two cases with several workers: to weights on GPUs, in loops that make none in
    the first steps, and to rows of a table with sparse gradients. ``with torch.no_grad(): p.clamp_()`` always works.

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
        kvstore: str | KVStore = "auto",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        loss_reduction: str = "mean",
        shard: str | None = None,
        memory: Sequence[float] | str = "auto",
    ) -> None:
        """Put the parameters into the store. Collective: all workers must call it, with the same parameters.

        Args:
            params: a module, its ``parameters()`` or ``named_parameters()``, or a dict of name to parameter. The keys
                in the store are the names, or numbers from 0 for parameters without names.
            optimizer: name or class of torch.optim, as for `KVStore.set_optimizer`; or a dict of optimizers by patterns
                of names, or by functions of (name, parameter).
            optimizer_params: arguments of the optimizer, as for `OptimizerSpec.parse`.
            kvstore: a store, or the name of one to create; "auto": the store of the job, see `create`.
            compression_params: as for `KVStore.set_gradient_compression`; None: no compression.
            update_on_kvstore: MXNet's argument. The store updates the weights; False is refused with several workers.
            loss_reduction: "mean" or "sum": reduction of the loss over the samples.
            shard: "optimizer": shard the optimizer's state over the workers, as for `KVStore.set_optimizer`. "weights":
                also shard weights and gradients, as with `DistributedOptimizer`; ``params`` must be a module.
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
        spec = OptimizerSpec.parse((optimizer, dict(optimizer_params or {})), self._parameters)
        spec.check_keys(self._parameters, [key for key, one in self._parameters.items() if one.requires_grad])
        check_shard(shard, or_weights=True)
        self._is_sum, self._is_sharded = loss_reduction == "sum", shard is not None
        if shard == "weights" and not isinstance(params, nn.Module):
            raise TypeError(
                f"params is a {type(params).__name__}; expected the torch.nn.Module whose weights to divide"
            )
        self.kvstore = create(kvstore) if isinstance(kvstore, str) else kvstore
        try:
            if update_on_kvstore is False and self.kvstore.num_workers > 1:
                raise ValueError(f"update_on_kvstore is False, but {_ON_STORE}")
            self._join_workers(params, spec, shard, memory, compression_params)
            several = self.kvstore.num_workers > 1
            self._written_gradients = WrittenGradients(self._trained if several else {})
        except BaseException:  # raised again
            if isinstance(kvstore, str):
                self.kvstore.close()
            raise

    def _join_workers(
        self,
        params: Parameters,
        spec: OptimizerSpec,
        shard: str | None,
        memory: Sequence[float] | str,
        compression: Mapping[str, Any] | None,
    ) -> None:
        self._is_accumulating = False
        self._accumulated: dict[Key, Value] = {}  # sums over the samples since the last update
        self._accumulated_samples = 0.0
        self._weight = 0.0
        self._warned = False  # of a step without gradients
        self._early_samples: float | None = None  # those of the `backward` that has pushed gradients
        self._failed_backward: str | None = None  # error of a `backward` that had pushed a part of the gradients
        self._has_failed = False  # the last step, whose pushes may wait for an update that will not come
        self._used: dict[Key, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradients of the last step, with versions
        self._trained = {key: one for key, one in self._parameters.items() if one.requires_grad}
        network = params if isinstance(params, nn.Module) else None
        self._network = network if shard == "weights" else None
        self._sharded = None
        self._written: WrittenWeights | None = None  # sharded weights are not in the store
        self._optimizer: OptimizerGroup | OwnedKeys  # with its learning rate and state
        self._reducer: Reducer | ShardedWeights
        if self._network is not None and self.kvstore.num_workers > 1:
            self.kvstore.attach("Trainer", self._parameters, None, compression=compression)
            trained = list(self._trained.values())
            self._reducer = self._sharded = ShardedWeights(trained, self._network, self.kvstore, memory)
            self._optimizer = OwnedKeys(spec, self._sharded, self.kvstore)
            self._reducer.begin([0], push_early=False)
            return
        shard = None if shard == "weights" else shard
        group = self.kvstore.attach(
            "Trainer", self._parameters, spec, shard=shard, memory=memory, compression=compression
        )
        assert group is not None
        self._optimizer = group
        weights = list(self._parameters.values())
        tables = () if network is None else sparse_tables(network)
        on_gpus = any(weight.is_cuda for weight in weights)
        keeps_memory = on_gpus and (network is None or len({weight.device for weight in weights}) > 1)
        self._reducer = Reducer(
            [self._trained],
            self.kvstore,
            loose=self._trained if keeps_memory else () if network is None else cudnn_weights(network),
            sparse=tables,
            in_place=self.kvstore.num_workers == 1,
            group=group,
        )
        try:  # last, because keys cannot be removed from the store
            self.kvstore.broadcast(list(self._parameters), as_tables(self.kvstore, self._parameters, tables), weights)
        except BaseException:  # raised again
            self._reducer.close()
            raise
        in_place = self.kvstore._serves_one_process  # servers do not, even with a single worker
        self._written = WrittenWeights(self._parameters, self._reducer, self.kvstore, sums_bits=not in_place)
        self._reducer.begin([0], push_early=False)

    def backward(self, loss: torch.Tensor, batch_size: float) -> None:
        """Run ``loss.backward()`` and reduce gradients while it runs; `step` must follow directly.

        If it fails after it has sent some gradients, the step fails on all workers: call `zero_grad` and continue with
        the next step. Plain ``loss.backward()`` sends nothing before `step` and may be repeated or skipped.

        The gradients must not be changed before `step`. After `step`, ``.grad`` is the gradient of the mean over the
        samples, also with ``loss_reduction="sum"``.

        Collective: all workers must call it, or ``step(0)`` alone if they have no samples.

        Args:
            loss: loss of this worker's samples.
            batch_size: as for `step`, which must get the same number.

        Raises:
            RuntimeError: if the last `backward` was not followed by `step`, or failed and was not followed by
                `zero_grad`.

        For example:

            trainer.zero_grad()
            trainer.backward(loss_function(model(data), label), len(data))
            trainer.step(len(data))
        """
        check_not_negative("weight", batch_size)
        self._check_backward()
        if self._early_samples is not None:
            raise RuntimeError(
                "backward() came twice, and the first has sent its gradients; expected step() after each, or no_sync()"
            )
        is_whole = not self._is_accumulating and not self._accumulated_samples and batch_size > 0
        is_early = is_whole and self.kvstore.num_workers > 1 and all(p.grad is None for p in self._parameters.values())
        if is_early:
            self._assign_changes()
        self._reducer.begin([0], push_early=is_early, weight=float(batch_size))
        if is_early and self._is_sum:
            loss = loss / batch_size
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if isinstance(self._reducer, Reducer) and self._reducer.refuse(error):
                self._failed_backward, self._has_failed = f"{type(error).__name__}: {error}", True
                self._note_weights()  # they are the store's now
            raise
        self._early_samples, self._weight = (batch_size, float(batch_size)) if is_early else (None, 0.0)

    def _check_backward(self) -> None:
        """Raise, once, if `backward` has failed after it had sent a part of the gradients."""
        failed, self._failed_backward = self._failed_backward, None
        if failed is not None:
            raise RuntimeError(
                "backward() sent a part of this step's gradients before it failed, so the step is an error on all "
                "workers; expected zero_grad() and the next step, and loss.backward(), which sends no gradient before "
                f"step(), where a backward may fail. The error was {failed}"
            )

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters from their gradients; within `no_sync` only accumulate the gradients.

        Collective: all workers must call it, except within `no_sync`.

        Args:
            batch_size: number of samples that ``.grad`` is the mean over (or the sum, by ``loss_reduction``); may be
                fractional. With 0 this worker has no samples in this step, and its gradients are ignored.
            ignore_stale_grad: ignore gradients that were not written since the last step, as MXNet does; without effect
                after `zero_grad`.

        Raises:
            TypeError: if ``batch_size`` is not a number.
            ValueError: if ``batch_size`` is negative or not finite, or a gradient to be compressed holds NaN or
                infinity.
            RuntimeError: if a parameter that was frozen when the trainer was made is no longer frozen, `backward` has
                failed after it had sent a part of the gradients, or, with several workers, gradients of the first step
                were written in place, as clip_grad_norm_ does.
            GanglineError: if a worker is dead, late or makes a different call.
        """
        check_not_negative("weight", batch_size)
        if self._failed_backward is not None:
            self._check_backward()
        if len(self._trained) < len(self._parameters):
            check_frozen(self._parameters, self._trained, "Trainer")
        self._written_gradients.check(_ON_STORE)
        if ignore_stale_grad:
            self._drop_stale_gradients()
        if batch_size and not self._warned and {*map(type, map(_grad, self._parameters.values()))} == {type(None)}:
            self._warn_without_gradients(batch_size)
        if self._is_accumulating:
            self._accumulate(batch_size)
            return
        early = self._early_samples
        if early is None:
            self._assign_changes()
        elif early != batch_size:
            raise ValueError(f"step() got {batch_size} samples, but backward() got {early}; expected the same number")
        self._early_samples = None
        accumulated = self._accumulated, self._accumulated_samples
        kept = self._set_means(batch_size) if early is None else {}
        self._has_failed = True
        try:
            self._reducer.finish(self._weight)
            self._has_failed = False
        except Exception:  # whatever failed, the samples of `no_sync` stay; raised again
            self._accumulated, self._accumulated_samples = accumulated
            self._note_weights()  # they are the store's now
            raise
        finally:
            for key, gradient in kept.items():
                self._parameters[key].grad = gradient
            self._reducer.begin([0], push_early=False)
        if isinstance(self._optimizer, OwnedKeys):
            self._optimizer.update()
        if ignore_stale_grad:
            gradients = {key: parameter.grad for key, parameter in self._parameters.items()}
            self._used = {key: (weakref.ref(one), one._version) for key, one in gradients.items() if one is not None}
        if self._written is not None:
            self._written.note(after_step=True)

    def keep(self, state: Any) -> None:
        """Save this worker's weights and the loop's state between two steps, for a restart of this worker alone.

        It has an effect only with a dist_sync store under `gangline launch --restart-processes`.

        Args:
            state: picklable state that the next step depends on: its number, random states, buffers.

        Raises:
            ValueError: if the state is None, which `kept` returns in a first start.
        """
        check_kept(state)
        if self._written is not None and isinstance(self._reducer, Reducer):
            self._reducer.keep([state, self._written.steps, self._written.writes_data])

    def kept(self) -> Any:
        """Restore the weights that `keep` saved before a restart, and return the saved state; None in the first start.

        Call it before the loop, which repeats the step that followed `keep`. That step's gradients count once, and the
        weights of all workers are bitwise equal to those of an uninterrupted job.

        For example:

            for step in range(trainer.kept() or 0, steps):
                trainer.keep(step)
                trainer.zero_grad()
                loss_function(model(data[step]), labels[step]).backward()
                trainer.step(len(data[step]))
        """
        found = self._reducer.kept() if isinstance(self._reducer, Reducer) else None
        if found is None or self._written is None:
            return None
        state, steps, self._written.writes_data = found
        self._written.steps = steps - 1  # `note` counts the step whose weights these are
        self._written.note()
        return state

    def _warn_without_gradients(self, batch_size: float) -> None:
        """Log a warning, once, if no backward has computed a gradient for this step."""
        if self._sharded is None and not self._accumulated_samples and self._early_samples is None:
            self._warned = True
            _log.warning(
                "step(%g) found no gradient, so it changes nothing: call backward() between zero_grad() and step(), or "
                "step(0) on a worker without samples",
                batch_size,
            )

    def skip(self) -> None:
        """Take part in a step without gradients, after this worker's forward or backward has failed.

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
        self._check_whole("skip()")
        self._check_backward()
        if self._early_samples is not None:
            raise RuntimeError("backward() has sent this step's gradients, so it cannot be skipped; expected step()")
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
        self._failed_backward = None
        for parameter in self._parameters.values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                if parameter.grad.grad_fn is not None:
                    parameter.grad.detach_()
                parameter.grad.requires_grad_(False).zero_()

    def allreduce_grads(self) -> None:
        """Do nothing; for MXNet's loops, which call it before `update`. RuntimeError with several workers."""
        if self.kvstore.num_workers > 1:
            raise RuntimeError(f"allreduce_grads() is for one worker: {_ON_STORE}")

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Call `step`; for MXNet's loops, after `allreduce_grads`. RuntimeError with several workers."""
        if self.kvstore.num_workers > 1:
            raise RuntimeError(f"update() is for one worker: {_ON_STORE}")
        self.step(batch_size, ignore_stale_grad)

    def join(self) -> int:
        """Stop taking part in updates until all workers have called `join`, then pull the weights.

        Call it when this worker runs out of data before the others. A worker without samples in the first step must
        call ``step(0)`` first.

        Returns:
            The rank that joined last.

        Raises:
            RuntimeError: with ``shard="weights"``, where the others need this worker's weights.
        """
        self._check_whole("join()")
        last = self.kvstore.join()
        self.kvstore.pull(list(self._parameters), [parameter.data for parameter in self._parameters.values()])
        self._note_weights()
        return last

    def _check_whole(self, call: str) -> None:
        if self._sharded is not None:
            raise RuntimeError(
                "with shard='weights' the others need this worker's weights in each forward; expected a backward on "
                f"any data and step(0) in place of {call}"
            )

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate."""
        return self._optimizer.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next step on; rank 0's value is used, see `KVStore.set_learning_rate`."""
        self._optimizer.set_learning_rate(learning_rate)

    def save_states(self, path: str | Path) -> None:
        """Write the optimizer's state to a safetensors file on rank 0; with ``shard`` collective.

        Errors of gradient compression are not in it; each worker has its own, in `KVStore.compression_residuals`.
        """
        if not self.kvstore.rank or self._is_sharded:
            self._optimizer.save_optimizer_states(path)

    def load_states(self, path: str | Path) -> None:
        """Load the optimizer's state from rank 0's file, as `KVStore.load_optimizer_states`. Collective."""
        self._optimizer.load_optimizer_states(path)

    @torch.no_grad()
    def _accumulate(self, batch_size: float) -> None:
        for key, gradient in self._own_gradients().items() if batch_size else ():
            total = _scaled(gradient, 1.0 if self._is_sum else batch_size)
            self._accumulated[key] = _sum(self._accumulated[key], total) if key in self._accumulated else total
        self._accumulated_samples += batch_size
        self.zero_grad()

    @torch.no_grad()
    def _set_means(self, batch_size: float) -> dict[Key, torch.Tensor | None]:
        """Set each ``.grad`` to that of the mean over the samples since the last update; return the replaced ones."""
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
        return {key: of_gradient(p.grad) for key, p in self._parameters.items() if p.grad is not None}

    def _assign_changes(self) -> None:
        if self._has_failed:
            self.kvstore.drop_updates(group=self._reducer.group if isinstance(self._reducer, Reducer) else None)
            self._has_failed = False
        if self._written is not None and (written := self._written.assign()):
            frozen = [key for key in written if key not in self._trained]
            self.kvstore.pull(frozen, [self._parameters[key].data for key in frozen])

    def _note_weights(self) -> None:
        if self._written is not None:
            self._written.note()

    def _drop_stale_gradients(self) -> None:
        for key, parameter in self._parameters.items():
            gradient, (used, version) = parameter.grad, self._used.get(key, (None, 0))
            if gradient is not None and used is not None and used() is gradient and gradient._version == version:
                parameter.grad = None


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
        if not parameter.is_leaf:
            raise ValueError(f"parameter {key!r} is the result of a computation; expected a leaf, such as nn.Parameter")
        if key in named or id(parameter) in seen:
            raise ValueError(f"parameter {key!r} occurs twice; expected each once")
        named[key] = parameter
        seen[id(parameter)] = key
    if not named:
        raise ValueError("params has no parameters; expected at least one")
    return named


def _scaled(value: Value, factor: float) -> Value:
    if isinstance(value, RowSparse):
        return RowSparse(value.indices, value.values * factor, value.shape)
    return value * factor


def _sum(first: Value, second: Value) -> Value:
    if isinstance(first, RowSparse) and isinstance(second, RowSparse):
        return summed([first, second], first.device)
    dense = [value.to_dense() if isinstance(value, RowSparse) else value for value in (first, second)]
    return dense[0] + dense[1]
