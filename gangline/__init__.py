"""Train one PyTorch network on unequal devices and get the weights that one device would give.

Every public name is importable from here; each is loaded when it is first used, because importing torch takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.collectives import algorithms as algorithms
    from gangline.collectives import environments as environments
    from gangline.collectives import torch_backend as torch_backend
    from gangline.collectives.communicator import Communicator as Communicator
    from gangline.collectives.communicator import connect as connect
    from gangline.collectives.communicator import in_process as in_process
    from gangline.collectives.context import Context as Context
    from gangline.collectives.context import contexts as contexts
    from gangline.collectives.context import cpu as cpu
    from gangline.collectives.context import gpu as gpu
    from gangline.collectives.context import num_gpus as num_gpus
    from gangline.collectives.devices.device_group import DeviceGroup as DeviceGroup
    from gangline.collectives.errors import DeadNodeError as DeadNodeError
    from gangline.collectives.errors import DiskFullError as DiskFullError
    from gangline.collectives.errors import GanglineError as GanglineError
    from gangline.collectives.errors import MismatchError as MismatchError
    from gangline.collectives.errors import ProtocolError as ProtocolError
    from gangline.collectives.errors import StallError as StallError
    from gangline.collectives.processes.spawning import spawn as spawn
    from gangline.collectives.torch_backend import Samples as Samples
    from gangline.collectives.torch_backend import weighted_hook as weighted_hook
    from gangline.collectives.work import Work as Work
    from gangline.collectives.workload import split_batch as split_batch
    from gangline.kvstore.compression.hook import compress_hook as compress_hook
    from gangline.kvstore.interface import KVStore as KVStore
    from gangline.kvstore.launch.functions import launch as launch
    from gangline.kvstore.optimizer.spec import OptimizerSpec as OptimizerSpec
    from gangline.kvstore.reducer.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
    from gangline.kvstore.registry import create as create
    from gangline.kvstore.registry import register as register
    from gangline.kvstore.sparse import RowSparse as RowSparse
    from gangline.kvstore.trainer import Trainer as Trainer
    from gangline.models.balance.balanced_loader import BalancedLoader as BalancedLoader
    from gangline.models.balance.balanced_loader import balance as balance
    from gangline.models.batchnorm.distributed_batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from gangline.models.checkpoint.checkpoint import load_weights as load_weights
    from gangline.models.data.datasets import digits as digits
    from gangline.models.data.datasets import image_folder as image_folder
    from gangline.models.data.datasets import raw_digits as raw_digits
    from gangline.models.data.datasets import synthetic as synthetic
    from gangline.models.data.elastic import ElasticBatches as ElasticBatches
    from gangline.models.data.images.augmentation import Augmentation as Augmentation
    from gangline.models.data.images.folder import ImageFolder as ImageFolder
    from gangline.models.data.images.patches import ImagePatches as ImagePatches
    from gangline.models.data.images.patches import class_weights as class_weights
    from gangline.models.data.images.splitting import split_each_label as split_each_label
    from gangline.models.data.sources import read_speed as read_speed
    from gangline.models.loop.callbacks import Checkpoint as Checkpoint
    from gangline.models.loop.callbacks import ProgressBar as ProgressBar
    from gangline.models.loop.callbacks import Speedometer as Speedometer
    from gangline.models.loop.callbacks import do_checkpoint as do_checkpoint
    from gangline.models.loop.callbacks import module_checkpoint as module_checkpoint
    from gangline.models.loop.monitor import Monitor as Monitor
    from gangline.models.loop.stopping import EarlyStopping as EarlyStopping
    from gangline.models.loop.stopping import stop_on as stop_on
    from gangline.models.loop.torch_schedulers import TorchScheduler as TorchScheduler
    from gangline.models.loss.gather_rows import gather_rows as gather_rows
    from gangline.models.metrics.metric import create_metric as create_metric
    from gangline.models.module import Module as Module
    from gangline.models.pipelines.pipeline import Pipeline as Pipeline
    from gangline.models.reports.page import TrainingProgress as TrainingProgress
    from gangline.models.reports.page import read_progress as read_progress
    from gangline.models.reports.tensorboard import TensorBoard as TensorBoard
    from gangline.models.zoo import create_network as create_network
    from gangline.models.zoo.transfer import freeze_until as freeze_until
    from gangline.models.zoo.transfer import learning_rate_factors as learning_rate_factors
    from gangline.models.zoo.transfer import pretrained as pretrained
    from gangline.models.zoo.transfer import replace_last_layer as replace_last_layer
    from gangline.models.zoo.transfer import scale_batch as scale_batch
    from gangline.trials import Trial as Trial
    from gangline.trials import sweep as sweep

_HOMES = {
    "collectives.communicator": ("Communicator", "connect", "in_process"),
    "collectives.context": ("Context", "contexts", "cpu", "gpu", "num_gpus"),
    "collectives.devices.device_group": ("DeviceGroup",),
    "collectives.errors": (
        "DeadNodeError",
        "DiskFullError",
        "GanglineError",
        "MismatchError",
        "ProtocolError",
        "StallError",
    ),
    "collectives.processes.spawning": ("spawn",),
    "collectives.torch_backend": ("Samples", "weighted_hook"),
    "collectives.work": ("Work",),
    "collectives.workload": ("split_batch",),
    "kvstore.compression.hook": ("compress_hook",),
    "kvstore.interface": ("KVStore",),
    "kvstore.launch.functions": ("launch",),
    "kvstore.optimizer.spec": ("OptimizerSpec",),
    "kvstore.reducer.distributed_optimizer": ("DistributedOptimizer",),
    "kvstore.registry": ("create", "register"),
    "kvstore.sparse": ("RowSparse",),
    "kvstore.trainer": ("Trainer",),
    "models.batchnorm.distributed_batchnorm": ("convert_sync_batchnorm",),
    "models.checkpoint.checkpoint": ("load_weights",),
    "models.data.datasets": ("digits", "image_folder", "raw_digits", "synthetic"),
    "models.data.elastic": ("ElasticBatches",),
    "models.data.images.augmentation": ("Augmentation",),
    "models.data.images.folder": ("ImageFolder",),
    "models.data.images.patches": ("ImagePatches", "class_weights"),
    "models.data.images.splitting": ("split_each_label",),
    "models.data.sources": ("read_speed",),
    "models.loop.callbacks": ("Checkpoint", "ProgressBar", "Speedometer", "do_checkpoint", "module_checkpoint"),
    "models.loop.monitor": ("Monitor",),
    "models.loop.stopping": ("EarlyStopping", "stop_on"),
    "models.loop.torch_schedulers": ("TorchScheduler",),
    "models.metrics.metric": ("create_metric",),
    "models.module": ("Module",),
    "models.pipelines.pipeline": ("Pipeline",),
    "models.reports.page": ("TrainingProgress", "read_progress"),
    "models.reports.tensorboard": ("TensorBoard",),
    "models.balance.balanced_loader": ("BalancedLoader", "balance"),
    "models.loss.gather_rows": ("gather_rows",),
    "models.zoo": ("create_network",),
    "models.zoo.transfer": ("freeze_until", "learning_rate_factors", "pretrained", "replace_last_layer", "scale_batch"),
    "trials": ("Trial", "sweep"),
}
"""Public names by the module that defines them; type checkers read the imports above."""
_MODULES = ("algorithms", "environments", "torch_backend")

__all__ = sorted([*_MODULES, *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gangline")
    if name in _MODULES:
        return import_module(f"gangline.collectives.{name}")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"gangline.{module}"), name)
    raise AttributeError(f"module 'gangline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
