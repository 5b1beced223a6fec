"""A network bound to contexts: its replicas and the executor that runs them, created on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gangline.collectives.context import Context
from gangline.collectives.host_memory import keep_freed_memory
from gangline.models.data.batches import Batch, call_network, evaluating, map_tensors
from gangline.models.executor.executor import Executor
from gangline.models.loss.summed_loss import SummedLoss
from gangline.models.replicas import Replica, Replicas


class BoundNetwork:
    """Replicas of a network on contexts, and their executor.

    Both are created by `bind`, or when they are first used, so that lazy layers can take their shapes from a batch.
    """

    def __init__(
        self,
        network: nn.Module,
        contexts: Sequence[Context],
        loads: Sequence[float],
        fixed: Sequence[str],
        loss: SummedLoss,
        *,
        sync_batchnorm: bool,
        dropout_by_sample: bool,
        **options: Any,
    ) -> None:
        """Record the arguments of `Replicas`, and those of `Executor`."""
        self.network = network
        self.sync_batchnorm, self.dropout_by_sample = sync_batchnorm, dropout_by_sample
        self._contexts = list(contexts)
        self._make_replicas = partial(Replicas, network, self._contexts, list(loads), list(fixed))
        options |= {"sync_batchnorm": sync_batchnorm, "dropout_by_sample": dropout_by_sample}
        self._make_executor: Callable[[Sequence[Replica]], Executor] = partial(Executor, loss=loss, **options)
        self._created: tuple[Replicas, Executor] | None = None

    @property
    def is_bound(self) -> bool:
        """True if the replicas exist."""
        return self._created is not None

    @property
    def replicas(self) -> Replicas:
        """The replicas; RuntimeError while lazy parameters have no shape."""
        return self.bind(None)[0]

    @property
    def executor(self) -> Executor:
        """The executor; RuntimeError while lazy parameters have no shape."""
        return self.bind(None)[1]

    def lazy_parameters(self) -> list[str]:
        """Return the names of parameters that have no shape yet."""
        return [
            name
            for name, parameter in self.network.named_parameters()
            if isinstance(parameter, nn.parameter.UninitializedParameter)
        ]

    def bind(self, data: Batch | None) -> tuple[Replicas, Executor]:
        """Return replicas and executor; create them, if they do not exist, for batches like ``data``."""
        if self._created is None:
            if any(context.device_type == "cpu" for context in self._contexts):
                keep_freed_memory()
            self._initialize_lazy_layers(data)
            replicas = self._make_replicas()
            self._created = replicas, self._make_executor(replicas.all)
        return self._created

    def _initialize_lazy_layers(self, data: Batch | None) -> None:
        """Run lazy layers once on the batch's first sample, which gives their parameters shapes."""
        lazy = self.lazy_parameters()
        if not lazy:
            return
        if data is None:
            raise RuntimeError(f"parameters {lazy} have no shape yet; call bind(data_shapes) or forward() first")
        with evaluating([self.network]), torch.no_grad():
            inputs = map_tensors(lambda tensor: tensor[:1].cpu(), data)
            call_network(self.network.cpu(), inputs)

    def close(self) -> None:
        """Stop the executor's threads and drop the replicas; the network keeps its weights."""
        if self._created is not None:
            self._created[1].close()
        self._created = None
