"""Interface of a module to training loops, callbacks, metrics and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gangline.models.balance.worker_balance import WorkerBalance
from gangline.models.executor.bound_network import BoundNetwork
from gangline.models.loss.loss_scale import LossScale
from gangline.models.loss.summed_loss import SummedLoss
from gangline.models.run_state import RunState
from gangline.models.workers import Workers

OptimizerRequest = tuple[Any, Any, Mapping[str, Any]]
"""Arguments of `init_optimizer`: (kvstore, optimizer, optimizer_params)."""


class Trainable(Protocol):
    """The part of `Module` that loops, callbacks and metrics use; see there for the methods."""

    network: nn.Module
    loss: SummedLoss
    logger: logging.Logger
    grad_req: str
    bound: BoundNetwork
    run_state: RunState
    loss_scale: LossScale | None

    @property
    def workers(self) -> Workers: ...  # noqa: D102
    @property
    def worker_balance(self) -> WorkerBalance: ...  # noqa: D102
    @property
    def work_load_list(self) -> list[float]: ...  # noqa: D102
    @property
    def seconds_waiting(self) -> float: ...  # noqa: D102
    @property
    def normalizer(self) -> float: ...  # noqa: D102
    @property
    def optimizer_initialized(self) -> bool: ...  # noqa: D102
    @property
    def optimizer_request(self) -> OptimizerRequest | None: ...  # noqa: D102
    @property
    def divides_weights(self) -> bool: ...  # noqa: D102
    @property
    def learning_rate(self) -> float: ...  # noqa: D102
    def init_params(  # noqa: D102
        self,
        initializer: Any = None,
        arg_params: Mapping[str, torch.Tensor] | None = None,
        aux_params: Mapping[str, torch.Tensor] | None = None,
        *,
        allow_missing: bool = False,
        allow_extra: bool = False,
        force_init: bool = False,
    ) -> None: ...
    def init_optimizer(self, kvstore: Any, optimizer: Any, optimizer_params: Any) -> None: ...  # noqa: D102
    def set_learning_rate(self, learning_rate: float) -> None: ...  # noqa: D102
    def forward(self, data: Any, label: Any = None, is_train: bool | None = None) -> None: ...  # noqa: D102
    def forward_backward(self, data: Any, label: Any = None) -> None: ...  # noqa: D102
    def forward_backward_update(self, data: Any, label: Any = None) -> None: ...  # noqa: D102
    def update(self) -> None: ...  # noqa: D102
    def drop_gradients(self) -> None: ...  # noqa: D102
    def get_outputs(self) -> Any: ...  # noqa: D102
    def labelled_outputs(self) -> list[tuple[Any, Any]]: ...  # noqa: D102
    def get_loss(self) -> torch.Tensor: ...  # noqa: D102
    def get_params(self) -> dict[str, torch.Tensor]: ...  # noqa: D102
    def install_monitor(self, monitor: Any) -> None: ...  # noqa: D102
    def begin_epoch(self) -> None: ...  # noqa: D102
    def average_statistics(self) -> None: ...  # noqa: D102
    def save_checkpoint(self, prefix: str | Path, epoch: int | str, save_optimizer_states: bool = False) -> None: ...  # noqa: D102
    def resume(self, saved: Any) -> None: ...  # noqa: D102
    def leave(self) -> None: ...  # noqa: D102
