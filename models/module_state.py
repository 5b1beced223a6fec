"""Parameters, optimizer state and checkpoints of a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gangline.kvstore import KVStore
from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import check_learning_rate
from gangline.models.checkpoint import checkpoint
from gangline.models.initializer import InitializerSpec, initialise
from gangline.models.names import state_of
from gangline.models.optimizer_binding import OptimizerBinding, StoreOptimizer, StoreOptions
from gangline.models.random_streams import host_states
from gangline.models.run_state import Position
from gangline.models.training_step import TrainingStep
from gangline.models.workers import Workers

Params = Mapping[str, torch.Tensor]


class ModuleState(TrainingStep):
    """Reads, writes, saves and restores parameters, buffers, optimizer state and position of a module."""

    _options: StoreOptions
    _params_set = False
    _pending_optimizer_state: OptimizerState | None = None
    """Loaded state, from which the next `Module.init_optimizer` starts."""

    # -- parameters -----------------------------------------------------------------------------------------------

    def init_params(
        self,
        initializer: InitializerSpec | None = None,
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        *,
        allow_missing: bool = False,
        allow_extra: bool = False,
        force_init: bool = False,
    ) -> None:
        """Set parameters from ``arg_params``, else by ``initializer``; without either they keep their values.

        Args:
            initializer: MXNet's name ("xavier", "uniform", ...), (name, arguments), or a function that fills a tensor;
                biases are set to 0, and normalization layers to torch's initial values.
            arg_params: tensors by state_dict name; a leading ``module.`` of all names is dropped.
            aux_params: more tensors; MXNet passes buffers, such as running statistics, separately.
            allow_missing: accept names that are in neither.
            allow_extra: ignore names that the network does not have.
            force_init: initialize again; without it a second call only logs a warning.

        Raises:
            RuntimeError: if names are missing from ``arg_params``, or ``initializer`` is given after `init_optimizer`
                with ``shard="weights"``.
            ValueError: if ``arg_params`` has extra names, or a tensor of another shape.
        """
        if self._params_set and not force_init:
            self.logger.warning("the parameters are initialized already; init_params() is ignored (force_init=True)")
            return
        network = self.bound.replicas.first.network
        state = {}
        if initializer is not None and self.shards_weights:
            raise RuntimeError(
                "init_params(initializer) came after init_optimizer(), which has divided the weights among the "
                "workers; call it before"
            )
        if arg_params is not None or aux_params is not None:
            state = self._matched(_joined(arg_params, aux_params), allow_missing, allow_extra)
        if initializer is not None:
            initialise(network, initializer, skip=set(state))
            state = state_of(network) | state
        self._params_set = True
        self._load_state(state)

    def get_params(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers on the host, by state_dict name.

        Running statistics are averaged over this worker's replicas; over all workers they are averaged at the end of
        each epoch, and in checkpoints.

        Collective with ``shard="weights"``: rank 0 gets the tensors, the other workers an empty dict.
        """
        return self.bound.replicas.state_dict()

    def set_params(
        self,
        arg_params: Params,
        aux_params: Params | None = None,
        *,
        allow_missing: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Replace parameters and buffers of all replicas and of the store; arguments are those of `init_params`.

        Collective: in a job all workers must call it; rank 0's values are used.

        Raises:
            TypeError: if ``arg_params`` or ``aux_params`` is not a mapping.
            RuntimeError: if names are missing.
            ValueError: if there are extra names, or a tensor has another shape.
        """
        self._load_state(self._matched(_joined(arg_params, aux_params), allow_missing, allow_extra))

    def _matched(self, params: Params, allow_missing: bool, allow_extra: bool) -> dict[str, torch.Tensor]:
        """Return the checked values to load. With sharded weights they are rank 0's, and the call is collective."""
        replicas, found = self.bound.replicas, dict[str, torch.Tensor]()

        def match() -> None:
            with replicas.state_names():
                found.update(checkpoint.matched(replicas.first.network, params, allow_missing, allow_extra))

        if self.shards_weights:
            self.workers.run_on_first(match, "check of parameters")
        else:
            match()
        return found

    def _load_state(self, state: Params) -> None:
        replicas, optimizer = self.bound.replicas, self._optimizer
        replicas.average_buffers(self.workers)
        replicas.load_state_dict(dict(state))
        if optimizer.is_set and not optimizer.shards_weights:  # then all workers have loaded rank 0's
            optimizer.assign_weights()
            self._share_untrained(self.workers)

    def _share_untrained(self, workers: Workers) -> None:
        """Copy rank 0's buffers and untrained parameters, which the store does not hold, to all workers. Collective."""
        if workers.count > 1:
            replicas = self.bound.replicas
            replicas.load_untrained(workers.agree_on_tensors(replicas.untrained(), "broadcast of buffers"))

    def save_params(self, path: str | Path) -> None:
        """Write `get_params` to a safetensors file; in a job rank 0 writes. Collective with ``shard="weights"``.

        Raises:
            ValueError: if ``path`` does not end in ``.safetensors``.
        """
        path = Path(path)
        if path.suffix != ".safetensors":
            raise ValueError(f"path is {path}; expected a name that ends in .safetensors")
        params = self.get_params() if self.workers.is_first or self.shards_weights else {}
        if self.workers.is_first:
            files.save(path, params, {})

    def load_params(self, path: str | Path) -> None:
        """Replace the parameters by those of a ``.safetensors``, ``.pth`` or ``.pt`` file; see `set_params`.

        Raises:
            FileNotFoundError: if the file does not exist.
            RuntimeError: if names are missing from it.
            ValueError: if it is damaged, of another format, or has other names or shapes.
        """
        self.set_params(checkpoint.read_weights(path))
        self._params_set = True

    def average_statistics(self) -> None:
        """Average running statistics over all replicas, weighted by samples seen; `fit` calls it after each epoch.

        Collective. Workers of an asynchronous store also pull the store's weights.
        """
        self.bound.replicas.average_buffers(self.workers)
        if self.workers.count > 1 and not self.workers.in_step:
            self._optimizer.pull_weights()

    # -- optimizer ------------------------------------------------------------------------------------------------

    @property
    def optimizer_initialized(self) -> bool:
        """True after `init_optimizer`."""
        return self._optimizer.is_set

    @property
    def shards_weights(self) -> bool:
        """True if weights are sharded over the workers, so that each forward is collective."""
        return self._optimizer.shards_weights

    @property
    def store_type(self) -> str | None:
        """Name of the store; None before `init_optimizer`, and if a single context needs no store."""
        return self.store.type if self.store is not None else None

    @property
    def store(self) -> KVStore | None:
        """The store that sums gradients; None before `init_optimizer`, and if a single context needs no store."""
        return self._optimizer.store

    @property
    def learning_rate(self) -> float:
        """The optimizer's learning rate; RuntimeError before `init_optimizer`."""
        return self._require_optimizer("learning_rate").learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next update on."""
        check_learning_rate(learning_rate)
        self._require_optimizer("set_learning_rate()").set_learning_rate(learning_rate)

    def optimizer_state(self) -> OptimizerState:
        """Return a copy of the optimizer's state, on the host; RuntimeError before `init_optimizer`.

        Collective with ``shard``; with "weights" rank 0 gets the full state, every other worker its own shard.
        """
        return self._require_optimizer("optimizer_state()").state()

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """Return the residuals of gradient compression, on the host; see `KVStore.compression_residuals`."""
        return self.store.compression_residuals() if self.store is not None else {}

    def _require_optimizer(self, call: str) -> OptimizerBinding:
        if not self._optimizer.is_set:
            raise RuntimeError(f"{call} came before init_optimizer(); call it first")
        return self._optimizer

    @property
    def step(self) -> int:
        """Number of training batches run so far, on which the random streams of the contexts depend."""
        return self.run_state.step

    @property
    def position(self) -> Position:
        """Position of the last `fit` in its data."""
        return self.run_state.position

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, prefix: str | Path, epoch: int | str, save_optimizer_states: bool = False) -> None:
        """Write the checkpoint ``PREFIX-0003``, a folder, or ``PREFIX-best``.

        Collective: all workers must call it; rank 0 writes, and all return when the files are complete.

        Args:
            prefix: path without the number; its folder is created.
            epoch: number of epochs completed, 0 or more; or "best".
            save_optimizer_states: include the optimizer's state, which `resume` needs.

        Raises:
            RuntimeError: if ``save_optimizer_states`` is set before `init_optimizer`, or rank 0 could not write.
        """
        replicas, run_state = self.bound.replicas, self.run_state
        optimizer_state = self.optimizer_state if save_optimizer_states else None
        if self._options.shard is not None and optimizer_state is not None:  # collective, and rank 0 alone writes
            gathered = optimizer_state()
            optimizer_state = lambda: gathered  # noqa: E731
        may_differ = any(replicas.samples_seen) and (len(replicas.all) > 1 or self.workers.count > 1)
        saved = checkpoint.TrainingState(
            params=self.get_params(),
            position=asdict(run_state.position),
            step=run_state.step,
            replica_buffers=replicas.own_buffers() if may_differ else {},
            samples_seen=replicas.samples_seen,
            random=host_states(run_state.data_generator),
            compression_residuals=self.compression_residuals() if save_optimizer_states else {},
            loss_scale=self.loss_scale.state() if self.loss_scale is not None else None,
            load_balancer=self.load_balancer.state() if self.load_balancer is not None else None,
            worker_balance=self.worker_balance.state(),
            metadata=run_state.metadata,
            stateful={name: each.state() for name, each in run_state.stateful.items()},
            run=run_state.run,
        )
        checkpoint.save(saved, prefix, epoch, self.workers, optimizer_state)

    def resume(self, saved: checkpoint.TrainingState) -> None:
        """Restore the state of a checkpoint after `init_optimizer`; bitwise exact with equal contexts and workers.

        Collective, with the same checkpoint on all workers. The learning rate is restored unless this run's optimizer
        was created with another initial rate.

        Raises:
            ValueError: if the checkpoint has extra names, other shapes, another optimizer, or no optimizer state.
            RuntimeError: if names are missing from it; or before `init_optimizer`.
        """
        self._require_optimizer("resume()")
        with checkpoint.naming(saved.path):
            self._restore(saved.of_worker(self.workers.rank, self.workers.count))

    def _restore(self, saved: checkpoint.TrainingState) -> None:
        optimizer, replicas = self._require_optimizer("resume()"), self.bound.replicas
        state = saved.require_optimizer_state()
        params = self._matched(saved.params, False, False)
        optimizer.load_state(state)
        self._load_state(params)
        if self.learning_rate == state.initial_learning_rate:
            self.set_learning_rate(state.learning_rate)
        if optimizer.store is not None and optimizer.store.compresses:
            optimizer.store.load_compression_residuals(saved.compression_residuals)
        if self.loss_scale is not None and saved.loss_scale is not None:
            self.loss_scale.load_state(saved.loss_scale)
        if self.load_balancer is not None and saved.load_balancer is not None:
            self.load_balancer.load_state(saved.load_balancer)
        self.worker_balance.load_state(saved.worker_balance)
        self.run_state.step = saved.step
        self.run_state.position = Position(**saved.position)
        if len(saved.samples_seen) == len(replicas.all):
            replicas.set_own_buffers(saved.replica_buffers, saved.samples_seen)

    def follow_resume(self) -> None:
        """Make the calls of `resume` on a worker that joins an elastic job, whose servers keep their state."""
        optimizer = self._require_optimizer("follow_resume()")
        optimizer.load_state(optimizer.state())
        optimizer.assign_weights()

    def keep(self, of_loop: Any) -> None:
        """Save the state of this worker and of its loop between two steps, for a restart; see `KVStore.keep`."""
        assert isinstance(self._optimizer, StoreOptimizer)  # workers of other stores are not restarted alone
        replicas, run_state = self.bound.replicas, self.run_state
        state = {
            "untrained": [replica.untrained() for replica in replicas.all],
            "samples_seen": replicas.samples_seen,
            "step": run_state.step,
            "position": run_state.position,
            "loss_scale": self.loss_scale.state() if self.loss_scale is not None else None,
            "load_balancer": self.load_balancer.state() if self.load_balancer is not None else None,
        }
        self._optimizer.keep([state, of_loop])

    def kept(self) -> Any:
        """Restore the state that `keep` saved before a restart; return the loop's state, None if there is none."""
        assert isinstance(self._optimizer, StoreOptimizer)
        replicas, found = self.bound.replicas, self._optimizer.kept()
        if found is None:
            return None
        state, of_loop = found
        for replica, values, seen in zip(replicas.all, state["untrained"], state["samples_seen"], strict=True):
            for name, value in replica.untrained().items():
                value.copy_(values[name])
            replica.samples_seen = seen
        replicas.note()
        self.run_state.step, self.run_state.position = state["step"], state["position"]
        if self.loss_scale is not None:
            self.loss_scale.load_state(state["loss_scale"])
        if self.load_balancer is not None:
            self.load_balancer.load_state(state["load_balancer"])
        return of_loop


def _joined(arg_params: Params | None, aux_params: Params | None) -> Params:
    """Merge both; TypeError if one is not a mapping."""
    for name, params in (("arg_params", arg_params), ("aux_params", aux_params)):
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"{name} is {params!r:.80}; expected tensors by name")
    return {**(arg_params or {}), **(aux_params or {})}
