"""Module: a network trained on one or several contexts, as one would train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gangline.models.checkpoint import checkpoint
from gangline.models.data.batches import move, zeros_of
from gangline.models.initializer import InitializerSpec, initialise
from gangline.models.loop import evaluation, fit
from gangline.models.steps import Steps

Params = Mapping[str, torch.Tensor]


@dataclass
class Position:
    """Where training stands: what a run that goes on must know."""

    epoch: int = 0
    """Epochs completed."""
    batch: int = 0
    """Batches done of the epoch that runs."""
    plan: dict[str, Any] = field(default_factory=dict)
    """How that epoch is read: seed, shuffle, batch size, number of samples."""
    random: dict[str, Any] = field(default_factory=dict)
    """The host's random states as that epoch began."""


class Module(Steps):
    """A network trained on one or several contexts as one would train it.

    Each context with a load holds a replica; a batch is split over them by ``work_load_list``, each share's loss
    counts by what it holds of the whole batch, gradients are summed and the weights updated once. The network
    itself is the first replica, moved to its context.

    Life: ``bind`` (the first batch does it) -> ``init_params`` (the network's own values serve) ->
    ``init_optimizer`` -> ``forward``, ``backward``, ``update``, over and over. `fit`, `score` and `predict` do it all.
    """

    data_generator: torch.Generator | None = None
    """A DataLoader's own, of the running `fit`."""
    _params_given = False

    @cached_property
    def about(self) -> dict[str, Any]:
        """Plain data of the user's own that a checkpoint holds for its readers, such as the names of the classes."""
        return {}

    @cached_property
    def companions(self) -> dict[str, Any]:
        """What else has a ``state()`` that a checkpoint holds, by name: the last fit's schedule and callbacks."""
        return {}

    @cached_property
    def position(self) -> Position:
        """Where training stands."""
        return Position()

    # -- parameters ---------------------------------------------------------------------------------------------

    def init_params(
        self,
        initializer: InitializerSpec | None = None,
        arg_params: Params | None = None,
        allow_missing: bool = False,
        allow_extra: bool = False,
        force_init: bool = False,
    ) -> None:
        """Give the parameters values: those of ``arg_params``, else the initializer's, else the network's own.

        Args:
            initializer: a name of MXNet's ("xavier", "uniform", ...), (name, arguments), or a function that
                fills a tensor; biases become 0 and normalisation layers what torch begins with.
            arg_params: tensors by state_dict name; a leading ``module.`` on all of them is dropped.
            allow_missing: let names that ``arg_params`` lacks take the initializer's or their own values.
            allow_extra: ignore names that the network does not have.
            force_init: do it again though it was done.

        Raises:
            RuntimeError: names are missing from ``arg_params``.
            ValueError: it has extra ones, or a tensor of another shape.
        """
        if self._params_given and not force_init:
            self.logger.warning("the parameters are initialised already; init_params() is ignored (force_init=True)")
            return
        network = self.replicas.first.network
        state = {}
        if arg_params is not None:
            state = checkpoint.matched(network, arg_params, allow_missing, allow_extra)
        if initializer is not None:
            initialise(network, initializer, skip=set(state))
            state = network.state_dict() | state
        self._params_given = True
        self._load_state(state)

    def get_params(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers on the host, by state_dict name; running statistics averaged over replicas.

        Those are this worker's; as an epoch ends, and in a checkpoint, the average is over all workers.
        """
        return self.replicas.state_dict()

    def set_params(self, params: Params, allow_missing: bool = False, allow_extra: bool = False) -> None:
        """Replace parameters and buffers everywhere, in the store too.

        In a job of several workers all of them call it, and rank 0's win.

        Raises:
            RuntimeError: names are missing.
            ValueError: extra ones, or a tensor of another shape.
        """
        self._load_state(checkpoint.matched(self.replicas.first.network, params, allow_missing, allow_extra))

    def _load_state(self, state: Params) -> None:
        self.replicas.average_buffers(self.workers)
        self.replicas.load_state_dict(dict(state))
        if self._updates is not None:
            self._updates.take_over_weights()
            self.take_over_first()

    def summary(self, data_shapes: Any) -> str:
        """A table of the network's layers, output shapes and parameter counts, by torchinfo.

        Args:
            data_shapes: the shape of a batch's data, as `bind` takes it.
        """
        import torchinfo

        data = zeros_of(data_shapes, "data_shapes")
        first = self._make_replicas(data).first
        return str(torchinfo.summary(first.network, input_data=move(data, first.context.torch_device), verbose=0))

    def average_statistics(self) -> None:
        """Give every replica the average of running statistics, by samples seen; `fit` does it after each epoch.

        In a job of several workers all of them call it; those that are not in step get the store's weights, too.
        """
        self.replicas.average_buffers(self.workers)
        if self._updates is not None and self.workers.count > 1 and not self.workers.in_step:
            self._updates.pull_weights()

    # -- whole loops, written on the verbs ----------------------------------------------------------------------

    fit = fit.fit
    score = evaluation.score
    predict = evaluation.predict
    iter_predict = evaluation.iter_predict

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, prefix: str | Path, epoch: int | str, save_optimizer_states: bool = False) -> None:
        """Write ``PREFIX-%04d`` files, or ``PREFIX-best`` for "best"; see `gangline.models.checkpoint.checkpoint`.

        In a job of several workers all of them call it; rank 0 writes, and all return when that is done.
        """
        checkpoint.save(self, prefix, epoch, save_optimizer_states)

    @classmethod
    def load(
        cls,
        prefix: str | Path,
        epoch: int | str,
        *,
        network: nn.Module,
        load_optimizer_states: bool = False,
        **options: Any,
    ) -> Module:
        """A module with the parameters of a checkpoint.

        Args:
            prefix: as given to `save_checkpoint`.
            epoch: likewise.
            network: the network the checkpoint is of; code is not part of a checkpoint.
            load_optimizer_states: have `init_optimizer` take over the checkpoint's optimizer state.
            options: further arguments of `Module`.

        Raises:
            FileNotFoundError: no such checkpoint.
            ValueError: a torn or foreign file, extra names, other shapes, or no optimizer state in it.
            RuntimeError: names are missing from it.
        """
        saved = checkpoint.read(prefix, epoch)
        module = cls(network, **options)
        if module.has_lazy_parameters:
            network.load_state_dict(saved.params)  # which gives them their shapes
        module.set_params(saved.params)
        module.about.update(saved.about)
        module._params_given = True
        if load_optimizer_states:
            module._pending_state = saved.needed_optimizer_state()
        return module

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Stand where a checkpoint stood; after `init_optimizer`, and with its contexts and workers, bit for bit.

        In a job of several workers all of them call it, with the same checkpoint.

        The learning rate is taken over too, unless this run's optimizer was given another one to begin with.

        Raises:
            ValueError: extra names, other shapes, another optimizer, or no optimizer state in it.
            RuntimeError: names are missing from it; or before ``init_optimizer``.
        """
        updates = self._needs_updates("resume()")
        saved = saved.of_worker(self.workers.rank, self.workers.count)
        state = saved.needed_optimizer_state()
        params = checkpoint.matched(self.replicas.first.network, saved.params, False, False)
        updates.load_state(state)
        self._load_state(params)
        if self.learning_rate == state.initial_learning_rate:
            self.set_learning_rate(state.learning_rate)
        updates.load_compression_residuals(saved.compression_residuals)
        if self.loss_scale is not None and saved.loss_scale is not None:
            self.loss_scale.load_state(saved.loss_scale)
        if self.auto is not None and saved.auto is not None:
            self.auto.load_state(saved.auto)
            self.work_load_list = self.auto.loads
        self._step = saved.step
        self.position = Position(**saved.position)
        if len(saved.samples_seen) == len(self.replicas.all):
            self.replicas.set_own_buffers(saved.replica_buffers, saved.samples_seen)

    def replica_buffers(self) -> tuple[dict[str, list[torch.Tensor]], list[int]]:
        """Each replica's buffers where they may differ, by name, and the samples it has seen since they were equal."""
        seen = self.replicas.samples_seen
        may_differ = any(seen) and (len(seen) > 1 or self.workers.count > 1)
        return (self.replicas.own_buffers() if may_differ else {}), seen
