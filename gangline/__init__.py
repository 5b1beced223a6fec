"""Train one PyTorch network on unequal devices and get the weights that one device would give.

The names of this package, and the modules `callback`, `data`, `torch_backend` and `transfer`, are loaded when they are
first used, because importing torch takes seconds.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.collectives import hooks

if TYPE_CHECKING:
    from gangline import callback as callback
    from gangline import data as data
    from gangline import torch_backend as torch_backend
    from gangline import transfer as transfer
    from gangline.collectives.communicator import Communicator as Communicator
    from gangline.collectives.communicator import connect as connect
    from gangline.collectives.communicator import in_process as in_process
    from gangline.collectives.devices.device_group import DeviceGroup as DeviceGroup
    from gangline.collectives.errors import DeadNodeError as DeadNodeError
    from gangline.collectives.errors import GanglineError as GanglineError
    from gangline.collectives.errors import MismatchError as MismatchError
    from gangline.collectives.errors import ProtocolError as ProtocolError
    from gangline.collectives.errors import StallError as StallError
    from gangline.collectives.processes.spawning import spawn as spawn
    from gangline.collectives.work import Work as Work
    from gangline.kvstore.context import Context as Context
    from gangline.kvstore.context import contexts as contexts
    from gangline.kvstore.context import cpu as cpu
    from gangline.kvstore.context import gpu as gpu
    from gangline.kvstore.context import num_gpus as num_gpus
    from gangline.kvstore.errors import DiskFullError as DiskFullError
    from gangline.kvstore.interface import KVStore as KVStore
    from gangline.kvstore.local_steps import LocalSteps as LocalSteps
    from gangline.kvstore.optimizer.spec import OptimizerSpec as OptimizerSpec
    from gangline.kvstore.parameter_server.reader import Reader as Reader
    from gangline.kvstore.reducer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from gangline.kvstore.registry import create as create
    from gangline.kvstore.sparse import RowSparse as RowSparse
    from gangline.kvstore.trainer import Trainer as Trainer
    from gangline.kvstore.workload import split_batch as split_batch
    from gangline.launcher.functions import launch as launch
    from gangline.models.balance.evaluation import BalancedLoader as BalancedLoader
    from gangline.models.balance.evaluation import balance as balance
    from gangline.models.balance.gather_rows import gather_rows as gather_rows
    from gangline.models.batchnorm.distributed_batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from gangline.models.checkpoint.checkpoint import load_weights as load_weights
    from gangline.models.loop.schedules import TorchScheduler as TorchScheduler
    from gangline.models.metrics.metric import create_metric as create_metric
    from gangline.models.module import Module as Module
    from gangline.models.pipelines.pipeline import Pipeline as Pipeline
    from gangline.models.zoo import create_network as create_network

_MODULES = ("callback", "data", "torch_backend", "transfer")
_HOMES = {
    imported.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("gangline.")
    for imported in node.names
    if imported.asname is not None
}
"""Module that defines each public name, from the imports above, which type checkers read."""

__all__ = sorted([*_MODULES, *_HOMES])


def _imported_later(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that is imported when the function is first called."""
    return lambda *arguments: getattr(import_module(f"gangline.{module}"), name)(*arguments)


hooks.watch_torch = _imported_later("kvstore.torch_hooks", "watch_torch")
hooks.find_places = _imported_later("status.query", "places")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("gangline")
        except PackageNotFoundError:  # a checkout on PYTHONPATH
            return "unknown"
    if name in _MODULES:
        return import_module(f"gangline.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gangline' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
